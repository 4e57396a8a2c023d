"""One call of a region: a module whose forward runs again in the backward, so that autograd keeps none of its saved tensors.

The tensors that autograd saves in the forward are numbered. In place of each, it holds a *placeholder* with the shape, the
dtype and the call, which holds the module's inputs. The first placeholder that is requested runs the forward again. This gives
each living placeholder the tensor with its number, and stops after the last one. A placeholder gives its tensor away: if it is
requested again, by a second backward or a node that reads a saved tensor twice, the forward runs once more.

There are no reference cycles: a graph that is dropped frees its placeholders, calls and inputs.
"""

from __future__ import annotations

import sys
import threading
import weakref
from abc import ABC, abstractmethod
from functools import partial
from itertools import chain
from operator import itemgetter
from types import FrameType

import torch
from torch import Tensor, nn

from memkit import torch_private
from memkit.activations.recomputing.module_state import NOT_PLAIN, PLAIN, ModuleState, Noted, training_flag
from memkit.activations.recomputing.read_only import LearnedReads
from memkit.activations.recomputing.recompute import ADVICE, AS_IT_WAS, CHANGE_LATER, Recompute
from memkit.activations.recomputing.region_inputs import Inputs, NoRegion
from memkit.activations.recomputing.stacks import is_going_on, take_off
from memkit.activations.recomputing.surroundings import (
    GeneratorState,
    Surroundings,
    current_surroundings,
    states_on,
)
from memkit.activations.saved.counts import Counts
from memkit.compiled import code_of
from memkit.errors import ReplayMismatchError, note_on
from memkit.hooks import HookSet
from memkit.kept import ForwardedHandle, KeptHandle, modified_error
from memkit.labels import label
from memkit.sequentials import kind_of
from memkit.torch_state import leave_untraced


class Placeholder:
    """What autograd holds in place of a tensor that a region saves."""

    __slots__ = ("__weakref__", "call", "dtype", "shape", "tensor", "version")

    call: RegionCall
    shape: torch.Size
    dtype: torch.dtype
    tensor: Tensor | None
    """The tensor, from the recompute until a backward requests it."""
    version: int
    """The tensor's version when it was saved."""


class Nesting(ABC):
    """Makes regions inside a region be regions in its recompute as well."""

    @abstractmethod
    def begin(self) -> None:
        """Called before a recompute."""

    @abstractmethod
    def end(self) -> None:
        """Called after a recompute; may be called again."""


class Recomputed:
    """A module that is recomputed as a whole, and what is known of it from the last step (`learned`)."""

    def __init__(self, module: nn.Module, counts: Counts | None, learned: LearnedReads) -> None:
        self.module = module
        self.code = code_of(module)
        """The compiled code, if the module is compiled: it saves other tensors than the module's forward."""
        self.state = ModuleState(module, learned)
        self.counts = counts

    def watch(self, hooks: HookSet) -> None:
        """Set hooks on the module that see its calls."""

    def end_left(self, call: RegionCall) -> None:
        """End a call that an interrupt has left open, and the calls within it."""

    def nesting(self, call: RegionCall) -> Nesting | None:
        """Return what makes regions inside a call be regions in its recompute; None if there are none."""
        return None

    def error(self, need: str, found: str, do: str) -> ReplayMismatchError:
        """Return the error to raise if a recompute can't be exact."""
        if self.counts is not None:
            self.counts.has_mismatch = True
        return ReplayMismatchError(f"a {kind_of(self.module)} that is recomputed as a whole needs {need}; found {found}. {do}")


class RegionCall:
    """One call of a region. It is itself the pack hook of the forward.

    Args:
        region: the module that is called.
        frame: the caller's frame.
        inputs: the inputs of the call.
        devices: CUDA devices whose generators the module draws from, other than those of its inputs.
    """

    __slots__ = (
        "before",
        "below",
        "device",
        "drawn",
        "frame",
        "inner",
        "inputs",
        "is_broken",
        "lock",
        "noted",
        "places",
        "region",
        "surroundings",
    )

    def __init__(self, region: Recomputed, frame: FrameType, inputs: Inputs, devices: frozenset[torch.device]) -> None:
        self.region = region
        self.frame: FrameType | None = frame
        """The caller's frame during the call. If it is no longer on the stack, an interrupt has ended the call."""
        self.inputs = inputs
        self.places: list[weakref.ref[Placeholder]] = []
        self.is_broken = False
        self.lock = threading.RLock()
        self.surroundings: Surroundings = current_surroundings()
        self.drawn: tuple[GeneratorState, ...] = ()
        """The generators that the forward has drawn from, with their states before it."""
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
        if not PLAIN.issuperset(map(type, attributes)):  # what a forward has left there may hold a graph
            attributes = tuple([value if type(value) in PLAIN else NOT_PLAIN for value in attributes])
        noted.attributes = attributes
        if state.places:
            state.note_buffers(noted)
        cpu = torch.default_generator
        self.before: tuple[GeneratorState, ...] = ((cpu, cpu.get_state()),)
        """The states of all generators before the call, while it is running."""
        if inputs.devices:
            devices = devices.union(inputs.devices)
        if devices:
            try:
                self.before += states_on(sorted(devices, key=str))
            except RuntimeError:
                raise NoRegion("it is being captured into a CUDA graph") from None
        self.device = torch.get_default_device() if torch_private.num_function_modes() else None
        """The default device, if one is set."""
        self.below: object = None
        """The pack hook outside of this one, if that is within the context."""
        self.inner: dict[Recomputed, int] = {}
        """Regions that were called within it, each with the number of its first such call."""

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
        return place

    def _hand_on(self, tensor: Tensor) -> KeptHandle:
        """Remove the hooks of a call that an interrupt has ended, and give the tensor to the hooks outside."""
        self.region.end_left(self)
        take_off(self)
        outer = torch_private.top_saved_tensor_hooks(True)
        return KeptHandle(tensor) if outer is None else ForwardedHandle(tensor, *outer, is_checked=True)

    def recompute(self) -> None:
        """Run the forward again, and give the placeholders their tensors. The lock is held.

        Raises:
            RuntimeError: an input was written to since.
            ReplayMismatchError: a parameter or a buffer was changed since, or the forward has saved something else.
        """
        region = self.region
        if self.is_broken or (self.frame is not None and not is_going_on(self.frame)):
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
        if region.counts is not None:
            region.counts.num_replays += 1
            if region.counts.trial is not None:
                region.counts.trial.begin_backward()


def unpack(place: Placeholder | KeptHandle) -> Tensor:
    """The unpack hook of regions: return the tensor of a placeholder."""
    if isinstance(place, KeptHandle):
        return place.unpack()
    tensor = place.tensor
    while tensor is None:  # another thread may take what is made
        with place.call.lock:
            if place.tensor is None:
                place.call.recompute()
            tensor = place.tensor
    place.tensor = None
    if torch_private.version_of(tensor) != place.version:
        raise modified_error(tensor, place.version)
    return tensor


for _hook in (RegionCall.__call__, unpack):
    leave_untraced(_hook)
