"""`LayerStage`: recomputes all layers of a model as a whole, like checkpoints, where steps never repeat, as with lengths that
change in each batch. Nothing is recorded.

A plan holds for steps with the same ops and sizes, and recording a step may take many times as long as the step itself. So
once three of a hundred steps were like none before, or had no plan that keeps to the budget, no later step under the tag is
recorded, even if steps repeat again. Which modules are layers was seen in the recorded steps.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from memkit.activations.recomputing.read_only import LearnedReads
from memkit.activations.recomputing.region_reasons import why_not_region
from memkit.activations.recomputing.regions import Regions, RegionSpec
from memkit.activations.recomputing.steady import IdleStage, all_have_hooks
from memkit.activations.saved.counts import Counts
from memkit.activations.saved.entry import Entry, handing_on
from memkit.plan import Action, RegionPlanner
from memkit.recording.cost import host_costs
from memkit.sequentials import kind_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from memkit.activations.recomputing.budget import RematOptions
    from memkit.activations.saved.state import RematState
    from memkit.activations.saved.traces import Trace
    from memkit.hooks import SavedTensorHooks
    from memkit.plan import ModuleCall, RegionNeeds

Layers = dict[weakref.ref[nn.Module], LearnedReads]
"""The layers, and what the last step has learned of each."""
_MOSTLY = 2 / 3
"""If this fraction of all saved bytes stays even so, ops are recorded in all steps, to keep to the budget."""
_DIGITS = re.compile(r"\d+")


def open_layers(
    state: RematState, outer: SavedTensorHooks | None, takes_less: Callable[[Trace, RegionNeeds], bool] = lambda *_: True
) -> LayerStage | None:
    """Return the stage of a context that is about to be entered, if plans are given up under its tag; None to record the step.

    Args:
        state: the state of the tag.
        outer: the innermost hooks, if a context of memkit has set them.
        takes_less: tells whether a step takes fewer bytes if its layers are recomputed than by its plan.
    """
    if state.layers is None:
        state.layers = _find(state, takes_less)
    if state.counts.has_mismatch:
        state.layers = {}
    found = ((module, learned) for reference, learned in state.layers.items() if (module := reference()) is not None)
    specs = {module: RegionSpec(learned=learned) for module, learned in found}
    if not specs or all_have_hooks():
        return None
    stage = LayerStage(state, outer, specs)
    if stage.regions.has_hooks:
        return None
    state.counts, state.is_recorded = stage.counts, False
    return stage


def open_layers_again(state: RematState, options: RematOptions, outer: SavedTensorHooks | None) -> LayerStage | None:
    """Do the same for `Rematerialize`."""
    if options.strict or not (options.may_settle and options.may_drop):
        return None
    with state.lock:
        stage = open_layers(state, outer)
        state.num_iterations += stage is not None
        return stage


def _find(state: RematState, takes_less: Callable[[Trace, RegionNeeds], bool]) -> Layers:
    """Return the layers of the model, of which recorded steps have called some, and tell the user."""
    found, refused, why_not = dict[nn.Module, LearnedReads](), set[nn.Module | None](), ""
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
        chosen = choice.chosen if is_worth_it and takes_less(trace, planner.needs(choice)) else ()
        kinds = {(_DIGITS.sub("*", calls[place].name), type(modules[place])) for place in chosen}
        roots = [module for call, module in zip(calls, modules, strict=True) if call.parent < 0 and module is not None]
        for name, module in (named for root in roots for named in root.named_modules()):  # also those that were not called
            if (_DIGITS.sub("*", name or type(module).__name__), type(module)) in kinds and not why_not_region(module):
                found[module] = LearnedReads()
        why_not = why_not or _why_not_around(calls, [calls[place] for place in chosen])
    layers = {weakref.ref(module): learned for module, learned in found.items() if module not in refused}
    if layers:
        names = Counter(type(module).__name__ for module in found if module not in refused)
        each = ", ".join(f"{count} {name}" for name, count in names.items())
        state.warn_once(
            "layers",
            "no plan holds for these steps: lengths may differ from batch to batch, or the budget is very small. From now on, "
            f"whole modules are recomputed ({each}), as with torch.utils.checkpoint, and the budget is not enforced.{why_not} "
            f'memkit.reset("{state.tag}") starts over.',
        )
    return layers


def _why_not_around(calls: list[ModuleCall], chosen: list[ModuleCall]) -> str:
    """Return in words why repeated calls around the chosen ones are not recomputed in their place; empty if there are none."""
    alike = Counter(_DIGITS.sub("*", call.name) for call in calls)
    for call in calls:
        name, (start, stop) = _DIGITS.sub("*", call.name), call.saves
        if call.why_not and alike[name] > 1 and any(start <= one.saves[0] and one.saves[1] <= stop for one in chosen):
            return f' "{name}" is not among them: {call.why_not}.'
    return ""


class LayerStage(IdleStage):
    """Does nothing with saved tensors, while all calls of some modules are recomputed as regions.

    Args:
        state: the state of the tag.
        outer: see `RecordingStage`.
        specs: the modules.
    """

    def __init__(self, state: RematState, outer: SavedTensorHooks | None, specs: dict[nn.Module, RegionSpec]) -> None:
        super().__init__(state, outer.owner.moving if outer is not None and isinstance(outer.owner, Entry) else None)
        self.counts = Counts()
        self.regions = Regions(specs, keep=handing_on(None, outer), counts=self.counts)

    def begin(self) -> None:
        self.regions.__enter__()

    def take_off(self) -> None:
        self.regions.__exit__(None, None, None)

    def end(self, *, has_failed: bool) -> None:
        self.counts.num_saved = self.counts.num_dropped  # what is saved outside of the layers is not counted
        for module, why in () if has_failed else self.regions.not_taken.items():
            name = kind_of(module)
            self._state.warn_once(f"region {name} {why}", f"a {name} was not recomputed as a whole, and stays: {why}.")

    def mark(self, tensor: Tensor, action: Action) -> None:
        super().mark(tensor, action)
        self._state.layers = {}  # to do that, ops are recorded again
