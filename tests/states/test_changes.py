"""Changes between two steps: groups, missing gradients, new or moved states, precisions."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memkit.device import Device, ReferenceDevice
from memkit.plan import StatePiece
from memkit.plan.states import Update
from memkit.states.at_rest import StatesAtRest
from memkit.states.memory import DiskStates, HostStates
from memkit.states.pieces import Piece, StateRecord
from tests.states.cases import PerParameter, assert_same, cut, offload

pytestmark = [
    pytest.mark.filterwarnings("ignore:StateOffload. .* steps on the host without its fused kernel"),
]
UPDATES = ["device", "host"]


@pytest.fixture
def device() -> Device:
    """A device whose results are those of plain CPU steps."""
    return ReferenceDevice()


def make(count: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(8, 8, generator=generator).to(dtype)) for _ in range(count)]


def give_grads(parameters: list[nn.Parameter], step: int, without: Collection[int] = ()) -> None:
    """Give parameters the gradients of a step, but for those at some places."""
    for index, parameter in enumerate(parameters):
        generator = torch.Generator().manual_seed(1000 * step + index)
        grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = None if index in without else grad


Optimizers = Callable[[list[nn.Parameter]], Any]
Loop = Callable[[list[nn.Parameter], Any], Any]


def assert_as_plain(
    device: Device, start: Callable[[], list[nn.Parameter]], optimizer: Optimizers, loop: Loop, **options: Any
) -> None:
    """Assert that a loop has the same parameters and states as without offload, while it streams and once it is closed."""
    plain, parameters = start(), start()
    plain_optimizer, own = optimizer(plain), optimizer(parameters)
    loop(plain, plain_optimizer)
    with offload(own, device, **options):
        loop(parameters, own)
        assert_same(plain, parameters, "parameters")
        assert_same(plain_optimizer.state_dict(), own.state_dict(), "states")
    assert_same(plain_optimizer.state_dict(), own.state_dict(), "states once closed")


def fused(parameters: list[nn.Parameter]) -> Any:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


class Scaled(PerParameter):
    """Scales the step of each parameter by a factor that the user has set on it."""

    def step_one(self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any]) -> None:
        mean = state.setdefault("mean", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
        parameter.sub_(mean * getattr(parameter, "scale", 1.0), alpha=group["lr"])


@pytest.mark.parametrize("master", [None, torch.float32])
@pytest.mark.parametrize("update", UPDATES)
def test_what_the_user_puts_on_parameters_between_steps(device: Device, monkeypatch: Any, update: str, master: Any) -> None:
    """The two large ones are stepped in windows."""
    cut(monkeypatch)
    dtype = torch.float32 if master is None else torch.bfloat16
    ends = []
    for factors in ([1.0, 0.5, 0.0], [1.0, 1.0, 1.0]):
        generator = torch.Generator().manual_seed(0)
        large = [nn.Parameter(torch.randn(24, 64, generator=generator).to(dtype)) for _ in range(2)]
        parameters = [*make(4, dtype=dtype), *large]
        optimizer = Scaled(parameters, lr=0.1)
        with offload(optimizer, device, update=update, master=master):
            for step, factor in enumerate(factors):
                give_grads(parameters, step)
                for parameter in parameters:
                    parameter.scale = factor  # type: ignore[attr-defined]
                before = [parameter.detach().clone() for parameter in parameters]
                optimizer.step()
        is_as_before = [torch.equal(one, other) for one, other in zip(before, parameters, strict=True)]
        ends.append(is_as_before)

    assert ends == [[True] * 6, [False] * 6]


@pytest.mark.filterwarnings("ignore:StateOffload. states of")
@pytest.mark.parametrize("update", UPDATES)
def test_parameters_that_become_float64(device: Device, update: str) -> None:
    def loop(parameters: list[nn.Parameter], optimizer: Any) -> None:
        give_grads(parameters, 0)
        optimizer.step()
        for parameter in parameters:
            parameter.grad = None
            parameter.data = parameter.data.double()
        for entries in optimizer.state.values():
            entries["momentum_buffer"] = entries["momentum_buffer"].double()
        for step in range(1, 4):
            give_grads(parameters, step)
            optimizer.step()

    assert_as_plain(device, lambda: make(9), lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9), loop, update=update)


class Breaking(PerParameter):
    """Steps, and then fails if told so."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.1)
        self.told = {"fails": False}

    def step(self, closure: Any = None) -> Any:
        super().step()
        if self.told["fails"] and any(group["params"] for group in self.param_groups):
            raise ArithmeticError("no")

    def step_one(self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any]) -> None:
        parameter.sub_(state.setdefault("mean", torch.zeros_like(parameter)).add_(parameter.grad), alpha=0.1)


@pytest.mark.filterwarnings("ignore:StateOffload. states of")
@pytest.mark.parametrize("becomes_double", [False, True])
def test_a_step_of_others_than_before_is_undone(device: Device, becomes_double: bool) -> None:
    """More parameters, or others in precision."""
    parameters = make(48)
    optimizer = Breaking(parameters)
    with offload(optimizer, device):
        give_grads(parameters, 0, without=() if becomes_double else range(0, 48, 3))
        optimizer.step()
        for parameter in parameters if becomes_double else ():
            parameter.grad = None
            parameter.data = parameter.data.double() + 1e-12
        give_grads(parameters, 1)
        before: list[Tensor] = [parameter.detach().clone() for parameter in parameters]
        optimizer.told["fails"] = True
        with pytest.raises(ArithmeticError):
            optimizer.step()
        assert_same(before, [parameter.detach() for parameter in parameters])


@pytest.mark.parametrize("has_step_on_device", [False, True])
def test_states_without_dimensions_go_back_to_where_the_parameter_is(device: Device, has_step_on_device: bool) -> None:
    parameter = nn.Parameter(torch.zeros((), device="meta"))
    optimizer = torch.optim.AdamW([parameter], capturable=has_step_on_device)
    optimizer.state[parameter] = {"step": torch.ones(()), "exp_avg": torch.ones(()), "exp_avg_sq": torch.ones(())}
    record = StateRecord("scale", parameter, has_master=False)
    record.group = record.position = 0
    sizes = {"parameter_bytes": 512, "gradient_bytes": 512, "sent_bytes": 1024, "state_bytes": 0, "numel": 1}
    plan = StatePiece(parameters=(0,), slot=0, update=Update.HOST, **sizes)
    host = HostStates(device, limit_bytes=None)
    rest = StatesAtRest(optimizer, device, host, DiskStates(None, device, host))

    rest.give_back([Piece(plan, [record])])

    places = {name: value.device.type for name, value in optimizer.state[parameter].items()}
    assert places == {"step": "meta" if has_step_on_device else "cpu", "exp_avg": "meta", "exp_avg_sq": "meta"}
