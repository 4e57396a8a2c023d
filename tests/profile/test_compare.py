"""Did it help: two reports, and a report beside what a context has taken."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
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


def report(*, checkpointed: bool, **options: Any) -> MemoryReport:
    with torch.device("meta"):
        model, x = Blocks(checkpointed=checkpointed), torch.empty(4096, 256)
    return memkit.profile_memory(model, x, print_table=False, **{"optimizer": "adamw", **options})


def test_checkpoints_have_helped() -> None:
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


def test_the_other_way_round_it_did_not_help() -> None:
    assert str(report(checkpointed=True).compare(report(checkpointed=False))).startswith("It did not help: ")


def test_the_same_made_no_difference() -> None:
    same = report(checkpointed=False)

    assert str(same.compare(same)).startswith("It made no difference: the peak of the step went from")


def test_parts_at_the_peak_add_up() -> None:
    before, after = report(checkpointed=False), report(checkpointed=True)

    figures = before.compare(after).figures

    parts = [figure for figure in figures if figure.name.startswith("... ")]
    assert sum(figure.before or 0 for figure in parts) == figures[0].before
    assert sum(figure.after or 0 for figure in parts) == figures[0].after


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


def test_forwards_are_compared_by_their_peaks() -> None:
    before = report(checkpointed=False, optimizer=None)

    found = before.compare(report(checkpointed=True))

    assert found.peak.name == "peak of the forward"


def test_what_a_budget_has_taken() -> None:
    before = report(checkpointed=False)
    taken = SimpleNamespace(step_peak_bytes=10 * MIB, step_s=0.12, plain_s=0.1)

    found = before.compare(taken)

    assert (found.peak.before, found.peak.after) == (before.step_peak_bytes, 10 * MIB)
    assert "forward and backward take 1.20 times as long" in str(found)


def test_stats_of_memkit_are_taken() -> None:
    device = memkit.device.ReferenceDevice()
    model, x = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), torch.randn(256, 64)
    before = memkit.profile_memory(model, x, backward=True, print_table=False, device="meta", target="cpu")
    for _ in range(4):
        with memkit.MemoryBudget("1GiB", "compared", device=device, min_bytes=1):
            output = model(x)
        output.sum().backward()
        model.zero_grad()

    found = before.compare(memkit.stats("compared"))

    assert found.peak.before == before.step_peak_bytes
    assert found.peak.after == memkit.stats("compared").step_peak_bytes


def test_what_cannot_be_compared() -> None:
    with pytest.raises(TypeError, match=r"or with what memkit\.stats returns; found int"):
        report(checkpointed=False).compare(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [40, 80])
def test_text_fits(width: int) -> None:
    text = report(checkpointed=False).compare(report(checkpointed=True)).to_text(width=width)

    assert max(map(len, text.splitlines())) <= width
