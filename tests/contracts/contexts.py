"""Every saved-tensor context, in the settings that the contract tests run: a new one is added by one line in `KINDS`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

import memkit
from memkit.device import Device
from tests.activations.chains import UNIT_BYTES

Make = Callable[[Device | None, str], AbstractContextManager[object]]


class Around:
    """One context outside of another, entered anew each time."""

    def __init__(self, outer: AbstractContextManager[object], inner: AbstractContextManager[object]) -> None:
        self._outer, self._inner = outer, inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        try:
            self._inner.__enter__()
        except BaseException:
            self._outer.__exit__(None, None, None)
            raise

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        self._outer.__exit__(*error)


@dataclass(frozen=True)
class Kind:
    """A saved-tensor context in one setting: `make` makes it for a device and under a tag; with `on_cpu`, it also works where
    device memory is host memory."""

    make: Make
    on_cpu: bool = False

    def num_live(self, tag: str) -> int:
        """Return how many records and bytes graphs still hold, on the device or in host memory."""
        stats = memkit.stats(tag)
        return stats.live_records + stats.live_bytes + (stats.host_in_use_bytes or 0)

    def num_acts(self, tag: str) -> int:
        """Return how many saved tensors the last step copied or replayed."""
        stats = memkit.stats(tag)
        return (stats.num_copies_out or 0) + (stats.num_replays or 0)


def _offload(ratio: float, window_bytes: int | None = 0) -> Kind:
    options = {"min_bytes": 0, "window_bytes": window_bytes}
    return Kind(lambda device, tag: memkit.CPUOffload(ratio, tag, device=device, **options))


def _recording_offload(ratio: float) -> Kind:
    """An offload that records ops, since the forward before had something to recompute."""

    def make(device: Device | None, tag: str) -> memkit.CPUOffload:
        with memkit.CPUOffload(ratio, tag, min_bytes=0, device=device):
            memkit.recompute(torch.ones(4, device=None if device is None else device.torch_device))
        return memkit.CPUOffload(ratio, tag, min_bytes=0, device=device)

    return Kind(make)


def _remat(budget: float | str, policy: str = "plan", min_bytes: int = 0, *, verify: bool = False) -> Kind:
    options = {"min_bytes": min_bytes, "policy": policy, "verify": verify}
    return Kind(lambda device, tag: memkit.Rematerialize(budget, tag, device=device, **options), on_cpu=True)


def _budget(budget: float | str, min_bytes: int = 0) -> Kind:
    return Kind(lambda device, tag: memkit.MemoryBudget(budget, tag, min_bytes=min_bytes, device=device))


def _around(outer: Kind, inner: Kind) -> Kind:
    return Kind(lambda device, tag: Around(outer.make(device, tag), inner.make(device, tag)))


KINDS: dict[str, Kind] = {
    "offload all": _offload(1.0),
    "offload half": _offload(0.5, UNIT_BYTES // 4),
    "remat plan": _remat(0.3),
    "remat dtr": _remat(0.3, "dtr"),
    "budget": _budget("4KiB"),
    "offload around remat": _around(_offload(1.0), _remat(0.5)),
}

MORE_KINDS: dict[str, Kind] = {
    "offload nothing": _offload(0.0),
    "offload 0.4": _offload(0.4),
    "offload all ahead": _offload(1.0, None),
    "offload that records": _recording_offload(0.5),
    "remat plan 0.8": _remat(0.8),
    "remat plan of nothing": _remat("1B"),
    "remat dtr of nothing": _remat("1B", "dtr"),
    "remat dtr, verified": _remat("1B", "dtr", verify=True),
    "budget half": _budget(0.5),
    "budget 0.8": _budget(0.8),
    "budget of nothing": _budget("1B"),
}
"""Further settings, for promises that hold in every one of them."""

SMALL_KINDS: dict[str, Kind] = {
    "offload all, a window of 128": _offload(1.0, 128),
    "remat plan of 64": _remat("64B"),
    "remat plan of 200": _remat("200B"),
    "remat dtr of 64": _remat("64B", "dtr"),
    "remat dtr of 200": _remat("200B", "dtr"),
    "budget 0.4": _budget(0.4),
    "budget of 700": _budget("700B"),
    "budget of nothing, small ones stay": _budget("1B", min_bytes=40),
    "remat plan, small ones stay": _remat(0.4, min_bytes=40),
    "remat dtr, small ones stay": _remat(0.4, "dtr", min_bytes=40),
}
"""For steps of which each value takes 64 bytes."""
