"""Ctrl-C at chosen lines of memkit: `interrupts` stops a step at one line after the other, the test says what must hold then.

A `KeyboardInterrupt` is raised ahead of a line, wherever that runs: in a context's entry or exit, in a hook that autograd calls
from C++, under a lock, in a finalizer (where Python reports it and goes on). Lines of memkit are those of its files, and those
by which torch enters and leaves a dispatch mode that memkit sets. Left out are lines of `device/reference.py` and
`transfer/reference_disk.py`, and what they call: these files stand for the hardware. So are the places where Python itself lets
no signal in, though a line begins there: between a `with` block and its `__exit__`, and at a `try:`, which is no instruction
(handlers around it do not cover it).

    for place in interrupts(step, 60):
        assert_same_bits(step(), plain), place
"""

from __future__ import annotations

import dis
import functools
import gc
import itertools
import linecache
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.utils import _python_dispatch

import memkit

_ROOT = str(Path(memkit.__file__).parent) + "/"
_HARDWARE = (_ROOT + "device/reference.py", _ROOT + "transfer/reference_disk.py")
_MODES = _python_dispatch.__file__
"""Where torch enters and leaves dispatch modes, those of memkit as well, in lines of Python."""


@dataclass
class _Lines:
    """Counts the lines of memkit that run, and stops at one of them."""

    stop_at: int = -1
    within: str | None = None
    """The name of the functions whose lines count; None for all."""
    num_lines: int = 0
    place: str | None = None
    """Where it has stopped."""
    _is_inside: dict[str, bool] = field(default_factory=dict)

    def on_call(self, frame: FrameType, event: str, _: Any) -> Any:
        filename = frame.f_code.co_filename
        is_inside = self._is_inside.get(filename)
        if is_inside is None:
            is_inside = self._is_inside[filename] = filename.startswith(_ROOT) or filename == _MODES
        if filename == _MODES:
            is_inside = frame.f_back is not None and self._is_inside.get(frame.f_back.f_code.co_filename, False)
        if not is_inside or self.within not in (None, frame.f_code.co_name):
            return None
        caller: FrameType | None = frame
        while caller is not None and caller.f_code is not _run.__code__:
            if caller.f_code.co_filename in _HARDWARE:
                return None
            caller = caller.f_back
        return self.on_line

    def on_line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and frame.f_lasti not in _without_signals(frame.f_code):
            if self.num_lines == self.stop_at:
                filename, number = frame.f_code.co_filename, frame.f_lineno
                text = linecache.getline(filename, number).strip()
                self.place = f"{filename.removeprefix(_ROOT)}:{number} in {frame.f_code.co_name}: {text}"
                self.num_lines += 1
                raise KeyboardInterrupt
            self.num_lines += 1
        return self.on_line


@functools.cache
def _without_signals(code: CodeType) -> frozenset[int]:
    """Return where no signal is let in: at what does nothing, and where `with` blocks end."""
    found = list(dis.get_instructions(code))
    return frozenset(
        one.offset for index, one in enumerate(found) if one.opname == "NOP" or _is_block_end(found[index : index + 5])
    )


def _is_block_end(sequence: list[dis.Instruction]) -> bool:
    """Tell whether three times None follow, which is what `__exit__` is called with."""
    pushed = [(one.opname, one.argval) for one in sequence if one.opname not in ("NOP", "SWAP", "ROT_TWO")][:3]
    none = ("LOAD_CONST", None)
    return pushed == [none] * 3 or ([name for name, _ in pushed[1:]] == ["DUP_TOP"] * 2 and pushed[0] == none)


def _run(step: Callable[[], object], stop_at: int, within: str | None) -> _Lines:
    """Run a step, and stop it at a line. Nothing is collected meanwhile, so that the same step runs the same lines."""
    lines, unraised = _Lines(stop_at, within), []
    hook_before, trace_before, was_enabled = sys.unraisablehook, sys.gettrace(), gc.isenabled()
    has_raised = False
    gc.disable()
    sys.unraisablehook = lambda found: unraised.append((found.exc_type, str(found.object)))
    try:
        sys.settrace(lines.on_call)
        try:
            step()
        finally:
            sys.settrace(trace_before)
    except KeyboardInterrupt:
        has_raised = True
    finally:
        sys.unraisablehook = hook_before
        if was_enabled:
            gc.enable()
    others = [found for found in unraised if found[0] is not KeyboardInterrupt]
    assert not others, f"{others} in a finalizer; interrupted at {lines.place}"
    if lines.place is not None:
        assert has_raised or unraised, f"nobody heard of the interrupt at {lines.place}"
    return lines


def count_lines(step: Callable[[], object], within: str | None = None) -> int:
    """Run a step and return how many lines of memkit that takes, or of its functions with a name."""
    return _run(step, -1, within).num_lines


def interrupt(step: Callable[[], object], line: int, within: str | None = None) -> str | None:
    """Run a step and interrupt it ahead of a line, the `line`-th that counts as in `count_lines`, as its loop would survive it.

    Returns:
        The place, None if the step ran fewer lines.
    """
    return _run(step, line, within).place


def spread(num_lines: int, count: int) -> list[int]:
    """Return so many lines, or all if there are fewer, evenly spread."""
    count = min(num_lines, count)
    return [(2 * index + 1) * num_lines // (2 * count) for index in range(count)]


def interrupts(
    step: Callable[[], object],
    count: int,
    *,
    prepare: Callable[[], object] = lambda: None,
    within: str | None = None,
) -> Iterator[str]:
    """Interrupt steps at lines that are spread over a whole one, and yield each place: time to run more steps and look.

    Args:
        step: one training step, as in the loop of a user who goes on after Ctrl-C.
        count: how many lines; all if there are fewer.
        prepare: called ahead of each interrupted step, as to begin anew.
        within: the name of the functions whose lines count; by default all do.
    """
    prepare()
    num_lines = count_lines(step, within)
    assert num_lines > 0, f"the step runs no line of memkit{f' in {within}' if within else ''}"
    for line in spread(num_lines, count):
        prepare()
        place = interrupt(step, line, within)
        if place is not None:  # else the interrupts before have made it shorter
            yield place


def interrupted_after(function: Callable[..., Any], *, num_calls: int = 1) -> Callable[..., Any]:
    """Return the function with an interrupt behind its so many-th call, whose result reaches nobody: as one that comes when the
    function gives a lock back, where no line begins."""
    calls = itertools.count(1)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if next(calls) == num_calls:
            raise KeyboardInterrupt
        return result

    return call


def hooks_around(*modules: nn.Module) -> tuple[object, ...]:
    """Return all that memkit may have set in this thread, the process and on modules, to compare it with what is set later."""
    parts = [part for module in modules for part in module.modules()]
    return (
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        torch._C._len_torch_dispatch_stack(),
        _python_dispatch.is_in_torch_dispatch_mode(),
        _python_dispatch.is_in_torch_dispatch_mode(include_infra_modes=False),
        _python_dispatch.is_in_any_mode_without_ignore_compile_internals(),
        torch._C._len_torch_function_stack(),
        torch.is_grad_enabled(),
        len(nn.modules.module._global_forward_pre_hooks),
        len(nn.modules.module._global_forward_hooks),
        [(len(part._forward_pre_hooks), len(part._forward_hooks)) for part in parts],
        [len(weight._post_accumulate_grad_hooks or ()) for part in parts for weight in part.parameters(recurse=False)],
        [len(weight._backward_hooks or ()) for part in parts for weight in part.parameters(recurse=False)],
    )
