"""Random programs as steps: several equal ones, which follow a schedule from the third on, then others, then the first
again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import memkit
from memkit.device import ReferenceDevice
from memkit.plan import copies
from tests.activations.cases import assert_same_bits
from tests.activations.remat.conftest import NO_PLAN_FITS
from tests.programs import Op, graphs, outcome

# some programs ask for nothing that they save, or save nothing large enough, or take more than there is
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*saved tensors for a backward, and none came", "ignore:.*host memory", "ignore:.*nothing was", NO_PLAN_FITS
)

TAG = "random steps"
Program = tuple[list[Op], list[int], str]
"""The ops, the roots of the backwards, and this step's setting."""
SETTINGS = (
    "another ratio",
    "another window",
    "larger ones",
    "little host memory",
    "pause",
    "recompute inside",
    "tag inside",
    "hooks",
)


@st.composite
def programs(draw: st.DrawFn) -> list[Program]:
    """Draw the steps of a training: a program, and others that differ from it a little or wholly."""
    parts = st.lists(st.integers(0, 99), min_size=1, max_size=3)
    first = draw(graphs), draw(parts), ""
    graph = list(first[0])
    place = draw(st.integers(0, len(graph) - 1))
    change = draw(st.sampled_from(["one step", "shorter", "longer", "other parts", "all", *SETTINGS]))
    other = {
        "one step": lambda: ([*graph[:place], *draw(graphs)[:1], *graph[place + 1 :]], first[1], ""),
        "shorter": lambda: (graph[: max(1, place)], first[1], ""),
        "longer": lambda: ([*graph, *draw(graphs)], first[1], ""),
        "other parts": lambda: (graph, draw(parts), ""),
        "all": lambda: (draw(graphs), draw(parts), ""),
    }.get(change, lambda: (*first[:2], change))()
    return [first] * 3 + [other] + [first] * draw(st.integers(1, 3)) + [other] * draw(st.integers(0, 3)) + [first]


def _hooks_of_the_user() -> AbstractContextManager[Any]:
    return torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone)


@contextmanager
def _asked(setting: str, options: dict[str, Any]) -> Iterator[None]:
    """Enter a `CPUOffload` in this setting."""
    changed = {
        "another ratio": {"offload_ratio": 0.4 if options["offload_ratio"] == 1 else 1.0},
        "another window": {"window_bytes": 128 if options["window_bytes"] == 0 else 0},
        "larger ones": {"min_bytes": 65},
        "little host memory": {"host_limit_bytes": 4096},
    }.get(setting, {})
    device = options["device"]
    inside = {
        "pause": memkit.no_offload,
        "recompute inside": lambda: memkit.Rematerialize(0.5, f"{TAG} inside", min_bytes=0, device=device),
        "tag inside": lambda: memkit.CPUOffload(1.0, f"{TAG} inside", min_bytes=0, window_bytes=0, device=device),
        "hooks": _hooks_of_the_user,
    }.get(setting, nullcontext)
    with memkit.CPUOffload(tag=TAG, **{"min_bytes": 0, **options, **changed}), inside():
        yield


def _compare(taken: list[Program], ratio: float, window_bytes: int | None, seed: int | None) -> None:
    device = ReferenceDevice(seed=seed)
    options = {"offload_ratio": ratio, "window_bytes": window_bytes, "device": device}
    for graph, parts, setting in taken:
        wanted, wanted_errors = outcome(graph, parts, _hooks_of_the_user() if setting == "hooks" else nullcontext())
        found, errors = outcome(graph, parts, _asked(setting, options))
        assert errors == wanted_errors
        assert_same_bits(found, wanted)
    device.synchronize()
    torch.ones(1, requires_grad=True).sum().backward()  # what a failed backward has left in torch's queue goes with the next
    gc.collect()  # where something is to be made again, a record may die with a cycle
    stats = memkit.stats(TAG)
    assert (stats.live_records, stats.live_bytes, stats.host_in_use_bytes) == (0, 0, 0)
    memkit.reset(TAG)
    memkit.reset(f"{TAG} inside")


@pytest.mark.parametrize("num_examples", [12, pytest.param(400, marks=pytest.mark.slow)])
def test_random_steps(num_examples: int) -> None:
    @settings(max_examples=num_examples, deadline=None)
    @given(
        taken=programs(),
        ratio=st.sampled_from([1.0, 1.0, 0.5, 0.3]),
        window_bytes=st.sampled_from([0, 64, 200, None]),
        seed=st.sampled_from([None, 0, 1]),
        batch_bytes=st.sampled_from([1, 130, copies.BATCH_BYTES]),
    )
    def check(batch_bytes: int, **drawn: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(copies, "BATCH_BYTES", batch_bytes)
            _compare(**drawn)

    check()
