"""What CUDA's kernels take, refuse and keep is what a run without data says of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from memkit import profile_memory
from memkit.errors import ProfileError
from tests.profile.calls import CONSTANT_CALLS, DTYPE_CALLS, DTYPE_PAIRS, FORMAT_CALLS, FORMAT_INPUTS
from tests.profile.cases import Biased, Calls, Function, both, saved

pytestmark = pytest.mark.gpu

# What is kept beside the tensors, such as the state of random numbers, differs from one version to the next by a few bytes.
FEW_BYTES = 64


def _bytes(model: nn.Module, *inputs: Tensor, **options: object) -> tuple[list[int], list[int]]:
    real, meta = both(model, *inputs, target="cuda", **options)
    return tuple([record.storage_bytes for record in run.saved if record.storage_bytes > FEW_BYTES] for run in (real, meta))


@pytest.mark.parametrize("length", [64, 60])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_with_a_learned_bias(dtype: torch.dtype, contiguous: bool, dropout_p: float, length: int) -> None:
    model = Biased(contiguous=contiguous, dropout_p=dropout_p, width=64).to("cuda", dtype)

    real, meta = _bytes(model, torch.randn(2, length, 64, device="cuda", dtype=dtype), backward=True)

    assert meta == real


def test_t5_saves_what_meta_says() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(num_layers=4, num_decoder_layers=4, use_cache=False)
    model = transformers.T5Model(config).to("cuda", torch.bfloat16).train()
    inputs = {
        "input_ids": torch.randint(0, 32000, (4, 256), device="cuda"),
        "decoder_input_ids": torch.randint(0, 32000, (4, 64), device="cuda"),
    }

    real, meta = both(model, target="cuda", kwargs=inputs, backward=True)

    assert meta.activation_bytes == pytest.approx(real.activation_bytes, abs=FEW_BYTES * 16)
    assert len(meta.saved) == len(real.saved)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        (((2, 4, 64, 16), (2, 1, 64, 16), (2, 1, 64, 16)), {}),
        (((2, 4, 64, 16), (2, 1, 64, 16), (2, 1, 64, 16)), {"is_causal": True}),
        (((2, 4, 64, 16), (2, 2, 64, 16), (2, 2, 64, 16)), {"enable_gqa": True}),
        (((4, 64, 16),) * 3, {}),
        (((2, 4, 64, 16),) * 3, {"dropout_p": 0.1}),
        (((2, 4, 64, 16),) * 3, {"dropout_p": 0.125}),
        (((2, 4, 64, 16), (2, 4, 60, 16), (2, 4, 60, 16)), {}),
        (((2, 4, 64, 12),) * 3, {}),
        (((2, 4, 64, 12),) * 3, {"dropout_p": 0.1}),
    ],
)
def test_attention_takes_the_operation_that_cuda_takes(
    shapes: tuple[tuple[int, ...], ...], options: dict[str, object], dtype: torch.dtype
) -> None:
    inputs = [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]
    attend = functional.scaled_dot_product_attention

    real, meta = _bytes(Function(lambda q, k, v: attend(q.sin(), k.sin(), v.sin(), **options).exp()), *inputs, backward=True)

    assert meta == real


@pytest.mark.parametrize("kind", FORMAT_INPUTS)
@pytest.mark.parametrize("name", FORMAT_CALLS)
def test_outputs_have_the_strides_that_cuda_gives_them(name: str, kind: str) -> None:
    found: list[object] = []

    def call(x: Tensor) -> Tensor:
        output = FORMAT_CALLS[name](x)
        found.append((output.shape, output.stride(), output.dtype))
        return output

    x = FORMAT_INPUTS[kind](torch.randn(2, 4, 6, 6, device="cuda"))

    try:
        call(x)
    except RuntimeError as error:
        pytest.skip(f"refused by CUDA itself: {error}")
    profile_memory(Function(call), x, device="meta", target="cuda", print_table=False)

    assert found[1] == found[0]


@pytest.mark.parametrize(("of_input", "of_weight"), DTYPE_PAIRS)
@pytest.mark.parametrize("name", DTYPE_CALLS)
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_dtypes_are_refused_where_cuda_refuses_them(name: str, of_input: torch.dtype, of_weight: torch.dtype) -> None:
    model = Calls(lambda x, w, _: DTYPE_CALLS[name](x, w)).to("cuda", of_weight)
    x = torch.randn(4, 4, dtype=of_input, device="cuda", requires_grad=True)
    try:
        model(x)
    except (RuntimeError, ValueError):
        with pytest.raises((ProfileError, RuntimeError, ValueError)):
            profile_memory(model, x, device="meta", target="cuda", print_table=False)
    else:
        real, meta = _bytes(model, x)
        assert meta == real


_NOT_ON_CUDA = ("pow", "logit_scale", "made_on_cpu", "labels", "attention_mask")
"""Constants on the host that CUDA's kernels do not take."""
_MOVED_TWICE = pytest.mark.xfail(
    strict=True, reason="a tensor that is no buffer stays on the host when a model moves; without data it is where the model is"
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[_MOVED_TWICE] if name == "attribute" else [])
        for name in CONSTANT_CALLS
        if name not in _NOT_ON_CUDA
    ],
)
def test_constants_are_saved_as_cuda_saves_them(name: str) -> None:
    real, meta = both(Calls(CONSTANT_CALLS[name]).cuda(), torch.randn(4, 4, device="cuda"), target="cuda", backward=True)

    assert saved(meta) == saved(real)


@pytest.mark.parametrize(
    "make",
    [
        lambda device: torch.arange(4, device=device).float(),
        lambda device: torch.tensor([1.0, 2.0, 3.0, 4.0], device=device),
        lambda device: torch.linspace(0, 1, 4).to(device),
        lambda device: torch.arange(4).to(device).float(),
    ],
)
def test_a_constant_that_is_on_the_gpu_does_not_move(make: Callable[[torch.device], Tensor]) -> None:
    def call(x: Tensor) -> Tensor:
        constant = make(x.device)
        return x * constant + x.exp() * constant.to(x.device)

    real, meta = both(Function(call), torch.randn(4, device="cuda", requires_grad=True), target="cuda", backward=True)

    assert saved(meta) == saved(real)


@pytest.mark.parametrize("shape", [(2, 5, 8), (2, 5, 8, 3)])
def test_batch_norm_of_what_has_gaps_saves_a_copy(shape: tuple[int, ...]) -> None:
    model = nn.ModuleList([nn.BatchNorm1d(8), nn.BatchNorm2d(8)])[len(shape) - 3].cuda()
    x = torch.randn(shape, device="cuda").transpose(1, 2)

    real, meta = _bytes(model, x, backward=True)

    assert meta == real
