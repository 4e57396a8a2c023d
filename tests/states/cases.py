"""Models, optimizers and loops that tests step with and without `StateOffload`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.device import Device
from memkit.plan import states as state_pieces
from memkit.states import trial
from memkit.transfer import ReferenceDisk
from tests.weights.wrapped import Int8

Make = Callable[[Any], torch.optim.Optimizer]


class PerParameter(torch.optim.Optimizer):
    """Steps each parameter that has a gradient by itself."""

    def __init__(self, params: Any, lr: float = 1e-2, **defaults: Any) -> None:
        super().__init__(params, {"lr": lr, **defaults})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.step_one(group, parameter, self.state[parameter])

    def step_one(self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any]) -> None:
        raise NotImplementedError


class ScheduleFree(torch.optim.Optimizer):
    """Keeps the count of its steps and a sum of weights in its groups, as schedule-free optimizers do."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "weight_sum": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            k = group["k"]
            weight = (k + 1) ** 2 * group["lr"]
            group["weight_sum"] = weight_sum = group["weight_sum"] + weight
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "z" not in state:
                    state["z"] = parameter.clone()
                    state["square"] = torch.zeros_like(parameter)
                state["square"].mul_(0.9).addcmul_(parameter.grad, parameter.grad, value=0.1)
                state["z"].addcdiv_(parameter.grad, state["square"].sqrt().add_(1e-6), value=-group["lr"])
                parameter.lerp_(state["z"], weight / weight_sum)
            group["k"] = k + 1
        return None


class BeginsInEvalMode(ScheduleFree):
    """Raises at a step in eval mode, in which it begins; its modes have other weights. It is not made of parameters alone."""

    def __init__(self, params: Any, *, beta: float) -> None:
        super().__init__(params)
        self.beta = beta
        for group in self.param_groups:
            group["train_mode"] = False

    def train(self) -> None:
        self._swap(1 - self.beta, trains=True)

    def eval(self) -> None:
        self._swap(1 - 1 / self.beta, trains=False)

    @torch.no_grad()
    def _swap(self, weight: float, *, trains: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not trains:
                group["train_mode"] = trains
                for parameter in group["params"]:
                    if "z" in self.state[parameter]:
                        parameter.lerp_(self.state[parameter]["z"].to(parameter.device), weight)

    def step(self, closure: Any = None) -> Any:
        if not self.param_groups[0]["train_mode"]:
            raise Exception("Optimizer was not in train mode when step is called")
        return super().step(closure)


class Early(PerParameter):
    """Makes its states at construction, as `Adagrad` does in some releases of torch, and not in a step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"sum": torch.full_like(parameter, 0.125), "step": torch.zeros(())}

    def step_one(self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any]) -> None:
        state["step"] += 1
        state["sum"].addcmul_(parameter.grad, parameter.grad)
        parameter.addcdiv_(parameter.grad, state["sum"].sqrt(), value=-group["lr"] / float(state["step"]))


class Rebinding(PerParameter):
    """A user-made one: it replaces its tensors by new ones, counts in a plain number, and in an attribute."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.num_steps = 0

    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        super().step()

    def step_one(self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any]) -> None:
        state["count"] = state.get("count", 0) + 1
        state["mean"] = state.get("mean", torch.zeros_like(parameter)) * 0.9 + parameter.grad
        parameter -= group["lr"] * state["mean"] / (state["count"] + self.num_steps)


class Odd(PerParameter):
    """Exchanges its states, sets the data of parameters, and begins anew every fourth step."""

    def step_one(self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any]) -> None:
        state["count"] = state.get("count", 0) + 1
        if state["count"] % 4 == 0:
            state.clear()
            return
        older, old = state.get("old", parameter.grad * 0.5), state.get("older", parameter.grad * 0.25)
        state["old"], state["older"] = old, older
        old.mul_(0.9).add_(parameter.grad)
        parameter.data = parameter.data - group["lr"] * (old + 0.5 * older)


class FailsOnHost(torch.optim.SGD):
    """Fails in the step of a piece, counted from 1, in the thread that steps on the host, once told so."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.told: dict[str, Any] = {"fails": 0, "await": None}

    def step(self, closure: Any = None) -> Any:
        if threading.current_thread().name.startswith("memkit-step"):
            self.told["fails"] -= 1
            if self.told["fails"] == 0:
                assert self.told["await"] is None or self.told["await"].wait(60)
                raise ArithmeticError("no")
        return super().step(closure)


class DAdapting(torch.optim.Optimizer):
    """Estimates one step size from the gradients of all its parameters."""

    def __init__(self, params: Any, d: float = 1e-3) -> None:
        super().__init__(params, {"d": d})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            total = 0.0
            for parameter in group["params"]:
                if parameter.grad is not None:
                    total += float(parameter.grad.norm())
                    parameter.add_(parameter.grad, alpha=-group["d"])
            group["d"] += 1e-3 * total
        return None


class GlobalNorm(torch.optim.Optimizer):
    """Clips by the norm of all gradients within its step, and keeps the norm nowhere."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([grad.norm() for grad in grads]).norm() if grads else torch.ones(())
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad / norm)
        return None


class EightBit(PerParameter):
    """Keeps states of one byte per element, tensors that wrap others, as low-bit optimizers do."""

    def step_one(self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any]) -> None:
        if "mean" not in state:
            state["mean"] = Int8.quantized(torch.full_like(parameter, 1e-6))
            state["step"] = torch.zeros(())
        mean = state["mean"].dequantize() * 0.9 + parameter.grad
        parameter.sub_(mean, alpha=group["lr"])
        state["mean"].copy_(Int8.quantized(mean))
        state["step"] += 1


@dataclass(frozen=True)
class Case:
    name: str
    make: Make

    def __str__(self) -> str:
        return self.name


def _variants(kind: Any, fused: bool = False, **options: Any) -> Iterable[Case]:
    name = kind.__name__
    for foreach in (False, True):
        label = "foreach" if foreach else "loop"
        yield Case(f"{name} {label}", lambda p, foreach=foreach: kind(p, foreach=foreach, **options))
    if fused:
        yield Case(f"{name} fused", lambda p: kind(p, fused=True, **options))


OPTIMIZERS = [
    *_variants(torch.optim.Adam, fused=True, lr=1e-2, amsgrad=True),
    *_variants(torch.optim.AdamW, fused=True, lr=1e-2),
    *_variants(torch.optim.NAdam, lr=1e-2),
    *_variants(torch.optim.RAdam, lr=1e-2),
    *_variants(torch.optim.Adamax, lr=1e-2),
    *_variants(torch.optim.Adadelta),
    *_variants(torch.optim.Adagrad, lr=1e-2),
    *_variants(torch.optim.RMSprop, lr=1e-2, momentum=0.9, centered=True),
    *_variants(torch.optim.Rprop, lr=1e-2),
    *_variants(torch.optim.ASGD, lr=1e-2),
    *_variants(torch.optim.SGD, fused=True, lr=1e-2, momentum=0.9),
    *_variants(torch.optim.Adafactor, lr=1e-2),
    Case("Muon", lambda p: torch.optim.Muon(p, lr=1e-2)),
    Case("AdamW lr tensor", lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), foreach=False)),
    Case("schedule free", ScheduleFree),
    Case("rebinding", Rebinding),
    Case("early", Early),
]
"""Every dense class of `torch.optim`, in each of its ways, and some user-made ones."""
_OFTEN = (
    *("Adam loop", "AdamW fused", "RMSprop foreach", "SGD fused", "Adafactor loop", "Muon", "AdamW lr tensor", "schedule free"),
    "rebinding",
)
"""One for each way of stepping and each kind of state: scalars on the host, tensors smaller than the parameter, groups that
count, new tensors in place of old ones."""


def often(cases: Iterable[Case]) -> list[Any]:
    """Return cases as parameters of a test; a plain pytest run has one of each kind."""
    return [case if case.name in _OFTEN else pytest.param(case, marks=pytest.mark.slow) for case in cases]


WAYS: dict[str, dict[str, Any]] = {
    "device": {},
    "some stay": {"device_budget": 8192},
    "host": {"update": "host"},
    "host, some stay": {"update": "host", "device_budget": 8192},
    "backward": {"when": "backward"},
    "backward, some stay": {"when": "backward", "device_budget": 8192},
    "backward, host": {"when": "backward", "update": "host"},
    "beside": {"overlap_forward": True},
    "beside, some stay": {"overlap_forward": True, "device_budget": 8192},
    "beside, host": {"overlap_forward": True, "update": "host", "device_budget": 8192},
    "disk": {"disk": ReferenceDisk()},
    "backward, disk": {"when": "backward", "disk": ReferenceDisk(seed=5)},
}
"""Options of a `StateOffload`: each way of stepping."""


def in_all_ways(cases: Iterable[Case]) -> list[Any]:
    """Return usual cases with the name of each way, the others with some; every other one with large parameters in windows. A
    plain pytest run has all cases on the device, and in each other way some of the usual ones."""
    usual, found = list(_OFTEN), []
    for number, case in enumerate(cases):
        for place, way in enumerate(WAYS):
            if way != "device" and case.name not in usual and (number + place) % 4:
                continue
            is_usual = case.name in usual and (usual.index(case.name) + place) % 5 == 0
            marks = () if way == "device" or is_usual else pytest.mark.slow
            found.append(pytest.param(case, way, (number + place) % 2 == 1, id=f"{case}, {way}", marks=marks))
    return found


def adamw(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, **options)


def skip_host_steps(device: Device, way: str) -> None:
    if "host" in way and device.torch_device.type != "cpu":
        pytest.skip("the plain steps differ from the host's in last bits")


def cut(patch: pytest.MonkeyPatch, *, numel: int = 256) -> None:
    patch.setattr(state_pieces, "PIECE_BYTES", 1200)
    for module in (state_pieces, trial):
        patch.setattr(module, "WINDOW_NUMEL", numel)


def is_same(one: Any, other: Any) -> bool:
    try:
        assert_same(one, other)
    except AssertionError:
        return False
    return True


class Net(nn.Module):
    """Some layers of different sizes, one that no gradient reaches, and one without elements."""

    def __init__(self, width: int = 24, depth: int = 4, *, only_matrices: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=not only_matrices) for _ in range(depth))
        self.head = nn.Linear(width, 3, bias=False)
        self.unused = nn.Linear(width, 2, bias=False)
        if not only_matrices:
            self.empty = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def make_net(device: Device, case: Case | None = None, dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(1)
    return Net(only_matrices=case is not None and case.name in ("Muon", "eight bits")).to(device.torch_device, dtype)


def batch(device: Device, number: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(5, 24, generator=generator).to(device.torch_device, dtype)


def make_training(device: Device, kind: Any = adamw, *, net: Any = make_net, dtype: Any = torch.float32, **options: Any) -> Any:
    """Return a model, and an optimizer of this kind."""
    model = net(device, dtype=dtype)
    return model, kind(model.parameters(), **options)


class Pair:
    """Two equal models: one to be stepped plainly, one by a `StateOffload` of its optimizer."""

    def __init__(self, device: Device, kind: Any = adamw, **options: Any) -> None:
        self.device = device
        trainings = [make_training(device, kind, **options) for _ in range(2)]
        (self.plain, self.plain_optimizer), (self.model, self.optimizer) = trainings
        self.nets, self.optimizers = zip(*trainings, strict=True)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return zip(self.nets, self.optimizers, strict=True)

    def train(self, steps: Iterable[int], *, states: memkit.StateOffload | None = None, **options: Any) -> None:
        train(self.plain, self.plain_optimizer, self.device, steps, **options)
        train(self.model, self.optimizer, self.device, steps, states=states, **options)

    def train_plain(self, steps: Iterable[int]) -> None:
        train(self.plain, self.plain_optimizer, self.device, steps)

    def assert_same(self) -> None:
        assert_same_training(self.plain, self.plain_optimizer, self.model, self.optimizer)


def groups_of(model: Net) -> list[dict[str, Any]]:
    """Return two groups, the second with another learning rate."""
    parameters = list(model.parameters())
    return [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 3e-3}]


def train(
    model: Net,
    optimizer: torch.optim.Optimizer,
    device: Device,
    steps: Iterable[int],
    *,
    scheduler: Any = None,
    clip: float | None = None,
    accumulate: int = 1,
    states: memkit.StateOffload | None = None,
) -> None:
    """Train as users do: within the context of a feature that steps in the backward, if gradients are accumulated."""
    dtype = next(model.parameters()).dtype
    for step in steps:
        for part in range(accumulate):
            with nullcontext() if states is None or part == accumulate - 1 else states.accumulate():
                model(batch(device, 10 * step + part, dtype)).float().square().mean().backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad(set_to_none=states is None or step % 2 == 0)


def assert_resumes(case: Case, device: Device, folder: Path, *, num_steps_before: Iterable[int], **options: Any) -> None:
    """Assert that a training goes on with the same bits when its states, saved in `folder`, are loaded from plain torch, and
    then there again. Each time, the loading training has made `num_steps_before` steps."""
    plain = make_net(device, case)
    plain_optimizer = case.make(groups_of(plain))
    train(plain, plain_optimizer, device, range(3))
    torch.save(plain_optimizer.state_dict(), folder / "plain.pt")

    model = make_net(device, case)
    model.load_state_dict(plain.state_dict())
    optimizer = case.make(groups_of(model))
    with offload(optimizer, device, **options) as states:
        for num_steps in num_steps_before:
            train(model, optimizer, device, range(num_steps))
            states.wait()
            model.load_state_dict(plain.state_dict())
            optimizer.load_state_dict(torch.load(folder / "plain.pt", weights_only=True))
        train(plain, plain_optimizer, device, range(3, 5))
        train(model, optimizer, device, range(3, 5))
        states.wait()
        assert_same_training(plain, plain_optimizer, model, optimizer)
        torch.save(optimizer.state_dict(), folder / "offload.pt")

    again = make_net(device, case)
    again.load_state_dict(model.state_dict())
    again_optimizer = case.make(groups_of(again))
    again_optimizer.load_state_dict(torch.load(folder / "offload.pt", weights_only=True))
    train(plain, plain_optimizer, device, range(5, 7))
    train(again, again_optimizer, device, range(5, 7))
    assert_same_training(plain, plain_optimizer, again, again_optimizer)


def assert_same(one: Any, other: Any, where: str = "") -> None:
    """Assert that two structures of tensors, numbers, dicts and lists have the same bits."""
    if isinstance(one, Int8):
        assert isinstance(other, Int8), where
        assert_same(one.inner, other.inner, where)
    elif isinstance(one, Tensor):
        assert isinstance(other, Tensor), where
        assert one.dtype == other.dtype, where
        assert one.size() == other.size(), where
        bits = [tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
        assert torch.equal(*bits), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key, value in one.items():
            assert_same(value, other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for index, value in enumerate(one):
            assert_same(value, other[index], f"{where}[{index}]")
    else:
        assert one == other, where


def assert_same_training(plain: nn.Module, plain_optimizer: Any, model: nn.Module, optimizer: Any) -> None:
    assert_same(plain.state_dict(), model.state_dict(), "parameters")
    assert_same(plain_optimizer.state_dict(), optimizer.state_dict(), "states")


def offload(optimizer: torch.optim.Optimizer, device: Device, **options: Any) -> memkit.StateOffload:
    return memkit.StateOffload(optimizer, device=device, **options)
