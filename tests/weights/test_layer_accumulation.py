"""Gradients of streamed layers, in whatever order the engine makes them: the sums are those of the plain run, bit for bit."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memkit
from memkit.core import backwards
from memkit.device import Device, ReferenceDevice
from memkit.weights.gradients import Accumulation, HostGradients, Made
from tests.engine import LateThread
from tests.gpus import ON_GPU
from tests.weights.cases import WIDTH, Block, Stack, assert_same, in_order, inputs, results, reused

Run = Callable[[nn.ModuleList, Tensor], Tensor]


def _models(run: Run = in_order, block: Callable[[], nn.Module] = Block) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = Stack(4, run=run, block=block)
    return plain, copy.deepcopy(plain)


@contextmanager
def _streaming(model: nn.Module, device: Device) -> Iterator[HostGradients]:
    with memkit.LayerOffload(model, device=device, offload_ratio=1.0, train="host") as offload:
        gradients = offload._gradients
        assert isinstance(gradients, HostGradients)
        yield gradients
    device.synchronize()
    if isinstance(device, ReferenceDevice):
        assert not device.races


def _check(plain: nn.Module, model: nn.Module, step: Callable[[nn.Module], object], *, num_steps: int = 3) -> None:
    """See that steps whose gradients are accumulated leave the same."""
    for _ in range(num_steps):
        for one in (plain, model):
            step(one)
        assert_same(results(model, []), results(plain, []))


def _step(model: nn.Module, batches: Sequence[Tensor] | None = None) -> None:
    for batch in inputs(ReferenceDevice()) if batches is None else batches:
        model(batch).square().mean().backward()


def _noting(gradients: HostGradients, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what has the name of each gradient that is taken, and "end" for each backward that has ended."""
    noted, take, finish = list[str](), gradients._take, gradients._finish

    def note(made: Made) -> None:
        noted.extend(streamed.name for streamed in made)
        take(made)

    def note_end(has_failed: bool) -> None:
        noted.append("end")
        finish(has_failed)

    monkeypatch.setattr(gradients, "_take", note)
    monkeypatch.setattr(gradients, "_finish", note_end)
    return noted


# Gradients out of turn


@pytest.mark.usefixtures("new_nodes")
def test_gradient_of_a_layer_that_runs_twice_is_taken_once_all_parts_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(layers: nn.ModuleList, x: Tensor) -> Tensor:
        return layers[0](layers[1](layers[2](layers[2](layers[3](x)))))

    _, model = _models(twice)
    with _streaming(model, ReferenceDevice()) as gradients:
        noted = _noting(gradients, monkeypatch)
        _step(model, inputs(ReferenceDevice(), 1))

    layers = [int(name.split(".")[1]) if name != "end" else -1 for name in noted]
    num_each = len(list(Block().parameters()))
    assert layers == [layer for layer in (0, 1, 2) for _ in range(num_each)] + [3] * num_each + [-1]


def test_gradients_of_some_parameters_alone() -> None:
    plain, model = _models()

    def step(model: nn.Module) -> None:
        _step(model)
        for batch in inputs(ReferenceDevice()):
            names = ["layers.2.up.weight", "layers.0.norm.bias", "head.weight"]
            model(batch).sum().backward(inputs=[model.get_parameter(name) for name in names])

    with _streaming(model, ReferenceDevice()):
        _check(plain, model, step)


class Opaque(Block):
    """Its output is nothing that torch knows tensors in."""

    def forward(self, x: Any) -> Any:  # type: ignore[override]
        return SimpleNamespace(x=super().forward(x.x if isinstance(x, SimpleNamespace) else x))


def _open(run: Run) -> Run:
    return lambda layers, x: run(layers, x).x  # type: ignore[attr-defined]


def _called_inside(layers: nn.ModuleList, x: Tensor) -> Tensor:
    """Modules inside of layers are called by themselves."""
    for layer in layers:
        x = x + layer.lora_b(layer.lora_a(layer(x)))
    return x + layers[1].norm(x)


class Keeping(Block):
    """Keeps something that it has computed, which is no output."""

    kept: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.lora_a(self.up(self.norm(x))[:, :WIDTH])
        return super().forward(x)


def _dropped(layers: nn.ModuleList, x: Tensor) -> Tensor:
    """An output is dropped while something inside leads to the loss: its part is added to that of another call first."""
    layers[1](x)
    kept: Any = layers[1].kept
    return in_order(layers, x + kept.sum())


class Viewing(Block):
    """Its output is a view, which has another node once it is written to; the one that it had is run no more."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(-1).view(-1, WIDTH)


def _written_to(num_times: int) -> Run:
    def run(layers: nn.ModuleList, x: Tensor) -> Tensor:
        for layer in [*layers] * num_times:
            x = layer(x)
            x.add_(1)
        return x

    return run


class Checkpointing(Block):
    """Runs a part of itself within a checkpoint."""

    use_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(lambda x: self.down(torch.relu(self.up(self.norm(x)))), x, use_reentrant=self.use_reentrant)
        return x + y + self.lora_b(self.lora_a(self.norm(x)))


class Reentering(Checkpointing):
    use_reentrant = True


MODELS: dict[str, tuple[Run, type[Block]]] = {
    "opaque": (_open(in_order), Opaque),
    "opaque, reused": (_open(reused), Opaque),
    "called inside": (_called_inside, Block),
    "dropped": (_dropped, Keeping),
    "views": (_written_to(1), Viewing),
    "views, reused": (_written_to(2), Viewing),
    "checkpoints": (in_order, Checkpointing),
    "reentrant checkpoints": (in_order, Reentering),
}
"""Models whose layers have gradients out of turn."""


@pytest.mark.usefixtures("new_nodes")
@pytest.mark.parametrize("name", MODELS)
def test_gradients_out_of_turn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = _models(*MODELS[name])
    with _streaming(model, ReferenceDevice()) as gradients:
        _check(plain, model, _step)
        noted = _noting(gradients, monkeypatch)
        _step(model, inputs(ReferenceDevice(), 1))
    if name == "opaque":  # nothing is held that is complete
        assert noted.index("layers.3.norm.weight") < noted.index("layers.0.norm.weight") < noted.index("end")


@pytest.mark.usefixtures("new_nodes")
@pytest.mark.parametrize("with_output", [False, True])
def test_backward_from_within_layers(with_output: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of their outputs leads to the loss, or only some do."""
    plain, model = _models(block=Keeping)

    def step(model: nn.Module) -> None:
        for batch in inputs(ReferenceDevice()):
            output, layers = model(batch), model.get_submodule("layers")
            loss: Any = sum(layer.kept.square().mean() for layer in layers)  # type: ignore[attr-defined]
            (loss + output.square().mean() if with_output else loss).backward()
            for layer in layers:  # type: ignore[attr-defined]
                del layer.kept

    with _streaming(model, ReferenceDevice()) as gradients:
        noted = _noting(gradients, monkeypatch)
        _check(plain, model, step)

    layers = model.get_submodule("layers").named_parameters()
    assert {f"layers.{name}" for name, parameter in layers if parameter.grad is not None} <= {*noted}


# Gradients that come from the host


class _Penalty:
    """A loss with a part that is computed with the parameters themselves. Where the device is the host, the first gradient of
    such a loss counts as one that comes from there."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.is_asked_for = False
        make = Accumulation.__init__

        def make_for_these(gradients: Accumulation, device: Device) -> None:
            make(gradients, device)
            if device.torch_device.type == "cpu":
                gradients._is_on_host = lambda _: self.is_asked_for

        patch.setattr(Accumulation, "__init__", make_for_these)

    def is_refused(self, model: nn.Module, batch: Tensor, *, may_step_first: bool = False) -> None:
        """Check that a backward is refused.

        Args:
            may_step_first: whether the thread for the device may step a parameter before the one for the host comes to it. Then
                the engine itself finds that it was written to.
        """
        penalty: Any = sum(weight.square().sum() for weight in model.get_submodule("layers").parameters())
        self.is_asked_for = True
        refused = "computed with outside of its layer"
        if may_step_first:
            refused += "|modified by an inplace operation"
        with pytest.raises((memkit.errors.LayerOffloadError, RuntimeError), match=refused):
            (model(batch).square().mean().cpu() + penalty).backward()
        self.is_asked_for = False


@pytest.fixture
def penalty(monkeypatch: pytest.MonkeyPatch) -> _Penalty:
    return _Penalty(monkeypatch)


ON_BOTH = pytest.mark.parametrize("device", ["late", *ON_GPU], indirect=True)


def _grads(model: nn.Module) -> list[Tensor | None]:
    return [None if parameter.grad is None else parameter.grad.cpu().clone() for parameter in model.parameters()]


def _are_either(found: Sequence[Tensor | None], *others: Sequence[Tensor | None]) -> bool:
    """Tell whether each is what one of the others has in its place."""
    return all(
        any(one is other if one is None or other is None else torch.equal(one, other) for other in at)
        for one, *at in zip(found, *others, strict=True)
    )


@ON_BOTH
@pytest.mark.parametrize("is_accumulated", [False, True])
def test_gradient_that_comes_from_the_host_is_refused(is_accumulated: bool, penalty: _Penalty, device: Device) -> None:
    """It would be added to what is on the device, by another thread of the engine. What is made there is added whole or not."""
    plain, model = (one.to(device.torch_device) for one in _models())
    batches = inputs(device)
    step = partial(_step, batches=batches)
    with _streaming(model, device) as gradients:
        if is_accumulated:
            _check(plain, model, step, num_steps=2)
        before = _grads(plain)
        step(plain, batches=batches[:1])
        penalty.is_refused(model, batches[0])

        assert not gradients._tasks
        assert all(weight.is_cpu for weight in model.get_submodule("layers").parameters())
        assert _are_either(_grads(model), before, _grads(plain))

        for one in (plain, model):
            one.zero_grad()
        _check(plain, model, step, num_steps=2)


@ON_BOTH
@pytest.mark.parametrize("train", ["host", "fused"])
def test_close_once_a_gradient_that_comes_from_the_host_was_refused(train: str, penalty: _Penalty, device: Device) -> None:
    plain, model = (one.to(device.torch_device) for one in _models())
    batches, counter = inputs(device), device.memory_counter()
    assert counter is not None
    make = partial(torch.optim.SGD, lr=0.1)
    allocated_bytes = []
    for _ in range(3):
        plain.load_state_dict(model.state_dict())
        before = [parameter.detach().cpu().clone() for parameter in model.parameters()]
        optimizer = make if train == "fused" else None
        with memkit.LayerOffload(model, device=device, offload_ratio=1.0, train=train, optimizer=optimizer):
            penalty.is_refused(model, batches[0], may_step_first=train == "fused")
        if train == "fused":
            steps = make(plain.parameters())
            _step(plain, batches[:1])
            steps.step()

        assert all(parameter.device == device.torch_device for parameter in model.parameters())
        assert all(parameter.grad is None or parameter.grad.device == parameter.device for parameter in model.parameters())
        found = [parameter.detach().cpu() for parameter in model.parameters()]
        assert _are_either(found, before, [parameter.detach().cpu() for parameter in plain.parameters()])
        plain.load_state_dict(model.state_dict())
        for one in (plain, model):
            one.zero_grad()
        _check(plain, model, partial(_step, batches=batches), num_steps=2)
        for one in (plain, model):
            one.zero_grad()
        gc.collect()
        allocated_bytes.append(counter.allocated_bytes())

    assert allocated_bytes[1:] == allocated_bytes[1:2] * 2


@pytest.mark.parametrize("train", ["host", "fused"])
def test_nothing_more_is_added_in_a_backward_that_is_refused(
    train: str, penalty: _Penalty, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the engine's thread for the device would go on to do."""
    refused = pytest.raises(memkit.errors.LayerOffloadError, match="computed with outside of its layer")
    device, (_, model), counts = ReferenceDevice(), _models(), list[int]()
    optimizer = partial(torch.optim.SGD, lr=0.1) if train == "fused" else None
    with memkit.LayerOffload(model, device=device, offload_ratio=1.0, train=train, optimizer=optimizer) as offload:

        def go_on(_: torch.device) -> None:
            gradients = offload._gradients
            assert gradients is not None
            before, penalty.is_asked_for = _grads(model), False
            for chunk in offload._chunks:
                for item in chunk.parameters:
                    with refused:
                        (
                            gradients._arrives(gradients._watched[chunk], item)(torch.zeros_like(item.parameter))
                            if isinstance(gradients, HostGradients)
                            else gradients._before(item, torch.zeros_like(item.parameter))
                        )
                if isinstance(gradients, HostGradients) and gradients._watched[chunk].task == -1:
                    with refused:
                        gradients.begin_backward(chunk)
            assert _are_either(_grads(model), before)
            counts.append(len(offload._chunks))

        monkeypatch.setattr(backwards, "pass_through", go_on)
        penalty.is_refused(model, inputs(device)[0])
    assert counts == [4]


def test_backward_that_is_refused_has_ended_before_the_engine_is_done_with_it(
    penalty: _Penalty, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So what the caller does to gradients next counts."""
    (plain, model), device = _models(), ReferenceDevice()
    with _streaming(model, device) as gradients:
        _check(plain, model, _step, num_steps=1)
        late = LateThread(monkeypatch)
        penalty.is_refused(model, inputs(device)[0])
        num_tasks = len(gradients._tasks)
        for one in (plain, model):
            one.zero_grad()
        late.leave()
        late.join()

        assert num_tasks == 0
        assert not results(model, [])
        _check(plain, model, _step, num_steps=1)
        late.leave()
        late.join()


# What else a backward may be asked for


def test_no_more_than_two_layers_have_gradients_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are made, and those that copies read."""
    device = ReferenceDevice()
    _, model = _models()
    seen: list[int] = []
    with _streaming(model, device) as gradients:
        begin = gradients._open

        def note(layer: Any, task: int) -> None:
            begin(layer, task)
            seen.append(gradients._in_flight_bytes)

        monkeypatch.setattr(gradients, "_open", note)
        layer_bytes = sum(parameter.nbytes for parameter in model.get_submodule("layers.0").parameters())
        for _ in range(2):
            _step(model, inputs(device, 1))
            model.zero_grad()

    assert len(seen) == 8
    assert max(seen) == layer_bytes


@pytest.mark.parametrize("kept", [1, 3])
def test_gradients_that_the_caller_keeps_of_some_steps(kept: int) -> None:
    """Those of the next step go elsewhere, and back once they are let go."""
    plain, model = _models()
    batch = inputs(ReferenceDevice(), 1)
    with _streaming(model, ReferenceDevice()):
        for number in range(5):
            held = []
            for one in (plain, model):
                one.zero_grad()
                _step(one, batch)
                if number in (1, 2):
                    held.append([parameter.grad for parameter in list(one.parameters())[::kept]])
            assert_same(results(model, []), results(plain, []))
            assert all(torch.equal(found, expected) for expected, found in zip(*held, strict=True)) if held else True
            batch = [tensor * 1.5 for tensor in batch]


class _Routed(nn.Module):
    """Experts of which others run each time."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        chosen = int(torch.randint(1, 2 ** len(self.experts), ()))
        return x + sum(expert(x) for at, expert in enumerate(self.experts) if chosen >> at & 1)


@pytest.mark.slow
def test_layers_in_which_others_are_trained_each_time_leave_nothing_behind() -> None:
    plain, model = _models(block=_Routed)
    with _streaming(model, ReferenceDevice()) as gradients:
        for seed in range(20):
            for one in (plain, model):
                torch.manual_seed(seed)
                one.zero_grad()
                _step(one)
            assert_same(results(model, []), results(plain, []))
        assert len(gradients._targets) <= 8 * len(gradients._watched)


def test_gradient_of_a_parameter_that_comes_to_require_one() -> None:
    plain, model = _models()
    for one in (plain, model):
        one.get_parameter("layers.1.up.weight").requires_grad_(False)
    with _streaming(model, ReferenceDevice()):
        _check(plain, model, _step, num_steps=2)
        for requires_grad in (True, False):
            for one in (plain, model):
                one.get_parameter("layers.1.up.weight").requires_grad_(requires_grad)
                one.get_parameter("layers.2.up.bias").requires_grad_(not requires_grad)
            _check(plain, model, _step, num_steps=2)
