"""Steps under a `MemoryBudget`: learned by itself, then timed by turns with plain steps and with others of the same peak."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from alternating import Step, alternate, largest, median_of, step_of
from measuring import Engine, Workload, plain
from setting import TAG, Setting, say
from shared import Line
from torch import nn

import memkit
from memkit.activations.budgeting.state import budget_states
from memkit.activations.saved.settled import Way
from memkit.plan import JointPlanner

MIB = 2**20
NUM_LEARNING = 12
"""Steps of a budget by itself: two of them learn, and from the third on a plan is followed; it may be made again, and only then
it is seen whether another way is to be tried."""
MOST_LEARNING = 80
"""So many at most, where several ways to keep to the budget are tried one after the other."""
NUM_PLAIN = 3
"""Plain steps ahead of those that count."""
LEAST = 1.02
"""So many times the least that a plan is found for: what is asked for instead of less."""


def in_mib(num_bytes: int | None) -> float | None:
    """Return bytes in MiB."""
    return None if num_bytes is None else round(num_bytes / MIB, 1)


def of_plain(share: float, plain_bytes: int | None) -> str | float:
    """Return a budget that is a share of the plain step's peak: in bytes where somebody counts them, as text."""
    if plain_bytes:
        return f"{int(share * plain_bytes)}B"
    return share if share <= 1 else "1GiB"


def has_stepped(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that keeps no states and is done with its first step: no room is left free for what it would make."""
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    optimizer.state[parameters[0]] = {"step": 1}
    return optimizer


class Budgeted:
    """One model under one budget.

    Args:
        budget: as `MemoryBudget` takes it.
    """

    def __init__(self, workload: Workload, budget: str | float, setting: Setting) -> None:
        self.workload, self.budget, self.setting = workload, budget, setting
        self._optimizer = has_stepped(workload.model)
        self.engine: Engine = partial(
            memkit.MemoryBudget,
            budget,
            TAG,
            optimizer=self._optimizer,
            min_bytes=setting.min_bytes,
            device=setting.device,
        )
        self.about_learning: Line = {}
        self.peak_bytes: int | None = None
        """Of a step that follows the plan, once it has learned."""

    def learn(self) -> None:
        """Run the first steps by themselves, with nothing reserved ahead of them."""
        workload, device = self.workload, self.setting.device
        self.setting.clean()
        workload.model.zero_grad(set_to_none=True)
        gc.collect()
        device.empty_cache()
        start_s = time.perf_counter()
        with planning_timed() as taken_s, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            first = step_of(workload, self.engine, device)
            # it looks itself at the peak of the step before, so nobody else starts the count anew
            later: list[Step] = []
            most = NUM_LEARNING if self.setting.tiny else MOST_LEARNING
            while len(later) + 1 < NUM_LEARNING or (is_choosing() and len(later) + 1 < most):
                later.append(step_of(workload, self.engine, device, resets_peak=False))
        counter = device.memory_counter()
        reserved_bytes = None if counter is None else counter.peak_reserved_bytes()
        self.peak_bytes = step_of(workload, self.engine, device).peak_allocated_bytes
        self.about_learning = {
            "peak_reserved_mib": in_mib(reserved_bytes),
            "first_step_s": first.step_s,
            "num_learning": len(later) + 1,
            "is_settled": not is_choosing(),
            "learned_way": way_now(),
            "learning_host_s": [step.host_s for step in (first, *later)],
            "learning_s": time.perf_counter() - start_s,
            "plan_s": sum(taken_s),
            "plan_each_s": list(taken_s),
            "warned": sorted({str(warning.message).splitlines()[0][:300] for warning in caught}),
        }

    def compare(self, beside: Mapping[str, Engine] | None = None, *, num_steps: int | None = None) -> Line:
        """Time steps by turns with plain ones, and with others that are ready for it."""
        engines = {"plain": plain, "memkit": self.engine, **(beside or {})}
        found = alternate(self.workload, engines, self.setting.device, num_steps=num_steps or self.setting.steps)
        line = self.line(found["plain"], found["memkit"])
        for name in beside or {}:
            line |= beside_figures(name, found[name], found["memkit"])
        return line

    def line(self, alone: Step, found: Step) -> Line:
        """Return what is told of a budget."""
        line = {
            "plain_s": alone.step_s,
            "plain_peak_mib": in_mib(alone.peak_allocated_bytes),
            "plain_forward_host_s": alone.forward_host_s,
            "step_s": found.step_s,
            "ratio": found.step_s / alone.step_s,
            "step_forward_s": found.forward_s,
            "step_backward_s": found.backward_s,
            "forward_host_s": found.forward_host_s,
            "host_s": found.host_s,
            **self.about_learning,
            "way": way_now(),
            "ways_s": ways_s(),
            **figures_of_stats(found.peak_allocated_bytes, found.step_s),
        }
        say(
            f"{self.workload.name}, {self.budget}: {line['ratio']:.3f} of plain, predicted {line['predicted_ratio']}, "
            f"peak {line['peak_allocated_mib']} MiB of {line['budget_mib']}"
        )
        return line


_NAMES = {Way.OPS: "plan", Way.REGIONS: "regions", Way.REGIONS_AND_COPIES: "regions and copies"}


def is_choosing() -> bool:
    """Tell whether steps under `TAG` are still planned anew, or try which of several ways is fastest."""
    state = budget_states.get(TAG)
    if state is None or state.settled is not None:
        return False
    if state.ways is not None:
        return not state.ways.is_decided
    latest, plan = state.traces.latest, state.learning.last
    if latest is None or plan is None or plan.is_plain:
        return False
    return not state.learning.of(latest).has_chosen


def way_now() -> str:
    """Return how steps under `TAG` keep to their budget."""
    state = budget_states.get(TAG)
    if state is None or state.settled is not None:
        return "nothing to do"
    return _NAMES[Way.OPS if state.ways is None else state.ways.way]


def ways_s() -> dict[str, float]:
    """Return what the fastest step of each way has taken, where several were tried."""
    state = budget_states.get(TAG)
    return {} if state is None or state.ways is None else {_NAMES[way]: s for way, s in state.ways.fastest_s.items()}


def measured(
    workload: Workload,
    budget: str | float,
    setting: Setting,
    beside: Mapping[str, Engine] | None = None,
    *,
    num_steps: int | None = None,
) -> Line:
    """Learn a budget, and compare it."""
    budgeted = Budgeted(workload, budget, setting)
    budgeted.learn()
    return budgeted.compare(beside, num_steps=num_steps)


def figures_of_stats(peak_bytes: int | None, step_s: float | None) -> Line:
    """Return what memkit says of the last step under `TAG`, beside what it took.

    Args:
        peak_bytes: the allocator's, of the steps that count; where nobody counts, what memkit has looked at is told.
        step_s: their median.
    """
    stats = memkit.stats(TAG)
    allocated_bytes = peak_bytes or stats.step_peak_bytes
    predicted_bytes, predicted_s = stats.predicted_peak_bytes, stats.predicted_s
    return {
        "budget_mib": in_mib(stats.budget_bytes),
        "peak_allocated_mib": in_mib(allocated_bytes),
        "predicted_peak_mib": in_mib(predicted_bytes),
        "peak_to_predicted": _quotient(allocated_bytes, predicted_bytes),
        "peak_to_budget": _quotient(allocated_bytes, stats.budget_bytes),
        "predicted_s": predicted_s,
        "predicted_plain_s": stats.plain_s,
        "predicted_ratio": _quotient(predicted_s, stats.plain_s),
        "seconds_to_predicted": _quotient(step_s, predicted_s),
        "min_budget_mib": in_mib(stats.min_budget_bytes),
        "num_plans": stats.num_plans,
        "num_deviations": stats.num_deviations,
        "follows_plan": stats.follows_plan,
        "num_ops": stats.num_ops,
        "num_saved": stats.num_saved,
        "saved_mib": in_mib(stats.saved_bytes),
        "num_kept": stats.num_kept,
        "num_dropped": stats.num_dropped,
        "num_replayed_ops": stats.num_replayed_ops,
        "replayed_s": stats.measured_replay_s,
        "num_copies_out": stats.num_copies_out,
        "moved_mib": in_mib(stats.moved_out_bytes),
        "moved_back_mib": in_mib(stats.moved_in_bytes),
        "stall_s": stats.stall_out_s + stats.stall_in_s,
        "host_held_mib": in_mib(stats.host_held_bytes),
    }


def beside_figures(name: str, found: Step, budgeted: Step) -> Line:
    """Return what is told of another engine at the same peak."""
    return {
        f"{name}_s": found.step_s,
        f"{name}_peak_mib": in_mib(found.peak_allocated_bytes),
        f"to_{name}": budgeted.step_s / found.step_s,
    }


def compared_alone(workload: Workload, engines: Mapping[str, Engine], setting: Setting) -> Line:
    """Time engines by turns with plain steps, without a budget."""
    found = alternate(workload, {"plain": plain, **engines}, setting.device, num_steps=setting.steps)
    alone = found.pop("plain")
    line: Line = {"plain_s": alone.step_s, "plain_peak_mib": in_mib(alone.peak_allocated_bytes)}
    for name, step in found.items():
        line |= {
            f"{name}_s": step.step_s,
            f"{name}_ratio": step.step_s / alone.step_s,
            f"{name}_peak_mib": in_mib(step.peak_allocated_bytes),
        }
    return line


def plain_peak(workload: Workload, setting: Setting) -> int | None:
    """Run plain steps, and return what they take at their peak; None where nobody counts."""
    steps = [step_of(workload, plain, setting.device) for _ in range(NUM_PLAIN)]
    peak_bytes = largest([step.peak_allocated_bytes for step in steps])
    shown = median_of(steps)
    say(f"{workload.name}: plain {1e3 * shown.step_s:.1f} ms, peak {in_mib(peak_bytes)} MiB")
    return peak_bytes or None


@contextmanager
def planning_timed() -> Iterator[list[float]]:
    """Yield a list that gets the seconds of each plan that is made."""
    taken_s: list[float] = []
    own = JointPlanner.plan

    def timed(*args: Any, **kwargs: Any) -> Any:
        start_s = time.perf_counter()
        try:
            return own(*args, **kwargs)
        finally:
            taken_s.append(time.perf_counter() - start_s)

    JointPlanner.plan = timed  # type: ignore[method-assign]  # given back below
    try:
        yield taken_s
    finally:
        JointPlanner.plan = own  # type: ignore[method-assign]


def _quotient(number: float | None, other: float | None) -> float | None:
    return None if not number or not other else number / other
