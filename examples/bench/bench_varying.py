"""Steps that never repeat: lengths or routes that change with each batch. Prints lines of JSON.

    python examples/bench/bench_varying.py            # both contexts on lengths that differ on this machine's GPU
    python examples/bench/bench_varying.py --only lengths mixtral --steps 30 --contexts offload
    python examples/bench/bench_varying.py --tiny     # shows that all of it runs, without a GPU, and nothing else

Steps of all ways take turns over the same batches, with head and loss in the context, which is made anew in each step. An
untimed plain step goes before them: at a new length, kernels are chosen and planned for up to 150 ms, whoever comes first.
Models and batches are those of `bench_families.py`, which measures a `MemoryBudget` on them.

    offload   `CPUOffload` at several ratios over the least that each batch's plain step and the link allow
    remat     `Rematerialize(.5)` over the fewest evenly spaced checkpointed layers that need no more on the largest batch
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from alternating import Step, largest
from alternating import step_of as timed_step
from families import FAMILIES, LARGEST, Batch, Family, built, shapes_of
from measuring import Engine, Workload, plain, roofline_s
from remat_spaced import fewest_within, spaced
from shared import Line, about_run

import memkit
from memkit.device import Device, ReferenceDevice, open_device
from memkit.transfer import measure_link

TAG = "varying"
RATIOS, BUDGET = (0.1, 0.3, 1.0), 0.5
NUM_BATCHES = 40
NUM_FIRST = 10
NUM_ALONE = 3
"""Steps of a way by itself, on the largest batch, ahead of those by turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Varying:
    """A family's model and its batches."""

    family: Family
    device: Device
    batches: list[Batch]
    """The last is the largest."""
    options: Line
    """Of each context."""
    about: Line

    def step(self, batch: Batch, engine: Engine) -> Step:
        workload = Workload(
            name=self.about["family"],
            model=self.family.model,
            forward=partial(self.family.loss, batch),
            loss=lambda loss: loss,
        )
        return timed_step(workload, engine, self.device)

    def say(self, batch: Batch, seconds: dict[str, float]) -> None:
        times_ms = {way: round(1e3 * each, 1) for way, each in seconds.items()}
        print(self.about["family"], shapes_of(batch), times_ms, file=sys.stderr)


def run(name: str, arguments: argparse.Namespace, device: Device) -> Iterator[Line]:
    """Measure a family."""
    family = built(name, device.torch_device, is_tiny=arguments.tiny)
    steps = (*range(arguments.steps - 1), LARGEST)
    varying = Varying(
        family=family,
        device=device,
        batches=[family.batch(step, device.torch_device) for step in steps],
        options={"device": device, "min_bytes": 2**10 if arguments.tiny else 2**20},
        about={"bench": "varying", "family": name, "device": device.name, **about_run(arguments.steps)},
    )
    for context in arguments.contexts:
        yield from CONTEXTS[context](varying)
        family.model.zero_grad(set_to_none=True)
        gc.collect()
        device.empty_cache()


def over_roofline(varying: Varying) -> Iterator[Line]:
    """`CPUOffload` over the roofline of each batch: its plain forward or the bytes that left over the link, and its plain
    backward or those that came back."""
    device = varying.device
    link = measure_link(device, num_bytes=2**28 if device.torch_device.type == "cuda" else 2**20)
    tags = {ratio: f"{TAG} {ratio:g}" for ratio in RATIOS}
    alone, found = list[Step](), {ratio: list[Step]() for ratio in RATIOS}
    least_s, shares = {ratio: list[float]() for ratio in RATIOS}, {ratio: list[float]() for ratio in RATIOS}
    for batch in varying.batches:
        varying.step(batch, plain)
        by_itself = varying.step(batch, plain)
        alone.append(by_itself)
        for ratio, tag in tags.items():
            found[ratio].append(varying.step(batch, partial(memkit.CPUOffload, ratio, tag, **varying.options)))
            stats = memkit.stats(tag)
            shares[ratio].append(round(stats.ratio_reached, 3))
            least_s[ratio].append(
                roofline_s(
                    forward_s=by_itself.forward_s,
                    backward_s=by_itself.backward_s,
                    out_bytes=stats.moved_out_bytes,
                    back_bytes=stats.moved_in_bytes,
                    link=link,
                )
            )
        times = {f"offload {ratio:g}": steps[-1].step_s for ratio, steps in found.items()}
        varying.say(batch, {"plain": by_itself.step_s, **times})
    for ratio, tag in tags.items():
        memkit.reset(tag)
        yield {
            **varying.about,
            "way": f"CPUOffload({ratio:g})",
            **compared(found[ratio], "plain", [step.step_s for step in alone]),
            **compared(found[ratio], "roofline", least_s[ratio]),
            "shares_moved": shares[ratio],
            "d2h_bytes_per_s": link.d2h_bytes_per_s,
            "h2d_bytes_per_s": link.h2d_bytes_per_s,
        }


def over_spaced(varying: Varying) -> Iterator[Line]:
    """`Rematerialize` over checkpoints at its peak, which is that on the largest batch after the first batches."""
    engine, layers = partial(memkit.Rematerialize, BUDGET, TAG, **varying.options), varying.family.blocks
    for batch in varying.batches[:NUM_FIRST]:
        varying.say(batch, {"remat, by itself": varying.step(batch, engine).step_s})
    target_bytes = largest([varying.step(varying.batches[-1], engine).peak_allocated_bytes for _ in range(NUM_ALONE)])
    ways = {count: spaced(layers, count) for count in range(len(layers) + 1)}
    peaks = {count: varying.step(varying.batches[-1], way).peak_allocated_bytes for count, way in ways.items()}
    count = fewest_within(peaks, target_bytes)
    by_hand = ways[len(layers) if count is None else count]
    found, others = list[Step](), list[Step]()
    for batch in varying.batches:
        varying.step(batch, plain)
        found.append(varying.step(batch, engine))
        others.append(varying.step(batch, by_hand))
        varying.say(batch, {"remat": found[-1].step_s, f"{count} checkpointed": others[-1].step_s})
    stats = memkit.stats(TAG)
    memkit.reset(TAG)
    yield {
        **varying.about,
        "way": f"Rematerialize({BUDGET:g}) over checkpoints at its peak",
        **compared(found, "checkpointed", [step.step_s for step in others]),
        "worst_checkpointed_peak_bytes": largest([step.peak_allocated_bytes for step in others]),
        "num_checkpointed": count,
        "num_layers": len(layers),
        "peak_on_longest_bytes": target_bytes,
        "num_deviations": stats.num_deviations,
    }


CONTEXTS: dict[str, Callable[[Varying], Iterable[Line]]] = {"offload": over_roofline, "remat": over_spaced}


def compared(steps: list[Step], other: str, others_s: list[float]) -> Line:
    """Return how the later steps of a way compare with other seconds for the same batches: in all, and step by step."""
    first = min(NUM_FIRST, len(steps) // 2)
    taken = [step.step_s for step in steps]
    each = [mine / of for mine, of in zip(taken[first:], others_s[first:], strict=True)]
    return {
        "first_ms": [round(1e3 * seconds, 1) for seconds in taken[:first]],
        "later_ms": round(1e3 * statistics.mean(taken[first:]), 2),
        f"{other}_later_ms": round(1e3 * statistics.mean(others_s[first:]), 2),
        f"later_to_{other}": round(sum(taken[first:]) / sum(others_s[first:]), 3),
        f"median_to_{other}": round(statistics.median(each), 3),
        f"most_to_{other}": round(max(each), 3),
        "worst_later_peak_bytes": largest([step.peak_allocated_bytes for step in steps[first:]]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=["lengths"])
    parser.add_argument("--contexts", nargs="+", choices=CONTEXTS, default=[*CONTEXTS])
    parser.add_argument("--steps", type=int, default=NUM_BATCHES, help="batches of each family")
    parser.add_argument("--tiny", action="store_true", help="small models on the reference device")
    arguments = parser.parse_args()
    if not arguments.tiny and not torch.cuda.is_available():
        print("skipped: there is no CUDA device here", file=sys.stderr)
        return
    for name in arguments.only:
        device = ReferenceDevice() if arguments.tiny else open_device("cuda")
        for line in run(name, arguments, device):
            print(json.dumps(line), flush=True)
        gc.collect()
        device.empty_cache()


if __name__ == "__main__":
    main()
