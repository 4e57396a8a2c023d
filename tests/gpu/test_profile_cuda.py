"""Profiles on a real GPU: what is saved there is what a run without data says, and looking costs next to nothing."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torchvision
from torch import Tensor, nn

from memkit import profile_memory
from memkit.profile import MemoryReport
from tests.models import CASES

pytestmark = pytest.mark.gpu

MODES = {
    "float32": (torch.float32, False),
    "bfloat16": (torch.bfloat16, False),
    "autocast": (torch.float32, True),
}


@pytest.fixture(autouse=True)
def _room() -> None:
    torch.cuda.empty_cache()


def _on_cuda(model: nn.Module, inputs: list[Tensor], dtype: torch.dtype) -> tuple[nn.Module, list[Tensor]]:
    return model.to("cuda", dtype), [x.to("cuda", dtype) if x.is_floating_point() else x.cuda() for x in inputs]


def _both(
    model: nn.Module, inputs: list[Tensor], *, autocast: bool = False, **options: object
) -> tuple[MemoryReport, MemoryReport]:
    with torch.autocast("cuda", torch.bfloat16) if autocast else nullcontext():
        real = profile_memory(model, *inputs, print_table=False, **options)
        meta = profile_memory(model, *inputs, device="meta", target="cuda", print_table=False, **options)
    return real, meta


def _saved(report: MemoryReport) -> list[tuple[object, ...]]:
    return [
        (record.storage, record.version, record.storage_bytes, record.category, record.module, record.save_ordinals)
        for record in report.saved
    ]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_meta_saves_what_cuda_saves(name: str, mode: str, is_training: bool) -> None:
    dtype, autocast = MODES[mode]
    model, inputs = _on_cuda(CASES[name].model().train(is_training), CASES[name].inputs(), dtype)

    real, meta = _both(model, inputs, autocast=autocast, backward=is_training)

    assert _saved(meta) == _saved(real)
    assert [row.self_bytes for row in meta.modules] == [row.self_bytes for row in real.modules]
    assert sum(row.self_bytes for row in real.modules) == real.activation_bytes


@pytest.fixture(scope="module")
def resnet50() -> tuple[nn.Module, list[Tensor]]:
    return torchvision.models.resnet50().cuda(), [torch.randn(256, 3, 224, 224, device="cuda")]


def _peak_bytes(run: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    output = run()
    torch.cuda.synchronize()
    del output
    return torch.cuda.max_memory_allocated()


def test_resnet50_saves_the_published_bytes(resnet50: tuple[nn.Module, list[Tensor]]) -> None:
    model, inputs = resnet50

    real, meta = _both(model, inputs, backward=True)

    assert f"{real.activation_bytes / 2**20:.2f}" == "20974.20"
    assert _saved(meta) == _saved(real)


def test_resnet50_peak_is_the_allocators(resnet50: tuple[nn.Module, list[Tensor]]) -> None:
    model, inputs = resnet50
    for _ in range(2):
        model(*inputs)
    plain_bytes = _peak_bytes(lambda: model(*inputs))

    real, meta = _both(model, inputs)

    assert real.forward_peak_bytes == pytest.approx(plain_bytes, rel=0.01)
    assert meta.forward_peak_bytes == pytest.approx(plain_bytes, rel=0.05)


def test_llama_saves_what_meta_says() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=16,
        num_attention_heads=16,
        vocab_size=32000,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16).train()

    real, meta = _both(model, [torch.randint(0, 32000, (8, 2048), device="cuda")], backward=True)

    assert _saved(meta) == _saved(real)


def test_buffers_and_random_state_are_as_before() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout()).cuda()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = torch.randn(2, 3, 8, 8, device="cuda")
    random_state = torch.cuda.get_rng_state()

    profile_memory(model, x, backward=True, print_table=False)

    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.cuda.get_rng_state(), random_state)
    assert all(param.grad is None for param in model.parameters())


def test_nothing_stays_allocated() -> None:
    model, x = torchvision.models.resnet18().cuda(), torch.randn(2, 3, 64, 64, device="cuda")
    profile_memory(model, x, backward=True, print_table=False)
    before = torch.cuda.memory_allocated()

    profile_memory(model, x, backward=True, print_table=False)

    assert torch.cuda.memory_allocated() == before


def test_out_of_memory_names_the_module() -> None:
    model = nn.Sequential(nn.Identity(), nn.Linear(2**20, 2**4, device="cuda"))
    x = torch.zeros(1, device="cuda").expand(2**24, 2**20)
    before = torch.cuda.memory_allocated()

    with pytest.raises(torch.OutOfMemoryError) as raised:
        profile_memory(model, x, print_table=False)

    assert (
        'memkit: out of memory in 1 (Linear); the meta device needs none (device="meta", --device meta)'
        in raised.value.__notes__
    )
    del raised
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_times_are_those_of_the_device() -> None:
    """They hold what events in the model tell, and are held by those around all."""

    class Timed(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            pairs.append(pair)
            pair[0].record()
            y = super().forward(x)
            pair[1].record()
            return y

    pairs: list[list[torch.cuda.Event]] = []
    model, x = Timed(8192, 8192).cuda(), torch.randn(8192, 8192, device="cuda", requires_grad=True)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    report = profile_memory(model, x, backward=True, print_table=False)
    end.record()
    torch.cuda.synchronize()

    inside_s = min(first.elapsed_time(last) for first, last in pairs) / 1e3
    assert inside_s <= report.forward_s
    assert report.backward_s > 0
    assert report.forward_s + report.backward_s <= start.elapsed_time(end) / 1e3
    assert report.reserved_peak_bytes >= report.forward_peak_bytes
    assert all(record.saved_at_s >= 0 and record.needed_at_s >= 0 for record in report.saved)


def test_events_wait_for_no_one() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))).cuda()
    x = torch.randn(64, 64, device="cuda")
    synchronized: list[object] = []
    original = torch.cuda.synchronize

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", lambda device=None: (synchronized.append(device), original(device)))
        profile_memory(model, x, warmup=0, print_table=False)

    assert len(synchronized) == 6  # before and after each of the three passes, however many modules there are
