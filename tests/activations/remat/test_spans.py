"""Neighbouring children of a `Sequential` are recomputed as one where no module holds them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.activations.recomputing.regions import Regions, RegionSpec
from memkit.activations.saved.state import remat_states
from memkit.core.sequentials import SequentialSpan
from memkit.device import Device
from memkit.plan import Action
from tests.activations.cases import assert_same_bits
from tests.activations.remat.conftest import NO_PLAN_FITS, Remat
from tests.activations.remat.test_regions_in_steps import run
from tests.activations.remat.test_steady import train

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(NO_PLAN_FITS), pytest.mark.usefixtures("dear_ops", "quick_plans")]


def flat(count: int = 12) -> nn.Sequential:
    """Return the layers of some blocks, with no module for each."""
    layers = (
        layer
        for _ in range(count)
        for layer in (nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 32))
    )
    return nn.Sequential(nn.Linear(32, 32), *layers)


class ConvNormActivation(nn.Sequential):
    """A `Sequential` of another name."""

    def __init__(self, channels: int) -> None:
        super().__init__(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(inplace=True))


class Images(nn.Module):
    """Takes rows for images."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.features = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x.reshape(-1, 2, 8, 8)).flatten(1)


def like_vgg() -> nn.Module:
    layers: list[nn.Module] = []
    channels = 2
    for width in (4, 4, 4, 4, 0, 8, 8, 8, 8, 8, 0, 16, 16, 16, 16, 16):
        layers += [nn.MaxPool2d(2)] if not width else [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
        channels = width or channels
    return Images(*layers)


def nested() -> nn.Module:
    inner = [nn.Sequential(*flat(3)[1:], ConvRow(), nn.Linear(32, 32)) for _ in range(4)]
    return nn.Sequential(nn.Linear(32, 32), *inner, *flat(2))


class ConvRow(nn.Module):
    """Has a `ConvNormActivation` in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(ConvNormActivation(2) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x.reshape(-1, 2, 4, 4)).reshape(x.shape)


class Recurrent(nn.Module):
    """Calls the same layers several times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*flat(3), nn.BatchNorm1d(32))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = x + self.layers(x)
        return x


MODELS = {
    "dropout": flat,
    "images": like_vgg,
    "nested": nested,
    "recurrence": Recurrent,
}


def spans_in_plan(tag: str) -> set[str]:
    """Return the names of the spans that run again in the next steps."""
    settled = remat_states[tag].settled
    if settled is None or settled.regions is None:
        return set()
    reasons = {save.reason for save in settled.regions.plan.saves if save.action is Action.RECOMPUTE}
    return {reason.removesuffix(" runs again") for reason in reasons if ":" in reason}


def steady(model: nn.Module, x: Tensor, remat_on: Remat, tag: str, budget: float = 0.5) -> None:
    """Run steps until spans are called."""
    for _ in range(4):
        train(model, x, lambda: remat_on(budget, tag))
    assert not memkit.stats(tag).is_recorded
    assert spans_in_plan(tag)


def compare(model: nn.Module, x: Tensor, remat_on: Remat, tag: str, budget: float = 0.5) -> None:
    """Compare the bits of a step to the plain one's."""
    state = copy.deepcopy(model.state_dict())
    torch.manual_seed(1)
    wanted = train(model, x, nullcontext)
    model.load_state_dict(state)
    torch.manual_seed(1)
    assert_same_bits(train(model, x, lambda: remat_on(budget, tag)), wanted)


def own_attributes(model: nn.Module) -> list[set[str]]:
    return [set(vars(part)) for part in model.modules()]


@pytest.mark.covering(1)
@pytest.mark.parametrize("budget", [0.5, 0.3, 0.15])
@pytest.mark.parametrize("name", MODELS)
def test_bits_are_those_of_the_plain_run(name: str, budget: float, device: Device, remat_on: Remat) -> None:
    plain = run(MODELS[name], device, nullcontext, 6)
    found = run(MODELS[name], device, lambda: remat_on(budget, "bits"), 6)

    for wanted, step in zip(plain, found, strict=True):
        assert_same_bits(step, wanted)
    assert memkit.stats("bits").live_records == 0
    if budget == 0.5:
        assert not memkit.stats("bits").is_recorded
        assert spans_in_plan("bits")


def test_span_begins_at_no_layer_that_writes_to_what_it_is_given(device: Device, remat_on: Remat) -> None:
    model, x = like_vgg().to(device.torch_device), torch.randn(32, 128, device=device.torch_device)
    steady(model, x, remat_on, "begins")
    (trace,) = remat_states["begins"].traces
    assert trace.ops is not None

    starts = {int(span.call.name.split(".")[1].split(":")[0]) for span in trace.ops.spans}
    assert len(starts) > 3
    assert not any(isinstance(model.features[start], nn.ReLU) for start in starts)


# What others see of it


def test_nothing_is_left_on_the_model(device: Device, remat_on: Remat) -> None:
    model, x = flat().to(device.torch_device), torch.randn(16, 32, device=device.torch_device)
    before, names, keys = own_attributes(model), [name for name, _ in model.named_modules()], list(model.state_dict())
    steady(model, x, remat_on, "left")
    with remat_on(0.5, "left"):
        assert [name for name, _ in model.named_modules()] == names
        assert list(model.state_dict()) == keys
        assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
        loss = model(x).sum()

    assert own_attributes(model) == before
    loss.backward()
    assert own_attributes(model) == before
    with pytest.raises(RuntimeError, match="shape"), remat_on(0.5, "left"):
        model(torch.randn(16, 31, device=device.torch_device))
    assert own_attributes(model) == before
    compare(model, x, remat_on, "left")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copy_that_is_made_within_runs_as_the_model(
    copied: Callable[[nn.Module], nn.Module], device: Device, remat_on: Remat
) -> None:
    model, x = flat().to(device.torch_device), torch.randn(16, 32, device=device.torch_device)
    steady(model, x, remat_on, "copied")
    with remat_on(0.5, "copied"):
        other = copied(model)
    with torch.no_grad():
        other[-1].bias.add_(1.0)  # which only the copy has
    torch.manual_seed(0)
    wanted = model(x) + 1.0
    torch.manual_seed(0)

    torch.testing.assert_close(other(x), wanted)
    compare(copied(other), x, remat_on, "of the copy")
    for _ in range(4):
        compare(other, x, remat_on, "of the copy")


def test_hooks_on_the_sequential_see_what_they_see_in_the_plain_run(device: Device, remat_on: Remat) -> None:
    model, x = flat().to(device.torch_device), torch.randn(16, 32, device=device.torch_device)
    seen: list[tuple[type[nn.Module], int, Tensor]] = []
    model.register_forward_pre_hook(lambda module, args: seen.append((type(module), len(module), args[0].detach())))
    model.register_forward_hook(lambda module, args, output: seen.append((type(module), len(args), output.detach())))
    for _ in range(6):
        seen.clear()
        compare(model, x, remat_on, "seen")
        assert [one[:2] for one in seen] == [(nn.Sequential, len(model)), (nn.Sequential, 1)] * 2
        assert_same_bits([one[2] for one in seen[:2]], [one[2] for one in seen[2:]])

    assert spans_in_plan("seen")


def test_layer_with_a_hook_is_in_no_span(device: Device, remat_on: Remat) -> None:
    model, x = flat().to(device.torch_device), torch.randn(16, 32, device=device.torch_device)
    seen: list[Tensor] = []
    model[7].register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    for _ in range(6):
        seen.clear()
        compare(model, x, remat_on, "hooked")
        assert len(seen) == 2

    found = [tuple(map(int, name.split(":"))) for name in spans_in_plan("hooked")]
    assert found
    assert not any(first <= 7 < stop for first, stop in found)


def hook(model: nn.Sequential, place: int) -> None:
    model[place].register_forward_hook(lambda module, args, output: output * 2)


def replace_one(model: nn.Sequential, place: int) -> None:
    model[place] = nn.ReLU(inplace=True)


def insert(model: nn.Sequential, place: int) -> None:
    model.insert(place, nn.Tanh())


def append(model: nn.Sequential, place: int) -> None:
    model.append(nn.Tanh())


def override(model: nn.Sequential, place: int) -> None:
    model.forward = lambda x: nn.Sequential.forward(model, x) * 2  # type: ignore[method-assign]


def layer_in_a_span(model: nn.Sequential, tag: str) -> int:
    """Return the place of a layer that may be replaced, or get neighbours."""
    spans = [tuple(map(int, name.split(":"))) for name in spans_in_plan(tag)]
    places = [place for first, stop in spans for place in range(first, stop)]
    return next(place for place in places if isinstance(model[place], nn.Dropout | nn.GELU))


@pytest.mark.covering(1)
@pytest.mark.parametrize("change", [hook, replace_one, insert, append, override])
def test_change_of_the_model_is_noticed(change: Callable[[nn.Sequential, int], None], device: Device, remat_on: Remat) -> None:
    model, x = flat().to(device.torch_device), torch.randn(16, 32, device=device.torch_device)
    steady(model, x, remat_on, "change")
    change(model, layer_in_a_span(model, "change"))
    recorded = []
    for _ in range(3):
        compare(model, x, remat_on, "change")
        recorded.append(memkit.stats("change").is_recorded)

    assert recorded[0]


@pytest.mark.parametrize("change", [replace_one, insert, append])
def test_change_within_the_context_is_heeded(
    change: Callable[[nn.Sequential, int], None], device: Device, remat_on: Remat
) -> None:
    model, x = flat().to(device.torch_device), torch.randn(16, 32, device=device.torch_device)
    steady(model, x, remat_on, "change")
    place = layer_in_a_span(model, "change")
    model.zero_grad()
    torch.manual_seed(2)
    with remat_on(0.5, "change"):
        change(model, place)
        loss = model(x).sum()
    loss.backward()
    found = [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
    torch.manual_seed(2)

    assert_same_bits(found, train(model, x, nullcontext))
    compare(model, x, remat_on, "change")
    assert memkit.stats("change").is_recorded


class Counts(nn.GELU):
    """Counts its calls, in an attribute."""

    num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return super().forward(x)


class Other(nn.Sequential):
    """Calls its children in another way."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x) * 0.5
        return x


def test_only_what_may_run_twice_is_in_a_span(device: Device, remat_on: Remat) -> None:
    layers = [*flat(6), Counts(), *flat(6), Other(*flat(4))]
    model, x = nn.Sequential(*layers).to(device.torch_device), torch.randn(16, 32, device=device.torch_device)
    for _ in range(6):
        compare(model, x, remat_on, "twice")

    (trace,) = remat_states["twice"].traces
    assert trace.ops is not None
    found = [tuple(map(int, span.call.name.split(":"))) for span in trace.ops.spans]
    assert found
    assert not any(first <= 31 < stop for first, stop in found)
    assert model[31].num_calls == 12


# Regions of spans themselves


def gradients(model: nn.Module, x: Tensor, context: Callable[[], AbstractContextManager[object]]) -> list[Tensor]:
    torch.manual_seed(0)
    model.zero_grad()
    with context():
        loss = sum(model(x * scale).square().mean() for scale in (1.0, 2.0))
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters()), torch.get_rng_state()]


def test_span_in_a_span_and_in_a_region_that_is_recomputed() -> None:
    model, x = flat(4), torch.randn(8, 32)
    plain = gradients(model, x, nullcontext)
    inner, outer, next_one = SequentialSpan(model, 2, 4), SequentialSpan(model, 1, 9), SequentialSpan(model, 9, 14)
    first, second = RegionSpec(calls=frozenset({0})), RegionSpec(calls=frozenset({1}))
    for chosen in (
        {inner: RegionSpec(), outer: RegionSpec(), next_one: second},
        {inner: second, outer: first, next_one: RegionSpec()},
        {model: first, inner: second, next_one: second},
        {model: RegionSpec(), inner: RegionSpec(), outer: second},
    ):
        regions = Regions(chosen)
        assert_same_bits(gradients(model, x, lambda: regions), plain)  # noqa: B023
        assert regions.not_taken == {}
        assert "forward" not in vars(model)


def test_spans_of_two_contexts_take_turns() -> None:
    model, x = flat(4), torch.randn(8, 32)
    plain = gradients(model, x, nullcontext)
    outer, inner = Regions({SequentialSpan(model, 1, 6): RegionSpec()}), Regions({SequentialSpan(model, 3, 8): RegionSpec()})
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    found = gradients(model, x, nullcontext)
    inner.__exit__(None, None, None)

    assert_same_bits(found, plain)
    assert "forward" not in vars(model)
    assert list(inner.num_calls.values()) == [2]
    with outer:
        assert_same_bits(gradients(model, x, lambda: inner), plain)
    assert "forward" not in vars(model)
