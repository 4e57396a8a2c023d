"""Compiled modules as regions: recomputed as a whole by the code that was compiled, which is not compiled again."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.activations.recomputing.regions import Regions, RegionSpec
from memkit.activations.saved.counts import Counts
from memkit.device import CpuDevice, open_device
from tests.activations.cases import assert_same_bits
from tests.activations.compiled_blocks import KINDS, Context, model_of, train
from tests.compiling import FORMS, WITH_COMPILED, Backend, frames_of_memkit

pytestmark = [
    *WITH_COMPILED,
    pytest.mark.filterwarnings("ignore:.*cannot be kept to"),  # what blocks save stays at first
]
CPU = CpuDevice()


def _regions(model: nn.Module, counts: Counts | None = None) -> Context:
    regions = Regions({block: RegionSpec() for block in model if type(block).__name__ != "Shift"}, counts=counts)
    return lambda: regions


@pytest.mark.covering(1)
@pytest.mark.parametrize("form", sorted(FORMS))
@pytest.mark.parametrize(("seed", "amp"), [(0, False), (1, True), (2, False), (3, True), (4, False)])
def test_bits_are_those_of_the_compiled_blocks(seed: int, form: str, amp: bool) -> None:
    backend, again = Backend(), Backend()
    plain = train(model_of(seed, form, CPU, backend, kinds=KINDS[:-1]), CPU, nullcontext, amp=amp)
    model = model_of(seed, form, CPU, again, kinds=KINDS[:-1])
    counts = Counts()
    found = train(model, CPU, _regions(model, counts), amp=amp)

    assert_same_bits(found, plain)
    assert counts.num_replays >= 5
    num_frames = torch._dynamo.utils.counters["frames"]["total"]
    train(model, CPU, nullcontext, num_steps=1, amp=amp)
    assert (again.num_graphs, torch._dynamo.utils.counters["frames"]["total"]) == (backend.num_graphs, num_frames)
    assert frames_of_memkit() == []


@pytest.mark.parametrize("form", sorted(FORMS))
def test_compiled_block_inside_of_a_region(form: str) -> None:
    plain = train(nn.Sequential(model_of(3, form, CPU, Backend(), kinds=KINDS[:-1])), CPU, nullcontext)
    model = nn.Sequential(model_of(3, form, CPU, Backend(), kinds=KINDS[:-1]))
    inner = {block: RegionSpec() for block in list(model[0])[:4]}

    assert_same_bits(train(model, CPU, lambda: Regions({model[0]: RegionSpec(), **inner})), plain)


@pytest.mark.parametrize("form", sorted(FORMS))
def test_error_in_the_forward_leaves_nothing_on(form: str) -> None:
    model = model_of(4, form, CPU, Backend(), kinds=KINDS[:1])
    before = [dict(vars(part)) for part in model.modules()]
    with pytest.raises(RuntimeError), Regions({model[1]: RegionSpec()}):
        model[1](torch.randn(3, 3))

    assert [dict(vars(part)) for part in model.modules()] == before
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_graph_that_is_kept_is_recomputed_again() -> None:
    def grads(context: Context, model: nn.Module) -> list[Tensor]:
        torch.manual_seed(0)
        with context():
            loss = model(torch.randn(4, 8, 32)).square().mean()
        parameters = list(model.parameters())
        return [*torch.autograd.grad(loss, parameters, retain_graph=True), *torch.autograd.grad(loss, parameters)]

    plain = grads(nullcontext, model_of(5, "call", CPU, Backend(), kinds=KINDS[:3]))
    model = model_of(5, "call", CPU, Backend(), kinds=KINDS[:3])

    assert_same_bits(grads(_regions(model), model), plain)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize("form", sorted(FORMS))
@pytest.mark.parametrize(("seed", "amp"), [(0, False), (1, True), (2, True)])
def test_regions_and_contexts_beside_inductor(seed: int, form: str, amp: bool) -> None:
    device = open_device("cuda")
    backend, again = Backend("inductor"), Backend("inductor")
    plain = train(model_of(seed, form, device, backend, kinds=KINDS[:-1]), device, nullcontext, amp=amp)
    model = model_of(seed, form, device, Backend("inductor"), kinds=KINDS[:-1])
    assert_same_bits(train(model, device, nullcontext, amp=amp), plain)  # else there is nothing to compare with

    model = model_of(seed, form, device, again, kinds=KINDS[:-1])
    assert_same_bits(train(model, device, _regions(model), amp=amp), plain)
    assert again.num_graphs == backend.num_graphs
    contexts: tuple[Context, ...] = (
        lambda: memkit.CPUOffload(1.0, "inductor", min_bytes=1, window_bytes=0),
        lambda: memkit.Rematerialize(0.4, "inductor", min_bytes=1),
    )
    for context in contexts:
        model = model_of(seed, form, device, Backend("inductor"), kinds=KINDS[:-1])
        assert_same_bits(train(model, device, context, amp=amp), plain)
    assert frames_of_memkit() == []
