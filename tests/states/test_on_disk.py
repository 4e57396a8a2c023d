"""States on a disk: the same bits as plain steps, however late the disk is; a failing disk loses nothing; nothing is left."""

from __future__ import annotations

import copy
import errno
import gc
import os
import pickle
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import memkit
from memkit.device import Device, ReferenceDevice
from memkit.errors import DiskError, HostMemoryError, StateOffloadError
from memkit.states.device_steps import DeviceSteps
from memkit.states.memory import DiskStates, HostStates, StateSlots
from memkit.transfer import ReferenceDisk, host_memory
from memkit.transfer.disk import DiskStore, DiskTransfer
from tests.refusing import PinLimit
from tests.states.cases import Pair, PerParameter, adamw, assert_same, batch, cut, make_net, make_training, offload, train
from tests.states.test_faults import Compared
from tests.threads import num_own_threads

MIB = 2**20


@pytest.mark.core(1)
@pytest.mark.parametrize("is_cut", [False, True], indirect=True)
@pytest.mark.parametrize("budget", [0, "10KiB"])
def test_the_same_bits_on_a_real_disk(device: Device, budget: int | str, is_cut: bool, tmp_path: Path) -> None:
    pair = Pair(device)
    threads = num_own_threads()
    with offload(pair.optimizer, device, disk=_Quiet(tmp_path), device_budget=budget) as states:
        pair.train(range(4), accumulate=2)
        pair.assert_same()
        assert (states.plan.resident_bytes > 0) == (budget != 0)
    pair.assert_same()
    assert num_own_threads() == threads
    assert list(tmp_path.iterdir()) == []


class _Quiet(memkit.Disk):
    """Its scratch file may go through the system's cache, as on tmpfs: that warns."""

    def _make_file(self, num_bytes: int) -> Any:
        file = super()._make_file(num_bytes)
        file.refusal = None
        return file


@pytest.mark.slow
def test_host_budget_says_how_much_is_in_host_memory() -> None:
    device = ReferenceDevice()
    width, found = 512, []
    for budget in (None, "9MiB", "20MiB", "1GiB"):
        torch.manual_seed(1)
        model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(12)])
        optimizer = torch.optim.AdamW(model.parameters())
        with offload(optimizer, device, disk=ReferenceDisk(), host_budget=budget) as states:
            for _ in range(2):
                model(torch.ones(2, width)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert states.stats().host_bytes <= {None: 8 * MIB, "9MiB": 9 * MIB, "20MiB": 20 * MIB, "1GiB": 26 * MIB}[budget]
            assert states.plan.host_bytes + states.plan.disk_bytes == 24 * MIB
            found.append((states.plan.disk_bytes // MIB, optimizer.state_dict()))

    assert [num for num, _ in found] == [24, 24, 12, 0]
    for _, state_dict in found[1:]:
        assert_same(found[0][1], state_dict)


def test_a_host_budget_without_room_for_the_buffers() -> None:
    model, optimizer = make_training(device := ReferenceDevice())

    with pytest.raises(HostMemoryError, match=r"needs a host_budget of at least 8\.00 MiB, for the buffers"):
        offload(optimizer, device, disk=ReferenceDisk(), host_budget="1MiB")
    train(model, optimizer, device, range(1))


def test_what_is_told() -> None:
    model, optimizer = make_training(device := ReferenceDevice())
    with offload(optimizer, device, disk=ReferenceDisk()) as states:
        train(model, optimizer, device, range(3))
        text = states.plan.explain()
        assert "26.00 KiB on the disk" in text
        assert "1,000 steps write 2.66e-05 TB" in text
        assert "pass through 4 buffers in host memory" in text
        assert "26.00 KiB on the disk" in repr(states)
        stats = states.stats()
        assert stats.disk_bytes == states.plan.disk_bytes == 26 * 1024
        assert stats.disk_written_bytes == stats.h2d_bytes + 8 * 1024 or stats.disk_written_bytes > 0
        assert "states on the disk" in str(stats)
    assert states.stats().disk_written_bytes == stats.disk_written_bytes


def test_what_stands_for_a_state_says_what_to_do() -> None:
    model, optimizer = make_training(device := ReferenceDevice())
    with offload(optimizer, device, disk=ReferenceDisk()):
        train(model, optimizer, device, range(2))
        entries = optimizer.state[model.head.weight]
        standing = entries["exp_avg"]
        assert isinstance(entries["step"], torch.Tensor)
        assert repr(standing).startswith('<"exp_avg" of ')
        with pytest.raises(AttributeError, match=r"state_dict\(\) reads it"):
            standing.mul_(0.5)
        for duplicate in (copy.deepcopy, pickle.dumps):
            with pytest.raises(StateOffloadError, match="can't be copied or pickled"):
                duplicate(standing)

        entries["exp_avg"] = entries["exp_avg_sq"]
        model(batch(device, 5)).sum().backward()
        with pytest.raises(StateOffloadError, match="where it stands for nothing"):
            optimizer.step()
        entries["exp_avg"] = standing
        optimizer.step()


def test_a_state_dict_for_which_there_is_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make_training(device := ReferenceDevice())
    with offload(optimizer, device, disk=ReferenceDisk()):
        train(model, optimizer, device, range(2))
        with monkeypatch.context() as patch:
            patch.setattr("memkit.transfer.host_memory.available_bytes", lambda: 1000)
            with pytest.raises(HostMemoryError, match="more of host memory is needed"):
                optimizer.state_dict()
        train(model, optimizer, device, range(2, 3))
        assert len(optimizer.state_dict()["state"]) == 9


@pytest.mark.parametrize("has_states", [False, True])
@pytest.mark.parametrize("make", [lambda: ReferenceDisk(limit="8KiB"), lambda: ReferenceDisk(fault=_no_room)])
def test_a_disk_without_room(make: Callable[[], memkit.Disk], has_states: bool) -> None:
    model, optimizer = make_training(device := ReferenceDevice())
    if has_states:
        train(model, optimizer, device, range(2))
    before, threads = copy.deepcopy(optimizer.state_dict()), num_own_threads()

    with pytest.raises(DiskError):
        offload(optimizer, device, disk=make())

    assert_same(before, optimizer.state_dict())
    assert num_own_threads() == threads
    train(model, optimizer, device, range(2, 3))


def _no_room(what: str, offset: int, num_bytes: int) -> int:
    if what == "reserve":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return num_bytes


def test_memory_that_is_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    device = ReferenceDevice()
    PinLimit(device, monkeypatch, 0)
    pair = Pair(device)
    with pytest.warns(UserWarning, match="StateOffload"):
        states = offload(pair.optimizer, device, disk=ReferenceDisk(seed=3))
    with states:
        pair.train(range(4))
        pair.assert_same()
    pair.assert_same()


class Faults:
    """Fails reads or writes at chosen calls: once, or from then on."""

    def __init__(self) -> None:
        self.fails_at = self.num_calls = -1
        self.what, self.errno, self.lasts = "read", errno.EIO, False
        self._lock = threading.Lock()

    def arm(self, what: str, at: int, number: int = errno.EIO, *, lasts: bool) -> None:
        self.what, self.fails_at, self.errno, self.lasts, self.num_calls = what, at, number, lasts, 0

    def disarm(self) -> None:
        self.fails_at = -1

    def __call__(self, what: str, offset: int, num_bytes: int) -> int:
        with self._lock:
            if what == self.what and self.fails_at >= 0:
                is_now = self.num_calls >= self.fails_at if self.lasts else self.num_calls == self.fails_at
                self.num_calls += 1
                if is_now:
                    raise OSError(self.errno, os.strerror(self.errno))
        return num_bytes


@pytest.mark.core(1)
@pytest.mark.parametrize("lasts", [False, True])
@pytest.mark.parametrize("at", [0, 3, 7])
def test_a_disk_that_fails_when_states_are_put_there(at: int, lasts: bool) -> None:
    device, faults = ReferenceDevice(), Faults()
    pair = Pair(device)
    pair.train(range(2))
    faults.arm("write", at, errno.EIO, lasts=lasts)
    try:
        states = offload(pair.optimizer, device, disk=ReferenceDisk(fault=faults))
    except DiskError:
        states = None
    faults.disarm()
    pair.assert_same()
    pair.train(range(2, 4))
    pair.assert_same()
    if states is not None:
        states.close()
    pair.assert_same()


@pytest.mark.filterwarnings("ignore:StateOffload. states of .* were put elsewhere")
def test_states_that_are_cleared_while_they_can_not_be_written() -> None:
    device, faults = ReferenceDevice(), Faults()
    pair = Pair(device)
    with offload(pair.optimizer, device, disk=ReferenceDisk(fault=faults)):
        pair.train(range(2))
        for net in pair.nets:
            net(batch(device, 50)).square().mean().backward()
        pair.plain_optimizer.step()
        faults.arm("write", 0, errno.EIO, lasts=True)
        with pytest.raises(DiskError):
            pair.optimizer.step()
        faults.disarm()
        pair.optimizer.step()
        faults.arm("write", 0, errno.EIO, lasts=True)
        pair.optimizer.state_dict()  # tells that some are in buffers only
        faults.disarm()
        for net, own in pair:
            own.state.clear()
            net.zero_grad()
            train(net, own, device, range(3, 6))
        pair.assert_same()


class _Growing(PerParameter):
    """Has more states from its third step on."""

    def step_one(self, group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any]) -> None:
        state["count"] = state.get("count", 0) + 1
        state.setdefault("mean", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
        if state["count"] > 2:
            state.setdefault("square", torch.ones_like(parameter)).mul_(1.5)
            state.setdefault("cube", torch.ones_like(parameter, dtype=torch.float64)).mul_(1.5)
        parameter.sub_(group["lr"] * state["mean"])


@pytest.mark.parametrize("lasts", [False, True])
def test_states_that_grow_past_what_was_planned(lasts: bool) -> None:
    device, faults = ReferenceDevice(), Faults()
    pair = Pair(device, _Growing)
    with offload(pair.optimizer, device, disk=ReferenceDisk(fault=faults)) as states:
        for step in range(6):
            pair.train_plain([step])
            pair.model(batch(device, 10 * step)).square().mean().backward()
            faults.arm("write", 2, errno.EIO, lasts=lasts)
            try:
                pair.optimizer.step()
            except DiskError:
                faults.disarm()
                pair.optimizer.step()
            faults.disarm()
            pair.optimizer.zero_grad()
        pair.assert_same()
        assert states.stats().disk_written_bytes > states.plan.disk_bytes


def test_a_buffer_that_grows_keeps_its_bytes() -> None:
    device = ReferenceDevice()
    host = HostStates(device, limit_bytes=None)
    states = DiskStates(ReferenceDisk(), device, host)
    states.add_buffers(2, 10000)
    (buffer, _), held = states.buffers, host.arena.held_bytes
    assert buffer.room.num_bytes == 2 * MIB
    assert buffer.room.whole is not None
    buffer.room.whole[:10000].fill_(7)

    states.grow(buffer, 3 * MIB)

    assert buffer.room.whole is not None
    assert buffer.room.whole[:10000].eq(7).all()
    assert host.arena.held_bytes == held + 2 * MIB
    host.close([])


def test_a_disk_that_can_not_be_read_at_the_end() -> None:
    device, faults = ReferenceDevice(), Faults()
    model, optimizer = make_training(device)
    states = offload(optimizer, device, disk=ReferenceDisk(fault=faults))
    train(model, optimizer, device, range(3))
    optimizer.state_dict()  # nothing is in a buffer any more
    faults.arm("read", 8, errno.EIO, lasts=True)

    with pytest.warns(UserWarning, match=r"the states of .* can't be read from the disk any more, and are lost"):
        states.close()

    assert 0 < len(optimizer.state) < 9
    faults.disarm()
    train(model, optimizer, device, range(3, 5))
    assert len(optimizer.state) == 9


def test_a_state_dict_that_can_not_be_read() -> None:
    device, faults = ReferenceDevice(), Faults()
    pair = Pair(device)
    with offload(pair.optimizer, device, disk=ReferenceDisk(fault=faults)):
        pair.train(range(3))
        faults.arm("read", 4, errno.EIO, lasts=False)
        with pytest.raises(DiskError, match="reading"):
            pair.optimizer.state_dict()
        faults.disarm()
        pair.assert_same()


def test_nothing_is_left_where_nobody_closes(tmp_path: Path) -> None:
    device = ReferenceDevice()
    threads = num_own_threads()
    model, optimizer = make_training(device)
    offload(optimizer, device, disk=_Quiet(tmp_path))
    train(model, optimizer, device, range(2))
    del optimizer
    gc.collect()

    assert num_own_threads() == threads
    assert list(tmp_path.iterdir()) == []


# Within the backward: states are read ahead in its order


class _Drawn(nn.Module):
    """Layers of several sizes, of which each forward takes some, in any order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(24, inner), nn.Linear(inner, 24, bias=False)) for inner in (8, 64, 24, 3, 100, 40)
        )

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for number in order:
            x = x + self.layers[number](x).tanh()
        return x


class _Prompt(ReferenceDisk):
    """A disk that is done at once, so that as many parts as possible are on their way to their slots."""

    def _make_queue(self, num_threads: int) -> Any:
        queue: Any = super()._make_queue(num_threads)
        put = queue.put

        def put_and_wait(transfer: DiskTransfer) -> None:
            put(transfer)
            queue.wait(transfer)

        queue.put = put_and_wait
        return queue


DISKS: dict[str, Callable[[], memkit.Disk]] = {
    "late": partial(ReferenceDisk, seed=3),
    "threads": partial(ReferenceDisk, is_late=False),
    "prompt": _Prompt,
}


@pytest.mark.slow
@pytest.mark.core(1)
@pytest.mark.parametrize("kind", DISKS)
@pytest.mark.parametrize("is_cut", [False, True], indirect=True)
@pytest.mark.parametrize("budget", [0, "4KiB"])
def test_backwards_that_come_otherwise_than_predicted(budget: int | str, is_cut: bool, kind: str) -> None:
    pair = Pair(device := ReferenceDevice(), net=_Drawn)
    with offload(pair.optimizer, device, disk=DISKS[kind](), when="backward", device_budget=budget):
        for step in range(16):
            order = (draw := random.Random(step)).sample(range(6), draw.randint(1, 6))
            for net, own in pair:
                net(batch(device, step), order).square().mean().backward()
                if step % 4 == 1:
                    own.state_dict()  # with parameters on their way that the backward has not come to
                own.step()
                own.zero_grad()
            assert_same(pair.plain.state_dict(), pair.model.state_dict(), f"parameters after step {step}")
            if step % 5 == 4:
                pair.assert_same()
    pair.assert_same()
    device.synchronize()
    assert not device.races


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:StateOffload. states of .* were put elsewhere")
@pytest.mark.core(1)
@pytest.mark.parametrize("is_all", [True, False])
@pytest.mark.parametrize("kind", DISKS)
def test_states_that_others_put_there_while_the_disk_is_read(kind: str, is_all: bool) -> None:
    """The backward finds them at the parameter, whose states are on their way by then."""
    pair = Pair(device := ReferenceDevice())
    with offload(pair.optimizer, device, disk=DISKS[kind](), when="backward") as states:
        for step in range(5):
            pair.train([step], states=states)
            for net, own in pair:
                saved = copy.deepcopy(own.state_dict()["state"])
                for number, parameter in enumerate(net.parameters()):
                    if number in (3, 4) and number in saved:
                        found = {name: value * 0.5 for name, value in saved[number].items() if name != "step"}
                        own.state[parameter].update(found if is_all else {"exp_avg": found["exp_avg"]})
        pair.train([6], states=states)
        pair.assert_same()
    device.synchronize()
    assert not device.races


@pytest.mark.slow
def test_the_next_ones_are_read_while_one_is_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the backward, each once, and as many ahead as there are buffers."""
    model, optimizer = make_training(device := ReferenceDevice())
    read, stepped, num_read = list[str](), list[str](), list[int]()
    read_part, step_part = DiskStates.begin_read, DeviceSteps.step

    def note_read(self: DiskStates, buffer: Any, part: Any) -> None:
        read.append(part.names)
        read_part(self, buffer, part)

    def note_step(self: DeviceSteps, part: Any, run: Any) -> None:
        stepped.append(part.names)
        num_read.append(len(read))
        step_part(self, part, run)
        self.disk.end_writes()  # a disk that is fast

    monkeypatch.setattr(DiskStates, "begin_read", note_read)
    monkeypatch.setattr(DeviceSteps, "step", note_step)
    with offload(optimizer, device, disk=ReferenceDisk(), when="backward") as states:
        train(model, optimizer, device, range(2), states=states)
        for noted in (read, stepped, num_read):
            noted.clear()
        model(batch(device, 2)).square().mean().backward()

        assert read == stepped
        assert num_read == [4, 5, 6, 7, 8, 9, 9, 9, 9]
        optimizer.step()


@pytest.mark.slow
@settings(max_examples=45)
@given(
    way=st.sampled_from(["disk", "backward, disk"]),
    what=st.sampled_from(["read", "write"]),
    at=st.integers(0, 14),
    number=st.sampled_from([errno.EIO, errno.ENOSPC]),
    lasts=st.booleans(),
    budget=st.sampled_from([0, "8KiB"]),
    has_states=st.booleans(),
    is_cut=st.booleans(),
    seed=st.sampled_from([None, 1, 2]),
    is_late=st.booleans(),
)
def test_a_disk_that_fails(way, what, at, number, lasts, budget, has_states, is_cut, seed, is_late) -> None:
    """Each parameter is as before the step or as after it, and the step can be ended; or an error names partly stepped ones."""
    with pytest.MonkeyPatch.context() as patch:
        if is_cut:
            cut(patch)
        faults = Faults()
        disk = ReferenceDisk(fault=faults, seed=seed, is_late=is_late)
        compared = Compared(ReferenceDevice(), way, has_states=has_states, disk=disk, device_budget=budget)
        faults.arm(what, at, number, lasts=lasts)
        has_failed = False
        for act in (compared.backward, compared.step):
            try:
                act()
            except (DiskError, StateOffloadError):
                has_failed = True
                break
        faults.disarm()
        try:
            compared.assert_whole()
        except StateOffloadError as lost:  # neither the rest of a large parameter could be stepped
            assert lasts
            assert is_cut
            assert "Load a checkpoint of the model and the optimizer" in str(lost)  # noqa: PT017
            compared.begin_anew()
            compared.backward()
            compared.step()
            has_failed = False
        if has_failed:
            compared.step()
        if way == "disk" or not has_failed:
            compared.assert_new()
        compared.assert_whole()
        compared.assert_goes_on()
        compared.close()


@pytest.mark.slow
def test_a_read_that_fails_breaks_off_the_backward_when_its_turn_comes() -> None:
    faults = Faults()
    compared = Compared(ReferenceDevice(), "backward, disk", disk=ReferenceDisk(fault=faults))
    compared.optimizer.state_dict()  # nothing is in a buffer any more
    faults.arm("read", 2, errno.EIO, lasts=False)
    with pytest.raises(DiskError, match="reading"):
        compared.backward()

    assert compared.assert_whole() == 2  # it was asked for ahead of both
    compared.step()  # which has its gradient
    assert compared.assert_whole() == 3
    compared.assert_goes_on()
    compared.close()


@pytest.mark.slow
def test_a_piece_that_is_given_up_on_its_way_from_memory_that_is_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copy is put on the lane late: the slot's next piece, whose memory is pinned, waits for it."""
    device, width = ReferenceDevice(), 512
    copy_now, fetch = host_memory._Side.copy, StateSlots.fetch
    late = list[Any]()

    def copy_late(self: host_memory._Side, *args: Any) -> Any:
        if armed:
            late.append(args)
            time.sleep(0.1)
        return copy_now(self, *args)

    def fetch_and_land(self: StateSlots, piece: Any, span: Any) -> None:
        fetch(self, piece, span)
        if armed and piece.plan.is_on_disk:
            states._host.arena.drain()
            device.synchronize()

    monkeypatch.setattr(host_memory._Side, "copy", copy_late)
    monkeypatch.setattr(StateSlots, "fetch", fetch_and_land)
    PinLimit(device, monkeypatch, 8 * MIB)  # the disk's need
    torch.manual_seed(0)
    plain = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(12))
    pair = Pair(device, net=lambda *_, **__: copy.deepcopy(plain))
    with pytest.warns(UserWarning, match="did not pin"):
        states = offload(pair.optimizer, device, disk=_Prompt(), when="backward", host_budget="22MiB")
    with states:
        assert [piece.is_on_disk for piece in states.plan.pieces] == [True] * 5 + [False] * 7
        for order in (range(12), [4, 11]):  # behind the last one, the two before it are on their way
            armed = len(order) == 2
            for net, optimizer in pair:
                x = torch.ones(2, width)
                for number in order:
                    x = torch.tanh(net[number](x))
                x.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        armed = False
        assert late
        pair.assert_same()


class _Restarting(PerParameter):
    """Begins anew every fifth step, behind the last use of its states."""

    def step_one(self, group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any]) -> None:
        mean = state.setdefault("mean", torch.zeros_like(parameter))
        mean.mul_(0.9).add_(parameter.grad)
        parameter.sub_(mean, alpha=group["lr"])
        state["count"] = state.get("count", 0) + 1
        if state["count"] == 5:
            state.clear()


class _Noting(ReferenceDevice):
    """A device that knows which copies from host memory may still be under way, as far as the host can tell."""

    def __init__(self) -> None:
        super().__init__()
        self.reading: list[tuple[int, int, int, int]] = []
        """For each copy: its begin and end, the number of its stream, and that stream's clock behind it."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        super().copy(destination, source, stream)
        if self._is_host(source):
            start = source.data_ptr()
            self.reading.append((start, start + source.nbytes, stream.number, stream.clock[stream.number]))

    def synchronize(self, event: Any = None) -> None:
        super().synchronize(event)
        clock = None if event is None else event.recorded().clock
        self.reading = [] if clock is None else [one for one in self.reading if clock.get(one[2], 0) < one[3]]


@pytest.mark.slow
@pytest.mark.parametrize("when", ["step", "backward"])
def test_nothing_is_read_over_states_that_are_not_kept_while_they_are_copied(when: str, monkeypatch: Any) -> None:
    """If a step leaves no states, no copy comes back to the buffer to tell when the copy from there is done."""
    device = _Noting()
    pair = Pair(device, _Restarting)
    read, num_read = DiskStore.read, []

    def check(self: DiskStore, chunk: Any, span: Any, **options: Any) -> None:
        first, last = span.whole.data_ptr(), span.whole.data_ptr() + span.num_bytes
        assert not [one for one in device.reading if one[0] < last and first < one[1]]
        num_read.append(chunk.name)
        read(self, chunk, span, **options)

    monkeypatch.setattr(DiskStore, "read", check)
    with offload(pair.optimizer, device, disk=ReferenceDisk(), when=when):
        pair.train(range(11))
        pair.assert_same()
    assert num_read


def test_a_file_system_without_direct_reads_warns_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, is_direct: bool) -> None:
        if is_direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr("memkit.transfer.disk.DiskFile._set_direct", refuse)
    device = ReferenceDevice()
    model = make_net(device)
    optimizer = adamw(model.parameters())
    with pytest.warns(UserWarning, match="has no direct reads and writes") as caught:
        states = offload(optimizer, device, disk=memkit.Disk(tmp_path))
    assert len(caught) == 1
    with states:
        train(model, optimizer, device, range(3))
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(64, 64))]})  # the file grows
        train(model, optimizer, device, range(3, 5))
