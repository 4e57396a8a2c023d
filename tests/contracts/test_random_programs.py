"""Random programs in every context, against plain autograd."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import memkit
from memkit.device import CpuDevice, ReferenceDevice
from tests.activations.cases import assert_same_bits
from tests.activations.remat.conftest import NO_PLAN_FITS
from tests.contracts.contexts import KINDS, MORE_KINDS, SMALL_KINDS
from tests.programs import MAKING, NUM_STEPS, WRITING, Op, Program, apply, graphs, outcome, program_of, run

pytestmark = pytest.mark.filterwarnings(NO_PLAN_FITS, "ignore:.*(for a backward, and none came|nothing was)")

STEP_KINDS = KINDS | MORE_KINDS
ALL_KINDS = STEP_KINDS | SMALL_KINDS

# Graphs


def _compare(graph: list[Op], parts: list[int], name: str, seed: int | str | None) -> None:
    wanted, wanted_errors = outcome(graph, parts, nullcontext())
    kind = ALL_KINDS[name]
    device = CpuDevice() if seed == "cpu" and kind.on_cpu else ReferenceDevice(seed=seed if isinstance(seed, int) else None)

    for _ in range(3):
        found, errors = outcome(graph, parts, kind.make(device, "random"))

        assert errors == wanted_errors
        assert_same_bits(found, wanted)
    device.synchronize()
    memkit.reset("random")


@pytest.mark.parametrize("num_examples", [12, pytest.param(300, marks=pytest.mark.slow)])
def test_graphs(num_examples: int) -> None:
    drawn = given(
        graph=graphs,
        parts=st.lists(st.integers(0, 99), min_size=1, max_size=4),
        name=st.sampled_from(sorted(ALL_KINDS)),
        seed=st.sampled_from([None, 0, 1, 2, "cpu"]),
    )
    settings(max_examples=num_examples, deadline=None)(drawn(_compare))()


def test_each_op_of_a_graph_does_something() -> None:
    for name in (*MAKING, *WRITING):
        leaf = torch.randn(4, 4, requires_grad=True)
        tensors = [leaf, leaf * 2]

        apply((name, 1, 0, 1), tensors)

        assert len(tensors) == 3 or tensors[1]._version == 1, name


FOUND: list[Op] = [
    *(("matmul", 46, 92, 1), ("detach", 10, 14, 0), ("norm", 72, 63, 3), ("conj", 61, 18, 1), ("keep", 20, 60, 2)),
    *(("norm", 37, 56, 0), ("row_add_", 86, 82, 2), ("conj", 12, 53, 2), ("t", 82, 28, 2), ("noise", 39, 40, 2)),
    ("chunk", 18, 92, 1),
]


@pytest.mark.parametrize("name", ["remat dtr of 200", "remat dtr of nothing"])
def test_graph_with_a_write_to_what_a_mark_has_kept(name: str) -> None:
    _compare(FOUND, [53, 30], name, None)


# Steps


def _refused_at(program: Program, name: str) -> int:
    """Compare a program to its plain run: if that raises, so must this. Return where a backward refused more than plain
    autograd does, since a dropped tensor would be made from overwritten inputs; -1 if none did."""
    wanted, device = run(program), ReferenceDevice()
    assert len(wanted) >= 2 * NUM_STEPS  # gradients, and written tensors
    try:
        found = run(program, lambda tag: STEP_KINDS[name].make(device, tag))
    finally:
        for tag in ("programs", "programsother"):
            memkit.reset(tag)
    device.synchronize()
    for place, (one, other) in enumerate(zip(wanted, found, strict=False)):
        if one and not other:
            return place
        assert len(one) == len(other), place
        assert_same_bits(other, one)
    assert len(found) == len(wanted)
    return -1


SOME = [
    *[(124, "budget"), (166, "budget half"), (182, "budget"), (14, "offload half"), (1, "remat dtr"), (2, "remat plan")],
    *[(37, "offload around remat"), (4, "budget 0.8"), (5, "offload all"), (6, "budget of nothing")],
]
"""Among them the first ones in which gradients were once wrong. No backward of them is refused, with memkit or without."""


@pytest.mark.usefixtures("quick_plans")
@pytest.mark.parametrize(("seed", "name"), SOME)
def test_steps(seed: int, name: str) -> None:
    program = program_of(seed)

    assert all(run(program))
    assert _refused_at(program, name) == -1


@pytest.mark.slow
@pytest.mark.usefixtures("quick_plans")
@pytest.mark.parametrize("name", sorted(STEP_KINDS))
@pytest.mark.parametrize("seed", range(8))
def test_many_steps(seed: int, name: str) -> None:
    refused_at = _refused_at(program_of(seed), name)

    assert refused_at == -1 or not name.startswith("offload ") or "remat" in name
