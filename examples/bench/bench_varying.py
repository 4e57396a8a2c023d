"""Steps that never repeat: lengths or routes that change with each batch. Prints lines of JSON.

    python examples/bench/bench_varying.py            # all families under a budget on this machine's GPU, 3 minutes
    python examples/bench/bench_varying.py --only qwen3 --steps 40
    python examples/bench/bench_varying.py --only qwen3 --contexts offload remat
    python examples/bench/bench_varying.py --tiny     # shows that all of it runs, without a GPU, and nothing else

Steps of all ways take turns over the same batches, with head and loss in the context, which is made anew in each step. An
untimed plain step goes before them: at a new length, kernels are chosen and planned for up to 150 ms, whoever comes first.

    budget    a `MemoryBudget` beside plain steps and all layers checkpointed: 1.02 of the peak with all layers checkpointed on
              the largest batch, or `--share` of the plain peak, or the peak with `--layers` layers checkpointed
    offload   `CPUOffload` at several ratios over the least that each batch's plain step and the link allow
    remat     `Rematerialize(.5)` over the fewest evenly spaced checkpointed layers that need no more on the largest batch

    qwen3     0.62e9 parameters, 20 layers, 8 sequences of 448 to 1024 tokens, in steps of 8, drawn anew for each batch
    t5        16 + 16 layers, width 1024, dropout, 8 x 512: each step is like the one before; at most 12 batches, since the
              first takes a minute or more under the budget, unless --steps says more
    mixtral   8 layers, width 1024, 8 experts, 8 x 1024: other tokens in each step
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from alternating import Peak, Step, largest
from alternating import step_of as timed_step
from budget_steps import has_stepped
from families import mixtral, qwen3, t5
from measuring import Engine, Workload, blocks_of, checkpointed, plain, roofline_s
from remat_spaced import fewest_within, spaced
from shared import Line, about_run
from torch import Tensor, nn

import memkit
from memkit.device import Device, ReferenceDevice, open_device
from memkit.transfer import measure_link

TAG = "varying"
OF_CHECKPOINTED = 1.02
RATIOS, BUDGET = (0.1, 0.3, 1.0), 0.5
NUM_BATCHES, NUM_QUICK = 40, 16
NUM_FIRST = 10
NUM_ALONE = 3
"""Steps of a way by itself, on the largest batch, ahead of those by turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model, and what it is called with."""

    build: Callable[[bool], nn.Module]
    """Takes whether it is to be tiny."""
    batch: int
    lengths: tuple[int, int]
    """The shortest and the longest, in steps of 8."""
    most: int = 100
    """At most so many batches, unless `--steps` says otherwise."""


FAMILIES = {
    "qwen3": Family(build=qwen3, batch=8, lengths=(448, 1024)),
    "t5": Family(build=t5, batch=8, lengths=(512, 512), most=12),
    "mixtral": Family(build=mixtral, batch=8, lengths=(1024, 1024)),
}


def num_batches(family: Family, asked: int | None, *, is_quick: bool) -> int:
    """Return how many batches are run. `asked` is `--steps`."""
    wanted = min(NUM_BATCHES, family.most) if asked is None else asked
    return min(wanted, NUM_QUICK) if is_quick else wanted


def batches(family: Family, vocab_size: int, num: int, torch_device: torch.device, *, is_tiny: bool) -> list[Tensor]:
    """Return the batches of a run, the same each time."""
    draw, generator = random.Random(0), torch.Generator().manual_seed(0)
    rows, divisor = (2, 16) if is_tiny else (family.batch, 1)
    shortest, longest = family.lengths
    found = []
    for _ in range(num):
        length = draw.randrange(shortest, longest + 1, 8) // divisor
        found.append(torch.randint(2, vocab_size, (rows, length), generator=generator).to(torch_device))
    return found


def step_of(model: nn.Module, tokens: Tensor, engine: Engine, device: Device, peak: Peak) -> tuple[float, int]:
    """Run a step; return its seconds and its peak."""
    seen = peak.step(model, lambda: model(input_ids=tokens, labels=tokens).loss, engine, device)
    return seen.step_s, seen.peak_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Varying:
    """A family's model and its batches."""

    model: nn.Module
    device: Device
    batches: list[Tensor]
    longest: Tensor
    """As long as any may be."""
    options: Line
    """Of each context."""
    share: float | None
    num_layers: int | None
    """So many layers are checkpointed beside a budget, which is then the peak with these; None for all."""
    about: Line

    def step(self, tokens: Tensor, engine: Engine) -> Step:
        workload = Workload(
            name=self.about["family"],
            model=self.model,
            forward=lambda: self.model(input_ids=tokens, labels=tokens).loss,
            loss=lambda loss: loss,
        )
        return timed_step(workload, engine, self.device)

    def say(self, tokens: Tensor, seconds: dict[str, float]) -> None:
        times_ms = {way: round(1e3 * each, 1) for way, each in seconds.items()}
        print(self.about["family"], tokens.shape[1], times_ms, file=sys.stderr)


def run(name: str, arguments: argparse.Namespace, device: Device) -> Iterator[Line]:
    """Measure a family."""
    family, is_tiny = FAMILIES[name], arguments.tiny
    torch.manual_seed(0)
    dtype = torch.float32 if is_tiny else torch.bfloat16
    with torch.device(device.torch_device):
        model = family.build(is_tiny).to(dtype).train()
    vocab_size = model.config.vocab_size  # type: ignore[union-attr]  # transformers'
    num_steps = num_batches(family, arguments.steps, is_quick=arguments.quick)
    all_tokens = batches(family, int(vocab_size), num_steps, device.torch_device, is_tiny=is_tiny)
    longest = max(all_tokens, key=Tensor.numel)
    if family.lengths[0] < family.lengths[1]:
        longest = torch.cat([longest, longest], 1)[:, : family.lengths[1] // (16 if is_tiny else 1)].contiguous()
        all_tokens[-1] = longest
    varying = Varying(
        model=model,
        device=device,
        batches=all_tokens,
        longest=longest,
        options={"device": device, "min_bytes": 2**10 if is_tiny else 2**20},
        share=arguments.share,
        num_layers=arguments.layers,
        about={"bench": "varying", "family": name, "device": device.name, **about_run(num_steps)},
    )
    for context in arguments.contexts:
        yield from CONTEXTS[context](varying)
        model.zero_grad(set_to_none=True)
        gc.collect()
        device.empty_cache()


def under_budget(varying: Varying) -> list[Line]:
    model, device, all_tokens = varying.model, varying.device, varying.batches
    peak = Peak(device.memory_counter())
    by_layers = partial(checkpointed, model) if varying.num_layers is None else spaced(blocks_of(model), varying.num_layers)
    by_hand: dict[str, Engine] = {"plain": plain, "checkpointed": by_layers}
    said: list[str] = []
    with peak.watched():
        alone = {
            way: max(step_of(model, varying.longest, engine, device, peak)[1] for _ in range(NUM_ALONE))
            for way, engine in by_hand.items()
        }
        more = OF_CHECKPOINTED if varying.num_layers is None else 1
        budget = int(varying.share * alone["plain"]) if varying.share else int(more * alone["checkpointed"])
        asked = f"{budget or 2**20}B"
        gc.collect()
        device.empty_cache()
        options: Line = {"optimizer": has_stepped(model), **varying.options}
        ways = {**by_hand, "memkit": partial(memkit.MemoryBudget, asked, TAG, **options)}
        found: dict[str, list[tuple[float, int]]] = {way: [] for way in ways}
        recorded, followed, replayed = 0, 0, list[float]()
        for tokens in all_tokens:
            step_of(model, tokens, plain, device, peak)
            for way, engine in ways.items():
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    found[way].append(step_of(model, tokens, engine, device, peak))
                said += [str(one.message) for one in caught if str(one.message) not in said]
            stats = memkit.stats(TAG)
            recorded, followed = recorded + stats.is_recorded, followed + stats.follows_plan
            replayed.append(round(stats.num_replayed_ops / max(stats.num_ops, 1), 2))
            varying.say(tokens, {way: steps[-1][0] for way, steps in found.items()})
    stats = memkit.stats(TAG)
    memkit.reset(TAG)
    about, others = varying.about, found["checkpointed"]
    lines = [{**about, "way": way, **figures(steps, all_tokens, budget, others)} for way, steps in found.items()]
    lines[-1] |= {
        "num_recorded": recorded,
        "num_following_a_plan": followed,
        "replayed_to_ops": replayed[:NUM_FIRST],
        "num_plans": stats.num_plans,
        "num_deviations": stats.num_deviations,
        "num_replays": stats.num_replays,
        "warnings": [text[:400] for text in said],
    }
    return lines


def over_roofline(varying: Varying) -> Iterator[Line]:
    """`CPUOffload` over the roofline of each batch: its plain forward or the bytes that left over the link, and its plain
    backward or those that came back."""
    device = varying.device
    link = measure_link(device, num_bytes=2**28 if device.torch_device.type == "cuda" else 2**20)
    tags = {ratio: f"{TAG} {ratio:g}" for ratio in RATIOS}
    alone, found = list[Step](), {ratio: list[Step]() for ratio in RATIOS}
    least_s, shares = {ratio: list[float]() for ratio in RATIOS}, {ratio: list[float]() for ratio in RATIOS}
    for tokens in varying.batches:
        varying.step(tokens, plain)
        by_itself = varying.step(tokens, plain)
        alone.append(by_itself)
        for ratio, tag in tags.items():
            found[ratio].append(varying.step(tokens, partial(memkit.CPUOffload, ratio, tag, **varying.options)))
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
        varying.say(tokens, {"plain": by_itself.step_s, **times})
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
    engine, layers = partial(memkit.Rematerialize, BUDGET, TAG, **varying.options), blocks_of(varying.model)
    for tokens in varying.batches[:NUM_FIRST]:
        varying.say(tokens, {"remat, by itself": varying.step(tokens, engine).step_s})
    target_bytes = largest([varying.step(varying.longest, engine).peak_allocated_bytes for _ in range(NUM_ALONE)])
    ways = {count: spaced(layers, count) for count in range(len(layers) + 1)}
    peaks = {count: varying.step(varying.longest, way).peak_allocated_bytes for count, way in ways.items()}
    count = fewest_within(peaks, target_bytes)
    by_hand = ways[len(layers) if count is None else count]
    found, others = list[Step](), list[Step]()
    for tokens in varying.batches:
        varying.step(tokens, plain)
        found.append(varying.step(tokens, engine))
        others.append(varying.step(tokens, by_hand))
        varying.say(tokens, {"remat": found[-1].step_s, f"{count} checkpointed": others[-1].step_s})
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


CONTEXTS: dict[str, Callable[[Varying], Iterable[Line]]] = {
    "budget": under_budget,
    "offload": over_roofline,
    "remat": over_spaced,
}


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


def figures(steps: list[tuple[float, int]], all_tokens: list[Tensor], budget: int, others: list[tuple[float, int]]) -> Line:
    """Return what is told of the steps of one way.

    Args:
        steps: seconds and peak of each.
        all_tokens: the batch of each.
        budget: in bytes.
        others: the steps with all layers checkpointed.
    """
    half = len(steps) // 2
    first = min(NUM_FIRST, half)
    taken = [seconds for seconds, _ in steps]
    per_token = [seconds / tokens.numel() for (seconds, _), tokens in zip(steps, all_tokens, strict=True)]
    to_checkpointed = [mine / other for mine, (other, _) in zip(taken, others, strict=True)]
    worst, late = max(peak for _, peak in steps), max(peak for _, peak in steps[first:])
    return {
        "first_ms": [round(1e3 * seconds, 1) for seconds in taken[:first]],
        "later_ms": round(1e3 * statistics.mean(taken[first:]), 2),
        "last_half_ms": round(1e3 * statistics.mean(taken[half:]), 2),
        "ms_per_8192_tokens_later": round(8192e3 * statistics.mean(per_token[first:]), 2),
        "slowest_later_ms": round(1e3 * max(taken[first:]), 1),
        "later_to_checkpointed": round(statistics.median(to_checkpointed[first:]), 3),
        "worst_peak_bytes": worst,
        "worst_later_peak_bytes": late,
        "budget_bytes": budget,
        "worst_peak_to_budget": round(worst / budget, 3) if budget else None,
        "worst_later_peak_to_budget": round(late / budget, 3) if budget else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--contexts", nargs="+", choices=CONTEXTS, default=["budget"])
    parser.add_argument("--steps", type=int, help="batches of each family; default: 40, or 12 for t5")
    parser.add_argument("--share", type=float, help="the budget as a share of the plain peak on the largest batch")
    parser.add_argument("--layers", type=int, help="how many layers are checkpointed; the budget is then the peak with these")
    parser.add_argument("--quick", action="store_true", help="at most 16 batches of each family")
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
