"""One call of a region: a module's forward of which autograd keeps nothing, and that is run again in the backward.

What autograd saves in the forward is numbered. It holds a *placeholder* in the place of each, with its shape and dtype, and the
call. That has the module's inputs. The first placeholder that is asked for has the forward run again; that hands to each
placeholder that autograd still holds what was saved under its number, and stops behind the last of these. A placeholder lets go
what it hands out. Asked once more, by a second backward or by a node that reads what it has saved twice, it has the forward run
once more.

Nothing here refers to what refers to it: a graph that is dropped takes its placeholders, calls and inputs along.
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
    """What autograd holds in the place of a tensor that a region saves."""

    __slots__ = ("__weakref__", "call", "dtype", "shape", "tensor", "version")

    call: RegionCall
    shape: torch.Size
    dtype: torch.dtype
    tensor: Tensor | None
    """Once the forward was run again, and until a backward has asked for it."""
    version: int
    """How often that was written to before it was saved."""


class Nesting(ABC):
    """Has the regions inside of one be regions when that is recomputed."""

    @abstractmethod
    def begin(self) -> None:
        """It is about to be recomputed."""

    @abstractmethod
    def end(self) -> None:
        """It was recomputed; may be called again."""


class Recomputed:
    """A module that is recomputed as a whole, and what is known of it ahead, or was `learned` in the last step."""

    def __init__(self, module: nn.Module, counts: Counts | None, learned: LearnedReads) -> None:
        self.module = module
        self.code = code_of(module)
        """What runs it where it is compiled: that saves other tensors than its forward does."""
        self.state = ModuleState(module, learned)
        self.counts = counts

    def watch(self, hooks: HookSet) -> None:
        """See the calls of the module."""

    def end_left(self, call: RegionCall) -> None:
        """End a call of it that an interrupt has left, and those within."""

    def nesting(self, call: RegionCall) -> Nesting | None:
        """Return what has the regions inside be regions in a recompute as well, if there are any."""
        return None

    def error(self, need: str, found: str, do: str) -> ReplayMismatchError:
        """Return what to raise where a recompute cannot be exact."""
        if self.counts is not None:
            self.counts.has_mismatch = True
        return ReplayMismatchError(f"a {kind_of(self.module)} that is recomputed as a whole needs {need}; found {found}. {do}")


class RegionCall:
    """One call of a region. It is itself the hook that autograd gives what it saves in the forward.

    Args:
        region: the module that is called.
        frame: where it is called from.
        inputs: what it is called with.
        devices: CUDA devices that the module draws on, apart from those of its inputs.
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
        """While it is going on. Once that is off the stack, an interrupt has ended it."""
        self.inputs = inputs
        self.places: list[weakref.ref[Placeholder]] = []
        self.is_broken = False
        self.lock = threading.RLock()
        self.surroundings: Surroundings = current_surroundings()
        self.drawn: tuple[GeneratorState, ...] = ()
        """Generators that the forward has drawn from, and where they were before."""
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
        """Where all generators were, while it is going on."""
        if inputs.devices:
            devices = devices.union(inputs.devices)
        if devices:
            try:
                self.before += states_on(sorted(devices, key=str))
            except RuntimeError:
                raise NoRegion("it is being captured into a CUDA graph") from None
        self.device = torch.get_default_device() if torch_private.num_function_modes() else None
        """Where tensors are made by default, if something says so."""
        self.below: object = None
        """The pack hook below, where it is within the context."""
        self.inner: dict[Recomputed, int] = {}
        """Regions of which calls were within it, and the number of the first."""

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
        """An interrupt has ended the call, and has left its hooks on: take them off, and give those outside what they are to
        have had."""
        self.region.end_left(self)
        take_off(self)
        outer = torch_private.top_saved_tensor_hooks(True)
        return KeptHandle(tensor) if outer is None else ForwardedHandle(tensor, *outer, is_checked=True)

    def recompute(self) -> None:
        """Run the forward again, and hand out what it saves. The lock is held.

        Raises:
            RuntimeError: an input was written to since.
            ReplayMismatchError: a parameter or a buffer was changed since, or it has saved something else.
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
    """Return what a placeholder stands for: the other half of the hooks of a `RegionCall`."""
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
