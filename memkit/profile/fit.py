"""Whether a traced step fits in some memory, with which feature of memkit, and at which cost: figures and sentences."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from memkit.core.sizes import unit_of
from memkit.errors import BudgetInfeasible
from memkit.plan import Action, GpuSpec, JointPlanner, StepTrace, find_gpu
from memkit.plan.asked import budget_or_share
from memkit.plan.budget.problem import make_problem

if TYPE_CHECKING:
    from memkit.profile.alive import OptimizerMemory

_ALONE = {Action.RECOMPUTE: ("memkit.Rematerialize", "recomputing"), Action.OFFLOAD: ("memkit.CPUOffload", "offloading")}
_STATES = "memkit.StateOffload(optimizer)"
_CLOSE = 0.9  # a step that takes more of the memory than this may not fit: workspaces and fragmentation come on top

DEFAULT_GPU = "H200"


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureFit:
    """What one feature of memkit achieves under the budget."""

    feature: str
    """The call, such as 'memkit.MemoryBudget("12GiB")', or the name of the mechanism."""
    how: str
    """What it does: "recomputing and offloading", "recomputing", "offloading", "moving optimizer states", or several."""
    peak_bytes: int | None
    """Peak of the step with it; None if the feature can't keep to the budget."""
    step_s: float | None
    """Predicted seconds of forward and backward, and of moving `link_bytes`."""
    least_bytes: int
    """The smallest budget that the feature can keep to."""
    link_bytes: int = 0
    """Bytes of optimizer states that are copied in each optimizer step, as many in each direction."""
    room_bytes: int = 0
    """Device memory for states in transfer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Whether one step fits in one budget, predicted for one GPU. Its `str()` says it in words."""

    budget_bytes: int
    """The memory to fit in."""
    budget: str
    """The same as `memkit.MemoryBudget` takes it, such as "12GiB"."""
    gpu: str
    """The GPU that seconds are predicted for."""
    is_measured: bool
    """Whether predictions for the GPU were compared with steps on it."""
    plain_peak_bytes: int
    """Peak of the step without memkit, with the optimizer's states."""
    plain_s: float
    """Seconds of the step without memkit."""
    resident_bytes: int
    """Bytes that are there all the time: parameters, buffers, inputs, optimizer states."""
    grad_bytes: int
    """Bytes of the parameters' gradients at the end of the backward."""
    features: tuple[FeatureFit, ...]
    """The mix of all mechanisms for activations, then each alone; then `memkit.StateOffload`, if it makes the step fit by
    itself, or together with the mix if nothing does by itself. Empty if the step fits as it is."""
    link_bytes_per_s: float | None = None
    """Bandwidth of the GPU's link in each direction, while both are in use."""

    @property
    def fits_as_it_is(self) -> bool:
        """Whether it fits without memkit."""
        return self.plain_peak_bytes <= self.budget_bytes

    @property
    def fits(self) -> bool:
        """Whether it fits as it is or with a feature."""
        return self.fits_as_it_is or any(feature.step_s is not None for feature in self.features)

    @property
    def feature(self) -> FeatureFit | None:
        """The fastest feature that makes it fit; None if none is needed, or none does."""
        able = [feature for feature in self.features if feature.step_s is not None]
        return min(able, key=lambda feature: feature.step_s or 0.0) if able else None

    @property
    def slowdown(self) -> float | None:
        """The step's seconds with that feature over those of the plain step, 1.0 if it fits as it is; None if it doesn't
        fit."""
        if self.fits_as_it_is:
            return 1.0
        return self._times(self.feature) if self.feature is not None else None

    def __str__(self) -> str:
        budget = _size(self.budget_bytes)
        if self.fits_as_it_is:
            spare = f"This fits in {budget} as it is, with {_size(self.budget_bytes - self.plain_peak_bytes)} to spare"
            if self.plain_peak_bytes <= _CLOSE * self.budget_bytes:
                return f"{spare}."
            return f"{spare}: little for workspaces and fragmentation; to be on the safe side, use {_budget(self.budget)}."
        found = self.feature
        if found is None:
            return self._too_small(budget)
        times = self._times(found)
        said = f"{times:.2f} times as slow" if times >= 1.005 else "as fast"
        best = f"This would fit in {budget} with {found.feature}, about {said} ({self._predicted()})."
        best += self._moved(found)
        others = [feature for feature in self.features if feature is not found]
        able = [f"{it.how} alone ({it.feature}) {self._times(it):.2f} times" for it in others if it.step_s is not None]
        unable = [f"{it.how} alone ({it.feature}) does not reach it" for it in others if it.step_s is None]
        return " ".join([best, *([f"By comparison: {', '.join([*able, *unable])}."] if others else [])])

    def _too_small(self, budget: str) -> str:
        alone = min((feature for feature in self.features if not feature.link_bytes), key=lambda feature: feature.least_bytes)
        least = min(self.features, key=lambda feature: feature.least_bytes)
        static = self.resident_bytes + self.grad_bytes
        also = f", together with {_STATES} {_size(least.least_bytes, up=True)}" if least.link_bytes else ""
        said = (
            f"This does not fit in {budget}: the least that memkit.MemoryBudget can keep to is "
            f"{_size(alone.least_bytes, up=True)}{also} ({self._predicted()})."
        )
        if static > 0.5 * alone.least_bytes:
            return (
                f"{said} {_size(static)} are parameters, gradients, optimizer states and inputs: memkit.LayerOffload streams "
                "weights from host memory; a smaller dtype or LoRA makes all of them smaller."
            )
        return f"{said} Make the batch smaller."

    def _moved(self, feature: FeatureFit) -> str:
        if not feature.link_bytes:
            return ""
        seconds = "" if self.link_bytes_per_s is None else f", {feature.link_bytes / self.link_bytes_per_s:.2g} s of its link"
        spare_bytes = int(_CLOSE * self.budget_bytes) - (feature.peak_bytes or 0)
        may_stay = spare_bytes >= 2**28 and feature.least_bytes == feature.peak_bytes  # a piece of states has up to 168 MiB
        return (
            f" Each step of the optimizer moves {_size(feature.link_bytes)} of states to the GPU and back{seconds}; "
            f"{_size(feature.room_bytes, up=True)} of the GPU are room for those on their way."
            + (f' With device_budget="{_written(spare_bytes)}" a part of them stays there.' if may_stay else "")
        )

    def _predicted(self) -> str:
        article = "an" if self.gpu[:1] in "AEFHILMNORSX" else "a"
        return f"predicted for {article} {self.gpu}" + ("" if self.is_measured else ", not measured on one")

    def _times(self, feature: FeatureFit) -> float:
        return (feature.step_s or 0.0) / self.plain_s if self.plain_s else 1.0


def _budget(written: str) -> str:
    return f'memkit.MemoryBudget("{written}")'


def check_fit(budget: int | float | str | None, gpu: GpuSpec | None) -> int | float | None:
    checked = None if budget is None else budget_or_share(budget)
    if gpu is not None and isinstance(checked, int) and checked > gpu.memory_bytes:
        raise ValueError(
            f"the {gpu.name} has {_size(gpu.memory_bytes)} that can be allocated; found {budget!r}. Ask for less, or leave the "
            f"size out to ask for all of it"
        )
    return checked


def fit_step(
    trace: StepTrace,
    budget: int | float | str | None,
    gpu: str | os.PathLike[str] | GpuSpec | None,
    *,
    optimizer: OptimizerMemory | None,
) -> Fit:
    spec = find_gpu(DEFAULT_GPU if gpu is None else gpu)
    checked = check_fit(budget, None if gpu is None else spec)
    problem = make_problem(trace, spec, optimizer_bytes=0 if optimizer is None else optimizer.state_bytes)
    checked = spec.memory_bytes if checked is None else checked
    budget_bytes = checked if isinstance(checked, int) else int(checked * problem.plain_peak_bytes)
    written = budget.replace(" ", "") if isinstance(budget, str) else _written(budget_bytes)
    features: list[FeatureFit] = []
    if problem.plain_peak_bytes > budget_bytes:
        planner = JointPlanner(problem)
        features.append(_feature(planner, _budget(written), "recomputing and offloading", budget_bytes))
        features += [_feature(planner.alone[action], *alone, budget_bytes) for action, alone in _ALONE.items()]
        if optimizer is not None:
            features += _with_states(trace, spec, optimizer, features, budget_bytes)
    return Fit(
        budget_bytes=budget_bytes,
        budget=written,
        gpu=spec.name,
        is_measured=spec.is_measured,
        plain_peak_bytes=problem.plain_peak_bytes,
        plain_s=problem.plain_s,
        resident_bytes=problem.base_bytes,
        grad_bytes=trace.trainable_bytes,
        features=tuple(features),
        link_bytes_per_s=spec.both_bytes_per_s,
    )


def _with_states(
    trace: StepTrace, spec: GpuSpec, optimizer: OptimizerMemory, features: list[FeatureFit], budget_bytes: int
) -> Iterator[FeatureFit]:
    """Yield `StateOffload` by itself if that is enough, else with the mix (the first of `features`) if nothing else is."""
    room_bytes = optimizer.room_bytes
    if room_bytes is None or room_bytes >= optimizer.state_bytes:
        return
    problem = make_problem(trace, spec, optimizer_bytes=room_bytes)
    least_bytes, moving_s = problem.plain_peak_bytes, optimizer.state_bytes / spec.both_bytes_per_s
    how = "moving optimizer states"
    if least_bytes <= budget_bytes:
        found = FeatureFit(feature=_STATES, how=how, peak_bytes=least_bytes, step_s=problem.plain_s, least_bytes=least_bytes)
    elif all(feature.step_s is None for feature in features):
        mix = features[0]
        found = _feature(JointPlanner(problem), f"{_STATES} and {mix.feature}", f"{how}, {mix.how}", budget_bytes)
    else:
        return
    step_s = None if found.step_s is None else found.step_s + moving_s
    yield replace(found, step_s=step_s, link_bytes=optimizer.state_bytes, room_bytes=room_bytes)


def _feature(planner: JointPlanner, feature: str, how: str, budget_bytes: int) -> FeatureFit:
    least_bytes = planner.least().peak_bytes
    try:
        found = planner.best(budget_bytes)
    except BudgetInfeasible:
        return FeatureFit(feature=feature, how=how, peak_bytes=None, step_s=None, least_bytes=least_bytes)
    return FeatureFit(feature=feature, how=how, peak_bytes=found.peak_bytes, step_s=found.seconds, least_bytes=least_bytes)


def _written(num_bytes: int) -> str:
    unit, unit_bytes = unit_of(num_bytes)
    return f"{100 * num_bytes // unit_bytes / 100:g}{unit}"


def _size(num_bytes: int, *, up: bool = False) -> str:
    unit, unit_bytes = unit_of(num_bytes)
    size = math.ceil(10 * num_bytes / unit_bytes) / 10 if up else num_bytes / unit_bytes
    return f"{size:.0f} {unit}" if size == round(size) else f"{size:.1f} {unit}"
