"""Random graphs of views, writes in place, random numbers, several results, repeated saves and partial backwards, against plain
autograd."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import memkit
from memkit.device import CpuDevice, ReferenceDevice
from tests.activations.cases import assert_same_bits
from tests.activations.remat.conftest import NO_PLAN_FITS
from tests.contracts.contexts import KINDS, MORE_KINDS, SMALL_KINDS

pytestmark = pytest.mark.filterwarnings(NO_PLAN_FITS)

ALL_KINDS = KINDS | MORE_KINDS | SMALL_KINDS

# A step takes tensors by number, and adds one: name, the numbers of its inputs, a position for views.
Step = tuple[str, int, int, int]

MARKS = ("keep", "offload", "recompute")

OPERATIONS = (
    "sin",
    "exp",
    "mul",
    "matmul",
    "t",
    "row",
    "expand",
    "chunk",
    "conj",
    "detach",
    "twice",
    "dropout",
    "noise",
    "norm",
    "top",
    "sort",
    "buffer",
    "fill",
    "no_grad",
    "data_scale",
    "add_",
    "mul_",
    "relu_",
    "row_add_",
    "copy_",
    "zero_",
    "dropout_",
    "swap_",
    "sum_into",
    *MARKS,
)

steps = st.lists(
    st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 99), st.integers(0, 99), st.integers(0, 3)), min_size=1, max_size=16
)


def _apply(step: Step, tensors: list[Tensor]) -> None:
    name, first, second, place = step
    a, b = tensors[first % len(tensors)], tensors[second % len(tensors)]
    made = {
        "sin": lambda: a.sin(),
        "exp": lambda: a.exp().clamp(-2, 2),
        "mul": lambda: a * b,
        "matmul": lambda: (a @ b).tanh(),
        "t": lambda: a.t(),
        "row": lambda: a[place].unsqueeze(0).expand(4, 4),
        "expand": lambda: a.sum(0, keepdim=True).expand(4, 4),
        "chunk": lambda: torch.cat([part.sin() for part in a.chunk(2, dim=1)], dim=1),
        "conj": lambda: torch.complex(a, b).conj().imag * a,
        "detach": lambda: a * b.detach().sin(),
        "twice": lambda: a.sin() * a.cos() * a,
        "dropout": lambda: torch.nn.functional.dropout(a, 0.4) * 0.5,
        "noise": lambda: a + torch.rand(4, 4).sin() * b,
        "norm": lambda: torch.nn.functional.layer_norm(a, (4,)),
        "top": lambda: a.topk(2, 1).values.repeat(1, 2) * b,
        "sort": lambda: a.sort(place % 2).values,
        "buffer": lambda: torch.zeros(4, 4).index_add(0, torch.tensor([place, 1]), a[:2]).sin(),
        "fill": lambda: torch.empty(4, 4).copy_(a).tanh(),
        "sum_into": lambda: torch.zeros(4, 4).index_add_(0, torch.tensor([place, 2]), b[:2]).exp().clamp(-2, 2),
    }
    if name in made:
        tensors.append(made[name]())
        return
    if name == "no_grad":
        with torch.no_grad():
            tensors.append(a.sin() * b.exp().clamp(-2, 2))
        return
    if name == "data_scale":
        with torch.no_grad():
            tensors.append(a.detach().mul(0.5).add_(b))
        return
    if a.is_leaf and a.requires_grad:
        return
    {
        "add_": lambda: a.add_(b.detach()),
        "mul_": lambda: a.mul_(0.5),
        "relu_": lambda: a.relu_(),
        "row_add_": lambda: a[place].add_(b[0]),
        "copy_": lambda: a.copy_(b),
        "zero_": lambda: a[:, place].zero_(),
        "dropout_": lambda: torch.nn.functional.dropout(a, 0.3, inplace=True),
        "swap_": lambda: a.t_(),
        "keep": lambda: memkit.keep(a),
        "offload": lambda: memkit.offload(a),
        "recompute": lambda: memkit.recompute(a),
    }[name]()


def _kind(error: RuntimeError) -> str:
    """Return the error's beginning; for writes in place what they have in common, as autograd words them in several ways."""
    return "modified in place" if "inplace" in str(error) else str(error)[:60]


def _outcome(graph: list[Step], parts: list[int], context: AbstractContextManager[object]) -> tuple[list[Tensor], list[str]]:
    """Return the gradients after each of several backwards, and the kinds of errors in their places."""
    torch.manual_seed(0)
    leaves = [torch.randn(4, 4).requires_grad_() for _ in range(2)]
    tensors, errors, results = list(leaves), [], []
    with context:
        for step in graph:
            try:
                _apply(step, tensors)
            except RuntimeError as error:
                errors.append(_kind(error))
    chosen = [tensors[part % len(tensors)] for part in parts]
    del tensors
    for number, tensor in enumerate(chosen):
        if tensor.requires_grad:
            try:
                tensor.square().sum().backward(retain_graph=number + 1 < len(parts))
            except RuntimeError as error:
                errors.append(_kind(error))
        results += [torch.zeros(4, 4) if leaf.grad is None else leaf.grad.clone() for leaf in leaves]
    return [*results, torch.get_rng_state()], errors


def _compare(graph: list[Step], parts: list[int], name: str, seed: Any) -> None:
    wanted, wanted_errors = _outcome(graph, parts, nullcontext())
    kind = ALL_KINDS[name]
    device = (
        CpuDevice() if isinstance(seed, str) and kind.on_cpu else ReferenceDevice(seed=seed if isinstance(seed, int) else None)
    )

    for _ in range(3):
        found, errors = _outcome(graph, parts, kind.make(device, "random"))

        assert errors == wanted_errors
        assert_same_bits(found, wanted)
    device.synchronize()
    memkit.reset("random")


def _drawn(max_examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        drawn = given(
            graph=steps,
            parts=st.lists(st.integers(0, 99), min_size=1, max_size=4),
            name=st.sampled_from(sorted(ALL_KINDS)),
            seed=st.sampled_from([None, 0, 1, 2, "cpu"]),
        )
        return settings(max_examples=max_examples, deadline=None)(drawn(test))

    return decorate


@_drawn(12)
def test_random_graphs(graph: list[Step], parts: list[int], name: str, seed: Any) -> None:
    _compare(graph, parts, name, seed)


@pytest.mark.slow
@_drawn(300)
def test_many_random_graphs(graph: list[Step], parts: list[int], name: str, seed: Any) -> None:
    _compare(graph, parts, name, seed)


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in MARKS])
def test_each_operation_can_be_applied(name: str) -> None:
    leaf = torch.randn(4, 4, requires_grad=True)
    tensors = [leaf, leaf * 2]

    _apply((name, 1, 0, 1), tensors)

    assert len(tensors) == 3 or tensors[1]._version == 1


FOUND = [
    *(("matmul", 46, 92, 1), ("detach", 10, 14, 0), ("norm", 72, 63, 3), ("conj", 61, 18, 1), ("keep", 20, 60, 2)),
    *(("norm", 37, 56, 0), ("row_add_", 86, 82, 2), ("conj", 12, 53, 2), ("t", 82, 28, 2), ("noise", 39, 40, 2)),
    ("chunk", 18, 92, 1),
]


@pytest.mark.parametrize("name", ["remat dtr of 200", "remat dtr of nothing"])
def test_graph_with_a_write_to_what_a_mark_has_kept(name: str) -> None:
    _compare(FOUND, [53, 30], name, None)
