"""Questions about torch's state at the point of the call, by private names (`torch_private.py`); labels for profilers."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from memkit.core import torch_private
from memkit.core.interrupts import do_at_once
from memkit.errors import MissingTorchNameError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memkit.core.torch_private import DispatchMode


# Modes and classes

_SHOWN = "old_without_ignore_compile_internals_dispatch_mode_flags"  # of a mode: whether Dynamo may trace outside of it


def leave_mode(mode: DispatchMode) -> None:
    """Remove a mode, even from below others, and restore torch's flags, which its own `__exit__` may forget. Repeatable."""
    steps = _off_stack(mode)
    flags = {
        "old_dispatch_mode_flags": torch_private.set_in_mode,
        "old_non_infra_dispatch_mode_flags": torch_private.set_in_mode_of_program,
        _SHOWN: torch_private.set_shows_to_compiler,
    }
    for noted, set_back in flags.items():
        before: deque[Any] = getattr(mode, noted, deque())
        if before:
            steps += [partial(set_back, before[-1]), partial(before.pop)]
            if noted == _SHOWN:
                steps.append(partial(torch_private.set_shows_to_guards, before[-1] is True))  # else false, or memkit's own
    do_at_once(*steps)


def _off_stack(mode: DispatchMode) -> list[partial[Any]]:
    stack = torch_private.dispatch_modes()
    above = len(stack)
    while above and stack[above - 1] is not mode:
        above -= 1
    if not above:
        return []
    pops = [partial(torch_private.pop_dispatch_mode, None)] * (len(stack) - above + 1)
    return pops + [partial(torch_private.push_dispatch_mode, other) for other in stack[above:]]


def hide_mode(mode: DispatchMode) -> None:
    """Take a dispatch mode off the stack for the running graph node: behind it the engine restores the stack."""
    do_at_once(*_off_stack(mode))


def in_dual_level() -> bool:
    return torch_private.dual_level_of(forward_ad) >= 0


def has_own_dispatch(tensor: Tensor) -> bool:
    """Tell whether a tensor's class has a `__torch_dispatch__` of its own, as wrappers of other tensors do."""
    return type(tensor).__torch_dispatch__ is not torch_private.no_own_dispatch


def is_seen_by_modes() -> bool:
    return torch_private.num_dispatch_modes() > 0 and not torch_private.is_key_excluded(torch_private.DispatchKey.Python)


@contextmanager
def unseen(lock: AbstractContextManager[object]) -> Iterator[None]:
    """Hold a lock in a context in which no dispatch mode sees ops. If no mode is on, the lock alone costs the host less."""
    with torch_private.without_python_dispatch(), lock:
        yield


def sharing_counters() -> AbstractContextManager[object]:
    """Return a context in which an alias shares its tensor's version counter, even inside a dispatch mode's handler."""
    is_off = torch_private.is_key_excluded(torch_private.DispatchKey.ADInplaceOrView)
    return torch.overrides.enable_reentrant_dispatch() if is_off else nullcontext()


def in_differentiating_transform() -> bool:
    """Tell whether the caller runs inside `torch.func.grad` or `jvp`, or transforms made of these; `vmap` doesn't count."""
    stack, kinds = torch_private.functorch_stack(), torch_private.FunctorchTransform
    return stack is not None and any(level.key() in (kinds.Grad, kinds.Jvp) for level in stack)


def is_below_transform() -> bool:
    """Tell whether a transform of `torch.func`, or a batched backward, runs in this thread, also below all of its layers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") not in torch_private.TRANSFORMS:
        frame = frame.f_back
    return frame is not None


def num_users(storage: torch.UntypedStorage) -> int:
    return torch_private.num_storage_users(torch_private.storage_address(storage))


# Compiling

_untraced = set[CodeType]()


def leave_untraced(function: Any) -> None:
    """Keep Dynamo from compiling a function, known by its code object, and its callees, at no cost per call."""
    code = getattr(getattr(function, "func", function), "__code__", None)
    if code is None or code in _untraced:
        return
    with suppress(MissingTorchNameError):
        skip = torch_private.FrameAction.SKIP
        torch_private.set_code_strategy(code, torch_private.FrameExecStrategy(skip, skip))
        _untraced.add(code)


def dynamo_is_loaded() -> bool:
    """Tell whether anything may have been compiled in this process, without loading Dynamo, which takes seconds."""
    return torch_private.DYNAMO in sys.modules


def in_compiled_function() -> bool:
    """Tell whether the caller runs inside a compiled function, or one that a mode makes run as it is. Slow on a deep stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_globals.get("__name__"), frame.f_code.co_name) != torch_private.COMPILED_CALLER:
        frame = frame.f_back
    return frame is not None


def is_saved_by_compiled_code() -> bool:
    """Within a pack hook, tell whether code compiled with its backward saves, which launches all kernels first."""
    if torch_private.DYNAMO not in sys.modules:
        return False
    frame: FrameType | None = sys._getframe(1)
    num_looks = _NUM_FRAMES
    while frame is not None and num_looks:
        name = frame.f_globals.get("__name__") or ""
        if name.startswith(torch_private.COMPILED_SAVER):
            return True
        num_looks -= not name.startswith("memkit.")
        frame = frame.f_back
    return False


_NUM_FRAMES = 2


def in_higher_order_op() -> bool:
    """Tell whether a higher-order op, such as `torch.cond`, is compiling the caller's function, as it may in any program."""
    if torch_private.HIGHER_ORDER_OPS in sys.modules:
        for is_compiling in torch_private.known("in_hop_compile"):
            return bool(is_compiling())
    dynamo: Any = sys.modules.get(torch_private.DYNAMO)
    return dynamo is not None and bool(dynamo.config.allow_empty_graphs)  # which is set there alone


def is_traced() -> bool:
    """Tell whether ops are being traced into a graph, where a tensor made unseen by the tracer becomes a constant."""
    return torch_private.dispatch_mode_at(torch_private.DispatchModeKey.PROXY) is not None


def num_compiled() -> int | None:
    """Return how many functions Dynamo was asked to compile so far; None if not known. Only if Dynamo is loaded."""
    return next((counters["frames"]["total"] for counters in torch_private.known("compile_counters")), None)


# What torch's libraries have made of modules and tensors


def is_sharded_by_fsdp(module: nn.Module) -> bool:
    """Tell whether either version of FSDP has wrapped a module: `LayerOffload` refuses it."""
    kind = type(module).__name__
    return kind.startswith("FSDP") or kind == "FullyShardedDataParallel"


def fsdp_modules(modules: Iterable[nn.Module]) -> list[Any]:
    """Return the modules that FSDP2 has sharded among these and their submodules, each once, parents first."""
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    found = dict.fromkeys(part for module in modules for part in module.modules())
    return [part for part in found if is_sharded_by_fsdp2(part)]


def is_sharded_by_fsdp2(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def fsdp_groups(module: Any) -> list[Any]:
    """Return FSDP2's groups of a module's own parameters that are gathered together: usually one, or none."""
    to_state, to_group = torch_private.FSDP_GROUP
    state = getattr(module, to_state)()
    groups = getattr(state, f"{to_group}s", None)  # newer versions may have several
    groups = [getattr(state, to_group, None)] if groups is None else groups
    return [group for group in groups if group is not None]


def is_there_in_backward(module: nn.Module) -> bool:
    """Tell whether FSDP2 gathers a sharded module's own parameters for the backward as well."""
    return all(group.unshard_in_backward for group in fsdp_groups(module))


def has_gathered(modules: Iterable[nn.Module]) -> bool:
    """Tell whether FSDP2 gathers parameters of one of these modules, for its own forward or an enclosing module's."""
    return any(torch_private.GATHERED_MARK in vars(module) for module in modules)


def is_dtensor(tensor: Tensor) -> bool:
    """Tell whether a tensor is a DTensor, without importing the class, which takes seconds."""
    return type(tensor).__name__ == "DTensor"


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, without copying it; other tensors are returned unchanged."""
    if type(tensor).__name__ != "DTensor":  # as `is_dtensor`: this is called for each parameter of a step
        return tensor
    shard: Any = tensor  # torch.distributed is imported only where there are any
    with torch.no_grad():
        local: Tensor = shard.to_local()
    return local


NO_LABEL = nullcontext()


def label(name: str, of: Any = None) -> AbstractContextManager[object]:
    if not torch_private.profiler_is_on():
        return NO_LABEL
    return torch.profiler.record_function(f"memkit::{name}" if of is None else f"memkit::{name} ({of.names})")
