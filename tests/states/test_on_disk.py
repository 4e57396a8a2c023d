"""States on a disk: the same bits as plain steps, however late the disk is; a failing disk loses nothing; nothing is left."""

from __future__ import annotations

import copy
import errno
import gc
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memkit
from memkit.device import Device, ReferenceDevice
from memkit.errors import DiskError, HostMemoryError, StateOffloadError
from memkit.states.memory import HostStates
from memkit.states.on_disk import DiskStates
from memkit.transfer import ReferenceDisk
from tests.refusing import PinLimit
from tests.states.cases import adamw, assert_same, assert_same_training, batch, cut, make_net, offload, train
from tests.threads import num_own_threads

MIB = 2**20


# The same bits


@pytest.mark.core(1)
@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("budget", [0, "10KiB"])
def test_the_same_bits_on_a_real_disk(
    device: Device, budget: int | str, is_cut: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_cut:
        cut(monkeypatch)
    plain, model = make_net(device), make_net(device)
    plain_optimizer, optimizer = adamw(plain), adamw(model)
    threads = num_own_threads()
    with offload(optimizer, device, disk=_real_disk(tmp_path), device_budget=budget) as states:
        train(plain, plain_optimizer, device, range(4), accumulate=2)
        train(model, optimizer, device, range(4), accumulate=2)
        assert_same_training(plain, plain_optimizer, model, optimizer)
        assert (states.plan.resident_bytes > 0) == (budget != 0)
    assert_same_training(plain, plain_optimizer, model, optimizer)
    assert num_own_threads() == threads
    assert list(tmp_path.iterdir()) == []


def _real_disk(directory: Path) -> memkit.Disk:
    """Return a disk whose scratch file may go through the system's cache, as on tmpfs: that warns."""
    return _Quiet(directory)


class _Quiet(memkit.Disk):
    def _make_file(self, num_bytes: int) -> Any:
        file = super()._make_file(num_bytes)
        file.refusal = None
        return file


# Where states are


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
    optimizer = adamw(make_net(ReferenceDevice()))
    disk = ReferenceDisk()

    with pytest.raises(HostMemoryError, match=r"needs a host_budget of at least 8\.00 MiB, for the buffers"):
        offload(optimizer, ReferenceDevice(), disk=disk, host_budget="1MiB")
    train(make_net(ReferenceDevice()), optimizer, ReferenceDevice(), range(1))


def test_what_is_told() -> None:
    device = ReferenceDevice()
    model = make_net(device)
    optimizer = adamw(model)
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
    device = ReferenceDevice()
    model = make_net(device)
    optimizer = adamw(model)
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


# Saving and loading


def test_a_state_dict_for_which_there_is_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    device = ReferenceDevice()
    model = make_net(device)
    optimizer = adamw(model)
    with offload(optimizer, device, disk=ReferenceDisk()):
        train(model, optimizer, device, range(2))
        with monkeypatch.context() as patch:
            patch.setattr("memkit.transfer.host_memory.available_bytes", lambda: 1000)
            with pytest.raises(HostMemoryError, match="more of host memory is needed"):
                optimizer.state_dict()
        train(model, optimizer, device, range(2, 3))
        assert len(optimizer.state_dict()["state"]) == 9


# What goes wrong


@pytest.mark.parametrize("has_states", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: ReferenceDisk(limit="8KiB"),
        lambda: ReferenceDisk(fault=_no_room),
    ],
    ids=["limit", "full"],
)
def test_a_disk_without_room(make: Callable[[], memkit.Disk], has_states: bool) -> None:
    device = ReferenceDevice()
    model = make_net(device)
    optimizer = adamw(model)
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


def test_a_file_system_without_direct_reads_warns_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, is_direct: bool) -> None:
        if is_direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr("memkit.transfer.disk_file.ScratchFile._set_direct", refuse)
    device = ReferenceDevice()
    model = make_net(device)
    optimizer = adamw(model)
    with pytest.warns(UserWarning, match="has no direct reads and writes") as caught:
        states = offload(optimizer, device, disk=memkit.Disk(tmp_path))
    assert len(caught) == 1
    train(model, optimizer, device, range(3))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(64, 64))]})
    train(model, optimizer, device, range(3, 5))
    states.close()


def test_memory_that_is_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    device = ReferenceDevice()
    PinLimit(device, monkeypatch, 0)
    plain, model = make_net(device), make_net(device)
    plain_optimizer, optimizer = adamw(plain), adamw(model)
    with pytest.warns(UserWarning, match="StateOffload"):
        states = offload(optimizer, device, disk=ReferenceDisk(seed=3))
    with states:
        train(plain, plain_optimizer, device, range(4))
        train(model, optimizer, device, range(4))
        assert_same_training(plain, plain_optimizer, model, optimizer)
    assert_same_training(plain, plain_optimizer, model, optimizer)


class Faults:
    """Fails reads or writes at chosen calls: once, or from then on."""

    def __init__(self) -> None:
        self.fails_at = self.num_calls = -1
        self.what, self.errno, self.lasts = "read", errno.EIO, False
        self._lock = threading.Lock()

    def arm(self, what: str, at: int, number: int, *, lasts: bool) -> None:
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
    plain, model = make_net(device), make_net(device)
    plain_optimizer, optimizer = adamw(plain), adamw(model)
    for net, own in ((plain, plain_optimizer), (model, optimizer)):
        train(net, own, device, range(2))
    faults.arm("write", at, errno.EIO, lasts=lasts)
    try:
        states = offload(optimizer, device, disk=ReferenceDisk(fault=faults))
    except DiskError:
        states = None
    faults.disarm()
    assert_same_training(plain, plain_optimizer, model, optimizer)
    for net, own in ((plain, plain_optimizer), (model, optimizer)):
        train(net, own, device, range(2, 4))
    assert_same_training(plain, plain_optimizer, model, optimizer)
    if states is not None:
        states.close()
    assert_same_training(plain, plain_optimizer, model, optimizer)


@pytest.mark.filterwarnings("ignore:StateOffload. states of .* were put elsewhere")
def test_states_that_are_cleared_while_they_can_not_be_written() -> None:
    device, faults = ReferenceDevice(), Faults()
    plain, model = make_net(device), make_net(device)
    plain_optimizer, optimizer = adamw(plain), adamw(model)
    with offload(optimizer, device, disk=ReferenceDisk(fault=faults)):
        train(plain, plain_optimizer, device, range(2))
        train(model, optimizer, device, range(2))
        for net in (plain, model):
            net(batch(device, 50)).square().mean().backward()
        plain_optimizer.step()
        faults.arm("write", 0, errno.EIO, lasts=True)
        with pytest.raises(DiskError):
            optimizer.step()
        faults.disarm()
        optimizer.step()
        faults.arm("write", 0, errno.EIO, lasts=True)
        optimizer.state_dict()  # tells that some are in buffers only
        faults.disarm()
        for net, own in ((plain, plain_optimizer), (model, optimizer)):
            own.state.clear()
            net.zero_grad()
            train(net, own, device, range(3, 6))
        assert_same_training(plain, plain_optimizer, model, optimizer)


class _Growing(torch.optim.Optimizer):
    """Has more states from its third step on."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    state.setdefault("mean", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
                    if state["count"] > 2:
                        state.setdefault("square", torch.ones_like(parameter)).mul_(1.5)
                        state.setdefault("cube", torch.ones_like(parameter, dtype=torch.float64)).mul_(1.5)
                    parameter.sub_(group["lr"] * state["mean"])
        return None


@pytest.mark.parametrize("lasts", [False, True])
def test_states_that_grow_past_what_was_planned(lasts: bool) -> None:
    device, faults = ReferenceDevice(), Faults()
    plain, model = make_net(device), make_net(device)
    plain_optimizer, optimizer = _Growing(plain.parameters()), _Growing(model.parameters())
    with offload(optimizer, device, disk=ReferenceDisk(fault=faults)) as states:
        for step in range(6):
            train(plain, plain_optimizer, device, [step])
            model(batch(device, 10 * step)).square().mean().backward()
            faults.arm("write", 2, errno.EIO, lasts=lasts)
            try:
                optimizer.step()
            except DiskError:
                faults.disarm()
                optimizer.step()
            faults.disarm()
            optimizer.zero_grad()
        assert_same_training(plain, plain_optimizer, model, optimizer)
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
    model = make_net(device)
    optimizer = adamw(model)
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
    plain, model = make_net(device), make_net(device)
    plain_optimizer, optimizer = adamw(plain), adamw(model)
    with offload(optimizer, device, disk=ReferenceDisk(fault=faults)):
        train(plain, plain_optimizer, device, range(3))
        train(model, optimizer, device, range(3))
        faults.arm("read", 4, errno.EIO, lasts=False)
        with pytest.raises(DiskError, match="reading"):
            optimizer.state_dict()
        faults.disarm()
        assert_same_training(plain, plain_optimizer, model, optimizer)


# What is taken


@pytest.mark.slow
@pytest.mark.parametrize("when", ["step", "backward"])
def test_a_long_run_takes_no_more_than_a_short_one(when: str) -> None:
    device = ReferenceDevice()
    model = make_net(device)
    optimizer = adamw(model)
    with offload(optimizer, device, disk=ReferenceDisk(is_late=False), when=when) as states:
        found = []
        for step in range(60):
            train(model, optimizer, device, [step])
            if step % 10 == 5:
                optimizer.state_dict()
            if step in (8, 20) or step > 57:
                gc.collect()
                disk: Any = states._disk
                taken = disk.store.file.num_bytes, len(disk.store.sizes), disk.store.in_use_bytes > 0
                found.append((states.stats().host_bytes, num_own_threads(), *taken))

    assert len(set(found)) == 1


def test_nothing_is_left_where_nobody_closes(tmp_path: Path) -> None:
    device = ReferenceDevice()
    threads = num_own_threads()
    model = make_net(device)
    optimizer = adamw(model)
    offload(optimizer, device, disk=_real_disk(tmp_path))
    train(model, optimizer, device, range(2))
    del optimizer
    gc.collect()

    assert num_own_threads() == threads
    assert list(tmp_path.iterdir()) == []
