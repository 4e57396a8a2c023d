"""What streaming every layer costs the host: a forward without grad mode, and a step whose gradients go to the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext

import torch
from measuring import Engine
from setting import Setting
from shared import Line
from torch import Tensor, nn

import memkit
from memkit.device import Device

NUM_WARM = 5
LAYERED = ("llama", "gpt2", "whisper")
"""The models that are measured."""

Made = tuple[nn.Module, Callable[[], Tensor]]


def layers(setting: Setting, models: Mapping[str, Callable[[], Made]], names: Sequence[str] = LAYERED) -> Iterator[Line]:
    """Time a plain step and one with every layer streamed by turns, on two models that are alike."""
    for name in names:
        for train in ("frozen", "host"):
            found = []
            for _ in range(2):
                torch.manual_seed(0)
                with torch.device(setting.device.torch_device):
                    found.append(models[name]())
            yield {"bench": "host_layers", "name": name, "train": train, **_beyond(setting, *found, train)}


def _beyond(setting: Setting, plain: Made, streamed: Made, train: str) -> Line:
    for model, _ in (plain, streamed):
        model.requires_grad_(train == "host")
    times: tuple[list[float], list[float]] = ([], [])
    with memkit.LayerOffload(streamed[0], offload_ratio=1.0, train=train, device=setting.device) as offload:
        for number in range(setting.steps + NUM_WARM):
            for (model, step), taken in zip((plain, streamed), times, strict=True):
                taken_s = host_s(model, step, nullcontext, setting.device, backward=train == "host")
                if number >= NUM_WARM:
                    taken.append(taken_s)
        num_layers = offload.stats().num_streamed
    plain_s, streamed_s = map(statistics.median, times)
    beyond_s = streamed_s - plain_s
    return {
        "num_layers": num_layers,
        "plain_s": plain_s,
        "step_s": streamed_s,
        "ms_per_layer": 1e3 * beyond_s / num_layers,
    }


def host_s(model: nn.Module, step: Callable[[], Tensor], context: Engine, device: Device, *, backward: bool = True) -> float:
    """Return the seconds until the host has issued a step."""
    model.zero_grad(set_to_none=True)
    device.synchronize()
    start_s = time.perf_counter()
    with torch.set_grad_enabled(backward), context():
        loss = step()
    if backward:
        loss.backward()
    taken_s = time.perf_counter() - start_s
    device.synchronize()
    return taken_s
