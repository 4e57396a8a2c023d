"""One call of a region: a module whose forward runs again in the backward, so that autograd keeps none of its saved tensors.

The tensors that autograd saves in the forward are numbered. In place of each, it holds a *placeholder* with the shape, the
dtype and the call, which holds the module's inputs. The first requested placeholder runs the forward again. This gives each
living placeholder the tensor with its number, and stops after the last one. A placeholder gives its tensor away: if it is
requested again, by a second backward or a node that reads a saved tensor twice, the forward runs once more.

There are no reference cycles: a graph that is dropped frees its placeholders, calls and inputs.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import chain
from operator import is_, itemgetter
from types import BuiltinFunctionType, FrameType, FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from memkit.activations.recomputing.module_state import (
    NOT_PLAIN,
    PLAIN,
    GeneratorState,
    LearnedReads,
    ModuleState,
    NoRegion,
    Noted,
    Originals,
    Surroundings,
    current_surroundings,
    drawn_from,
    set_generators,
    set_surroundings,
    states_of,
    states_on,
    training_flag,
)
from memkit.activations.saved.counts import Counts
from memkit.core import torch_private
from memkit.core.calls import Code
from memkit.core.compiled import around_compiled, code_of
from memkit.core.hooks import HookSet
from memkit.core.kept import ForwardedHandle, KeptHandle, modified_error
from memkit.core.sequentials import SpannedForward, kind_of
from memkit.core.tensors import Geometry, is_range_of_bytes
from memkit.core.torch_state import has_own_dispatch, is_sharded_by_fsdp2, is_traced, label, leave_untraced
from memkit.errors import ReplayMismatchError, note_on


def take_off(pack: Callable[[Tensor], object]) -> bool:
    """Remove hooks, even below others; return whether they were on."""
    top = torch_private.top_saved_tensor_hooks(True)
    above = []
    while top is not None and top[0] is not pack:
        above.append(top)
        torch_private.pop_saved_tensor_hooks()
        top = torch_private.top_saved_tensor_hooks(True)
    if top is not None:
        torch_private.pop_saved_tensor_hooks()
    for pair in reversed(above):
        torch_private.push_saved_tensor_hooks(*pair)
    return top is not None


def is_on_stack(frame: FrameType | None, start: FrameType | None) -> bool:
    while start is not None and start is not frame:
        start = start.f_back
    return start is not None


class Inputs:
    """The arguments of a module call: handles for tensors, and containers that are rebuilt for each recompute; `NoRegion` if a
    forward may change an argument of this kind."""

    __slots__ = ("_handles", "_indices", "_kwargs", "_leaves", "_needs_grad", "_spec", "devices")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], keep: Callable[[Tensor], KeptHandle]) -> None:
        leaves: list[Any] = [*args, *kwargs.values()]
        self._kwargs = tuple(kwargs)
        self._spec = None
        for leaf in leaves:
            if type(leaf) not in _SINGLE:
                leaves, self._spec = torch_private.tree_flatten((args, kwargs))
                break
        self._handles: list[KeptHandle] = []
        self._needs_grad: list[bool] = []
        self._indices: list[int] = []
        """For each leaf, its tensor's index, -1 for none: a tensor passed twice is one tensor in a recompute too."""
        self.devices: list[torch.device] = []
        found: dict[int, int] = {}
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                if type(leaf) not in _SINGLE and not isinstance(leaf, _CONSTANTS):
                    raise NoRegion(f"it is called with a {type(leaf).__name__}, which its forward may change")
                self._indices.append(-1)
                continue
            index = found.get(id(leaf), -1)
            if index < 0:
                index = found[id(leaf)] = len(found)
                self._handles.append(KeptHandle(leaf) if type(leaf) is nn.Parameter else keep(leaf))
                self._needs_grad.append(leaf.requires_grad)
                if leaf.is_cuda:
                    self.devices.append(leaf.device)
            self._indices.append(index)
            leaves[place] = None
        self._leaves = leaves

    def rebuild(self) -> tuple[Sequence[Any], dict[str, Any]]:
        """Raises `RuntimeError` if a tensor was written to since."""
        tensors = []
        for handle, needs_grad in zip(self._handles, self._needs_grad, strict=True):
            tensor = handle.unpack().detach()
            if needs_grad:
                tensor.requires_grad_()
            tensors.append(tensor)
        leaves = self._leaves.copy()
        for place, index in enumerate(self._indices):
            if index >= 0:
                leaves[place] = tensors[index]
        if self._spec is not None:
            args, kwargs = torch_private.tree_unflatten(leaves, self._spec)
            return args, kwargs
        num_args = len(leaves) - len(self._kwargs)
        return leaves[:num_args], dict(zip(self._kwargs, leaves[num_args:], strict=True))


_SINGLE = frozenset({Tensor, nn.Parameter, int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size})
_CONSTANTS = (
    *(int, float, complex, str, bytes, type(None), type(...), slice, range, Enum, type, FunctionType, BuiltinFunctionType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


AS_IT_WAS = "what it reads to be in the backward as it was in the forward"
CHANGE_LATER = "Change it after the backward"
ADVICE = "Is it deterministic, and is what it reads the same in the backward?"
_NO_NODE = -1


class _Stop(Exception):  # noqa: N818  # no error: a recompute has made all needed tensors
    """Raised at the save of the last tensor that a backward needs, or at the next save."""


class Recompute:
    """It is itself the pack hook, and remembers what to restore after it."""

    def __init__(self, call: RegionCall) -> None:
        state = call.region.state
        self._call = call
        self._places: list[Placeholder | None] = list(map(weakref.ref.__call__, call.places))
        last = len(self._places) - 1
        while self._places[last] is None:
            last -= 1
        self._last = last
        self._unwritten = _NO_NODE
        """The last node that saved a tensor without grad. Its op may not have written the tensor yet, and must run to its end
        (see [Note: saved before it is written] in `memkit.activations.offloading.window`)."""
        self.num_saved = 0
        self._grad = torch.is_grad_enabled()
        self._before = current_surroundings()
        self._drawn = states_of(call.drawn) if call.drawn else ()
        self._buffers = state.others(call.noted) if state.has_others else ()
        self._originals = state.originals(call.noted, self._buffers) if call.noted.statistics else None
        self._flags = tuple(map(training_flag, state.parts))
        try:
            self._attributes = tuple(
                chain.from_iterable(map(itemgetter.__call__, state.attribute_getters, state.attribute_dicts))
            )
        except KeyError as error:
            raise call.region.error(AS_IT_WAS, f"that its attribute {error} was deleted", CHANGE_LATER) from None
        thread = call.region.thread
        self._nested = (HookSet(), thread, thread.is_in, thread.numbers, len(thread.calls)) if call.inner else None
        """With it, calls in the recompute are regions as in the forward, even after the context was left."""

    def __call__(self, tensor: Tensor) -> Tensor:
        number = self.num_saved
        if number > self._last:
            if self._unwritten not in (_NO_NODE, torch_private.node_number()) and torch_private.backward_task() == -1:
                raise _Stop
            return tensor.detach()  # a backward within the forward
        self.num_saved = number + 1
        place = self._places[number]
        if tensor.requires_grad:
            tensor = tensor.detach()
        else:
            self._unwritten = torch_private.node_number()
        if place is not None:
            if tensor.shape != place.shape or tensor.dtype is not place.dtype:
                raise self._call.region.error(
                    f"its forward to save {_described(place.shape, place.dtype)} as number {number} whenever it is run",
                    _described(tensor.shape, tensor.dtype),
                    ADVICE,
                )
            place.tensor, place.version = tensor, torch_private.version_of(tensor)
            if self._originals:
                place.tensor, place.version = _original(tensor, self._originals)
        if number == self._last and self._unwritten != torch_private.node_number():
            raise _Stop
        return tensor

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        call, is_back = self._call, False
        try:
            try:
                if self._nested is not None:
                    hooks, thread, *_ = self._nested
                    thread.is_in, thread.numbers = True, dict(call.inner)
                    watch(call.inner, hooks)
                torch_private.push_saved_tensor_hooks(self, unpack_recomputed)
                if not self._grad:
                    torch.set_grad_enabled(True)
                if self._before != call.surroundings:
                    set_surroundings(call.surroundings)
                if call.drawn:
                    set_generators(call.drawn)
                for buffers, name, _, other in self._buffers:
                    buffers[name] = other
                if not all(map(is_, self._attributes, call.noted.attributes)):
                    call.region.state.set_attributes(call.noted.attributes)
                if self._flags != call.noted.flags:
                    call.region.state.set_flags(call.noted.flags)
                if call.device is None and not torch_private.num_function_modes():
                    (call.region.code or call.region.module.forward)(*args, **kwargs)
                else:
                    with call.device or torch.device("cpu"):
                        (call.region.code or call.region.module.forward)(*args, **kwargs)
            except _Stop:
                if self.num_saved <= self._last:
                    raise  # it belongs to another recompute
            finally:
                self._put_back()
                is_back = True
        finally:
            if not is_back:  # an interrupt came in between
                self._put_back()
        return self.num_saved > self._last

    def _put_back(self) -> None:
        if self._nested is not None:
            hooks, thread, is_in, numbers, num_calls = self._nested
            hooks.remove()
            thread.is_in, thread.numbers = is_in, numbers
            end_after(thread.calls, num_calls)
        top = torch_private.top_saved_tensor_hooks(True)
        if top is not None and top[0] is self:
            torch_private.pop_saved_tensor_hooks()
        else:
            take_off(self)
        if not self._grad:
            torch.set_grad_enabled(False)
        if self._before != self._call.surroundings:
            set_surroundings(self._before)
        if self._drawn:
            set_generators(self._drawn)
        for buffers, name, buffer, _ in self._buffers:
            buffers[name] = buffer
        if self._attributes:
            self._call.region.state.set_attributes(self._attributes)
        if self._flags != self._call.noted.flags:
            self._call.region.state.set_flags(self._flags)

    def forget(self) -> None:
        for place in self._places:
            if place is not None:
                place.tensor = None


def _described(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{list(shape)} of {dtype}"


def _original(tensor: Tensor, originals: Originals) -> tuple[Tensor, int]:
    storage = tensor.untyped_storage() if is_range_of_bytes(tensor) else None
    found = None if storage is None else originals.get(torch_private.storage_address(storage))
    if found is None:
        return tensor, torch_private.version_of(tensor)
    if tensor.shape == found[0].shape:
        return found
    view = Geometry.of(tensor).over(found[0].untyped_storage())
    return view, torch_private.version_of(view)


def unpack_recomputed(tensor: Tensor) -> Tensor:
    return tensor


class Placeholder:
    """Autograd holds it in place of a tensor that a region saves."""

    __slots__ = ("__weakref__", "call", "dtype", "shape", "tensor", "version")

    call: RegionCall
    shape: torch.Size
    dtype: torch.dtype
    tensor: Tensor | None
    version: int


class RegionCall:
    """One call of a region, itself the pack hook. It draws from the generators of `devices` and of its inputs."""

    def __init__(self, region: RegionModule, frame: FrameType, inputs: Inputs, devices: frozenset[torch.device]) -> None:
        self.region = region
        self.frame: FrameType | None = frame
        """The caller's frame during the call. If it is no longer on the stack, an interrupt has ended the call."""
        self.inputs = inputs
        self.places: list[weakref.ref[Placeholder]] = []
        self.is_broken = False
        self.lock = threading.RLock()
        self.surroundings: Surroundings = current_surroundings()
        self.drawn: tuple[GeneratorState, ...] = ()
        state = region.state
        self.noted = noted = Noted()
        noted.flags = tuple(map(training_flag, state.parts))
        noted.statistics = state.statistics(noted.flags) if state.has_statistics else ()
        if tuple(map(id, chain.from_iterable(map(dict.values, state.of_parts)))) != state.ids:
            raise NoRegion("it is called with other parameters than it had (torch.func.functional_call, perhaps)")
        noted.parameters = tuple(chain.from_iterable(map(partial.__call__, state.parameter_facts)))
        noted.storages = tuple(map(Tensor.untyped_storage, state.with_data))
        try:
            attributes = tuple(chain.from_iterable(map(itemgetter.__call__, state.attribute_getters, state.attribute_dicts)))
        except KeyError as error:
            raise NoRegion(f"its attribute {error} was deleted") from None
        if not PLAIN.issuperset(map(type, attributes)):  # attributes that a forward has set may hold a graph
            attributes = tuple([value if type(value) in PLAIN else NOT_PLAIN for value in attributes])
        noted.attributes = attributes
        if state.places:
            state.note_buffers(noted)
        cpu = torch.default_generator
        self.before: tuple[GeneratorState, ...] = ((cpu, cpu.get_state()),)
        if inputs.devices:
            devices = devices.union(inputs.devices)
        if devices:
            try:
                self.before += states_on(sorted(devices, key=str))
            except RuntimeError:
                raise NoRegion("it is being captured into a CUDA graph") from None
        self.device = torch.get_default_device() if torch_private.num_function_modes() else None
        self.below: object = None
        """The pack hook outside of this one, if it is within the context."""
        self.inner: dict[RegionModule, int] = {}
        """Regions that were called within it, each with the number of its first such call."""
        self.watched: Watched | None = None

    def __call__(self, tensor: Tensor) -> Placeholder | KeptHandle:
        above: FrameType | None = sys._getframe()
        while above is not self.frame and above is not None:
            above = above.f_back
        if above is None and torch_private.backward_task() == -1:  # a backward in the forward may have a thread of its own
            return self._hand_on(tensor)
        place = Placeholder()
        place.call, place.tensor = self, None
        place.shape, place.dtype = tensor.shape, tensor.dtype
        self.places.append(weakref.ref(place))
        if self.watched is not None:
            self.watched.note(tensor)
        return place

    def _hand_on(self, tensor: Tensor) -> KeptHandle:
        """Remove the hooks of a call that an interrupt has ended, and give the tensor to the hooks outside."""
        calls = self.region.thread.calls
        if self in calls:
            end_after(calls, calls.index(self))
        take_off(self)
        outer = torch_private.top_saved_tensor_hooks(True)
        return KeptHandle(tensor) if outer is None else ForwardedHandle(tensor, *outer, is_checked=True)

    def recompute(self) -> None:
        """Run the forward again, and give the placeholders their tensors. The lock is held. It raises if an input, a parameter
        or a buffer was changed since, or if the forward has saved other tensors."""
        region = self.region
        running = () if self.frame is None else sys._current_frames().values()
        if self.is_broken or (self.frame is not None and not any(is_on_stack(self.frame, start) for start in running)):
            raise region.error("a forward that has come to its end", "one that was interrupted", "Run the forward again")
        state = region.state
        if (
            tuple(chain.from_iterable(map(partial.__call__, state.parameter_facts))) != self.noted.parameters
            or tuple(map(id, chain.from_iterable(map(dict.values, state.of_parts)))) != state.ids
        ):
            raise region.error(AS_IT_WAS, state.what_parameter_has_changed(self.noted), CHANGE_LATER)
        if state.places and (changed := state.what_has_changed(self.noted)):
            raise region.error(AS_IT_WAS, changed, CHANGE_LATER)
        try:
            args, kwargs = self.inputs.rebuild()
        except RuntimeError as error:
            note_on(error, f"It is an input of a {kind_of(region.module)} whose forward is run again in the backward.")
            raise
        recompute = Recompute(self)
        try:
            if torch_private.profiler_is_on():
                with label("recompute"):
                    is_whole = recompute.run(args, kwargs)
            else:
                is_whole = recompute.run(args, kwargs)
            if not is_whole:
                num_saved = f"{recompute.num_saved}"
                raise region.error(f"its forward to save {len(self.places)} tensors whenever it is run", num_saved, ADVICE)
        except BaseException:
            recompute.forget()
            raise
        counts = region.thread.counts
        if counts is not None:
            counts.num_replays += 1
            if counts.trial is not None:
                counts.trial.begin_backward()


def unpack(place: Placeholder | KeptHandle) -> Tensor:
    if isinstance(place, KeptHandle):
        return place.unpack()
    tensor = place.tensor
    while tensor is None:  # another thread may take the tensors
        with place.call.lock:
            if place.tensor is None:
                place.call.recompute()
            tensor = place.tensor
    place.tensor = None
    if torch_private.version_of(tensor) != place.version:
        raise modified_error(tensor, place.version)
    return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionSpec:
    calls: frozenset[int] | None = None
    """Numbers from 0 on in one `with` block; None for all. Calls without grad or in a checkpoint don't count."""
    num_calls: int = 0
    """How often a planned step calls it, recomputed or not."""
    learned: LearnedReads = field(default_factory=LearnedReads)


class Watched:
    """Adds up the storages that a call of a region saves, and holds them until its end, as its second run will."""

    def __init__(self, held: Iterable[Tensor], learn: Callable[[int], None]) -> None:
        """`held` are tensors that are there in any case; `learn` gets the bytes."""
        self._held = {torch_private.storage_address(tensor.untyped_storage()) for tensor in held if is_range_of_bytes(tensor)}
        self._learn = learn
        self._is_countable = True
        self._storages = dict[int, torch.UntypedStorage]()

    def note(self, tensor: Tensor) -> None:
        if type(tensor) is nn.Parameter or type(torch_private.base_of(tensor)) is nn.Parameter:
            return
        try:
            storage = tensor.untyped_storage()
        except RuntimeError:  # it is no range of bytes
            self._is_countable = False
            return
        self._is_countable &= not has_own_dispatch(tensor)
        self._storages[torch_private.storage_address(storage)] = storage

    def end(self) -> None:
        for address in self._held:
            self._storages.pop(address, None)
        if self._is_countable:
            self._learn(sum(map(torch.UntypedStorage.nbytes, self._storages.values())))


class RegionStep(Protocol):
    def keeps(self, module: nn.Module, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool | Watched:
        """Tell whether a call is left as it is, or what watches it. It has a number among those of its module in the step."""


class RegionsThread(threading.local):
    """What a thread knows of a context's regions: its own calls, and the objects that all threads share."""

    def __init__(
        self,
        keep: Callable[[Tensor], KeptHandle],
        counts: Counts | None,
        not_taken: dict[nn.Module, str],
        step: RegionStep | None,
    ) -> None:
        self.keep, self.counts, self.not_taken, self.step = keep, counts, not_taken, step
        self.is_in = False
        self.outer: object = None
        self.numbers: dict[RegionModule, int] = {}
        self.calls: list[RegionCall] = []
        self.counted: dict[RegionModule, FrameType] = {}
        """For each region, the frame of its last counted call, until that ends. A context and a recompute within it, perhaps in
        another thread, may both hook a region."""
        self.running: set[RegionModule] = set()


class RegionModule:
    def __init__(self, module: nn.Module, spec: RegionSpec, thread: RegionsThread, forward: SpannedForward | None) -> None:
        self.module, self.forward = module, forward
        self.code = code_of(module)
        """The code of a compiled module: it saves other tensors than the module's forward."""
        self.state = ModuleState(module, spec.learned)
        self.thread, self._calls = thread, spec.calls
        self.is_sharded = is_sharded_by_fsdp2(module)
        """FSDP2's hooks gather its parameters: the call then begins and ends within these hooks."""
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
        running = self.thread.running
        if self in running:
            return code(*args, **kwargs)  # hooked twice
        running.add(self)
        try:
            self._before(module, args, kwargs)
            output = None
            try:
                output = code(*args, **kwargs)
                return output
            finally:
                self._after(module, args, output)
        finally:
            running.discard(self)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        """The forward pre-hook. If another thread has just removed it, torch passes no keyword arguments."""
        thread = self.thread
        if not thread.is_in or kwargs is None or not torch.is_grad_enabled():
            return
        top = torch_private.top_saved_tensor_hooks(True)
        is_own = top is not None and type(top[0]) in (RegionCall, Recompute)
        if not is_own:
            if top is not None and getattr(top[0], "__module__", "") == torch_private.CHECKPOINT_HOOKS:
                return  # it recomputes what is inside
            if torch_private.backward_task() != -1:
                return  # another region recomputes
        frame, calls = sys._getframe(3), thread.calls  # the frame of `Module._call_impl`
        while calls and not is_on_stack(calls[-1].frame, frame):
            _end_left(calls)  # which an interrupt has left
        if thread.counted.get(self) is frame:
            return  # hooked twice
        thread.counted[self] = frame
        number = thread.numbers.get(self, 0)
        thread.numbers[self] = number + 1
        for call in calls:
            call.inner.setdefault(self, number)
        if self.state.is_gathered and not self.state.is_current():  # gathered parameters exist as long as the layer runs
            self.state.look_again()
            self._look_for_devices()
        if self._calls is not None and number not in self._calls:
            return
        if torch_private.functorch_stack() is not None:
            return  # tensors saved within a transform are of no use outside
        has_modes = torch_private.num_dispatch_modes() > 0
        if has_modes and is_traced():
            return
        keep, step, calls_again = thread.keep, thread.step, top is not None and type(top[0]) is Recompute
        watched = None if step is None or calls_again else step.keeps(self.module, number, args, kwargs)
        if watched is True:
            return
        try:
            if top is None or top[0] is thread.outer:
                top = None
            if top is None and keep is KeptHandle and not has_modes:
                inputs = Inputs(args, kwargs, KeptHandle)
            else:  # as autograd calls a hook, and outside of the forward
                with torch.no_grad(), torch_private.without_dispatch_modes() if has_modes else nullcontext():
                    if top is not None:  # hooks within the context hold it, as they hold saved tensors
                        keep = partial(ForwardedHandle, pack=top[0], unpack=top[1], is_checked=True)
                    inputs = Inputs(args, kwargs, keep)
            call = RegionCall(self, frame, inputs, self._devices)
        except NoRegion as why:
            thread.not_taken[self.module] = str(why)
            return
        call.below = None if top is None else top[0]
        call.watched = watched or None
        calls.append(call)
        torch_private.push_saved_tensor_hooks(call, unpack)

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any = None) -> None:
        calls = self.thread.calls
        self.thread.counted.pop(self, None)
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
            if call.watched is not None:
                watched, call.watched = call.watched, None
                if output is not None:  # else it has failed
                    watched.end()
            counts = self.thread.counts
            if counts is not None and torch_private.backward_task() == -1:
                counts.num_dropped += len(call.places)

    def error(self, need: str, found: str, do: str) -> ReplayMismatchError:
        if self.thread.counts is not None:
            self.thread.counts.has_mismatch = True
        return ReplayMismatchError(f"a {kind_of(self.module)} that is recomputed as a whole needs {need}; found {found}. {do}")


def watch(regions: Iterable[RegionModule], hooks: HookSet) -> None:
    for forward in dict.fromkeys(region.forward for region in regions if region.forward is not None):
        forward.put(hooks)
    for region in regions:
        region.watch(hooks)


def end_after(calls: list[RegionCall], num_calls: int) -> None:
    """End the calls after the first `num_calls`, which an interrupt has left open."""
    while len(calls) > num_calls:
        _end_left(calls)


def _end_left(calls: list[RegionCall]) -> None:
    """End the innermost call, which an interrupt has left open; may be called again."""
    call = calls[-1]
    if not take_off(call) and call.below is not None:
        top = torch_private.top_saved_tensor_hooks(True)
        if top is not None and top[0] is call.below:  # its exit has removed the call's hooks and left its own
            torch_private.pop_saved_tensor_hooks()
    call.is_broken, call.frame, call.watched = True, None, None
    calls.pop()


leave_untraced(Recompute.__call__)
leave_untraced(unpack_recomputed)
leave_untraced(RegionCall.__call__)
leave_untraced(unpack)
