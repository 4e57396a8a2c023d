"""The parts of `bench_budget.py` but `cap`: models under budgets, beside plain steps and what else reaches the same peak."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from alternating import CLOSE, step_of, warm_up
from budget_models import OTHERS, built
from budget_steps import LEAST, MIB, Budgeted, compared_alone, in_mib, measured, of_plain, plain_peak
from measuring import Engine, Workload, blocks_of
from remat_spaced import fewest_within, spaced
from setting import TAG, Setting
from shared import Line
from workloads import llama_whole

import memkit
from memkit.activations.budgeting.state import budget_states
from memkit.plan.budget.bound import why_no_bound

RESNET50_PLAIN_MIB = 21346
RESNET50_BUDGETS: Mapping[int, float] = {12981: 0.6, 10509: 0.49, 8748: 0.38, 6396: 0.23}
"""Budgets in MiB, and the budgets of `Rematerialize` whose peak is about that."""
LLAMA_BUDGETS: Mapping[int, tuple[int, Sequence[int]]] = {8: (28646, (14323, 8594, 6164)), 4: (15232, (7616, 4570))}
"""By batch: the plain step's peak, and budgets, in MiB."""
SPACED_SHARES = (0.75, 0.5, 0.42)
KEEPS_ALL = 1.1
WITHIN_LINK: Mapping[str, float] = {"resnet50": 0.95, "llama": 0.9}
OTHERS_SHARES = (0.8, 0.5, 0.3)
BESIDE = "beside"
"""The tag of what is measured beside a budget."""
BOUND_S = 40.0
"""So much time must be left for a bound to be computed."""


def resnet50(setting: Setting) -> Iterator[Line]:
    """ResNet-50 at budgets in MiB, beside `Rematerialize` at about the same peak; and all of its blocks checkpointed."""
    workload = setting.resnet50()
    about = {"bench": "budget", "model": "resnet50", "name": workload.name}
    plain_peak(workload, setting)
    for mib, share in setting.few(list(RESNET50_BUDGETS.items())):
        budget = _mib(mib, RESNET50_PLAIN_MIB, setting)
        yield {**about, "asked": str(budget), **setting.attempt(partial(_beside_remat, workload, budget, share, setting))}
    yield {"bench": "budget_checkpoints", **_but_bench(about), **setting.attempt(partial(_all_blocks, workload, setting))}


def llama(setting: Setting) -> Iterator[Line]:
    """The Llama with head and loss in the context, at budgets in MiB; and all of its layers checkpointed."""
    for batch, (plain_mib, budgets) in LLAMA_BUDGETS.items():
        workload = llama_of(batch, setting)
        about = {"bench": "budget", "model": f"llama_b{batch}", "name": workload.name}
        plain_peak(workload, setting)
        for mib in setting.few(budgets):
            budget = _mib(mib, plain_mib, setting)
            yield {**about, "asked": str(budget), **setting.attempt(partial(measured, workload, budget, setting))}
        found = setting.attempt(partial(_all_blocks, workload, setting))
        yield {"bench": "budget_checkpoints", **_but_bench(about), **found}
        del workload
        setting.clean()


def beside_spaced(model: str, setting: Setting) -> Iterator[Line]:
    """Shares of the plain peak, against the fewest evenly spaced checkpointed layers whose peak is at least as low."""
    workload = setting.workload(model)
    layers = blocks_of(workload.model)
    about = {"model": model, "name": workload.name}
    plain_bytes = plain_peak(workload, setting)
    peaks = {
        count: step_of(workload, spaced(layers, count), setting.device).peak_allocated_bytes for count in range(len(layers) + 1)
    }
    yield {"bench": "budget_spaced_peaks", **about, "peaks_mib": [in_mib(peak) for peak in peaks.values()]}
    for share in setting.few(SPACED_SHARES):
        budget = of_plain(share, plain_bytes)
        found = setting.attempt(partial(_at_share, workload, budget, layers, peaks, setting))
        yield {"bench": "budget", **about, "share": share, "asked": str(budget), **found}


def fits(setting: Setting) -> Iterator[Line]:
    """A budget that keeps all, and one within what the link moves for nothing, over plain."""
    for model, share in setting.few(list(WITHIN_LINK.items())):
        workload = setting.resnet50() if model == "resnet50" else llama_of(8, setting)
        plain_bytes = plain_peak(workload, setting)
        num_steps = CLOSE * setting.steps if model == "resnet50" else setting.steps  # a Llama's are alike, and long
        for which, of in (("keeps all", KEEPS_ALL), ("within the link", share)):
            budget = of_plain(of, plain_bytes)
            found = setting.attempt(partial(measured, workload, budget, setting, num_steps=num_steps))
            about = {"bench": "budget_fits", "model": model, "name": workload.name, "which": which, "share": of}
            yield {**about, "asked": str(budget), **found}
        del workload
        setting.clean()


def others(setting: Setting) -> Iterator[Line]:
    """Models of many kinds at shares of their plain peak, or the least that a plan is found for."""
    for model, build in setting.few(list(OTHERS.items())):
        yield from _other(model, build, setting)
        setting.clean()


def _mib(mib: int, plain_mib: int, setting: Setting) -> str | float:
    """Return a budget as text; in tiny runs, as the share that it is of the plain step's peak."""
    return mib / plain_mib if setting.tiny else f"{mib}MiB"


def _but_bench(about: Line) -> Line:
    return {name: value for name, value in about.items() if name != "bench"}


def llama_of(batch: int, setting: Setting) -> Workload:
    """Return the Llama with head and loss in the context."""
    return setting.llama(partial(_llama_whole, batch))


def _llama_whole(own_batch: int, batch: int = 0, length: int = 2048, **sizes: int) -> Workload:
    """A Llama of a batch of one's own, unless a tiny one is asked for."""
    return llama_whole(batch or own_batch, length, **sizes)


def _all_blocks(workload: Workload, setting: Setting) -> Line:
    layers = blocks_of(workload.model)
    return {"num_layers": len(layers), **compared_alone(workload, {"checkpoint": spaced(layers, len(layers))}, setting)}


def _beside_remat(workload: Workload, budget: str | float, share: float, setting: Setting) -> Line:
    """Measure a budget beside `Rematerialize`, where there is room for both; and what no plan can beat."""
    memkit.reset(BESIDE)
    remat = setting.remat(share, BESIDE)
    budgeted = Budgeted(workload, budget, setting)
    budgeted.learn()
    beside: dict[str, Engine] = {}
    about: Line = {"remat_share": share}
    found = _ready(workload, remat, setting)
    if "error" in found:
        about["remat_error"] = found["error"]
    else:
        beside["remat"] = remat
    line = {**about, **budgeted.compare(beside), **_bound(setting)}
    memkit.reset(BESIDE)
    return line


def _ready(workload: Workload, engine: Engine, setting: Setting) -> Line:
    """Let an engine learn, or return what went wrong in that."""
    try:
        warm_up(workload, engine, setting.device)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    return {}


def _bound(setting: Setting) -> Line:
    """Return the seconds that no plan can beat for the step that was run last, where scipy is there and time is left."""
    state = budget_states.get(TAG)
    latest = None if state is None else state.traces.latest
    if state is None or latest is None or why_no_bound() or setting.time_left_s() < BOUND_S:
        return {}
    planner, plan = state.learning.of(latest).planner, state.learning.last
    if planner is None or plan is None:
        return {}
    start_s = time.perf_counter()
    bound_s = planner.plan(plan.budget_bytes, with_bound=True).bound_s
    return {"bound_s": bound_s, "bound_took_s": time.perf_counter() - start_s}


def _at_share(
    workload: Workload,
    budget: str | float,
    layers: Sequence[object],
    peaks: Mapping[int, int | None],
    setting: Setting,
) -> Line:
    """Time a budget by turns with checkpointing, where that reaches its peak; else with all layers checkpointed."""
    budgeted = Budgeted(workload, budget, setting)
    budgeted.learn()
    count = fewest_within(peaks, budgeted.peak_bytes or None)
    by_hand = spaced(layers, len(layers) if count is None else count)
    line = budgeted.compare({"spaced": by_hand})
    return {
        **line,
        "num_layers": len(layers),
        "num_checkpointed": len(layers) if count is None else count,
        "spaced_reaches_peak": count is not None,
    }


def _other(model: str, build: Callable[[Setting], Workload], setting: Setting) -> Iterator[Line]:
    about: Line = {"bench": "budget_others", "model": model}
    made: list[Workload] = []

    def begin() -> Line:
        made.append(built(build, setting))
        return {"plain_bytes": plain_peak(made[0], setting)}

    begun = setting.attempt(begin)
    if "error" in begun:
        yield {**about, **begun}
        return
    (workload,) = made
    plain_bytes, least_bytes = begun["plain_bytes"], None
    for share in setting.few(OTHERS_SHARES):
        wanted = of_plain(share, plain_bytes)
        is_least = bool(least_bytes and plain_bytes and LEAST * least_bytes > share * plain_bytes)
        if is_least:
            wanted = of_plain(LEAST, least_bytes)
        found = setting.attempt(partial(measured, workload, wanted, setting, num_steps=max(1, setting.steps // 2)))
        if found.get("min_budget_mib"):
            least_bytes = int(found["min_budget_mib"] * MIB)
        yield {**about, "name": workload.name, "share": share, "asked": str(wanted), "is_least": is_least, **found}
        if is_least:
            return
