"""Which neighbours in a row are tried as one region."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import pytest

from memkit.plan import HostCosts, ModuleCall, RegionPlanner, find_spans
from tests.plan.test_regions import ON_DEVICE, ON_HOST, Build, evenly_spaced, layers


def spans_of(row: str, joined: str = "") -> list[tuple[int, int]]:
    """Return the spans of a row of kinds; those in `joined` are never apart from what is ahead."""
    return find_spans(row, [kind in joined for kind in row])


@pytest.mark.parametrize(
    ("row", "blocks"),
    [
        ("abcd" * 4, [(0, 4), (4, 8), (8, 12), (12, 16)]),
        ("x" + "abc" * 3 + "yz", [(1, 4), (4, 7), (7, 10)]),
        ("ab" * 3, [(0, 2), (2, 4), (4, 6)]),
        ("aaaaaa", [(0, 2), (2, 4), (4, 6)]),
        ("abacabac", [(0, 4), (4, 8)]),
    ],
)
def test_smallest_spans_are_what_repeats(row: str, blocks: list[tuple[int, int]]) -> None:
    found = spans_of(row)

    inner = [
        span for span in found if not any(other != span and span[0] <= other[0] and other[1] <= span[1] for other in found)
    ]
    assert [span for span in inner if blocks[0][0] <= span[0] and span[1] <= blocks[-1][1]] == blocks


def test_blocks_are_joined_two_by_two() -> None:
    assert spans_of("ab" * 5) == [(0, 10), (0, 8), (0, 4), (0, 2), (2, 4), (4, 8), (4, 6), (6, 8), (8, 10)]


def test_row_that_does_not_repeat_is_joined_from_two_members_on() -> None:
    assert spans_of("abcdefg") == [(0, 7), (0, 4), (0, 2), (2, 4), (4, 7), (4, 6)]


def test_what_belongs_together_is_not_parted() -> None:
    found = spans_of("crcrmcrcrm", joined="r")

    assert all(stop == 10 or "crcrmcrcrm"[stop] != "r" for _, stop in found)
    assert {(0, 2), (2, 4), (5, 7), (7, 9), (0, 5), (5, 10)} <= set(found)


def test_large_blocks_have_spans_of_their_own() -> None:
    assert {(0, 6), (0, 4), (0, 2), (2, 4), (4, 6), (6, 12), (6, 8)} <= set(spans_of("abcdef" * 4))
    assert (0, 2) not in spans_of("abcd" * 4)


@pytest.mark.parametrize("row", ["", "a", "ab"])
def test_short_rows_have_few_spans(row: str) -> None:
    assert spans_of(row) == [(0, 2)] * (len(row) == 2)


@pytest.mark.parametrize("seed", range(20))
def test_spans_are_a_tree_and_no_more_than_members(seed: int) -> None:
    draw = random.Random(seed)
    row = "".join(draw.choice("abcr") for _ in range(draw.randint(2, 60)))
    found = spans_of(row, joined="r")

    assert len(set(found)) == len(found) < len(row)
    assert found == sorted(found, key=lambda span: (span[0], -span[1]))
    for (first, stop), (start, end) in combinations(found, 2):
        assert stop <= start or end <= stop, (first, stop, start, end)


def test_long_rows_take_no_time() -> None:
    draw = random.Random(0)
    row = "".join(draw.choice("abcd") for _ in range(20_000))
    start_s = time.process_time()
    spans_of(row)

    assert time.process_time() - start_s < 10


# What the planner makes of them


def row_of(kinds: Sequence[str], sizes: dict[str, int], *, with_spans: bool) -> Build:
    """Return a flat row of modules of which each saves what it makes, with its spans or without."""
    build = Build()
    spans = find_spans(kinds, [False] * len(kinds)) if with_spans else []
    x = build.root(0)
    build.begin("model", [x])
    for place, kind in enumerate(kinds):
        for first, stop in spans:
            if first == place and stop - first < len(kinds):
                build.begin(f"{first}:{stop}", [x])
        build.begin(f"{place}", [x])
        x = build.op([x], sizes[kind], saves=[x], own=False)
        build.end()
        for first, stop in reversed(spans):
            if stop == place + 1 and stop - first < len(kinds):
                build.end()
    build.end()
    return build


@pytest.mark.parametrize("costs", [pytest.param(ON_HOST, marks=pytest.mark.full), ON_DEVICE])
def test_flat_row_keeps_to_budgets_that_single_members_do_not(costs: HostCosts) -> None:
    kinds, sizes = "abcd" * 40, {"a": 10, "b": 10, "c": 20, "d": 20}
    planner = row_of(kinds, sizes, with_spans=True).planner(costs)
    alone = row_of(kinds, sizes, with_spans=False).planner(costs)
    whole = planner.simulate(()).peak_bytes

    assert alone.best(whole // 2) is None
    found = planner.best(whole // 2)
    assert found is not None
    assert all(":" in planner.calls[index].name for index in found.chosen)
    assert planner.least().peak_bytes < whole / 5


def with_spans(build: Build, parent: int, size: int) -> list[ModuleCall]:
    """Return the calls of a step with those of the spans of the children of one."""
    calls = build.calls
    places = [index for index, call in enumerate(calls) if call.parent == parent]
    spans = find_spans("a" * size, [False] * size)
    found: list[ModuleCall] = []
    new = dict[int, int]()
    around = list[tuple[int, int]]()
    for index, call in enumerate(calls):
        if call.parent == parent:
            child = places.index(index)
            around = [(stop, place) for stop, place in around if stop > child]
            for first, stop in spans:
                if first == child and stop - first < size:
                    inside = [calls[place] for place in places[first:stop]]
                    found.append(
                        replace(
                            inside[0],
                            name=f"layers.{first}:{stop}",
                            parent=around[-1][1] if around else new[parent],
                            saves=(inside[0].saves[0], inside[-1].saves[1]),
                            ops=(inside[0].ops[0], inside[-1].ops[1]),
                            num_ops=sum(one.num_ops for one in inside),
                            is_span=True,
                        )
                    )
                    around.append((stop, len(found) - 1))
            new[index] = len(found)
            found.append(replace(call, parent=around[-1][1] if around else new[parent]))
        else:
            new[index] = len(found)
            found.append(replace(call, parent=-1 if call.parent < 0 else new[call.parent]))
    return found


@pytest.mark.parametrize("costs", [ON_HOST, ON_DEVICE])
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("count", [5, *(pytest.param(count, marks=pytest.mark.full) for count in (12, 24))])
def test_model_of_blocks_is_planned_no_worse_with_spans_of_them(count: int, uneven: bool, costs: HostCosts) -> None:
    build = layers(count, uneven=uneven)
    without = build.planner(costs)
    planner = RegionPlanner(without.step, with_spans(build, 0, count), costs, num_ops=len(build.lineage.ins))

    for choice in (*evenly_spaced(without, "layers"), *map(without.simulate, [c.chosen for c in without._explored()])):
        found = planner.best(choice.peak_bytes)
        assert found is not None
        assert planner.seconds(found) <= planner.seconds(choice) + 1e-9
