"""Every figure of the stats, against a count by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

import memkit
from memkit.activations.saved.counts import Copies
from memkit.activations.stats import SavedTensorStats, fragmentation_hint
from memkit.core.sizes import HOST_PAGE_BYTES
from memkit.device import Device, ReferenceDevice
from memkit.transfer.lanes import Transfer
from tests.activations.budgeting.conftest import Moment
from tests.activations.cases import assert_same_bits
from tests.activations.chains import UNIT_BYTES, UNIT_NUMEL, chain, leaf_on, step, units_that_stay
from tests.activations.conftest import Offload


def test_figures_of_a_small_chain(device: Device, offloading: Offload) -> None:
    x = leaf_on(device.torch_device)
    step(x, [1] * 4, lambda: offloading(0.25, "chain", window_bytes=0))
    with offloading(0.5, "chain", window_bytes=0):
        loss = chain(x, [1] * 4).sum()
    between = memkit.stats("chain")
    loss.backward()
    device.synchronize()
    after = memkit.stats("chain")

    assert (between.num_iterations, between.ratios, between.ratio) == (2, (0.25, 0.5), 0.5)
    assert (between.window_bytes, between.seen_bytes, between.unique_bytes) == (0, 4 * UNIT_BYTES, 4 * UNIT_BYTES)
    assert (between.kept_bytes, between.moved_out_bytes, between.num_copies_out) == (2 * UNIT_BYTES, 2 * UNIT_BYTES, 2)
    assert (between.moved_in_bytes, between.num_copies_in) == (0, 0)
    assert between.ratio_reached == 0.5
    assert (between.live_records, between.live_bytes) == (4, 2 * UNIT_BYTES)
    assert (between.host_in_use_bytes, between.host_held_bytes) == (2 * UNIT_BYTES, HOST_PAGE_BYTES)
    assert (after.moved_out_bytes, after.moved_in_bytes, after.num_copies_in) == (2 * UNIT_BYTES, 2 * UNIT_BYTES, 2)
    assert (after.served_bytes, after.wasted_bytes) == (0, 0)
    assert (after.live_records, after.live_bytes, after.host_in_use_bytes) == (0, 0, 0)
    assert (after.host_held_bytes, after.num_pins) == (HOST_PAGE_BYTES, 1)
    assert after.stall_out_s >= 0 <= after.stall_in_s
    assert after.d2h_bytes_per_s > 0 < after.h2d_bytes_per_s
    if isinstance(device, ReferenceDevice):
        assert after.peak_reserved_bytes is None
        assert after.peak_allocated_bytes in (3 * UNIT_BYTES, 4 * UNIT_BYTES)


def test_served_bytes_are_those_still_on_the_device(device: Device, offloading: Offload) -> None:
    x, units, window_units = leaf_on(device.torch_device), [1, 2, 3, 2, 1], 6
    stays = units_that_stay(units, window_units)
    moved = []
    for _ in range(2):
        step(x, units, lambda: offloading(1.0, "served", window_bytes=window_units * UNIT_BYTES))
        stats = memkit.stats("served")
        figures = (stats.moved_out_bytes, stats.kept_bytes, stats.served_bytes, stats.moved_in_bytes)
        moved.append([num_bytes // UNIT_BYTES for num_bytes in figures])

    assert 0 < stays < sum(units)
    assert moved == [[9, 0, stays, 9 - stays], [9 - stays, stays, 0, 9 - stays]]


def _hidden_states(x: Tensor, held: list[Tensor]) -> Tensor:
    """Save six storages, of which the caller holds every third."""
    for index in range(6):
        x = x.clone()
        if index % 3 == 0:
            held.append(x)
        x = x.sin()
    return x


def test_what_the_caller_holds_is_wasted_once_and_then_kept(device: Device, offloading: Offload) -> None:
    for iteration in range(3):
        x, held = leaf_on(device.torch_device), []
        with offloading(1.0, "held", window_bytes=0):
            y = _hidden_states(x, held)
        y.sum().backward()
        stats = memkit.stats("held")

        assert stats.wasted_bytes == (2 * UNIT_BYTES if iteration == 0 else 0)
        assert stats.unique_bytes == stats.moved_out_bytes == (6 if iteration == 0 else 4) * UNIT_BYTES
        assert stats.moved_in_bytes == 4 * UNIT_BYTES
        assert stats.served_bytes == (2 * UNIT_BYTES if iteration == 0 else 0)
    plain = leaf_on(device.torch_device)
    _hidden_states(plain, []).sum().backward()
    assert_same_bits([x.grad], [plain.grad])


def test_what_the_forwards_frame_holds_is_not_wasted(device: Device, offloading: Offload) -> None:
    def forward(x: Tensor) -> Tensor:
        a = x.clone()
        b = a.sin().clone()
        c = b.sin().clone()
        return c.sin()  # the frame holds all of them until here

    for _ in range(2):
        x = leaf_on(device.torch_device)
        with offloading(1.0, "frame", window_bytes=0):
            y = forward(x)
        y.sum().backward()

        stats = memkit.stats("frame")
        assert (stats.wasted_bytes, stats.moved_in_bytes) == (0, 3 * UNIT_BYTES)


@pytest.mark.parametrize(("outer", "expected"), [("shared", 2 + 1), ("other", 6 + 1)])
def test_iterations_are_those_of_the_context_outside(outer: str, expected: int, device: Device, offloading: Offload) -> None:
    """Each step enters one context, and within it another several times, for its micro-batches; a last step enters only the
    other."""
    leaf = leaf_on(device.torch_device)
    for _ in range(2):
        with offloading(1.0, outer):
            for _ in range(3):
                with memkit.Rematerialize(1.0, "shared", min_bytes=0, device=device):
                    (leaf * 2).exp()
    with memkit.Rematerialize(1.0, "shared", min_bytes=0, device=device):
        (leaf * 2).exp()

    assert memkit.stats("shared").num_iterations == expected


def test_tag_with_nothing_saved(device: Device, offloading: Offload) -> None:
    with offloading(0.5, "nothing"):
        torch.zeros(UNIT_NUMEL, device=device.torch_device).sin()
    stats = memkit.stats("nothing")

    assert (stats.seen_bytes, stats.unique_bytes, stats.ratio_reached, stats.d2h_bytes_per_s) == (0, 0, 0.0, None)
    assert (stats.host_held_bytes, stats.num_pins) == (0, 0)
    assert "ratio asked / reached  0.500 / 0.000" in str(stats)


def test_text() -> None:
    figures = {"window_bytes": 3 * 2**20, "unique_bytes": 20 * 2**20, "moved_out_bytes": 9 * 2**20, "wasted_bytes": 2**19}
    figures |= {"num_copies_out": 9, "stall_out_s": 0.0012, "d2h_bytes_per_s": 55.26e9, "peak_allocated_bytes": 100 * 2**20}
    given = SavedTensorStats(
        tag="resnet",
        contexts=("CPUOffload",),
        num_iterations=3,
        ratios=(0.0, 0.3, 0.5),
        live_records=0,
        **{"live_bytes": 0, "peak_reserved_bytes": None, **figures},
    )
    shown = dict(line.split("  ", 1) for line in str(given).splitlines())
    texts = {"tag": "resnet", "ratio asked / reached": "0.500 / 0.450", "#iterations": "3", "peak allocated": "100.00 MiB"}
    texts |= {"peak reserved": "-", "window": "3.00 MiB", "wasted": "512.00 KiB", "#copies out": "9", "stall out": "1.20 ms"}
    texts |= {"D2H": "55.3 GB/s", "H2D": "-", "live": "0 bytes"}

    assert len(set(map(len, str(given).splitlines()))) == 1
    assert len(shown) == 26
    assert {name: shown[name].strip() for name in texts} == texts
    assert str(dataclasses.replace(given, hint="Do this.")) == f"{given}\nDo this."
    with pytest.raises(dataclasses.FrozenInstanceError):
        given.num_iterations = 4  # type: ignore[misc]


def test_copies_count_what_is_reached() -> None:
    start, end = Moment(1.0), Moment(3.0, reached=False)
    copies = Copies(alone=[Transfer(8, start, end)], waits=[(start, end)])

    assert (copies.stall_s(), copies.rate(), copies.num_bytes, copies.num_copies) == (0.0, None, 8, 1)
    end.reached = True
    assert (copies.stall_s(), copies.rate()) == (2.0, 4.0)


@pytest.mark.parametrize(
    ("allocated", "reserved", "is_hinted"),
    [(None, None, False), (0, 0, False), (100, 0, False), (100, 135, False), (100, 136, True), (100, 300, True)],
)
def test_hint_when_the_allocator_is_fragmented(
    allocated: int | None, reserved: int | None, is_hinted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
    for name in names:
        monkeypatch.delenv(name, raising=False)

    hint = fragmentation_hint(allocated, reserved)

    assert bool(hint) == is_hinted
    assert not is_hinted or (f"reserved {reserved / 100:.2f} times" in hint and "expandable_segments:True" in hint)
    for name in names:
        with monkeypatch.context() as patch:
            patch.setenv(name, "max_split_size_mb:512,expandable_segments:True")
            assert fragmentation_hint(allocated, reserved) == ""
