"""Random graphs of views, writes in place, repeated saves and partial backwards, against plain autograd."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import memkit
from memkit.device import ReferenceDevice
from tests.activations.cases import assert_same_bits

# A step takes tensors by number, and adds one: name, the numbers of its inputs, a position for views.
Step = tuple[str, int, int, int]

OPERATIONS = ("sin", "exp", "mul", "matmul", "t", "row", "expand", "add_", "mul_", "relu_", "chunk", "conj", "detach", "twice")

steps = st.lists(
    st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 99), st.integers(0, 99), st.integers(0, 3)), min_size=1, max_size=14
)


def _apply(step: Step, tensors: list[Tensor]) -> None:
    name, first, second, place = step
    a, b = tensors[first % len(tensors)], tensors[second % len(tensors)]
    if name in ("sin", "exp"):
        tensors.append(getattr(a, name)().clamp(-2, 2))
    elif name == "mul":
        tensors.append(a * b)
    elif name == "matmul":
        tensors.append((a @ b).tanh())
    elif name == "t":
        tensors.append(a.t())
    elif name == "row":
        tensors.append(a[place].unsqueeze(0).expand(4, 4))
    elif name == "expand":
        tensors.append(a.sum(0, keepdim=True).expand(4, 4))
    elif name == "chunk":
        tensors.append(torch.cat([part.sin() for part in a.chunk(2, dim=1)], dim=1))
    elif name == "conj":
        tensors.append(torch.complex(a, b).conj().imag * a)
    elif name == "detach":
        tensors.append(a * b.detach().sin())
    elif name == "twice":
        tensors.append(a.sin() * a.cos() * a)
    elif not a.is_leaf:  # in place
        {"add_": lambda: a.add_(b.detach()), "mul_": lambda: a.mul_(0.5), "relu_": lambda: a.relu_()}[name]()


def _kind(error: RuntimeError) -> str:
    """Return the error's beginning; for writes in place what they have in common, as autograd words them in several ways."""
    return "modified in place" if "inplace" in str(error) else str(error)[:60]


def _outcome(graph: list[Step], parts: list[int], context: AbstractContextManager[object]) -> tuple[list[Tensor], list[str]]:
    """Return the gradients after each of several backwards, and the kinds of errors in their places."""
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(4, 4, generator=generator).requires_grad_() for _ in range(2)]
    tensors, errors, results = list(leaves), [], []
    with context:
        for step in graph:
            try:
                _apply(step, tensors)
            except RuntimeError as error:
                errors.append(_kind(error))
    for number, part in enumerate(parts):
        chosen = tensors[part % len(tensors)]
        if chosen.requires_grad:
            try:
                chosen.square().sum().backward(retain_graph=number + 1 < len(parts))
            except RuntimeError as error:
                errors.append(_kind(error))
        results += [torch.zeros(4, 4) if leaf.grad is None else leaf.grad.clone() for leaf in leaves]
    return results, errors


@settings(max_examples=150, deadline=None)
@given(
    graph=steps,
    parts=st.lists(st.integers(0, 99), min_size=1, max_size=4),
    ratio=st.sampled_from([0.3, 0.7, 1.0]),
    window_bytes=st.sampled_from([0, 128, None]),
    seed=st.sampled_from([None, 0, 1, 2]),
)
def test_random_graphs(graph: list[Step], parts: list[int], ratio: float, window_bytes: int | None, seed: int | None) -> None:
    wanted, wanted_errors = _outcome(graph, parts, nullcontext())
    device = ReferenceDevice(seed=seed)

    for _ in range(2):
        found, errors = _outcome(
            graph, parts, memkit.CPUOffload(ratio, "random", min_bytes=0, window_bytes=window_bytes, device=device)
        )

        assert errors == wanted_errors
        assert_same_bits(found, wanted)
    device.synchronize()
    memkit.reset("random")


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_can_be_applied(name: str) -> None:
    leaf = torch.randn(4, 4, requires_grad=True)
    tensors = [leaf, leaf * 2]

    _apply((name, 1, 1, 1), tensors)

    assert len(tensors) == 3 or tensors[1]._version == 1
