"""What memkit costs the host: the time of a step on tiny inputs at real depth, beyond that of a plain step.

    python examples/bench/bench_host.py
    python examples/bench/bench_host.py --only gpt2 chain region

Inputs are so small that the device is never what a step waits for: what is measured is the time until the host has issued the
forward and the backward. Each engine is timed in turn with a plain step; what it takes beyond is told in microseconds for
each storage that moves out and back, each tensor that autograd saves, each op that is recorded. Beside the models there are

    flat    how that cost grows with the number of storages, from a hundred to a hundred thousand
    chain   797 storages of 256 KiB and of 1 MiB, all of which move
    region  a region of two small ops, beside `torch.utils.checkpoint`
    layers  every layer streamed: a forward, and a step whose gradients go to the host, in milliseconds for each layer

Prints a line of JSON for each engine.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial

import torch
import torchvision
from host_chains import chain, flat
from host_layers import host_s, layers
from host_region import region
from measuring import Engine
from setting import Setting
from shared import Line, about_run, tell
from torch import Tensor, nn

import memkit
from memkit.device import Device, ReferenceDevice, cuda_is_available, open_device

TAG = "host"
Step = Callable[[], Tensor]


def resnet50() -> tuple[nn.Module, Step]:
    """Torchvision's, on two images of 32 x 32."""
    model, images = torchvision.models.resnet50(), torch.randn(2, 3, 32, 32)
    return model, lambda: model(images).sum()


def llama() -> tuple[nn.Module, Step]:
    """Sixteen layers, 64 wide, on 2 x 8 tokens."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=16, num_attention_heads=4, vocab_size=128, use_cache=False
    )
    model, tokens = transformers.LlamaModel(config), torch.randint(128, (2, 8))
    return model, lambda: model(input_ids=tokens)[0].sum()


def gpt2() -> tuple[nn.Module, Step]:
    """Twenty-four layers, 64 wide, with dropout, on 2 x 8 tokens."""
    import transformers

    config = transformers.GPT2Config(
        n_embd=64, n_layer=24, n_head=4, vocab_size=128, n_positions=16, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    model, tokens = transformers.GPT2Model(config).train(), torch.randint(128, (2, 8))
    return model, lambda: model(input_ids=tokens)[0].sum()


def whisper() -> tuple[nn.Module, Step]:
    """The depth of Whisper-small: twelve layers that encode, twelve that decode, 64 wide."""
    import transformers

    config = transformers.WhisperConfig(
        d_model=64,
        encoder_layers=12,
        decoder_layers=12,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_source_positions=16,
        vocab_size=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        use_cache=False,
    )
    model = transformers.WhisperModel(config).train()
    features, tokens = torch.randn(2, 80, 32), torch.randint(4, 128, (2, 8))
    return model, lambda: model(input_features=features, decoder_input_ids=tokens)[0].sum()


MODELS = {"resnet50": resnet50, "llama": llama, "gpt2": gpt2, "whisper": whisper}


def engines(device: Device) -> dict[str, Engine]:
    """Return what is measured: every storage counts, and with a window of nothing all that is to leave does."""

    def offload(ratio: float) -> Engine:
        return lambda: memkit.CPUOffload(ratio, TAG, min_bytes=1, window_bytes=0, device=device)

    def remat(budget: float) -> Engine:
        return lambda: memkit.Rematerialize(budget, TAG, min_bytes=1, device=device)

    found = {f"offload {ratio}": offload(ratio) for ratio in (0.0, 0.1, 1.0)}
    return found | {f"remat {budget}": remat(budget) for budget in (1.0, 0.5)}


def _units() -> Mapping[str, int]:
    """Return how many of what each engine pays for there were in the last step."""
    stats = memkit.stats(TAG)
    return {"moved": stats.num_copies_out, "ops": stats.num_ops, "dropped": stats.num_dropped}


def measure(name: str, device: Device, num_steps: int) -> list[Line]:
    """Return a line for each engine on one model, and one for what stays where a tenth moves."""
    torch.manual_seed(0)
    with torch.device(device.torch_device):
        model, step = MODELS[name]()
    saves = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal saves
        saves += 1
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        step().backward()
    lines: list[Line] = []
    for engine, context in engines(device).items():
        times: dict[str, list[float]] = {"plain": [], engine: []}
        for number in range(num_steps + 5):  # the first few are traced, timed and planned
            for which, enter in (("plain", nullcontext), (engine, context)):
                taken_s = host_s(model, step, enter, device)
                if number >= 5:
                    times[which].append(taken_s)
        units = _units()
        medians = {which: statistics.median(taken) for which, taken in times.items()}
        beyond_s = medians[engine] - medians["plain"]
        lines.append(
            {
                "bench": "host",
                "name": name,
                "engine": engine,
                "plain_s": medians["plain"],
                "step_s": medians[engine],
                "to_plain": medians[engine] / medians["plain"],
                "num_saves": saves,
                **{f"num_{what}": number for what, number in units.items()},
                "us_per_save": 1e6 * beyond_s / saves,
                "us_per_moved": 1e6 * beyond_s / units["moved"] if units["moved"] else None,
                "us_per_op": 1e6 * beyond_s / units["ops"] if units["ops"] else None,
            }
        )
        memkit.reset(TAG)
        gc.collect()
    by_engine = {line["engine"]: line for line in lines}
    lines.append({"bench": "host_stays", "name": name, **what_stays(by_engine["offload 0.1"], by_engine["offload 1.0"])})
    return lines


def what_stays(tenth: Line, whole: Line) -> Line:
    """Return the microseconds for each save that stays where a tenth moves: what is beyond plain, less what storages cost that
    move, as they do where all move."""
    num_stay = tenth["num_saves"] - tenth["num_moved"]
    beyond_us = 1e6 * (tenth["step_s"] - tenth["plain_s"]) - tenth["num_moved"] * (whole["us_per_moved"] or 0.0)
    return {"num_stay": num_stay, "us_per_stay": beyond_us / num_stay if num_stay else None}


def hosts(setting: Setting) -> Iterator[Line]:
    """All models."""
    for name in MODELS:
        yield from measure(name, setting.device, setting.steps)


CHAINS = {"flat": flat, "chain": chain, "region": region, "layers": partial(layers, models=MODELS)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*MODELS, *CHAINS]
    parser.add_argument("--only", nargs="*", default=names, choices=names)
    parser.add_argument("--steps", type=int, default=20, help="steps that count, for each median")
    parser.add_argument("--patience", type=float, default=300, metavar="S", help="seconds for flat; default: 300")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = open_device("cuda") if cuda_is_available() else ReferenceDevice()
    status = 0
    for name in options.only:
        setting = Setting(
            device=device,
            steps=options.steps,
            fast=False,
            tiny=options.tiny or not cuda_is_available(),
            ends_s=time.perf_counter() + options.patience,
        )
        lines = CHAINS[name](setting) if name in CHAINS else measure(name, device, options.steps)
        status |= tell(lines, {"device": repr(device), **about_run(options.steps)})
    return status


if __name__ == "__main__":
    sys.exit(main())
