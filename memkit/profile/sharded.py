"""Models sharded by FSDP2: this rank's parameters, gathers during a step, and runs that all ranks make together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from memkit.core import torch_private
from memkit.core.tensors import storage_key, storages_of
from memkit.core.torch_state import fsdp_groups, fsdp_modules, is_dtensor, local_of
from memkit.errors import MissingTorchNameError, ProfileError

_Value = TypeVar("_Value")

INSTEAD = (
    "what one rank takes is said by memkit plan --ranks N, and memkit.plan.plan_shards, and a profile with "
    'device="meta" before sharding says the rest'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInfo:
    """How much of a sharded model one rank has, after `memkit.shard` or `fully_shard`."""

    rank: int
    """The rank of this process."""
    num_ranks: int
    """The number of ranks of the process group."""
    num_shards: int
    """How many ranks each parameter is split between: fewer than `num_ranks` if shards are replicated."""
    shard_bytes: int
    """Bytes of this rank's part of the parameters. `MemoryReport.param_bytes` also has the padding of the last shard."""
    whole_bytes: int
    """Bytes of all these parameters unsharded."""
    gathered_bytes: int | None
    """Most bytes of unsharded parameters that were gathered at once, with the communication buffers. None if `torch.compile`
    runs a part of the model, whose inside can't be seen."""


@dataclass(slots=True)
class _Group:
    storages: list[torch.UntypedStorage] = field(default_factory=list)
    seen_bytes: int = 0


class GatheredParameters:
    """Whole parameters, which FSDP2 fills before a layer and empties after it, without an op that shows it."""

    def __init__(self, groups: Sequence[Any] = ()) -> None:
        self._unknown: list[tuple[Any, _Group]] = []
        self._groups = [_Group() for _ in groups]
        self._shards: dict[int, Tensor] = {}
        for group, found in zip(groups, self._groups, strict=True):
            items = sorted(group.fsdp_params, key=lambda item: -item.sharded_param.numel())
            self._unknown += [(item, found) for item in items]

    def __contains__(self, storage: object) -> bool:
        return isinstance(storage, torch.UntypedStorage) and self.shard_of(storage_key(storage)) is not None

    def shard_of(self, key: int) -> Tensor | None:
        if key not in self._shards:
            self._look()
        return self._shards.get(key)

    def resized(self) -> Iterator[torch.UntypedStorage]:
        """Yield the storages that may have been filled or emptied since the last call."""
        self._look()
        for group in self._groups:
            if group.storages and group.storages[0].nbytes() != group.seen_bytes:
                group.seen_bytes = group.storages[0].nbytes()
                yield from group.storages

    def _look(self) -> None:
        unknown, self._unknown = self._unknown, []
        for item, group in unknown:
            whole = getattr(item, torch_private.FSDP_GATHERED, None)
            if whole is None:
                self._unknown.append((item, group))
                continue
            for storage in storages_of(whole.detach()):
                self._shards[storage_key(storage)] = item.sharded_param
                group.storages.append(storage)
                group.seen_bytes = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    modules: tuple[Any, ...] = ()
    groups: tuple[Any, ...] = ()
    gathered: GatheredParameters = field(default_factory=GatheredParameters)

    def __bool__(self) -> bool:
        return bool(self.modules)

    def parameters(self) -> Iterator[Any]:
        yield from dict.fromkeys(item.sharded_param for group in self.groups for item in group.fsdp_params)

    @property
    def device(self) -> torch.device:
        return torch.device(self.groups[0].device)

    @property
    def on_host(self) -> tuple[Tensor, ...]:
        """The parameters that `CPUOffloadPolicy` keeps in host memory, if they are gathered elsewhere."""
        return tuple(item for item in self.parameters() if item.device.type != self.device.type)

    def gather_once(self) -> None:
        """Gather and free each group: FSDP2 keeps the storages of the first gather."""
        for module in self.modules:
            module.unshard()
            module.reshard()

    def info(self, gathered_bytes: int | None) -> ShardInfo:
        import torch.distributed as dist

        parameters = list(self.parameters())
        return ShardInfo(
            rank=dist.get_rank(),
            num_ranks=dist.get_world_size(),
            num_shards=max(_num_shards(parameter) for parameter in parameters),
            shard_bytes=sum(local_of(parameter).nbytes for parameter in parameters),
            whole_bytes=sum(parameter.numel() * parameter.itemsize for parameter in parameters),
            gathered_bytes=gathered_bytes,
        )


NOTHING_SHARDED = Shards()


def _num_shards(parameter: Any) -> int:
    mesh, placements = parameter.device_mesh, enumerate(parameter.placements)
    return math.prod(mesh.size(dim) for dim, placement in placements if placement.is_shard())


def find_shards(modules: Sequence[nn.Module]) -> Shards:
    """Return the shards of some modules, with every parameter a shard again; raise if a profile would be wrong or do damage."""
    sharded = fsdp_modules(modules)
    groups = tuple(dict.fromkeys(group for module in sharded for group in fsdp_groups(module)))  # modules may share one
    if not groups:
        return NOTHING_SHARDED
    _check_names(sharded, groups)
    _check_ranks(groups)
    for module in sharded:
        _check_sync(module)
    for module in sharded:
        getattr(_state_of(module), torch_private.FSDP_BEGIN)()  # sets hooks that stay
        module.reshard()
    shards = Shards(modules=tuple(sharded), groups=groups, gathered=GatheredParameters(groups))
    own = {id(parameter) for parameter in shards.parameters()}
    named = [pair for module in modules for pair in module.named_parameters()]
    others = [name for name, parameter in named if is_dtensor(parameter.data) and id(parameter) not in own]
    if others or any(item.is_dtensor for group in groups for item in group.fsdp_params):
        raise ProfileError(
            f"the model is sharded by fully_shard, and {others[0] if others else 'a parameter'} was a DTensor before, as of "
            "tensor parallelism: what is inside of these is not told apart. Profile the model without that, or before sharding"
        )
    return shards


def _state_of(module: Any) -> Any:
    return getattr(module, torch_private.FSDP_GROUP[0])()


def _check_names(modules: Sequence[Any], groups: Sequence[Any]) -> None:
    of_group = (*torch_private.FSDP_PARTS, *torch_private.FSDP_COLLECTIVES, torch_private.FSDP_INDICES, torch_private.FSDP_SUMS)
    needed = {
        groups[0]: (*of_group, "reduce_grads", "all_reduce_grads"),
        groups[0].fsdp_params[0]: ("unsharded_accumulated_grad", "is_dtensor"),
        _state_of(modules[0]): (torch_private.FSDP_BEGIN, torch_private.FSDP_CONTEXT, torch_private.FSDP_TO_RUN),
    }
    for owner, name in ((owner, name) for owner, names in needed.items() for name in names):
        if not hasattr(owner, name):
            symbol = f"{type(owner).__module__}.{type(owner).__qualname__}.{name}"
            raise MissingTorchNameError(
                f"a profile of a model that is sharded needs {symbol}; found torch {torch.__version__} without. Profile the "
                "model before sharding, or use memkit plan --ranks N",
                symbol=symbol,
            )


def _check_ranks(groups: Sequence[Any]) -> None:
    import torch.distributed as dist

    if not dist.is_initialized():
        raise ProfileError(
            "the model is sharded by fully_shard, and its process group is gone; profile it before that is destroyed"
        )
    for parameter in (item.sharded_param for group in groups for item in group.fsdp_params):
        if parameter.is_meta:
            raise ProfileError(
                "the model is sharded by fully_shard, and its shards are on the meta device, without data; fill them first "
                f"(model.to_empty(device=...)), or ask without data and shards: {INSTEAD}"
            )
        if parameter.device_mesh.size() != dist.get_world_size():
            raise ProfileError(
                f"a profile of a model that is sharded needs all {dist.get_world_size()} ranks of the process group; found "
                f"one that is split between {parameter.device_mesh.size()} of them. {INSTEAD[0].upper()}{INSTEAD[1:]}"
            )


def _check_sync(module: Any) -> None:
    """Raise if FSDP2 has unreduced gradients, or is set not to reduce: a backward would add to them."""
    is_last = getattr(_state_of(module), torch_private.FSDP_CONTEXT).is_last_backward
    for group in fsdp_groups(module):
        holds = getattr(group, torch_private.FSDP_SUMS) is not None
        for item in group.fsdp_params:
            whole = getattr(item, torch_private.FSDP_GATHERED, None)
            holds = holds or item.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)
        if holds or not (is_last and group.reduce_grads and group.all_reduce_grads):
            raise ProfileError(
                "the model is sharded by fully_shard, and in the middle of accumulating gradients that are not reduced yet "
                "(set_requires_gradient_sync(False), set_requires_all_reduce(False) or set_is_last_backward(False)): a profile "
                "would add to them. Profile between two steps, with all of these True"
            )


def with_others(
    work: Callable[[], _Value], shards: Shards, *, doing: str, around: Callable[[], AbstractContextManager[None]], checks: bool
) -> _Value:
    """Run a step with FSDP2 on every rank; with `checks`, ranks wait for each other before each collective."""
    if not shards:
        with around():
            return work()
    from memkit.core.agreement import agree, together

    def wait(number: int) -> None:
        with torch_private.without_python_dispatch():  # not part of the step
            agree(digest=number, doing=doing, feature="profile_memory")

    def run() -> _Value:
        with around(), _at_rest(shards), _waiting(shards, wait) if checks else nullcontext():
            return work()

    return together(run, lambda _: (), doing=doing, feature="profile_memory")


class _Waiting:
    """A collective of FSDP2's that first waits for the other ranks."""

    def __init__(self, inner: Any, wait: Callable[[], None]) -> None:
        self._inner = inner
        self._wait = wait

    def allocate(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner.allocate(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._wait()
        return self._inner(*args, **kwargs)


@contextmanager
def _waiting(shards: Shards, wait: Callable[[int], None]) -> Iterator[None]:
    """Make each collective wait for the same one on other ranks, so that ranks that run different layers are noticed."""
    before = [(group, name, getattr(group, name)) for group in shards.groups for name in torch_private.FSDP_COLLECTIVES]
    with ExitStack() as after:
        for number, (group, name, inner) in enumerate(before, start=1):
            after.callback(setattr, group, name, inner)
            setattr(group, name, _Waiting(inner, partial(wait, number)))
        yield


@contextmanager
def _at_rest(shards: Shards) -> Iterator[None]:
    """Run a block, then make all parameters shards, and let FSDP2 forget forwards that began in the block."""
    lists = [group.comm_ctx.post_forward_order for group in shards.groups]
    lists += [getattr(group, torch_private.FSDP_INDICES) for group in shards.groups]
    kept = [(items, list(items)) for items in {id(items): items for items in lists}.values()]
    try:
        yield
    except BaseException:
        _abandon(shards)
        raise
    finally:
        for module in shards.modules:
            module.reshard()
        for items, before in kept:
            items[:] = before


def _abandon(shards: Shards) -> None:
    for module in shards.modules:
        if hasattr(module, "reset_iter_state"):
            with suppress(RuntimeError):  # not a root: its root has reset it
                module.reset_iter_state()
        state = _state_of(module)
        context = getattr(state, torch_private.FSDP_CONTEXT)
        getattr(state, torch_private.FSDP_TO_RUN).clear()
        context.iter_forward_root = None
        context.post_backward_final_callback_queued = False
        for owner in (state, *fsdp_groups(module)):
            phase = getattr(owner, torch_private.FSDP_PHASE)
            setattr(owner, torch_private.FSDP_PHASE, type(phase).IDLE)
        for group in fsdp_groups(module):
            setattr(group, torch_private.FSDP_GATHER, None)
            group.comm_ctx.all_gather_state = None
            for item in group.fsdp_params:
                item.unsharded_accumulated_grad = None
                whole = getattr(item, torch_private.FSDP_GATHERED, None)
                if whole is not None:
                    whole.grad = None
