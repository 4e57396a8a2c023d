"""Whatever breaks a step off, each parameter and its states are as before it or as after it, and the next step goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import memkit
from memkit.device import ReferenceDevice
from memkit.errors import StateOffloadError
from memkit.plan import states as state_pieces
from memkit.states import trial
from memkit.transfer import ReferenceDisk
from tests.states.cases import DAdapting, Net, Rebinding, ScheduleFree, assert_same, batch, make_net, train

pytestmark = pytest.mark.filterwarnings("ignore:StateOffload. .* steps on the host without its fused kernel")


class Faulty(ReferenceDevice):
    """A device whose next calls fail, from a chosen one on as often as asked."""

    def __init__(self) -> None:
        super().__init__()
        self.fails_at: dict[int, BaseException] = {}
        self.num_calls = 0

    def _count(self) -> None:
        self.num_calls += 1
        error = self.fails_at.pop(self.num_calls, None)
        if error is not None:
            raise error

    def copy(self, *args: Any) -> None:
        self._count()
        super().copy(*args)

    def allocate(self, num_bytes: int) -> torch.UntypedStorage:
        self._count()
        return super().allocate(num_bytes)

    def record_event(self, *args: Any, **options: Any) -> Any:
        self._count()
        return super().record_event(*args, **options)


def _cut(patch: pytest.MonkeyPatch) -> None:
    """Have matrices be stepped in three windows each."""
    patch.setattr(state_pieces, "PIECE_BYTES", 1200)
    patch.setattr(state_pieces, "WINDOW_NUMEL", 256)
    patch.setattr(trial, "WINDOW_NUMEL", 256)


def _failing(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return a class like another whose step fails between the parameters of a piece, or behind them."""

    class Failing(kind):  # type: ignore[misc, valid-type]
        fails_at: dict[int, BaseException] = {}  # noqa: RUF012
        num_calls = 0
        is_behind = False

        def step(self, closure: Any = None) -> Any:
            Failing.num_calls += 1
            error = Failing.fails_at.pop(Failing.num_calls, None)
            if error is not None:
                if Failing.is_behind:
                    super().step(closure)
                else:  # half of it
                    for parameter in self.param_groups[0]["params"][:1]:
                        with torch.no_grad():
                            parameter.mul_(2.0)
                            for value in self.state.get(parameter, {}).values():
                                if isinstance(value, torch.Tensor):
                                    value.add_(1.0)
                raise error
            return super().step(closure)

    return Failing


def _snapshot(model: Net, optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    saved = optimizer.state_dict()["state"]  # which waits, and reads what is on a disk
    return [
        (parameter.detach().clone(), copy.deepcopy(dict(saved.get(number) or {})))
        for number, parameter in enumerate(model.parameters())
    ]


def _is_same(one: Any, other: Any) -> bool:
    try:
        assert_same(one, other)
    except AssertionError:
        return False
    return True


def _assert_old_or_new(found: Any, old: Any, new: Any, where: str = "") -> int:
    """Return how many are new."""
    num_new = 0
    for mine, before, after in zip(found, old, new, strict=True):
        assert _is_same(mine, before) or _is_same(mine, after), where
        num_new += _is_same(mine, after) and not _is_same(before, after)
    return num_new


def _give_gradients(model: Net, device: ReferenceDevice, step: int) -> None:
    model.zero_grad()
    model(batch(device, step)).square().mean().backward()


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda kind, p: kind(torch.optim.AdamW)(p, lr=1e-2, foreach=True),
    "fused": lambda kind, p: kind(torch.optim.AdamW)(p, lr=1e-2, fused=True),
    "schedule free": lambda kind, p: kind(ScheduleFree)(p),
    "rebinding": lambda kind, p: kind(Rebinding)(p),
}
ERRORS = [KeyboardInterrupt, torch.OutOfMemoryError, RuntimeError]


@pytest.mark.slow
@settings(max_examples=25)
@given(
    name=st.sampled_from(sorted(OPTIMIZERS)),
    update=st.sampled_from(["device", "device", "host", "disk", "disk"]),
    budget=st.sampled_from([0, 16384]),
    at=st.integers(1, 120),
    error=st.sampled_from(ERRORS),
    has_states=st.booleans(),
    again=st.integers(0, 40),
    is_cut=st.booleans(),
)
def test_a_fault_of_the_device(
    name: str, update: str, budget: int, at: int, error: type[BaseException], has_states: bool, again: int, is_cut: bool
) -> None:
    options: dict[str, Any] = {"disk": ReferenceDisk(seed=at % 3 or None)} if update == "disk" else {"update": update}
    with pytest.MonkeyPatch.context() as patch:
        if is_cut:
            _cut(patch)
        device = Faulty()
        plain, model = make_net(device), make_net(device)
        plain_optimizer, optimizer = (OPTIMIZERS[name](lambda kind: kind, net.parameters()) for net in (plain, model))
        with memkit.StateOffload(optimizer, device=device, device_budget=budget, **options):
            steps = 2 if has_states else 0
            train(plain, plain_optimizer, device, range(steps))
            train(model, optimizer, device, range(steps))
            old = _snapshot(plain, plain_optimizer)
            for net in (plain, model):
                _give_gradients(net, device, 5)
            plain_optimizer.step()
            new = _snapshot(plain, plain_optimizer)

            device.num_calls, device.fails_at = 0, {at: error("injected")}
            if again:
                device.fails_at[at + again] = error("injected again")
            has_failed = False
            try:
                optimizer.step()
            except (*ERRORS, StateOffloadError):
                has_failed = True
            device.fails_at = {}
            try:
                num_new = _assert_old_or_new(_snapshot(model, optimizer), old, new)
            except StateOffloadError as lost:
                assert again
                said = str(lost)
                assert "Load a checkpoint of the model and the optimizer" in said
                model.load_state_dict(plain.state_dict())
                optimizer.load_state_dict(plain_optimizer.state_dict())
            else:
                assert num_new or has_failed
                if has_failed:
                    optimizer.step()
            assert_same(_snapshot(model, optimizer), new)
            assert_same(plain_optimizer.state_dict(), optimizer.state_dict())
            train(plain, plain_optimizer, device, range(7, 9))
            train(model, optimizer, device, range(7, 9))
            assert_same(plain.state_dict(), model.state_dict())
        device.synchronize()
        assert not device.races


@pytest.mark.slow
@settings(max_examples=20)
@given(
    name=st.sampled_from(sorted(OPTIMIZERS)),
    budget=st.sampled_from([0, 16384]),
    at=st.integers(1, 24),
    error=st.sampled_from(ERRORS),
    has_states=st.booleans(),
    is_behind=st.booleans(),
    goes_on=st.booleans(),
    is_cut=st.booleans(),
    disk=st.sampled_from([None, None, ReferenceDisk(), ReferenceDisk(seed=1)]),
)
def test_a_fault_of_the_optimizer(
    name: str,
    budget: int,
    at: int,
    error: type[BaseException],
    has_states: bool,
    is_behind: bool,
    goes_on: bool,
    is_cut: bool,
    disk: memkit.Disk | None,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if is_cut:
            _cut(patch)
        _fail_within_the_optimizer(name, budget, at, error, has_states, is_behind, goes_on, disk)


def _fail_within_the_optimizer(
    name: str,
    budget: int,
    at: int,
    error: type[BaseException],
    has_states: bool,
    is_behind: bool,
    goes_on: bool,
    disk: memkit.Disk | None,
) -> None:
    device = ReferenceDevice()
    plain, model = make_net(device), make_net(device)
    plain_optimizer = OPTIMIZERS[name](lambda kind: kind, plain.parameters())
    optimizer = OPTIMIZERS[name](_failing, model.parameters())
    failing: Any = type(optimizer)
    with memkit.StateOffload(optimizer, device=device, device_budget=budget, disk=disk):
        steps = 2 if has_states else 0
        train(plain, plain_optimizer, device, range(steps))
        train(model, optimizer, device, range(steps))
        old = _snapshot(plain, plain_optimizer)
        for net in (plain, model):
            _give_gradients(net, device, 5)
        plain_optimizer.step()
        new = _snapshot(plain, plain_optimizer)

        failing.is_behind, failing.num_calls, failing.fails_at = is_behind, 0, {at: error("injected")}
        try:
            optimizer.step()
        except error:
            _assert_old_or_new(_snapshot(model, optimizer), old, new)
            if goes_on:
                optimizer.step()
        else:
            goes_on = True
        if goes_on:
            assert_same(_snapshot(model, optimizer), new)
            assert_same(plain_optimizer.state_dict(), optimizer.state_dict())
        else:  # other gradients: all are stepped
            found = _snapshot(model, optimizer)
            _give_gradients(model, device, 6)
            optimizer.step()
            moved = [
                not _is_same(one[0], other[0])
                for one, other, parameter in zip(_snapshot(model, optimizer), found, model.parameters(), strict=True)
                if parameter.grad is not None and parameter.grad.count_nonzero()
            ]
            assert all(moved)


def test_an_error_says_what_was_stepped() -> None:
    device = ReferenceDevice()
    model = make_net(device)
    optimizer = _failing(torch.optim.AdamW)(model.parameters())
    with memkit.StateOffload(optimizer, device=device):
        train(model, optimizer, device, range(2))
        kind: Any = type(optimizer)
        kind.num_calls, kind.fails_at = 0, {3: ArithmeticError("no")}
        _give_gradients(model, device, 3)

        with pytest.raises(ArithmeticError) as caught:
            optimizer.step()

    (note,) = caught.value.__notes__
    assert "of 9 parameters were stepped; each is as before or as after the step" in note


@pytest.mark.parametrize("is_cut", [False, True])
def test_gradient_that_a_broken_step_has_unscaled_is_not_stepped_with(is_cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_cut:
        _cut(monkeypatch)
    device = ReferenceDevice()
    plain, model = make_net(device), make_net(device)
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True) for net in (plain, model)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(net: Net, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(net(batch(device, 0)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    with memkit.StateOffload(optimizers[1], device=device):
        step(plain, optimizers[0])
        step(model, optimizers[1])
        before = _snapshot(model, optimizers[1])
        with monkeypatch.context() as patch:
            patch.setattr(torch.optim.AdamW, "step", _interrupted(torch.optim.AdamW.step))
            with pytest.raises(KeyboardInterrupt):
                step(model, optimizers[1])
        assert_same(_snapshot(model, optimizers[1]), before)
        with pytest.raises(StateOffloadError, match=r"has written to the gradient of parameter 0\.\d.* run the backward again"):
            scaler.step(optimizers[1])
        scaler.update()
        del optimizers[1].grad_scale  # which torch leaves there, and multiplies by
        step(plain, optimizers[0])
        step(model, optimizers[1])
        assert_same(_snapshot(model, optimizers[1]), _snapshot(plain, optimizers[0]))


def _interrupted(call: Callable[..., Any]) -> Callable[..., Any]:
    def step(*args: Any, **options: Any) -> None:
        call(*args, **options)
        raise KeyboardInterrupt

    return step


def test_an_optimizer_that_turns_out_not_to_be_separable() -> None:
    class Late(DAdapting):
        """Writes to its groups what it has found only after some steps."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["num"] = group.get("num", 0) + 1
            if self.param_groups[0]["num"] > 4:
                return super().step(closure)
            return None

    device = ReferenceDevice()
    model = make_net(device)
    optimizer = Late(model.parameters())
    with memkit.StateOffload(optimizer, device=device, master=None, update="device") as states:
        assert states.plan.is_empty  # it keeps nothing, so nothing is stepped in pieces

    class LateWithStates(Late):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self.state[parameter].setdefault("kept", torch.zeros_like(parameter))
            return super().step(closure)

    optimizer = LateWithStates(model.parameters())
    with memkit.StateOffload(optimizer, device=device):
        train(model, optimizer, device, range(4))
        before = optimizer.param_groups[0]["d"]
        _give_gradients(model, device, 5)
        with pytest.raises(StateOffloadError, match='two pieces of one step have written different values to "d"'):
            optimizer.step()
        assert optimizer.param_groups[0]["d"] == before


@pytest.mark.slow
@settings(max_examples=80)
@given(
    name=st.sampled_from(sorted(OPTIMIZERS)),
    at=st.integers(1, 120),
    error=st.sampled_from(ERRORS),
    has_states=st.booleans(),
    overlaps=st.booleans(),
    is_cut=st.booleans(),
    update=st.sampled_from(["device", "device", "host"]),
)
def test_a_fault_within_a_backward_or_beside_a_forward(
    name: str, at: int, error: type[BaseException], has_states: bool, overlaps: bool, is_cut: bool, update: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if is_cut:
            _cut(patch)
        _fail_within_a_backward_or_beside_a_forward(name, at, error, has_states, overlaps, update)


def _fail_within_a_backward_or_beside_a_forward(
    name: str, at: int, error: type[BaseException], has_states: bool, overlaps: bool, update: str
) -> None:
    device = Faulty()
    plain, model = make_net(device), make_net(device)
    plain_optimizer, optimizer = (OPTIMIZERS[name](lambda kind: kind, net.parameters()) for net in (plain, model))
    options: dict[str, Any] = {"update": update} | ({"overlap_forward": True} if overlaps else {"when": "backward"})
    with memkit.StateOffload(optimizer, device=device, **options) as states:
        steps = 2 if has_states else 0
        train(plain, plain_optimizer, device, range(steps))
        train(model, optimizer, device, range(steps))
        states.wait()
        old = _snapshot(plain, plain_optimizer)
        _give_gradients(plain, device, 5)
        plain_optimizer.step()
        new = _snapshot(plain, plain_optimizer)

        model.zero_grad()
        loss = model(batch(device, 5)).square().mean()
        if overlaps:
            loss.backward()
        device.num_calls, device.fails_at = 0, {at: error("injected")}
        try:
            optimizer.step() if overlaps else loss.backward()
            if update == "device":
                device.fails_at = {}
            states.wait()  # for what is stepped on the host
        except (*ERRORS, StateOffloadError):
            device.fails_at = {}
            states.wait()
            _assert_old_or_new(_snapshot(model, optimizer), old, new)
            optimizer.step()
        else:
            device.fails_at = {}
            if not overlaps:
                optimizer.step()
        states.wait()
        num_new = _assert_old_or_new(_snapshot(model, optimizer), old, new)
        assert num_new == sum(not _is_same(one, other) for one, other in zip(old, new, strict=True)) or not overlaps
        optimizer.zero_grad()
        train(model, optimizer, device, range(7, 9))
        states.wait()
    device.synchronize()
    assert not device.races
