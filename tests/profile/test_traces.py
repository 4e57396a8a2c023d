"""A profile leaves nothing behind, whatever happens during it."""

from __future__ import annotations

import copy
import gc
import random
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import memkit
from memkit import profile_memory
from memkit.core import torch_private
from memkit.errors import ProfileError
from tests.interrupts import count_lines, hooks_around, interrupts
from tests.models import CASES, ConvNet
from tests.profile.cases import Function, Holding, Ops

pytestmark = pytest.mark.slow

DEVICES = [None, "meta"]


def _hooks_of(model: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def _fail(*_: object) -> None:
    raise LookupError("no such thing")


class _FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        _fail()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("outcome", ["success", "forward fails", "backward fails"])
def test_model_is_as_it_was(device: str | None, outcome: str) -> None:
    model = nn.Sequential(ConvNet(inplace=True), nn.Dropout(0.5))
    if outcome != "success":
        model.append(Function(_FailsBackward.apply if outcome == "backward fails" else _fail))
    model[1].eval()
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    model(x).sum().backward() if outcome == "success" else None
    state, modes = _state(model), [module.training for module in model.modules()]
    objects = [*model.parameters(), *model.buffers()]
    versions = [tensor._version for tensor in objects]
    grads = [tensor.grad for tensor in (*model.parameters(), x)]
    kept = copy.deepcopy(grads)

    if outcome == "success":
        profile_memory(model, x, device=device, backward=True, print_table=False)
    else:
        with pytest.raises(LookupError):
            profile_memory(model, x, device=device, backward=True, print_table=False)

    assert _hooks_of(model) == 0
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(now is then for now, then in zip([*model.parameters(), *model.buffers()], objects, strict=True))
    assert [tensor._version for tensor in objects] == versions
    assert all(tensor.grad is grad for tensor, grad in zip((*model.parameters(), x), grads, strict=True))
    assert all(grad is None or torch.equal(grad, now) for grad, now in zip(kept, grads, strict=True))


def test_leaves_that_are_no_parameters_get_no_gradient_and_graphs_of_the_user_are_refused() -> None:
    scale, target, x = torch.ones(4, requires_grad=True), nn.Linear(4, 4)(torch.randn(2, 4)), torch.randn(2, 4)

    profile_memory(nn.Linear(4, 4), x, loss_fn=lambda y: (y * scale).sum(), backward=True, print_table=False)

    assert scale.grad is None
    with pytest.raises(ProfileError, match="a graph that was there before"):
        profile_memory(nn.Linear(4, 4), x, loss_fn=lambda y: (y - target).sum(), backward=True, print_table=False)
    target.sum().backward()


@pytest.mark.parametrize("device", DEVICES)
def test_random_states_go_on_as_without(device: str | None) -> None:
    numpy = pytest.importorskip("numpy")

    def draw(self: Any, x: Tensor) -> Tensor:
        torch.rand(1, generator=self.generator)
        return nn.functional.dropout(x * random.random(), 0.5) + torch.rand(1) * float(numpy.random.rand())

    model: Any = Holding(draw, generator=torch.Generator())

    def seed() -> None:
        for set_seed in (random.seed, torch.manual_seed, numpy.random.seed):
            set_seed(5)
        model.generator.manual_seed(3)

    def drawn() -> tuple[Any, ...]:
        return random.random(), torch.rand(1), torch.rand(1, generator=model.generator), numpy.random.rand()

    seed()
    expected = drawn()
    seed()

    profile_memory(model, torch.randn(4, generator=torch.Generator()), device=device, print_table=False)

    assert drawn() == expected


def test_passes_see_the_same_model() -> None:
    counts: list[int] = []

    def count(self: Any, x: Tensor) -> Tensor:
        self.calls += 1
        self.total = self.total + 1
        counts.append((self.calls, int(self.total)))
        return x * 2

    model: Any = Holding(count, calls=0, total=nn.Buffer(torch.zeros(1)))
    total = model.total
    profile_memory(model, torch.randn(4), warmup=2, print_table=False)

    assert counts == [(1, 1)] * 5
    assert model.calls == 0
    assert model.total is total


@pytest.mark.parametrize("wrap", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parametrized_modules_are_as_they_were(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = wrap(nn.Linear(4, 4))
    state = _state(model)

    profile_memory(model, torch.randn(2, 4), backward=True, print_table=False)
    profile_memory(model, torch.randn(2, 4), device="meta", backward=True, print_table=False)

    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_graph_that_the_user_holds_still_works() -> None:
    model, x = ConvNet(inplace=False), torch.randn(2, 3, 8, 8)
    loss = model(x).sum()

    profile_memory(model, x, print_table=False)
    loss.backward()

    assert model.conv1.weight.grad is not None


@pytest.mark.parametrize(
    ("write", "named"),
    [
        (lambda self, x: self.codes.mul_(0.9), "parameter codes"),
        (lambda self, x: self.codes.data.mul_(0.9), "parameter codes"),
        (lambda self, x: x.mul_(0.9), "an input"),
    ],
)
def test_what_is_written_and_not_put_back_is_reported(write: Callable[..., object], named: str) -> None:
    codebook = Holding(lambda self, x: (write(self, x), x * self.codes)[1], codes=_frozen(torch.randn(4)))

    with pytest.warns(UserWarning, match=f"the forward wrote to {named}, and profile_memory"):
        profile_memory(codebook, torch.randn(4), print_table=False)


@pytest.mark.parametrize("device", DEVICES)
def test_lists_and_plain_tensors_are_as_they_were(device: str | None) -> None:
    def keep(self: Any, batch: dict[str, Tensor]) -> Tensor:
        batch["y"] = y = batch["x"].exp()
        self.outputs.append(y)
        self.named["y"] = self.cache = y
        self.count.add_(1)
        return torch.cat(self.outputs).tanh()

    model: Any = Holding(keep, outputs=[], named={}, count=torch.zeros(1))
    batch = {"x": torch.randn(4, requires_grad=True)}
    report = profile_memory(model, batch, device=device, warmup=2, print_table=False)

    assert (model.outputs, model.named, float(model.count), hasattr(model, "cache"), [*batch]) == ([], {}, 0.0, False, ["x"])
    assert report.activation_bytes == 2 * 16


def test_buffers_and_parameters_of_every_kind_are_put_back() -> None:
    def change(self: Any, x: Tensor) -> Tensor:
        self.queue.data = torch.cat([self.queue, self.queue + 1])
        self.weight.data = self.weight.data * 0.9
        return self.norm(x) * self.weight

    wide, queue = nn.Buffer(torch.ones(1, 4).expand(3, 4)), nn.Buffer(torch.zeros(2))
    model = Holding(change, wide=wide, queue=queue, norm=nn.BatchNorm1d(4), weight=_frozen(torch.ones(4)))
    with torch.inference_mode():
        model.register_buffer("frozen", torch.ones(2))
    state = _state(model)

    profile_memory(model, torch.randn(3, 4), print_table=False)

    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("device", DEVICES)
def test_backward_stops_at_inputs_that_were_computed(device: str | None) -> None:
    first, second = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    hidden = first(torch.randn(2, 4))

    report = profile_memory(second, hidden, device=device, backward=True, print_table=False)
    hidden.sum().backward()

    assert first.weight.grad is not None
    assert report.input_bytes == 32


def test_steps_in_the_backward_are_refused() -> None:
    model = nn.Linear(4, 4)
    model.weight.register_post_accumulate_grad_hook(lambda param: param.data.sub_(param.grad))

    with pytest.raises(ProfileError, match="weight has a hook that runs when its gradient is accumulated"):
        profile_memory(model, torch.randn(2, 4), backward=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["resnet18", "checkpoint_reentrant", "checkpoint_non_reentrant", "functional"])
def test_nothing_of_the_run_and_of_the_model_stays_alive(name: str, device: str | None) -> None:
    case = CASES[name]
    model = case.model()
    params = [weakref.ref(param) for param in model.parameters()]
    alive: list[weakref.ref[torch.UntypedStorage]] = []
    for module in model.modules():
        module.register_forward_hook(
            lambda module, args, output: (
                alive.append(weakref.ref(output.untyped_storage())) if isinstance(output, Tensor) else None
            )
        )
    gc.collect()
    gc.disable()
    try:
        profile_memory(model, *case.inputs(), device=device, backward=True, print_table=False)
        assert alive
        assert [reference for reference in alive if reference() is not None] == []
        del model, module
        assert [reference for reference in params if reference() is not None] == []
    finally:
        gc.enable()


def test_autocast_cache_is_left_empty() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)

    with torch.autocast("cpu", torch.bfloat16):
        profile_memory(model, x, print_table=False)
        with Ops() as ops:
            model(x)

    assert [name for name, _ in ops.found].count("aten._to_copy.default") == 3  # input, weight and bias: none was found ready


def test_users_hooks_run_and_stay() -> None:
    calls: list[str] = []
    model = nn.Linear(4, 4)
    model.register_forward_pre_hook(lambda *_: calls.append("pre"))
    model.register_forward_hook(lambda *_: calls.append("post"))
    handle = model.register_forward_hook(lambda *_: handle.remove())  # and is not used up

    profile_memory(model, torch.randn(2, 4), warmup=0, print_table=False)

    assert calls == ["pre", "post"] * 3
    assert _hooks_of(model) == 3


EDGES = ["__enter__", "claim", "__exit__", "exit", "leave", "end_block"]
MODEL, X = nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.randn(2, 8)


def _profile() -> None:
    try:
        memkit.profile_memory(MODEL, X, print_table=False, backward=True, warmup=0)
    except KeyboardInterrupt as error:
        sys.last_value = error  # as Python does at its prompt; with it all frames live on
        raise


def _run_in_a_context() -> None:
    with memkit.Rematerialize(1.0, "after", min_bytes=0):
        loss = MODEL(X).sum()
    loss.backward()


@pytest.mark.slow
@pytest.mark.parametrize("run", [_run_in_a_context, _profile])
def test_profile_that_was_interrupted_at_its_edges_is_over(run: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    before = hooks_around(MODEL)
    num_places = 0

    for function in EDGES:
        for place in interrupts(_profile, 8, within=function) if count_lines(_profile, function) else ():
            num_places += "hooks.py" in place or "interrupts.py" in place
            run()
            assert hooks_around(MODEL) == before, place

    assert num_places


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_profile_that_was_interrupted_as_it_leaves_a_mode_has_left_it(device: str) -> None:
    for place in interrupts(lambda: profile_memory(MODEL, X, device=device, print_table=False), 8, within="leave_mode"):
        assert not torch_private.num_dispatch_modes(), place
