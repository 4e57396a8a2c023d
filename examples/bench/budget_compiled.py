"""Compiled blocks under budgets, beside mixes that are made by hand: each compiled anew, since that is what differs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from alternating import alternate, warm_up
from bench_compiled import compile_each, dynamo_counts
from budget_steps import Budgeted, in_mib, of_plain, plain_peak
from functorch.compile import config
from measuring import Engine, Workload, blocks_of, plain
from remat_spaced import spaced
from setting import TAG, Setting, say
from shared import Line
from torch import nn

from memkit.activations.budgeting.state import budget_states

SHARES: Mapping[str, Sequence[float]] = {"llama": (0.73, 0.48, 0.39, 0.26), "resnet50": (0.7, 0.5, 0.35)}
"""Of the peak of the eager plain step."""
WAY = "forward"


def compiled(model: str, setting: Setting) -> Iterator[Line]:
    """A model, its body in the context: eager, compiled and mixed by hand, and under budgets that find out by themselves."""
    workload = setting.workload(model)
    about: Line = {"model": model, "name": workload.name}
    plain_bytes = plain_peak(workload, setting)
    eager_s = alternate(workload, {"plain": plain}, setting.device, num_steps=setting.steps)["plain"].step_s
    yield {"bench": "budget_compiled_eager", **about, "step_s": eager_s, "peak_allocated_mib": in_mib(plain_bytes)}
    del workload
    by_hand: list[Line] = []
    for value, mixes in _MIXES[model](setting).items():
        with config.patch(activation_memory_budget=value):
            workload, compiling_s = _compiled(model, setting)
            for name, build in setting.few(list(mixes.items())):
                line = setting.attempt(partial(_by_hand, workload, build, setting))
                by_hand.append({**line, "mix": f"{name}, compiled at {value:g}", "eager_s": eager_s})
                yield {"bench": "budget_compiled_by_hand", **about, "compiling_s": compiling_s, **by_hand[-1]}
            del workload
    for share in setting.few(SHARES[model]):
        budget = of_plain(share, plain_bytes)
        line = setting.attempt(partial(_budgeted, model, budget, setting))
        line = {**line, "eager_s": eager_s}
        yield {"bench": "budget_compiled", **about, "asked": str(budget), "share": share, **line, **_best_of(by_hand, line)}


Mix = Callable[[Sequence[nn.Module]], Engine]


def _kept(_: Sequence[nn.Module]) -> Engine:
    return plain


def _offloads(ratio: float, setting: Setting) -> Mix:
    return lambda _: setting.offload(ratio)


def _mixes_of_llama(setting: Setting) -> dict[float, dict[str, Mix]]:
    """Return what is made by hand, by the `activation_memory_budget` that the blocks are compiled with."""

    def checkpoints(count: int | None, ratio: float = 0.0) -> Mix:
        def build(layers: Sequence[nn.Module]) -> Engine:
            inner = spaced(layers, len(layers) if count is None else min(count, len(layers)))
            return partial(both, setting.offload(ratio), inner) if ratio else inner

        return build

    return {
        1.0: {
            "all kept": _kept,
            "offload 0.1": _offloads(0.1, setting),
            "half of the blocks checkpointed": checkpoints(8),
            "half checkpointed, offload 0.15": checkpoints(8, 0.15),
            "all checkpointed": checkpoints(None),
            "all checkpointed, offload 1": checkpoints(None, 1.0),
        },
        0.5: {"all kept": _kept, "offload 0.2": _offloads(0.2, setting), "offload 0.5": _offloads(0.5, setting)},
    }


def _mixes_of_resnet50(setting: Setting) -> dict[float, dict[str, Mix]]:
    """Return the same without checkpoints: a BatchNorm in one updates twice."""
    return {
        value: {"all kept": _kept, **{f"offload {ratio:g}": _offloads(ratio, setting) for ratio in ratios}}
        for value, ratios in {1.0: (0.1, 0.2), 0.5: (0.1, 0.2), 0.3: (0.1,)}.items()
    }


_MIXES = {"llama": _mixes_of_llama, "resnet50": _mixes_of_resnet50}


@contextmanager
def both(outer: Engine, inner: Engine) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(outer())
        stack.enter_context(inner())
        yield


def _compiled(model: str, setting: Setting) -> tuple[Workload, float]:
    """Return the workload with blocks that were compiled by two plain steps, and what that took."""
    torch.compiler.reset()
    setting.clean()
    workload = setting.workload(model)
    _compile(workload, setting)
    start_s = time.perf_counter()
    warm_up(workload, plain, setting.device, num_steps=2)
    return workload, time.perf_counter() - start_s


def _compile(workload: Workload, setting: Setting) -> None:
    compile_each(blocks_of(workload.model), WAY, "aot_eager" if setting.tiny else "inductor")


def _by_hand(workload: Workload, build: Mix, setting: Setting) -> Line:
    engine = build(blocks_of(workload.model))
    setting.clean()
    warm_up(workload, engine, setting.device)
    found = alternate(workload, {"by hand": engine}, setting.device, num_steps=setting.steps)["by hand"]
    say(f"{workload.name}: {1e3 * found.step_s:.1f} ms at {in_mib(found.peak_allocated_bytes)} MiB")
    return {"step_s": found.step_s, "peak_allocated_mib": in_mib(found.peak_allocated_bytes)}


def _budgeted(model: str, budget: str | float, setting: Setting) -> Line:
    """Measure a budget that is there before the blocks are compiled."""
    torch.compiler.reset()
    setting.clean()
    workload = setting.workload(model)
    _compile(workload, setting)
    budgeted = Budgeted(workload, budget, setting)
    budgeted.learn()
    before = dynamo_counts()
    line = budgeted.compare()
    new = {f"new_{name}": number - before[name] for name, number in dynamo_counts().items()}
    chosen = budget_states[TAG].inside.chosen.values() if TAG in budget_states else ()
    return {**line, **new, "inside": ", ".join(f"{value:g}" for value in {*chosen} - {None}) or None}


def _best_of(by_hand: Sequence[Line], line: Line) -> Line:
    """Return the fastest mix by hand whose peak is at most the budget."""
    budget_mib = line.get("budget_mib")
    fitting = [mix for mix in by_hand if "step_s" in mix and budget_mib and (mix["peak_allocated_mib"] or 0) <= budget_mib]
    if not fitting or "step_s" not in line:
        return {}
    best = min(fitting, key=lambda mix: mix["step_s"])
    return {
        "hand_mix": best["mix"],
        "hand_s": best["step_s"],
        "hand_peak_mib": best["peak_allocated_mib"],
        "to_hand": line["step_s"] / best["step_s"],
    }
