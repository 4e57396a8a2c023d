"""Regions: modules whose calls are recomputed as a whole. What autograd would save in them is not kept; the module's forward is
run again when a backward needs it.

The semantics are those of `torch.utils.checkpoint` without reentrant autograd: random state, autocast, an early stop, nesting.
Which modules are regions is decided elsewhere. Source: `torch.utils.checkpoint._checkpoint_without_reentrant_generator`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from memkit import torch_private
from memkit.activations.recomputing.region_calls import Inputs, Needed, Recomputed, RegionCall, is_on_stack, take_off, unpack
from memkit.activations.recomputing.surroundings import drawn_from, generator_states
from memkit.activations.saved.counts import Counts
from memkit.hooks import HookPair, HookSet
from memkit.kept import ForwardedHandle, KeptHandle


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionSpec:
    """Which calls of a module are regions."""

    calls: frozenset[int] | None = None
    """Their numbers in one time in the context, from 0 on; None for all. Only calls with grad mode on are counted, and of those
    none that `torch.utils.checkpoint` recomputes."""


class _Thread(threading.local):
    """What a thread does with the regions of a context."""

    def __init__(self) -> None:
        self.is_in = False
        """Whether calls in this thread are regions."""
        self.outer: HookPair | None = None
        """The hooks that were on top when the context was entered."""
        self.calls: list[RegionCall] = []
        """Those that are going on, the innermost last, perhaps with some that an interrupt has left."""


class Regions:
    """A context in which calls of some modules are regions: for the thread that enters it, and what it has recomputed.

    Made once, it may be entered any number of times, and the backwards may come after.

    Args:
        chosen: the modules.
        keep: holds an input of a region until the backward. By default it stays where it is.
        counts: where it is noted what was recomputed.
    """

    def __init__(
        self,
        chosen: Mapping[nn.Module, RegionSpec],
        *,
        keep: Callable[[Tensor], KeptHandle] = KeptHandle,
        counts: Counts | None = None,
    ) -> None:
        self.keep = keep
        self.counts = counts
        self.thread = _Thread()
        self._regions = [RegionModule(self, module, spec) for module, spec in chosen.items()]
        self._hooks = HookSet()

    def __enter__(self) -> Regions:
        if len(self._hooks) or self.thread.is_in:
            raise ValueError("a Regions is entered that a thread is in already: make one for each")
        thread = self.thread
        try:
            thread.outer = torch_private.top_saved_tensor_hooks(True)
            thread.is_in = True
            for region in self._regions:
                region.num_calls = 0
                self._hooks.around_forward(region.module, before=region.before, after=region.after, with_kwargs=True)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Take all off; may be called again after that was interrupted."""
        thread = self.thread
        self._hooks.remove()
        while thread.calls:  # which an interrupt has left
            _end(thread.calls, is_broken=True)
        thread.is_in, thread.outer = False, None


class RegionModule(Recomputed):
    """A module whose calls are regions."""

    def __init__(self, regions: Regions, module: nn.Module, spec: RegionSpec) -> None:
        super().__init__(module, regions.counts)
        self.num_calls = 0
        self._calls = spec.calls
        self._regions = regions
        self._devices = sorted({part.device for part in module.parameters() if part.is_cuda}, key=str)

    # A call

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The module's forward is about to run."""
        thread = self._regions.thread
        if not thread.is_in or not torch.is_grad_enabled():
            return
        top = torch_private.top_saved_tensor_hooks(True)
        if not (top is None or type(top[0]) in _OWN) and getattr(top[0], "__module__", "") == torch_private.CHECKPOINT_HOOKS:
            return  # which makes again what is inside
        if torch_private.backward_task() != -1 and (top is None or type(top[0]) not in _OWN):
            return  # a recompute of another's
        number = self.num_calls
        self.num_calls = number + 1
        if self._calls is not None and number not in self._calls:
            return
        if torch_private.functorch_stack() is not None:
            return
        frame = sys._getframe(3)  # of `Module._call_impl`
        calls = thread.calls
        while calls and not ((last := calls[-1].frame) and is_on_stack(last, frame)):
            _end(calls, is_broken=True)
        call = RegionCall(self, frame, Inputs(args, kwargs, self._keeps(top, thread.outer)))
        call.before = generator_states(self._devices_of(args))
        calls.append(call)
        torch_private.push_saved_tensor_hooks(call, unpack)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any = None) -> None:
        """It has returned or raised."""
        calls = self._regions.thread.calls
        if not calls or calls[-1].region is not self:
            return
        call, frame = calls[-1], sys._getframe(2)
        if frame is call.frame or frame.f_back is call.frame:
            call.drawn, call.before = drawn_from(call.before), ()
            self.state.note_written(call.noted)
            _end(calls, is_broken=False)
            if self.counts is not None:
                self.counts.num_dropped += len(call.places)

    def _keeps(self, top: HookPair | None, outer: HookPair | None) -> Callable[[Tensor], KeptHandle]:
        """Return what holds an input. Hooks that are on top within the context are given it, as if it were saved."""
        if top is None or (outer is not None and top[0] is outer[0]):
            keep = self._regions.keep
            return keep if keep is KeptHandle else _in_no_grad(keep)
        pack, unpack_outer = top
        return _in_no_grad(lambda tensor: ForwardedHandle(tensor, pack, unpack_outer, is_checked=True))

    def _devices_of(self, args: tuple[Any, ...]) -> list[torch.device]:
        """Return the CUDA devices whose generators the forward may draw from."""
        devices = self._devices
        for arg in args:
            if isinstance(arg, Tensor) and arg.is_cuda and arg.device not in devices:
                devices = [*devices, arg.device]
        return devices


_OWN = (RegionCall, Needed)
"""The hooks of a region that is called, and of one that is recomputed."""


def _in_no_grad(keep: Callable[[Tensor], KeptHandle]) -> Callable[[Tensor], KeptHandle]:
    """Return a function that is called as autograd calls a hook: with grad mode off."""

    def keep_in_no_grad(tensor: Tensor) -> KeptHandle:
        with torch.no_grad():
            return keep(tensor)

    return keep_in_no_grad


def _end(calls: list[RegionCall], *, is_broken: bool) -> None:
    """End the innermost call; may be called again."""
    call = calls[-1]
    take_off(call)
    call.is_broken = is_broken
    call.frame = None
    calls.pop()
