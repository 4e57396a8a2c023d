"""`Regions`: modules whose calls are recomputed as a whole. Their saved tensors are not kept; the module's forward runs again
when a backward needs them.

The semantics are those of non-reentrant `torch.utils.checkpoint`: random state, autocast, early stop, nesting. Which modules
are regions is decided elsewhere. Source: `torch.utils.checkpoint._checkpoint_without_reentrant_generator`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from memkit.activations.recomputing.module_state import NORMS, UPDATED_UNREAD, LearnedReads, NoRegion, drawn_from
from memkit.activations.recomputing.region_calls import (
    Inputs,
    Nesting,
    Recompute,
    Recomputed,
    RegionCall,
    is_on_stack,
    take_off,
    unpack,
)
from memkit.activations.saved.counts import Counts
from memkit.core import torch_private
from memkit.core.calls import Code
from memkit.core.compiled import around_compiled, is_compiled
from memkit.core.hooks import HookPair, HookSet
from memkit.core.interrupts import Exclusive
from memkit.core.kept import ForwardedHandle, KeptHandle
from memkit.core.sequentials import SpannedForward, spanned_forwards
from memkit.core.torch_state import is_sharded_by_fsdp, is_sharded_by_fsdp2, is_there_in_backward, is_traced, local_of

_OWN_HOOKS = ("memkit.activations.recomputing.regions", "memkit.recording.module_calls")
"""Modules whose hooks a recompute may run again, or skip."""
_AROUND_SHARDED = ("torch.distributed.fsdp.", "memkit.recording.borders")
"""Prefixes of the modules with hooks for FSDP2: regions begin after their pre-hooks and end before their hooks."""


def why_not_region(module: nn.Module) -> str:
    """Return why no call of a module can be a region, as far as the module shows it; empty if it may be one.

    What only a call shows is not seen: a forward that writes to its inputs (such as `nn.ReLU(inplace=True)`), that counts in
    plain attributes, or that draws from Python's generator.
    """
    if getattr(module.forward, "__func__", None) is nn.Module.forward:
        return f"a {type(module).__name__} has no forward"
    for name in torch_private.MODULE_HOOKS:
        if not _are_own(vars(nn.modules.module)[f"_global{name}"]):
            return "hooks of all modules are set (torch.nn.modules.module.register_module_forward_hook), which would run twice"
    for part in module.modules():
        why = _why_not_inside(part, is_region=part is module)
        if why:
            return why if part is module else f"a {type(part).__name__} in it: {why}"
    return ""


def _why_not_inside(part: nn.Module, *, is_region: bool) -> str:
    """Return why a submodule prevents a module from being a region; with `is_region`, why the module itself does."""
    if isinstance(part, nn.modules.lazy.LazyModuleMixin) and part.has_uninitialized_params():
        return "its parameters are made by its first call"
    if isinstance(part, torch.jit.ScriptModule):
        return "it is scripted, and what that saves depends on how often it has run"
    is_gathering = is_region and is_sharded_by_fsdp2(part)
    if is_gathering:
        if why := _why_not_sharded(part):
            return why
    elif is_sharded_by_fsdp(part) or isinstance(part, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return "its forward talks to other processes or devices"
    if torch_private.GATHERED_MARK in vars(part) and not all(map(_is_plain, torch_private.parameters_of(part).values())):
        return "FSDP2 gathers parameters of it that are made up of others, and may count that as writes"
    if isinstance(part, nn.SyncBatchNorm) and part.training:
        return "its forward talks to other processes"
    if isinstance(part, NORMS) and type(part) not in UPDATED_UNREAD and part.running_mean is not None and not part.training:
        return "it reads statistics, which may be updated unseen"
    if "_hf_hook" in vars(part):
        return "accelerate moves its weights in its forward"
    for name in torch_private.MODULE_HOOKS:
        if not _are_own(getattr(part, name), _AROUND_SHARDED if is_gathering else ()):
            is_streamed = any(_home_of(hook).startswith("memkit.weights") for hook in getattr(part, name).values())
            return "LayerOffload streams its weights" if is_streamed else "it has hooks, which would run twice, or not at all"
    return ""


def _why_not_sharded(module: nn.Module) -> str:
    """Return why a module sharded by FSDP2 can't be a region. What its hooks enclose is recomputed in the module's own
    backward, for which FSDP2 has gathered the parameters."""
    if is_compiled(module):
        return "its forward talks to other processes or devices, and is compiled"
    if not is_there_in_backward(module):
        return "FSDP2 does not gather it for its backward"
    return ""


def has_other_hooks(module: nn.Module) -> bool:
    return not all(_are_own(getattr(module, name), _AROUND_SHARDED) for name in torch_private.MODULE_HOOKS)


def _is_plain(parameter: nn.Parameter | None) -> bool:
    return parameter is None or type(local_of(parameter)) in (Tensor, nn.Parameter)


def _are_own(hooks: Mapping[int, object], beside: tuple[str, ...] = ()) -> bool:
    """Tell whether a recompute may run all of these hooks again, or skip them.

    Args:
        beside: prefixes of further modules whose hooks may be run or skipped.
    """
    return all(home in _OWN_HOOKS or home.startswith(beside) for home in map(_home_of, hooks.values())) if hooks else True


def _home_of(hook: Any) -> str:
    hook = getattr(hook, "_hook", hook)
    return getattr(getattr(hook, "func", hook), "__module__", None) or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionSpec:
    """Which calls of a module are regions."""

    calls: frozenset[int] | None = None
    """The numbers of the calls, from 0 on, in one `with` block; None for all. Calls with grad mode off, or within
    `torch.utils.checkpoint`, are not counted."""
    learned: LearnedReads = field(default_factory=LearnedReads)


class _Thread(threading.local):
    """The state of a context in one thread."""

    def __init__(self) -> None:
        self.is_in = False
        """Whether calls in this thread are regions."""
        self.outer: object = None
        self.numbers: dict[Recomputed, int] = {}
        self.calls: list[RegionCall] = []
        """The running calls, the innermost last, perhaps with some that an interrupt has left."""
        self.counted: dict[Recomputed, FrameType] = {}
        """For each region, the frame of its last counted call, until that ends. A region may be hooked twice: by the context,
        and by a recompute within it, perhaps in another thread."""
        self.running: set[Recomputed] = set()
        """Compiled regions whose call is running, since these may be intercepted twice as well."""


@dataclass(frozen=True, slots=True)
class _Common:
    """What the regions of a context share."""

    thread: _Thread
    keep: Callable[[Tensor], KeptHandle]
    counts: Counts | None
    not_taken: dict[nn.Module, str]


class Regions(Exclusive):
    """A context in which calls of some modules are regions, for the thread that enters it and for recomputes of its calls.

    It may be entered any number of times. Backwards may run after it was left.

    Args:
        chosen: the modules. A `SequentialSpan` is called as one module while this context is entered, and in recomputes.
        keep: returns a handle for an input of a region; called with grad mode off. By default inputs stay on the device.
    """

    def __init__(
        self,
        chosen: Mapping[nn.Module, RegionSpec],
        *,
        keep: Callable[[Tensor], KeptHandle] = KeptHandle,
        counts: Counts | None = None,
    ) -> None:
        torch_private.require(torch_private.Feature.REMAT)
        self._common = _Common(_Thread(), keep, counts, {})
        forwards = spanned_forwards(chosen)
        self._regions = [RegionModule(module, spec, self._common, forwards.get(module)) for module, spec in chosen.items()]
        self._hooks = HookSet()

    @property
    def not_taken(self) -> dict[nn.Module, str]:
        """The modules with a call that could not be a region, and why."""
        return self._common.not_taken

    @property
    def num_calls(self) -> dict[nn.Module, int]:
        """How often each module was called so far, without those that were not."""
        return {region.module: count for region, count in self._common.thread.numbers.items()}

    @property
    def has_hooks(self) -> bool:
        return any(region.state.have_hooks(region.is_sharded) for region in self._regions) or any(
            region.is_sharded and has_other_hooks(region.module) for region in self._regions
        )

    def __enter__(self) -> Regions:
        self.claim("these regions are watched already: make a Regions for each context and each thread")
        self.is_entered = True
        thread = self._common.thread
        try:
            top = torch_private.top_saved_tensor_hooks(True)
            thread.outer, thread.is_in = None if top is None else top[0], True
            _watch(self._regions, self._hooks)
        except BaseException:
            self.leave(has_failed=True)
            raise
        return self

    def end_block(self, *, has_failed: bool) -> None:
        thread = self._common.thread
        self._hooks.remove()
        _end_after(thread.calls, 0)
        thread.is_in, thread.outer, thread.numbers = False, None, {}
        thread.counted.clear()


class RegionModule(Recomputed):
    """A module whose calls are regions."""

    def __init__(self, module: nn.Module, spec: RegionSpec, common: _Common, forward: SpannedForward | None) -> None:
        super().__init__(module, common.counts, spec.learned)
        self.forward = forward
        self._calls = spec.calls
        self._common = common
        self.is_sharded = is_sharded_by_fsdp2(module)
        """Whether FSDP2's hooks gather its parameters: the call then begins and ends within these hooks."""
        self._look_for_devices()

    def _look_for_devices(self) -> None:
        self._devices = frozenset([own.device for own in self.state.tensors if own.is_cuda])

    def watch(self, hooks: HookSet) -> None:
        if self.is_sharded:
            hooks.within_hooks(self.module, before=self._before, after=self._after)
        elif self.code is None:
            hooks.around_forward(self.module, before=self._before, after=self._after, with_kwargs=True)
        else:
            around_compiled(hooks, self.module, self._run)

    def _run(self, module: nn.Module, code: Code, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        running = self._common.thread.running
        if self in running:
            return code(*args, **kwargs)  # hooked twice
        running.add(self)
        try:
            self._before(module, args, kwargs)
            try:
                return code(*args, **kwargs)
            finally:
                self._after(module, args)
        finally:
            running.discard(self)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        """The forward pre-hook. If another thread has just removed it, torch passes no keyword arguments."""
        thread = self._common.thread
        if not thread.is_in or kwargs is None or not torch.is_grad_enabled():
            return
        top = torch_private.top_saved_tensor_hooks(True)
        is_own = top is not None and type(top[0]) in _OWN_HOLDERS
        if not is_own:
            if top is not None and getattr(top[0], "__module__", "") == torch_private.CHECKPOINT_HOOKS:
                return  # it recomputes what is inside
            if torch_private.backward_task() != -1:
                return  # this is a recompute of another's
        frame, calls = sys._getframe(3), thread.calls  # that of `Module._call_impl`
        while calls and not is_on_stack(calls[-1].frame, frame):
            _end_left(calls)  # which an interrupt has left
        if thread.counted.get(self) is frame:
            return  # hooked twice
        thread.counted[self] = frame
        number = thread.numbers.get(self, 0)
        thread.numbers[self] = number + 1
        for call in calls:
            call.inner.setdefault(self, number)
        if self.state.is_gathered and not self.state.is_current():  # they are there as long as the layer runs
            self.state.look_again()
            self._look_for_devices()
        if self._calls is not None and number not in self._calls:
            return
        if torch_private.functorch_stack() is not None:
            return  # what is saved is of no use outside of a transform
        has_modes = torch_private.num_dispatch_modes() > 0
        if has_modes and is_traced():
            return
        keep = self._common.keep
        try:
            if top is None or top[0] is thread.outer:
                top = None
            if top is None and keep is KeptHandle and not has_modes:
                inputs = Inputs(args, kwargs, KeptHandle)
            else:  # as autograd calls a hook, and as what is no part of the forward
                with torch.no_grad(), torch_private.without_dispatch_modes() if has_modes else nullcontext():
                    inputs = Inputs(args, kwargs, keep if top is None else _handing_to(top))
            call = RegionCall(self, frame, inputs, self._devices)
        except NoRegion as why:
            self._common.not_taken[self.module] = str(why)
            return
        call.below = None if top is None else top[0]
        calls.append(call)
        torch_private.push_saved_tensor_hooks(call, unpack)

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any = None) -> None:
        calls = self._common.thread.calls
        self._common.thread.counted.pop(self, None)
        if not calls or calls[-1].region is not self:
            return
        call, frame = calls[-1], sys._getframe(2)
        if frame is call.frame or frame.f_back is call.frame:
            call.drawn, call.before = drawn_from(call.before), ()
            if self.state.places:
                self.state.note_written(call.noted)
            top = torch_private.top_saved_tensor_hooks(True)
            if top is not None and top[0] is call:
                torch_private.pop_saved_tensor_hooks()
            else:
                take_off(call)
            call.frame = None
            calls.pop()
            if self.counts is not None and torch_private.backward_task() == -1:
                self.counts.num_dropped += len(call.places)

    def end_left(self, call: RegionCall) -> None:
        calls = self._common.thread.calls
        if call in calls:
            _end_after(calls, calls.index(call))

    def nesting(self, call: RegionCall) -> Nesting | None:
        return _Nesting(self._common.thread, call) if call.inner else None


class _Nesting(Nesting):
    """Makes calls in a recompute be regions, as they were in the forward, even after the context was left."""

    def __init__(self, thread: _Thread, call: RegionCall) -> None:
        self._thread, self._call = thread, call
        self._hooks = HookSet()
        self._before = self._thread.is_in, self._thread.numbers, len(self._thread.calls)

    def begin(self) -> None:
        self._thread.is_in, self._thread.numbers = True, dict(self._call.inner)
        _watch(self._call.inner, self._hooks)

    def end(self) -> None:
        self._hooks.remove()
        self._thread.is_in, self._thread.numbers, num_calls = self._before
        _end_after(self._thread.calls, num_calls)


def _watch(regions: Iterable[Recomputed], hooks: HookSet) -> None:
    forwards = [region.forward for region in regions if isinstance(region, RegionModule) and region.forward is not None]
    for forward in dict.fromkeys(forwards):
        forward.put(hooks)
    for region in regions:
        region.watch(hooks)


_OWN_HOLDERS = (RegionCall, Recompute)
"""The pack hooks of a region's call, and of its recompute."""


def _handing_to(hooks: HookPair) -> Callable[[Tensor], KeptHandle]:
    """Return a function that holds inputs by hooks within the context, as these hold saved tensors."""
    return lambda tensor: ForwardedHandle(tensor, *hooks, is_checked=True)


def _end_after(calls: list[RegionCall], num_calls: int) -> None:
    """End the calls after the first `num_calls`, which an interrupt has left open."""
    while len(calls) > num_calls:
        _end_left(calls)


def _end_left(calls: list[RegionCall]) -> None:
    """End the innermost call, which an interrupt has left open; may be called again."""
    call = calls[-1]
    if not take_off(call) and call.below is not None:
        top = torch_private.top_saved_tensor_hooks(True)
        if top is not None and top[0] is call.below:  # whose exit has taken off those of the call, and left its own
            torch_private.pop_saved_tensor_hooks()
    call.is_broken, call.frame = True, None
    calls.pop()
