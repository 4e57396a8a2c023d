"""States on a disk that are stepped within the backward: read ahead in its order, and the same bits whatever happens."""

from __future__ import annotations

import copy
import errno
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import memkit
from memkit.device import Device, ReferenceDevice
from memkit.errors import DiskError, StateOffloadError
from memkit.states.device_steps import DeviceSteps
from memkit.states.memory import StateSlots
from memkit.states.on_disk import DiskStates
from memkit.transfer import ReferenceDisk, staging
from memkit.transfer.disk import DiskStore, DiskTransfer
from tests.refusing import PinLimit
from tests.states.cases import adamw, assert_same, assert_same_training, batch, cut, make_net, offload, train
from tests.states.test_faults import Compared
from tests.states.test_on_disk import MIB, Faults

pytestmark = pytest.mark.slow


def _offload(optimizer: torch.optim.Optimizer, device: Device, disk: memkit.Disk, **options: Any) -> memkit.StateOffload:
    return offload(optimizer, device, disk=disk, when="backward", **options)


# The same bits


class _Drawn(nn.Module):
    """Layers of several sizes, of which each forward takes some, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(24, inner), nn.Linear(inner, 24, bias=False)) for inner in (8, 64, 24, 3, 100, 40)
        )

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for number in order:
            x = x + self.layers[number](x).tanh()
        return x


def _drawn_order(step: int) -> list[int]:
    draw = random.Random(step)
    return draw.sample(range(6), draw.randint(1, 6))


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


@pytest.mark.core(1)
@pytest.mark.parametrize("kind", DISKS)
@pytest.mark.parametrize("is_cut", [True, False])
@pytest.mark.parametrize("budget", [0, "4KiB"])
def test_backwards_that_come_otherwise_than_predicted(
    budget: int | str, is_cut: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_cut:
        cut(monkeypatch)
    device = ReferenceDevice()
    torch.manual_seed(1)
    plain = _Drawn()
    model = copy.deepcopy(plain)
    plain_optimizer, optimizer = adamw(plain), adamw(model)
    with _offload(optimizer, device, DISKS[kind](), device_budget=budget):
        for step in range(16):
            for net, own in ((plain, plain_optimizer), (model, optimizer)):
                net(batch(device, step), _drawn_order(step)).square().mean().backward()
                if step % 4 == 1:
                    own.state_dict()  # with parameters on their way that the backward has not come to
                own.step()
                own.zero_grad()
            assert_same(plain.state_dict(), model.state_dict(), f"parameters after step {step}")
            if step % 5 == 4:
                assert_same(plain_optimizer.state_dict(), optimizer.state_dict(), f"states after step {step}")
    assert_same_training(plain, plain_optimizer, model, optimizer)
    device.synchronize()
    assert not device.races


@pytest.mark.filterwarnings("ignore:StateOffload. states of .* were put elsewhere")
@pytest.mark.core(1)
@pytest.mark.parametrize("is_all", [True, False])
@pytest.mark.parametrize("kind", DISKS)
def test_states_that_others_put_there_while_the_disk_is_read(kind: str, is_all: bool) -> None:
    """The backward finds them at the parameter, whose states are on their way by then."""
    device = ReferenceDevice()
    nets = [make_net(device), make_net(device)]
    optimizers = [adamw(net) for net in nets]
    with _offload(optimizers[1], device, DISKS[kind]()) as states:
        for step in range(5):
            train(nets[0], optimizers[0], device, [step])
            train(nets[1], optimizers[1], device, [step], states=states)
            for net, own in zip(nets, optimizers, strict=True):
                saved = copy.deepcopy(own.state_dict()["state"])
                for number, parameter in enumerate(net.parameters()):
                    if number in (3, 4) and number in saved:
                        found = {name: value * 0.5 for name, value in saved[number].items() if name != "step"}
                        own.state[parameter].update(found if is_all else {"exp_avg": found["exp_avg"]})
        train(nets[0], optimizers[0], device, [6])
        train(nets[1], optimizers[1], device, [6], states=states)
        assert_same_training(nets[0], optimizers[0], nets[1], optimizers[1])
    device.synchronize()
    assert not device.races


# What is where, and when


def test_the_next_ones_are_read_while_one_is_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the backward, each once, and as many ahead as there are buffers."""
    device = ReferenceDevice()
    model = make_net(device)
    optimizer = adamw(model)
    read, stepped, num_read = list[str](), list[str](), list[int]()
    read_part, step_part = DiskStates.begin_read, DeviceSteps.step

    def note_read(self: DiskStates, buffer: Any, layout: Any) -> None:
        read.append(buffer.part.names)
        read_part(self, buffer, layout)

    def note_step(self: DeviceSteps, part: Any, run: Any) -> None:
        stepped.append(part.names)
        num_read.append(len(read))
        step_part(self, part, run)
        self.disk.end_writes()  # a disk that is fast

    monkeypatch.setattr(DiskStates, "begin_read", note_read)
    monkeypatch.setattr(DeviceSteps, "step", note_step)
    with _offload(optimizer, device, ReferenceDisk()) as states:
        train(model, optimizer, device, range(2), states=states)
        for noted in (read, stepped, num_read):
            noted.clear()
        model(batch(device, 2)).square().mean().backward()

        assert read == stepped
        assert num_read == [4, 5, 6, 7, 8, 9, 9, 9, 9]
        optimizer.step()


# What goes wrong


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
def test_a_disk_that_fails(
    way: str,
    what: str,
    at: int,
    number: int,
    lasts: bool,
    budget: int | str,
    has_states: bool,
    is_cut: bool,
    seed: int | None,
    is_late: bool,
) -> None:
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


def test_a_piece_that_is_given_up_on_its_way_from_memory_that_is_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copy is put on the lane late: the slot's next piece, whose memory is pinned, waits for it."""
    device, width = ReferenceDevice(), 512
    copy_now, fetch = staging._Side.copy, StateSlots.fetch
    late = list[Any]()

    def copy_late(self: staging._Side, *args: Any) -> Any:
        if armed:
            late.append(args)
            time.sleep(0.1)
        return copy_now(self, *args)

    def fetch_and_land(self: StateSlots, piece: Any, span: Any) -> None:
        fetch(self, piece, span)
        if armed and piece.plan.is_on_disk:
            states._host.arena.drain()
            device.synchronize()

    monkeypatch.setattr(staging._Side, "copy", copy_late)
    monkeypatch.setattr(StateSlots, "fetch", fetch_and_land)
    PinLimit(device, monkeypatch, 8 * MIB)  # the disk's need
    torch.manual_seed(0)
    plain = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(12))
    model = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW(net.parameters()) for net in (plain, model)]
    with pytest.warns(UserWarning, match="did not pin"):
        states = _offload(optimizers[1], device, _Prompt(), host_budget="22MiB")
    with states:
        assert [piece.is_on_disk for piece in states.plan.pieces] == [True] * 5 + [False] * 7
        for order in (range(12), [4, 11]):  # behind the last one, the two before it are on their way
            armed = len(order) == 2
            for net, optimizer in zip((plain, model), optimizers, strict=True):
                x = torch.ones(2, width)
                for number in order:
                    x = torch.tanh(net[number](x))
                x.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        armed = False
        assert late
        assert_same_training(plain, optimizers[0], model, optimizers[1])


class _Restarting(torch.optim.Optimizer):
    """Begins anew every fifth step, behind the last use of its states."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
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


@pytest.mark.parametrize("when", ["step", "backward"])
def test_nothing_is_read_over_states_that_are_not_kept_while_they_are_copied(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a step leaves no states, no copy comes back to the buffer to tell when the copy from there is done."""
    device = _Noting()
    nets = [make_net(device), make_net(device)]
    optimizers = [_Restarting(net.parameters()) for net in nets]
    read, num_read = DiskStore.read, []

    def check(self: DiskStore, chunk: Any, span: Any, **options: Any) -> None:
        first, last = span.whole.data_ptr(), span.whole.data_ptr() + span.num_bytes
        assert not [one for one in device.reading if one[0] < last and first < one[1]]
        num_read.append(chunk.name)
        read(self, chunk, span, **options)

    monkeypatch.setattr(DiskStore, "read", check)
    with offload(optimizers[1], device, disk=ReferenceDisk(), when=when):
        for net, optimizer in zip(nets, optimizers, strict=True):
            train(net, optimizer, device, range(11))
        assert_same_training(nets[0], optimizers[0], nets[1], optimizers[1])
    assert num_read
