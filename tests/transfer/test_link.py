"""`memkit.transfer.measure_link`: what it counts, and that it gives all back."""

from __future__ import annotations

import pytest
from torch import Tensor

from memkit.device import CpuDevice, Event, ReferenceDevice, Stream
from memkit.transfer import Arena, Link, lanes, measure_link
from tests.interrupts import interrupted_after

KIB = 1024


class ClockedEvent(Event):
    def __init__(self, at_s: float) -> None:
        self.at_s = at_s

    def elapsed_s(self, end: Event) -> float:
        assert isinstance(end, ClockedEvent)
        return end.at_s - self.at_s

    def is_reached(self) -> bool:
        return True


class ClockedDevice(CpuDevice):
    """Copies take 1 ms and 1 us per KiB to the host, 3 us per KiB back; the first of each size takes a second more."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.seen: set[tuple[int, bool]] = set()
        self.pinned: set[int] = set()

    def pin(self, host: Tensor) -> None:
        self.pinned.add(host.data_ptr())

    def unpin(self, host: Tensor) -> None:
        self.pinned.remove(host.data_ptr())

    def copy(self, destination: Tensor, source: Tensor, stream: Stream) -> None:
        is_out = destination.data_ptr() in self.pinned
        self.now_s += 1e-3 + destination.numel() / KIB * (1e-6 if is_out else 3e-6)
        self.now_s += 0.0 if (destination.numel(), is_out) in self.seen else 1.0
        self.seen.add((destination.numel(), is_out))

    def record_event(self, stream: Stream | None = None, *, timed: bool = True) -> ClockedEvent:  # type: ignore[override]
        return ClockedEvent(self.now_s)


def test_measures_each_direction_without_the_first_copy() -> None:
    device = ClockedDevice()

    measured = measure_link(device, num_bytes=1000 * KIB)

    assert measured.d2h_bytes_per_s == pytest.approx(1000 * KIB / 2e-3)
    assert measured.h2d_bytes_per_s == pytest.approx(1000 * KIB / 4e-3)
    assert measured.latency_s == pytest.approx(1e-3 + 4 * 3e-6)
    assert device.pinned == set()
    assert measure_link(CpuDevice(), num_bytes=KIB).d2h_bytes_per_s > 0


def test_copies_are_in_order_on_the_reference_device() -> None:
    device = ReferenceDevice()

    measured = measure_link(device, num_bytes=64 * KIB, repeats=2)

    assert measured.d2h_bytes_per_s > 0
    assert measured.h2d_bytes_per_s > 0
    assert (device.races, device.memory_counter().allocated_bytes(), device._pinned) == ([], 0, [])


def test_failing_copy_is_not_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the link is down")

    device = ClockedDevice()
    monkeypatch.setattr(device, "copy", fail)

    with pytest.raises(RuntimeError, match="the link is down"):
        measure_link(device, num_bytes=KIB)

    assert device.pinned == set()


@pytest.mark.parametrize(("options", "found"), [({"num_bytes": 0}, "0 and 5"), ({"num_bytes": 1, "repeats": 0}, "1 and 0")])
def test_refuses_sizes_that_are_not_positive(options: dict[str, int], found: str) -> None:
    with pytest.raises(ValueError, match=f"found {found}"):
        measure_link(CpuDevice(), **options)


def test_prints_gigabytes_per_second() -> None:
    assert str(Link(d2h_bytes_per_s=55.3e9, h2d_bytes_per_s=55.5e9, latency_s=1e-5)) == (
        "55.3 GB/s to the host, 55.5 GB/s back, 10 us each"
    )


def test_interrupt_that_keeps_a_span_from_its_taker_is_what_the_caller_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    device = ReferenceDevice()
    monkeypatch.setattr(Arena, "take", interrupted_after(Arena.take))
    with pytest.raises(KeyboardInterrupt):
        measure_link(device, num_bytes=KIB, repeats=1)

    assert not device._pinned


def test_both_ways_at_once_is_the_slower_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    device = ClockedDevice()

    assert lanes.measure_both_ways(device, num_bytes=1000 * KIB) == pytest.approx(1000 * KIB / 6e-3)  # one queue: 2 and 4 ms
    assert device.pinned == set()
