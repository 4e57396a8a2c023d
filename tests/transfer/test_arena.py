"""`memkit.transfer.Arena`: where spans land, what is pinned when, and what happens at a limit."""

from __future__ import annotations

import gc
import itertools
import random
import re
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memkit.core.tensors import byte_view
from memkit.device import CpuDevice, Event, ReferenceDevice
from memkit.device.reference import POISON
from memkit.errors import HostMemoryError
from memkit.transfer import Arena, host_memory
from memkit.transfer.host_memory import Span
from memkit.transfer.lanes import Lanes
from tests.interrupts import interrupts

MIB = 2**20
PAGE = 2 * MIB


class CountingDevice(CpuDevice):
    """Keeps the addresses that are pinned, and fails or dawdles on demand."""

    def __init__(self, *, failing_pins: tuple[int, ...] = (), pin_s: float = 0.0) -> None:
        super().__init__()
        self.num_pins = 0
        self.pinned: dict[int, int] = {}
        self.noted: list[tuple[int, int]] = []
        self.gate: threading.Event | None = None
        self._failing_pins = failing_pins
        self._pin_s = pin_s
        self._lock = threading.Lock()

    def pin(self, host: Tensor) -> None:
        with self._lock:
            self.num_pins += 1
            number = self.num_pins
        time.sleep(self._pin_s)
        if self.gate is not None:
            assert self.gate.wait(30)
        if number in self._failing_pins:
            raise HostMemoryError("the test's device pins no more")
        with self._lock:
            self.pinned[host.data_ptr()] = host.numel()

    def unpin(self, host: Tensor) -> None:
        with self._lock:
            assert self.pinned.pop(host.data_ptr()) == host.numel()

    def note_host_free(self, host: Tensor) -> None:
        self.noted.append((host.data_ptr(), host.numel()))


class ManualEvent(Event):
    def __init__(self) -> None:
        self.reached = False

    def elapsed_s(self, end: Event) -> float:
        return 0.0

    def is_reached(self) -> bool:
        return self.reached


@pytest.fixture(autouse=True)
def _small_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tests on any machine see the same one: one page per segment, and no limits."""
    monkeypatch.setattr(host_memory, "SMALLEST_SEGMENT_BYTES", PAGE)
    monkeypatch.setattr(host_memory, "OWN_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path / "groups")
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "meminfo")


UNTOUCHED: Any = host_memory.Addresses, "commit", lambda self, device, start, end: device.pin(self.bytes[start:end])
"""Pins without touching: gigabytes of addresses cost a test nothing."""


def _set_meminfo(available_bytes: int, total_bytes: int = 0) -> None:
    host_memory.MEMINFO.write_text(f"MemTotal: {total_bytes // 1024} kB\nMemAvailable:  {available_bytes // 1024} kB\n")


def test_equal_steps_find_the_same_places_and_pin_once() -> None:
    host, rng = Arena(CountingDevice()), random.Random(0)
    sizes = [rng.randrange(1, 2 * MIB) for _ in range(20)]
    order = rng.sample(range(20), 20)
    places, pins = [], []

    for _ in range(5):
        spans = [host.take(size) for size in sizes[:10]]
        host.give(spans[3])
        host.give(spans[7])
        spans += [host.take(size) for size in sizes[10:]]
        for index in order:
            if index not in (3, 7):
                host.give(spans[index])
        places.append([span.ranges for span in spans])
        pins.append(host.num_pins)

    assert places == [places[0]] * 5
    assert pins == [pins[0]] * 5


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's map of the process")
def test_pinned_memory_is_not_copied_by_a_fork() -> None:
    span = Arena(CpuDevice()).take(PAGE)
    address = span.pieces[0].data_ptr()

    flags, is_found = "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if (bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)) is not None:
            is_found = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif is_found and line.startswith("VmFlags:"):
            flags = line

    assert " wf" in flags


@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.integers(1, 3 * MIB), st.integers(0, 99), st.booleans()), max_size=25), st.sampled_from([0, 2**30])
)
def test_spans_are_aligned_apart_and_cut_at_segment_edges(steps: list[tuple[int, int, bool]], loose_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_memory, "LOOSE_BYTES", loose_bytes)
        patch.setattr(*UNTOUCHED)
        device = CountingDevice()
        host, spans = Arena(device), list[Span]()
        for size, which, is_give in steps:
            if is_give and spans:
                host.give(spans.pop(which % len(spans)))
            else:
                spans.append(host.take(size))

            pieces = sorted((at := piece.data_ptr(), at + piece.numel()) for span in spans for piece in span.pieces)
            assert all(before[1] <= after[0] for before, after in itertools.pairwise(pieces))
            assert all(start % 512 == 0 for start, _ in pieces)
            for start, end in pieces:
                assert any(pinned <= start and end <= pinned + size for pinned, size in device.pinned.items())
            for span in spans:
                assert sum(piece.numel() for piece in span.pieces) == span.num_bytes
            assert host.in_use_bytes == sum(-(-span.num_bytes // 512) * 512 for span in spans)
            assert host.held_bytes == sum(device.pinned.values())
            assert host.held_bytes <= max(1.05 * host.peak_in_use_bytes, loose_bytes, host.peak_in_use_bytes + PAGE)

        while spans:
            host.give(spans.pop())
        assert host._gaps.ranges == ([(0, host.held_bytes)] if steps else [])
        host.close()
        assert (host.held_bytes, device.pinned) == (0, {})


@settings(max_examples=15)
@given(st.lists(st.integers(1, 3 * MIB), min_size=1, max_size=12), st.lists(st.sets(st.integers(0, 11)), max_size=8))
def test_changing_steps_in_reverse_order_never_leave_gaps(sizes: list[int], subsets: list[set[int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*UNTOUCHED)
        host = Arena(CountingDevice())
        for subset in subsets:
            spans = [host.take(size) for index, size in enumerate(sizes) if index in subset]
            assert all(len(span.ranges) == 1 for span in spans)
            while spans:
                host.give(spans.pop())

        assert host.held_bytes - host.peak_in_use_bytes < PAGE


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_above_a_gibibyte_little_more_is_held_than_was_in_use(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*UNTOUCHED)
    host, rng = Arena(CountingDevice()), random.Random(seed)
    num_scattered = 0
    for _ in range(20):
        spans: list[Span] = []
        for _ in range(60):
            spans.append(host.take(rng.choice([8, 17, 24, 48, 65, 100]) * MIB))
            num_scattered += len(spans[-1].ranges) > 1
            if rng.random() < 0.3:
                host.give(spans.pop(rng.randrange(len(spans))))
            assert host.held_bytes <= max(1.05 * host.peak_in_use_bytes, 2**30)
        for span in rng.sample(spans, len(spans)):
            host.give(span)

    assert host.peak_in_use_bytes > 2**30
    assert num_scattered < 0.1 * 20 * 60


def test_spans_that_are_pinned_as_one() -> None:
    device = CountingDevice()
    host = Arena(device)
    first = host.take(MIB)

    spans = host.take_pinned_as_one([3 * PAGE + 5, 100, PAGE])

    assert [len(span.pieces) for span in spans] == [1, 1, 1]
    assert [device.pinned[span.pieces[0].data_ptr()] for span in spans] == [4 * PAGE, PAGE, PAGE]
    part = spans[0].part(512, PAGE + 512)
    assert part.pieces[0].data_ptr() == spans[0].pieces[0].data_ptr() + 512
    assert part.num_bytes == part.pieces[0].numel() == PAGE
    for span in (first, *spans):
        host.give(span)
    host.close()
    assert not device.pinned


def test_spans_that_are_pinned_as_one_are_taken_together_or_not_at_all() -> None:
    limited, failing = Arena(CountingDevice(), limit_bytes=4 * PAGE), Arena(CountingDevice(failing_pins=(2,)))
    for host, message in ((limited, "host_limit_bytes"), (failing, "pins no more")):
        with pytest.raises(HostMemoryError, match=message):
            host.take_pinned_as_one([PAGE] * 5)
        assert (host.in_use_bytes, host.held_bytes) == (0, 0)


def test_scatters_a_span_rather_than_hold_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "LOOSE_BYTES", 0)
    host = Arena(CpuDevice())
    spans = [host.take(MIB) for _ in range(8)]
    for index in (1, 3, 4, 6):
        host.give(spans[index])

    scattered = host.take(3 * MIB)

    assert scattered.ranges == ((MIB, 2 * MIB), (3 * MIB, 5 * MIB))
    assert scattered.whole is None
    assert (sum(piece.numel() for piece in scattered.pieces), host.held_bytes) == (3 * MIB, 8 * MIB)

    host.give(scattered)

    assert host.take(2 * MIB).ranges == ((3 * MIB, 5 * MIB),)


def test_bytes_taken_again_carry_all_pending_last_uses() -> None:
    host = Arena(CpuDevice())
    first, second, third, done = (ManualEvent() for _ in range(4))
    spans = [host.take(512) for _ in range(4)]
    for span, event in zip(spans, (first, second, done, third), strict=True):
        host.give(span, event)
    done.reached = True

    over_three, rest = host.take(1536), host.take(512)

    assert (over_three.free_events, rest.free_events) == ((first, second), (third,))
    host.give(over_three)  # which never waited for them
    host.give(rest)
    assert host.take(512).free_events == (first,)
    first.reached = True
    second.reached = True
    assert host.take(1024).free_events == ()


def test_device_hears_only_of_bytes_that_nothing_reads() -> None:
    device, pending = CountingDevice(), ManualEvent()
    host = Arena(device)
    span = host.take(512)
    place = (span.pieces[0].data_ptr(), 512)
    device.noted.clear()

    host.give(span, pending)
    host.give(host.take(512), pending)
    assert device.noted == []

    pending.reached = True
    span = host.take(512)
    assert device.noted == [place]

    host.give(span)
    assert device.noted == [place, place]


def test_late_copies_read_what_was_there() -> None:
    device = ReferenceDevice()
    host, lanes = Arena(device), Lanes(device)
    source, other, target = (device.allocate(512) for _ in range(3))
    for storage, value in ((source, 3), (other, 4)):
        byte_view(storage).fill_(value)
        device.note_written(storage, 0)

    span = host.take(512)
    out = lanes.copy_out(source, span, after=device.record_event())
    back = lanes.copy_back(span, target, after=(out.done, device.record_event()))
    host.give(span, back.done)
    again = host.take(512)
    lanes.copy_out(other, again, after=device.record_event())
    device.synchronize()

    assert (again.offset, again.free_events) == (span.offset, (back.done,))
    assert (set(byte_view(target).tolist()), set(again.pieces[0].tolist())) == ({3}, {4})

    host.give(again)

    assert set(again.pieces[0].tolist()) == {POISON}


def test_copies_that_start_together_come_behind_what_reads_their_spans_still() -> None:
    device = ReferenceDevice()
    host, lanes = Arena(device), Lanes(device)
    sources, target = [device.allocate(512) for _ in range(3)], device.allocate(512)
    for value, storage in enumerate(sources):
        byte_view(storage).fill_(value)
        device.note_written(storage, 0)
    span = host.take(512)
    out = lanes.copy_out(sources[0], span, after=device.record_event())
    back = lanes.copy_back(span, target, after=(out.done, device.record_event()))
    host.give(span, back.done)
    spans = [host.take(512), host.take(512)]
    assert spans[0].free_events == (back.done,)

    batch = lanes.batch_out(spans)
    for first, second in (sources[1:], sources[:2]):
        done = lanes.start_out(batch, [first, second])
        device.synchronize(done)

        found = [set(whole.tolist()) for span in spans if (whole := span.whole) is not None]
        assert found == [set(byte_view(storage).tolist()) for storage in (first, second)]
    device.synchronize()
    assert set(byte_view(target).tolist()) == {0}
    assert not device.races


def test_reserve_runs_ahead_of_take() -> None:
    device = CountingDevice()
    device.gate = threading.Event()
    host = Arena(device)

    host.reserve(8 * PAGE)
    assert (host.held_bytes, device.pinned) == (8 * PAGE, {})
    device.gate.set()
    span = host.take(5 * PAGE)

    assert (len(span.pieces), host.num_pins) == (5, 8)
    host.reserve(8 * PAGE)
    assert host.num_pins == 8


def test_take_waits_only_for_its_own_segments() -> None:
    first, rest = threading.Event(), threading.Event()

    class GatedDevice(CountingDevice):
        def pin(self, host: Tensor) -> None:
            is_lowest = host.storage_offset() == lowest[0]
            assert (first if is_lowest else rest).wait(30)
            super().pin(host)

    lowest = [0]
    host = Arena(GatedDevice())
    host._committed.addresses = host_memory.Addresses()
    lowest[0] = host._committed.addresses.bytes.storage_offset()
    host.reserve(4 * PAGE)
    first.set()

    assert host.take(PAGE).offset == 0

    rest.set()
    host.take(PAGE)


def test_segments_are_pinned_side_by_side() -> None:
    class PairingDevice(CountingDevice):
        pair = threading.Barrier(2)

        def pin(self, host: Tensor) -> None:
            self.pair.wait(30)  # for another that is at it
            super().pin(host)

    host = Arena(PairingDevice())

    host.take(8 * PAGE)

    assert host.num_pins == 8


def test_trim_gives_back_whole_free_segments_from_the_high_end() -> None:
    device = CountingDevice()
    host = Arena(device)
    low, high = host.take(PAGE), host.take(4 * PAGE)
    host.give(high)

    host.trim(2 * PAGE)
    assert (host.held_bytes, sum(device.pinned.values())) == (2 * PAGE, 2 * PAGE)

    host.trim()
    assert (host.held_bytes, host.num_pins) == (PAGE, 5)

    host.give(low)
    assert host.take(3 * PAGE).offset == 0
    assert host.num_pins == 7


@pytest.mark.parametrize("act", [Arena.trim, Arena.close])
def test_memory_that_a_copy_may_still_read_is_not_given_back(act: Callable[[Arena], None]) -> None:
    device, pending = CountingDevice(), ManualEvent()
    host = Arena(device)
    for span, last_use in zip([host.take(PAGE) for _ in range(3)], (None, pending, None), strict=True):
        host.give(span, last_use)

    act(host)
    assert host.held_bytes == 2 * PAGE

    pending.reached = True
    act(host)
    assert (host.held_bytes, device.pinned) == (0, {})
    assert host.take(1).offset == 0


def test_a_dropped_arena_unpins_its_memory() -> None:
    device = CountingDevice(pin_s=0.05)
    host = Arena(device)
    host.take(PAGE)
    host.reserve(4 * PAGE)

    del host
    gc.collect()

    assert (device.num_pins, device.pinned) == (4, {})


def test_span_is_given_once_and_to_its_arena() -> None:
    host, other = Arena(CpuDevice()), Arena(CpuDevice())
    span, _ = host.take(512), other.take(512)

    with pytest.raises(AssertionError, match="another arena"):
        other.give(span)
    host.give(span)
    with pytest.raises(AssertionError, match="twice"):
        host.give(span)
    host.take(512)
    with pytest.raises(AssertionError, match="twice"):
        host.give(span)


def test_segment_that_could_not_be_pinned_is_passed_over() -> None:
    class MiddleFails(CountingDevice):
        def pin(self, host: Tensor) -> None:
            if host.data_ptr() == bad[0]:
                raise HostMemoryError("not this one")
            super().pin(host)

    bad, device = [0], MiddleFails()
    host = Arena(device)
    host._committed.addresses = host_memory.Addresses()
    bad[0] = host._committed.addresses.bytes.data_ptr() + PAGE
    host.reserve(3 * PAGE)

    with pytest.raises(HostMemoryError, match="not this one"):
        host.take(3 * PAGE)
    spans = [host.take(PAGE) for _ in range(3)]

    assert [span.offset // PAGE for span in spans] == [0, 2, 3]
    assert host.held_bytes == 3 * PAGE == sum(device.pinned.values())
    for span in spans:
        host.give(span)
    host.close()
    assert (host.held_bytes, device.pinned) == (0, {})


def test_own_limit_is_respected() -> None:
    device = CountingDevice()
    host = Arena(device, limit_bytes=3 * PAGE + MIB)
    host.take(2 * PAGE)

    with pytest.raises(HostMemoryError) as raised:
        host.take(2 * PAGE)

    assert str(raised.value) == (
        "4.00 MiB more of host memory is needed; host_limit_bytes leaves 3.00 MiB. Offload less, or raise the limit."
    )
    host.take(PAGE)
    host.limit_bytes = None
    host.take(2 * PAGE)
    assert sum(device.pinned.values()) == 5 * PAGE


@pytest.mark.parametrize("limit", ["the machine's available memory", "the container's memory limit"])
def test_limits_of_the_system_are_respected(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "SMALLEST_SEGMENT_BYTES", 32 * MIB)
    host = Arena(CpuDevice())
    host.take(2 * PAGE)
    if limit.startswith("the machine"):
        _set_meminfo(2**30 + 3 * PAGE)
    else:
        host_memory.OWN_CGROUPS.write_text("0::/\n")
        _set_group(host_memory.CGROUP, str(5 * PAGE), 2 * PAGE)

    with pytest.raises(HostMemoryError, match=rf"8\.00 MiB more .* {limit} leaves 6\.00 MiB"):
        host.take(4 * PAGE)

    assert (host.held_bytes, host.in_use_bytes) == (2 * PAGE, 2 * PAGE)


def test_memory_being_touched_counts_as_used(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []

    class Condition(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(1)
            return super().wait(timeout)

    monkeypatch.setattr(threading, "Condition", Condition)
    addresses = host_memory.Addresses()
    addresses._touching_bytes = PAGE  # as if another thread were at it
    _set_meminfo(2**30 + PAGE)

    with ThreadPoolExecutor(1) as threads:
        committed = threads.submit(addresses.commit, CpuDevice(), 0, PAGE)
        while not waits:
            time.sleep(0.001)
        assert not committed.done()
        with addresses._has_touched:
            addresses._touching_bytes = 0
            addresses._has_touched.notify_all()
        committed.result(300)

    assert addresses._touching_bytes == 0


def test_five_percent_of_a_large_machine_is_left_for_others() -> None:
    _set_meminfo(200 * 2**30, total_bytes=400 * 2**30)
    assert host_memory.available_bytes() == 180 * 2**30

    host_memory.MEMINFO.write_text("MemTotal: 1 kB\n")
    assert host_memory.available_bytes() is None
    host_memory.MEMINFO.unlink()
    assert host_memory.available_bytes() is None


def _set_group(folder: Path, limit: str, used_bytes: int, *, version: int = 2, cached_bytes: int = 0) -> None:
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in zip(names, (limit, str(used_bytes)), strict=True):
        (folder / name).write_text(f"{text}\n")
    cache = "inactive_file" if version == 2 else "total_inactive_file"
    (folder / "memory.stat").write_text(f"anon 5\n{cache} {cached_bytes}\n")


@pytest.mark.parametrize(
    ("version", "line", "root"), [(2, "0::/job/step", "."), (1, "9:name=systemd:/other\n4:cpu,memory:/job/step", "memory")]
)
def test_container_room_is_the_least_of_all_groups_above(version: int, line: str, root: str) -> None:
    assert host_memory.container_room_bytes() is None
    host_memory.OWN_CGROUPS.write_text(line)
    _set_group(host_memory.CGROUP / root / "job" / "step", "max", 7, version=version)
    assert host_memory.container_room_bytes() is None
    _set_group(host_memory.CGROUP / root / "job" / "step", "900", 100, version=version)
    _set_group(host_memory.CGROUP / root / "job", "700", 500, version=version, cached_bytes=50)

    assert host_memory.container_room_bytes() == 250

    _set_group(host_memory.CGROUP / root, "150", 100, version=version)

    assert host_memory.container_room_bytes() == 50


def test_addresses_are_halved_until_the_system_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = host_memory.mmap.mmap, list[int]()

    def stingy(fileno: int, length: int, **options: int) -> host_memory.mmap.mmap:
        asked.append(length - PAGE)
        if length > 2**30:
            raise OSError("no")
        return real(fileno, length, **options)

    monkeypatch.setattr(host_memory.mmap, "mmap", stingy)
    host = Arena(CpuDevice())
    host.take(1)

    assert all(before // 2 == after for before, after in itertools.pairwise(asked))
    with pytest.raises(HostMemoryError, match="limit on addresses"):
        host.take(2**30)


def test_threads_share_an_arena() -> None:
    host = Arena(CountingDevice(pin_s=0.001))
    host.reserve(8 * PAGE)

    def work(seed: int) -> None:
        rng, spans = random.Random(seed), list[tuple[Span, int]]()
        for _ in range(150):
            if spans and rng.random() < 0.5:
                span, value = spans.pop(rng.randrange(len(spans)))
                assert all(bool(piece.eq(value).all()) for piece in span.pieces)
                host.give(span)
            else:
                span, value = host.take(rng.randrange(1, MIB)), rng.randrange(256)
                for piece in span.pieces:
                    piece.fill_(value)
                spans.append((span, value))
            if rng.random() < 0.05:
                host.trim(4 * PAGE)
        for span, _ in spans:
            host.give(span)

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(work, seed) for seed in range(4)]:
            done.result(60)

    assert host.in_use_bytes == 0
    host.close()
    assert host.held_bytes == 0


SIZES = (PAGE // 2, PAGE, 1000, 3 * PAGE // 2)


class Case:
    """Takes spans of an arena, as one step does, and gives them back."""

    def __init__(self, *, trims: bool) -> None:
        self.device = ReferenceDevice()
        self.arena = Arena(self.device)
        self._trims = trims
        self._held: list[Span] = []

    def step(self) -> None:
        for size in SIZES:
            self._held.append(self.arena.take(size))
        self._held += self.arena.take_pinned_as_one(SIZES[:2])
        self._give_all(self.device.record_event())
        if self._trims:
            self.arena.reserve(self.arena.held_bytes + PAGE)
            self.arena.trim_gaps()
            self.arena.trim()

    def _give_all(self, last_use: Event | None) -> None:
        while self._held:
            if self.arena.has(self._held[0]):
                self.arena.give(self._held[0], last_use)
            self._held.pop(0)

    def go_on(self) -> None:
        """What the caller of a call that was broken off does: all is given back that is known to be taken."""
        self._give_all(None)
        self.arena.trim_gaps()


@pytest.mark.slow
@pytest.mark.parametrize("trims", [False, True])
def test_interrupted_arena_neither_loses_memory_nor_gives_it_to_two(trims: bool) -> None:
    case = Case(trims=trims)
    case.step()

    for place in interrupts(case.step, 60):
        case.go_on()
        assert (case.arena.in_use_bytes, case.arena.held_bytes, case.arena._gaps.ranges) == (0, 0, []), place
        assert case.device._pinned == [], place

        spans = [case.arena.take(size) for size in SIZES]
        for span in spans:
            assert sum(piece.numel() for piece in span.pieces) == span.num_bytes
        used = sorted(byte_range for span in spans for byte_range in span.ranges)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(used)), place
        assert sum(pinned.numel() for pinned in case.device._pinned) == case.arena.held_bytes, place
        for span in spans:
            case.arena.give(span)
