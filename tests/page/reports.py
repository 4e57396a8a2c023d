"""Reports to draw."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import memkit
from memkit.plan import MemoryPlan
from memkit.profile import MemoryReport

EVIL = (
    "<script>alert(1)</script>",
    "</script><script>alert(2)</script>",
    "<img src=x onerror=alert(3)>",
    "%{x} &lt;b&gt; <b>b</b>",
)
"""Names that would do something if they were taken for HTML, or for plotly's."""


class Block(nn.Module):
    """A residual block of two Linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(self.act(self.fc1(x)))


def report_of_blocks(num_blocks: int = 4, *, width: int = 64, batch: int = 4096, tag: str = "blocks") -> MemoryReport:
    """Return the report of a whole step of a few blocks, with a trace and an optimizer."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(width, width), nn.Sequential(*[Block(width) for _ in range(num_blocks)]))
        x = torch.empty(batch, width)
    return profiled(model, x, tag=tag)


def profiled(model: nn.Module, x: Tensor, *, tag: str = "default", optimizer: str | None = "adamw") -> MemoryReport:
    """Return the report of a whole step on meta."""
    return memkit.profile_memory(
        model, x, device="meta", backward=True, trace=True, optimizer=optimizer, tag=tag, print_table=False
    )


def report_of_evil() -> MemoryReport:
    """Return the report of a model whose modules, classes and tag are named as nobody should name them."""
    with torch.device("meta"):
        model = type(EVIL[0], (nn.Sequential,), {})()
        for name in EVIL:
            model.add_module(name.replace(".", "_"), type(name, (nn.Linear,), {})(256, 256))
        x = torch.empty(4096, 256)
    return profiled(model, x, tag=EVIL[1])


def plans_of(report: MemoryReport, *shares: float) -> list[MemoryPlan]:
    """Return plans for shares of the plain step's peak."""
    return [memkit.plan_memory(report, budget=share, gpu="RTX 3090", optimizer="adamw") for share in shares]
