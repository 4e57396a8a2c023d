"""What else lowers the peak of a step, and budgets at the peaks of the best of it: whether anything is faster at one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from alternating import NUM_WARMUP, alternate, warm_up
from budget_compiled import both
from budget_parts import llama_of
from budget_steps import MIB, Budgeted, in_mib, plain_peak
from functorch.compile import config
from host_chains import steps_within
from measuring import Engine, Workload, blocks_of, checkpointed_each, plain, save_on_cpu
from peers import installed_peers
from remat_spaced import spaced
from setting import Setting, say
from shared import Line
from torch import nn

import memkit

SPACED_QUARTERS = (1, 2, 3, 4)
OFFLOADED = (0.1, 0.2, 0.5)
RECOMPUTED = (0.7, 0.5, 0.3)
COMPILED_AT = (0.5, 0.3, 0.7)
COMPILING_S = 50.0
"""So much time must be left for a model to be compiled as a whole."""
MOST_BUDGETS = 5
LONG_S = 5.0
"""What the steps of something slow may take together."""
_PRODUCTS = (
    "mm",
    "addmm",
    "bmm",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """Something that lowers the peak, set by hand."""

    engine: Engine
    num_warmup: int = 3
    updates_once: bool = True
    """Whether a BatchNorm within updates once, as in the plain step."""


def fronts(model: str, setting: Setting) -> Iterator[Line]:
    """A model by all that others offer and by memkit's own set by hand; budgets at the peaks of those that none is better than;
    and the whole of it compiled, as long as there is time."""
    workload = llama_of(8, setting) if model == "llama" else setting.workload(model)
    about: Line = {"model": model, "workload": workload.name}
    plain_peak(workload, setting)
    others, found = _others(workload, setting), dict[str, Line]()
    for name, other in others.items():
        line = setting.attempt(partial(_alone, workload, other, setting))
        found[name] = {**line, "which": name, "updates_once": other.updates_once}
        yield {"bench": "budget_front_other", **about, **found[name]}
    for name in setting.few(best_of(found)):
        line = setting.attempt(partial(_at_peak_of, workload, found[name], others[name].engine, setting))
        yield {"bench": "budget_front", **about, "which": name, "updates_once": others[name].updates_once, **line}
    for name in others:
        memkit.reset(name)
    plain_s = [line["plain_s"] for line in found.values() if "plain_s" in line]
    if plain_s:
        yield from _compiled(model, workload, {**about, "plain_s": statistics.median(plain_s)}, setting)


def best_of(found: Mapping[str, Line], most: int = MOST_BUDGETS) -> list[str]:
    """Return the names of those at whose peak none other is faster: at most so many, evenly spread over the peaks."""
    measured = {name: line for name, line in found.items() if "step_s" in line and line["ratio"] > 1}
    order = sorted(measured, key=lambda name: (_peak(measured[name]), measured[name]["step_s"]))
    front, fastest_s = list[str](), math.inf
    for name in order:
        if measured[name]["step_s"] < fastest_s:
            front.append(name)
            fastest_s = measured[name]["step_s"]
    if len(front) <= most:
        return front
    return [front[index * (len(front) - 1) // (most - 1)] for index in range(most)]


def _peak(line: Line) -> float:
    return float(line["peak_allocated_mib"] or 0.0)


def _others(workload: Workload, setting: Setting) -> dict[str, Other]:
    layers = blocks_of(workload.model)
    has_norms = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for layer in layers for module in layer.modules())
    by_hand = partial(Other, updates_once=not has_norms)
    counts = dict.fromkeys(max(1, len(layers) * quarters // 4) for quarters in SPACED_QUARTERS)
    found = {f"{count} of {len(layers)} blocks checkpointed": by_hand(engine=spaced(layers, count)) for count in counts}
    found["selective checkpointing, products kept"] = by_hand(engine=partial(checkpointed_each, layers, kept_ops=_products()))
    found["torch save_on_cpu"] = Other(engine=save_on_cpu)
    for name, engine in installed_peers(workload.model).items():
        found[name] = Other(engine=engine)
        found[f"{name}, all blocks checkpointed"] = by_hand(engine=partial(both, engine, spaced(layers, len(layers))))
    for ratio in setting.few(OFFLOADED):
        name = f"CPUOffload({ratio:g})"
        found[name] = Other(engine=setting.offload(ratio, name), num_warmup=NUM_WARMUP)
    for budget in setting.few(RECOMPUTED):
        name = f"Rematerialize({budget:g})"
        found[name] = Other(engine=setting.remat(budget, name), num_warmup=NUM_WARMUP)
    return found


def _products() -> list[torch._ops.OpOverload]:
    """Return the ops whose results cost most to make again, as of those that are products."""
    return [getattr(torch.ops.aten, name).default for name in _PRODUCTS]


def _alone(workload: Workload, other: Other, setting: Setting) -> Line:
    """Return what a step takes, by turns with plain ones."""
    warm = warm_up(workload, other.engine, setting.device, num_steps=other.num_warmup)
    num_steps = steps_within(LONG_S, warm.step_s, max(1, setting.steps // 2))
    found = alternate(workload, {"plain": plain, "other": other.engine}, setting.device, num_steps=num_steps)
    step = found["other"]
    say(f"{workload.name}: {1e3 * step.step_s:.1f} ms at {in_mib(step.peak_allocated_bytes)} MiB")
    return {
        "plain_s": found["plain"].step_s,
        "step_s": step.step_s,
        "ratio": step.step_s / found["plain"].step_s,
        "peak_allocated_mib": in_mib(step.peak_allocated_bytes),
    }


def _at_peak_of(workload: Workload, line: Line, engine: Engine, setting: Setting) -> Line:
    """Return what a step takes with a budget that is another's peak, by turns with that."""
    peak_mib = line["peak_allocated_mib"]
    budgeted = Budgeted(workload, f"{int(peak_mib * MIB)}B" if peak_mib else 0.5, setting)
    budgeted.learn()
    return budgeted.compare({"other": engine}, num_steps=steps_within(LONG_S, line["step_s"], setting.steps))


# Compiled as a whole


_CALLED: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    "resnet50": lambda model: model,
    "gpt2": lambda model: model.get_submodule("transformer"),
}
"""What the forward calls; of the others it is `model.model`."""


def _compiled(model: str, workload: Workload, about: Line, setting: Setting) -> Iterator[Line]:
    """The same model compiled as a whole, with `activation_memory_budget` at several values."""
    called = _CALLED.get(model, lambda found: found.get_submodule("model"))(workload.model)
    for value in setting.few(COMPILED_AT):
        line: Line = {"which": f"compiled as a whole at {value:g}", "updates_once": True}
        if setting.time_left_s() < COMPILING_S:
            yield {"bench": "budget_front_whole", **about, **line, "error": "not measured: no time was left"}
            continue
        torch.compiler.reset()
        called.compile(backend="aot_eager" if setting.tiny else "inductor")
        with config.patch(activation_memory_budget=value):
            line |= setting.attempt(partial(_whole, workload, setting))
        yield {"bench": "budget_front_whole", **about, **line}


def _whole(workload: Workload, setting: Setting) -> Line:
    warm_up(workload, plain, setting.device)
    step = alternate(workload, {"whole": plain}, setting.device, num_steps=setting.steps)["whole"]
    say(f"{workload.name}: compiled, {1e3 * step.step_s:.1f} ms at {in_mib(step.peak_allocated_bytes)} MiB")
    return {"step_s": step.step_s, "peak_allocated_mib": in_mib(step.peak_allocated_bytes)}
