"""A layer whose shards are in host memory: its chunk there, and the device buffers that chunks are copied to."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memkit import torch_private
from memkit.device.base import Device, Event, Stream
from memkit.errors import MissingTorchNameError
from memkit.storages import byte_view, tensor_over
from memkit.transfer.arena import Arena
from memkit.transfer.spans import ALIGNMENT_BYTES, Span, rounded
from memkit.transfer.turns import TURN_BYTES

if TYPE_CHECKING:
    from memkit.steppers import ReducedSteps


@dataclass(frozen=True, slots=True)
class _Region:
    """The place of one parameter's shard in its layer's chunk."""

    start: int
    numel: int
    dtype: torch.dtype

    def over(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the shard, [numel], in a storage that has the bytes of the chunk."""
        offset = self.start // self.dtype.itemsize
        return tensor_over(storage, self.dtype, offset=offset, size=(self.numel,), stride=(1,))


Layout = tuple[_Region, ...]
"""Where all shards of a layer are in its chunk. Layers whose shards lie alike have the same one, and not only an equal one."""


class Buffer:
    """Device memory for chunks of one layout, one after the other, with views of the shards that are made once.

    Args:
        storage: goes back to `home`. The next chunk is copied here behind what that stream has to do then, so it has waited for
            all that has read the one before.
    """

    __slots__ = ("done", "home", "layout", "parts", "shards", "storage")

    def __init__(self, storage: torch.UntypedStorage, layout: Layout, home: Stream) -> None:
        self.storage, self.layout, self.home = storage, layout, home
        self.parts = byte_view(storage).split(TURN_BYTES)
        """What the pieces of a chunk are copied to."""
        self.shards = [region.over(storage) for region in layout]
        """Each as [numel]."""
        self.done: Event
        """The bytes of the chunk that was put on the lane last are there."""


data_of = attrgetter(torch_private.FSDP_SHARD)
"""Of one of FSDP2's parameters, what it gathers: filled up to the length of all ranks, as [numel]."""
_own_of = attrgetter(f"sharded_param.{torch_private.LOCAL_TENSOR}")
"""What is the rank's own of that, in the shape that it has: what the optimizer steps. It may be nothing."""


class HostLayer:
    """What FSDP2 gathers as one, whose shards on this rank lie side by side in pinned host memory.

    Args:
        group: FSDP2's parameters that are gathered together.
        device: where they are gathered.
        arena: has the memory.
        layouts: those of all layers, each under itself.
    """

    def __init__(self, group: Any, device: Device, arena: Arena, layouts: dict[Layout, Layout]) -> None:
        self.group = group
        self.device = device
        self.brought: Buffer | None = None
        """Where its chunk is on the device, or comes to, until FSDP2 has read it."""
        self.layout: Layout = ()
        self._arena, self._layouts = arena, layouts
        self._span: Span | None = None
        self.pieces: tuple[Tensor, ...] = ()
        """The bytes of its chunk, in as many parts as they are copied in."""
        self._memories: list[tuple[Span, weakref.ref[Any]]] = []
        """Chunks that it has had, each with its memory, which is there as long as a tensor is in it."""
        self.last_read: Event | None = None
        """Behind the last copy of its chunk."""
        self._addresses: tuple[list[int], list[int]] = [], []
        """Where each shard was put: what is gathered, and what is this rank's own of it."""
        self.steppers: Collection[ReducedSteps] = ()

    @property
    def is_gathered(self) -> bool:
        """Whether FSDP2 has gathered it, or has begun to."""
        return self.group.is_unsharded or getattr(self.group, torch_private.FSDP_GATHER) is not None

    # For a `StateOffload` that steps its shards: see `memkit.steppers.ReducedLayer`

    def begin_steps(self, steps: ReducedSteps) -> None:
        self.steppers = weakref.WeakSet([*self.steppers, steps])

    def end_steps(self, steps: ReducedSteps) -> None:
        others = [other for other in self.steppers if other is not steps]
        self.steppers = weakref.WeakSet(others) if others else ()

    def shards(self) -> list[Tensor]:
        return [parameter.sharded_param for parameter in self.group.fsdp_params]

    def landing(self) -> list[Any]:
        events = [getattr(parameter, torch_private.FSDP_LANDED) for parameter in self.group.fsdp_params]
        return [event for event in events if event is not None]  # none where FSDP2 has waited itself

    # Its memory

    def chunk(self) -> Span:
        """Return its host memory, in which all shards are.

        A shard may have come to lie elsewhere: what had no data when it was sharded, and what was loaded with `assign=True`,
        moved or cast since.
        """
        parameters = self.group.fsdp_params
        flat, own = map(Tensor.data_ptr, map(data_of, parameters)), map(Tensor.data_ptr, map(_own_of, parameters))
        if self._addresses != ([*flat], [*own]):
            self._move_in()
        assert self._span is not None
        return self._span

    @torch.no_grad()
    def _move_in(self) -> None:
        """Have the shards lie in the chunk. What the caller has kept of those that lay elsewhere stays what it was."""
        parameters, regions, end = self.group.fsdp_params, [], 0
        for flat in map(data_of, parameters):
            regions.append(_Region(end, flat.numel(), flat.dtype))
            end += rounded(flat.nbytes, ALIGNMENT_BYTES)
        layout = self._layouts.setdefault(tuple(regions), tuple(regions))
        with torch.inference_mode(False):
            if self._span is None or layout is not self.layout:
                self._span = None
                self._give_left()
                (self._span,) = self._arena.take_pinned_as_one([end])
                assert self._span.whole is not None
                self.pieces = self._span.whole.split(TURN_BYTES)
                self.layout, self._addresses = layout, ([0] * len(layout), [0] * len(layout))
            assert self._span.whole is not None
            memory, (flats, owns) = self._span.whole.numpy(), self._addresses
            self._memories.append((self._span, weakref.ref(memory)))
            for number, (region, parameter) in enumerate(zip(layout, parameters, strict=True)):
                flat, own = data_of(parameter), _own_of(parameter)
                if (flat.data_ptr(), own.data_ptr()) == (flats[number], owns[number]):
                    continue
                # A storage of its own, so that saving a shard writes no more than its bytes.
                num_bytes = region.numel * region.dtype.itemsize
                moved = torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=region.start).view(region.dtype)
                moved.copy_(flat)
                moved_own = moved[: own.numel()].view(own.shape)
                moved_own.copy_(own)  # which torch may have put elsewhere by itself, to pin it
                setattr(parameter, torch_private.FSDP_SHARD, moved)
                setattr(parameter.sharded_param, torch_private.LOCAL_TENSOR, moved_own)
                flats[number], owns[number] = moved.data_ptr(), moved_own.data_ptr()

    def _give_left(self) -> None:
        """Give back the chunks that it has had and in which no tensor is any more, also none that the caller has kept."""
        self._memories, before = [each for each in self._memories if each[1]() is not None], self._memories
        for span in dict.fromkeys(span for span, _ in before):
            if all(span is not held for held, _ in self._memories):
                self._arena.give(span, self.last_read)
        self._arena.trim_gaps()


def group_of(module: Any) -> Any:
    """Return what FSDP2 gathers as one for a module, None for one without parameters of its own.

    Raises:
        MissingTorchNameError: a name of FSDP2's is not there.
    """
    to_state, to_group = torch_private.FSDP_GROUP
    group = _named(_named(module, to_state)(), to_group)
    if group is not None:
        names = torch_private.FSDP_GATHER, torch_private.FSDP_PHASE, torch_private.FSDP_REDUCE
        for name in (*torch_private.FSDP_PARTS, *names):
            _named(group, name)
        _named(group.comm_ctx, "get_all_gather_streams")
        for parameter in group.fsdp_params:
            _named(parameter, torch_private.FSDP_SHARD)
            _named(parameter, torch_private.FSDP_LANDED)
            _named(parameter.sharded_param, torch_private.LOCAL_TENSOR)
    return group


def _named(owner: object, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        symbol = f"{type(owner).__qualname__}.{name}"
        raise MissingTorchNameError(f"found torch {torch.__version__} without {symbol}", symbol=symbol) from None
