"""Layers in steps that no plan is for: as many are recomputed as a whole as the budget asks for at the step's size; the others
are kept.

[Note: layers by size] Steps of other sizes have the same structure: they call the same layers. The bytes that each layer saves,
and those on the device beside what layers save, depend on the size. Both are measured in steps that recompute, and foretold for
other sizes. At the first layer of a step its size shows, and the calls to keep are chosen: those that take longest to run again
for each byte, and of equal ones the last, which the backward frees first.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import weakref
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from memkit.activations.context import shapes_of
from memkit.activations.recomputing.budget import RematOptions
from memkit.activations.recomputing.region_calls import RegionSpec, Watched
from memkit.activations.recomputing.regions import Regions, why_not_region
from memkit.activations.recomputing.unrecorded import IdleStage, StageWithRegions
from memkit.activations.saved.counts import Counts
from memkit.activations.saved.entry import Entry, handing_on, moving_in
from memkit.core import torch_private
from memkit.core.compiled import is_compiled
from memkit.core.hooks import HookSet, innermost_pack
from memkit.plan import Action, RegionPlanner
from memkit.recording.cost import host_costs

if TYPE_CHECKING:
    from memkit.activations.saved.state import RematState
    from memkit.activations.saved.traces import Trace
    from memkit.core.hooks import SavedTensorHooks
    from memkit.device import Device, Event
    from memkit.plan import ModuleCall, RegionNeeds

_LOGGER = logging.getLogger(__name__)
_MOSTLY = 2 / 3
"""If more than this fraction of all saved bytes stays with all layers recomputed, ops are recorded in all steps."""
_DIGITS = re.compile(r"\d+")
_NEAR = 1.5
"""Sizes between two known ones that are within this factor are foretold from these, not measured."""
_FINE = 50
"""Bytes within one of so many steps between a number and its double are taken for equal."""
_ALIKE = 1.01
"""Bytes for each element that grow by less with the size are taken for constant."""


Kind = tuple[str, type[nn.Module] | None]
"""A module's name without numbers, and its class: layers of a kind are alike."""


class Curve:
    """Bytes that grow with a size. Some sizes were measured."""

    def __init__(self) -> None:
        self._known: list[tuple[int, float]] = []

    def __bool__(self) -> bool:
        return bool(self._known)

    def wants(self, size: int) -> bool:
        """Tell whether a size is far from those that were measured."""
        known, place = self._known, bisect_left(self._known, (size,))
        if place == len(known):
            return True
        if known[place][0] == size:
            return False
        return place == 0 or known[place][0] > _NEAR * known[place - 1][0]

    def knows(self, size: int) -> bool:
        place = bisect_left(self._known, (size,))
        return place < len(self._known) and self._known[place][0] == size

    def note(self, size: int, num_bytes: float) -> None:
        known = self._known
        place = bisect_left(known, (size,))
        known[place : place + (place < len(known) and known[place][0] == size)] = [(size, num_bytes)]

    def at(self, size: int) -> float:
        """Return the bytes at a size. Two known sizes have a line between them, which is above any convex curve. Below the
        smallest they are in proportion, and beyond the largest they grow with the size's square, unless the known ones are in
        proportion over a good part of the range."""
        known = self._known
        place = bisect_left(known, (size,))
        if place < len(known):
            right_size, right_bytes = known[place]
            if right_size == size:
                return right_bytes
            if place == 0:
                return right_bytes * size / right_size
            left_size, left_bytes = known[place - 1]
            return left_bytes + (right_bytes - left_bytes) * (size - left_size) / (right_size - left_size)
        largest, num_bytes = known[-1]
        growth = size / max(largest, 1)
        before = next((found for found in reversed(known) if _NEAR * found[0] <= largest), None)
        is_linear = before is not None and num_bytes * before[0] <= _ALIKE * before[1] * largest
        return num_bytes * (growth if is_linear else growth * growth)

    def least_at(self, size: int) -> float:
        """As `at`, but beyond the largest known size the least: convex curves are above the line through the last two."""
        known = self._known
        (before_size, before_bytes), (last_size, last_bytes) = known[max(len(known) - 2, 0)], known[-1]
        if size <= last_size:
            return self.at(size)
        slope = (last_bytes - before_bytes) / (last_size - before_size) if before_size < last_size else 0.0
        return last_bytes + max(slope, 0.0) * (size - last_size)


@dataclass(eq=False, slots=True)
class LayerCall:
    """A layer's call with one number in a step, from step to step."""

    kind: Kind
    saved: Curve = field(default_factory=Curve)
    size: int = 0
    """The elements of its inputs in the last step that was whole; 0 if that did not call it."""
    input_bytes: int = 0
    times: tuple[Event, Event] | None = None
    seconds: float = 0.0

    def bytes_at(self, growth: float) -> float:
        return self.saved.at(round(self.size * growth))


Room = Callable[["Layers", "Foretold"], float]
"""Returns the most bytes that kept layers may save in a step."""


@dataclass(frozen=True, slots=True)
class Foretold:
    """A step's bytes if all layers are kept, by the size of its first layer's input."""

    size: int
    saved_bytes: float
    largest_bytes: float
    input_bytes: float


class Layers:
    """A model's layers, and their bytes by size: see [Note: layers by size]."""

    def __init__(
        self, found: Mapping[nn.Module, tuple[Kind, RegionSpec]], needs: Sequence[tuple[Trace, RegionNeeds]] = ()
    ) -> None:
        self.needs = needs
        """The bytes of recorded steps with all layers recomputed."""
        names = Counter(type(module).__name__ for module in found)
        self.described = ", ".join(f"{count} {name}" for name, count in names.items())
        self.why_not = ""
        """Why those around them can't be recomputed."""
        self.are_all = False
        """All steps have layers from now on."""
        self._found = {weakref.ref(module): kind_and_spec for module, kind_and_spec in found.items()}
        self._calls = weakref.WeakKeyDictionary[nn.Module, list[LayerCall]]()
        self._size = 0
        """Of the first layer's inputs in the last step that was whole."""
        self.is_counted = True
        """The device's counter sees these tensors."""
        self.beside = Curve()
        """The most bytes on the device beside those at a step's begin and what kept layers have saved."""

    def __bool__(self) -> bool:
        return any(reference() is not None for reference in self._found)

    def specs(self) -> dict[nn.Module, RegionSpec]:
        return {module: spec for reference, (_, spec) in self._found.items() if (module := reference()) is not None}

    def call(self, module: nn.Module, number: int) -> LayerCall:
        calls = self._calls.get(module)
        if calls is None:
            calls = self._calls[module] = []
        while len(calls) <= number:
            calls.append(LayerCall(self._found[weakref.ref(module)][0]))
        return calls[number]

    def choose(self, size: int, room: Room) -> tuple[dict[LayerCall, float], float, float]:
        """Return the calls to keep in a step whose first layer has inputs of a size, each with its bytes; the bytes left for
        more; and those of all inputs."""
        growth = size / self._size if self._size else 1.0
        calls = [call for call in chain.from_iterable(tuple(self._calls.values())) if call.size and call.saved]
        self._join(calls)
        bytes_of = {call: call.bytes_at(growth) for call in calls}
        inputs = sum(call.input_bytes for call in calls) * growth
        foretold = Foretold(size, sum(bytes_of.values()), max(bytes_of.values(), default=0.0), inputs)
        left_bytes, kept = room(self, foretold), dict[LayerCall, float]()
        if left_bytes > 0:
            seconds = self._seconds(calls)
            places = {call: place for place, call in enumerate(calls)}
            for call in sorted(calls, key=lambda call: (-seconds[call] / max(bytes_of[call], 1.0), -places[call])):
                if bytes_of[call] <= left_bytes:
                    kept[call] = bytes_of[call]
                    left_bytes -= bytes_of[call]
        return kept, left_bytes, inputs

    def note_whole(self, step: LayerStep) -> None:
        for call in chain.from_iterable(tuple(self._calls.values())):
            call.size = step.sizes.get(call, 0)
        self._size = step.size

    @staticmethod
    def _join(calls: Iterable[LayerCall]) -> None:
        """Let calls of a kind that have saved as much at the same size share what is known: one of them then tells of all."""
        alike = dict[Any, Curve]()
        for call in calls:
            num_bytes = call.saved.at(call.size)
            call.saved = alike.setdefault((call.kind, call.size, round(_FINE * math.log2(num_bytes + 1))), call.saved)

    @staticmethod
    def _seconds(calls: Iterable[LayerCall]) -> dict[LayerCall, float]:
        """Return the seconds that calls take to run again: of like calls the median, so that noise does not tell them apart."""
        alike = dict[Any, list[LayerCall]]()
        for call in calls:
            if call.times is not None and call.times[1].is_reached():
                call.seconds, call.times = call.times[0].elapsed_s(call.times[1]), None
            alike.setdefault((call.kind, call.size), []).append(call)
        medians = {key: median(call.seconds for call in found) for key, found in alike.items()}
        return {call: medians[key] for key, found in alike.items() for call in found}

    def learn_peak(self, step: LayerStep, own_bytes: int) -> None:
        """Note the most bytes on the device in a step, beside those at its first layer. If they were too many, layers are
        measured anew: what they save may depend on more than the size, such as which parameters are trained."""
        if step.size == 0:
            return
        self.is_counted = own_bytes >= step.input_bytes
        if not self.is_counted:
            return
        kept_bytes = sum(call.saved.at(step.sizes[call]) for call in step.kept if call in step.sizes)
        if step.kept and step.begun_bytes + own_bytes > step.allowed_bytes:
            for call in chain.from_iterable(tuple(self._calls.values())):
                call.saved = Curve()
        beside_bytes = max(own_bytes - kept_bytes, 0.0)
        if not self.beside.wants(step.size):
            foretold_bytes = self.beside.at(step.size)
            beside_bytes = max(beside_bytes, (beside_bytes + foretold_bytes) / 2)  # more is believed at once
            if beside_bytes < foretold_bytes and not self.beside.knows(step.size):
                return
        self.beside.note(step.size, beside_bytes)


class LayerStep:
    """Chooses in one step which calls of layers are kept, and measures the others."""

    def __init__(self, layers: Layers, room: Room, device: Device | None) -> None:
        self._layers, self._room, self._device = layers, room, device
        self.kept: dict[LayerCall, float] = {}
        self.sizes: dict[LayerCall, int] = {}
        """Of the calls so far."""
        self.size = 0
        """Of the inputs of the first layer; 0 before it is called."""
        self.input_bytes = self._left_bytes = 0.0
        self.begun_bytes, self.allowed_bytes = 0, math.inf
        """On the device at the first layer, and in all."""
        self._measured = set[tuple[Curve, int]]()

    def keeps(self, module: nn.Module, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool | Watched:
        call, size = self._layers.call(module, number), _size_of((*args, *kwargs.values()))
        if size == 0:
            return False  # its bytes can't be foretold
        if self.size == 0:
            self.kept, self._left_bytes, self.input_bytes = self._layers.choose(size, self._room)
            self.size = size
        self.sizes[call] = size
        if call in self.kept:
            more_bytes = max(call.saved.at(size) - self.kept[call], 0.0)  # it may be larger than the first layer tells
            if more_bytes <= self._left_bytes:
                self._left_bytes -= more_bytes
                return True
            self._left_bytes += self.kept.pop(call)
        if not call.saved.wants(size) and (call.saved, size) not in self._measured:
            return False
        inputs = [leaf for leaf in torch_private.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        call.input_bytes = sum(tensor.nbytes for tensor in inputs if tensor.requires_grad)
        begun = None if self._device is None else self._device.record_event()
        return Watched([*inputs, *module.buffers()], lambda num_bytes: self._learn(call, size, num_bytes, begun))

    def _learn(self, call: LayerCall, size: int, num_bytes: int, begun: Event | None) -> None:
        key = call.saved, size
        call.saved.note(size, max(num_bytes, call.saved.at(size)) if key in self._measured else num_bytes)
        self._measured.add(key)
        if begun is not None and self._device is not None:
            call.times = begun, self._device.record_event()


def _size_of(given: tuple[Any, ...]) -> int:
    """Return the elements of the inputs that require grad, or of all if none does."""
    size = sum([leaf.numel() for leaf in given if isinstance(leaf, Tensor) and leaf.requires_grad])
    if size == 0:
        leaves = [leaf for leaf in torch_private.tree_leaves(given) if isinstance(leaf, Tensor)]
        size = sum([leaf.numel() for leaf in leaves if leaf.requires_grad]) or sum([leaf.numel() for leaf in leaves])
    return size


class LayerStage(StageWithRegions):
    def __init__(self, state: RematState, outer: SavedTensorHooks | None, layers: Layers, room: Room) -> None:
        super().__init__(state, moving_in(outer))
        self.counts = Counts()
        self.step = LayerStep(layers, room, state.costs.device)
        self.regions = Regions(layers.specs(), keep=handing_on(None, outer), counts=self.counts, step=self.step)
        self.compiling: AbstractContextManager[object] | None = None
        """Layers are compiled in it."""

    def begin(self) -> None:
        if self.compiling is not None:
            self.compiling.__enter__()
        super().begin()

    def take_off(self) -> None:
        super().take_off()
        compiling, self.compiling = self.compiling, None
        if compiling is not None:
            compiling.__exit__(None, None, None)

    def end(self, *, has_failed: bool) -> None:
        if not has_failed and self._state.layers is not None:
            if self.step.size:
                self._state.layers.note_whole(self.step)
            elif not self._state.layers.are_all:
                self._state.forget_layers()  # none was called: it is another model, or another part of it
        recomputed = [(call, size) for call, size in self.step.sizes.items() if call.saved and call not in self.step.kept]
        self.counts.dropped_bytes = int(sum(call.saved.at(size) for call, size in recomputed))
        self.counts.num_saved = self.counts.num_dropped  # tensors saved outside of the layers are not counted
        if not has_failed:
            self.warn_of_others("a {name} was not recomputed as a whole, and stays: {why}.")

    def mark(self, tensor: Tensor, action: Action) -> None:
        super().mark(tensor, action)
        self._state.layers = Layers({})  # to do that, ops are recorded again


def open_layers(
    state: RematState,
    outer: SavedTensorHooks | None,
    room: Room,
    takes_less: Callable[[Trace, RegionNeeds], bool] | None = None,
) -> LayerStage | None:
    """Return the stage of a context that is about to be entered; None to record the step. With `takes_less`, plans are given up
    for good, unless steps take fewer bytes by their plans than with their layers recomputed."""
    if state.layers is None and len(state.traces):
        state.layers = _find(state)
    layers = state.layers or Layers({})
    if state.counts.has_mismatch:
        layers = state.layers = Layers({})
    if not layers:
        return None
    if takes_less is not None and not layers.are_all:
        if not all(takes_less(trace, needs) for trace, needs in layers.needs):
            return None
        layers.are_all, layers.needs = True, ()
        state.warn_once(
            "layers",
            "no plan holds for these steps: lengths may differ from batch to batch, or the budget is very small. From now on, "
            f"whole modules are recomputed ({layers.described}), as with torch.utils.checkpoint, as many as each step's size "
            f'asks for.{layers.why_not} memkit.reset("{state.tag}") starts over.',
        )
    stage = LayerStage(state, outer, layers, room)
    if stage.regions.has_hooks:
        return None
    state.counts, state.is_recorded = stage.counts, False
    return stage


def open_layers_of_share(
    state: RematState, options: RematOptions, outer: SavedTensorHooks | None, *, gives_up: bool = False
) -> LayerStage | None:
    """As `open_layers`, for a budget of saved tensors, or a share of them."""
    if options.strict or not (options.may_settle and options.may_drop):
        return None
    budget = options.budget

    def room(_: Layers, foretold: Foretold) -> float:
        if isinstance(budget, float):
            return budget * (foretold.input_bytes + foretold.saved_bytes) - foretold.input_bytes
        return budget - foretold.input_bytes - foretold.largest_bytes

    with state.lock:
        return open_layers(state, outer, room, (lambda *_: True) if gives_up else None)


def watch_size(entry: Entry, state: RematState, open_stage: Callable[[], LayerStage | None]) -> None:
    """In a `with` block, look at the inputs of the module that steps call first. If the step is of another size than the
    recorded ones, it goes on with the stage that is opened then, unless something was saved before. A step after one of another
    size has layers from its begin on, and keeps them."""
    latest, layers = state.traces.latest, state.layers
    if latest is None or latest.ops is None or not latest.ops.calls or state.gives_up_plans:
        return
    if layers is None:
        layers = state.layers = _find(state)
    if not layers:
        return
    root, known = latest.ops.modules[0](), latest.ops.calls[0].shapes
    if root is None or is_compiled(root):
        return
    if known and not state.known_shapes:
        state.known_shapes[known] = None
    top, door = innermost_pack(), HookSet()

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if not torch.is_grad_enabled():
            return  # a call that is no part of the step
        is_first = entry.door is door
        door.remove()
        if not is_first or kwargs is None or entry.recording is None or threading.get_ident() != thread:
            return
        entry.door = None
        shapes = shapes_of(args, kwargs)
        if type(entry.recording) is IdleStage:
            is_other = state.was_other = not state.fits(shapes)
        else:
            is_other = state.is_of_other_size(shapes)
        may_change = entry.recording.is_untouched and innermost_pack() is top
        if is_other and may_change and not isinstance(entry.recording, LayerStage) and (stage := open_stage()) is not None:
            entry.begin_anew(stage, stage.pair)

    thread = threading.get_ident()
    entry.door = door
    door.before_forward(root, look)


def _find(state: RematState) -> Layers:
    """Find the layers that recorded steps have called."""
    with torch_private.without_dispatch_modes():  # looking at sharded parameters is no part of the step
        return _found_in(state)


def _found_in(state: RematState) -> Layers:
    found, refused, why_not = dict[nn.Module, tuple[Kind, RegionSpec]](), set[nn.Module | None](), ""
    needs: list[tuple[Trace, RegionNeeds]] = []
    for trace in state.traces:
        if trace.ops is None or not trace.ops.calls:
            continue
        modules = [reference() for reference in trace.ops.modules]
        reasons = ["it is gone" if module is None else why_not_region(module) for module in modules]
        calls = [replace(call, why_not=call.why_not or why) for call, why in zip(trace.ops.calls, reasons, strict=True)]
        refused.update(module for call, module in zip(calls, modules, strict=True) if call.why_not)
        planner = RegionPlanner(trace.ops.step, calls, host_costs(torch.device("cpu")), num_ops=len(trace.funcs))
        choice = planner.layers()
        is_worth_it = choice.peak_bytes < _MOSTLY * planner.simulate(()).peak_bytes
        chosen = choice.chosen if is_worth_it else ()
        needs.append((trace, planner.needs(choice)))
        kinds = {(_DIGITS.sub("*", calls[place].name), type(modules[place])) for place in chosen}
        roots = [module for call, module in zip(calls, modules, strict=True) if call.parent < 0 and module is not None]
        for name, module in (named for root in roots for named in root.named_modules()):  # also those that were not called
            kind = (_DIGITS.sub("*", name or type(module).__name__), type(module))
            if kind in kinds and not why_not_region(module):
                found[module] = kind, RegionSpec()
        why_not = why_not or _why_not_around(calls, [calls[place] for place in chosen])
    layers = Layers({module: known for module, known in found.items() if module not in refused}, needs)
    layers.why_not = why_not
    _LOGGER.info('%s (tag "%s"): layers of steps of other sizes: %s.%s', state.name, state.tag, layers.described, why_not)
    return layers


def _why_not_around(calls: list[ModuleCall], chosen: list[ModuleCall]) -> str:
    alike = Counter(_DIGITS.sub("*", call.name) for call in calls)
    for call in calls:
        name, (start, stop) = _DIGITS.sub("*", call.name), call.saves
        if call.why_not and alike[name] > 1 and any(start <= one.saves[0] and one.saves[1] <= stop for one in chosen):
            return f' "{name}" is not among them: {call.why_not}.'
    return ""
