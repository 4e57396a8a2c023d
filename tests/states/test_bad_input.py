"""Uses that can't be exact are refused by name, before anything moves."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import memkit
from memkit.device import CpuDevice, Device, ReferenceDevice
from memkit.errors import BudgetInfeasible, HostMemoryError, StateOffloadError
from memkit.transfer import ReferenceDisk
from tests.states.cases import DAdapting, GlobalNorm, ScheduleFree, assert_same, batch, make_net, make_training, offload, train
from tests.weights.wrapped import Int8


def _unchanged(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    hooks = [len(value) for name, value in vars(optimizer).items() if name.endswith("_hooks")]
    return hooks, [*map(id, optimizer.state)], [{**group} for group in optimizer.param_groups]


class _Picky(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise ArithmeticError("no")


_WRAPPING = torch.nn.Parameter(Int8.quantized(torch.randn(4, 4)), requires_grad=False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (torch.optim.LBFGS, "LBFGS needs a closure, which it evaluates several times within a step"),
        (torch.optim.SparseAdam, "SparseAdam steps the rows of sparse gradients alone. Use sparse=False and Adam"),
        (DAdapting, 'DAdapting is not separable: stepped one by one, small tensors gave another "d"'),
        (GlobalNorm, "GlobalNorm is not separable: stepped one by one, small tensors gave another parameter"),
        (lambda p: torch.optim.Adam(p, differentiable=True), "found differentiable=True. Leave it out"),
        (
            _Picky,
            "tried a step of _Picky with two small tensors per group, to see what it keeps. It failed: ArithmeticError: no",
        ),
        (lambda _: torch.optim.SGD([_WRAPPING]), "needs plain parameters, or shards of such; found a Int8, which wraps others"),
    ],
)
def test_optimizers_that_cannot_be_stepped_in_pieces(make: Any, message: str) -> None:
    optimizer = make(make_net(ReferenceDevice()).parameters())
    before, random = _unchanged(optimizer), torch.get_rng_state()

    with pytest.raises(ValueError, match=re.escape(message)):
        offload(optimizer, ReferenceDevice())

    assert _unchanged(optimizer) == before
    assert torch.equal(torch.get_rng_state(), random)


def test_a_trial_leaves_no_trace() -> None:
    optimizer = ScheduleFree(make_net(ReferenceDevice()).parameters())
    before, random = [{**group} for group in optimizer.param_groups], torch.get_rng_state()

    offload(optimizer, ReferenceDevice()).close()

    assert [{**group} for group in optimizer.param_groups] == before
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"update": "gpu"}, ValueError, "update is one of 'auto', 'device', 'host'; found 'gpu'"),
        ({"update": "both"}, ValueError, 'StateOffload(update="both") was removed in 0.2; use "device", or "host"'),
        ({"when": "forward"}, ValueError, "when is 'step' or 'backward'; found 'forward'"),
        *(({"overlap_forward": value}, TypeError, "overlap_forward is True or False; found") for value in ("no", 1, None)),
        ({"overlap_forward": True, "when": "backward"}, ValueError, 'needs a step behind the backward; found when="backward"'),
        ({"disk": "/tmp"}, TypeError, "disk is a memkit.Disk"),
        ({"disk": ReferenceDisk(), "update": "host"}, ValueError, 'on the device, update="device"; found update="host"'),
        ({"disk": ReferenceDisk(), "overlap_forward": True}, ValueError, "waits for the disk before it returns: nothing"),
        ({"master": torch.float64}, ValueError, "master is torch.float32 or None; found torch.float64"),
        ({"device_budget": -1}, ValueError, "device_budget is a number of bytes, 0 or more; found -1"),
        ({"device_budget": 1.5}, TypeError, "device_budget is a number of bytes"),
        ({"device_budget": "600B"}, BudgetInfeasible, "at least 1.00 KiB, the smallest piece"),
        ({"host_budget": 4096}, HostMemoryError, "at least 2.00 MiB, in whole pages of 2.00 MiB; found 4.00 KiB"),
        ({"device": "meta"}, ValueError, 'memkit runs on "cpu" and "cuda"'),
    ],
)
def test_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    optimizer = torch.optim.AdamW(make_net(ReferenceDevice()).parameters())
    before = _unchanged(optimizer)

    with pytest.raises(error, match=re.escape(message)):
        memkit.StateOffload(optimizer, **{"device": ReferenceDevice(), **options})

    assert _unchanged(optimizer) == before


def test_the_least_budget_works() -> None:
    optimizer = torch.optim.AdamW(make_net(ReferenceDevice()).parameters())
    with pytest.raises(BudgetInfeasible) as caught:
        offload(optimizer, ReferenceDevice(), device_budget="600B")

    states = offload(optimizer, ReferenceDevice(), device_budget=caught.value.smallest_bytes)
    assert 0 < states.plan.resident_bytes <= caught.value.smallest_bytes
    states.close()


def test_what_wraps_an_optimizer_is_named() -> None:
    wrapper = SimpleNamespace(optimizer=torch.optim.AdamW(make_net(ReferenceDevice()).parameters()))
    with pytest.raises(TypeError, match=r"found SimpleNamespace. Pass what it wraps: .optimizer, a AdamW"):
        memkit.StateOffload(wrapper, device=ReferenceDevice())  # type: ignore[arg-type]


def test_sparse_gradients(device: Device) -> None:
    embedding = torch.nn.Embedding(50, 8, sparse=True).to(device.torch_device)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1, momentum=0.9)
    with offload(optimizer, device):
        embedding(torch.tensor([1, 2], device=device.torch_device)).sum().backward()
        with pytest.raises(StateOffloadError, match=r"the gradient of parameter 0\.0 is sparse"):
            optimizer.step()


def test_capture_and_compilation_are_refused(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make_training(device)
    with offload(optimizer, device):
        model(batch(device, 0)).sum().backward()
        monkeypatch.setattr(type(device), "is_capturing", lambda _: True)
        with pytest.raises(StateOffloadError, match="can't be compiled or captured into a graph"):
            optimizer.step()
        monkeypatch.undo()


def test_a_host_step_without_fused_kernel_warns() -> None:
    optimizer = torch.optim.AdamW(make_net(ReferenceDevice()).parameters())

    with pytest.warns(UserWarning, match=r"without its fused kernel.*Make it with fused=True") as caught:
        memkit.StateOffload(optimizer, device=ReferenceDevice(), update="host").close()

    assert [warning.filename for warning in caught] == [__file__]


def test_parameters_in_host_memory_warn() -> None:
    optimizer = torch.optim.AdamW(make_net(CpuDevice()).parameters())

    with pytest.warns(UserWarning, match="StateOffload: the CPU has no memory apart from the host's"):
        states = memkit.StateOffload(optimizer)
    train(make_net(CpuDevice()), optimizer, CpuDevice(), range(1))
    states.close()


def test_entered_once() -> None:
    states = offload(torch.optim.AdamW(make_net(ReferenceDevice()).parameters()), ReferenceDevice())
    with states, pytest.raises(ValueError, match="already entered"):
        states.__enter__()


class _Full(ReferenceDevice):
    """Has no room from a chosen allocation on."""

    num_left = 0

    def allocate(self, num_bytes: int) -> torch.UntypedStorage:
        self.num_left -= 1
        if self.num_left < 0:
            raise torch.OutOfMemoryError("full")
        return super().allocate(num_bytes)


@pytest.mark.parametrize("num_left", range(4))
def test_no_room_on_the_device_changes_nothing(num_left: int) -> None:
    device = _Full()
    device.num_left = num_left
    model, optimizer = make_training(device)
    train(model, optimizer, device, range(1))
    before = _unchanged(optimizer)

    with pytest.raises(torch.OutOfMemoryError, match="full"):
        memkit.StateOffload(optimizer, device=device)

    assert _unchanged(optimizer) == before
    train(model, optimizer, device, range(1, 2))


def test_a_second_one_is_refused_while_the_first_is_open(device: Device) -> None:
    model, optimizer = make_training(device)
    with offload(optimizer, device):
        with pytest.raises(ValueError, match=r"this AdamW has a StateOffload already: .* Call close\(\) of that first"):
            offload(optimizer, device)
        train(model, optimizer, device, range(1))
        assert float(optimizer.state[model.head.weight]["step"]) == 1
    offload(optimizer, device).close()


def test_the_same_parameter_twice() -> None:
    first, second = (torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = torch.optim.AdamW([first, second, first])
    with pytest.raises(ValueError, match=r"needs each parameter once; found parameter 0\.0 again as parameter 0\.2"):
        offload(optimizer, ReferenceDevice())

    optimizer = torch.optim.AdamW([first, second])
    with offload(optimizer, ReferenceDevice()):
        optimizer.param_groups[0]["params"].append(second)
        with pytest.raises(ValueError, match=r"found parameter 0\.1 again as parameter 0\.2"):
            optimizer.step()


def test_a_differentiable_group_that_is_added() -> None:
    optimizer = torch.optim.AdamW(make_net(ReferenceDevice()).parameters())
    with offload(optimizer, ReferenceDevice()):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(4, 4))], "differentiable": True})
        with pytest.raises(ValueError, match="found differentiable=True"):
            optimizer.step()


def test_more_parameters_than_the_host_budget_has_room_for() -> None:
    optimizer = torch.optim.AdamW(make_net(ReferenceDevice()).parameters())
    with offload(optimizer, ReferenceDevice(), host_budget="2MiB"):
        large = torch.nn.Parameter(torch.ones(512, 1024))
        large.grad = torch.ones_like(large)
        optimizer.add_param_group({"params": [large]})
        for _ in range(2):
            with pytest.raises(HostMemoryError, match=r"host_budget of at least 6\.00 MiB.*found 2\.00 MiB"):
                optimizer.step()
        optimizer.param_groups.pop()
        optimizer.step()


def test_fewer_names_than_parameters(device: Device) -> None:
    parameters = [torch.nn.Parameter(torch.ones(4, 4, device=device.torch_device)) for _ in range(3)]
    optimizer = torch.optim.AdamW([(f"weight {index}", parameter) for index, parameter in enumerate(parameters[:2])])
    with offload(optimizer, device):
        optimizer.param_groups[0]["params"].append(parameters[2])
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert len(optimizer.state) == 3
    assert_same(*parameters[1:])


@pytest.mark.filterwarnings("ignore:StateOffload. .* steps on the host without its fused kernel")
@pytest.mark.parametrize("update", ["device", "host"])
def test_gradients_of_another_dtype(update: str) -> None:
    parameters = [torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16)) for _ in range(2)]
    plain = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    optimizers = [torch.optim.SGD(owned, lr=0.1, momentum=0.9, foreach=False) for owned in (parameters, plain)]
    for parameter in (*parameters, *plain):
        parameter.grad_dtype = torch.float32
        parameter.grad = torch.full((64, 64), 1 / 3)
    before = [parameter.detach().clone() for parameter in parameters]
    with offload(optimizers[0], ReferenceDevice(), update=update):
        if update == "host":
            with pytest.raises(StateOffloadError, match=r"its gradient torch\.float32: was its grad_dtype set"):
                optimizers[0].step()
            assert_same(parameters, before)
        else:
            for optimizer in optimizers:
                optimizer.step()
            assert_same(parameters, plain)
