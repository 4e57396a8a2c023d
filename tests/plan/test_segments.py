"""`memkit.plan.remat`: the narrow places of a step are found, and what they hold suffices to make the rest."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memkit.plan import NO_OP, GrowingLineage, Lineage, Step
from memkit.plan.remat import CutPlaces
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

    segments, target_bytes = CutPlaces(step), step.saved_bytes / num_layers
    cuts, anchors = segments.cuts(target_bytes), segments.skeleton(target_bytes)

    assert num_layers - 1 <= len(cuts) <= num_layers + 1
    assert anchors <= streams(step)
    assert len(anchors) == len(cuts)


def test_coarse_cuts_are_as_far_apart_as_asked() -> None:
    step = transformer(32)
    lineage = step.lineage

    cuts = CutPlaces(step).cuts(step.saved_bytes / 4)

    assert len(cuts) in (3, 4)
    places = [-1, *cuts, len(lineage.ins)]
    between = [
        sum(lineage.num_bytes[value] for value in step.saves if start < lineage.maker[value] <= end)
        for start, end in itertools.pairwise(places)
    ]
    assert all(0.3 * step.saved_bytes / 4 <= num_bytes <= 1.3 * step.saved_bytes / 4 for num_bytes in between)


def test_ops_in_place_move_the_cut_behind_them() -> None:
    lineage = GrowingLineage()
    value, saves, sums = lineage.add_root(100), list[int](), list[int]()
    for _ in range(4):  # the end of a block is narrow, and is written over at once
        (wide,) = lineage.add_op([value], [300])
        (narrow,) = lineage.add_op([wide, value], [100])
        (value,) = lineage.add_op([narrow], [100], taken=[narrow])
        saves += [wide, value]
        sums.append(value)
    step = Step(lineage=lineage, saves=tuple(saves), uses=tuple(reversed(saves)))

    anchors = CutPlaces(step).skeleton(400)

    assert anchors
    assert anchors <= set(sums)


def test_chain_of_equals_has_no_narrow_place() -> None:
    assert CutPlaces(chain(50)).cuts(5000) == []


@given(step=steps(25), target=st.floats(1, 100))
def test_anchors_are_all_that_crosses_a_cut(step: Step, target: float) -> None:
    lineage = step.lineage

    cuts, anchors = CutPlaces(step).cuts(target), CutPlaces(step).skeleton(target)

    assert anchors == {value for cut in cuts for value in frontier(lineage, cut)}
    assert cuts == sorted(set(cuts))
    written = {over for pairs in lineage.taken.values() for over, _ in pairs}
    assert not anchors & written
