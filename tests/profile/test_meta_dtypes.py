"""What a run with data refuses for its dtypes, a run without data refuses by name; what it takes saves the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from memkit import profile_memory
from memkit.errors import ProfileError
from memkit.profile.simulate.target import check_dtypes
from tests.profile.calls import AUTOCAST_CALLS, DTYPE_CALLS, DTYPE_PAIRS, FORMAT_CALLS, FORMAT_INPUTS, channels_last
from tests.profile.cases import Calls, Function, Ops, both, saved


@pytest.mark.parametrize(
    ("of_input", "of_weight", "amp"),
    [*((*pair, False) for pair in DTYPE_PAIRS), *((dtype, torch.float32, True) for dtype in (torch.float32, torch.bfloat16))],
)
@pytest.mark.parametrize("name", [*DTYPE_CALLS, *AUTOCAST_CALLS])
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_dtypes_are_taken_or_refused_as_by_the_cpu(name: str, of_input: torch.dtype, of_weight: torch.dtype, amp: bool) -> None:
    model = Calls(lambda x, w, _: {**DTYPE_CALLS, **AUTOCAST_CALLS}[name](x, w)).to(of_weight)
    x = torch.randn(4, 4, dtype=of_input, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        try:
            model(x)
        except RuntimeError:
            with pytest.raises((ProfileError, RuntimeError)):
                profile_memory(model, x, device="meta", target="cpu", print_table=False)
        else:
            real, meta = both(model, x)
            assert saved(meta) == saved(real)


def test_a_refusal_names_the_module_the_operation_the_dtypes_and_what_to_do() -> None:
    model = nn.Sequential(nn.Identity(), nn.Conv2d(3, 4, 3, bias=False))

    with pytest.raises(ProfileError) as raised:
        profile_memory(model, torch.randn(2, 3, 8, 8, dtype=torch.bfloat16), device="meta", print_table=False)

    assert str(raised.value) == (
        "1 (Conv2d) cannot run: convolution needs tensors of one dtype; found bfloat16 and float32. "
        "Cast the model or its inputs (--dtype), or run under torch.autocast (--autocast)"
    )


def test_a_model_that_catches_the_refusal_goes_on_as_with_data() -> None:
    def forward(x: Tensor, w: Tensor, _: nn.Module) -> Tensor:
        try:
            return x @ w
        except RuntimeError:
            return x.to(w.dtype) @ w

    real, meta = both(Calls(forward), torch.randn(4, 4, dtype=torch.bfloat16))

    assert saved(meta) == saved(real)


@pytest.mark.parametrize(
    ("op", "args", "cuda", "cpu"),
    [
        # the input in half precision beside parameters in single, and the other way round
        (torch.ops.aten.native_batch_norm.default, ("half", "single", "single", "single", "single"), True, True),
        (torch.ops.aten.native_batch_norm.default, ("single", "half", "half", "single", "single"), False, False),
        (torch.ops.aten.native_layer_norm.default, ("half", None, "single", "single"), False, True),
        (torch.ops.aten.native_group_norm.default, ("half", "single", "single"), False, True),
        (torch.ops.aten.native_group_norm.default, ("half", None, None), True, True),
    ],
)
def test_normalizations_take_single_precision_beside_half_where_the_target_does(
    op: torch._ops.OpOverload, args: tuple[str | None, ...], cuda: bool, cpu: bool
) -> None:
    dtypes = {"half": torch.bfloat16, "single": torch.float32}
    tensors = [None if kind is None else torch.empty(4, dtype=dtypes[kind], device="meta") for kind in args]

    def taken(target: str) -> bool:
        try:
            check_dtypes(op, tensors, target)
        except RuntimeError:
            return False
        return True

    assert (taken("cuda"), taken("cpu")) == (cuda, cpu)


@pytest.mark.parametrize("shape", [(4, 4), (2, 4, 2, 2)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_classes_are_refused_where_the_cpu_refuses_their_dtype(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    model = Function(lambda x, classes: functional.cross_entropy(x * 2, classes))
    x, classes = torch.randn(shape, requires_grad=True), torch.ones(shape[0], *shape[2:], dtype=dtype)
    try:
        model(x, classes)
    except RuntimeError:
        kinds = "int64 or uint8" if len(shape) == 2 else "int64"
        for target in ("cpu", "cuda"):
            with pytest.raises(ProfileError, match=rf"needs classes of {kinds}; found \w+\. Cast them: targets\.long\(\)"):
                profile_memory(model, x, classes, device="meta", target=target, print_table=False)
    else:
        real, meta = both(model, x, classes)
        assert saved(meta) == saved(real)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_classes_of_one_byte_go_through_the_backward_as_with_data(weighted: bool, reduction: str) -> None:
    weight = torch.rand(4) if weighted else None
    model = Function(lambda x, classes: functional.cross_entropy(x * 2, classes, weight=weight, reduction=reduction))
    classes = torch.tensor([0, 3, 1, 1], dtype=torch.uint8)

    real, meta = both(model, torch.randn(4, 4, requires_grad=True), classes, backward=True)

    assert saved(meta) == saved(real)
    assert meta.backward_peak_bytes is not None


GROUPED: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {  # the second with its last two dimensions exchanged
    "rows": ((12, 16), (3, 6, 16)),
    "odd rows": ((12, 16), (3, 9, 16)),
    "columns": ((8, 12), (24, 12)),
    "batches": ((3, 5, 16), (3, 8, 16)),
    "columns of batches": ((3, 5, 16), (12, 16)),
    "rows of a few bytes": ((12, 4), (3, 6, 4)),
}


@pytest.mark.parametrize(
    ("dtype", "other"),
    [
        *((dtype, None) for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64)),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in DTYPE_PAIRS),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", GROUPED)
def test_grouped_products_are_those_of_the_cpu(name: str, dtype: torch.dtype, other: torch.dtype | None) -> None:
    """Experts of a mixture: sizes, strides and refusals are the same for each dtype, in the backward as well."""
    of_one, of_other = GROUPED[name]
    ends = None if name == "batches" else torch.tensor([4, 8, 12], dtype=torch.int32)

    def forward(x: Tensor, w: Tensor) -> Tensor:
        product = functional.grouped_mm(x, w.mT, offs=ends if ends is None or not x.is_meta else ends.to("meta"))
        strides.append((product.size(), product.stride(), product.dtype))
        return product.exp().sum()

    model, strides = Function(forward), list[object]()
    x, w = torch.randn(of_one, dtype=dtype), torch.randn(of_other, dtype=other or dtype)
    given = [x.requires_grad_(), w.requires_grad_()]
    try:
        model(*given).backward()
    except RuntimeError:
        with pytest.raises((ProfileError, RuntimeError)):
            profile_memory(model, *given, device="meta", target="cpu", print_table=False, backward=True)
    else:
        real, meta = both(model, *given, backward=True)
        assert saved(meta) == saved(real)
        assert len(set(map(str, strides))) == 1


pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", FORMAT_INPUTS)
@pytest.mark.parametrize("name", FORMAT_CALLS)
def test_outputs_have_the_strides_that_the_cpu_gives_them(name: str, kind: str) -> None:
    call, x = FORMAT_CALLS[name], FORMAT_INPUTS[kind](torch.randn(2, 4, 6, 6))

    assert _layout(call, x, "cpu") == _layout(call, x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in FORMAT_CALLS if name.startswith("conv")])
def test_convolutions_of_other_dtypes_have_the_strides_that_the_cpu_gives_them(name: str, dtype: torch.dtype) -> None:
    for kind in ("channels_last", "one_channels_last"):
        call, x = FORMAT_CALLS[name], FORMAT_INPUTS[kind](torch.randn(2, 4, 6, 6, dtype=dtype))
        assert _layout(call, x, "cpu") == _layout(call, x)


def _layout(call: Callable[[Tensor], Tensor], x: Tensor, target: str | None = None) -> tuple[Any, ...]:
    """Return shape, strides and dtype of what a function returns, with data or as a target would run it."""
    found: list[tuple[Any, ...]] = []

    def note(x: Tensor) -> Tensor:
        output = call(x)
        found.append((output.shape, output.stride(), output.dtype))
        return output

    note(x) if target is None else profile_memory(Function(note), x, device="meta", target=target, print_table=False)
    return found[0]


@pytest.mark.parametrize(
    ("name", "kind", "dtype", "keeps"),
    [
        ("conv2d", "channels_last", torch.float32, True),
        ("conv2d", "contiguous", torch.float32, False),
        ("conv2d_weight", "contiguous", torch.bfloat16, True),
        ("conv2d_depthwise", "channels_last", torch.float32, True),
        ("conv2d", "channels_last", torch.float64, False),  # cuDNN wants none of it
        ("conv_transpose2d", "channels_last", torch.float32, True),
        ("conv3d_of_one", "contiguous", torch.float32, True),
        ("batch_norm", "channels_last", torch.float32, True),
        ("max_pool2d", "channels_last", torch.float32, True),
        ("interpolate_bilinear", "channels_last", torch.float32, True),
        ("logsigmoid", "channels_last", torch.float32, True),
        ("pad_reflect", "channels_last", torch.float32, False),
        ("pad_replicate", "channels_last", torch.float32, False),
        ("pixel_shuffle", "channels_last", torch.float32, False),
        ("channel_shuffle", "channels_last", torch.float32, False),
        ("roll", "channels_last", torch.float32, False),
        ("max_unpool2d", "channels_last", torch.float32, False),
    ],
)
def test_cuda_keeps_channels_last_where_its_kernels_do(name: str, kind: str, dtype: torch.dtype, keeps: bool) -> None:
    x = FORMAT_INPUTS[kind](torch.randn(2, 4, 6, 6, dtype=dtype))

    assert (_layout(FORMAT_CALLS[name], x, "cuda")[1][1] == 1) is keeps


class Copies(nn.Module):
    """A block whose later copies depend on the format of a convolution's output."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 1)
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        return self.second(x.contiguous()) + self.norm(x)


@pytest.mark.parametrize("of_model", [torch.contiguous_format, torch.channels_last])
def test_a_copy_to_another_format_is_saved(of_model: torch.memory_format) -> None:
    model = Copies().to(memory_format=of_model)

    real, meta = both(model, channels_last(torch.randn(2, 4, 8, 8)), backward=True)

    assert saved(meta) == saved(real)


def test_group_norm_saves_no_copy_of_channels_last_on_the_cpu() -> None:
    x = channels_last(torch.randn(2, 4, 8, 8)).requires_grad_()

    real, meta = both(Function(lambda x: functional.group_norm(x.exp(), 2)), x, backward=True)

    assert saved(meta) == saved(real)


def test_batch_norm_of_cudnn_saves_a_copy_without_gaps() -> None:
    model = nn.BatchNorm1d(8)
    x = torch.randn(2, 5, 8).transpose(1, 2)

    meta = profile_memory(model, x, device="meta", target="cuda", print_table=False)

    assert [record.storage_bytes for record in meta.saved][:1] == [2 * 5 * 8 * 4]
    assert meta.input_bytes == 0


def test_nothing_is_computed_to_find_a_format() -> None:
    x = channels_last(torch.randn(2, 4, 6, 6, 6))

    with Ops() as ops:
        profile_memory(nn.Conv3d(4, 4, 3), x, device="meta", target="cpu", print_table=False)

    assert not [name for name, _ in ops.found if "mkldnn" in name or "slow_conv" in name]
