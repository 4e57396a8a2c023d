"""A `MemoryBudget` on models of many kinds, beside checkpointing by hand within the same budget. Prints lines of JSON.

    python examples/bench/bench_families.py                        # all families at half of the plain peak, 5 minutes on a GPU
    python examples/bench/bench_families.py --only llama gnn --shares .75 .5 .35 --steps 30
    python examples/bench/bench_families.py --only lengths --layers 14 --steps 60    # the budget is the peak with these
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python examples/bench/bench_families.py --first --shares .75 .5 .35
    python examples/bench/bench_families.py --tiny                 # shows that all of it runs, without a GPU, and nothing else

The steps of all ways take turns over the same batches, with the same random numbers: plain; the fewest evenly spaced layers
checkpointed that keep to the budget on the largest batch, or all; and a `MemoryBudget` made anew in each step, with head and
loss in it. Where a batch has other shapes than those before, an untimed plain step goes ahead. The last batch is the largest.
Steps are counted from 1.

    alike     resnet50 (float32), regnet, densenet, unet, vit, llama, qwen3, gpt2 (dropout), whisper, t5 (dropout), mixtral (8
              experts), experts64, lstm (256 steps)
    others    looping (as mixtral, with as many tokens in a call of an expert as it gets), packed sequences, images of 6 sizes
              through a detector's backbone, a gnn of 50,000 to 200,000 edges, masks (absent, of ones, of padding; 1 to 8 rows),
              layerdrop of .1, lengths of 448 to 1024

`--first` runs only the first steps, in a plain `with` and attached, with the allocator capped at 1.05 of the budget.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from budget_steps import has_stepped
from families import FAMILIES, LARGEST, Batch, Family, built, shapes_of
from measuring import Engine, let_go, plain
from remat_spaced import spaced
from shared import Line, about_run, allow_tf32, tell
from torch import Tensor

import memkit
from memkit.activations.stats import SavedTensorStats
from memkit.device import Device, MemoryCounter, ReferenceDevice, open_device

TAG = "families"
NUM_STEPS, NUM_TINY = 16, 4
NUM_FIRST = 10
NUM_RESERVED = 4
NUM_LAST = 3
ROOM = 1.05
"""What the allocator may take for each byte of the budget."""


class Seen(NamedTuple):
    """A step."""

    step_s: float
    peak_bytes: int
    reserved_bytes: int
    """The most that was held from the device, also of what steps before have left reserved."""
    loss: float


class Peak:
    """The peaks since they were last asked for, though others, as `MemoryBudget` while it learns, reset the counter."""

    def __init__(self, counter: MemoryCounter | None) -> None:
        self._counter, self._most_bytes, self._reserved_bytes = counter, 0, 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within, every reset is seen."""
        if self._counter is None:
            yield
            return
        kind: Any = type(self._counter)
        reset = kind.reset_peak

        def note_and_reset(counter: MemoryCounter) -> None:
            self._most_bytes = max(self._most_bytes, counter.peak_bytes())
            self._reserved_bytes = max(self._reserved_bytes, counter.peak_reserved_bytes() or 0)
            reset(counter)

        kind.reset_peak = note_and_reset
        try:
            yield
        finally:
            kind.reset_peak = reset

    def take(self) -> tuple[int, int]:
        """Return the most that was allocated and that was reserved, 0 where nobody counts, and begin anew."""
        if self._counter is not None:
            self._counter.reset_peak()
        found = self._most_bytes, self._reserved_bytes
        self._most_bytes = self._reserved_bytes = 0
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """A family's steps on a device."""

    name: str
    family: Family
    device: Device
    peak: Peak
    is_tiny: bool
    peaks: dict[int, int] = field(default_factory=dict)
    """Of the largest batch, by how many layers are checkpointed."""

    def batch(self, step: int) -> Batch:
        return self.family.batch(step, self.device.torch_device)

    def step(self, batch: Batch, engine: Engine, seed: int) -> Seen:
        """Run a step with the same random numbers for each way. Gradients are dropped ahead of it."""
        torch.manual_seed(seed)
        self.family.model.zero_grad(set_to_none=True)
        self.device.synchronize()
        self.peak.take()
        start_s = time.perf_counter()
        with engine():
            loss = self.family.loss(batch)
        loss.backward()
        self.device.synchronize()
        return Seen(time.perf_counter() - start_s, *self.peak.take(), loss.item())

    def forget(self) -> None:
        """Have memkit know nothing, and nothing be reserved."""
        for tag in (TAG, f"{TAG} (regions of MemoryBudget)"):
            memkit.reset(tag)
        self.let_go()

    def let_go(self) -> None:
        """Have nothing be reserved that is not needed."""
        self.family.model.zero_grad(set_to_none=True)
        gc.collect()
        self.device.empty_cache()

    def checkpointed(self, count: int) -> Engine:
        return spaced(self.family.blocks, count)

    def peak_of(self, count: int) -> int:
        """Return the peak on the largest batch with so many layers checkpointed."""
        if count not in self.peaks:
            batch = self.batch(LARGEST)
            self.peaks[count] = max(self.step(batch, self.checkpointed(count), LARGEST).peak_bytes for _ in range(2))
        return self.peaks[count]

    def fewest(self, budget_bytes: int) -> int | None:
        """Return the fewest checkpointed layers that keep to a budget; None where all exceed it. Where nobody counts, all."""
        low, high = 0, len(self.family.blocks)
        if not budget_bytes:
            return high
        if self.peak_of(high) > budget_bytes:
            return None
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.peak_of(middle) <= budget_bytes else (middle + 1, high)
        return min(count for count, found in self.peaks.items() if found <= budget_bytes)

    def budget(self, asked: str | float) -> Callable[[], memkit.MemoryBudget]:
        """Return what makes the context."""
        least: Line = {"min_bytes": 2**10} if self.is_tiny else {}
        return partial(memkit.MemoryBudget, asked, TAG, optimizer=has_stepped(self.family.model), device=self.device, **least)

    def reserved_alone(self, engine: Engine) -> int:
        """Return what steps by themselves reserve: beside plain steps, what is reserved is theirs. 0 where nobody counts."""
        self.let_go()
        steps = (*range(NUM_RESERVED - 1), LARGEST) if self.peak_of(0) else ()
        return max((self.step(self.batch(step), engine, step).reserved_bytes for step in steps), default=0)


def run(name: str, arguments: argparse.Namespace, device: Device) -> Iterator[Line]:
    """Measure a family under each budget."""
    about = {"bench": "families", "family": name, "device": device.name, **about_run(arguments.steps)}
    measure = first_steps if arguments.first else by_turns
    peak, runs = Peak(device.memory_counter()), None
    with peak.watched():
        for share in arguments.shares:
            start_s = time.perf_counter()
            try:
                if runs is None:
                    family = built(name, device.torch_device, is_tiny=arguments.tiny)
                    runs = Runs(name=name, family=family, device=device, peak=peak, is_tiny=arguments.tiny)
                plain_bytes, layers = runs.peak_of(0), arguments.layers
                budget_bytes = int(share * plain_bytes) if layers is None else runs.peak_of(layers)
                engine = runs.budget(f"{budget_bytes}B" if budget_bytes else share)  # a share where nobody counts
                for line in measure(runs, engine, budget_bytes, arguments.steps):
                    yield {**about, "share": to(budget_bytes, plain_bytes) or share, **line}
            except Exception as error:  # the other families are measured all the same
                traceback.print_exc()
                yield {**about, "share": share, "error": error_of(error)}
                let_go(error, device)
            if runs is not None:
                runs.forget()
            print(f"{name} {share:g}: {time.perf_counter() - start_s:.1f} s", file=sys.stderr, flush=True)


def error_of(error: BaseException) -> str:
    """Return an exception in a line."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"


@contextmanager
def noted_warnings(said: list[str]) -> Iterator[None]:
    """Have warnings go to a list, each once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        finally:
            said += [text for text in dict.fromkeys(str(one.message)[:200] for one in caught) if text not in said]


def by_turns(runs: Runs, engine: Callable[[], memkit.MemoryBudget], budget_bytes: int, num_steps: int) -> Iterator[Line]:
    """Plain, checkpointed and under the budget by turns."""
    num_blocks, count = len(runs.family.blocks), runs.fewest(budget_bytes)
    by_hand = runs.checkpointed(num_blocks if count is None else count)
    ways: dict[str, Engine] = {"ahead": plain, "plain": plain, "checkpointed": by_hand, "memkit": engine}
    runs.forget()
    turns, told = list[dict[str, Seen]](), list[SavedTensorStats]()
    gradients, said, known = list[bool | None](), list[str](), set[Any]()
    for step in range(num_steps):
        batch, turn, bits = runs.batch(LARGEST if step == num_steps - 1 else step), dict[str, Seen](), dict[str, Tensor]()
        compares = step in (0, num_steps - 1)
        for way, each in ways.items():
            if way == "ahead" and shapes_of(batch) in known and not compares:
                continue
            with noted_warnings(said):
                turn[way] = runs.step(batch, each, step)
            if compares:
                bits[way] = digest(runs.family)
        if compares:
            repeats = torch.equal(bits["ahead"], bits["plain"])
            gradients.append(torch.equal(bits["memkit"], bits["plain"]) if repeats else None)
        known.add(shapes_of(batch))
        turns.append(turn)
        told.append(memkit.stats(TAG))
        times = {way: round(1e3 * seen.step_s, 1) for way, seen in turn.items() if way != "ahead"}
        print(runs.name, step + 1, times, "recorded" if told[-1].is_recorded else "", file=sys.stderr, flush=True)
    found = {way: [turn[way] for turn in turns] for way in ("plain", "checkpointed", "memkit")}
    yield {
        "plain_peak_bytes": runs.peak_of(0),
        "budget_bytes": budget_bytes,
        "num_blocks": num_blocks,
        "num_checkpointed": num_blocks if count is None else count,
        "checkpoints_keep_to_it": count is not None,
        **figures(found, budget_bytes),
        **learned(told, found["memkit"]),
        "worst_reserved_to_budget": to(runs.reserved_alone(engine), budget_bytes),
        "does_plain_repeat": all(turn["ahead"].loss == turn["plain"].loss for turn in turns if "ahead" in turn),
        "are_gradients_equal": gradients,
        "warnings": said,
    }


def digest(family: Family) -> Tensor:
    """Return numbers that differ where gradients do."""
    sums = []
    for parameter in family.model.parameters():
        gradient = parameter.grad
        if gradient is not None:
            bits = gradient.contiguous().flatten().view(torch.int16 if gradient.element_size() == 2 else torch.int32).long()
            sums.append((bits * torch.arange(1, len(bits) + 1, device=bits.device)).sum())
    return torch.stack(sums)


def to(found: float | None, other: float | None) -> float | None:
    """Return a ratio; None where one of them is not known, or 0, as where nobody counts."""
    return round(found / other, 3) if found and other else None


def learned(told: list[SavedTensorStats], mine: list[Seen]) -> Line:
    """Return how long steps were recorded, and how well peaks were foretold."""
    recorded = [step for step, stats in enumerate(told, 1) if stats.is_recorded]
    foretold = list(zip((stats.predicted_peak_bytes for stats in told), (seen.peak_bytes for seen in mine), strict=True))
    return {
        "num_recorded": len(recorded),
        "last_recorded": recorded[-1] if recorded else 0,
        "most_replayed_ops": max(stats.num_replayed_ops for stats in told),
        "predicted_to_peak": [to(*each) for each in foretold[-NUM_LAST:]],
    }


def figures(found: dict[str, list[Seen]], budget_bytes: int) -> Line:
    """Return how the steps under the budget compare with those of the other ways."""
    mine = found["memkit"]
    first, line = min(NUM_FIRST, len(mine) // 2), dict[str, Any]()
    by_hand_s = sum(seen.step_s for seen in found["checkpointed"][:first])
    for other in ("checkpointed", "plain"):
        pairs = [(seen.step_s, of.step_s) for seen, of in zip(mine, found[other], strict=True)][first:]
        line[f"median_to_{other}"] = round(statistics.median(my_s / other_s for my_s, other_s in pairs), 3)
        line[f"sum_to_{other}"] = to(sum(my_s for my_s, _ in pairs), sum(other_s for _, other_s in pairs))
    plain_s = statistics.median(seen.step_s for seen in found["plain"])
    losses = zip(mine, found["plain"], strict=True)
    return {
        **line,
        "sum_of_first_to_checkpointed": to(sum(seen.step_s for seen in mine[:first]), by_hand_s),
        "worst_peak_to_budget": to(max(seen.peak_bytes for seen in mine), budget_bytes),
        "worst_later_peak_to_budget": to(max(seen.peak_bytes for seen in mine[first:]), budget_bytes),
        "first_peak_to_budget": to(mine[0].peak_bytes, budget_bytes),
        "worst_checkpointed_peak_to_budget": to(max(seen.peak_bytes for seen in found["checkpointed"]), budget_bytes),
        "first_s": round(mine[0].step_s, 4),
        "plain_s": round(plain_s, 4),
        "unequal_losses": [step for step, (seen, of) in enumerate(losses, 1) if seen.loss != of.loss],
    }


def first_steps(runs: Runs, engine: Callable[[], memkit.MemoryBudget], budget_bytes: int, _: int) -> Iterator[Line]:
    """The first three steps under the budget in a fresh state, with the allocator capped."""
    batches = (0, 1, LARGEST)
    plain_s = [runs.step(runs.batch(step), plain, step).step_s for step in (*batches, *batches)][len(batches) :]
    for way in ("with", "attach"):
        runs.forget()
        said, seen, error = list[str](), list[Seen](), ""
        with capped(runs.device, int(ROOM * budget_bytes)), noted_warnings(said):
            handle = memkit.attach(runs.family.model, engine()) if way == "attach" else None
            try:
                for step in batches:
                    seen.append(runs.step(runs.batch(step), plain if handle else engine, step))
            except Exception as found:  # out of memory, most likely: the other ways are measured all the same
                error = f"{error_of(found)} in step {len(seen) + 1}"
                let_go(found, runs.device)
            if handle is not None:
                handle.remove()
        yield {
            "way": way,
            "budget_bytes": budget_bytes,
            "plain_s": round(plain_s[0], 4),
            "first_s": round(seen[0].step_s, 4) if seen else None,
            "beyond_3_plain_s": round(seen[0].step_s - 3 * plain_s[0], 4) if seen else None,
            "peaks_to_budget": [to(each.peak_bytes, budget_bytes) for each in seen],
            "reserved_to_budget": [to(each.reserved_bytes, budget_bytes) for each in seen],
            **({"error": error} if error else {}),
            "warnings": said,
        }


@contextmanager
def capped(device: Device, num_bytes: int) -> Iterator[None]:
    """Have the allocator of a GPU take no more than so many bytes."""
    if device.torch_device.type != "cuda":
        yield
        return
    total_bytes = torch.cuda.get_device_properties(device.torch_device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total_bytes))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--shares", nargs="+", type=float, default=[0.5], help="budgets as shares of the plain peak")
    parser.add_argument("--layers", type=int, help="the budget is the peak with so many layers checkpointed")
    parser.add_argument("--steps", type=int, help=f"of each way; default: {NUM_STEPS}, or {NUM_TINY} of small models")
    parser.add_argument("--first", action="store_true", help="only the first steps, with the allocator capped")
    parser.add_argument("--tiny", action="store_true", help="small models on the reference device")
    arguments = parser.parse_args()
    if not arguments.tiny and not torch.cuda.is_available():
        print("skipped: there is no CUDA device here", file=sys.stderr)
        return 0
    if arguments.layers is not None:
        arguments.shares = arguments.shares[:1]
    arguments.steps = arguments.steps or (NUM_TINY if arguments.tiny else NUM_STEPS)
    if not arguments.tiny:
        allow_tf32()
    for name in arguments.only:
        device = ReferenceDevice() if arguments.tiny else open_device("cuda")
        tell(run(name, arguments, device))
        gc.collect()
        device.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
