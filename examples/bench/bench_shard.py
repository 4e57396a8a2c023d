"""What splitting a model between GPUs takes, by `shard` and by hand, and with contexts inside. Prints lines of JSON.

    python examples/bench/bench_shard.py                   # a process for each GPU of this machine
    python examples/bench/bench_shard.py --only lora
    python examples/bench/bench_shard.py --tiny            # two processes on the CPU, small models: shows that it runs

A Llama of 3.2 billion parameters in bfloat16, 4 x 2048 tokens on each GPU, stepped by AdamW. Parts:

    full      all is trained: `shard` and FSDP2 by hand
    lora      a frozen base with adaptors: the same
    acting    all is trained, by `shard`: plain, and under CPUOffload(0.2), Rematerialize(0.5) and half a MemoryBudget
    states    all is trained, by `shard`: plain, and with a StateOffload that steps on the device, or on the host, whose last
              bits differ from those of a GPU. Of AdamW the fused kernel steps, in all three

Each line has the median seconds of a step, on the slowest rank; the largest peak bytes of a rank; and whether losses
and parameters have the bits of the first line of its part, on every rank.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lora import add_lora
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import memkit
from memkit.device import Device, ReferenceDevice, open_device

TAG = "bench"
Context = Callable[[], AbstractContextManager[Any]]
Build = Callable[[], nn.Module]
Split = Callable[[nn.Module], nn.Module]
Offload = Callable[[torch.optim.Optimizer], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What all parts of one rank share."""

    device: Device
    is_tiny: bool
    num_steps: int

    def llama(self, *, lora: bool = False) -> nn.Module:
        """Return the same model each time, on the CPU."""
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        sizes = {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24}
        if self.is_tiny:
            sizes = {"hidden_size": 32, "intermediate_size": 88, "num_hidden_layers": 3, "num_attention_heads": 4}
        config = LlamaConfig(**sizes, vocab_size=256 if self.is_tiny else 32000, use_cache=False)
        with self.device.torch_device:  # random numbers are faster there
            model = LlamaForCausalLM(config).to(torch.float32 if self.is_tiny else torch.bfloat16)
        if lora:
            model.requires_grad_(False)
            add_lora(model, ("q_proj", "v_proj"))
        return model.to(self.device.torch_device).train()

    def tokens(self, step: int) -> Tensor:
        """Return [batch, length] tokens, others on each rank and in each step."""
        generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
        shape, most = ((2, 16), 256) if self.is_tiny else ((4, 2048), 32000)
        return torch.randint(0, most, shape, generator=generator).to(self.device.torch_device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one rank has found."""

    step_s: float
    peak_bytes: int
    results: list[Tensor]


def by_hand(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def measure(
    bench: Bench, build: Build, split: Split, context: Context = nullcontext, offload: Offload | None = None, **options: Any
) -> Run:
    """Train for some steps, and return what they took; the first third is not timed.

    Args:
        context: around each forward.
        offload: has the optimizer's states leave the device.
        options: the optimizer's.
    """
    gc.collect()  # FSDP2's groups are cycles: the model before is gone only now
    model = split(build())
    optimizer = torch.optim.AdamW([item for item in model.parameters() if item.requires_grad], lr=1e-4, **options)
    with offload(optimizer) if offload is not None else nullcontext():
        return train(bench, model, optimizer, context)


def train(bench: Bench, model: nn.Module, optimizer: torch.optim.Optimizer, context: Context) -> Run:
    counter = bench.device.memory_counter()
    losses, times, peaks = [], [], [0]
    for step in range(bench.num_steps):
        tokens = bench.tokens(step)
        bench.device.synchronize()
        if counter is not None:
            counter.reset_peak()
        start = time.perf_counter()
        with context():
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        bench.device.synchronize()
        times.append(time.perf_counter() - start)
        if counter is not None and step >= bench.num_steps // 3:
            peaks.append(counter.peak_bytes())
        losses.append(loss.detach())
    results = [item.detach().to("cpu", copy=True) for item in (*losses, *(each.to_local() for each in model.parameters()))]
    return Run(step_s=statistics.median(times[bench.num_steps // 3 :]), peak_bytes=max(peaks), results=results)


def full(bench: Bench, *, lora: bool = False) -> Iterator[tuple[str, Run]]:
    build = functools.partial(bench.llama, lora=lora)
    yield "by hand", measure(bench, build, by_hand)
    yield "shard", measure(bench, build, memkit.shard)
    yield "shard, two ahead", measure(bench, build, functools.partial(memkit.shard, prefetch=2))


def acting(bench: Bench) -> Iterator[tuple[str, Run]]:
    plain = measure(bench, bench.llama, memkit.shard)
    yield "plain", plain
    options: dict[str, Any] = {"tag": TAG, "device": bench.device, **({"min_bytes": 0} if bench.is_tiny else {})}
    half = "160KiB" if bench.is_tiny else f"{plain.peak_bytes // 2}B"
    contexts: dict[str, Context] = {
        "CPUOffload(0.2)": lambda: memkit.CPUOffload(0.2, **options),
        "Rematerialize(0.5)": lambda: memkit.Rematerialize(0.5, **options),
        "MemoryBudget, half of the peak": lambda: memkit.MemoryBudget(half, **options),
    }
    for name, context in contexts.items():
        yield name, measure(bench, bench.llama, memkit.shard, context)
        memkit.reset(TAG)


def states(bench: Bench) -> Iterator[tuple[str, Run]]:
    yield "plain", measure(bench, bench.llama, memkit.shard, fused=True)
    for update in ("device", "host"):
        offload = functools.partial(memkit.StateOffload, update=update, device=bench.device)
        yield f"StateOffload {update}", measure(bench, bench.llama, memkit.shard, offload=offload, fused=True)


PARTS: Mapping[str, Callable[[Bench], Iterator[tuple[str, Run]]]] = {
    "full": full,
    "lora": functools.partial(full, lora=True),
    "acting": acting,
    "states": states,
}


def largest(number: float, device: torch.device) -> float:
    """Return the largest that a rank has."""
    found = torch.tensor(number, dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


def run_rank(rank: int, num_ranks: int, port: int, args: argparse.Namespace) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank)}
    if args.tiny:
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(rank)
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True, warn_only=True)  # else bits differ from run to run
    dist.init_process_group("gloo" if args.tiny else "nccl", rank=rank, world_size=num_ranks)
    device = ReferenceDevice() if args.tiny else open_device(f"cuda:{rank}")
    bench = Bench(device=device, is_tiny=args.tiny, num_steps=args.steps)
    for part in args.only:
        first: Run | None = None
        for name, run in PARTS[part](bench):
            first = first or run
            is_same = all(map(torch.equal, run.results, first.results))
            line = {
                "bench": "shard",
                "part": part,
                "name": name,
                "num_ranks": num_ranks,
                "step_s": largest(run.step_s, device.torch_device),
                "peak_bytes": round(largest(run.peak_bytes, device.torch_device)),
                "same_bits": largest(not is_same, device.torch_device) == 0,
                "torch": torch.__version__,
            }
            if rank == 0:
                print(json.dumps(line), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int)
    args = parser.parse_args()
    args.steps = args.steps or (6 if args.tiny else 15)
    num_ranks = 2 if args.tiny else torch.cuda.device_count()
    if num_ranks == 0:
        sys.exit("bench_shard.py needs a GPU; found none. Use --tiny")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    mp.spawn(run_rank, (num_ranks, port, args), nprocs=num_ranks)


if __name__ == "__main__":
    main()
