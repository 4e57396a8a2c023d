"""The device never holds more bytes than the ratio keeps, or the window, and the one storage at hand; host memory is held as
the plan needs it, and is not pinned again and again."""

from __future__ import annotations

import gc
import math
import random
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor

import memkit
from memkit.activations.saved.records import Record, SavedResidency
from memkit.activations.saved.state import offload_states
from memkit.device import Device, ReferenceDevice
from memkit.plan.plans import limit_of
from tests.activations.cases import assert_same_bits
from tests.activations.chains import UNIT_BYTES, chain, leaf_on, step, three_backwards, units_that_stay
from tests.activations.conftest import Offload

DEPTH = 20
RATIOS = [0.0, 0.1, 0.3, 0.5, 1.0]


def _kept_units(ratio: float) -> int:
    return DEPTH - math.ceil(ratio * DEPTH - 1e-9)


def _limit_units(ratio: float, num_units: int, window_units: float) -> float:
    return limit_of(num_units * UNIT_BYTES, ratio, int(window_units * UNIT_BYTES)) / UNIT_BYTES


def _coming(tag: str) -> set[int]:
    return {record.index for window in offload_states[tag].windows() for record in window.ledger.coming}


def _records(tag: str) -> list[Record]:
    (window,) = offload_states[tag].windows()
    return [record for run in window.live() for record in run.records()]


@pytest.mark.core(1)
@pytest.mark.parametrize("window_units", [0, 2, 4, None])
@pytest.mark.parametrize("ratio", RATIOS)
def test_peak_of_a_deep_chain(ratio: float, window_units: int | None, device: Device, offloading: Offload) -> None:
    x = leaf_on(device.torch_device)
    window_bytes = None if window_units is None else window_units * UNIT_BYTES
    limit_units = _limit_units(ratio, DEPTH, 2 if window_units is None else window_units)

    for _ in range(4):
        step(x, [1] * DEPTH, lambda: offloading(ratio, "peak", window_bytes=window_bytes))
        stats = memkit.stats("peak")

        if isinstance(device, ReferenceDevice):  # whose allocator counts saved tensors alone
            assert _kept_units(ratio) * UNIT_BYTES <= stats.peak_allocated_bytes <= (limit_units + 1) * UNIT_BYTES


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ratio", RATIOS)
def test_peak_of_uneven_storages(ratio: float, seed: int, device: Device, offloading: Offload) -> None:
    generator = random.Random(seed)
    units = [generator.randint(1, 6) for _ in range(DEPTH)]
    window_units = generator.choice([0, 3, 12, 20])
    num_left = next(number for number in range(DEPTH + 1) if sum(units[:number]) >= ratio * sum(units) - 1e-6)
    limit_units = _limit_units(ratio, sum(units), window_units)

    for _ in range(4):
        x = leaf_on(device.torch_device)
        step(x, units, lambda: offloading(ratio, "uneven", window_bytes=window_units * UNIT_BYTES))
        stats = memkit.stats("uneven")

        if isinstance(device, ReferenceDevice):
            assert stats.peak_allocated_bytes <= (limit_units + max(units)) * UNIT_BYTES
        assert stats.moved_out_bytes <= (sum(units[:num_left]) + max(units)) * UNIT_BYTES
        assert x.grad is not None


@pytest.mark.parametrize("window_units", [0, 3])
def test_peak_of_one_forward_one_backward_in_turn(window_units: int, device: Device, offloading: Offload) -> None:
    def run(context: Callable[[], AbstractContextManager[object]]) -> list[Tensor]:
        x, alive = leaf_on(device.torch_device), []
        for number in range(9):
            with context():
                alive.append(chain(x * (number + 1), [1] * DEPTH).sum())
            if len(alive) == 3:
                alive.pop(0).backward()
        for loss in alive:
            loss.backward()
        return [x.grad]

    found = run(lambda: offloading(0.5, "pipeline", window_bytes=window_units * UNIT_BYTES))

    assert_same_bits(found, run(nullcontext))
    device.synchronize()  # storages served in place may still be on their way to the host
    stats = memkit.stats("pipeline")
    if isinstance(device, ReferenceDevice):
        assert stats.peak_allocated_bytes <= (3 * DEPTH / 2 + window_units + 1) * UNIT_BYTES
    assert (stats.live_records, stats.live_bytes, stats.host_in_use_bytes) == (0, 0, 0)


def test_those_saved_earliest_leave(device: Device, offloading: Offload) -> None:
    x = leaf_on(device.torch_device)
    storages = []
    for ratio in (0.0, 0.3, 0.5, 1.0, 0.1):
        storages.clear()
        with offloading(ratio, "earliest", window_bytes=0):
            y = x.clone()
            for _ in range(10):
                y = y.clone()
                storages.append(weakref.ref(y.untyped_storage()))
                y = y.sin()
        alive = [storage() is not None for storage in storages]

        if len(set(memkit.stats("earliest").ratios)) > 1:  # the first one keeps the ratio as it goes
            assert alive == [index >= round(10 * ratio) for index in range(10)]
        y.sum().backward()


@pytest.mark.parametrize("seed", range(4))
def test_late_lanes_move_the_same_bytes(seed: int) -> None:
    figures = []
    for device in (ReferenceDevice(), ReferenceDevice(seed=seed)):
        memkit.reset("late")
        x = leaf_on(device.torch_device)
        for ratio in (0.3, 0.3, 1.0, 1.0):
            step(
                x,
                [1, 3, 2, 1] * 4,
                lambda: memkit.CPUOffload(ratio, "late", min_bytes=0, window_bytes=5 * UNIT_BYTES, device=device),  # noqa: B023
            )
            stats = memkit.stats("late")
            figures.append((stats.moved_out_bytes, stats.moved_in_bytes, stats.served_bytes))

    assert figures[:4] == figures[4:]


def test_fetched_records_that_are_passed_over_make_room(device: Device, offloading: Offload) -> None:
    """The backward of the first branch takes an unforeseen way: tensors fetched for the second must not block it."""
    coming: list[set[int]] = []
    live_bytes: list[int] = []

    def note() -> None:
        coming.append(_coming("branches"))
        live_bytes.append(memkit.stats("branches").live_bytes)

    found = three_backwards(
        leaf_on(device.torch_device),
        DEPTH,
        lambda: offloading(1.0, "branches", window_bytes=5 * UNIT_BYTES),
        note,
    )

    first_of_second = 2 + DEPTH  # records are numbered as they are saved
    assert len(coming) == DEPTH
    assert any(max(indices, default=0) >= first_of_second for indices in coming)
    assert all(indices and max(indices) < first_of_second for indices in coming[-8:-1])
    assert max(live_bytes) <= 6 * UNIT_BYTES
    assert_same_bits(found, three_backwards(leaf_on(device.torch_device), DEPTH))


@pytest.mark.parametrize("window_units", [0, 4])
def test_copies_for_a_retained_graph_are_let_go(window_units: int, device: Device, offloading: Offload) -> None:
    x = leaf_on(device.torch_device)
    with offloading(1.0, "retained", window_bytes=window_units * UNIT_BYTES):
        loss = chain(x, [1] * DEPTH).sum()
    moved = []
    for _ in range(3):
        loss.backward(retain_graph=True)
        stats = memkit.stats("retained")
        moved.append(stats.moved_in_bytes // UNIT_BYTES)

        assert stats.live_records == DEPTH
        assert stats.live_bytes <= window_units * UNIT_BYTES
        if isinstance(device, ReferenceDevice):
            assert stats.peak_allocated_bytes <= (window_units + 1) * UNIT_BYTES
    assert stats.num_copies_out == DEPTH

    assert moved == [number * (DEPTH - units_that_stay([1] * DEPTH, window_units)) for number in (1, 2, 3)]


def test_what_fits_stays_when_the_forward_ends(device: Device, offloading: Offload) -> None:
    x, stays = leaf_on(device.torch_device), units_that_stay([1] * DEPTH, 6)
    with offloading(1.0, "turn", window_bytes=6 * UNIT_BYTES):
        loss = chain(x, [1] * DEPTH).sum()

    residencies = [record.residency for record in _records("turn")]
    assert residencies == [SavedResidency.HOST] * (DEPTH - stays) + [SavedResidency.LEAVING] * stays

    loss.backward()
    stats = memkit.stats("turn")
    assert (stats.served_bytes, stats.moved_in_bytes) == (stays * UNIT_BYTES, (DEPTH - stays) * UNIT_BYTES)


def test_order_of_the_backward_is_learned(device: Device, offloading: Offload) -> None:
    """A skip connection needs the first saves early: foreseen from the second step on."""
    coming: list[set[int]] = []
    for _ in range(2):
        x = leaf_on(device.torch_device)
        with offloading(1.0, "order", window_bytes=6 * UNIT_BYTES):
            skip = x.clone()
            y = chain(skip.sin(), [1] * DEPTH)
            product = y.exp() * skip
            y = chain(product, [1] * 4)
            product.grad_fn.register_prehook(lambda _: coming.append(_coming("order")))
            del skip, product
        y.sum().backward()

    assert [0 in indices for indices in coming] == [False, True]


# Host memory


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the arena grow by pages, so that a test sees growth."""
    for name in ("SMALLEST_SEGMENT_BYTES", "LARGEST_SEGMENT_BYTES"):
        monkeypatch.setattr(f"memkit.transfer.host_memory.{name}", 2**21)


def sines(num_saves: int, context: Callable[[], AbstractContextManager[object]]) -> None:
    """Let autograd save so many storages of 2 MiB, and use them again."""
    x = torch.randn(2**19).requires_grad_().clone()
    with context():
        for _ in range(num_saves):
            x = x.sin().clone()
    x.sum().backward()


@pytest.mark.slow
@pytest.mark.usefixtures("small_segments")
def test_nothing_is_pinned_after_the_second_step_however_often_the_host_waits() -> None:
    device = ReferenceDevice()
    pins = []
    for number in range(9):
        sines(10, lambda: memkit.CPUOffload(0.4, "waits", device=device, window_bytes=2**23))
        if number % 3 == 2:
            device.synchronize()
            gc.collect()
        pins.append(memkit.stats("waits").num_pins)

    assert pins[2:] == [pins[1]] * 7


@pytest.mark.usefixtures("small_segments")
def test_a_smaller_ratio_gives_host_memory_back() -> None:
    device = ReferenceDevice()
    held = []
    for ratio in (1.0, 1.0, 0.3, 0.3, 0.0):
        sines(10, lambda ratio=ratio: memkit.CPUOffload(ratio, "smaller", device=device, window_bytes=0))
        held.append(memkit.stats("smaller").host_held_bytes // 2**21)

    assert held == [10, 10, 3, 3, 0]


@pytest.mark.usefixtures("small_segments")
def test_shapes_in_turn_keep_what_the_largest_needs() -> None:
    device = ReferenceDevice()
    pins = []
    for num_saves in (10, 10, 4, 10, 4, 10):
        sines(num_saves, lambda: memkit.CPUOffload(1.0, "turns", device=device, window_bytes=0))
        pins.append(memkit.stats("turns").num_pins)

    assert pins[2:] == [pins[1]] * 4


UNITS = (3, 1, 2, 5, 1, 1, 4, 2)


def test_ratios_that_change_pin_no_more_than_the_highest_needs(device: Device, offloading: Offload) -> None:
    x = leaf_on(device.torch_device)
    step(x, UNITS, lambda: offloading(1.0, "ratios", window_bytes=0))
    num_pins = memkit.stats("ratios").num_pins
    for count in range(40):
        step(x, UNITS, lambda: offloading((count % 5) / 4 or 0.1, "ratios", window_bytes=0))  # noqa: B023

    assert memkit.stats("ratios").num_pins == num_pins
