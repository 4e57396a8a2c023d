"""`memkit.plan.segments`: the narrow places of a step are found, and what they hold suffices to make the rest."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memkit.plan import NO_OP, Lineage, Step
from memkit.plan.segments import Segments
from tests.plan.reference import chain, steps, transformer


def frontier(lineage: Lineage, cut: int) -> set[int]:
    """Return what is made up to an op and read after it."""
    return {
        value
        for value, maker in enumerate(lineage.maker)
        if maker != NO_OP and maker <= cut and any(value in ins for ins in lineage.ins[cut + 1 :])
    }


def streams(step: Step) -> set[int]:
    """Return the sums of a transformer's residual stream."""
    lineage, saved = step.lineage, set(step.saves)
    return {outs[0] for op, outs in enumerate(lineage.outs) if lineage.seconds[op] == 3.0 and outs[0] not in saved}


@pytest.mark.parametrize("num_layers", [2, 8, 33])
def test_fine_cuts_of_a_transformer_hold_its_residual_stream(num_layers: int) -> None:
    step = transformer(num_layers)

    skeleton = Segments(step).skeleton(step.saved_bytes / num_layers)

    assert num_layers - 1 <= len(skeleton.cuts) <= num_layers + 1
    assert skeleton.anchors <= streams(step)
    assert len(skeleton.anchors) == len(skeleton.cuts)


def test_coarse_cuts_are_as_far_apart_as_asked() -> None:
    step = transformer(32)
    lineage = step.lineage

    skeleton = Segments(step).skeleton(step.saved_bytes / 4)

    assert len(skeleton.cuts) in (3, 4)
    places = [-1, *skeleton.cuts, len(lineage.ins)]
    between = [
        sum(lineage.num_bytes[value] for value in step.saves if start < lineage.maker[value] <= end)
        for start, end in itertools.pairwise(places)
    ]
    assert all(0.3 * step.saved_bytes / 4 <= num_bytes <= 1.3 * step.saved_bytes / 4 for num_bytes in between)


def test_ops_in_place_move_the_cut_behind_them() -> None:
    lineage = Lineage()
    value, saves, sums = lineage.add_root(100), list[int](), list[int]()
    for _ in range(4):  # the end of a block is narrow, and is written over at once
        (wide,) = lineage.add_op([value], [300])
        (narrow,) = lineage.add_op([wide, value], [100])
        (value,) = lineage.add_op([narrow], [100], taken=[narrow])
        saves += [wide, value]
        sums.append(value)
    step = Step(lineage=lineage, saves=tuple(saves), uses=tuple(reversed(saves)))

    skeleton = Segments(step).skeleton(400)

    assert skeleton.anchors
    assert skeleton.anchors <= set(sums)


def test_chain_of_equals_has_no_narrow_place() -> None:
    assert Segments(chain(50)).skeleton(5000).cuts == ()


@given(step=steps(25), target=st.floats(1, 100))
def test_anchors_are_all_that_crosses_a_cut(step: Step, target: float) -> None:
    lineage = step.lineage

    skeleton = Segments(step).skeleton(target)

    assert skeleton.anchors == {value for cut in skeleton.cuts for value in frontier(lineage, cut)}
    assert list(skeleton.cuts) == sorted(set(skeleton.cuts))
    written = {over for pairs in lineage.taken.values() for over, _ in pairs}
    assert not skeleton.anchors & written
