"""`train="fused"`: the optimizer steps within the backward. What goes beyond the bits of `test_bits`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memkit
from memkit.device import Device
from tests.weights.cases import TRAIN, Block, Stack, checkpointed, compare, inputs, streamed

pytestmark = pytest.mark.slow

ADAMW = partial(torch.optim.AdamW, lr=0.01)
FUSED = TRAIN["fused"]


def _assert_same_states(found: nn.Module, expected: nn.Module | dict[str, Tensor]) -> None:
    wanted = expected.state_dict() if isinstance(expected, nn.Module) else expected
    for name, tensor in wanted.items():
        assert torch.equal(found.state_dict()[name].cpu(), tensor.cpu()), name


def _step(model: nn.Module, batch: Tensor) -> None:
    model(batch).square().mean().backward()


def test_scheduler_and_state_dict_work_on_the_optimizer(device: Device) -> None:
    with streamed(Stack(4), device, optimizer=ADAMW) as (model, plain, (batch, _), offload):
        optimizer, own = ADAMW(plain.parameters()), offload.optimizer
        assert own is not None
        schedulers = [torch.optim.lr_scheduler.StepLR(item, 1, gamma=0.5) for item in (optimizer, own)]
        for step in range(4):
            for one in (plain, model):
                _step(one, batch)
            optimizer.step()
            optimizer.zero_grad()
            for scheduler in schedulers:
                scheduler.step()
            if step == 1:
                own.load_state_dict(copy.deepcopy(own.state_dict()))
        found, expected = own.state_dict(), optimizer.state_dict()
        assert found["param_groups"] == expected["param_groups"]
        assert found["state"].keys() == expected["state"].keys()
        for number, state in expected["state"].items():
            for name, value in state.items():
                assert torch.equal(found["state"][number][name].cpu(), value.cpu()), (number, name)
        _assert_same_states(model, plain)


def test_state_stays_on_the_device_and_counts_in_the_budget(device: Device) -> None:
    model = Stack(8)
    trained = sum(parameter.nbytes for parameter in model.layers.parameters())
    with streamed(copy.deepcopy(model), device, optimizer=ADAMW) as (*_, offload):
        one = offload.plan.layers[0].num_bytes

    options = {"offload_ratio": None, "optimizer": ADAMW, "device": device}
    with memkit.LayerOffload(copy.deepcopy(model), budget=2 * trained + 5 * one, **options) as offload:
        assert len(offload.plan.streamed) == 6
    found = rf"{trained * 2 / 1024:.2f} KiB for the optimizer's state\); found 1000 bytes. Raise budget by \d+ bytes"
    with pytest.raises(ValueError, match=found):
        memkit.LayerOffload(model, budget="1000B", **options)
    with pytest.raises(ValueError, match="budget"):
        memkit.LayerOffload(model, budget=2 * trained, **options)


def _reused(use_reentrant: bool) -> Callable[[nn.ModuleList, Tensor], Tensor]:
    run = checkpointed(use_reentrant)
    return lambda layers, x: run([*layers, layers[0]], x)  # type: ignore[arg-type]


@pytest.mark.parametrize("streams", [True, False])
def test_layer_that_is_reused_in_backwards_of_their_own_is_refused(streams: bool, device: Device) -> None:
    given = streamed(Stack(4, run=_reused(True)), device, **{**FUSED, "offload_ratio": float(streams)})
    with given as (model, _, (batch, _), _):
        for message in (r'"layers\.0\..*stepped already.*use_reentrant=False.*train="host"', "stepped already"):
            with pytest.raises(memkit.errors.LayerOffloadError, match=message):
                _step(model, batch)
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("streams", [True, False])
def test_layer_that_is_reused_in_checkpoints_of_one_backward(streams: bool, device: Device) -> None:
    compare(Stack(4, run=_reused(False)), device, **{**FUSED, "offload_ratio": float(streams)})


def test_own_step_after_a_backward_does_nothing(device: Device) -> None:
    """Also where the backward before that has failed."""

    def fail(_: Tensor) -> None:
        raise ValueError("once")

    with streamed(Stack(4), device, **FUSED) as (model, _, (batch, _), offload):
        assert offload.optimizer is not None
        for fails in (False, True):
            if fails:
                handle = model.stem.register_forward_hook(lambda *given: given[-1].register_hook(fail) and None)
                with pytest.raises(ValueError, match="once"):
                    _step(model, batch)
                handle.remove()
            _step(model, batch)
            before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            offload.optimizer.step()
            offload.optimizer.zero_grad()

            _assert_same_states(model, before)


def test_parameter_that_the_optimizer_does_not_know_is_refused(device: Device) -> None:
    with streamed(Stack(4), device, **FUSED) as (model, _, (batch, _), _):
        model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)

        with pytest.raises(memkit.errors.LayerOffloadError, match=r'"layers\.3\..*assign=True.*make a new LayerOffload'):
            _step(model, batch)


@pytest.mark.covering(2)
@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0, "auto"])
@pytest.mark.parametrize("is_known_first", [False, True])
@pytest.mark.parametrize("has_own_group", [True, False])
def test_parameters_that_are_to_be_trained_later(
    has_own_group: bool, is_known_first: bool, ratio: float | str, device: Device
) -> None:
    """The head does not stream, of the layers some do."""
    model = Stack(4)
    model.head.requires_grad_(False)
    model.layers[2:].requires_grad_(False)
    with streamed(model, device, optimizer=ADAMW, offload_ratio=ratio) as (model, plain, (batch, _), offload):
        optimizer = ADAMW(parameter for parameter in plain.parameters() if parameter.requires_grad)
        assert offload.optimizer is not None
        for step in range(6):
            for one, stepped in ((plain, optimizer), (model, offload.optimizer)):
                later = [*one.head.parameters(), *one.layers[2:].parameters()]
                if step == (0 if is_known_first else 3):
                    if has_own_group:
                        stepped.add_param_group({"params": later, "lr": 0.1})
                    else:
                        stepped.param_groups[0]["params"] += later
                if step == 3:
                    for parameter in later:
                        parameter.requires_grad_()
                _step(one, batch)
            optimizer.step()
            optimizer.zero_grad()
            _assert_same_states(model, plain)


def test_graph_from_before_a_step_raises_as_autograd_does(device: Device) -> None:
    with streamed(Stack(4), device, **FUSED) as (model, _, batches, _):
        losses = [model(batch).square().mean() for batch in batches]
        losses[0].backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            losses[1].backward()


def test_accumulation_is_refused(device: Device) -> None:
    with streamed(Stack(4), device, **FUSED) as (model, _, batches, offload):
        assert offload.optimizer is not None
        for batch in batches:
            _step(model, batch)
        with pytest.raises(memkit.errors.LayerOffloadError, match=r"after 2 backwards.*train=.host"):
            offload.optimizer.step()
        model.layers[0].up.weight.grad = torch.zeros(24, 16)
        with pytest.raises(memkit.errors.LayerOffloadError, match=r"layers\.0\.up\.weight.*has a gradient already"):
            _step(model, batches[0])


class _Counting(torch.optim.SGD):
    """Keeps the number of its steps in its groups: in a tensor, it is written to."""

    def __init__(self, parameters: Any, count: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.param_groups[0]["k"] = copy.copy(count)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.param_groups[0]["k"] += 1
        super().step(closure)


@pytest.mark.parametrize("count", [0, torch.zeros(())])
def test_optimizer_with_state_in_its_groups_is_refused(count: Any, device: Device) -> None:
    with (
        streamed(Stack(4), device, optimizer=partial(_Counting, count=count)) as (model, _, (batch, _), _),
        pytest.raises(memkit.errors.LayerOffloadError, match=r'Counting.* keeps state in its groups.*"k".*train="host"'),
    ):
        _step(model, batch)


def _unscale(parameters: list[nn.Parameter]) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    scaler.unscale_(torch.optim.SGD(parameters, lr=0.1))


USES: dict[str, Callable[[list[nn.Parameter]], object]] = {
    "norm": lambda parameters: nn.utils.clip_grad_norm_(parameters, 1.0),
    "value": lambda parameters: nn.utils.clip_grad_value_(parameters, 1.0),
    "unscale": _unscale,
    "data": lambda parameters: [parameter.grad.data.norm() for parameter in parameters],  # type: ignore[union-attr]
}


@pytest.mark.parametrize("use", USES)
def test_use_of_gradients_after_the_step_is_refused(use: str, device: Device) -> None:
    with streamed(Stack(4), device, **{**FUSED, "offload_ratio": 0.5}) as (model, _, (batch, _), _):
        _step(model, batch)

        with pytest.raises(memkit.errors.LayerOffloadError, match=r'consumed by the step within the backward.*train="host"'):
            USES[use]([*model.parameters()])


def test_optimizer_of_other_parameters_is_refused_before_it_steps(device: Device) -> None:
    model = Stack(2).to(device.torch_device)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    own = ADAMW(model.parameters())
    _step(model, inputs(device)[0])

    with pytest.raises(ValueError, match="makes an optimizer of the parameters that it is given; what it returned holds other"):
        memkit.LayerOffload(model, offload_ratio=1.0, optimizer=lambda _: own, device=device)
    _assert_same_states(model, before)


def _fail(_: object) -> torch.optim.Optimizer:
    raise KeyError("lr")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": "fused"}, "needs an optimizer"),
        ({"optimizer": ADAMW, "train": "host"}, 'with train="host"'),
        ({"optimizer": "adam"}, "makes the optimizer"),
        ({"optimizer": torch.optim.LBFGS}, "on the meta device.* LBFGS needs a closure"),
        ({"optimizer": _fail}, "on the meta device.*This failed: KeyError: 'lr'"),
    ],
)
def test_bad_input(options: dict[str, Any], message: str, device: Device) -> None:
    with pytest.raises(ValueError, match=message):
        memkit.LayerOffload(Stack(2), offload_ratio=1.0, device=device, **options)


def test_parts_of_a_layer_are_stepped_in_backwards_of_their_own(device: Device) -> None:
    class Parts(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = checkpoint(self.up, self.norm(x), use_reentrant=True)
            return x + checkpoint(self.down, y.tanh(), use_reentrant=True) + self.lora_b(self.lora_a(x))

    compare(Stack(3, block=Parts), device, num_slots=2, **FUSED)


def test_layer_that_was_stepped_is_used_within_the_same_backward(device: Device) -> None:
    found = []

    def use_last(_: torch.Tensor) -> None:
        with torch.no_grad():
            found.append(model.layers[5](batch))

    with streamed(Stack(6), device, num_slots=2, **FUSED) as (model, plain, (batch, _), _):
        model.stem.register_forward_hook(lambda _, __, output: output.register_hook(use_last) and None)
        _step(model, batch)
    optimizer = FUSED["optimizer"](plain.parameters())
    _step(plain, batch)
    optimizer.step()

    assert torch.equal(found[0], plain.layers[5](batch))
