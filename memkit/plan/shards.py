"""What one of several devices holds of a model that is split between them layer by layer, as by FSDP2: numbers only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memkit.core.sizes import ALIGNMENT_BYTES, check_bytes, rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedParameter:
    """One parameter, split along its first dimension."""

    shape: tuple[int, ...]
    """Shape of the whole parameter, with at least one dimension."""
    itemsize: int
    gathered_itemsize: int | None = None
    """Bytes of an element while gathered; None if unchanged."""
    is_trained: bool = True
    """Whether it requires grad, and so has a gradient and optimizer states."""

    def __post_init__(self) -> None:
        if not self.shape or min(self.shape) < 0:
            raise ValueError(f"shape of a sharded parameter has one dimension at least; found {self.shape}")
        check_bytes("itemsize", self.itemsize)

    def shard_numel(self, num_ranks: int) -> int:
        """Return the elements of the largest shard, the first rank's. All ranks allocate as many.

        Source: `torch.chunk`, by which `torch.distributed.tensor.Shard(0)` splits.
        """
        return -(-self.shape[0] // num_ranks) * math.prod(self.shape[1:])

    def shard_bytes_in_chunk(self, num_ranks: int) -> int:
        """Return the bytes of that shard among others that are copied to the device as one: a multiple of 512."""
        return rounded(self.shard_numel(num_ranks) * self.itemsize, ALIGNMENT_BYTES)

    def gathered_bytes(self, num_ranks: int) -> int:
        """Return its bytes while gathered: the shards of all ranks, with the padding of the last."""
        itemsize = self.itemsize if self.gathered_itemsize is None else self.gathered_itemsize
        return num_ranks * self.shard_numel(num_ranks) * itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """What the first rank, which holds the most, takes. Without activations and temporaries."""

    num_ranks: int
    param_bytes: int
    """Shards of all parameters."""
    grad_bytes: int
    """Shards of the gradients of trained parameters."""
    state_bytes: int
    """The optimizer's states of these shards."""
    gathered_bytes: int
    """The most that is gathered at once: parameters in no layer, and the layers in use or gathered ahead."""
    is_offloaded: bool = False
    """Whether shards of parameters, gradients and states are in host memory."""
    brought_bytes: int = 0
    """The most bytes on the device of shards that live in host memory: two layers, on their way to be gathered."""

    @property
    def total_bytes(self) -> int:
        return (
            self.param_bytes + self.grad_bytes + self.state_bytes + self.gathered_bytes + self.brought_bytes - self.host_bytes
        )

    @property
    def host_bytes(self) -> int:
        """Bytes of this rank in host memory, which all ranks of a host share."""
        return self.param_bytes + self.grad_bytes + self.state_bytes if self.is_offloaded else 0


def plan_shards(
    layers: Sequence[Iterable[ShardedParameter]],
    rest: Iterable[ShardedParameter] = (),
    *,
    num_ranks: int,
    prefetch: int = 1,
    states_per_element: int = 2,
    state_itemsize: int | None = None,
    offload: bool = False,
) -> ShardPlan:
    """Return what one rank holds of a model that `shard` has split.

    Args:
        layers: the parameters of each layer, in the order in which they are gathered.
        rest: parameters in no layer, which stay gathered from a forward to its backward.
        num_ranks: how many ranks it is split between.
        prefetch: how many layers ahead are gathered.
        states_per_element: optimizer states per trained element: two for AdamW. Single numbers for a whole parameter, such as
            step counts, are left out.
        state_itemsize: bytes of a state's element; by default that of the parameter.
        offload: whether shards are in host memory: `shard(offload_policy=CPUOffloadPolicy())`.

    Raises:
        ValueError: a count is out of range.

    Example:
        >>> from memkit.plan.shards import ShardedParameter, plan_shards
        >>> weight = ShardedParameter(shape=(1000, 10), itemsize=4)
        >>> plan_shards([[weight]] * 4, num_ranks=8).param_bytes
        20000
    """
    for name, count, least in (
        ("num_ranks", num_ranks, 1),
        ("prefetch", prefetch, 0),
        ("states_per_element", states_per_element, 0),
    ):
        if count < least:
            raise ValueError(f"{name} is {least} or more; found {count}")
    groups = [list(layer) for layer in layers]
    outside = list(rest)
    every = [item for group in (*groups, outside) for item in group]
    trained = [item for item in every if item.is_trained]
    sizes_bytes = [sum(item.gathered_bytes(num_ranks) for item in group) for group in groups]
    at_once = [sum(sizes_bytes[first : first + prefetch + 1]) for first in range(len(groups))]
    chunks = [sum(item.shard_bytes_in_chunk(num_ranks) for item in group) for group in (outside, *groups)]
    return ShardPlan(
        num_ranks=num_ranks,
        param_bytes=sum(item.shard_numel(num_ranks) * item.itemsize for item in every),
        grad_bytes=sum(item.shard_numel(num_ranks) * item.itemsize for item in trained),
        state_bytes=sum(
            states_per_element * item.shard_numel(num_ranks) * (state_itemsize or item.itemsize) for item in trained
        ),
        gathered_bytes=max(at_once, default=0) + sum(item.gathered_bytes(num_ranks) for item in outside),
        is_offloaded=offload,
        brought_bytes=max(map(sum, zip(chunks, [*chunks[1:], 0], strict=True))) if offload else 0,
    )
