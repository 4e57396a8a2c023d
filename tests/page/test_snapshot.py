"""A step as what PyTorch's memory viewer reads."""

from __future__ import annotations

import inspect
import pickle
import pickletools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.cuda import _memory_viz

from memkit.page.snapshot import snapshot_of
from memkit.profile import MemoryReport
from memkit.profile.alive import MemoryCategory
from tests.page.browser import report_of_blocks
from tests.page.test_document import memory_of_ops


@pytest.fixture(scope="module")
def report() -> MemoryReport:
    return report_of_blocks()


@pytest.fixture(scope="module")
def snapshot(report: MemoryReport, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("snapshot") / "step.pickle"
    report.to_snapshot(path)
    found: dict[str, Any] = pickle.loads(path.read_bytes())
    return found


def levels_of(snapshot: dict[str, Any], *, apart: bool = False) -> list[int]:
    """Return the bytes that are allocated after each event; what is allocated twice, or freed without, fails.

    Args:
        apart: whether to look at all that is there, that no two are in one place: it takes long.
    """
    (events,), there, levels = snapshot["device_traces"], dict[int, int](), [0]
    for event in events:
        begin, size = event["addr"], event["size"]
        if event["action"] == "alloc":
            assert begin not in there
            assert not apart or all(begin + size <= at or begin >= at + other for at, other in there.items())
            there[begin] = size
            levels.append(levels[-1] + size)
        elif event["action"] == "free_completed":
            assert there.pop(begin) == size
            levels.append(levels[-1] - size)
    return levels


def test_viewer_draws_it(snapshot: dict[str, Any]) -> None:
    plot = _memory_viz.trace_plot(snapshot)

    assert "Active Memory Timeline" in plot or "MemoryViz" in plot
    assert "cudaMalloc" in _memory_viz.trace(snapshot)
    assert "segments: 1" in _memory_viz.segsum(snapshot)  # which checks that sizes add up
    assert "active_allocated" in _memory_viz.memory(snapshot, format_flamegraph=str)
    assert "active_allocated" in _memory_viz.segments(snapshot, format_flamegraph=str)
    assert _memory_viz.compare(snapshot["segments"], [], format_flamegraph=str).startswith("only_before;")
    assert "MemoryViz" in _memory_viz.segment_plot(snapshot)
    categories = {event["category"] for event in snapshot["device_traces"][0]}
    assert "unknown" in categories <= {"unknown", *(category.value for category in MemoryCategory)}


_OPCODES = """
PROTO FRAME MARK STOP MEMOIZE BINGET LONG_BINGET BINPUT LONG_BINPUT NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT
SHORT_BINUNICODE BINUNICODE EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT DICT SETITEM SETITEMS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2
TUPLE3
"""
"""What the viewer's own reader of pickles knows. Source: `unpickle` in torch/utils/viz/MemoryViz.js."""


def test_viewer_can_read_the_file(report: MemoryReport, tmp_path: Path) -> None:
    report.to_snapshot(tmp_path / "step.pickle")

    opcodes = [(opcode.name, value) for opcode, value, _ in pickletools.genops((tmp_path / "step.pickle").read_bytes())]

    assert {name for name, _ in opcodes} <= set(_OPCODES.split())
    assert dict(opcodes[:1]) == {"PROTO": 4}


@pytest.mark.parametrize("kind", ["Segment", "Block", "Frame"])
def test_fields_are_those_that_torch_documents(kind: str, snapshot: dict[str, Any]) -> None:
    documented = inspect.cleandoc(torch.cuda.memory._snapshot.__doc__ or "").partition(f"class {kind}(TypedDict):\n")[2]
    fields = re.findall(r"^ {8}(\w+): ", documented.partition("\n\n")[0], re.MULTILINE)
    (segment,) = snapshot["segments"]
    found = {"Segment": segment, "Block": segment["blocks"][0], "Frame": segment["blocks"][0]["frames"][0]}[kind]

    assert len(fields) >= 3
    assert {field for field in fields if not field.startswith("fx_")} <= found.keys()


def test_what_is_left_is_in_the_blocks(snapshot: dict[str, Any], report: MemoryReport) -> None:
    (segment,) = snapshot["segments"]
    active = [block for block in segment["blocks"] if block["state"] == "active_allocated"]

    assert max(levels_of(snapshot)) == report.step_memory.peak_bytes
    assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
    assert sum(block["size"] for block in active) == segment["allocated_size"] == levels_of(snapshot)[-1]
    addresses = [block["address"] for block in segment["blocks"]]
    assert addresses == sorted(addresses)
    names = {frame["name"] for block in active for frame in block["frames"]}
    assert {"weight", "bias", "1.0.fc1"} <= names


def test_frames_tell_module_and_op(snapshot: dict[str, Any], report: MemoryReport) -> None:
    (events,) = snapshot["device_traces"]
    frames = {tuple(frame["name"] for frame in event["frames"]) for event in events if event["action"] == "alloc"}

    assert {("addmm", "1.0.act"), ("weight.exp_avg", "1.0.fc1"), ("input 0", "(model)")} <= frames
    assert {frame["filename"] for event in events for frame in event["frames"]} >= {"module", "activations", "gradients"}


@pytest.mark.parametrize("num_ops", [1, 100, 3000])
def test_no_two_are_in_one_place(num_ops: int, report: MemoryReport) -> None:
    memory = memory_of_ops(num_ops)
    snapshot = snapshot_of(replace(report, step_memory=memory))

    assert max(levels_of(snapshot, apart=True)) == memory.peak_bytes
    assert snapshot["segments"][0]["total_size"] < 1.5 * memory.peak_bytes


def test_sizes_are_rounded_as_an_allocator_does(report: MemoryReport, tmp_path: Path) -> None:
    memory = report.step_memory
    odd = replace(memory, storages=tuple(replace(storage, num_bytes=storage.num_bytes + 1) for storage in memory.storages))

    snapshot = snapshot_of(replace(report, step_memory=odd))

    assert all(event["size"] % 512 == 0 for event in snapshot["device_traces"][0])
    assert any(block["requested_size"] < block["size"] for block in snapshot["segments"][0]["blocks"])
    _memory_viz.segsum(snapshot)
    with pytest.raises(ValueError, match="a snapshot needs a report that knows the step moment by moment"):
        replace(report, step_memory=None).to_snapshot(tmp_path / "step.pickle")


@pytest.mark.gpu
def test_fields_are_those_of_a_real_snapshot(snapshot: dict[str, Any]) -> None:
    torch.cuda.memory._record_memory_history(stacks="python")
    kept = torch.ones(2**20, device="cuda")
    torch.empty(2**20, device="cuda")
    real = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    del kept

    assert snapshot.keys() <= real.keys()
    assert snapshot["segments"][0].keys() <= real["segments"][0].keys()
    blocks = [block for segment in real["segments"] for block in segment["blocks"]]
    assert snapshot["segments"][0]["blocks"][0].keys() <= blocks[0].keys()
    events = [event for trace in real["device_traces"] for event in trace if event["action"] == "alloc"]
    mine = next(event for event in snapshot["device_traces"][0] if event["action"] == "alloc")
    assert mine.keys() - events[0].keys() <= {"category"}  # which torch.profiler's snapshots have
    assert mine["frames"][0].keys() == events[0]["frames"][0].keys()
