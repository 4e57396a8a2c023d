"""A forward's side effects happen once: statistics, buffers and random numbers end as in the plain run."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memkit
from memkit.device import Device, default_generator
from tests.activations.cases import assert_same_bits, inputs_on
from tests.activations.remat.cases import own_generators
from tests.activations.remat.conftest import NO_PLAN_FITS, Remat

pytestmark = [pytest.mark.filterwarnings(NO_PLAN_FITS), pytest.mark.usefixtures("quick_plans")]


class Quantizer(nn.Module):
    """A codebook that is read, and then moved in place towards the result: legal, as the gradient needs neither."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(4, 32, generator=torch.Generator().manual_seed(1)))
        self.register_buffer("counts", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x.detach(), self.codes).argmin(1)
        found = functional.embedding(nearest, self.codes)
        with torch.no_grad():
            self.counts.mul_(0.9).add_(torch.bincount(nearest, minlength=4))
            self.codes.index_add_(0, nearest, x - found, alpha=0.1)
            self.codes /= self.codes.norm(dim=1, keepdim=True)
        return x * found.sin() + (found - x).detach().exp()


def _network() -> nn.Module:
    return nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(32, 32)),
        nn.BatchNorm1d(32),
        nn.ReLU(inplace=True),
        Quantizer(),
        nn.BatchNorm1d(32, momentum=None),
        nn.Dropout(0.3),
        nn.RReLU(),
        Quantizer(),
        nn.Linear(32, 32),
        nn.Unflatten(1, (4, 8)),
        nn.InstanceNorm1d(4, track_running_stats=True),
        nn.Flatten(),
    )


def _train(device: torch.device, context: AbstractContextManager[object]) -> list[Tensor]:
    torch.manual_seed(0)
    model = _network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = []
    for number in range(5):
        x = inputs_on(device)[0]
        with context:
            loss = model(x + number).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        results += [loss.detach(), x.grad, torch.get_rng_state(), default_generator(device).get_state()]
    return [*results, *[tensor.clone() for tensor in model.state_dict().values()]]


@pytest.mark.covering(2)
@pytest.mark.core(1)
@pytest.mark.parametrize("budget", [0.8, 0.4, 0.1])
@pytest.mark.parametrize("policy", ["plan", "dtr"])
def test_buffers_and_generators(policy: str, budget: float | str, device: Device, remat_on: Remat) -> None:
    plain = _train(device.torch_device, nullcontext())

    found = _train(device.torch_device, remat_on(budget, "train", policy=policy))

    assert_same_bits(found, plain)
    assert memkit.stats("train").num_replays > 0


def test_generators_of_ones_own_end_where_they_would(torch_device: torch.device, remat_on: Remat) -> None:
    def run(context: AbstractContextManager[object]) -> list[Tensor]:
        generators = [torch.Generator(torch_device).manual_seed(seed) for seed in (1, 2)]
        x, w = inputs_on(torch_device)
        with context:
            for generator in (*generators, generators[0]):
                x = (functional.linear(x, w) * torch.rand(8, 32, generator=generator, device=torch_device)).sin().exp()
            before = [generator.get_state() for generator in generators]
        x.sum().backward()
        assert_same_bits([generator.get_state() for generator in generators], before)
        return [w.grad, *before, torch.get_rng_state()]

    assert_same_bits(run(remat_on(0.1, "generators")), run(nullcontext()))
    assert memkit.stats("generators").num_replays > 0


def test_generators_are_left_alone_when_a_replay_fails(remat_on: Remat) -> None:
    x, w = inputs_on(torch.device("cpu"))
    with remat_on("1B", "fails"):
        loss = memkit.recompute(own_generators(x, w).sin()).exp().sum()
    state = torch.get_rng_state()
    with torch.no_grad():
        w.add_(1)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_root_that_a_recorded_op_writes_to_is_copied_first(torch_device: torch.device, remat_on: Remat) -> None:
    def run(context: AbstractContextManager[object]) -> list[Tensor]:
        x, _ = inputs_on(torch_device)
        root = torch.full((8, 32), 0.5, device=torch_device)
        with context:
            loss = (memkit.recompute((root * 2).sin()) * x).sum()
            root.mul_(3)
            loss = loss + (memkit.recompute((root * 2).sin()) * x).sum()
            root.zero_()
        loss.backward()
        return [x.grad, root]

    plain = run(nullcontext())
    for _ in range(4):
        assert_same_bits(run(remat_on(0.3, "root")), plain)
    assert memkit.stats("root").num_replays > 0


@pytest.mark.parametrize("budget", [0.1, "1B"])
def test_root_that_is_written_to_unrecorded_raises(budget: float | str, torch_device: torch.device, remat_on: Remat) -> None:
    x, _ = inputs_on(torch_device)
    root = torch.rand(8, 32, device=torch_device)
    with remat_on(budget, "unrecorded"):
        loss = (memkit.recompute(root.sin().exp()) * x).sum()
    root.add_(1)

    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .*\[8, 32\].*at version 1; expected version 0"):
        loss.backward()


def test_what_another_thread_writes_is_not_taken_for_what_was_recorded(remat_on: Remat) -> None:
    x, _ = inputs_on(torch.device("cpu"))
    values = x.detach().clone()
    with remat_on("1B", "thread"):
        y = values * 2
        thread = threading.Thread(target=y.mul_, args=(3,))
        thread.start()
        thread.join()
        loss = (y * x).sum()
    del y, thread
    loss.backward()

    assert torch.equal(x.grad, values * 2 * 3)


def test_memory_that_numpy_fills_is_kept(remat_on: Remat) -> None:
    x, _ = inputs_on(torch.device("cpu"))
    for _ in range(3):
        x.grad = None
        with remat_on("1B", "numpy"):
            filled = torch.empty(8, 32)
            filled.numpy()[:] = 3.0
            scaled = filled * 2
            loss = (filled * x).exp().sum() + (scaled * x.sin()).sum()
        loss.backward()
        wanted = torch.autograd.grad((3 * x).exp().sum() + (6 * x.sin()).sum(), x)[0]

        assert torch.equal(x.grad, wanted)


def test_max_norm_of_an_embedding_is_applied_once(remat_on: Remat) -> None:
    def run(context: AbstractContextManager[object]) -> list[Tensor]:
        weight = (torch.arange(32.0).view(4, 8) / 9).requires_grad_()
        with context:
            found = functional.embedding(torch.tensor([0, 3, 3, 1]), weight, max_norm=1.0)
            loss = found.sin().exp().sum()
        loss.backward()
        return [weight.grad, weight.detach()]

    assert_same_bits(run(remat_on("1B", "renormed")), run(nullcontext()))
