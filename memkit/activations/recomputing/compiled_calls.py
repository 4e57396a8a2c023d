"""Compiled modules in a recorded forward: each runs compiled, as one step that is neither recorded nor recomputed. Dynamo
compiles nothing while a dispatch mode is on, and its older code hides writes from the mode. So the recorder and its hooks are
off meanwhile, and tensors that the module saves and returns become roots."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from memkit.activations.saved.traces import NO_VALUE
from memkit.core import torch_private
from memkit.core.calls import Code
from memkit.core.compiled import (
    AHEAD_OF_COMPILED_S,
    around_compiled,
    compiled_in,
    is_compiled,
    is_seen_by_global_hooks,
    module_inside,
    runs_as_it_is,
)
from memkit.core.hooks import HookSet
from memkit.core.torch_state import dynamo_is_loaded, is_saved_by_compiled_code, leave_mode, leave_untraced, num_compiled
from memkit.recording.module_calls import ModuleTrail

if TYPE_CHECKING:
    from memkit.recording.recorder import Recorder  # a dispatch mode: its base is a private class of torch

_COMPILED = "a compiled module"
_WHY_KEPT = "it was saved by a compiled module, inside of which nothing is seen"


class CompiledCalls:
    """Finds compiled modules in each outermost called module, and turns the recorder off while one runs."""

    def __init__(self, title: str, recorder: Recorder, trail: ModuleTrail) -> None:
        self._title = title
        self._recorder, self._trail = recorder, trail
        self._thread = threading.get_ident()
        self._finding, self._outermost, self._around = HookSet(), HookSet(), HookSet()
        self._found = set[nn.Module]()
        self._given: set[int] | None = None
        self.setting: Callable[[nn.Module, Any, Any, Collection[nn.Module]], AbstractContextManager[object]] | None = None
        """Returns a context for a module's call with these arguments, given all compiled modules that were found."""
        self.is_on = False

    def begin(self, model: nn.Module | None) -> None:
        """Look for compiled modules, if there may be any. `RuntimeError`: the model is compiled as a whole."""
        if not dynamo_is_loaded():
            return
        self.is_on = True
        if model is None:
            self._finding.around_all_forwards(before=self._before, after=_nothing)
        else:
            self._stand_around(model)

    def end(self) -> None:
        self.is_on, self.setting = False, None
        self._finding.remove()
        self._outermost.remove()
        self._around.remove()
        self._found.clear()

    def _before(self, module: nn.Module, *_: Any) -> None:
        if threading.get_ident() != self._thread or isinstance(module, torch.jit.ScriptModule):
            return
        self._stand_around(module)
        self._finding.remove()
        self._outermost.around_forward(module, before=_nothing, after=self._after)

    def _stand_around(self, model: nn.Module) -> None:
        if is_compiled(model):
            raise RuntimeError(self._refusal(f"{type(model).__name__}, which is compiled as a whole, was called"))
        found = list(compiled_in(model))
        for part in found:
            if part not in self._found:
                around_compiled(self._around, part, self._run)
                self._found.add(part)
        if any(module_inside(part) is not None for part in found):
            self._trail.pause()

    def _after(self, module: nn.Module, *_: Any) -> None:
        if threading.get_ident() != self._thread or not self.is_on:
            return
        self._outermost.remove()
        self._trail.go_on(module)
        self._finding.around_all_forwards(before=self._before, after=_nothing)

    # One call

    def _run(self, module: nn.Module, code: Code, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_alone = torch_private.num_dispatch_modes() == 1  # else nothing would be compiled, as in the plain run
        if threading.get_ident() != self._thread or not self.is_on or self._given is not None or not is_alone:
            return code(*args, **kwargs)
        given = _by_storage([*torch_private.tree_leaves((args, kwargs)), *module.parameters(), *module.buffers()])
        versions = {key: torch_private.version_of(tensor) for key, tensor in given.items() if not tensor.is_inference()}
        trail, trail_is_on = self._trail, self._trail.is_on
        trail_sees = trail_is_on and is_seen_by_global_hooks(module)
        if not trail_sees:
            trail.note_begin(module)
        self._given = set(given)
        try:
            leave_mode(self._recorder)
            trail.pause()
            with nullcontext() if self.setting is None else self.setting(module, args, kwargs, self._found):
                results = self._timed(trail.place, code, args, kwargs)
        finally:
            self._given = None
            if trail_is_on:
                trail.go_on()
            if self.is_on and self._recorder not in torch_private.dispatch_modes():  # an interrupt may have left it on
                self._recorder.__enter__()
        written = [given[key] for key, version in versions.items() if torch_private.version_of(given[key]) != version]
        self._note(written, results)
        if not trail_sees:
            trail.note_end(module, args, kwargs, results)
        return results

    def _timed(self, place: int, code: Code, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a compiled module's code; if ops are timed and the call doesn't compile it, note its seconds."""
        recording = self._recorder.recording
        if not recording.is_timed or place < 0:
            return code(*args, **kwargs)
        device, num_before = recording.device, num_compiled()
        start = device.record_begin(AHEAD_OF_COMPILED_S)
        results = code(*args, **kwargs)
        end = device.record_event()
        if num_before is not None and num_compiled() == num_before and recording.device is device:
            recording.call_times.append((place, start, end))
        return results

    def _note(self, written: list[Tensor], results: Any) -> None:
        recording = self._recorder.recording
        recording.funcs.append(_COMPILED)
        for tensor in written:
            value = recording.find(tensor.untyped_storage())
            recording.note_effect(tensor, -1 if value is None else value)
            recording.lose(tensor, _WHY_KEPT)
        recording.add_roots([tensor for tensor in torch_private.tree_leaves(results) if _is_plain(tensor)])

    # What it saves

    def add_unseen(self, tensor: Tensor, storage: torch.UntypedStorage) -> int:
        """Return a number for a value that no recorded op has made or read; `NO_VALUE` if it existed before the forward."""
        if self._given is None or torch_private.storage_address(storage) in self._given:
            return NO_VALUE
        recording = self._recorder.recording
        value = recording.add_root(tensor, storage, is_inside=True)
        recording.why_kept[value] = _WHY_KEPT
        return value

    def check_save(self) -> None:
        """Raise `RuntimeError` in a pack hook if compiled code that was not found saves the tensor."""
        if self._given is None and (runs_as_it_is() or is_saved_by_compiled_code()):
            raise RuntimeError(self._refusal("a compiled function was called"))

    def _refusal(self, found: str) -> str:
        return (
            f"{self._title} needs a model that is not compiled itself, though modules in it may be; found "
            f"that {found} in the context. Compile each block of the model by itself (block.compile()) and call the model, "
            "which calls the blocks; or leave out torch.compile; or leave out the context and set "
            "torch._functorch.config.activation_memory_budget, which recomputes inside of what is compiled"
        )


def _nothing(*_: Any) -> None:
    pass


def _is_plain(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.layout is torch.strided


def _by_storage(found: list[Any]) -> dict[int, Tensor]:
    return {torch_private.storage_address(tensor.untyped_storage()): tensor for tensor in found if _is_plain(tensor)}


for _hook in (CompiledCalls._before, CompiledCalls._after, _nothing):
    leave_untraced(_hook)
