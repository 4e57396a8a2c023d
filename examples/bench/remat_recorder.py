"""What recording costs: on the device, where nothing is dropped, and on the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torchvision
from measuring import Engine, Workload, plain
from setting import Setting, remat_figures
from shared import Line, measure_in_turn
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import memkit
from memkit.device import CpuDevice, default_generator
from memkit.recording.ops import op_kinds
from memkit.recording.recorder import Recorder
from memkit.recording.recording import Recording


def recorder(setting: Setting) -> Iterator[Line]:
    """Budget 1.0, with nothing to drop, and no context, in turn."""
    for name, make in (("resnet50", Setting.resnet50), ("llama", Setting.llama)):

        def part(make: Callable[[Setting], Workload] = make) -> Line:
            workload = make(setting)
            runs = measure_in_turn(
                workload,
                {"plain": plain, "recorder": setting.remat(1.0)},
                setting.device,
                num_rounds=2 if setting.fast else 3,
                num_steps=setting.steps,
                num_warmup=(4, 2),
            )
            seconds = {name: [run.step_s for run in found] for name, found in runs.items()}
            medians = {name: statistics.median(times) for name, times in seconds.items()}
            stats = remat_figures()
            return {
                "name": workload.name,
                "plain_s": seconds["plain"],
                "recorder_s": seconds["recorder"],
                "to_plain": medians["recorder"] / medians["plain"],
                "recorder_host_s": stats["recorder_s"],
                "num_ops": stats["num_ops"],
            }

        yield {"bench": "remat_recorder", "model": name, **setting.attempt(part)}


class EmptyMode(TorchDispatchMode):
    """A dispatch mode that only calls."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Call the op."""
        return func(*args, **(kwargs or {}))


def recorder_host(setting: Setting) -> Iterator[Line]:
    """What recording costs the host, on the CPU: over plain, and beside a dispatch mode that does nothing."""
    torch.set_num_threads(1)
    num_ops = 200
    leaf = torch.randn(64, requires_grad=True)

    def sines() -> Tensor:
        out = leaf
        for _ in range(num_ops):
            out = out.sin()
        return out

    def sums() -> Tensor:
        out = leaf
        for _ in range(num_ops):
            out = out + 1.0
        return out

    rounds = 2 if setting.tiny else 60 if setting.fast else 300
    for name, chain in (("sin, each saves", sines), ("add, none saves", sums)):
        times = _host_seconds(chain, rounds)
        per_op = {
            f"{engine}_over_{base}_us_per_op": 1e6 * _difference(times, engine, base) / num_ops
            for engine, base in (
                ("empty", "plain"),
                ("recorder_alone", "plain"),
                ("recorder", "plain"),
                ("recorder", "empty"),
                ("recorder_all", "plain"),
            )
        }
        whole = {
            f"{engine}_with_entry_and_exit_over_plain_us_per_op": 1e6
            * _difference(times, engine, "plain", whole=True)
            / num_ops
            for engine in ("empty", "recorder", "recorder_all")
        }
        yield {
            "bench": "remat_recorder_host",
            "name": f"chain of {num_ops} ops on 64 elements: {name}",
            "plain_us_per_op": 1e6 * _median(times["plain"]) / num_ops,
            **per_op,
            **whole,
            "rounds": rounds,
        }
    model = torchvision.models.resnet50()
    images = torch.randn(2, 3, 32, 32)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    transformer, tokens = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), torch.randn(2, 16, 64)
    rounds = 2 if setting.tiny else 20 if setting.fast else 50
    for name, forward in (("resnet50", lambda: model(images)), ("transformer", lambda: transformer(tokens))):
        times = _host_seconds(forward, rounds)
        over_empty, over_recorder = _difference(times, "empty", "plain"), _difference(times, "recorder", "plain")
        yield {
            "bench": "remat_recorder_host",
            "name": f"{name} on the CPU, tiny inputs, forward",
            **{f"{engine}_s": _median(found) for engine, found in times.items()},
            "empty_over_plain_s": over_empty,
            "recorder_over_plain_s": over_recorder,
            "recorder_all_over_plain_s": _difference(times, "recorder_all", "plain"),
            "recorder_alone_to_empty": _difference(times, "recorder_alone", "plain") / over_empty,
            "recorder_to_empty": over_recorder / over_empty,
            "recorder_to_empty_with_entry_and_exit": _difference(times, "recorder", "plain", whole=True)
            / _difference(times, "empty", "plain", whole=True),
            "num_ops": memkit.stats("host").num_ops,
            "rounds": rounds,
        }
    memkit.reset("host")
    memkit.reset("host all")


def recorder_alone(num_calls: int) -> Engine:
    """Return what makes the dispatch mode by itself: it writes a recording, and nothing is saved.

    Args:
        num_calls: how many ops it is to know the seconds of, so that it estimates none of them.
    """
    known_s = [0.0] * num_calls
    return lambda: Recorder(Recording(CpuDevice(), known_s=known_s), op_kinds(), default_generator, lambda *_: 0.0)


def _num_calls(forward: Callable[[], Tensor]) -> int:
    """Return how many ops of a forward are recorded as calls."""
    recording = Recording(CpuDevice())
    with Recorder(recording, op_kinds(), default_generator, lambda *_: 0.0):
        forward()
    return len(recording.calls)


def _host_seconds(forward: Callable[[], Tensor], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return each engine's seconds inside of the context, and with entry and exit, in rounds."""
    memkit.reset("host")
    memkit.reset("host all")
    engines: dict[str, Engine] = {
        "plain": plain,
        "empty": EmptyMode,
        "recorder_alone": recorder_alone(_num_calls(forward)),
        "recorder": partial(memkit.Rematerialize, 1.0, "host"),
        "recorder_all": partial(memkit.Rematerialize, 1.0, "host all", min_bytes=0),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for turn in range(-5, rounds):
        for name, engine in engines.items():
            start = time.perf_counter()
            with engine():
                entered = time.perf_counter()
                result = forward()
                done = time.perf_counter()
            end = time.perf_counter()
            if turn < 0:
                result.sum().backward()
            else:
                times[name].append((done - entered, end - start))
            del result
    return times


def _median(times: Sequence[tuple[float, float]]) -> float:
    return statistics.median(inside for inside, _ in times)


def _difference(times: dict[str, list[tuple[float, float]]], engine: str, base: str, *, whole: bool = False) -> float:
    """Return the median of the differences of each round; with `whole`, entry and exit are in it."""
    pairs = zip(times[engine], times[base], strict=True)
    return statistics.median(one[whole] - other[whole] for one, other in pairs)
