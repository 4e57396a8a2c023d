"""One account of what memkit keeps of a device: who has how much, and what is said where there is no room."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import memkit
from memkit.device import Device, ReferenceDevice
from memkit.errors import BudgetInfeasible
from memkit.transfer.device_memory import device_memory_of


class Room:
    """Holds what it has allocated."""

    def __init__(self, device: Device, holder: str) -> None:
        self.holder, self.memory = holder, device_memory_of(device)
        self.storages: list[torch.UntypedStorage] = []
        self.memory.join(self)

    @property
    def num_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self.storages)

    def take(self, num_bytes: int) -> None:
        self.storages.append(self.memory.allocate(self, num_bytes))


class Full(ReferenceDevice):
    """Has no room for more than 4 KiB at once."""

    def allocate(self, num_bytes: int) -> torch.UntypedStorage:
        if num_bytes > 4096:
            raise torch.OutOfMemoryError("out of memory")
        return super().allocate(num_bytes)


def test_holders_are_counted_by_what_they_are_while_they_live() -> None:
    device = ReferenceDevice()
    first, second, third = Room(device, "slots"), Room(device, "slots"), Room(device, "undo")
    memory = device_memory_of(device)
    assert memory is device_memory_of(device) is not device_memory_of(ReferenceDevice())
    assert memory.held() == {}
    assert memory.describe() == ""

    third.take(512)
    first.take(1024)
    second.take(1024)
    second.take(1024)

    assert list(memory.held().items()) == [("slots", 3072), ("undo", 512)]
    assert memory.describe() == "memkit itself holds 3.00 KiB for slots, 512 bytes for undo"

    second.storages.pop()
    del first
    gc.collect()
    assert memory.held() == {"slots": 1024, "undo": 512}


def test_no_room_says_who_has_what() -> None:
    device = Full()
    slots, undo = Room(device, "slots"), Room(device, "undo")
    with pytest.raises(torch.OutOfMemoryError) as alone:
        slots.take(8192)
    assert alone.value.__notes__ == ["memkit: no room on the device for 8.00 KiB of slots"]

    slots.take(2048)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory") as caught:
        undo.take(8192)
    assert caught.value.__notes__ == [
        "memkit: no room on the device for 8.00 KiB of undo; memkit itself holds 2.00 KiB for slots"
    ]
    assert undo.num_bytes == 0


def _trained() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(6)])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return model, optimizer


def test_layers_and_states_stand_in_one_account() -> None:
    device = ReferenceDevice()
    (model, _), (_, optimizer) = _trained(), _trained()
    memory = device_memory_of(device)
    with (
        memkit.LayerOffload(model, offload_ratio=1.0, train="host", device=device) as layers,
        memkit.StateOffload(optimizer, device=device, update="device") as states,
    ):
        held = memory.held()
        assert held["LayerOffload's slots"] == sum(layers.plan.slot_bytes)
        assert held["StateOffload's slots"] + held["what StateOffload could undo"] == states.stats().room_bytes
    assert memory.held() == {}


def test_states_hold_nothing_of_the_device_once_they_are_closed() -> None:
    device = ReferenceDevice()
    model, optimizer = _trained()
    with memkit.StateOffload(optimizer, device=device) as states:
        for _ in range(2):
            model(torch.ones(2, 32)).sum().backward()
            optimizer.step()
        undo = weakref.ref(states._on_device._undo._storage)
    assert undo() is None
    assert device_memory_of(device).held() == {}


@pytest.mark.parametrize("strict", [True, False])
def test_budget_that_cannot_be_kept_to_says_what_memkit_holds(strict: bool) -> None:
    device = ReferenceDevice()
    _, optimizer = _trained()
    other = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    said = r"cannot be kept to: .* Of what is there, memkit itself holds .* for StateOffload's slots"

    def steps() -> None:
        for _ in range(4):
            with memkit.MemoryBudget("2KiB", "held", min_bytes=0, strict=strict, device=device):
                loss = other(torch.randn(64, 32)).sum()
            loss.backward()

    with memkit.StateOffload(optimizer, device=device, update="device"):
        if strict:
            with pytest.raises(BudgetInfeasible, match=said):
                steps()
        else:
            with pytest.warns(UserWarning, match=said):
                steps()
