"""Errors around an offload reach the user unchanged, nothing is lost, and the next step works."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import memkit
from memkit.activations.saved.state import offload_states
from memkit.core.hooks import innermost_pack
from memkit.core.sizes import HOST_PAGE_BYTES
from memkit.device import Device, ReferenceDevice
from tests.activations.budgeting.test_unpinned import Stingy
from tests.activations.cases import assert_same_bits
from tests.activations.chains import UNIT_BYTES, chain, leaf_on, step, three_backwards
from tests.activations.conftest import Offload

pytestmark = pytest.mark.usefixtures("only_new_objects")


def _assert_nothing_is_left(tag: str, device: Device) -> None:
    gc.collect()
    device.synchronize()
    stats = memkit.stats(tag)

    assert innermost_pack() is None
    assert (stats.live_records, stats.live_bytes, stats.host_in_use_bytes) == (0, 0, 0)
    for window in offload_states[tag].windows():
        assert not window.ledger.backlog
        assert not window.ledger.coming


def test_forward_that_broke_off_is_no_measure(device: Device, offloading: Offload) -> None:
    """The steps after it follow the plan of a whole forward."""
    x, moved = leaf_on(device.torch_device), []
    for is_broken in (False, True, False):
        with pytest.raises(KeyError) if is_broken else nullcontext(), offloading(0.5, "measure", window_bytes=0):
            chain(x, [4, 1, 1, 1] if is_broken else [4, 1, 1, 1, 1, 8, 1, 1])
            if is_broken:
                raise KeyError
        moved.append(memkit.stats("measure").moved_out_bytes // UNIT_BYTES)

    assert len(offload_states["measure"].windows()[0].traces) == 1
    assert moved[2] == 16


# Host memory


def _big_step(device: Device, context: Callable[[], Any] = nullcontext) -> list[Any]:
    """Eight storages of a mebibyte."""
    x = torch.randn(2**18, generator=torch.Generator().manual_seed(0)).to(device.torch_device).requires_grad_()
    with context():
        y = x.clone()
        for _ in range(8):
            y = y.sin()
    y.sum().backward()
    return [y.detach(), x.grad]


@pytest.mark.parametrize("limit_bytes", [0, HOST_PAGE_BYTES, 2 * HOST_PAGE_BYTES])
def test_host_limit_leaves_the_rest_on_the_device_with_one_warning(
    limit_bytes: int, device: Device, offloading: Offload
) -> None:
    plain = _big_step(device)
    context = offloading(1.0, "limit", window_bytes=0, host_limit_bytes=limit_bytes)
    with pytest.warns(UserWarning, match=r"\"limit\"\): it leaves 1.00 MiB on the device: .*host_limit_bytes") as caught:
        found = _big_step(device, lambda: context)
    assert len(caught) == 1
    assert_same_bits(found, plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            assert_same_bits(_big_step(device, lambda: context), plain)

            stats = memkit.stats("limit")
            assert (stats.moved_out_bytes, stats.kept_bytes) == (limit_bytes, 8 * 2**20 - limit_bytes)
            assert stats.host_held_bytes <= limit_bytes


def test_memory_that_is_not_pinned_leaves_all_on_the_device_with_one_warning() -> None:
    device = Stingy()
    x, plain = leaf_on(device.torch_device), step(leaf_on(device.torch_device), [1] * 8)
    context = memkit.CPUOffload(1.0, "pin", min_bytes=0, window_bytes=0, device=device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert_same_bits(step(x, [1] * 8, lambda: context), plain)
            stats = memkit.stats("pin")
            assert (stats.moved_out_bytes, stats.kept_bytes, stats.host_held_bytes) == (0, 8 * UNIT_BYTES, 0)
    (warning,) = caught
    assert "leaves 0.00 MiB on the device: injected" in str(warning.message)

    device.left = 1000
    assert_same_bits(step(x, [1] * 8, lambda: context), plain)
    assert memkit.stats("pin").moved_out_bytes == 8 * UNIT_BYTES
    device.synchronize()


# Device memory


class Full(ReferenceDevice):
    """Refuses so many allocations, from a numbered one on."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: Iterator[bool] = iter(())
        self.num_refused = 0
        self.before_allocation: Callable[[], object] = int

    def allocate(self, num_bytes: int) -> torch.UntypedStorage:
        self.before_allocation()
        if next(self.refused, False):
            self.num_refused += 1
            raise torch.OutOfMemoryError("injected: out of memory")
        return super().allocate(num_bytes)


UNITS = [*[1] * 8, 4, 4, 4]
"""Of a chain; several storages come back together, once one of the large ones has gone."""


@pytest.mark.parametrize("number", range(10))
@pytest.mark.parametrize("window_units", [0, 8])
@pytest.mark.parametrize("num_learned", [0, 3], ids=["save by save", "by a schedule"])
def test_device_without_room_once(num_learned: int, window_units: int, number: int) -> None:
    """Both for bytes needed now and for bytes fetched ahead."""
    device = Full()
    x, plain = leaf_on(device.torch_device), step(leaf_on(device.torch_device), UNITS)
    for refused in (*[[]] * num_learned, *[[False] * number + [True]] * 3):
        device.refused = iter(refused)
        context = memkit.CPUOffload(1.0, "once", min_bytes=0, window_bytes=window_units * UNIT_BYTES, device=device)
        assert_same_bits(step(x, UNITS, lambda: context), plain)  # noqa: B023
    assert device.num_refused >= 1 or number > 7
    _assert_nothing_is_left("once", device)


@pytest.mark.parametrize("num_learned", [0, 3], ids=["save by save", "by a schedule"])
@pytest.mark.parametrize("window_units", [0, 4])
def test_device_without_any_room_raises_the_original_error_with_a_hint(window_units: int, num_learned: int) -> None:
    device = Full()
    x, plain = leaf_on(device.torch_device), step(leaf_on(device.torch_device), [1] * 12)
    context = memkit.CPUOffload(1.0, "full", min_bytes=0, window_bytes=window_units * UNIT_BYTES, device=device)
    for _ in range(num_learned):
        step(x, [1] * 12, lambda: context)
    x.grad = None
    with context:
        y = chain(x, [1] * 12)
    device.refused = iter([True] * 100)
    with pytest.raises(torch.OutOfMemoryError, match="injected: out of memory") as caught:
        y.sum().backward(retain_graph=True)

    (note,) = caught.value.__notes__
    assert 'no room on the device for 0.00 MiB that CPUOffload (tag "full") had moved to the host' in note
    del caught
    device.refused = iter(())
    y.sum().backward()
    assert_same_bits([y.detach(), x.grad], plain)
    del y
    assert_same_bits(step(x, [1] * 12, lambda: context), plain)
    _assert_nothing_is_left("full", device)


def test_room_is_made_by_dropping_what_was_fetched_ahead() -> None:
    device, num_coming, sines = Full(), [], []

    def count() -> None:
        (window,) = offload_states["dropped"].windows()
        num_coming.append(len(window.ledger.coming))

    def refuse_at_the_third() -> None:
        sines.append(1)
        if len(sines) == 3:
            device.refused, device.before_allocation = iter([True]), count

    found = three_backwards(
        leaf_on(device.torch_device),
        8,
        lambda: memkit.CPUOffload(1.0, "dropped", min_bytes=0, window_bytes=8 * UNIT_BYTES, device=device),
        refuse_at_the_third,
    )

    assert device.num_refused == 1
    assert num_coming[0] > 0 == num_coming[1]
    assert_same_bits(found, three_backwards(leaf_on(device.torch_device), 8))
    _assert_nothing_is_left("dropped", device)
