"""Which module is running: attribution with nesting, recursion, reuse and exceptions, and the shapes that modules need."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memkit import profile_memory
from memkit.profile import MemoryReport, ModuleRecord
from tests.clock import set_clock
from tests.profile.cases import Function, Holding


def _rows(report: MemoryReport) -> dict[str, ModuleRecord]:
    return {row.fqn: row for row in report.modules}


def _raise(*_: object) -> None:
    raise RuntimeError("bad luck")


def _goes_on(self: Any, x: Tensor) -> Tensor:
    with contextlib.suppress(RuntimeError):
        x = self.bad(x)
    return torch.tanh(self.good(x)).exp()


def _careful() -> nn.Module:
    """Return a module that goes on after a module of its own failed."""
    return Holding(_goes_on, bad=Holding(lambda self, x: self.inner(x), inner=Function(_raise)), good=nn.Linear(4, 4))


@pytest.mark.parametrize("device", [None, "meta"])
def test_caught_exceptions_close_their_calls(device: str | None) -> None:
    report = profile_memory(_careful(), torch.randn(2, 4), device=device, backward=True, print_table=False)

    rows = _rows(report)
    assert rows["bad"].self_bytes == rows["bad.inner"].self_bytes == 0
    assert rows["good"].self_bytes == 32
    assert rows["(model)"].self_bytes == 64
    assert rows["bad.inner"].num_calls == rows["bad"].num_calls == rows["(model)"].num_calls == 1


def test_the_module_that_raised_is_named_not_those_that_failed_before() -> None:
    def later(self: Any, x: Tensor) -> Tensor:
        raise LookupError(self.careful(x).shape)

    with pytest.raises(LookupError) as raised:
        profile_memory(Holding(later, careful=_careful()), torch.randn(2, 4))

    assert raised.value.__notes__ == ["memkit: raised in (model) (Holding)"]


class _Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, depth: int = 3) -> Tensor:
        x = self.linear(x).sigmoid()
        return self(x, depth - 1) if depth else x


@pytest.mark.parametrize("wrap", [lambda module: module, nn.Sequential])
def test_modules_that_call_themselves_count_each_call_and_the_time_once(wrap: object) -> None:
    report = profile_memory(wrap(_Recursive()), torch.randn(2, 4), backward=True, print_table=False)

    row = next(row for row in report.modules if row.type_name == "_Recursive")
    assert row.num_calls == 4
    assert row.self_bytes == 4 * 32
    assert row.forward_s <= report.forward_s


def test_modules_called_by_a_stranger_belong_to_their_own_row() -> None:
    reaches = Holding(lambda self, x: self.block[1](x), block=nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()))

    rows = _rows(profile_memory(reaches, torch.randn(4, requires_grad=True), print_table=False))

    assert rows["block.1"].self_bytes == rows["block"].activation_bytes == rows["(model)"].activation_bytes == 16
    assert rows["block"].num_calls == 0


def test_backward_time_belongs_to_the_module_that_made_the_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = set_clock(monkeypatch)

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x.clone()

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            clock.sleep(2.0)
            return grad

    model = nn.Sequential(nn.Linear(4, 4), Function(Slow.apply), nn.Linear(4, 4))

    rows = _rows(profile_memory(model, torch.randn(2, 4), backward=True, print_table=False))

    assert rows["1"].backward_s == rows["(model)"].backward_s == 2.0
    assert rows["1"].forward_s == rows["0"].backward_s == rows["2"].backward_s == 0


def test_peaks_are_of_the_call_not_of_what_was_there() -> None:
    temporary = Function(lambda x: x * (1 + torch.zeros(1000).dim()))

    rows = _rows(profile_memory(nn.Sequential(nn.Sigmoid(), temporary), torch.randn(100), print_table=False))

    assert rows["0"].peak_bytes == 400
    assert rows["1"].peak_bytes == 4000
    assert rows["(model)"].peak_bytes == 4400


def test_hooks_of_the_user_count_to_their_module() -> None:
    model = nn.Sequential(nn.Identity(), nn.Identity())
    model[1].register_forward_hook(lambda module, args, output: output.exp())

    rows = _rows(profile_memory(model, torch.randn(4, requires_grad=True), print_table=False))

    assert rows["1"].self_bytes == 16


def test_jagged_tensors_have_shapes_and_a_backward() -> None:
    values = torch.randn(6, 4)
    nested = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 2, 6]))

    report = profile_memory(nn.Linear(4, 4), nested, backward=True, print_table=False)

    assert report.modules[0].input_shapes == ((2, -1, 4),)
    assert MemoryReport.from_json(report.to_json()) == report


def test_uses_during_the_forward_are_not_the_backwards() -> None:
    def penalty(x: Tensor) -> Tensor:
        y = (x @ torch.ones(4, 4)).tanh()
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.sum() + grad.pow(2).sum()

    report = profile_memory(Function(penalty), torch.randn(2, 4, requires_grad=True), backward=True, print_table=False)

    assert all(record.needed_at_s is None or record.needed_at_s >= 0 for record in report.saved)


def _unpack(self: Any, x: Tensor) -> Tensor:
    _, _, height, _ = x.shape
    return self.stem(x)[..., :height]


@pytest.mark.parametrize("device", [None, "meta"])
@pytest.mark.parametrize(
    ("model", "shape", "needs"),
    [
        (nn.Conv2d(3, 8, 3), (8,), "(batch, 3, height, width)"),
        (nn.Conv1d(3, 8, 3), (2, 4, 9), "(batch, 3, width)"),
        (nn.ConvTranspose3d(3, 8, 3), (2, 3, 9, 9, 9, 9), "(batch, 3, depth, height, width)"),
        (nn.BatchNorm2d(3), (3, 8, 8), "(batch, 3, height, width)"),
        (nn.Linear(4, 4), (2, 3), "(..., 4)"),
        (nn.LayerNorm((2, 3)), (3,), "(..., 2, 3)"),
        (Holding(_unpack, stem=nn.Conv2d(3, 8, 3)), (8, 8, 8), "(batch, 3, height, width)"),
    ],
    ids=lambda given: type(given).__name__ if isinstance(given, nn.Module) else None,
)
def test_a_shape_that_does_not_fit_is_told_beside_the_one_that_would(
    model: nn.Module, shape: tuple[int, ...], needs: str, device: str | None
) -> None:
    with pytest.raises((RuntimeError, ValueError)) as raised:
        profile_memory(nn.Sequential(model), torch.zeros(shape), device=device)

    found = ", ".join(map(str, shape))
    assert raised.value.__notes__[-1] == f"memkit: it needs {needs}, and was given ({found})"


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 3, 8, 8)])
def test_a_shape_that_fits_is_not_told(shape: tuple[int, ...]) -> None:
    with pytest.raises(RuntimeError) as raised:
        profile_memory(nn.Conv2d(3, 8, 3), torch.zeros(shape, dtype=torch.int64))

    assert raised.value.__notes__ == ["memkit: raised in (model) (Conv2d)"]
