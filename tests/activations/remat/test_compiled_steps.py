"""Models of compiled blocks under a budget: a known step recomputes as few blocks as the budget needs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.activations.saved.state import remat_states
from memkit.device import CpuDevice, Device
from memkit.errors import BudgetInfeasible
from tests.activations.cases import assert_same_bits
from tests.activations.compiled_blocks import MLP, WIDTH
from tests.activations.remat.conftest import NO_PLAN_FITS
from tests.compiling import WITH_COMPILED, Backend, in_form

NUM_BLOCKS = 8
Context = Callable[[], AbstractContextManager[object]]

pytestmark = WITH_COMPILED


class Loop:
    """The training loop of a model of compiled blocks. All its steps begin in the same state."""

    def __init__(self, name: str, device: Device, form: str = "forward") -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.device, self.backend = device, Backend()
        self._forward = getattr(self, f"_{name}")(form)

    def _blocks(self, form: str) -> Callable[[], Tensor]:
        torch_device = self.device.torch_device
        blocks = [in_form(form, MLP().to(torch_device), self.backend) for _ in range(NUM_BLOCKS)]
        self.model: nn.Module = nn.Sequential(*blocks)
        x = torch.randn(4, 8, WIDTH).to(torch_device)
        return lambda: self.model(x)  # type: ignore[no-any-return]

    def _llama(self, form: str) -> Callable[[], Tensor]:
        transformers = pytest.importorskip("transformers")
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64}
        config = transformers.LlamaConfig(num_hidden_layers=NUM_BLOCKS, use_cache=False, **sizes)
        model = self.model = transformers.LlamaModel(config).to(self.device.torch_device)
        for block in model.layers:
            assert in_form(form, block, self.backend) is block
        tokens = torch.randint(64, (2, 16)).to(self.device.torch_device)
        return lambda: model(input_ids=tokens)[0]  # type: ignore[no-any-return]

    def step(self, context: Context = nullcontext) -> list[Tensor]:
        self.model.zero_grad()
        torch.manual_seed(1)
        with context():
            out = self._forward()
        loss = out.square().mean()
        del out
        loss.backward()
        grads = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        return [loss.detach(), *grads, torch.get_rng_state()]

    def remat(self, budget: float | str, tag: str, **options: bool) -> Context:
        return lambda: memkit.Rematerialize(budget, tag, min_bytes=1024, device=self.device, **options)


def num_regions(tag: str) -> int:
    """Return how many blocks the next step recomputes."""
    settled = remat_states[tag].settled
    return 0 if settled is None or settled.regions is None else settled.regions.num_regions


_LOOPS = [(name, form) for name in ("blocks", "llama") for form in ("forward", "call")]


@pytest.mark.covering(2)
@pytest.mark.filterwarnings(NO_PLAN_FITS)
@pytest.mark.parametrize(
    ("name", "form", "device"),
    [
        *((*loop, "late") for loop in _LOOPS),
        ("blocks", "call", "cpu"),
        ("llama", "forward", "seed 0"),
        *(pytest.param(*loop, "cuda", marks=pytest.mark.gpu) for loop in _LOOPS),
    ],
    indirect=["device"],
)
def test_fewer_blocks_are_recomputed_the_larger_the_budget(name: str, form: str, device: Device) -> None:
    plain = Loop(name, device, form).step()
    loop, found = Loop(name, device, form), []  # which is compiled under the first budget, and used under all
    for budget in ("1B", 0.3, 0.5, 0.7):
        tag = f"{name} {budget}"
        for number in range(6):
            assert_same_bits(loop.step(loop.remat(budget, tag)), plain)
            if budget == "1B" and number == 1:
                num_graphs, num_frames = loop.backend.num_graphs, torch._dynamo.utils.counters["frames"]["total"]
        stats = memkit.stats(tag)
        assert stats.num_replays == num_regions(tag) > 0
        assert not stats.is_recorded
        assert budget == "1B" or stats.ledger_peak_bytes <= budget * stats.saved_bytes  # type: ignore[operator]
        assert (loop.backend.num_graphs, torch._dynamo.utils.counters["frames"]["total"]) == (num_graphs, num_frames)
        found.append(stats.num_replays)

    assert found == sorted(found, reverse=True)
    assert found[0] >= NUM_BLOCKS - 1  # of the last one, the backward needs all at once
    assert found[-1] <= NUM_BLOCKS // 2


# What blocks take


def device_seconds(tag: str) -> dict[str, float]:
    """Return the known seconds of compiled modules' calls."""
    trace = remat_states[tag].traces.latest
    assert trace is not None
    assert trace.ops is not None
    return {call.name: call.device_s for call in trace.ops.calls}


@pytest.mark.filterwarnings(NO_PLAN_FITS)
@pytest.mark.parametrize("is_warm", [False, True])
def test_each_compiled_block_is_timed_and_nothing_else(is_warm: bool, device: Device) -> None:
    loop = Loop("llama", device)
    if is_warm:
        loop.step()
    for _ in range(3):
        loop.step(loop.remat(0.5, "timed"))
    found = device_seconds("timed")

    assert {name for name, seconds in found.items() if seconds > 0} == {f"layers.{number}" for number in range(NUM_BLOCKS)}
    assert len({found[f"layers.{number}"] for number in range(NUM_BLOCKS)}) == 1  # they are alike


@pytest.mark.filterwarnings(NO_PLAN_FITS)
def test_block_is_not_timed_while_it_is_compiled() -> None:
    loop, state = Loop("blocks", CpuDevice()), lambda: remat_states["compiling"]
    loop.step(loop.remat(0.5, "compiling"))
    assert state()._timed == []  # kernels are loaded in the first step
    torch._dynamo.reset()
    loop.step(loop.remat(0.5, "compiling"))
    ((trace, recording),) = state()._timed
    assert trace is not None
    assert [trace.calls[place].name for place, _, _ in recording.call_times] == [str(place) for place in range(2, NUM_BLOCKS)]

    loop.step(loop.remat(0.5, "compiling"))
    found = device_seconds("compiling")
    assert found["1"] == found["2"] > 0  # they are alike


# What is told


def test_budget_that_blocks_can_keep_to_is_not_warned_of(device: Device) -> None:
    loop = Loop("llama", device)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*cannot be kept to")
        for strict in (False, True):
            for _ in range(6):
                loop.step(loop.remat(0.5, f"quiet {strict}", strict=strict))
            stats = memkit.stats(f"quiet {strict}")
            assert stats.num_replays > 0
            assert stats.ledger_peak_bytes <= 0.5 * stats.saved_bytes


def test_budget_that_blocks_cannot_keep_to_is_told_with_the_least_that_they_need(device: Device) -> None:
    loop = Loop("llama", device)
    loop.step(loop.remat("1B", "least", strict=True))
    with pytest.raises(BudgetInfeasible, match="a budget of 1 byte cannot be kept to: the smallest is") as caught:
        loop.step(loop.remat("1B", "least", strict=True))
    with pytest.warns(UserWarning, match="a budget of 1 byte cannot be kept to: .* exceeded by as little as can be"):
        loop.step(loop.remat("1B", "least"))

    smallest = caught.value.smallest_bytes
    for _ in range(4):
        loop.step(loop.remat(f"{smallest}B", "least", strict=True))
    stats = memkit.stats("least")
    assert stats.num_replays == NUM_BLOCKS
    assert stats.ledger_peak_bytes <= smallest


def test_second_forward_in_a_context_is_told_of_at_once(device: Device) -> None:
    loop = Loop("blocks", device)
    with loop.remat(0.5, "turns", strict=True)():
        loop._forward().sum().backward()
        with pytest.raises(BudgetInfeasible):
            loop._forward()
