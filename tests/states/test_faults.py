"""After any fault in a step, each parameter and its states are as before it or as after it, and the next step goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import memkit
from memkit.device import ReferenceDevice
from memkit.errors import StateOffloadError
from memkit.transfer import ReferenceDisk
from tests.interrupts import interrupted_after
from tests.states.cases import (
    WAYS,
    DAdapting,
    Net,
    Pair,
    Rebinding,
    ScheduleFree,
    assert_same,
    batch,
    cut,
    is_same,
    make_net,
    make_training,
    offload,
    train,
)

pytestmark = pytest.mark.filterwarnings("ignore:StateOffload. .* steps on the host without its fused kernel")


class Faulty(ReferenceDevice):
    """A device whose calls fail from a chosen one on, as often as asked."""

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


def _failing(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return a subclass whose step fails between the parameters of a piece, or behind them."""

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


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    saved = optimizer.state_dict()["state"]  # which waits, and reads the disk
    return [
        (parameter.detach().clone(), copy.deepcopy(dict(saved.get(number) or {})))
        for number, parameter in enumerate(model.parameters())
    ]


def assert_old_or_new(found: Any, old: Any, new: Any, where: str = "") -> int:
    """Return how many are new."""
    num_new = 0
    for mine, before, after in zip(found, old, new, strict=True):
        assert is_same(mine, before) or is_same(mine, after), where
        num_new += is_same(mine, after) and not is_same(before, after)
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


class Compared:
    """A model that is stepped in one of the ways, and a plain one that is a step ahead."""

    def __init__(
        self,
        device: ReferenceDevice,
        way: str,
        make: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.AdamW(p, lr=1e-2),
        *,
        plain: Callable[[Any], torch.optim.Optimizer] | None = None,
        has_states: bool = True,
        has_master: bool = False,
        **options: Any,
    ) -> None:
        self.device, self.way = device, way
        nets = [make_net(device, dtype=torch.bfloat16 if has_master else torch.float32) for _ in range(2)]
        self.plain, self.model = nets
        self.plain_optimizer, self.optimizer = (plain or make)(self.plain.parameters()), make(self.model.parameters())
        masters = {"master": torch.float32} if has_master else {}
        self.plain_states = offload(self.plain_optimizer, ReferenceDevice(), device_budget="1GiB", **masters)
        self.states = offload(self.optimizer, device, **{**WAYS[way], **masters, **options})
        for net, own in ((self.plain, self.plain_optimizer), (self.model, self.optimizer)):
            train(net, own, device, range(2 * has_states))
        self.states.wait()
        self.begin = copy.deepcopy((self.plain.state_dict(), self.plain_optimizer.state_dict()))
        self.old = snapshot(self.plain, self.plain_optimizer)
        train(self.plain, self.plain_optimizer, device, [5])
        self.new = snapshot(self.plain, self.plain_optimizer)

    def begin_anew(self) -> None:
        self.model.load_state_dict(self.begin[0])
        self.optimizer.load_state_dict(copy.deepcopy(self.begin[1]))
        self.model.zero_grad()

    def backward(self) -> None:
        dtype = next(self.model.parameters()).dtype
        self.model(batch(self.device, 50, dtype)).float().square().mean().backward()

    def step(self) -> None:
        self.optimizer.step()
        self.states.wait()

    def assert_whole(self, where: str = "") -> int:
        """Assert that each parameter is as before the step or as after it. Return how many are as after it."""
        self.states.wait()
        return assert_old_or_new(snapshot(self.model, self.optimizer), self.old, self.new, where)

    def assert_new(self) -> None:
        assert_same(snapshot(self.model, self.optimizer), self.new)

    def assert_goes_on(self, where: str = "") -> None:
        """Assert that the next steps equal those of a plain model in the same state."""
        self.plain.load_state_dict(self.model.state_dict())
        self.plain_optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        for net, own in ((self.plain, self.plain_optimizer), (self.model, self.optimizer)):
            net.zero_grad()
            train(net, own, self.device, range(7, 9))
        self.states.wait()
        self.assert_same_training(where)

    def assert_same_training(self, where: str = "") -> None:
        assert_same(self.model.state_dict(), self.plain.state_dict(), where)
        assert_same(self.optimizer.state_dict(), self.plain_optimizer.state_dict(), where)

    def close(self) -> None:
        for each in (self.states, self.plain_states):
            each.close()
        self.assert_same_training("once closed")
        self.device.synchronize()
        assert not self.device.races


@pytest.mark.slow
@settings(max_examples=100)
@given(
    name=st.sampled_from(sorted(OPTIMIZERS)),
    way=st.sampled_from(sorted(WAYS)),
    at=st.integers(1, 120),
    error=st.sampled_from(ERRORS),
    has_states=st.booleans(),
    again=st.integers(0, 40),
    is_cut=st.booleans(),
    has_master=st.booleans(),
    seed=st.sampled_from([None, 1, 2]),
)
def test_a_fault_of_the_device(name, way, at, error, has_states, again, is_cut, has_master, seed) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if is_cut:
            cut(patch)
        device, options = Faulty(), {"disk": ReferenceDisk(seed=seed, is_late=at % 2 == 0)} if "disk" in way else {}
        has_master = has_master and name != "rebinding"  # which counts beside its states
        make = partial(OPTIMIZERS[name], lambda kind: kind)
        compared = Compared(device, way, make, has_states=has_states, has_master=has_master, **options)
        device.num_calls, device.fails_at = 0, {at: error("injected")}
        is_one_call = way in ("device", "some stay", "host", "disk")  # of `step()`: in the others, a gradient may have gone
        if again and is_one_call:
            device.fails_at[at + again] = error("injected again")
        try:
            compared.backward()
            compared.step()
        except (*ERRORS, StateOffloadError):
            device.fails_at = {}
            try:
                compared.assert_whole()
            except StateOffloadError as lost:
                assert again
                assert is_cut
                assert "Load a checkpoint of the model and the optimizer" in str(lost)  # noqa: PT017
                compared.begin_anew()
                compared.backward()
            compared.step()
            if is_one_call:
                compared.assert_new()
        else:
            compared.assert_new()
        device.fails_at = {}
        compared.assert_whole()
        compared.assert_goes_on()
        compared.close()


@pytest.mark.slow
@settings(max_examples=40)
@given(
    name=st.sampled_from(sorted(OPTIMIZERS)),
    way=st.sampled_from(["device", "some stay", "disk"]),
    at=st.integers(1, 24),
    error=st.sampled_from(ERRORS),
    has_states=st.booleans(),
    is_behind=st.booleans(),
    goes_on=st.booleans(),
    is_cut=st.booleans(),
)
def test_a_fault_of_the_optimizer(name, way, at, error, has_states, is_behind, goes_on, is_cut) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if is_cut:
            cut(patch)
        make, plain = partial(OPTIMIZERS[name], _failing), partial(OPTIMIZERS[name], lambda kind: kind)
        compared = Compared(ReferenceDevice(), way, make, plain=plain, has_states=has_states)
        failing: Any = type(compared.optimizer)
        compared.backward()
        failing.is_behind, failing.num_calls, failing.fails_at = is_behind, 0, {at: error("injected")}
        try:
            compared.step()
        except error:
            compared.assert_whole()
            if goes_on:
                compared.step()
        else:
            goes_on = True
        if goes_on:
            compared.assert_new()
            return
        found = snapshot(compared.model, compared.optimizer)  # with other gradients, all are stepped
        train(compared.model, compared.optimizer, compared.device, [6])
        after = snapshot(compared.model, compared.optimizer)
        assert sum(not is_same(one[0], other[0]) for one, other in zip(after, found, strict=True)) == 9


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


@pytest.mark.parametrize("is_set_to_none", [True, False])
@pytest.mark.parametrize("is_cut", [False, True], indirect=True)
@pytest.mark.usefixtures("is_cut")
def test_gradient_that_a_broken_step_has_unscaled_is_not_stepped_with(is_set_to_none, monkeypatch) -> None:
    pair = Pair(device := ReferenceDevice(), fused=True)
    (plain, model), optimizers = pair.nets, pair.optimizers
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(net: Net, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=is_set_to_none)
        scaler.scale(net(batch(device, 0)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    with memkit.StateOffload(optimizers[1], device=device):
        step(plain, optimizers[0])
        step(model, optimizers[1])
        before = snapshot(model, optimizers[1])
        with monkeypatch.context() as patch:
            patch.setattr(torch.optim.AdamW, "step", interrupted_after(torch.optim.AdamW.step))
            with pytest.raises(KeyboardInterrupt):
                step(model, optimizers[1])
        assert_same(snapshot(model, optimizers[1]), before)
        with pytest.raises(StateOffloadError, match=r"has written to the gradient of parameter 0\.\d.* run the backward again"):
            scaler.step(optimizers[1])
        scaler.update()
        del optimizers[1].grad_scale  # which torch leaves there, and multiplies by
        step(plain, optimizers[0])
        step(model, optimizers[1])
        assert_same(snapshot(model, optimizers[1]), snapshot(plain, optimizers[0]))


def test_an_optimizer_that_turns_out_not_to_be_separable() -> None:
    class Late(DAdapting):
        """Writes its estimate to its groups only after some steps."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["num"] = group.get("num", 0) + 1
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self.state[parameter].setdefault("kept", torch.zeros_like(parameter))
            return super().step(closure) if self.param_groups[0]["num"] > 4 else None

    model, optimizer = make_training(device := ReferenceDevice(), Late)
    with memkit.StateOffload(optimizer, device=device):
        train(model, optimizer, device, range(4))
        before = optimizer.param_groups[0]["d"]
        _give_gradients(model, device, 5)
        with pytest.raises(StateOffloadError, match='two pieces of one step have written different values to "d"'):
            optimizer.step()
        assert optimizer.param_groups[0]["d"] == before
