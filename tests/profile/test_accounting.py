"""What counts, and where: the rules, one by one, on models small enough to count by hand."""

from __future__ import annotations

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import memkit
from memkit import profile_memory
from memkit.profile import MemoryReport, SavedCategory
from tests.models import CASES, NAMES, Tied

MIB = 1024**2


def _profile(model: nn.Module, *args: Tensor, **options: object) -> MemoryReport:
    return profile_memory(model, *args, print_table=False, **options)


def _row(report: MemoryReport, fqn: str) -> memkit.profile.ModuleRecord:
    return next(row for row in report.modules if row.fqn == fqn)


@pytest.fixture(scope="module")
def resnet50() -> MemoryReport:
    with torch.device("meta"):
        model = torchvision.models.resnet50().train()
    return _profile(model, torch.empty(256, 3, 224, 224, device="meta"))


def test_resnet50_has_the_published_figures(resnet50: MemoryReport) -> None:
    assert resnet50.activation_bytes == 21993045504
    assert f"{resnet50.activation_bytes / MIB:.2f}" == "20974.20"
    assert f"{resnet50.param_bytes / MIB:.2f}" == "97.49"
    assert resnet50.input_bytes == 147 * MIB
    assert sum(len(record.save_ordinals) > 1 for record in resnet50.saved) == 49


@pytest.mark.parametrize("name", NAMES)
def test_rows_add_up_and_include_their_children(name: str) -> None:
    case = CASES[name]

    report = _profile(case.model(), *case.inputs(), device="meta")

    listed = {
        record.storage: record.storage_bytes for record in report.saved if record.category is not SavedCategory.PARAM_CAST
    }
    assert sum(row.self_bytes for row in report.modules) == report.activation_bytes == sum(listed.values()) > 0
    for index, row in enumerate(report.modules):
        children = [child for child in report.modules if child.parent == index]
        assert row.activation_bytes == row.self_bytes + sum(child.activation_bytes for child in children)


def _reference_bytes(model: nn.Module, inputs: list[Tensor]) -> int:
    """Count the long way round: hold every saved storage, and add up the distinct ones that are no parameter or buffer."""
    held: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(*inputs)
    known = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    del output
    return sum(storage.nbytes() for key, storage in held.items() if key not in known)


@pytest.mark.parametrize("name", NAMES)
def test_total_is_that_of_a_simple_count(name: str) -> None:
    case = CASES[name]
    model, inputs = case.model(), case.inputs()

    report = _profile(model, *inputs, warmup=0)

    assert report.activation_bytes == _reference_bytes(model, inputs)


def test_storage_saved_twice_counts_once() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()  # saves its result
            return y.sin() + y.cos()  # both save their input

    report = _profile(Twice(), torch.randn(10, requires_grad=True))

    assert report.activation_bytes == 40
    assert [record.save_ordinals for record in report.saved] == [(0, 1, 2)]
    assert _row(report, "(model)").num_saves == 3


def test_small_view_counts_the_whole_storage() -> None:
    class View(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 1)[:1].sin()

    report = _profile(View(), torch.randn(100, requires_grad=True))

    assert report.activation_bytes == 400
    assert report.saved[0].shapes == ((1,),)


def test_parameters_are_known_by_their_storage() -> None:
    # F.linear saves weight.t(), which is no Parameter.
    report = _profile(nn.Linear(4, 6), torch.randn(2, 4, requires_grad=True))

    assert report.activation_bytes == 2 * 4 * 4


def test_buffers_do_not_count() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.randn(100))
            self.weight = nn.Parameter(torch.randn(100))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight * self.scale

    report = _profile(Scale(), torch.randn(100))

    assert report.activation_bytes == 400  # the input alone
    assert report.buffer_bytes == 400


def test_tied_parameters_count_where_they_come_first() -> None:
    report = _profile(Tied(), torch.randint(0, 50, (2, 7)))

    assert _row(report, "embedding").param_bytes == 50 * 16 * 4
    assert _row(report, "head").param_bytes == 0
    assert report.param_bytes == (50 * 16 + 16 * 16 + 16) * 4


def test_shared_module_is_listed_under_its_first_name() -> None:
    shared = nn.Linear(4, 4)

    report = _profile(nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})["b"], torch.randn(2, 4))
    both = _profile(nn.Sequential(shared, nn.ReLU(), shared), torch.randn(2, 4))

    assert [row.fqn for row in report.modules] == ["(model)", "0", "(outside modules)"]
    assert _row(both, "0").marks == ("+1 alias",)
    assert _row(both, "0").num_calls == 2


def test_storage_belongs_to_the_innermost_module_at_its_first_save() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sigmoid()  # saves its output

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).sin()  # saves the same storage again

    report = _profile(Outer(), torch.randn(10, requires_grad=True))

    assert _row(report, "inner").self_bytes == 40
    assert _row(report, "(model)").self_bytes == 0
    assert _row(report, "(model)").activation_bytes == 40


def test_loss_belongs_outside_of_the_modules() -> None:
    labels = torch.tensor([1, 2])

    report = _profile(nn.Linear(4, 3), torch.randn(2, 4), loss_fn=lambda output: functional.cross_entropy(output, labels))

    # log-probabilities, labels and the total weight
    assert _row(report, "(outside modules)").self_bytes == 2 * 3 * 4 + 2 * 8 + 4
    assert report.modules[-1].fqn == "(outside modules)"


def test_buffers_of_the_loss_do_not_count() -> None:
    loss_fn = nn.CrossEntropyLoss(weight=torch.ones(3))
    labels = torch.tensor([1, 2])

    report = _profile(nn.Linear(4, 3), torch.randn(2, 4), loss_fn=lambda output: loss_fn(output, labels))
    known = _profile(nn.Linear(4, 3), torch.randn(2, 4), loss_fn=_WithLabels(loss_fn, labels))

    assert report.activation_bytes - known.activation_bytes == 12


class _WithLabels(nn.Module):
    def __init__(self, loss_fn: nn.Module, labels: Tensor) -> None:
        super().__init__()
        self.loss_fn = loss_fn
        self.labels = labels

    def forward(self, output: Tensor) -> Tensor:
        return self.loss_fn(output, self.labels)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("device", [None, "meta"])
def test_checkpoint_shows_its_inputs_and_says_so(use_reentrant: bool, device: str | None) -> None:
    case = CASES["checkpoint_reentrant" if use_reentrant else "checkpoint_non_reentrant"]

    report = _profile(case.model(), *case.inputs(), device=device, backward=True)

    assert report.marked("checkpointed") == ("block.0", "block.1", "block.2")
    # model input, the region's input, its output (input of `last`), and the sigmoid's output
    assert report.activation_bytes == 4 * (4 * 16 * 4)
    assert _row(report, "block").activation_bytes == 0
    assert _row(report, "block.0").num_calls == 1  # the recomputation is not a call


def test_checkpointed_function_marks_the_module_that_calls_it() -> None:
    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda x: x.sin().exp(), x, use_reentrant=True)

    report = _profile(Plain(), torch.randn(4, requires_grad=True))

    assert report.marked("checkpointed") == ("(model)",)


def test_no_grad_inside_is_not_taken_for_a_checkpoint() -> None:
    class Frozen(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = x.exp()
            return x * scale

    report = _profile(Frozen(), torch.randn(4, requires_grad=True))

    assert report.marked("checkpointed") == ()


def test_hooks_set_inside_the_model_are_said_to_hide() -> None:
    class Inside(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t):
                return x.exp()

    report = _profile(Inside(), torch.randn(4, requires_grad=True))

    assert report.marked("other hooks") == ("(model)",)


@pytest.mark.parametrize("device", [None, "meta"])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_parameter_casts_are_a_class_of_their_own(device: str | None, requires_grad: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)).requires_grad_(requires_grad)
    x = torch.randn(4, 8, requires_grad=True)

    with torch.autocast("cpu", torch.bfloat16):
        report = _profile(model, x, device=device, target="cpu")

    assert report.param_cast_bytes == 2 * 8 * 16 * 2
    activations = [record for record in report.saved if record.category is SavedCategory.ACTIVATION]
    # Weights that need no gradient save no inputs.
    assert sum(record.storage_bytes for record in activations) == (4 * 8 * 2 + 4 * 16 * 2 if requires_grad else 0)


def test_casts_kept_by_an_autocast_around_are_still_seen() -> None:
    model, x = nn.Linear(8, 16), torch.randn(4, 8)

    with torch.autocast("cpu", torch.bfloat16):
        model(x)  # the cast is in autocast's cache from here on
        report = _profile(model, x, warmup=0)

    assert report.activation_bytes == 4 * 8 * 2


def test_inplace_operations_show_in_the_peak() -> None:
    kept = _profile(nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True)), torch.randn(4, 8))
    copied = _profile(nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=False)), torch.randn(4, 8))

    assert copied.forward_peak_bytes - kept.forward_peak_bytes == 4 * 8 * 4


def test_storage_written_between_saves_has_a_record_for_each_version() -> None:
    class Written(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 1
            y.sin()
            y.mul_(2)
            return y.sin()

    report = _profile(Written(), torch.randn(10, requires_grad=True))

    assert [(record.storage, record.version) for record in report.saved] == [(0, 0), (0, 1)]
    assert report.activation_bytes == 40


def test_frozen_model_saves_nothing() -> None:
    report = _profile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).requires_grad_(False), torch.randn(2, 4))

    assert report.activation_bytes == 0
    assert report.saved == ()


def test_uses_in_the_backward_are_listed_in_order() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4), nn.Tanh())

    report = _profile(model, torch.randn(2, 4), backward=True)

    positions = [record.needed_position for record in report.saved]
    assert positions == sorted(positions, reverse=True)
    times = [record.needed_at_s for record in report.saved]
    assert times == sorted(times, reverse=True)
    assert [record.saved_at_s for record in report.saved] == sorted(record.saved_at_s for record in report.saved)


def test_without_a_backward_nothing_is_needed() -> None:
    report = _profile(nn.Tanh(), torch.randn(2, requires_grad=True))

    assert report.saved[0].needed_position is None
    assert report.backward_peak_bytes is None


def test_uses_of_a_frozen_branch_are_none() -> None:
    class Unused(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x.sin()
            return (x * 1).exp()

    report = _profile(Unused(), torch.randn(2, requires_grad=True), backward=True)

    assert [record.needed_position is None for record in report.saved] == [True, False]


def test_compiled_module_is_one_row() -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model = nn.Sequential(torch.compile(inner, backend="aot_eager"), nn.Linear(4, 4))

    report = _profile(model, torch.randn(2, 4))

    assert report.marked("compiled") == ("0",)
    assert _row(report, "0").activation_bytes > 0
    assert all(row.num_calls == 0 for row in report.modules if row.fqn.startswith("0."))
    assert sum(row.self_bytes for row in report.modules) == report.activation_bytes


def test_module_compiled_in_place_is_counted_in_its_parent() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model[0].compile(backend="aot_eager")

    report = _profile(model, torch.randn(2, 4))

    assert report.marked("compiled") == ("0",)
    assert sum(row.self_bytes for row in report.modules) == report.activation_bytes > 0
