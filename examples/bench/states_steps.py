"""Steps of a training whose optimizer states are somewhere: how long one takes in a row of them, and how much memory."""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from measuring import Workload
from setting import GIB, Setting, say
from shared import Line
from torch import Tensor, nn
from workloads import llama_3b

import memkit
from memkit.device import Event

LR = 1e-6
NUM_WARM = 2
NUM_STEPS = 6
"""Steps in a row that count. Each takes a second or more."""
BYTES_PER_ELEMENT = 12
"""Of the float32 copy of a parameter and of AdamW's two states."""


class Trained:
    """A model whose steps are timed."""

    def __init__(self, workload: Workload, *, num_micro: int = 1) -> None:
        self.workload = workload
        self.model = workload.model
        self.parameters = list(self.model.parameters())
        self.num_micro = num_micro

    @property
    def numel(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters)

    def clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)


def trained_llama(setting: Setting, *, num_micro: int = 1, **options: Any) -> Trained:
    """Return a Llama with a checkpoint around each layer, bfloat16."""
    if not setting.tiny:
        torch.set_num_threads(len(os.sched_getaffinity(0)))  # by itself torch takes half of the hardware's threads
    small = {"num_layers": 3, "width": 64, "inner": 128, "num_heads": 4} if setting.tiny else {}
    sizes = (2, 32) if setting.tiny else ()
    workload = setting.make(partial(llama_3b, *sizes, checkpoint=True, **{**options, **small}))
    return Trained(workload, num_micro=num_micro)


class PlainAdamW:
    """Fused AdamW on the device over float32 copies of the parameters, whose gradients are cast one by one."""

    def __init__(self, parameters: Sequence[nn.Parameter], *, lr: float = LR) -> None:
        self._pairs = [(parameter, nn.Parameter(parameter.detach().float())) for parameter in parameters]
        fused = parameters[0].device.type == "cuda"
        self._optimizers = [torch.optim.AdamW([copied], lr=lr, fused=fused) for _, copied in self._pairs]

    def step(self) -> None:
        for (parameter, copied), optimizer in zip(self._pairs, self._optimizers, strict=True):
            assert parameter.grad is not None
            copied.grad = parameter.grad.float()
            optimizer.step()
            copied.grad = None
            with torch.no_grad():
                parameter.copy_(copied)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """What one step of a training is made of, beside forward and backward."""

    update: Callable[[], None]
    clip: Callable[[], None] | None = None
    but_last: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Is around all micro-batches but the last."""
    before: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Is around each forward."""
    wait: Callable[[], None] | None = None
    """Waits for what a step has left under way."""


@dataclass(frozen=True, slots=True)
class _Marks:
    start: Event
    turn: Event
    end: Event
    updated: Event
    loss: Tensor


def timed(trained: Trained, loop: Loop, setting: Setting, *, num_steps: int = NUM_STEPS, num_warm: int = NUM_WARM) -> Line:
    """Return what a step takes in a row of steps: the median from one start to the next, by the device's events."""
    device = setting.device
    if setting.tiny:
        num_steps, num_warm = 2, 1
    for _ in range(num_warm):
        _step(trained, loop, setting)
    if loop.wait is not None:
        loop.wait()
    device.synchronize()
    setting.reset_peak()
    marks = [_step(trained, loop, setting) for _ in range(num_steps)]
    if loop.wait is not None:
        loop.wait()
    end = device.record_event()
    device.synchronize()
    starts = [mark.start for mark in marks] + [end]
    steps_s = [one.elapsed_s(other) for one, other in itertools.pairwise(starts)]
    return {
        "step_s": statistics.median(steps_s[:-1] or steps_s),  # the last one has nothing behind it to hide beside
        "forward_s": statistics.median(mark.start.elapsed_s(mark.turn) for mark in marks),
        "backward_s": statistics.median(mark.turn.elapsed_s(mark.end) for mark in marks),
        "update_s": statistics.median(mark.end.elapsed_s(mark.updated) for mark in marks),
        "num_steps": num_steps,
        "last_loss": marks[-1].loss.item(),
        "memory": setting.memory(),
    }


def _step(trained: Trained, loop: Loop, setting: Setting) -> _Marks:
    """Run a step: the marks are those of its last micro-batch."""
    record, start, turn, loss = setting.device.record_event, setting.device.record_event(), None, None
    for number in range(trained.num_micro):
        is_last = number == trained.num_micro - 1
        with nullcontext() if is_last else loop.but_last():
            with loop.before():
                loss = trained.workload.forward()
            turn = record()
            (loss / trained.num_micro).backward()
    end = record()
    if loop.clip is not None:
        loop.clip()
    loop.update()
    trained.clear()
    assert turn is not None
    assert loss is not None
    return _Marks(start, turn, end, record(), loss.detach())


@contextmanager
def states_offloaded(trained: Trained, setting: Setting, **options: Any) -> Iterator[memkit.StateOffload]:
    """Have a fused AdamW over the parameters step float32 copies, whose states are where memkit puts them."""
    optimizer = torch.optim.AdamW(trained.parameters, lr=LR, fused=True)
    with memkit.StateOffload(optimizer, master=torch.float32, device=setting.device, **options) as states:
        yield states


def memkit_line(trained: Trained, setting: Setting, *, clips: bool, num_steps: int = NUM_STEPS, **options: Any) -> Line:
    """Return what a step takes with states offloaded."""
    with states_offloaded(trained, setting, **options) as states:
        optimizer = states.optimizer
        apart = options.get("when") == "backward"
        loop = Loop(
            update=optimizer.step,
            clip=trained.clip if clips else None,
            but_last=states.accumulate if apart else nullcontext,
            wait=states.wait,
        )
        before = states.stats()
        found = timed(trained, loop, setting, num_steps=num_steps)
        stats, plan = states.stats(), states.plan
        moved = {
            f"{name}_per_step": (getattr(stats, name) - getattr(before, name)) / (stats.num_steps - before.num_steps)
            for name in ("d2h_bytes", "h2d_bytes", "host_step_s")
        }
        num_on_host = sum(piece.numel for piece in plan.pieces if piece.update.value == "host")
        trained.clear()
        return {
            **found,
            "host_bytes": stats.host_bytes,
            "room_bytes": stats.room_bytes,
            "resident_bytes": stats.resident_bytes,
            "num_pieces": stats.num_pieces,
            "share_on_host": num_on_host / trained.numel,
            **moved,
        }


def plain_line(trained: Trained, setting: Setting, *, clips: bool, num_steps: int = NUM_STEPS) -> Line:
    """Return what a step takes with all states on the device."""
    update = PlainAdamW(trained.parameters)
    found = timed(trained, Loop(update=update.step, clip=trained.clip if clips else None), setting, num_steps=num_steps)
    trained.clear()
    return found


def told(name: str, line: Line) -> Line:
    """Say what was found, and return it."""
    peak = line.get("memory", {}).get("peak_allocated_bytes")
    say(f"{name}: {line.get('step_s', line.get('error'))} s a step, {'-' if peak is None else f'{peak / GIB:.2f} GiB'}")
    return line
