"""What tests of traces share: traces, what `Rematerialize` learns of the same step, and models of one function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import memkit
from memkit.activations.rematerialize import _recorded
from memkit.activations.saved.state import RematState
from memkit.device import CpuDevice
from memkit.plan import Step, StepTrace
from memkit.profile import MemoryReport
from memkit.profile.simulate.run import run_without_data
from memkit.profile.step import ProfiledStep

KIB = 1024


def profile(model: nn.Module, *inputs: Any, min_bytes: int = 1, **options: Any) -> MemoryReport:
    report: MemoryReport = memkit.profile_memory(
        model, *inputs, device="meta", backward=True, print_table=False, trace=True, min_bytes=min_bytes, **options
    )
    return report


def trace(model: nn.Module, *inputs: Any, **options: Any) -> StepTrace:
    found = profile(model, *inputs, **options).trace
    assert found is not None
    return found


def learned(model: nn.Module, *inputs: Any, target: str = "cuda") -> tuple[Step, dict[int, tuple[str, str]]]:
    """Return what a `Rematerialize` that drops nothing learns of the step, without data."""
    state = RematState("trace")
    options = memkit.Rematerialize(1.0, "trace", min_bytes=1, device=CpuDevice(torch.device("meta")))._options
    step = ProfiledStep(model=model, args=inputs, kwargs={}, loss_fn=None, backward=True)
    run_without_data(step, target, _recorded(state, options))
    found = state.traces.latest
    return found.ops.step, found.ops.names


def untimed(step: Step) -> Step:
    return replace(step, lineage=step.lineage.with_seconds([0.0] * len(step.lineage.ins)))


class Weighted(nn.Module):
    """One function of an input and a weight of shape (32, 32)."""

    def __init__(self, call: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.call = call
        self.weight = nn.Parameter(torch.randn(32, 32))

    def forward(self, x: Tensor) -> Any:
        return self.call(x, self.weight)


class LlamaBlock(nn.Module):
    """One block of a Llama: norms in float32, rotary positions, causal attention, a gated MLP."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ParameterList(nn.Parameter(torch.ones(width)) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weight * wide.to(x.dtype)

    def rotated(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[2], device=x.device), torch.arange(x.shape[3], device=x.device) / x.shape[3])
        first, second = x.chunk(2, dim=-1)
        return x * angles.cos().to(x.dtype) + torch.cat((-second, first), -1) * angles.sin().to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.normed(x, self.norms[0])).view(batch, length, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(self.rotated(query), self.rotated(key), value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        hidden = self.normed(x, self.norms[1])
        return x + self.down(functional.silu(self.gate(hidden)) * self.up(hidden))
