"""Copies that alternate between two streams, so that other copies to the host or the device need not wait for all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import memkit
from memkit.activations.offloading.scheduled import PlacedCopies, Schedule, ScheduledForward
from memkit.activations.saved.state import offload_states
from memkit.device import CudaDevice, Device, ReferenceDevice
from memkit.device.base import CopyBatch, Event, Piece
from memkit.device.reference import ReferenceEvent
from memkit.errors import RaceError
from memkit.plan import copies
from memkit.transfer import lanes
from memkit.transfer.lanes import CopiesByTurns, Lanes, copy_by_turns
from tests.activations.chains import UNIT_BYTES, chain, leaf_on
from tests.activations.scheduled_steps import TAG, Offloads, assert_steps_are_plain, gradient_of, offloads

__all__ = ["offloads"]

SIZES = [1] * 8


@pytest.fixture(autouse=True)
def _one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy each storage by itself."""
    monkeypatch.setattr(copies, "BATCH_BYTES", 1)


def _scheduled() -> ScheduledForward:
    (window,) = offload_states[TAG].windows()
    assert window.scheduled is not None
    return window.scheduled


def _waiting(device: Device, x: Tensor) -> Tensor:
    """A forward at whose end the host waits for the device, as for `item()`."""
    y = chain(x, SIZES)
    device.synchronize()
    return y


def test_steps_of_copies_by_turns_are_plain(offloads: Offloads) -> None:
    x = leaf_on(offloads.device.torch_device)

    assert_steps_are_plain(offloads, lambda _: _waiting(offloads.device, x), x, ratio=0.5)


def _lanes() -> Lanes:
    (window,) = offload_states[TAG].windows()
    return window.lanes


def test_copies_go_one_after_the_other_where_the_forward_ends_before_them() -> None:
    device = ReferenceDevice()  # where no copy lands before something waits for it
    offloads, x = Offloads(device), leaf_on(device.torch_device)
    for number in range(4):
        with offloads(0.5, 4):  # so that the last copy may come later
            y = chain(x, SIZES)
        if number < 3:
            gradient_of(y, x)

    assert not _scheduled().schedule.takes_turns
    assert {batch.stream for batch in _scheduled().out} == {_lanes().out}
    gradient_of(y, x)
    del y
    offloads.assert_nothing_is_left()


def _take_steps_back(offloads: Offloads, num_steps: int, *, waits: bool = False) -> tuple[Schedule, PlacedCopies]:
    """Return the schedule of the last step, and its copies."""
    x = leaf_on(offloads.device.torch_device)
    for number in range(num_steps):
        with offloads(0.5):
            y = _waiting(offloads.device, x) if waits else chain(x, SIZES)
        if number == num_steps - 1:
            made = _scheduled()
            assert made.placement is not None
        gradient_of(y, x)
        del y
        offloads.device.synchronize()
    return made.schedule, made.placement


def test_copies_take_turns_once_they_were_over_ahead_of_need(offloads: Offloads) -> None:
    """When the forward was over, and when a backward asked for them."""
    schedule, made = _take_steps_back(offloads, 8, waits=True)

    assert schedule.takes_turns
    assert schedule.takes_turns_back
    for batches, streams in ((made.out, _lanes().out_by_turns), (made.back[0], _lanes().back_by_turns)):
        assert len(batches) > 2
        assert [batch.stream for batch in batches] == [streams[number % 2] for number in range(len(batches))]
        assert [batch.ahead for batch in batches] == [None, *batches[:-1]]


def test_copies_back_go_one_after_the_other_where_backwards_wait_for_them(
    offloads: Offloads, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Any] = []
    monkeypatch.setattr(CopyBatch, "stall_s", lambda batch: 1e3)
    monkeypatch.setattr("memkit.activations.offloading.scheduled.busy_s_of", lambda came: looks.append(came) or 0.0)

    schedule, made = _take_steps_back(offloads, 12)

    assert not schedule.takes_turns_back
    assert {batch.stream for batch in made.back[0]} == {_lanes().back}
    assert len(looks) == 3


def test_copies_back_are_not_timed_while_any_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward that ended early leaves the last copies' events from an earlier step, while its own copies are under way. CUDA
    raises if asked for a time that is not over."""
    device = ReferenceDevice()
    offloads, x, timed = Offloads(device), leaf_on(device.torch_device), list[Event]()
    elapsed_s = ReferenceEvent.elapsed_s

    def note_timed(begin: ReferenceEvent, end: Event) -> float:
        timed.extend([begin, end])
        return elapsed_s(begin, end)

    monkeypatch.setattr(ReferenceEvent, "elapsed_s", note_timed)
    for _ in range(2):
        with offloads(0.5):
            y = chain(x, SIZES)
        gradient_of(y, x)
    with offloads(0.5):
        y = chain(x, SIZES)
    made = _scheduled()
    assert made.placement is not None
    gradient_of(y, x)
    first, last = made.placement.back[0][0], made.placement.back[0][-1]
    storages = [device.allocate(made.sized.sizes_bytes[value]) for value in made.schedule.parts[0].back[0]]
    first.start(storages)  # on its lane, and waited for by a stream that is not there yet
    first.waited = device.record_event()
    assert last.done.is_reached()
    assert not first.done.is_reached()
    timed.clear()

    made.schedule.see_to_turns(made.placement)

    assert not timed
    assert not made.schedule.takes_turns_back
    first.wait()
    del y
    offloads.assert_nothing_is_left()


@pytest.mark.parametrize("turn_bytes", [UNIT_BYTES // 2, UNIT_BYTES // 3, 2 * UNIT_BYTES])
def test_steps_are_plain_where_a_turn_is_a_part_of_a_storage(
    turn_bytes: int, offloads: Offloads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "TURN_BYTES", turn_bytes)
    monkeypatch.setattr(Schedule, "takes_turns", property(lambda _: True, lambda *_: None), raising=False)
    monkeypatch.setattr(Schedule, "takes_turns_back", property(lambda _: True, lambda *_: None), raising=False)
    x, placed, place = leaf_on(offloads.device.torch_device), [], Schedule.place

    def note_placed(*args: Any) -> PlacedCopies:
        placed.append(place(*args))
        return placed[-1]

    monkeypatch.setattr(Schedule, "place", note_placed)

    assert_steps_are_plain(offloads, lambda _: chain(x, SIZES), x, ratio=1.0)
    found = {isinstance(batch, CopiesByTurns) for made in placed for batch in (*made.out, *made.back[0])}
    assert found == {turn_bytes < UNIT_BYTES}


@pytest.mark.parametrize("is_out", [True, False])
@pytest.mark.parametrize("sizes", [[10], [4], [3, 3, 3], [1, 1, 1, 9, 1], [4, 8]])
def test_each_turn_waits_for_the_one_before_on_the_other_stream(
    sizes: list[int], is_out: bool, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "TURN_BYTES", 4)
    streams = device.new_stream("first"), device.new_stream("second")
    memory, pieces, storages, hosts = torch.arange(64, dtype=torch.uint8), [], [], []
    device.pin(memory)
    for number, size in enumerate(sizes):
        host, storage = memory[10 * number :][:size], device.allocate(size)
        storage.copy_(torch.full((size,), 200 + number, dtype=torch.uint8).untyped_storage())
        for start, part in zip((0, size // 3), host.split([size // 3, size - size // 3]), strict=True):  # as over two segments
            if len(part):
                pieces.append(Piece(number, start, part, part.data_ptr(), len(part)))
        storages.append(storage)
        hosts.append(host)
    expected = [list(storage) for storage in storages] if is_out else [host.tolist() for host in hosts]
    first = copy_by_turns(device, streams, pieces, is_out=is_out, ahead=None)
    second = copy_by_turns(device, streams, pieces, is_out=is_out, ahead=first)

    first.start(storages)
    second.start(storages)  # which touches the same bytes: a race if it did not wait for the first
    second.wait()  # and so for both
    device.synchronize()
    device.unpin(memory)

    assert [host.tolist() if is_out else list(storage) for host, storage in zip(hosts, storages, strict=True)] == expected
    made = [turn for batch in (first, second) for turn in (batch.turns if isinstance(batch, CopiesByTurns) else [batch])]
    assert [turn.stream for turn in made] == [streams[number % 2] for number in range(len(made))]
    assert all(sum(piece.num_bytes for piece in turn.pieces) <= 4 for turn in made)
    assert all(piece.address == piece.host.data_ptr() for turn in made for piece in turn.pieces)
    assert first.num_bytes == sum(piece.num_bytes for turn in made[: len(made) // 2] for piece in turn.pieces) == sum(sizes)
    assert first.num_storages == len(sizes)
    assert [batch.started for batch in (first, second)] == [made[0].started, made[len(made) // 2].started]
    assert [batch.done for batch in (first, second)] == [made[len(made) // 2 - 1].done, made[-1].done]


def test_turns_wait_for_the_batch_that_they_are_behind_and_count_waits_until_they_are_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lanes, "TURN_BYTES", 4)
    device, host = ReferenceDevice(), torch.zeros(8, dtype=torch.uint8)
    device.pin(host)
    pieces, streams = [Piece(0, 0, host, host.data_ptr(), 8)], (device.new_stream("first"), device.new_stream("second"))
    back = copy_by_turns(device, streams, pieces, is_out=False, ahead=None)
    out = device.copy_batch(device.new_stream("out"), pieces, is_out=True)
    storage, made = device.allocate(8), device.allocate(8)
    storage.fill_(7)

    out.start([storage])
    with pytest.raises(RaceError):
        back.start([made])
    back.start([made], out)
    back.wait()
    out.wait()

    assert list(made) == [7] * 8
    assert back.waited is not None
    back.waited = back.started  # as if the stream had had nothing else to do
    assert back.stall_s() == back.started.elapsed_s(back.done) > 0.0
    back.start([made])
    assert back.waited is None
    back.wait()


@pytest.mark.gpu
def test_a_value_that_is_read_back_does_not_wait_for_all_copies() -> None:
    device = CudaDevice(torch.device("cuda"))
    x = torch.ones(2**24, device="cuda", requires_grad=True)  # 64 MiB
    done = 0

    def forward(*, follows: bool) -> Tensor:
        nonlocal done
        y = x
        for _ in range(20):  # what leaves
            y = y.sin()
        y[0].item()
        if follows:
            done = sum(batch.done.is_reached() for batch in _scheduled().out)
        for _ in range(20):
            y = y.sin()
        device.synchronize()  # so that copies are over when the forward is
        return y

    for step in range(8):
        with memkit.CPUOffload(0.5, TAG, min_bytes=0, device=device):
            y = forward(follows=step == 7)
        if step == 7:
            assert _scheduled().schedule.takes_turns
        gradient_of(y, x)

    assert done < 10  # of 20, which take 24 ms


@pytest.mark.gpu
def test_what_is_copied_to_the_device_within_a_backward_does_not_wait_for_all_fetches() -> None:
    """FSDP2 copies so for each layer."""
    device = CudaDevice(torch.device("cuda"))
    x = torch.ones(2**24, device="cuda", requires_grad=True)  # 64 MiB
    host, events = torch.zeros(2**12, dtype=torch.uint8, pin_memory=True), list[torch.cuda.Event]()

    class Copies(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, y: Tensor) -> Tensor:
            return y.view_as(y)

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            torch.cuda._sleep(2_000_000)  # fetches are under way
            events.extend(torch.cuda.Event(enable_timing=True) for _ in range(2))
            events[-2].record()
            host.to("cuda", non_blocking=True)
            events[-1].record()
            torch.cuda._sleep(100_000_000)  # they are over before the others are asked for
            return grad

    for step in range(8):
        with memkit.CPUOffload(0.5, TAG, min_bytes=0, device=device):
            y = x
            for _ in range(20):  # what leaves
                y = y.sin()
            y = Copies.apply(y)
            for _ in range(20):
                y = y.sin()
        if step == 7:
            assert _scheduled().schedule.takes_turns_back
        gradient_of(y, x)
        device.synchronize()

    assert events[-2].elapsed_time(events[-1]) < 4.0  # 20 copies take 24 ms
