"""What the recompute of a region must find as its forward did: generators, parameters, statistics, attributes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from memkit.activations.recomputing import region_calls
from memkit.activations.recomputing.regions import Regions, RegionSpec
from memkit.activations.saved.counts import Counts
from memkit.errors import ReplayMismatchError
from tests.activations.cases import assert_same_bits

ALL = RegionSpec()


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape or (4, 4), generator=torch.Generator().manual_seed(0)).requires_grad_()


# Generators


class Elsewhere(Tensor):
    """A tensor that says it is on a CUDA device."""

    is_cuda = True
    device = torch.device("cuda:1")


class Drops(nn.Module):
    """What draws, and has no parameters."""

    def forward(self, x: Tensor, others: Sequence[Tensor] = (), more: dict[str, Tensor] | None = None) -> Tensor:
        return sum([functional.dropout(y) for y in (*others, *(more or {}).values())], functional.dropout(x)).sin()


@pytest.mark.parametrize("place", ["keyword", "list", "dict", "buffer"])
def test_generators_are_those_of_all_tensors(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(region_calls, "states_on", lambda devices: asked.extend(devices) or ())
    region, x, there = nn.Identity(), leaf(), torch.ones(2).as_subclass(Elsewhere)
    region.forward = lambda x, *args, **kwargs: x.sin().exp()  # type: ignore[method-assign]
    if place == "buffer":
        region.register_buffer("there", there)
    calls: dict[str, Callable[[], Tensor]] = {
        "keyword": lambda: region(x, y=there),
        "list": lambda: region(x, [there]),
        "dict": lambda: region(x, y={"z": there}),
        "buffer": lambda: region(x),
    }
    with Regions({region: ALL}):
        calls[place]()

    assert asked == [torch.device("cuda:1")]


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["keyword", "list", "dict"])
def test_recompute_draws_the_same_on_a_device_of_any_input(place: str) -> None:
    region, x = Drops(), leaf(64, 64).detach().cuda().requires_grad_()
    calls: dict[str, Callable[[], Tensor]] = {
        "keyword": lambda: region(x=x),
        "list": lambda: region(torch.ones(()), [x]),
        "dict": lambda: region(torch.ones(()), more={"x": x}),
    }

    def gradients() -> list[Tensor]:
        torch.manual_seed(0)
        loss = calls[place]().sum()
        torch.rand(7, device="cuda")
        return [loss.detach(), *torch.autograd.grad(loss, x), torch.rand(3, device="cuda")]

    wanted = gradients()
    regions = Regions({region: ALL})
    with regions:
        found = gradients()

    assert_same_bits(found, wanted)
    assert not regions.not_taken


# Parameters


def block() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def test_call_with_other_parameters_is_no_region() -> None:
    region, x = block(), leaf()
    others = {name: (parameter.detach() * 1.5).requires_grad_() for name, parameter in region.named_parameters()}

    def gradients() -> list[Tensor]:
        loss = torch.func.functional_call(region, others, (x,)).sum()
        return [loss.detach(), *torch.autograd.grad(loss, [x, *others.values()])]

    wanted = gradients()
    regions = Regions({region: ALL, region[0]: ALL})
    with regions:
        found = gradients()

    assert_same_bits(found, wanted)
    assert "other parameters" in regions.not_taken[region]
    assert "other parameters" in regions.not_taken[region[0]]


def test_call_after_a_parameter_was_replaced_is_no_region() -> None:
    region, x = block(), leaf()
    regions = Regions({region: ALL})
    with regions:
        region[0].weight = nn.Parameter(torch.ones(4, 4))
        loss = region(x).sum()

    assert_same_bits(torch.autograd.grad(loss, x), torch.autograd.grad(region(x).sum(), x))
    assert "other parameters" in regions.not_taken[region]


def replace(region: nn.Sequential) -> None:
    region[0].weight = nn.Parameter(region[0].weight.detach() * 0.5)


def give_data_twice(region: nn.Sequential) -> None:
    for _ in range(2):  # the second may be where the first was
        region[0].weight.data = region[0].weight.data * 0.5


def freeze(region: nn.Sequential) -> None:
    region[0].weight.requires_grad_(False)


@pytest.mark.parametrize(
    ("change", "message"), [(replace, "was replaced"), (give_data_twice, "other data"), (freeze, "requires_grad was set")]
)
def test_parameter_that_is_changed_before_the_backward_raises(change: Callable[[nn.Sequential], None], message: str) -> None:
    region = block()
    with Regions({region: ALL}):
        loss = region(leaf()).sum()
    change(region)

    with pytest.raises(ReplayMismatchError, match=message):
        loss.backward()


def test_requires_grad_is_that_of_the_call() -> None:
    region, x = block(), leaf()
    with Regions({region: ALL}):
        freeze(region)
        loss = region(x).sum()

    assert_same_bits(torch.autograd.grad(loss, x), torch.autograd.grad(region(x).sum(), x))


# Statistics


class Folded(nn.BatchNorm1d):
    """Reads its statistics itself."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def _gradients(region: nn.Module, norm: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the bits of a call that reads statistics, which another has updated before the backward."""
    norm.reset_running_stats()
    region.train()
    region(x * 2 - 1)
    region.eval()
    loss = region(x).sum()
    region.train()
    region(x * 3 + 1)
    leaves = [x, *(parameter for parameter in region.parameters() if parameter.requires_grad)]
    found = [torch.autograd.grad(loss, leaves, retain_graph=True) for _ in range(2)]
    return [loss.detach(), *found[0], *found[1], *norm.buffers()]


@pytest.mark.parametrize("norm", [nn.InstanceNorm1d(4, track_running_stats=True), Folded(4)])
def test_call_that_reads_statistics_is_no_region(norm: nn.Module) -> None:
    region, x = nn.Sequential(nn.Conv1d(4, 4, 1), nn.Tanh(), norm, nn.Tanh()), leaf(3, 4, 5)
    wanted = _gradients(region, norm, x)
    regions = Regions({region: ALL})
    with regions:
        found = _gradients(region, norm, x)

    assert_same_bits(found, wanted)
    assert f"reads the statistics of a {type(norm).__name__}" in regions.not_taken[region]


class ByHand(nn.Module):
    """Normalizes by the statistics of a batch norm, read as a view."""

    def __init__(self, norm: nn.BatchNorm1d) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) if self.training else x * self.norm.running_var[:, None] - self.norm.running_mean[:, None]


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_call_that_reads_statistics_of_a_batch_norm_is_a_region(affine: bool, by_hand: bool) -> None:
    norm, x = nn.BatchNorm1d(4, affine=affine), leaf(3, 4, 5)
    region = nn.Sequential(nn.Conv1d(4, 4, 1), nn.Tanh(), ByHand(norm) if by_hand else norm, nn.Tanh())
    if affine and by_hand:
        norm.requires_grad_(False)
    wanted = _gradients(region, norm, x)
    counts = Counts()
    regions = Regions({region: ALL}, counts=counts)
    with regions:
        found = _gradients(region, norm, x)

    assert_same_bits(found, wanted)
    assert not regions.not_taken
    assert counts.num_replays > 0


def test_statistics_that_are_written_before_the_backward_are_an_error_of_autograd() -> None:
    norm, x = nn.BatchNorm1d(4).eval(), leaf()
    region = nn.Sequential(nn.Tanh(), norm, nn.Tanh())
    with Regions({region: ALL}):
        loss = region(x).sum()
    norm.running_mean.add_(1)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False).eval()])
def test_call_that_reads_no_statistics_is_a_region(norm: nn.Module) -> None:
    region = nn.Sequential(norm, nn.Tanh())
    regions = Regions({region: ALL})
    with regions:
        region(leaf()).sum().backward()

    assert not regions.not_taken


# Attributes


class Scaled(nn.Module):
    """What reads a plain attribute, counts in one, and leaves what it has made in one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.num_calls = 0
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.last = (x.sin() * self.scale).exp()
        return self.last * self.num_calls


def test_plain_attributes_are_those_of_the_call_and_are_put_back() -> None:
    region, x = nn.Sequential(Scaled(), nn.Tanh()), leaf()

    def gradients() -> list[Tensor]:
        region[0].num_calls, losses = 0, []
        for scale in (1.0, 0.5):
            region[0].scale = scale
            losses.append(region(x).sum())
        last = region[0].last
        region[0].scale = 0.25
        found = torch.autograd.grad(losses[0] + losses[1], x)
        assert (region[0].scale, region[0].num_calls) == (0.25, 2)
        assert region[0].last is last
        return [*losses, *found]

    wanted = gradients()
    region[0].last = None
    regions = Regions({region: ALL})
    with regions:
        found = gradients()

    assert_same_bits(found, wanted)
    assert not regions.not_taken
