"""What a region costs the host: calls of two small ops that run again in the backward, beyond plain and one more forward."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from measuring import Engine, plain
from setting import Setting, say
from shared import Line
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

NUM_CALLS = 50
WIDTH = 64


class Calls(nn.Module):
    """Modules of two small ops each, one after the other."""

    def __init__(self, num_calls: int, second: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.calls = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), second()) for _ in range(num_calls))
        self.around: Callable[[nn.Module, Tensor], Tensor] = lambda module, x: module(x)

    def forward(self, x: Tensor) -> Tensor:
        """Take and return [batch, width]."""
        for module in self.calls:
            x = self.around(module, x)
        return x


def region(setting: Setting) -> Iterator[Line]:
    """Regions beside `torch.utils.checkpoint`, with and without random state and determinism check."""
    for name, second in (("norm_gelu", nn.GELU), ("norm_dropout", partial(nn.Dropout, 0.1))):
        yield from _region(name, second, setting)


def _region(name: str, second: Callable[[], nn.Module], setting: Setting) -> Iterator[Line]:
    num_calls = 4 if setting.tiny else NUM_CALLS
    model: Calls = setting.make(lambda: Calls(num_calls, second))
    x: Tensor = setting.make(lambda: torch.randn(8, WIDTH).requires_grad_())
    straight, expected = model.around, _gradients(model, x, plain, setting)
    others = {
        "torch": partial(checkpoint, use_reentrant=False),
        "torch_bare": partial(checkpoint, use_reentrant=False, preserve_rng_state=False, determinism_check="none"),
    }
    engines: dict[str, tuple[Callable[..., Tensor], Engine]] = {"plain": (straight, plain)}
    engines |= {which: (around, plain) for which, around in others.items()}
    reason = None
    try:
        engines["memkit"] = (straight, regions_of(list(model.calls)))
    except (ImportError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
    times: dict[str, list[tuple[float, float]]] = {which: [] for which in engines}
    is_equal: dict[str, bool] = {}
    for turn in range(6 + 2 * setting.steps):
        for which, (around, engine) in engines.items():
            model.around = around
            taken = _host_s(model, x, engine, setting)
            if turn >= 6:
                times[which].append(taken)
    for which, (around, engine) in engines.items():
        model.around = around
        found = _gradients(model, x, engine, setting)
        is_equal[which] = all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    line = per_call({which: _medians(taken) for which, taken in times.items()}, num_calls)
    say(f"region {name}: {line}")
    yield {"bench": "host_region", "name": name, "num_calls": num_calls, **line, "is_equal": is_equal}
    if reason is not None:
        yield {"bench": "host_region", "name": name, "engine": "memkit", "skipped": reason}


def regions_of(modules: Sequence[nn.Module]) -> Engine:
    """Return what has each call of the modules recomputed as a whole: one context, entered in each step.

    Raises:
        ImportError: this memkit has no regions.
    """
    room: Any = importlib.import_module("memkit.activations.recomputing.regions")
    regions: AbstractContextManager[object] = room.Regions({module: room.RegionSpec() for module in modules}, counts=None)
    return lambda: regions


def per_call(seconds: Mapping[str, tuple[float, float]], num_calls: int) -> Line:
    """Return the host's microseconds for each call: of plain, and of each other beyond plain and one more forward.

    Args:
        seconds: of a forward, and of a whole step, by engine; "plain" is among them.
    """
    forward_s, step_s = seconds["plain"]
    line = {"plain_forward_us": 1e6 * forward_s / num_calls, "plain_us": 1e6 * step_s / num_calls}
    return line | {
        f"{which}_us_beyond": 1e6 * (taken_s - step_s - forward_s) / num_calls
        for which, (_, taken_s) in seconds.items()
        if which != "plain"
    }


def _medians(taken: list[tuple[float, float]]) -> tuple[float, float]:
    forward_s, step_s = zip(*taken, strict=True)
    return statistics.median(forward_s), statistics.median(step_s)


def _host_s(model: Calls, x: Tensor, engine: Engine, setting: Setting) -> tuple[float, float]:
    """Return the seconds until the host has issued the forward, and the step."""
    model.zero_grad(set_to_none=True)
    x.grad = None
    setting.device.synchronize()
    start_s = time.perf_counter()
    with engine():
        out = model(x)
    forward_s = time.perf_counter() - start_s
    out.sum().backward()
    step_s = time.perf_counter() - start_s
    setting.device.synchronize()
    return forward_s, step_s


def _gradients(model: Calls, x: Tensor, engine: Engine, setting: Setting) -> list[Tensor]:
    """Return all gradients of a step that begins with a seed, and a number drawn after it."""
    torch.manual_seed(1)
    _host_s(model, x, engine, setting)
    found = [x.grad, *(parameter.grad for parameter in model.parameters())]
    drawn = torch.rand(1, device=x.device)
    return [tensor.clone() for tensor in found if tensor is not None] + [drawn]
