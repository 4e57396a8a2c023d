"""Plain, and with shares of the layers streamed: time, peak, and the roofline."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

from dit import dit as make_dit
from measuring import Engine, Measurement, Workload, measure
from setting import Setting, figures_of, say
from shared import Line
from torch import Tensor, nn
from workloads import gpt2, llama_3b, whisper

import memkit
from memkit.device import Device
from memkit.transfer import Link, measure_link
from memkit.weights.layer_offload import LayerStats

RATIOS = (0.0, 0.5, 1.0)
NUM_WARMUP = 3


def llama(setting: Setting, **options: Any) -> Workload:
    """Return the Llama of 3.2 billion parameters, or one of another size."""
    small: dict[str, Any] = {"batch": 2, "length": 32, "num_layers": 4, "width": 64, "inner": 128, "num_heads": 4}
    return setting.make(partial(llama_3b, **{**options, **(small if setting.tiny else {})}))


def link_of(setting: Setting) -> Link:
    """Measure how fast bytes move."""
    return measure_link(setting.device, num_bytes=2**20) if setting.tiny else measure_link(setting.device)


def forward(setting: Setting) -> Iterator[Line]:
    """Forward only, without grad mode."""
    yield from _curve(setting, llama(setting), backward=False)


def lora_checkpoint(setting: Setting) -> Iterator[Line]:
    """A frozen base with LoRA, each layer checkpointed."""
    yield from _curve(setting, llama(setting, rank=16, checkpoint=True))


def lora(setting: Setting) -> Iterator[Line]:
    """A frozen base with LoRA, without checkpointing."""
    yield from _curve(setting, llama(setting, rank=16))


def lora_checkpoint_offload(setting: Setting) -> Iterator[Line]:
    """A frozen base with LoRA, each layer streamed, checkpointed, and its input offloaded."""
    yield from _curve(setting, llama(setting, rank=16, checkpoint=True), ratios=(1.0,), offload_ratio=1.0)


def host(setting: Setting) -> Iterator[Line]:
    """All parameters trained, each layer checkpointed; gradients go to the host. No optimizer."""
    yield from _curve(setting, llama(setting, checkpoint=True), train="host")


def small(setting: Setting) -> Iterator[Line]:
    """Models that keep Python busy, every layer streamed: frozen but for the first, and with gradients that go to the host."""
    sizes: dict[str, dict[str, Any]] = {
        "gpt2": {"batch": 2, "length": 16, "num_layers": 3, "width": 64, "num_heads": 4},
        "whisper": {"batch": 2, "frames": 32, "length": 8, "num_layers": 2, "width": 64, "num_heads": 4},
    }
    for name, build in (("gpt2", gpt2), ("whisper", whisper)):
        for train in ("frozen", "host"):
            workload: Workload = setting.make(partial(build, **(sizes[name] if setting.tiny else {})))
            if train == "frozen":
                first = next(module[0] for module in workload.model.modules() if isinstance(module, nn.ModuleList))
                workload.model.requires_grad_(False)
                first.requires_grad_(True)
            yield from _curve(setting, workload, ratios=(1.0,), train=train)
            setting.clean()


def dit(setting: Setting) -> Iterator[Line]:
    """A frozen DiT with LoRA, blocks of two sizes, each checkpointed."""
    small = {"num_patches": 32, "num_words": 8, "width": 64, "num_heads": 4, "num_double": 2, "num_single": 4}
    workload = setting.make(partial(make_dit, **(small if setting.tiny else {})))
    yield from _curve(setting, workload, ratios=(0.5,))


def unpinned(setting: Setting) -> Iterator[Line]:
    """Forward only, where the system pins no more than a few buffers, or nothing."""
    workload = llama(setting)
    for limit_bytes in (128 * 2**20, 0):
        around = partial(_pinning_at_most, limit_bytes, setting.device)
        for line in _curve(setting, workload, backward=False, ratios=(1.0,), around=around):
            yield {**line, "most_pinned_bytes": limit_bytes}


@contextmanager
def _pinning_at_most(limit_bytes: int, device: Device) -> Iterator[None]:
    """Let a device pin so many bytes, as in a container, and none beyond."""
    pin, lock, pinned_bytes = device.pin, threading.Lock(), 0

    def pin_a_little(host: Tensor) -> None:
        nonlocal pinned_bytes
        with lock:
            if pinned_bytes + host.nbytes > limit_bytes:
                raise memkit.errors.HostMemoryError(f"no more than {limit_bytes} bytes of host memory are to be pinned")
            pinned_bytes += host.nbytes
        pin(host)

    with mock.patch.object(device, "pin", pin_a_little):
        yield


def _curve(
    setting: Setting,
    workload: Workload,
    *,
    backward: bool = True,
    ratios: Sequence[float] = RATIOS,
    offload_ratio: float | None = None,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
    **options: Any,
) -> Iterator[Line]:
    """Measure a workload plainly, and with shares of its layers streamed."""
    link = link_of(setting)
    workload = replace(workload, backward=backward)
    engine: Engine = nullcontext
    if offload_ratio is not None:
        engine = partial(memkit.CPUOffload, offload_ratio, "layers", device=setting.device)
    steps: dict[str, Any] = {"num_steps": setting.steps, "num_warmup": NUM_WARMUP, "num_in_a_row": setting.steps}
    plain = measure(workload, engine, setting.device, **steps)
    say(f"{workload.name}: plain {plain}; {link}")
    line: Line = {
        "bench": "layers",
        "name": workload.name,
        "backward": backward,
        "offload_ratio": offload_ratio,
        "options": options,
        "h2d_bytes_per_s": link.h2d_bytes_per_s,
        "d2h_bytes_per_s": link.d2h_bytes_per_s,
        "plain": figures_of(plain),
    }
    for ratio in setting.ratios or ratios:
        with around():
            found = setting.attempt(partial(streamed, setting, workload, ratio, link, plain, engine=engine, **options))
        say(f"{workload.name}, {ratio}: {found}")
        yield {**line, "ratio": ratio, **found}


def streamed(
    setting: Setting,
    workload: Workload,
    ratio: float,
    link: Link,
    plain: Measurement,
    *,
    train: str = "auto",
    slots: int = 3,
    engine: Engine = nullcontext,
) -> Line:
    """Measure a workload with a share of its layers streamed, by one `LayerOffload` that is open over all steps.

    Bytes moved and seconds waited are those of one step, on average over the steps that count.
    """
    warm: list[LayerStats] = []
    with memkit.LayerOffload(
        workload.model, offload_ratio=ratio, num_slots=slots, train=train, device=setting.device
    ) as offload:
        found = measure(
            workload,
            engine,
            setting.device,
            num_steps=setting.steps,
            num_warmup=NUM_WARMUP,
            after_warmup=lambda: warm.append(offload.stats()),
            num_in_a_row=setting.steps,
        )
        (before,), stats = warm, offload.stats()
    num_counted = 2 * setting.steps + 1  # those in a row as well
    d2h_bytes = (stats.d2h_bytes - before.d2h_bytes) / num_counted
    least_s = layers_roofline_s(plain, link, stats.streamed_bytes, d2h_bytes)
    line = {
        **figures_of(found, plain),
        "num_streamed": stats.num_streamed,
        "streamed_bytes": stats.streamed_bytes,
        "slot_bytes": stats.slot_bytes,
        "grads_bytes": d2h_bytes,
        "roofline_s": least_s,
        "to_roofline": found.step_s / least_s,
        "fetches_per_step": (stats.num_fetches - before.num_fetches) / num_counted,
        "demand_fetches_per_step": (stats.num_demand_fetches - before.num_demand_fetches) / num_counted,
        "overflows": stats.num_overflows,
        "stall_s_per_step": (sum(stats.stall_s.values()) - sum(before.stall_s.values())) / num_counted,
    }
    if found.peak_allocated_bytes is not None and plain.peak_allocated_bytes is not None:
        # Of the plain step's peak, what streams is gone (with its gradients, if they move), and slots are there.
        gone_bytes = stats.streamed_bytes * (2 if d2h_bytes else 1)
        expected_bytes = plain.peak_allocated_bytes - gone_bytes + stats.slot_bytes
        line["peak_over_expected_bytes"] = found.peak_allocated_bytes - expected_bytes
    return line


def layers_roofline_s(plain: Measurement, link: Link, streamed_bytes: int, d2h_bytes: float) -> float:
    """Return the least time of a step: in each pass that of the plain one, or of its copies, whichever is longer. Both
    directions of the link are taken to be independent."""
    fetch_s = streamed_bytes / link.h2d_bytes_per_s
    backward_s = max(plain.backward_s, fetch_s, d2h_bytes / link.d2h_bytes_per_s) if plain.backward_s else 0.0
    return max(plain.forward_s, fetch_s) + backward_s


BENCHES: dict[str, Callable[[Setting], Iterator[Line]]] = {
    "forward": forward,
    "lora_checkpoint": lora_checkpoint,
    "lora": lora,
    "lora_checkpoint_offload": lora_checkpoint_offload,
    "host": host,
    "small": small,
    "dit": dit,
    "unpinned": unpinned,
}
