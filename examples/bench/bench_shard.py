"""What splitting a model between GPUs takes, by `shard` and by hand, and with contexts inside. Prints lines of JSON.

    python examples/bench/bench_shard.py                   # a process for each GPU of this machine
    python examples/bench/bench_shard.py --only lora
    python examples/bench/bench_shard.py --tiny            # two processes on the CPU, small models: shows that it runs

A Llama of 3.2 billion parameters in bfloat16, 4 x 2048 tokens on each GPU, stepped by AdamW. Parts:

    full         all is trained: `shard` and FSDP2 by hand
    lora         a frozen base with adaptors: the same
    acting       all is trained, by `shard`: plain, and under CPUOffload(0.2), Rematerialize(0.5) and half a MemoryBudget; then
                 the same with the whole model on each GPU by itself, where the budget takes as many bytes away
    states       all is trained, by `shard`: plain, and with a StateOffload that steps on the device, or on the host, whose last
                 bits differ from those of a GPU. Of AdamW the fused kernel steps, in all three
    host_params  parameters on the host: FSDP2's CPUOffloadPolicy by hand, one layer gathered ahead, and `shard`, also with the
                 embedding and the head as layers. LoRA, with 4 x 2048 tokens and with 1 x 512, where the link counts; and all
                 trained, which the CPU steps: behind the backward, and beside it
    ends         the embedding and the head as layers, gathered by themselves: all trained with shards on the device, and LoRA
                 with parameters on the host, with 4 x 2048 tokens
    profiled     what `profile_memory` of the sharded model says of the same steps: LoRA and all trained
    bits         a small Llama whose attention's backward is deterministic: how many numbers differ, of the losses and of all
                 parameters after 4 steps, from FSDP2 by hand

Each line has the median seconds of a step, on the slowest rank, and the largest peak bytes of a rank. One more model is
stepped first, and not counted. Contexts are timed once they know how they go on. Those of `states` have as well

    roofline_s    the passes of the plain step and what the update takes at least while all ranks are at it: to bring the states
                  of a rank each way; or to step that many numbers on the host, beside copies of gradients and parameters for as
                  long as these last
    of_roofline   the step's seconds over these

Those of `host_params` have

    passes_s      of that, the forward and the backward, up to where the host has all gradients
    h2d_gb_per_s  what the link of a rank gives while those of all ranks are busy
    roofline_s    the longer of the passes with shards on the device and of bringing a rank's own part, each layer twice and
                  what is in none once; and the optimizer's step, as far as it is behind the passes
    of_roofline, of_by_hand   the step's seconds over these

Those of `profiled` have, of the profile, `profiled_peak_bytes` with the optimizer's states, `profiled_s` of forward and
backward, and how many bytes of whole parameters are gathered at once, `gathered_bytes`.
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
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from budget_steps import MOST_LEARNING, NUM_LEARNING, is_choosing
from lora import add_lora
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

import memkit
from memkit.device import Device, ReferenceDevice, open_device
from memkit.transfer.lanes import measure_beside_copies, measure_both_ways, measure_link

TAG = "bench"
NUM_SETTLING = 4
"""Steps of the other contexts until they are planned, and need no record."""
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
    shape: tuple[int, int] = (4, 2048)
    """Of the tokens of a rank, [batch, length]."""
    is_small: bool = False
    """Whether the model is one of four layers."""
    tells_passes: bool = False
    """Whether the host waits for the backward ahead of the optimizer's step."""

    def llama(self, *, lora: bool = False) -> nn.Module:
        """Return the same model each time, on the CPU."""
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        sizes = {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24}
        if self.is_small and not self.is_tiny:
            sizes = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4, "num_attention_heads": 8}
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
        shape, most = ((2, 16), 256) if self.is_tiny else (self.shape, 32000)
        return torch.randint(0, most, shape, generator=generator).to(self.device.torch_device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one rank has found."""

    step_s: float
    passes_s: float
    peak_bytes: int
    results: list[Tensor]
    """Losses, and this rank's part of all parameters; nothing where bits are not asked for."""
    more: dict[str, float] = field(default_factory=dict)
    """What its line has as well."""


def by_hand(model: nn.Module, **options: Any) -> nn.Module:
    """Shard by FSDP2, with one layer gathered ahead."""
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    layers = [fully_shard(layer, mesh=mesh, **options) for layer in model.model.layers]
    model = fully_shard(model, mesh=mesh, **options)
    model.set_modules_to_forward_prefetch(layers[:1])
    model.set_modules_to_backward_prefetch(layers[-1:])
    for number, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[number + 1 : number + 2])
        layer.set_modules_to_backward_prefetch(layers[max(number - 1, 0) : number])
    return model


def measure(
    bench: Bench,
    build: Build,
    split: Split,
    context: Context = nullcontext,
    offload: Offload | None = None,
    *,
    with_bits: bool = False,
    num_learning: int = 0,
    **options: Any,
) -> Run:
    """Train for some steps, and return what they took; the first third is not timed.

    Args:
        context: around each forward.
        offload: has the optimizer's states leave the device.
        with_bits: whether to return losses and parameters.
        num_learning: so many steps go ahead of these at least, and more until no rank's `MemoryBudget` tries anything any more.
        options: the optimizer's.
    """
    gc.collect()  # FSDP2's groups are cycles: the model before is gone only now
    model = split(build())
    optimizer = torch.optim.AdamW([item for item in model.parameters() if item.requires_grad], lr=1e-4, **options)
    with offload(optimizer) if offload is not None else nullcontext():
        num_learned = learn(bench, model, optimizer, context, num_learning) if num_learning else 0
        run = train(bench, model, optimizer, context, with_bits=with_bits)
    return replace(run, more={**run.more, "num_learning": num_learned}) if num_learned else run


def learn(bench: Bench, model: nn.Module, optimizer: torch.optim.Optimizer, context: Context, least: int) -> int:
    """Train until no rank's `MemoryBudget` tries anything any more. Return how many steps that took.

    It looks itself at the peak of the step before, so nobody starts that anew.
    """
    number = 0
    for number in range(1, (least if bench.is_tiny else MOST_LEARNING) + 1):
        tokens = bench.tokens(number)
        with context():
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        is_open = torch.tensor(float(is_choosing()), device=bench.device.torch_device)
        dist.all_reduce(is_open)
        if number >= least and not is_open:
            break
    return number


def train(bench: Bench, model: nn.Module, optimizer: torch.optim.Optimizer, context: Context, *, with_bits: bool) -> Run:
    counter, first = bench.device.memory_counter(), bench.num_steps // 3
    losses, times, passes, peaks = [], [], [], [0]
    for step in range(bench.num_steps):
        tokens = bench.tokens(step)
        bench.device.synchronize()
        if counter is not None and step == first:  # only here: a `MemoryBudget` reads it as well, and counts anew by itself
            counter.reset_peak()
        start = time.perf_counter()
        with context():
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if bench.tells_passes:
            bench.device.synchronize()
        passes.append(time.perf_counter() - start)
        optimizer.step()
        optimizer.zero_grad()
        bench.device.synchronize()
        times.append(time.perf_counter() - start)
        if counter is not None and step >= first:
            peaks.append(counter.peak_bytes())
        losses.append(loss.detach())
    parts = [each.to_local().detach().to("cpu", copy=True) for each in model.parameters()] if with_bits else []
    return Run(
        step_s=statistics.median(times[first:]),
        passes_s=statistics.median(passes[first:]),
        peak_bytes=max(peaks),
        results=[*map(Tensor.cpu, losses), *parts] if with_bits else [],
    )


def full(bench: Bench, *, lora: bool = False) -> Iterator[tuple[str, Run]]:
    build = functools.partial(bench.llama, lora=lora)
    yield "by hand", measure(bench, build, by_hand)
    yield "shard", measure(bench, build, memkit.shard)


def acting(bench: Bench) -> Iterator[tuple[str, Run]]:
    saved_bytes = None
    for where, split in (("", memkit.shard), ("whole: ", _left_whole)):
        plain = measure(bench, bench.llama, split)
        yield f"{where}plain", plain
        saved_bytes = plain.peak_bytes // 2 if saved_bytes is None else saved_bytes
        for name, context in contexts_of(bench, plain.peak_bytes - saved_bytes).items():
            num_learning = NUM_LEARNING if name.startswith("MemoryBudget") else NUM_SETTLING
            run = measure(bench, bench.llama, split, context, num_learning=num_learning)
            yield f"{where}{name}", replace(run, more={**run.more, "of_plain": run.step_s / plain.step_s})
            memkit.reset(TAG)


def _left_whole(model: nn.Module) -> nn.Module:
    return model


def contexts_of(bench: Bench, budget_bytes: int) -> dict[str, Context]:
    options: dict[str, Any] = {"tag": TAG, "device": bench.device, **({"min_bytes": 0} if bench.is_tiny else {})}
    half = "160KiB" if bench.is_tiny else f"{budget_bytes}B"
    return {
        "CPUOffload(0.2)": lambda: memkit.CPUOffload(0.2, **options),
        "Rematerialize(0.5)": lambda: memkit.Rematerialize(0.5, **options),
        "MemoryBudget, half of the peak": lambda: memkit.MemoryBudget(half, **options),
    }


def states(bench: Bench) -> Iterator[tuple[str, Run]]:
    bench = replace(bench, tells_passes=True)
    rates = _host_rates(bench)
    numels: list[int] = []
    plain = measure(bench, bench.llama, functools.partial(_shard_counted, numels), fused=True)
    yield "plain", plain
    numel, bytes_each = sum(numels), 4 if bench.is_tiny else 2
    copies_s = bytes_each * numel / rates["shared_bytes_per_s"]
    alone = max(0.0, numel - rates["shared_updates_per_s"] * copies_s)
    updates_s = {
        "device": 2 * bytes_each * numel / rates["both_bytes_per_s"],
        "host": copies_s + alone / rates["updates_per_s"],
    }
    for update, update_s in updates_s.items():
        offload = functools.partial(memkit.StateOffload, update=update, device=bench.device)
        run = measure(bench, bench.llama, memkit.shard, offload=offload, fused=True)
        roofline_s = plain.passes_s + update_s
        more = {"passes_s": run.passes_s, "roofline_s": roofline_s, "of_roofline": run.step_s / roofline_s}
        yield f"StateOffload {update}", replace(run, more={**more, **rates})


def _shard_counted(numels: list[int], model: nn.Module) -> nn.Module:
    """Shard, and note the numbers that a rank has of each parameter."""
    model = memkit.shard(model)
    numels += [item.to_local().numel() for item in model.parameters()]
    return model


def _host_rates(bench: Bench) -> dict[str, float]:
    """Return the bytes per second of copies each way, and how many numbers in bfloat16 the fused AdamW steps per second with
    this rank's threads; each by itself, and one beside the other. All ranks measure at once, and it is their average."""
    numel, num_bytes = (2**16, 2**20) if bench.is_tiny else (2**25, 2**28)
    parameters = [nn.Parameter(torch.zeros(numel, dtype=torch.bfloat16)) for _ in range(4)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    optimizer.step()
    dist.barrier()
    both_bytes_per_s = measure_both_ways(bench.device, num_bytes=num_bytes)
    dist.barrier()
    times = []
    for _ in range(4):
        start = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - start)
    dist.barrier()
    num_copies = 2 if bench.is_tiny else 64
    most_acts = 2 if bench.is_tiny else None
    acts_per_s, shared_bytes_per_s = measure_beside_copies(
        bench.device, optimizer.step, num_bytes=num_bytes, num_copies=num_copies, most_acts=most_acts
    )
    rates = {
        "both_bytes_per_s": both_bytes_per_s,
        "updates_per_s": len(parameters) * numel / statistics.median(times),
        "shared_updates_per_s": len(parameters) * numel * acts_per_s,
        "shared_bytes_per_s": shared_bytes_per_s,
    }
    of_all = torch.tensor([*rates.values()], dtype=torch.float64, device=bench.device.torch_device)
    dist.all_reduce(of_all)
    return dict(zip(rates, (of_all / dist.get_world_size()).tolist(), strict=True))


def by_ends(model: nn.Module, **options: Any) -> nn.Module:
    """Shard, with the embedding and the head as layers of their own."""
    blocks = [f"model.layers.{number}" for number in range(len(model.model.layers))]
    model = memkit.shard(model, layers=["model.embed_tokens", *blocks, "lm_head"], **options)
    model.lm_head.set_reshard_after_forward(False)
    model.model.embed_tokens.set_unshard_in_backward(False)
    return model


HOST_SPLITS: Mapping[str, Split] = {
    "by hand": lambda model: by_hand(model, offload_policy=CPUOffloadPolicy(pin_memory=next(model.parameters()).is_cuda)),
    "shard": functools.partial(memkit.shard, offload_policy=CPUOffloadPolicy()),
    "ends as layers": functools.partial(by_ends, offload_policy=CPUOffloadPolicy()),
}


def host_params(bench: Bench) -> Iterator[tuple[str, Run]]:
    bench = replace(bench, num_steps=min(bench.num_steps, 9), tells_passes=True)
    dist.barrier()  # the links of all ranks are busy
    h2d_bytes_per_s = measure_link(bench.device, num_bytes=2**20 if bench.is_tiny else 2**28).h2d_bytes_per_s
    for name, lora, shape in (("LoRA", True, (4, 2048)), ("LoRA, 1 x 512", True, (1, 512)), ("full", False, (4, 2048))):
        shaped = replace(bench, shape=shape)
        build = functools.partial(shaped.llama, lora=lora)
        sizes_bytes: list[int] = []
        on_device = measure(shaped, build, functools.partial(_shard_weighed, sizes_bytes), fused=True)
        yield f"{name}: shards on the device", on_device
        hand_s = 0.0
        splits: list[tuple[str, Split, Offload | None]] = [(how, split, None) for how, split in HOST_SPLITS.items()]
        if not lora:
            beside = functools.partial(memkit.StateOffload, when="backward")
            splits += [(f"{how}, stepped beside the backward", HOST_SPLITS[how], beside) for how in ("shard", "ends as layers")]
        for how, split, offload in splits:
            run = measure(shaped, build, split, offload=offload, fused=True)
            hand_s = hand_s or run.step_s
            roofline_s = max(on_device.passes_s, sum(sizes_bytes) / h2d_bytes_per_s) + run.step_s - run.passes_s
            more = {"passes_s": run.passes_s, "h2d_gb_per_s": h2d_bytes_per_s / 1e9, "roofline_s": roofline_s}
            more |= {"of_roofline": run.step_s / roofline_s, "of_by_hand": run.step_s / hand_s}
            yield f"{name}: {how}", replace(run, more=more)


def _shard_weighed(sizes_bytes: list[int], model: nn.Module) -> nn.Module:
    """Shard, and note what a rank would bring to the device in a step."""
    model = memkit.shard(model)
    inside = {id(item) for layer in model.model.layers for item in layer.parameters()}
    sizes_bytes += [(2 if id(item) in inside else 1) * item.to_local().nbytes for item in model.parameters()]
    return model


def ends(bench: Bench) -> Iterator[tuple[str, Run]]:
    bench = replace(bench, num_steps=min(bench.num_steps, 9), tells_passes=True)
    for where, policy, lora in (("on the device", None, False), ("on the host, LoRA", CPUOffloadPolicy(), True)):
        for how, split in (("shard", memkit.shard), ("ends as layers", by_ends)):
            split = functools.partial(split, offload_policy=policy)
            run = measure(bench, functools.partial(bench.llama, lora=lora), split, fused=True)
            yield f"{where}: {how}", replace(run, more={"passes_s": run.passes_s})


def profiled(bench: Bench) -> Iterator[tuple[str, Run]]:
    for name, lora in (("LoRA", True), ("full", False)):
        build = functools.partial(bench.llama, lora=lora)
        run = measure(bench, build, memkit.shard, fused=True)
        yield name, replace(run, more=_told_by_profile(bench, build))


def _told_by_profile(bench: Bench, build: Build) -> dict[str, float]:
    gc.collect()
    model, tokens = memkit.shard(build()), bench.tokens(0)
    batch = {"input_ids": tokens, "labels": tokens}
    options = {"loss_fn": lambda output: output.loss, "optimizer": "adamw", "print_table": False}
    report = memkit.profile_memory(model, kwargs=batch, **options)
    return {
        "profiled_peak_bytes": report.step_peak_bytes,
        "profiled_s": report.forward_s + report.backward_s,
        "gathered_bytes": report.sharding.gathered_bytes,
    }


def bits(bench: Bench) -> Iterator[tuple[str, Run]]:
    bench = replace(bench, num_steps=4, shape=(2, 256), is_small=True)

    def run(split: Split, context: Context = nullcontext, offload: Offload | None = None) -> Run:
        with sdpa_kernel(SDPBackend.MATH):
            found = measure(bench, bench.llama, split, context, offload, with_bits=True, fused=True)
        if context is not nullcontext:
            memkit.reset(TAG)
        return found

    def compared(name: str, found: Run, plain: Run) -> tuple[str, Run]:
        pairs = zip(found.results, plain.results, strict=True)
        num_differing = sum(int((one != other).sum()) for one, other in pairs)
        return name, replace(found, more={"num_differing": num_differing, "of": sum(map(Tensor.numel, plain.results))})

    def compiled(split: Split, model: nn.Module) -> nn.Module:
        for layer in model.model.layers:
            layer.compile(backend="aot_eager" if bench.is_tiny else "inductor")
        return split(model)

    plain = run(by_hand)
    contexts = contexts_of(bench, plain.peak_bytes // 2)
    yield compared("by hand, again", run(by_hand), plain)
    yield compared("shard", run(memkit.shard), plain)
    for name, context in contexts.items():
        yield compared(name, run(memkit.shard, context), plain)
    offload = functools.partial(memkit.StateOffload, update="device", device=bench.device)
    yield compared("StateOffload device", run(memkit.shard, offload=offload), plain)
    plain = run(HOST_SPLITS["by hand"])
    yield compared("on the host: shard", run(HOST_SPLITS["shard"]), plain)
    for name, context in contexts.items():
        yield compared(f"on the host: {name}", run(HOST_SPLITS["shard"], context), plain)
    plain = run(functools.partial(compiled, by_hand))
    yield compared("compiled: shard", run(functools.partial(compiled, memkit.shard)), plain)
    for name in ("CPUOffload(0.2)", "Rematerialize(0.5)"):
        yield compared(f"compiled: {name}", run(functools.partial(compiled, memkit.shard), contexts[name]), plain)


PARTS: Mapping[str, Callable[[Bench], Iterator[tuple[str, Run]]]] = {
    "full": full,
    "lora": functools.partial(full, lora=True),
    "acting": acting,
    "states": states,
    "host_params": host_params,
    "ends": ends,
    "profiled": profiled,
    "bits": bits,
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
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_ranks))  # the CPU steps what is on the host
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True, warn_only=True)  # else bits differ from run to run
    dist.init_process_group("gloo" if args.tiny else "nccl", rank=rank, world_size=num_ranks)
    device = ReferenceDevice() if args.tiny else open_device(f"cuda:{rank}")
    bench = Bench(device=device, is_tiny=args.tiny, num_steps=args.steps)
    measure(replace(bench, num_steps=2), bench.llama, by_hand)  # what CUDA and NCCL set up once is in no line
    for part in args.only:
        for name, run in PARTS[part](bench):
            line = {
                "bench": "shard",
                "part": part,
                "name": name,
                "num_ranks": num_ranks,
                "step_s": largest(run.step_s, device.torch_device),
                "peak_bytes": round(largest(run.peak_bytes, device.torch_device)),
                **{key: largest(number, device.torch_device) for key, number in run.more.items()},
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
    args.steps = args.steps or (6 if args.tiny else 12)
    num_ranks = 2 if args.tiny else torch.cuda.device_count()
    if num_ranks == 0:
        sys.exit("bench_shard.py needs a GPU; found none. Use --tiny")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    mp.spawn(run_rank, (num_ranks, port, args), nprocs=num_ranks)


if __name__ == "__main__":
    main()
