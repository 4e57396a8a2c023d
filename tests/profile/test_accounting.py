"""What counts, and where: the rules, one by one, on models small enough to count by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from memkit import profile_memory
from memkit.profile import MemoryReport, ModuleRecord, SavedCategory
from tests.models import CASES, NAMES, Tied
from tests.profile.cases import Function, Holding

X = torch.randn(2, 4)


def _profile(model: nn.Module, *args: Tensor, **options: object) -> MemoryReport:
    return profile_memory(model, *args, print_table=False, **options)


def _of(call: Callable[..., Any], size: int, **options: object) -> MemoryReport:
    """Return the profile of one function, given so many floats."""
    return _profile(Function(call), torch.randn(size, requires_grad=True), **options)


def _row(report: MemoryReport, fqn: str) -> ModuleRecord:
    return next(row for row in report.modules if row.fqn == fqn)


def test_resnet50_has_the_published_figures() -> None:
    with torch.device("meta"):
        model, x = torchvision.models.resnet50().train(), torch.empty(256, 3, 224, 224)

    report = _profile(model, x)

    assert report.activation_bytes == 21993045504
    assert (f"{report.activation_bytes / 2**20:.2f}", f"{report.param_bytes / 2**20:.2f}") == ("20974.20", "97.49")
    assert report.input_bytes == 147 * 2**20
    assert sum(len(record.save_ordinals) > 1 for record in report.saved) == 49


def _reference_bytes(model: nn.Module, inputs: list[Tensor]) -> int:
    """Count the long way round: hold every saved storage, and add up the distinct ones that are no parameter or buffer."""
    held: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(*inputs)
    known = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    return sum(storage.nbytes() for key, storage in held.items() if key not in known)


@pytest.mark.parametrize("name", NAMES)
def test_total_is_that_of_a_simple_count_and_of_the_rows_with_their_children(name: str) -> None:
    model, inputs = CASES[name].model(), CASES[name].inputs()

    report = _profile(model, *inputs, warmup=0)

    counted = [record for record in report.saved if record.category is not SavedCategory.PARAM_CAST]
    listed = {record.storage: record.storage_bytes for record in counted}
    assert report.activation_bytes == _reference_bytes(model, inputs) == sum(listed.values()) > 0
    assert sum(row.self_bytes for row in report.modules) == report.activation_bytes
    for index, row in enumerate(report.modules):
        children = [child for child in report.modules if child.parent == index]
        assert row.activation_bytes == row.self_bytes + sum(child.activation_bytes for child in children)


def _written(x: Tensor) -> Tensor:
    y = x * 1
    y.sin()
    y.mul_(2)
    return y.sin()


@torch.no_grad()
def _frozen_exp(x: Tensor) -> Tensor:
    return x.exp()


@pytest.mark.parametrize(
    ("call", "saves", "num_bytes"),
    [
        # exp saves its result, sin and cos their input: a storage that is saved several times counts once
        (lambda x: (y := x.exp()).sin() + y.cos(), [(0, 0, (0, 1, 2), ((10,),) * 3)], 40),
        (lambda x: (x * 1)[:1].sin(), [(0, 0, (0,), ((1,),))], 40),  # a view counts the whole storage
        (_written, [(0, 0, (0,), ((10,),)), (0, 1, (1,), ((10,),))], 40),  # one record for each version
        (lambda x: x * _frozen_exp(x), [(0, 0, (0,), ((10,),))], 40),
    ],
)
def test_saves_of_one_function(call: Callable[[Tensor], Tensor], saves: list[object], num_bytes: int) -> None:
    report = _of(call, 10)

    assert [(it.storage, it.version, it.save_ordinals, it.shapes) for it in report.saved] == saves
    assert report.activation_bytes == num_bytes
    assert report.marked("checkpointed") == ()
    assert report.saved[0].needed_position is None  # without a backward
    assert report.backward_peak_bytes is None


def test_parameters_and_buffers_do_not_count() -> None:
    buffer = nn.Buffer(torch.randn(6))
    # F.linear saves weight.t(), which is no Parameter
    model = Holding(lambda self, x: self.linear(x) * self.scale, linear=nn.Linear(4, 6), scale=buffer)

    report = _profile(model, torch.randn(2, 4, requires_grad=True))

    assert report.activation_bytes == 2 * 4 * 4  # the input alone
    assert report.buffer_bytes == 6 * 4


def test_what_is_tied_or_shared_counts_where_it_comes_first() -> None:
    shared = nn.Linear(4, 4)

    tied, both = _profile(Tied(), torch.randint(0, 50, (2, 7))), _profile(nn.Sequential(shared, nn.ReLU(), shared), X)

    assert (_row(tied, "embedding").param_bytes, _row(tied, "head").param_bytes) == (50 * 16 * 4, 0)
    assert tied.param_bytes == (50 * 16 + 16 * 16 + 16) * 4
    assert [row.fqn for row in both.modules] == ["(model)", "0", "1", "(outside modules)"]
    assert (_row(both, "0").marks, _row(both, "0").num_calls) == (("+1 alias",), 2)


def test_storage_belongs_to_the_innermost_module_at_its_first_save() -> None:
    outer = Holding(lambda self, x: self.inner(x).sin(), inner=nn.Sigmoid())  # which saves its output, and sin its input

    report = _profile(outer, torch.randn(10, requires_grad=True))

    assert _row(report, "inner").self_bytes == 40
    assert (_row(report, "(model)").self_bytes, _row(report, "(model)").activation_bytes) == (0, 40)


def test_loss_belongs_outside_of_the_modules_and_its_own_buffers_do_not_count() -> None:
    labels, loss_fn = torch.tensor([1, 2]), nn.CrossEntropyLoss(weight=torch.ones(3))
    model, x = nn.Linear(4, 3), torch.randn(2, 4)

    report = _profile(model, x, loss_fn=lambda output: functional.cross_entropy(output, labels))
    weighted = _profile(model, x, loss_fn=lambda output: loss_fn(output, labels))
    known = _profile(model, x, loss_fn=Holding(lambda self, y: self.loss(y, self.labels), loss=loss_fn, labels=labels))

    # log-probabilities, labels and the total weight
    assert report.modules[-1].self_bytes == 2 * 3 * 4 + 2 * 8 + 4
    assert report.modules[-1].fqn == "(outside modules)"
    assert weighted.activation_bytes - known.activation_bytes == 12


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("device", [None, "meta"])
def test_checkpoint_shows_its_inputs_and_says_so(use_reentrant: bool, device: str | None) -> None:
    case = CASES["checkpoint_reentrant" if use_reentrant else "checkpoint_non_reentrant"]

    report = _profile(case.model(), *case.inputs(), device=device, backward=True)
    of_function = _of(lambda x: checkpoint(lambda x: x.sin().exp(), x, use_reentrant=use_reentrant), 4, device=device)

    assert report.marked("checkpointed") == ("block.0", "block.1", "block.2")
    assert of_function.marked("checkpointed") == ("(model)",)
    # model input, the region's input, its output (input of `last`), and the sigmoid's output
    assert report.activation_bytes == 4 * (4 * 16 * 4)
    assert _row(report, "block").activation_bytes == 0
    assert _row(report, "block.0").num_calls == 1  # the recomputation is not a call


def test_hooks_set_inside_the_model_are_said_to_hide() -> None:
    def inside(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t):
            return x.exp()

    assert _of(inside, 4).marked("other hooks") == ("(model)",)


@pytest.mark.parametrize("device", [None, "meta"])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_parameter_casts_are_a_class_of_their_own(device: str | None, requires_grad: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)).requires_grad_(requires_grad)
    x = torch.randn(4, 8, requires_grad=True)

    with torch.autocast("cpu", torch.bfloat16):
        model(x)  # the casts are in autocast's cache from here on
        report = _profile(model, x, device=device, target="cpu", warmup=0)

    assert report.param_cast_bytes == 2 * 8 * 16 * 2
    activations = [record for record in report.saved if record.category is SavedCategory.ACTIVATION]
    # Weights that need no gradient save no inputs.
    assert sum(record.storage_bytes for record in activations) == (4 * 8 * 2 + 4 * 16 * 2 if requires_grad else 0)


def test_inplace_operations_show_in_the_peak() -> None:
    kept, copied = (_profile(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=inplace)), X) for inplace in (True, False))

    assert copied.forward_peak_bytes - kept.forward_peak_bytes == 2 * 4 * 4


def test_uses_in_the_backward_are_listed_in_order() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4), nn.Tanh())

    found = _profile(model, X, backward=True).saved
    frozen = _of(lambda x: (x.sin(), (x * 1).exp())[1], 2, backward=True).saved

    for figure, in_reverse in (("needed_position", True), ("needed_at_s", True), ("saved_at_s", False)):
        figures = [getattr(record, figure) for record in found]
        assert figures == sorted(figures, reverse=in_reverse)
    assert [record.needed_position is None for record in frozen] == [True, False]


def _holding_a_compiled_function() -> nn.Module:
    linear = nn.Linear(4, 4)
    function = torch.compile(lambda x: linear(x).relu(), backend="aot_eager")
    return nn.Sequential(Holding(lambda self, x: self.function(x), linear=linear, function=function))


def _compiled_in_place() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model[0].compile(backend="aot_eager")
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend="aot_eager"), nn.Linear(4, 4)),
        _compiled_in_place,
        _holding_a_compiled_function,
    ],
)
def test_compiled_module_is_one_row(make: Callable[[], nn.Module]) -> None:
    report = _profile(make(), torch.randn(2, 4))

    assert report.marked("compiled") == ("0",)
    assert all(row.num_calls == 0 for row in report.modules if row.fqn.startswith("0."))
    assert sum(row.self_bytes for row in report.modules) == report.activation_bytes > 0
