"""Chains of small ops, `(x * w).sin()`, all of whose storages move: what one storage costs, and whether that stays as they
become many."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from alternating import Step, alternate, figures, warm_up
from measuring import Workload, plain
from setting import TAG, Setting, say
from shared import Line
from torch import Tensor, nn

import memkit

NUM_LINKS = 400
CHAIN_KIB = (256, 1024)
FLAT_KIB = 4
FLAT_STORAGES = (100, 1000, 10_000, 100_000)
NUM_WEIGHTS = 400
WARM_STEPS, FEWEST_STEPS = 6, 2
"""What is run at least at each size, where a step takes long."""


class Chain(nn.Module):
    """Links of a product and a sine. Each but the first has two storages that only the backward needs."""

    def __init__(self, num_links: int) -> None:
        super().__init__()
        self.num_links = num_links
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(min(num_links, NUM_WEIGHTS)))

    def forward(self, x: Tensor) -> Tensor:
        """Take and return a tensor of any shape."""
        weights = list(self.weights)
        for link in range(self.num_links):
            x = (x * weights[link % len(weights)]).sin()
        return x


def chain_of(num_links: int, kib: int) -> Workload:
    """A chain on a tensor of so many KiB, which requires grad."""
    model, x = Chain(num_links), torch.empty(256 * kib).normal_().requires_grad_()

    def forward() -> Tensor:
        x.grad = None
        return model(x)

    return Workload(name=f"chain_{num_links}x{kib}KiB", model=model, forward=forward, loss=lambda out: out.sum())


def chain(setting: Setting) -> Iterator[Line]:
    """797 storages of 256 KiB, and of 1 MiB."""
    for kib in (1, 4) if setting.tiny else CHAIN_KIB:
        workload = setting.make(lambda kib=kib: chain_of(20 if setting.tiny else NUM_LINKS, kib))
        engine = setting.offload(1.0, min_bytes=512)
        warm_up(workload, plain, setting.device)
        warm_up(workload, engine, setting.device)
        found = alternate(workload, {"plain": plain, "memkit": engine}, setting.device, num_steps=setting.steps)
        line = per_storage(found["plain"], found["memkit"], memkit.stats(TAG).num_copies_out)
        say(f"{workload.name}: {line['step_s']:.4f} s, plain {line['plain_s']:.4f} s")
        yield {"bench": "host_chain", "name": workload.name, "storage_bytes": 1024 * kib, **line}
        setting.clean()


def flat(setting: Setting) -> Iterator[Line]:
    """From a hundred storages to a hundred thousand: microseconds of the host for each."""
    per_storage_s = 0.0
    for number in (10, 100) if setting.tiny else FLAT_STORAGES:
        expected_s = number * per_storage_s
        if WARM_STEPS * expected_s > setting.time_left_s():
            yield {"bench": "host_flat", "num_storages": number, "skipped": f"a step would take about {expected_s:.0f} s"}
            continue
        workload = setting.make(lambda number=number: chain_of(number // 2 + 1, FLAT_KIB))
        engine = setting.offload(1.0, min_bytes=512, window_bytes=0)
        warm_up(workload, plain, setting.device, num_steps=2)
        warm = warm_up(workload, engine, setting.device, num_steps=WARM_STEPS)
        num_steps = steps_within(setting.time_left_s() / 2, 2 * warm.step_s, setting.steps)
        say(f"{workload.name}: a step takes {warm.step_s:.1f} s")
        found = alternate(workload, {"plain": plain, "memkit": engine}, setting.device, num_steps=num_steps)
        line = per_storage(found["plain"], found["memkit"], memkit.stats(TAG).num_copies_out)
        say(f"{workload.name}: {line['host_us_per_storage']} us for each storage")
        yield {"bench": "host_flat", "num_storages": number, "counted_steps": num_steps, **line}
        per_storage_s = warm.step_s / number
        setting.clean()


def steps_within(room_s: float, step_s: float, most: int) -> int:
    """Return how many steps there is time for: at most those that were asked for, and a few in any case."""
    return max(FEWEST_STEPS, min(most, int(room_s / max(step_s, 1e-9)) - 1))


def per_storage(alone: Step, found: Step, num_moved: int) -> Line:
    """Return what is told of a chain: seconds beyond plain over the storages that moved."""
    return {
        **figures("plain", alone),
        **figures("step", found),
        "num_moved": num_moved,
        "host_us_per_storage": _us_each(found.host_s - alone.host_s, num_moved),
        "us_per_storage": _us_each(found.step_s - alone.step_s, num_moved),
    }


def _us_each(beyond_s: float, number: int) -> float | None:
    return 1e6 * beyond_s / number if number else None
