"""After any fault in a backward that steps streamed layers, each weight and its states are as before or as after the step."""

from __future__ import annotations

import copy
import errno
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import memkit
from memkit.device import ReferenceDevice
from memkit.errors import DiskError, LayerOffloadError, StateOffloadError
from memkit.transfer import ReferenceDisk
from tests.states.cases import assert_same, cut
from tests.states.test_faults import ERRORS, Faulty, _failing, assert_old_or_new, snapshot
from tests.states.test_on_disk import Faults
from tests.weights.cases import Stack, inputs

pytestmark = pytest.mark.slow

KINDS = {"adamw": torch.optim.AdamW, "adafactor": torch.optim.Adafactor}


class _Trained:
    """A model whose layers stream with their states, and a plain one that is a step ahead."""

    def __init__(
        self,
        device: ReferenceDevice,
        kind: type[torch.optim.Optimizer],
        plain_kind: type[torch.optim.Optimizer],
        *,
        has_master: bool = False,
        has_states: bool = True,
        disk: memkit.Disk | None = None,
    ) -> None:
        self.device, self.dtype = device, torch.bfloat16 if has_master else torch.float32
        torch.manual_seed(0)
        self.plain = Stack(3).to(self.dtype)
        self.model = copy.deepcopy(self.plain)
        self.layers = memkit.LayerOffload(
            self.model, offload_ratio=1.0, num_slots=2, optimizer=lambda given: kind(given, lr=1e-2), device=device
        )
        assert self.layers.optimizer is not None
        self.optimizer = self.layers.optimizer
        options: dict[str, Any] = {"master": torch.float32} if has_master else {}
        self.states = memkit.StateOffload(self.optimizer, when="backward", disk=disk, device=device, **options)
        self.plain_optimizer = plain_kind(self.plain.parameters(), lr=1e-2)
        self.plain_states = memkit.StateOffload(self.plain_optimizer, device=ReferenceDevice(), **options)
        for _ in range(2 if has_states else 0):
            self.step_plain()
        self.begin = copy.deepcopy((self.plain.state_dict(), self.plain_optimizer.state_dict()))
        self.old = snapshot(self.plain, self.plain_optimizer)  # type: ignore[arg-type]
        self.step_plain()
        self.new = snapshot(self.plain, self.plain_optimizer)  # type: ignore[arg-type]
        self.begin_anew()

    def begin_anew(self) -> None:
        self.model.load_state_dict(self.begin[0])
        self.optimizer.load_state_dict(copy.deepcopy(self.begin[1]))

    def loss_of(self, model: nn.Module) -> torch.Tensor:
        return model(inputs(self.device, 1)[0].to(self.dtype)).float().square().mean()

    def step(self) -> None:
        self.loss_of(self.model).backward()

    def step_plain(self) -> None:
        self.loss_of(self.plain).backward()
        self.plain_optimizer.step()
        self.plain_optimizer.zero_grad()

    def assert_whole(self) -> int:
        """Assert that each parameter is old or new, with its states. Return how many are new."""
        with torch.no_grad():
            self.model(inputs(self.device, 1)[0].to(self.dtype))  # which finishes interrupted work
        return assert_old_or_new(snapshot(self.model, self.optimizer), self.old, self.new)  # type: ignore[arg-type]

    def assert_goes_on(self) -> None:
        """Assert that the next step equals that of a plain model in the same state."""
        self.plain.load_state_dict(self.model.state_dict())
        self.plain_optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        self.step()
        self.step_plain()
        assert_same(self.plain.state_dict(), self.model.state_dict())
        assert_same(self.plain_optimizer.state_dict()["state"], self.optimizer.state_dict()["state"])

    def close(self) -> None:
        for each in (self.states, self.layers, self.plain_states):
            each.close()
        self.device.synchronize()
        assert not self.device.races


@pytest.mark.slow
@settings(max_examples=30)
@given(
    name=st.sampled_from(sorted(KINDS)),
    at=st.integers(1, 260),
    error=st.sampled_from(ERRORS),
    has_states=st.booleans(),
    has_master=st.booleans(),
    is_cut=st.booleans(),
    disk=st.sampled_from([None, None, ReferenceDisk(), ReferenceDisk(seed=1), ReferenceDisk(is_late=False)]),
)
def test_a_fault_of_the_device(
    name: str,
    at: int,
    error: type[BaseException],
    has_states: bool,
    has_master: bool,
    is_cut: bool,
    disk: memkit.Disk | None,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if is_cut:
            cut(patch)
        device, kind = Faulty(), KINDS[name]
        trained = _Trained(device, kind, kind, has_master=has_master, has_states=has_states, disk=disk)
        loss = trained.loss_of(trained.model)
        device.num_calls, device.fails_at = 0, {at: error("injected")}
        try:
            loss.backward()
        except (*ERRORS, StateOffloadError, LayerOffloadError):
            device.fails_at = {}
            trained.assert_whole()
            trained.begin_anew()
        device.fails_at = {}
        trained.assert_goes_on()
        trained.close()


@pytest.mark.core(1)
@pytest.mark.parametrize("is_behind", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id=""),
        pytest.param({"has_states": False}, id="new"),
        pytest.param({"has_master": True}, id="master"),
        pytest.param({"disk": ReferenceDisk()}, id="disk", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", ["adamw", pytest.param("adafactor", marks=pytest.mark.slow)])
def test_a_fault_of_the_optimizer(name: str, options: dict[str, Any], is_behind: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer fails in its step of a parameter, ahead of its last line or behind it: that parameter is unchanged."""
    cut(monkeypatch)
    kind: Any = _failing(KINDS[name])
    trained = _Trained(ReferenceDevice(), kind, KINDS[name], **options)
    kind.is_behind = is_behind
    num_new = []
    for at in (1, 4, 9):
        trained.begin_anew()
        kind.num_calls, kind.fails_at = 0, {at: ArithmeticError("no")}
        with pytest.raises(ArithmeticError):
            trained.step()
        num_new.append(trained.assert_whole())
        trained.optimizer.step()
        assert trained.assert_whole() == num_new[-1]
        assert trained.layers.stats().num_overflows == 0

    assert num_new[0] == 0
    assert num_new[2] > num_new[1] > 0 or num_new[2] > 0
    trained.assert_goes_on()
    trained.close()


def test_large_parameter_whose_rest_fails_as_well_is_refused_until_states_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    cut(monkeypatch)
    kind: Any = _failing(torch.optim.AdamW)
    trained = _Trained(ReferenceDevice(), kind, torch.optim.AdamW)
    number = next(n for n, piece in enumerate(reversed(trained.states.plan.pieces)) if len(piece.windows) > 1)
    kind.num_calls, kind.fails_at = 0, {number + at: ArithmeticError("no") for at in (2, 3)}
    with pytest.raises(StateOffloadError, match="The rest failed: ArithmeticError: no"):
        trained.step()
    with pytest.raises(StateOffloadError, match=r"a part of the parameter.* Load a checkpoint"):
        trained.step()

    trained.begin_anew()
    trained.assert_goes_on()
    assert trained.layers.stats().num_overflows == 0
    trained.close()


@pytest.mark.slow
@settings(max_examples=20)
@given(
    what=st.sampled_from(["read", "write"]),
    at=st.integers(0, 24),
    number=st.sampled_from([errno.EIO, errno.ENOSPC]),
    lasts=st.booleans(),
    has_states=st.booleans(),
    is_cut=st.booleans(),
    is_late=st.booleans(),
)
def test_a_disk_that_fails(what: str, at: int, number: int, lasts: bool, has_states: bool, is_cut: bool, is_late: bool) -> None:
    """Each weight is as before the step or as after it, with its states, and the next backward goes on."""
    with pytest.MonkeyPatch.context() as patch:
        if is_cut:
            cut(patch)
        faults = Faults()
        disk = ReferenceDisk(fault=faults, is_late=is_late)
        trained = _Trained(ReferenceDevice(), torch.optim.AdamW, torch.optim.AdamW, has_states=has_states, disk=disk)
        faults.arm(what, at, number, lasts=lasts)
        try:
            trained.step()
        except (DiskError, StateOffloadError, LayerOffloadError):
            faults.disarm()
            try:
                trained.assert_whole()
            except StateOffloadError as error:
                assert is_cut
                assert lasts
                assert "a part of the parameter" in str(error)  # noqa: PT017
                trained.begin_anew()  # its layer has left the slot: a checkpoint is loaded, as the error says
        faults.disarm()
        trained.assert_goes_on()
        trained.close()
