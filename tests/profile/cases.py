"""What tests of runs without data share: models made of one function, and both runs of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memkit import profile_memory
from memkit.profile import MemoryReport, SavedTensorRecord


class Calls(nn.Module):
    """One function, called with an input and a weight of shape (4, 4), a mask and a constant."""

    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.call = call
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool).tril())
        self.constant = torch.tensor(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x, self.weight, self)


class Function(nn.Module):
    """One function of the inputs, which is called as it is."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


class Holding(nn.Module):
    """One function of a module, with what that holds, and of the inputs."""

    def __init__(self, call: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        self.call = call
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, *args: Any) -> Any:
        return self.call(self, *args)


class Ops(TorchDispatchMode):
    """Lists the ops that run, with the tensors that they return."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, list[Tensor]]] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        output = op(*args, **(kwargs or {}))
        self.found.append((str(op), [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]))
        return output


class Biased(nn.Module):
    """Attention of 4 heads with a bias that is looked up, one number for each head and distance, as T5's."""

    def __init__(self, *, contiguous: bool, dropout_p: float = 0.0, width: int = 32) -> None:
        super().__init__()
        self.contiguous = contiguous
        self.dropout_p = dropout_p
        self.query_key_value = nn.Linear(width, 3 * width)
        self.distances = nn.Embedding(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        positions = torch.arange(length, device=x.device)
        distances = (positions[None] - positions[:, None]).abs().clamp(max=7)
        bias = self.distances(distances).permute(2, 0, 1)[None]
        query, key, value = self.query_key_value(x).view(batch, length, 3, 4, -1).permute(2, 0, 3, 1, 4)
        bias = bias.contiguous() if self.contiguous else bias
        return functional.scaled_dot_product_attention(query, key, value, bias, self.dropout_p)


def both(model: nn.Module, *inputs: Any, target: str = "cpu", **options: Any) -> tuple[MemoryReport, MemoryReport]:
    """Return the profile of a run where the model is, and of one without data."""
    torch.manual_seed(0)
    real = profile_memory(model, *inputs, warmup=0, print_table=False, **options)
    meta = profile_memory(model, *inputs, device="meta", target=target, print_table=False, **options)
    return real, meta


def saved(report: MemoryReport) -> list[SavedTensorRecord]:
    """Return what was saved, in order, without times."""
    return [dataclasses.replace(record, saved_at_s=0.0, needed_at_s=None) for record in report.saved]
