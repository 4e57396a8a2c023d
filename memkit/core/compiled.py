"""Modules that `torch.compile` runs, and a place around their calls, outside of the compiled code.

[Note: calls of compiled modules] There are three ways to compile a module by itself. Dynamo compiles some hooks, and calls
others as they are, depending on their place (seen with torch 2.10 and 2.15):

| | `module.compile()` | `torch.compile(module)` | `module.forward = torch.compile(...)` |
|---|---|---|---|
| begins ahead of | the module's hooks | those of the module inside | `forward` |
| a hook on the module | compiled by itself, when called | as it is, on the one around | as it is |
| a hook on a child, set later | never called | never called | never called |
| a global hook, set later | compiled by itself | twice: as it is, and compiled | as it is |

A global hook that is set when a graph is made is in it, for the modules inside. Where a frame was left uncompiled, its ops save
one by one, and hooks of saved tensors are compiled by themselves. A hook with a mark (`_Untraced` in `hooks.py`), or whose code
Dynamo was told to leave (`leave_untraced`), is called as it is. Under a dispatch mode nothing is compiled.

In each way the compiled code is called through one attribute of the module. A function in its place is called ahead of that
code and of its hooks, returns behind them, runs as plain Python, and no code is compiled again because of it.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Iterator
from typing import Any

from torch import nn

from memkit.core import torch_private
from memkit.core.calls import Around, Code, Run, within
from memkit.core.hooks import HookSet
from memkit.core.torch_state import in_compiled_function

_CHILDREN = torch_private.MODULE_STATE[-1]
AHEAD_OF_COMPILED_S = 1e-3  # about the host's seconds to enqueue a compiled call: see `memkit.device.Device.record_begin`


def is_compiled(module: nn.Module) -> bool:
    return _place_of_code(module) is not None


def compiled_in(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost compiled modules in a module, in each forward: only classes and own attributes are looked at."""
    seen, plain, code = set[nn.Module](), set[type[nn.Module]](), torch_private.COMPILED_CALL
    waiting = [module]
    while waiting:
        found = waiting.pop()
        if found in seen:
            continue
        seen.add(found)
        own = vars(found)
        has_own = own.get(code) is not None or "forward" in own
        if has_own or type(found) not in plain:
            if is_compiled(found):
                yield found
                continue
            if not has_own:
                plain.add(type(found))
        inside = own.get(_CHILDREN)
        if inside is None:  # of TorchScript
            inside = dict(found.named_children())
        if inside:
            waiting += [child for child in reversed(inside.values()) if child is not None]


def around_compiled(hooks: HookSet, module: nn.Module, run: Run) -> None:
    """Until the hooks are removed, call `run` in place of a module's compiled code: see [Note: calls of compiled modules]."""
    place = _place_of_code(module)
    if place is None:
        raise ValueError(f"around_compiled needs a module that torch.compile runs; found {type(module).__name__}")
    around = _AroundCode(module, place, run)
    hooks.add(around)  # ahead: removing it before it is put does nothing
    around.put()


def code_of(module: nn.Module) -> Code | None:
    place = _place_of_code(module)
    return None if place is None else within(getattr(module, place))


def is_seen_by_global_hooks(module: nn.Module) -> bool:
    """Tell whether global hooks on a compiled module's call run outside of `around_compiled`."""
    return _place_of_code(module) != torch_private.COMPILED_CALL


def module_inside(module: nn.Module) -> nn.Module | None:
    """Return the module inside a `torch.compile(module)`, whose call warns of global hooks; None for other modules."""
    dynamo = sys.modules.get(f"{torch_private.DYNAMO}.eval_frame")  # nothing is compiled where it is not loaded
    is_around = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    return next(module.children()) if is_around else None


class _Asked(threading.local):
    """Whether Dynamo was asked in a thread to compile something while a mode of memkit was on, and refused."""

    was_asked = False


_asked = _Asked()


def note_asked() -> None:
    _asked.was_asked = True


def runs_as_it_is() -> bool:
    """Tell whether a mode makes the caller's function run op by op, not compiled. Cheap while Dynamo is asked nothing new."""
    if not _asked.was_asked:
        return False
    _asked.was_asked = in_compiled_function()
    return _asked.was_asked


def _place_of_code(module: nn.Module) -> str | None:
    own = vars(module)
    code = own.get(torch_private.COMPILED_CALL)
    if code is not None:
        return torch_private.COMPILED_CALL if _is_code(code) else None
    return "forward" if _is_code(own.get("forward") or type(module).forward) else None


def _is_code(function: Any) -> bool:
    if isinstance(function, _AroundCode):
        return True
    is_marked = hasattr(function, torch_private.COMPILED_FUNCTION_MARK)
    return is_marked and not any(getattr(function, mark, None) for mark in torch_private.UNTRACED_MARKS)


class _AroundCode(Around):
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.code, memo)
