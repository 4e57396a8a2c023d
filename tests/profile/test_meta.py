"""A run without data saves what a run with data saves."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from memkit import profile_memory
from memkit.errors import DataDependentError, ProfileError
from memkit.profile import MemoryReport
from memkit.profile.simulate import target
from memkit.profile.simulate.attention import fused_broadcast_heads, fused_take_three_dims
from memkit.profile.simulate.target import Rule, autocast_ops, rule_for
from tests.models import CASES, NAMES, Attention, Case
from tests.profile.calls import CONSTANT_CALLS, channels_last
from tests.profile.cases import Biased, Calls, Function, Holding, Ops, both, saved


def _both(case: Case, **options: object) -> tuple[MemoryReport, MemoryReport]:
    return both(case.model(), *case.inputs(), **options)


def _meta(model: nn.Module, *inputs: Any, **options: Any) -> MemoryReport:
    return profile_memory(model, *inputs, device="meta", print_table=False, **options)


def _sizes(report: MemoryReport) -> list[int]:
    return [record.storage_bytes for record in report.saved]


@pytest.mark.parametrize("name", NAMES)
def test_meta_saves_what_the_cpu_saves_with_its_peaks(name: str) -> None:
    real, meta = _both(CASES[name], backward=True)

    assert saved(meta) == saved(real)
    assert meta.activation_bytes == real.activation_bytes
    assert [row.self_bytes for row in meta.modules] == [row.self_bytes for row in real.modules]
    assert meta.before_bytes == real.before_bytes
    assert meta.forward_peak_bytes == real.forward_peak_bytes
    # In which order gradients that nobody needs any more are let go is up to the engine and to the kernels.
    assert meta.backward_peak_bytes == pytest.approx(real.backward_peak_bytes, rel=0.01)
    assert [row.peak_bytes for row in meta.modules] == [row.peak_bytes for row in real.modules]
    assert (meta.forward_s, meta.backward_s) == (None, None)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # RMSNorm says so under autocast
@pytest.mark.parametrize("name", NAMES)
def test_meta_saves_what_the_cpu_saves_under_autocast(name: str) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        real, meta = _both(CASES[name])

    assert saved(meta) == saved(real)
    assert meta.param_cast_bytes == real.param_cast_bytes
    assert meta.run.autocast == "bfloat16"


@pytest.mark.parametrize("name", ["resnet18", "vision_transformer", "attention_masked", "group_norm", "functional"])
def test_meta_saves_what_the_cpu_saves_in_bfloat16(name: str) -> None:
    case = CASES[name]
    model, inputs = case.model().bfloat16(), [x.bfloat16() for x in case.inputs()]

    real, meta = both(model, *inputs)

    assert saved(meta) == saved(real)


def test_autocast_inside_the_forward_is_followed() -> None:
    def again(x: Tensor, w: Tensor, _: object) -> Tensor:
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                x = (x @ w).sigmoid()
            x = x.float()
        return x.exp()

    real, meta = both(Calls(again), torch.randn(4, 4), backward=True)

    assert saved(meta) == saved(real)
    # The first call's input needs no gradient, so its weight is not saved; the others cast again.
    assert meta.param_cast_bytes == real.param_cast_bytes == 2 * 4 * 4 * 2


@pytest.mark.parametrize(
    ("function", "target", "rule"),
    [
        ("linear", "cuda", Rule.LOWER),
        ("__matmul__", "cuda", Rule.LOWER),
        ("layer_norm", "cuda", Rule.FLOAT32),
        ("layer_norm", "cpu", None),
        ("softmax", "cuda", Rule.FLOAT32_RESULT),
        ("softmax", "cpu", None),
        ("cat", "cpu", Rule.PROMOTE),
        ("grid_sampler", "cuda", Rule.PROMOTE),
        ("__pow__", "cuda", Rule.FLOAT32),
        ("relu", "cuda", None),
    ],
)
def test_autocast_rules(function: str, target: str, rule: Rule | None) -> None:
    assert rule_for(function, target) is rule


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_autocast_tables_name_operations_that_torch_knows(kind: str) -> None:
    named = target._LOWER[kind] | target._FLOAT32_RESULT[kind] | target._PROMOTE[kind]

    assert named - autocast_ops(kind) <= {"cudnn_convolution", "cudnn_convolution_transpose", "vdot"}


def test_attention_is_not_what_the_meta_device_would_make_of_it() -> None:
    attend = Function(lambda query: functional.scaled_dot_product_attention(query, query, query, is_causal=True))
    query = torch.empty(8, 16, 2048, 128, dtype=torch.bfloat16, device="meta", requires_grad=True)

    report = profile_memory(attend, query, print_table=False)

    # query (which is key and value), output, and one float per row: not the 2048 x 2048 attention matrix.
    assert report.activation_bytes // 2**20 == (64 + 64 + 1)


@pytest.mark.parametrize(
    ("options", "dtype", "storages"),
    [
        ({}, torch.bfloat16, 5),  # cuDNN: query, key-and-value, output, log-sum-exp, seed and offset, less one shared storage
        ({}, torch.float32, 5),  # memory-efficient: the same number
        ({"masked": True}, torch.bfloat16, 6),  # and the mask
        ({"dropout_p": 0.1}, torch.float32, 5),
    ],
)
def test_attention_of_cuda_saves_rows_not_matrices(options: dict[str, object], dtype: torch.dtype, storages: int) -> None:
    report = _meta(Attention(**options).to(dtype), torch.randn(2, 1024, 64, dtype=dtype))

    of_attention = [record for record in report.saved if record.module == "(model)"]
    key_value_bytes, mask_bytes = 2 * 1024 * 128 * dtype.itemsize, 1024 * 1024 * dtype.itemsize
    assert max(record.storage_bytes for record in of_attention) == (mask_bytes if options.get("masked") else key_value_bytes)
    assert len(of_attention) >= storages


def test_attention_of_cuda_without_cudnn_is_flash() -> None:
    query = torch.randn(2, 4, 32, 16, dtype=torch.bfloat16, requires_grad=True)
    attend = Function(lambda query: functional.scaled_dot_product_attention(query, query, query))

    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        flash = _meta(attend, query)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)

    # input, log-sum-exp, output, and the state of the random numbers: a seed and an offset in one, and one unused
    assert [record.storage_bytes for record in flash.saved if record.storage_bytes > 16] == [8192, 1024, 8192]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda x, w: functional.softmax(x @ w, -1), [32, 32, 64]),  # two halves in, float32 out
        (lambda x, w: functional.layer_norm(x @ w, (4,)), [32, 32, 64, 16, 16]),  # a float32 copy and statistics
        (lambda x, w: (x @ w).exp(), [32, 32, 64]),
    ],
)
def test_autocast_of_cuda_by_hand(call: object, expected: list[int]) -> None:
    x = torch.randn(4, 4, requires_grad=True)

    with torch.autocast("cpu", torch.bfloat16):
        report = _meta(Calls(lambda x, w, _: call(x, w)), x, target="cuda")

    assert _sizes(report) == expected


@pytest.mark.parametrize(
    ("model", "shape", "saves"),
    [
        (nn.BatchNorm2d(4).eval(), (2, 4, 3, 3), [288]),  # cuDNN keeps no statistics there
        (nn.BatchNorm2d(4).eval().bfloat16(), (2, 4, 3, 3), [144, 16, 16]),  # which cuDNN does not take
        (nn.Dropout(0.5), (100,), [100]),  # a mask of bytes
        (nn.RMSNorm(64), (10, 64), [10 * 64 * 4, 10 * 4]),  # one number for each row
        (nn.LogSigmoid(), (100,), [400]),  # no buffer
    ],
    ids=str,
)
def test_what_cuda_saves_of_one_module(model: nn.Module, shape: tuple[int, ...], saves: list[int]) -> None:
    dtype = next((parameter.dtype for parameter in model.parameters()), torch.float32)

    report = _meta(model, torch.randn(shape, dtype=dtype, requires_grad=True))

    assert _sizes(report) == saves


def test_recurrent_layers_are_backend_dependent() -> None:
    report = _meta(nn.Sequential(nn.LSTM(4, 8, batch_first=True)), torch.randn(2, 3, 4))

    assert report.marked("backend-dependent") == ("0",)
    assert "backend-dependent" in str(report)
    assert _meta(nn.Linear(2, 2), torch.randn(1, 2)).marked("backend-dependent") == ()


@pytest.mark.parametrize("name", ["conv_inplace", "transformer_encoder", "checkpoint_reentrant"])
def test_no_data_is_made_or_copied(name: str) -> None:
    case = CASES[name]
    model, inputs = case.model(), case.inputs()

    with Ops() as ops:
        _meta(model, *inputs, backward=True)
        (inputs[0] + 1).sum()

    made = [
        name
        for name, outputs in ops.found
        if any(it.is_floating_point() and not it.is_meta and it.numel() for it in outputs)
        and name != "aten.detach.default"  # aliases of what the model has are none
    ]
    assert made == ["aten.add.Tensor", "aten.sum.default"]


def test_views_of_one_storage_stay_views() -> None:
    flat = torch.randn(20)
    halves = {"first": nn.Parameter(flat[:10]), "second": nn.Parameter(flat[10:])}
    model = Holding(lambda self, x: x * self.first * self.second, **halves)

    report = _meta(model, torch.zeros(1).expand(10))

    assert report.param_bytes == 80
    assert report.before_bytes == 512 + 512
    assert report.input_bytes == 4


def test_small_integer_constants_have_values() -> None:
    def add(self: Any, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        assert (positions.diff() == 1).all()  # models look for packed sequences in this way
        return x + self.embedding(positions)

    report = _meta(Holding(add, embedding=nn.Embedding(16, 4)), torch.randn(2, 8, 4), backward=True)

    assert report.activation_bytes == 8 * 8


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x * x.sum().item(),
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x * len(x.sum(0).tolist()),
        lambda x: x * x.detach().numpy().size,
        lambda x: x.detach().cpu() + 1,
        lambda x: x[x > 0],
        lambda x: torch.nonzero(x),
        lambda x: torch.unique(x),
        lambda x: torch.masked_select(x, x > 0),
    ],
)
def test_reading_a_value_names_the_module_and_says_what_to_do(read: object) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Function(read))

    with pytest.raises(DataDependentError) as raised:
        _meta(model, torch.randn(2, 4))

    assert str(raised.value).startswith("1 (Function) cannot run without data: it reads the value of a tensor")
    assert "Profile this model with data" in str(raised.value)


def test_a_constant_that_a_lost_value_was_written_to_has_no_value() -> None:
    def writes(x: Tensor) -> Tensor:
        mask = torch.zeros(4, dtype=torch.bool, device=x.device)
        mask[0] = x[0, 0] == x[0, 0]
        return x.exp() if mask.any() else x

    with pytest.raises(DataDependentError):
        _meta(Function(writes), torch.randn(2, 4))


def test_small_integers_of_the_caller_have_values() -> None:
    def masked(self: Any, x: Tensor, mask: Tensor) -> Tensor:
        self.steps += 1
        return self.linear(x) if mask.all() and int(self.steps) == 4 else x

    model: Any = Holding(masked, steps=nn.Buffer(torch.tensor(3)), linear=nn.Linear(4, 4))
    inputs = torch.randn(2, 4), torch.ones(4, dtype=torch.bool)

    report = _meta(model, *inputs, backward=True)

    assert report.modules[1].num_calls == 1
    assert int(model.steps) == 3


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("cuda", r'write torch\.autocast\("cpu", dtype=...\)'),
        (None, "asks for autocast on a device type that this run does not have"),
    ],
)
def test_autocast_that_this_run_does_not_have_is_refused(kind: str | None, message: str) -> None:
    def inside(x: Tensor) -> Tensor:
        with torch.autocast(kind or x.device.type, torch.bfloat16):
            return x @ x

    with pytest.raises(ProfileError, match=message):
        _meta(Function(inside), torch.randn(4, 4))


def test_backward_into_a_tensor_with_data_is_refused() -> None:
    scale = torch.ones(4, requires_grad=True)

    with pytest.raises(ProfileError, match=r"reaches a tensor of shape \(4,\) with data"):
        _meta(nn.Linear(4, 4), torch.randn(2, 4), loss_fn=lambda y: (y * scale).sum(), backward=True)


def test_illegal_writes_are_found_without_data() -> None:
    illegal, x = Function(lambda x: x.tanh().mul_(2)), torch.randn(4, requires_grad=True)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        _meta(illegal, x, backward=True)


def test_parameters_keep_their_class_and_attributes() -> None:
    class Marked(nn.Parameter):
        def doubled(self) -> Tensor:
            return self * 2

    weight = Marked(torch.randn(4))
    weight.power = 3
    model = Holding(lambda self, x: x * self.weight.doubled() ** self.weight.power, weight=weight)

    assert _meta(model, torch.randn(4), backward=True).param_bytes == 16


def test_scripted_modules_are_rows_without_calls_and_refused_without_data() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.ReLU())))

    report = profile_memory(model, torch.randn(1, 2), print_table=False)

    assert report.marked("compiled") == ("1",)
    assert sum(row.self_bytes for row in report.modules) == report.activation_bytes > 0
    with pytest.raises(ProfileError, match="TorchScript cannot run on the meta device"):
        _meta(model, torch.randn(1, 2))


def test_cuda_rounds_sizes_as_its_allocator_does() -> None:
    model, x = nn.Linear(4, 4, bias=False), torch.randn(2, 4)

    cuda = _meta(model, x, target="cuda")
    cpu = _meta(model, x, target="cpu")

    assert (cuda.before_bytes, cpu.before_bytes) == (1024, 4 * 4 * 4 + 2 * 4 * 4)


@pytest.mark.parametrize("amp", [False, True])
def test_compiled_models_run_as_they_were_written(amp: bool) -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x = torch.randn(2, 4)

    with torch.autocast("cpu", torch.bfloat16) if amp else nullcontext():
        compiled = _meta(torch.compile(plain, backend="aot_eager"), x, target="cpu")
        eager = _meta(plain, x, target="cpu")

    assert compiled.activation_bytes == eager.activation_bytes


@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("name", CONSTANT_CALLS)
def test_constants_are_saved_as_with_data(name: str, amp: bool) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        real, meta = both(Calls(CONSTANT_CALLS[name]), torch.randn(4, 4), backward=not amp)

    assert saved(meta) == saved(real)
    assert meta.param_cast_bytes == real.param_cast_bytes


@pytest.mark.parametrize(
    ("make", "storages"),
    [
        (lambda device: torch.arange(4, device=device).float(), 1),  # it is there already
        (lambda device: torch.linspace(0, 1, 4), 2),  # it is in the memory of the host: moving it makes another
        (lambda device: torch.tensor([1.0, 2.0, 3.0, 4.0]).mul(2), 2),
        (lambda device: torch.arange(4).float(), 2),
    ],
)
def test_on_cuda_a_constant_moves_if_it_was_made_on_the_host(make: Callable[[torch.device], Tensor], storages: int) -> None:
    x = torch.randn(4, requires_grad=True)

    def call(x: Tensor) -> Tensor:
        constant = make(x.device)
        return x * constant + x * constant.to(x.device)

    report = _meta(Function(call), x, target="cuda")

    assert _sizes(report) == [16] * storages


def test_a_constant_keeps_its_value_when_it_is_moved() -> None:
    model = Function(lambda x: x.exp() if torch.linspace(0, 1, 3).to(x.device)[1].item() == 0.5 else x)

    report = _meta(model, torch.randn(4, requires_grad=True), target="cpu")

    assert report.activation_bytes == 16


def test_a_gradient_that_flows_into_a_tensor_made_on_the_cpu_is_refused() -> None:
    model = Calls(lambda x, w, _: torch.zeros(4, 4).add_(x @ w).exp())

    with pytest.raises(DataDependentError, match="something that torch cannot do on the meta device"):
        _meta(model, torch.randn(4, 4), backward=True)


def _attend(*shapes: tuple[int, ...], mask: Tensor | None = None, **options: object) -> tuple[nn.Module, list[Tensor]]:
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
    query = functional.scaled_dot_product_attention
    return Function(lambda q, k, v: query(q.sin(), k.sin(), v.sin(), attn_mask=mask, **options).exp()), tensors


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        (((2, 4, 12, 8), (2, 1, 12, 8), (2, 1, 12, 8)), {}),  # one key head for all
        (((2, 4, 12, 8), (2, 1, 12, 8), (2, 1, 12, 8)), {"is_causal": True}),
        (((2, 4, 12, 8), (2, 1, 12, 8), (2, 1, 12, 8)), {"mask": torch.zeros(12, 12)}),
        (((2, 4, 12, 8), (2, 1, 12, 8), (2, 4, 12, 8)), {}),
        (((2, 1, 12, 8), (2, 4, 12, 8), (2, 4, 12, 8)), {}),
        (((2, 4, 12, 8), (1, 4, 12, 8), (1, 4, 12, 8)), {}),  # batches do not broadcast
        (((2, 4, 12, 8), (2, 2, 12, 8), (2, 2, 12, 8)), {"enable_gqa": True}),
        (((2, 4, 12, 8), (2, 2, 12, 8), (2, 1, 12, 8)), {"enable_gqa": True}),  # key and value heads differ
        (((4, 12, 8),) * 3, {}),
        (((4, 12, 8),) * 3, {"mask": torch.zeros(12, 12)}),
        (((4, 12, 8),) * 3, {"mask": torch.zeros(4, 12, 12)}),
        (((4, 12, 8), (1, 12, 8), (1, 12, 8)), {}),
        (((4, 12, 8),) * 3, {"dropout_p": 0.5}),
        (((12, 8),) * 3, {}),
        (((2, 4, 12, 8),) * 3, {"mask": torch.zeros(12, 12).mT}),
        (((2, 4, 12, 8),) * 3, {"mask": torch.zeros(12, 1)}),
        (((2, 4, 12, 8),) * 3, {"mask": torch.zeros(4, 12, 12)}),  # three dimensions: no fused operation
        (((2, 4, 12, 8),) * 3, {"mask": torch.zeros(2, 1, 1, 12)}),
        (((2, 4, 12, 8),) * 3, {"mask": torch.zeros(12)[None]}),
        (((2, 4, 12, 8), (2, 4, 12, 8), (2, 4, 12, 16)), {}),
        (((2, 4, 1, 8), (2, 4, 12, 8), (2, 4, 12, 8)), {}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_takes_the_operation_that_the_cpu_takes(
    shapes: tuple[tuple[int, ...], ...], options: dict[str, object], dtype: torch.dtype
) -> None:
    if isinstance(options.get("mask"), Tensor):
        options = {**options, "mask": options["mask"].to(dtype)}
    model, inputs = _attend(*shapes, **options)

    real, meta = both(model, *(x.detach().to(dtype).requires_grad_() for x in inputs), backward=True)

    assert saved(meta) == saved(real)


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("contiguous", [True, False])
def test_attention_with_a_mask_that_requires_grad_saves_what_the_cpu_saves(contiguous: bool, dropout_p: float) -> None:
    real, meta = both(Biased(contiguous=contiguous, dropout_p=dropout_p), torch.randn(2, 16, 32), backward=True)

    assert saved(meta) == saved(real)


_HEADS = 2 * 4  # and the batch
_ROWS, _WEIGHTS = _HEADS * 16 * 8, _HEADS * 16 * 16  # of queries, keys or values, and between these


@pytest.mark.parametrize(
    ("contiguous", "dropout_p", "num_bytes"),
    [  # rows of the mask that are not contiguous make it decompose, in single precision; the softmax is saved
        (False, 0.0, 3 * _ROWS * 4 + _WEIGHTS * 4),
        (False, 0.1, 3 * _ROWS * 4 + _WEIGHTS * (4 + 1 + 4)),  # one byte for each weight, and what dropout gives
        # queries, keys and values, parts of one storage; mask, output, one sum for each row, of which there are multiples of
        # 32; the state of the random numbers is two numbers
        (True, 0.0, 3 * _ROWS * 2 + 4 * 16 * 16 * 2 + _ROWS * 2 + _HEADS * 32 * 4 + 2 * 8),
    ],
)
def test_cuda_makes_gradients_for_a_mask_with_contiguous_rows_alone(contiguous: bool, dropout_p: float, num_bytes: int) -> None:
    model = Biased(contiguous=contiguous, dropout_p=dropout_p).bfloat16()

    report = _meta(model, torch.randn(2, 16, 32, dtype=torch.bfloat16))

    assert sum(record.storage_bytes for record in report.saved if record.module == "(model)") == num_bytes


@pytest.mark.parametrize(("key_len", "bias_bytes"), [(24, 24 * 24 * 4), (20, 24 * 24 * 4), (32, 24 * 32 * 4)])
def test_cuda_pads_a_mask_whose_rows_do_not_begin_at_multiples_of_eight(key_len: int, bias_bytes: int) -> None:
    model, inputs = _attend((2, 4, 24, 8), (2, 4, key_len, 8), (2, 4, key_len, 8), mask=torch.zeros(24, key_len))

    report = _meta(model, *inputs)

    assert bias_bytes in {record.storage_bytes for record in report.saved if (2, 4, 24, key_len) in record.shapes}


@pytest.mark.skipif(not fused_broadcast_heads(), reason="this torch decomposes it")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_key_head_is_not_repeated_on_cuda(dtype: torch.dtype) -> None:
    model, inputs = _attend((2, 4, 64, 8), (2, 1, 64, 8), (2, 1, 64, 8))

    report = _meta(model, *(x.detach().to(dtype).requires_grad_() for x in inputs))

    assert max(record.storage_bytes for record in report.saved) == 2 * 4 * 64 * 8 * dtype.itemsize


def test_what_torch_can_fuse_does_not_depend_on_what_is_switched_off() -> None:
    expected, found = [], []
    for asked in (fused_broadcast_heads, fused_take_three_dims):
        asked.cache_clear()
        expected.append(asked())
        asked.cache_clear()
        with sdpa_kernel(SDPBackend.MATH), torch.device("meta"):
            found.append(asked())

    assert found == expected


SIZES = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
EXPERTS = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
LINEAR_ATTENTION = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "shared_expert_intermediate_size": 24,
    "layer_types": ["linear_attention", "full_attention"],
}
LATENT_ATTENTION = {
    "num_key_value_heads": 4,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}
VISION = {**SIZES, "image_size": 32, "patch_size": 8}
CODER = {
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
}
SPEECH = {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 20, "pad_token_id": 0, "bos_token_id": 1}
T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
GPT = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}


def _tokens() -> Tensor:
    return torch.randint(3, 90, (2, 12))


def _mask() -> Tensor:
    return torch.tensor([[1] * 12, [1] * 8 + [0] * 4])


def _picture() -> Tensor:
    return torch.randn(2, 3, 32, 32)


TOKENS = {"input_ids": _tokens}
MASKED = {"input_ids": _tokens, "attention_mask": _mask}
LABELLED = {"input_ids": _tokens, "labels": _tokens}

# The class of transformers, its configuration, and the inputs; "use_cache" is off wherever there is such a thing.
TRANSFORMERS: dict[str, tuple[str, dict[str, Any], dict[str, Callable[[], Tensor]]]] = {
    "gpt2": ("GPT2LMHeadModel", GPT, MASKED),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", GPT, TOKENS),
    "llama": ("LlamaForCausalLM", {**SIZES, "num_key_value_heads": 2}, TOKENS),
    "llama_masked": ("LlamaForCausalLM", {**SIZES, "num_key_value_heads": 2}, MASKED),
    "llama_eager": ("LlamaForCausalLM", {**SIZES, "num_key_value_heads": 2, "attn_implementation": "eager"}, TOKENS),
    "mixtral": ("MixtralForCausalLM", {**SIZES, "num_key_value_heads": 2, "num_local_experts": 4}, TOKENS),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**EXPERTS, "num_experts": 4}, TOKENS),
    "qwen3_next": ("Qwen3NextForCausalLM", {**EXPERTS, "num_experts": 4, **LINEAR_ATTENTION}, TOKENS),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**EXPERTS, "n_routed_experts": 4, **LATENT_ATTENTION}, TOKENS),
    "gpt_oss": ("GptOssForCausalLM", {**EXPERTS, "num_local_experts": 4}, TOKENS),
    "gemma2": ("Gemma2ForCausalLM", {**SIZES, "num_key_value_heads": 2, "head_dim": 8}, TOKENS),
    "gpt_neox": ("GPTNeoXForCausalLM", SIZES, TOKENS),
    "falcon_alibi": ("FalconForCausalLM", {**SIZES, "multi_query": True, "alibi": True}, TOKENS),
    "bloom": ("BloomForCausalLM", {"vocab_size": 99, "hidden_size": 32, "n_layer": 2, "n_head": 4}, TOKENS),
    "t5": ("T5ForConditionalGeneration", T5, LABELLED),
    "t5_masked": ("T5ForConditionalGeneration", {**T5, "dropout_rate": 0.0}, {**MASKED, "labels": _tokens}),
    "bert": ("BertForMaskedLM", SIZES, {**MASKED, "labels": _tokens}),
    "deberta": ("DebertaV2ForMaskedLM", SIZES, TOKENS),
    "whisper": (
        "WhisperForConditionalGeneration",
        {**CODER, **SPEECH, "eos_token_id": 2, "decoder_start_token_id": 1},
        {"input_features": lambda: torch.randn(2, 8, 40), "decoder_input_ids": _tokens},
    ),
    "wav2vec2": (
        "Wav2Vec2Model",
        {**SIZES, "conv_dim": [16] * 7, "num_conv_pos_embeddings": 16, "apply_spec_augment": False},
        {"input_values": lambda: torch.randn(2, 2000)},
    ),
    "mamba": ("MambaForCausalLM", {**SIZES, "state_size": 4}, TOKENS),
    "vit": ("ViTModel", VISION, {"pixel_values": _picture}),
    "beit": ("BeitModel", {**VISION, "use_relative_position_bias": True}, {"pixel_values": _picture}),
}

VISION_MODELS = (
    *("mobilenet_v2", "efficientnet_b0", "efficientnet_v2_s", "convnext_tiny", "swin_t", "swin_v2_t", "regnet_y_400mf"),
    *("shufflenet_v2_x0_5", "squeezenet1_1", "mnasnet0_5", "lraspp_mobilenet_v3_large", "deeplabv3_mobilenet_v3_large"),
)


def _transformer(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    model_name, options, inputs = TRANSFORMERS[name]
    model_class = getattr(transformers, model_name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**options)).train()
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    return model, {key: make() for key, make in inputs.items()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_save_what_they_save_on_the_cpu(name: str, mode: str) -> None:
    model, inputs = _transformer(name)
    if mode == "bfloat16":
        model = model.bfloat16()
        inputs = {key: value.bfloat16() if value.is_floating_point() else value for key, value in inputs.items()}

    with torch.autocast("cpu", torch.bfloat16) if mode == "autocast" else nullcontext():
        real, meta = both(model, kwargs=inputs, backward=mode == "float32")

    assert saved(meta) == saved(real)
    assert [row.self_bytes for row in meta.modules] == [row.self_bytes for row in real.modules]


@pytest.mark.slow
@pytest.mark.parametrize("in_channels_last", [False, True])
@pytest.mark.parametrize("name", VISION_MODELS)
def test_vision_models_save_what_they_save_on_the_cpu(name: str, in_channels_last: bool) -> None:
    options = {"weights_backbone": None} if "mobilenet_v3" in name else {}
    model = torchvision.models.get_model(name, weights=None, **options).train()
    x = torch.randn(2, 3, 64, 64)
    if in_channels_last:
        model, x = model.to(memory_format=torch.channels_last), channels_last(x)

    real, meta = both(model, x)

    assert saved(meta) == saved(real)
