"""Did it help: two reports, and a report beside what a context has taken."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memkit
from memkit.profile import MemoryReport

MIB = 2**20


class Blocks(nn.Module):
    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


@functools.cache
def report(*, checkpointed: bool, optimizer: str | None = "adamw") -> MemoryReport:
    with torch.device("meta"):
        model, x = Blocks(checkpointed=checkpointed), torch.empty(4096, 256)
    return memkit.profile_memory(model, x, print_table=False, optimizer=optimizer)


def test_checkpoints_have_helped_and_parts_at_the_peak_add_up() -> None:
    before, after = report(checkpointed=False), report(checkpointed=True)

    found = before.compare(after)

    assert found.helped
    assert (found.peak.before, found.peak.after) == (before.step_peak_bytes, after.step_peak_bytes)
    assert found.time is None
    assert str(found).startswith(
        f"It helped: the peak of the step went from {found.peak.before / MIB:.2f} to {found.peak.after / MIB:.2f} MiB, "
        f"{-100 * found.peak.change:.0f} % less.\n"
    )
    rows = {line.rpartition(" (MiB)")[0]: line.rpartition(" (MiB)")[2].split() for line in str(found).splitlines()[4:]}
    assert rows["... optimizer states"][2] == "+0.0"
    assert rows["... activations"][2].startswith("-")
    assert rows["saved activations"][0] == f"{before.activation_bytes / MIB:.2f}"
    parts = [figure for figure in found.figures if figure.name.startswith("... ")]
    assert sum(figure.before or 0 for figure in parts) == found.peak.before
    assert sum(figure.after or 0 for figure in parts) == found.peak.after
    for width in (40, 80):
        assert max(map(len, found.to_text(width=width).splitlines())) <= width


def test_the_same_made_no_difference_and_the_other_way_round_it_did_not_help() -> None:
    before, after = report(checkpointed=False), report(checkpointed=True)

    assert str(after.compare(before)).startswith("It did not help: ")
    assert str(before.compare(before)).startswith("It made no difference: the peak of the step went from")
    assert report(checkpointed=False, optimizer=None).compare(after).peak.name == "peak of the forward"
    with pytest.raises(TypeError, match=r"or with what memkit\.stats returns; found int"):
        before.compare(3)


def test_times_are_compared_where_both_were_taken() -> None:
    torch.manual_seed(0)
    model = Blocks(checkpointed=False)
    short = memkit.profile_memory(model, torch.randn(4, 256), backward=True, print_table=False, warmup=0)
    rows = tuple(replace(row, forward_s=2.0, backward_s=4.0 if row.parent is None else None) for row in short.modules)
    slow = replace(short, modules=rows)

    found = slow.compare(replace(short, modules=tuple(replace(row, forward_s=1.0, backward_s=0.25) for row in short.modules)))

    assert found.time is not None
    assert found.time.before == 2.0 + 2 * 4.0  # of the model, and outside of it
    assert f"forward and backward take {found.time.after / found.time.before:.2f} times as long" in str(found)


def test_stats_of_memkit_are_taken() -> None:
    device = memkit.device.ReferenceDevice()
    model, x = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), torch.randn(256, 64)
    before = memkit.profile_memory(model, x, backward=True, print_table=False, device="meta", target="cpu")
    for _ in range(4):
        with memkit.MemoryBudget("1GiB", "compared", device=device, min_bytes=1):
            output = model(x)
        output.sum().backward()
        model.zero_grad()
    stats = replace(memkit.stats("compared"), step_s=0.12, plain_s=0.1)

    found = before.compare(stats)

    assert (found.peak.before, found.peak.after) == (before.step_peak_bytes, stats.step_peak_bytes)
    assert "forward and backward take 1.20 times as long" in str(found)
