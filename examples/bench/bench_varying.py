"""Steps that never repeat, under a budget: lengths or routes that change with each batch. Prints lines of JSON.

    python examples/bench/bench_varying.py            # all families on this machine's GPU, 3 minutes
    python examples/bench/bench_varying.py --only qwen3 --steps 40
    python examples/bench/bench_varying.py --tiny     # shows that all of it runs, without a GPU, and nothing else

Plain steps, steps with all layers checkpointed, and steps under a `MemoryBudget` take turns over the same batches, with head
and loss in the context. The budget is 1.02 of the peak with all layers checkpointed on the largest batch, or `--share` of the
plain peak.

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
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from budget_steps import has_stepped
from measuring import Engine, checkpointed, plain
from shared import Line, about_run
from torch import Tensor, nn

import memkit
from memkit.device import Device, MemoryCounter, ReferenceDevice, open_device

TAG = "varying"
OF_CHECKPOINTED = 1.02
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


def qwen3(is_tiny: bool) -> nn.Module:
    import transformers

    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "head_dim": 16}
    full = {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 20, "num_attention_heads": 12, "head_dim": 128}
    config = transformers.Qwen3Config(
        vocab_size=256 if is_tiny else 32000,
        num_key_value_heads=2 if is_tiny else 4,
        use_cache=False,
        **(size if is_tiny else full),
    )
    return transformers.Qwen3ForCausalLM(config)


def t5(is_tiny: bool) -> nn.Module:
    import transformers

    size = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 256}
    full = {"d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_layers": 16, "num_heads": 16, "vocab_size": 32128}
    config = transformers.T5Config(dropout_rate=0.1, decoder_start_token_id=0, use_cache=False, **(size if is_tiny else full))
    return transformers.T5ForConditionalGeneration(config)


def mixtral(is_tiny: bool) -> nn.Module:
    import transformers

    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 256}
    full = {
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "vocab_size": 32000,
    }
    config = transformers.MixtralConfig(
        num_key_value_heads=2 if is_tiny else 4, num_local_experts=8, use_cache=False, **(size if is_tiny else full)
    )
    return transformers.MixtralForCausalLM(config)


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


class Peak:
    """The peak since it was asked for the last time, though others, as `MemoryBudget` while it learns, reset the counter."""

    def __init__(self, counter: MemoryCounter | None) -> None:
        self._counter, self._most_bytes = counter, 0

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
            reset(counter)

        kind.reset_peak = note_and_reset
        try:
            yield
        finally:
            kind.reset_peak = reset

    def take(self) -> int:
        """Return the peak, and begin anew."""
        if self._counter is None:
            return 0
        self._counter.reset_peak()
        most_bytes, self._most_bytes = self._most_bytes, 0
        return most_bytes


def step_of(model: nn.Module, tokens: Tensor, engine: Engine, device: Device, peak: Peak) -> tuple[float, int]:
    """Run a step; return its seconds and its peak."""
    model.zero_grad(set_to_none=True)
    device.synchronize()
    peak.take()
    start_s = time.perf_counter()
    with engine():
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    device.synchronize()
    return time.perf_counter() - start_s, peak.take()


def run(name: str, arguments: argparse.Namespace, device: Device) -> list[Line]:
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
    peak = Peak(device.memory_counter())
    by_hand: dict[str, Engine] = {"plain": plain, "checkpointed": partial(checkpointed, model)}
    said: list[str] = []
    with peak.watched():
        alone = {
            way: max(step_of(model, longest, engine, device, peak)[1] for _ in range(NUM_ALONE))
            for way, engine in by_hand.items()
        }
        budget = int(arguments.share * alone["plain"]) if arguments.share else int(OF_CHECKPOINTED * alone["checkpointed"])
        asked = f"{budget or 2**20}B"
        gc.collect()
        device.empty_cache()
        options: Line = {"optimizer": has_stepped(model), "device": device, "min_bytes": 2**10 if is_tiny else 2**20}
        ways = {**by_hand, "memkit": partial(memkit.MemoryBudget, asked, TAG, **options)}
        found: dict[str, list[tuple[float, int]]] = {way: [] for way in ways}
        recorded, followed, replayed = 0, 0, list[float]()
        for tokens in all_tokens:
            for way, engine in ways.items():
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    found[way].append(step_of(model, tokens, engine, device, peak))
                said += [str(one.message) for one in caught if str(one.message) not in said]
            stats = memkit.stats(TAG)
            recorded, followed = recorded + stats.is_recorded, followed + stats.follows_plan
            replayed.append(round(stats.num_replayed_ops / max(stats.num_ops, 1), 2))
            print(name, tokens.shape[1], {way: round(1e3 * steps[-1][0], 1) for way, steps in found.items()}, file=sys.stderr)
    stats = memkit.stats(TAG)
    memkit.reset(TAG)
    about = {"bench": "varying", "family": name, "device": device.name, **about_run(num_steps)}
    lines = [{**about, "way": way, **figures(steps, all_tokens, budget, found["checkpointed"])} for way, steps in found.items()]
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
    parser.add_argument("--steps", type=int, help="batches of each family; default: 40, or 12 for t5")
    parser.add_argument("--share", type=float, help="the budget as a share of the plain peak on the largest batch")
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
