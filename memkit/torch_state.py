"""What torch is doing where it is asked: which modes are on, whether anything is compiled, who holds a storage.

Only questions that are asked by private names of torch (`torch_private.py`), and nothing is kept.
"""

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

from memkit import torch_private
from memkit.errors import MissingTorchNameError
from memkit.interrupts import do_at_once

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.overrides import TorchFunctionMode

    from memkit.torch_private import DispatchMode

# Modes and classes

_SHOWN = "old_without_ignore_compile_internals_dispatch_mode_flags"
"""Where a mode notes whether Dynamo was to see another one before. Torch keeps such flags of the process."""


def leave_mode(mode: DispatchMode) -> None:
    """Take a dispatch mode off the stack if it is on it, from below others as well, and set torch's flags back to what they
    were before it was entered. Calling it again does nothing, also where an interrupt has broken off `__enter__`.

    A mode's own `__exit__` forgets the flags first and is not to be called again after an interrupt.
    """
    stack = torch_private.dispatch_modes()
    above = len(stack)
    while above and stack[above - 1] is not mode:
        above -= 1
    steps: list[partial[Any]] = []
    if above:
        steps += [partial(torch_private.pop_dispatch_mode, None)] * (len(stack) - above + 1)
        steps += [partial(torch_private.push_dispatch_mode, other) for other in stack[above:]]
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


def function_modes() -> list[TorchFunctionMode]:
    """Return the function modes that are on, the outermost first."""
    (mode_at,) = torch_private.known("function_mode_at")
    return [mode_at(place) for place in range(torch_private.num_function_modes())]


def leave_function_mode(mode: TorchFunctionMode) -> None:
    """Take a function mode off the stack if it is on it, from below others as well. Calling it again does nothing."""
    (pop,), (push,) = map(torch_private.known, ("pop_function_mode", "push_function_mode"))
    stack = function_modes()
    if mode in stack:
        above = stack[stack.index(mode) + 1 :]
        do_at_once(*[partial(pop)] * (len(above) + 1), *(partial(push, other) for other in above))


def has_own_dispatch(tensor: Tensor) -> bool:
    """Tell whether a tensor's class says itself what ops do, as those that wrap other tensors."""
    return type(tensor).__torch_dispatch__ is not torch_private.no_own_dispatch


def is_seen_by_modes() -> bool:
    """Tell whether a dispatch mode sees what runs now."""
    return torch_private.num_dispatch_modes() > 0 and not torch_private.is_key_excluded(torch_private.DispatchKey.Python)


@contextmanager
def unseen(lock: AbstractContextManager[object]) -> Iterator[None]:
    """Return a context in which the caller has a lock, and no dispatch mode sees what is done. Where no mode is on, the lock
    alone costs the host less."""
    with torch_private.without_python_dispatch(), lock:
        yield


def sharing_counters() -> AbstractContextManager[object]:
    """Return a context in which an alias of a tensor shares its version counter, also for a mode that handles an op: there
    autograd's layers are off, which see to that."""
    is_off = torch_private.is_key_excluded(torch_private.DispatchKey.ADInplaceOrView)
    return torch.overrides.enable_reentrant_dispatch() if is_off else nullcontext()


def in_differentiating_transform() -> bool:
    """Tell whether the caller runs inside `torch.func.grad` or `jvp`, or what is made of them; `vmap` is none.

    Source: `torch._functorch.pyfunctorch.retrieve_all_functorch_interpreters`.
    """
    stack, kinds = torch_private.functorch_stack(), torch_private.FunctorchTransform
    return stack is not None and any(level.key() in (kinds.Grad, kinds.Jvp) for level in stack)


def num_users(storage: torch.UntypedStorage) -> int:
    """Return how many tensors and variables hold a storage; the one that asks counts as well."""
    return torch_private.num_storage_users(torch_private.storage_address(storage))


# Compiling


_untraced = set[CodeType]()


def leave_untraced(function: Any) -> None:
    """Have Dynamo neither compile a function where it is called, nor whatever that calls. That costs nothing at a call.

    Dynamo is told by the function's code, and so once for all methods and closures of one kind. Where torch lacks the names for
    that, which the contexts tell before anything of theirs could be compiled, this does nothing.

    Args:
        function: one that is written in Python, or a method, or a part of one (`functools.partial`).
    """
    code = getattr(getattr(function, "func", function), "__code__", None)
    if code is None or code in _untraced:
        return
    with suppress(MissingTorchNameError):
        skip = torch_private.FrameAction.SKIP
        torch_private.set_code_strategy(code, torch_private.FrameExecStrategy(skip, skip))
        _untraced.add(code)


def dynamo_is_loaded() -> bool:
    """Tell whether anything may have been compiled in this process. Loading Dynamo to ask it would take seconds."""
    return torch_private.DYNAMO in sys.modules


def in_compiled_function() -> bool:
    """Tell whether the caller runs inside a function that was compiled, or that was to be and runs as plain Python instead, as
    under a dispatch mode. Slow on a deep stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) == torch_private.COMPILED_CALLER:
            return True
        frame = frame.f_back
    return False


def is_saved_by_compiled_code() -> bool:
    """Tell whether the tensor that a pack hook was given is saved by code that was compiled with its backward: after all of
    that was launched.

    To be called from within the hook."""
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
"""Between a hook and the modules that call it for compiled code."""


def in_higher_order_op() -> bool:
    """Tell whether the caller runs inside what a higher-order op, such as `torch.cond` or `flex_attention`, compiles by itself.
    They do so also where the program compiles nothing.

    Source: `torch._higher_order_ops.utils.setup_compilation_env`.
    """
    if torch_private.HIGHER_ORDER_OPS in sys.modules:
        for is_compiling in torch_private.known("in_hop_compile"):
            return bool(is_compiling())
    dynamo: Any = sys.modules.get(torch_private.DYNAMO)
    return dynamo is not None and bool(dynamo.config.allow_empty_graphs)  # which is set there alone


def is_traced() -> bool:
    """Tell whether ops are being traced into a graph, as those of a branch of `torch.cond`: a tensor that is made unseen by the
    tracer becomes a constant of the graph."""
    return torch_private.dispatch_mode_at(torch_private.DispatchModeKey.PROXY) is not None


def num_compiled() -> int | None:
    """Return how many functions Dynamo was asked to compile so far; None if that is not known. Dynamo is loaded."""
    return next((counters["frames"]["total"] for counters in torch_private.known("compile_counters")), None)


# What torch's libraries have made of modules and tensors


def is_sharded_by_fsdp(module: nn.Module) -> bool:
    """Tell whether FSDP, of either kind, has wrapped a module: `LayerOffload` refuses it."""
    kind = type(module).__name__
    return kind.startswith("FSDP") or kind == "FullyShardedDataParallel"


def fsdp_modules(modules: Iterable[nn.Module]) -> list[Any]:
    """Return which of some modules, and of all under them, FSDP2 has sharded: each once, parents first."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    found = dict.fromkeys(part for module in modules for part in module.modules())
    return [part for part in found if isinstance(part, fsdp.FSDPModule)]


def is_sharded_by_fsdp2(module: nn.Module) -> bool:
    """Tell whether FSDP2 has sharded a module, and gathers for its forward and for the backward of that."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def fsdp_groups(module: Any) -> list[Any]:
    """Return what FSDP2 gathers together of the own parameters of a module that it has sharded: mostly one group, or none."""
    to_state, to_group = torch_private.FSDP_GROUP
    state = getattr(module, to_state)()
    groups = getattr(state, f"{to_group}s", None)  # newer versions may have several
    groups = [getattr(state, to_group, None)] if groups is None else groups
    return [group for group in groups if group is not None]


def is_there_in_backward(module: nn.Module) -> bool:
    """Tell whether FSDP2 gathers the own parameters of a module that it has sharded for the backward of its forward as well."""
    return all(group.unshard_in_backward for group in fsdp_groups(module))


def has_gathered(modules: Iterable[nn.Module]) -> bool:
    """Tell whether FSDP2 gathers the parameters of one of them, for its own forward or for that of a module that it is in."""
    return any(torch_private.GATHERED_MARK in vars(module) for module in modules)


def is_dtensor(tensor: Tensor) -> bool:
    """Tell whether a tensor is a DTensor, whose class takes seconds to import: `LayerOffload` refuses it."""
    return type(tensor).__name__ == "DTensor"


def local_of(tensor: Tensor) -> Tensor:
    """Return the part of a shard that this rank has, which is no copy; of any other tensor, the tensor."""
    if type(tensor).__name__ != "DTensor":  # as `is_dtensor`: this is called for each parameter of a step
        return tensor
    shard: Any = tensor  # torch.distributed is imported only where there are any
    with torch.no_grad():
        local: Tensor = shard.to_local()
    return local
