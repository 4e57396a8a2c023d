"""The trace of a step, against steps that are worked out by hand, what `Rematerialize` learns, and what the profile counts."""

from __future__ import annotations

import itertools
import json
import random
import time
from contextlib import suppress
from typing import Any

import pytest
import torch
import torchvision
from hypothesis import given, reject, settings
from torch import Tensor, nn
from torch.nn import functional

import memkit
from memkit.activations.saved.state import remat_states
from memkit.core import torch_private
from memkit.device import ReferenceDevice
from memkit.errors import DataDependentError, ProfileError, ReportFormatError
from memkit.plan import NO_OP, Lifetime, ModuleOps, OpKind, OpWork, StepTrace
from memkit.profile import MemoryReport, SavedCategory
from memkit.profile.trace import kind_of, work_of
from tests.activations import cases
from tests.models import CASES, NAMES
from tests.profile.cases import Holding
from tests.profile.traced import KIB, LlamaBlock, Weighted, learned, profile, trace, untimed
from tests.programs import MARKING, Op, apply, graphs

# Steps by hand


def test_chain_is_as_worked_out_by_hand() -> None:
    # x and w are 256 by 256 floats, 256 KiB each. 0: mul, 1: sin, 2: sum; 3: ones, 4: cos, 5: mul, 6: mul.
    size = 256 * KIB
    model = Weighted(lambda x, w: (x * w).sin())
    model.weight = nn.Parameter(torch.empty(256, 256, device="meta"))

    found = trace(model, torch.empty(256, 256, device="meta"), loss_fn=lambda y: y.sum())

    works = (
        *(("mul.Tensor", 3 * size), ("sin.default", 2 * size), ("sum.default", size + 4), ("ones.default", 4)),
        *(("cos.default", 2 * size), ("mul.Tensor", 2 * size + 4)),  # the gradient of the sum is one number, expanded
        ("mul.Tensor", 3 * size),  # by x, for the gradient of w
    )
    of_each = {"kind": OpKind.POINTWISE, "flops": 0.0, "dtype": "float32"}
    assert found.ops == tuple(OpWork(name=f"aten.{name}", num_bytes=num_bytes, **of_each) for name, num_bytes in works)
    assert found.num_forward_ops == 3
    lineage = found.step.lineage
    assert (lineage.num_bytes, lineage.maker) == ((size, size, size, size, 4), (NO_OP, NO_OP, 0, 1, 2))
    assert (lineage.ins, lineage.outs) == (((0, 1), (2,), (3,)), ((2,), (3,), (4,)))
    assert found.op_places == (0, 1, 2)
    assert (found.step.saves, found.save_places) == ((2,), (1,))  # x is the caller's; sin saves its input, ahead of itself
    assert (found.step.uses, found.use_places, found.step.use_ends) == ((2,), (4,), (1,))
    assert found.base_bytes == 2 * size
    # After sin both the product and its sine are there, the sine's frame ends, the sum is one number: 512 bytes.
    more = (size, 2 * size, 2 * size + 512, size + 1024, 2 * size + 1024, 3 * size + 1024, 2 * size + 1024)
    assert found.live_bytes == more
    assert found.lifetimes == {
        2: Lifetime(made_at=0, released_at=2, freed_at=6),
        3: Lifetime(made_at=1, released_at=3, freed_at=3),
        4: Lifetime(made_at=2, released_at=7, freed_at=7),
    }
    assert found.names == {2: ("aten.mul.Tensor", "Weighted"), 3: ("aten.sin.default", "Weighted"), 4: ("aten.sum.default", "")}
    assert found.modules == (ModuleOps(module="", kind="Weighted", begin=0, end=2),)
    assert (found.trainable_numel, found.trainable_bytes) == (256 * 256, size)
    assert (found.model, found.inputs, found.target) == ("Weighted", "float32[256, 256]", "cuda")
    assert found.peak_bytes == 5 * size + 2 * 512


def test_value_that_a_frame_still_names_is_released_when_the_frame_ends() -> None:
    def call(x: Tensor, w: Tensor) -> Tensor:
        product = x @ w
        sine = product.sin()
        return sine.exp().cos() + 1  # `product` and `sine` are named until here

    found = trace(Weighted(call), torch.randn(32, 32))

    named, unnamed = found.lifetimes[found.step.saves[0]], found.lifetimes[found.step.saves[1]]
    assert [found.names[value][0].split(".")[1] for value in found.step.saves[:3]] == ["mm", "exp", "exp"]
    assert (named.made_at, named.released_at) == (0, 5)  # all five ops of the forward have run
    assert (unnamed.made_at, unnamed.released_at) == (2, 4)  # gone as soon as its cosine is there
    assert named.freed_at == unnamed.freed_at + 2 > 5


def test_op_that_writes_in_place_ends_one_value_and_begins_another() -> None:
    found = trace(Weighted(lambda x, w: (x @ w).relu_().sin()), torch.randn(32, 32))

    assert found.step.lineage.taken == {1: ((2, 3),)}
    assert found.step.saves[:2] == (3, 3)
    assert found.lifetimes[2] == Lifetime(made_at=0, released_at=1, freed_at=1)
    assert found.lifetimes[3].made_at == 1
    assert found.live_bytes[:2] == (4 * KIB, 4 * KIB)
    assert found.ops[1].num_bytes == 8 * KIB  # read and written


def test_work_of_ops() -> None:
    def forward(self: Any, x: Tensor, tokens: Tensor) -> Tensor:
        image = functional.max_pool2d(self.norm(self.conv(x)), 2)
        heads = self.table(tokens)[:, None]
        return image.mean() + functional.scaled_dot_product_attention(heads, heads, heads).mean()

    conv = nn.Conv2d(4, 8, 3, padding=1, bias=False)
    net = Holding(forward, conv=conv, norm=nn.BatchNorm2d(8), table=nn.Embedding(1000, 16))

    found = trace(net, torch.randn(2, 4, 8, 8), torch.zeros(2, 8, dtype=torch.int64))

    works = {op.name.split(".")[1]: op for op in found.ops[: found.num_forward_ops]}
    kinds = {name: op.kind for name, op in works.items()}
    assert kinds["convolution"] is OpKind.CONVOLUTION
    assert kinds["native_batch_norm"] is OpKind.NORM
    assert kinds["max_pool2d_with_indices"] is OpKind.POOL
    assert [kind for name, kind in kinds.items() if "attention" in name] == [OpKind.ATTENTION]
    assert works["convolution"].flops == 2 * (2 * 8 * 8 * 8) * (4 * 9)
    assert works["convolution"].num_bytes == 4 * (2 * 4 * 64 + 8 * 4 * 9 + 2 * 8 * 64)
    assert works["embedding"].num_bytes == 2 * 8 * 8 + 2 * (2 * 8 * 16 * 4)  # of the table only the rows
    assert works["embedding"].kind is OpKind.POINTWISE
    backward = {op.name.split(".")[1]: op for op in found.ops[found.num_forward_ops :]}
    assert backward["convolution_backward"].kind is OpKind.CONVOLUTION
    assert backward["convolution_backward"].flops == works["convolution"].flops  # the input needs no gradient


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, OpKind.MATMUL) for name in ("mm", "addmm", "baddbmm", "_scaled_mm")),
        *((name, OpKind.POINTWISE) for name in ("convert_element_type", "linalg_vector_norm", "add", "mul")),
        ("native_layer_norm_backward", OpKind.NORM),
        ("_convolution", OpKind.CONVOLUTION),
        ("_adaptive_avg_pool2d_backward", OpKind.POOL),
        ("_scaled_dot_product_flash_attention_backward", OpKind.ATTENTION),
    ],
)
def test_kinds_of_ops(name: str, kind: OpKind) -> None:
    assert kind_of(name) is kind


# Against what Rematerialize learns, and what the profile counts


_CASES = """
mlp convolution attention views_of_one_storage saved_many_times outputs_as_saved broadcast in_place complex_views masks
scalars_and_empties layer_norm cross_entropy dropout custom_function checkpointed checkpointed_reentrant bfloat16 lstm skips
"""


def opless(x: Tensor, w: Tensor) -> Tensor:
    """Ops that are not run again: what they make has no maker."""
    kept = torch.zeros(32, 32, device=x.device)
    kept.copy_(x @ w)
    noise = torch.rand_like(x).mul_(0.5)
    return (kept * (x @ w).sin() + noise * w).exp()


FUNCTIONS = {name: getattr(cases, name) for name in _CASES.split()} | {"opless": opless}


FUNCTIONS["opless"] = opless


def assert_as_learned_and_counted(model: nn.Module, *inputs: Any, target: str = "cuda") -> None:
    report = profile(model, *inputs, target=target)
    found = report.trace
    step, names = learned(model, *inputs, target=target)

    assert untimed(step) == found.step
    assert names.items() <= found.names.items()
    assert found.base_bytes == report.before_bytes
    assert found.peak_bytes == max(report.forward_peak_bytes or 0, report.backward_peak_bytes or 0)
    forward = found.live_bytes[: found.num_forward_ops]
    assert found.base_bytes + max(forward, default=0) == report.forward_peak_bytes
    assert_is_whole(found)


def assert_is_whole(found: StepTrace) -> None:
    """Places are in order, each use and save is in its value's life, and lives add up to no more than what is there."""
    for value, life in found.lifetimes.items():
        assert 0 <= life.made_at <= life.released_at <= life.freed_at <= len(found.ops), value
    for value, place in zip(found.step.saves, found.save_places, strict=True):
        assert found.lifetimes[value].made_at < place <= found.num_forward_ops
    for value, place in zip(found.step.uses, found.use_places, strict=True):
        assert found.num_forward_ops <= place <= found.lifetimes[value].freed_at
    there = [0] * len(found.ops)
    for value, life in found.lifetimes.items():
        for place in range(life.made_at, life.freed_at):
            there[place] += found.step.lineage.num_bytes[value]
    assert all(bytes_there <= live for bytes_there, live in zip(there, found.live_bytes, strict=True))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_is_as_learned_and_counted(name: str) -> None:
    assert_as_learned_and_counted(Weighted(FUNCTIONS[name]), torch.randn(32 if name == "opless" else 8, 32))


@pytest.mark.parametrize("name", NAMES)
def test_model_is_as_learned_and_counted(name: str) -> None:
    case = CASES[name]

    assert_as_learned_and_counted(case.model(), *case.inputs(), target="cpu" if name == "group_norm" else "cuda")


def test_blocks_of_a_llama_are_as_learned_and_counted() -> None:
    model = nn.Sequential(*[LlamaBlock(64, 4) for _ in range(2)]).bfloat16()

    assert_as_learned_and_counted(model, torch.randn(2, 16, 64, dtype=torch.bfloat16))


def test_residual_of_a_llama_is_told_from_its_float32_copy() -> None:
    found = trace(LlamaBlock(64, 4).bfloat16(), torch.randn(2, 16, 64, dtype=torch.bfloat16), min_bytes=KIB)

    lineage, saved = found.step.lineage, set(found.step.saves)
    copies = [value for value in saved if found.names.get(value, ("",))[0] == "aten._to_copy.default"]
    residuals = {lineage.ins[lineage.maker[value]][0] for value in copies if lineage.num_bytes[value] == 2 * 16 * 64 * 4}
    unsaved = [value for value in residuals - saved if lineage.maker[value] != NO_OP]
    assert [(found.names[value][0], lineage.num_bytes[value]) for value in unsaved] == [("aten.add.Tensor", 2 * 16 * 64 * 2)]
    assert all(value in found.lifetimes for value in unsaved)


@pytest.mark.parametrize("name", ["tied", "conv_inplace", "group_norm"])
def test_it_is_what_a_run_with_data_teaches(name: str) -> None:
    case = CASES[name]
    model, inputs = case.model(), case.inputs()
    with memkit.Rematerialize(1.0, tag="with data", min_bytes=1):
        loss = model(*inputs).sum()
    loss.backward()
    known = remat_states["with data"].traces.latest

    found = trace(model, *inputs, target="cpu", loss_fn=torch.sum)

    assert found.step == untimed(known.ops.step)
    memkit.reset("with data")


@pytest.mark.slow
@pytest.mark.parametrize("min_bytes", [2 * KIB, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 64 * KIB))])
def test_saved_values_are_the_storages_of_the_report(min_bytes: int) -> None:
    model = torchvision.models.resnet18()
    report = profile(model, torch.empty(2, 3, 32, 32), min_bytes=min_bytes)

    sizes = {saved.storage: saved.storage_bytes for saved in report.saved if saved.category is not SavedCategory.INPUT}
    large = [size for size in sizes.values() if size >= min_bytes]
    step = report.trace.step
    assert sorted(step.lineage.num_bytes[value] for value in set(step.saves)) == sorted(large)
    others = report.trace.lifetimes.keys() - set(step.saves)
    assert others
    assert all(step.lineage.num_bytes[value] >= min_bytes for value in others)


def test_modules_are_ranges_of_ops() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 8)))

    found = trace(model, torch.randn(4, 8))

    assert found.modules == (
        ModuleOps(module="", kind="Sequential", begin=0, end=3),
        ModuleOps(module="0", kind="Linear", begin=0, end=1),
        ModuleOps(module="1", kind="Sequential", begin=1, end=3),
        ModuleOps(module="1.0", kind="ReLU", begin=1, end=2),
        ModuleOps(module="1.1", kind="Linear", begin=2, end=3),
    )


def test_parameters_that_train_count_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.bfloat16))
    model[1].weight = model[0].weight
    model[1].bias.requires_grad_(False)

    found = trace(nn.Sequential(model[0], model[1]), torch.randn(4, 8))

    assert (found.trainable_numel, found.trainable_bytes) == (72, 288)


def test_model_is_left_as_it_was() -> None:
    model, x = CASES["conv_inplace"].model(), CASES["conv_inplace"].inputs()[0]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    first, second = trace(model, x), trace(model, x)

    assert first == second
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_streamed_weights_count_as_in_the_report() -> None:
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])
    for parameter in model[1:].parameters():
        parameter.requires_grad_(False)
    plain = trace(model, torch.randn(64, 32), min_bytes=1)
    with memkit.LayerOffload(
        model, layers=[model[1], model[2], model[3]], offload_ratio=1.0, num_slots=2, device=ReferenceDevice()
    ):
        report = profile(model, torch.randn(64, 32))

    assert report.trace.base_bytes == report.before_bytes < plain.base_bytes
    assert report.trace.peak_bytes == max(report.forward_peak_bytes or 0, report.backward_peak_bytes or 0)
    assert report.trace.step == plain.step


# Large steps


@pytest.mark.slow
def test_resnet50_takes_what_was_measured() -> None:
    with torch.device("meta"):
        model, x = torchvision.models.resnet50(), torch.empty(256, 3, 224, 224)
    start_s = time.process_time()
    report = profile(model, x, min_bytes=2**20)
    taken_s = time.process_time() - start_s

    assert report.trace.peak_bytes == pytest.approx(21347 * 2**20, rel=0.005)  # measured on an H200
    assert taken_s < 5
    assert len(report.to_json()) < 2**20


def test_modules_of_which_only_the_backend_knows_what_they_do_are_named() -> None:
    model = Holding(lambda self, x: self.head(self.rnn(x)[0]), rnn=nn.LSTM(8, 16), head=nn.Linear(16, 4))
    report = profile(model, torch.empty(3, 2, 8), min_bytes=2**20)

    assert report.trace.backend_dependent == report.marked("backend-dependent") == ("rnn",)
    assert any("in rnn" in note for note in memkit.plan_memory(report, budget="1GiB", gpu="H200").notes)
    assert MemoryReport.from_json(report.to_json()).trace == report.trace


@pytest.mark.parametrize(
    ("channels", "kind"), [(1, OpKind.CONVOLUTION_OF_FEW), (3, OpKind.CONVOLUTION_OF_FEW), (4, OpKind.CONVOLUTION)]
)
def test_convolutions_of_few_channels_are_a_kind_of_their_own(channels: int, kind: OpKind) -> None:
    image, weight = torch.empty(2, channels, 8, 8, device="meta"), torch.empty(5, channels, 3, 3, device="meta")
    args = (image, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    op = torch.ops.aten.convolution.default

    assert work_of(op, args, {}, op(*args)).kind is kind


# Random programs


def _is_as_learned(graph: list[Op]) -> None:
    def call(x: Tensor, w: Tensor) -> Tensor:
        tensors = [w[:4, :4].sin(), x[:4, :4] * w[:4, :4]]
        for step in graph:
            if step[0] not in MARKING:
                with torch.device(x.device), suppress(RuntimeError):  # some writes are illegal
                    apply(step, tensors)
        return torch.stack([tensor.square().sum() for tensor in (tensors[0], *tensors[-3:])]).sum()

    try:
        assert_as_learned_and_counted(Weighted(call), torch.randn(32, 32))
    except (DataDependentError, RuntimeError) as error:
        if not isinstance(error, DataDependentError) and "inplace" not in str(error):
            raise
        reject()


test_random_programs = settings(max_examples=10)(given(graph=graphs)(_is_as_learned))
test_many_random_programs = pytest.mark.slow(settings(max_examples=120)(given(graph=graphs)(_is_as_learned)))


# JSON


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("save_places", 0), 10**6),
        (("step", "saves", 0), 10**6),
        (("live_bytes", 0), ...),
        (("ops", 0, 1), 99),  # its kind
        (("ops", 0, 0), -1),  # its name
        (("step", "ins", 0), [10**6]),
        (("lifetimes", 0, 1), 10**6),
        (("base_bytes",), "many"),
        (("step", "uses"), ...),
    ],
)
def test_damaged_trace(place: tuple[Any, ...], value: Any) -> None:
    content = json.loads(profile(nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()), torch.randn(4, 8)).to_json())
    part, *inside = content["trace"], *place
    for key in inside[:-1]:
        part = part[key]
    if value is ...:
        del part[inside[-1]]
    else:
        part[inside[-1]] = value

    with pytest.raises(ReportFormatError, match="not a whole memkit report"):
        MemoryReport.from_json(json.dumps(content))


# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backward": True}, r'^trace=True needs device="meta".* found a run on cpu\. Pass device="meta"$'),
        ({"device": "meta"}, r"^trace=True needs a whole step; found backward=False\. Pass backward=True$"),
    ],
)
def test_trace_needs_a_whole_step_without_data(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        memkit.profile_memory(nn.Linear(2, 2), torch.randn(2, 2), trace=True, **options)


def test_forward_that_changes_is_refused() -> None:
    calls = itertools.count(1)

    def change(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(next(calls)):
            x = x @ w
        return x

    with pytest.raises(ProfileError, match="a trace needs a step that does the same each time"):
        profile(Weighted(change), torch.randn(4, 32))


def test_random_numbers_of_python_are_the_same_in_both_runs() -> None:
    def drop(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(8):
            if random.random() < 0.5:
                x = x @ w
        return x @ w

    assert trace(Weighted(drop), torch.randn(4, 32)).step.saves


def test_backward_in_the_forward_is_refused() -> None:
    def call(x: Tensor, w: Tensor) -> Tensor:
        y = (x @ w).sin()
        (grad,) = torch.autograd.grad(y.sum(), w, create_graph=True)
        return y + x @ grad

    with pytest.raises(ProfileError, match="found a forward that runs a backward of its own"):
        profile(Weighted(call), torch.randn(4, 32))


@pytest.mark.parametrize("fails_at", [1, 2])  # the whole step, then the forward alone
def test_forward_that_fails_leaves_nothing_on(fails_at: int) -> None:
    calls = itertools.count(1)

    def fail(x: Tensor, w: Tensor) -> Tensor:
        if next(calls) == fails_at:
            raise RuntimeError("no more")
        return x @ w

    model = Weighted(fail)
    with pytest.raises(RuntimeError, match="no more"):
        profile(model, torch.randn(4, 32))

    assert torch_private.num_dispatch_modes() == 0
    assert not model._forward_hooks
    assert all(not parameter.is_meta for parameter in model.parameters())
