"""Which calls, and which neighbors in a row, are regions, against all choices; and what else a step may then take."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest

from memkit.plan import (
    Action,
    GrowingLineage,
    HostCosts,
    ModuleCall,
    RegionChoice,
    RegionNeeds,
    RegionPlanner,
    Step,
    find_spans,
)
from memkit.plan import regions as planning
from memkit.plan.budget.problem import Problem
from memkit.plan.regions import Moving, RegionBytes, fit_copies, fit_regions

ON_HOST = HostCosts(op_s=1.0, recorded_s=1.0, saved_s=1.0, replayed_s=2.0, region_s=3.0)
ON_DEVICE = HostCosts(op_s=0.0, recorded_s=0.0, saved_s=0.0, replayed_s=0.0, region_s=0.0)


class Build:
    """A step, as it is recorded: ops in a row, each saving some values, within calls."""

    def __init__(self) -> None:
        self.lineage, self.saves, self.calls = GrowingLineage(), [], []
        self._open: list[int] = []

    def root(self, num_bytes: int) -> int:
        return self.lineage.add_root(num_bytes)

    def op(self, ins: Sequence[int], num_bytes: int, *, seconds: float = 1.0, saves: Sequence[int] = (), own: bool) -> int:
        self.saves += saves
        (made,) = self.lineage.add_op(ins, [num_bytes], seconds)
        self.saves += [made] * own
        return made

    def begin(self, name: str, inputs: Sequence[int], *, is_span: bool = False) -> None:
        begins = {"saves": (len(self.saves), 0), "ops": (len(self.lineage.ins), 0), "parent": (self._open or [-1])[-1]}
        self._open.append(len(self.calls))
        self.calls.append(ModuleCall(name=name, number=0, num_ops=0, inputs=tuple(inputs), is_span=is_span, **begins))

    def end(self, why_not: str = "") -> None:
        index = self._open.pop()
        call, num_ops = self.calls[index], len(self.lineage.ins)
        ends = {"saves": (call.saves[0], len(self.saves)), "ops": (call.ops[0], num_ops), "num_ops": num_ops - call.ops[0]}
        self.calls[index] = replace(call, why_not=why_not, **ends)

    def planner(self, costs: HostCosts) -> RegionPlanner:
        step = Step(lineage=self.lineage, saves=tuple(self.saves), uses=tuple(reversed(self.saves)))
        return RegionPlanner(step, self.calls, costs, num_ops=len(self.lineage.ins))


def random_tree(seed: int) -> Build:
    """Return a chain of up to three blocks with calls in them, of random sizes."""
    draw, build = random.Random(seed), Build()
    x = build.root(0)
    for block in range(draw.randint(1, 3)):
        build.begin(f"{block}", [x])
        entry = x
        for part in range(draw.randint(1, 3)):
            inside = draw.random() < 0.7
            if inside:
                build.begin(f"{block}.{part}", [x])
            for _ in range(draw.randint(1, 3)):
                x = build.op(
                    [x], draw.randint(1, 9), seconds=draw.random(), saves=[x] * (draw.random() < 0.7), own=draw.random() < 0.4
                )
            if inside:
                build.end("it writes" if draw.random() < 0.15 else "")
        x = build.op([x, entry], draw.randint(1, 9), saves=[], own=False)
        build.end()
    return build


def layers(count: int, *, parts: int = 2, ops: int = 3, uneven: bool = False) -> Build:
    """Return a row of layers with parts in them."""
    draw, build = random.Random(0), Build()
    x = build.root(0)
    build.begin("model", [x])
    for layer in range(count):
        scale = draw.randint(1, 4) if uneven else 1
        build.begin(f"layers.{layer}", [x])
        for part in range(parts):
            build.begin(f"layers.{layer}.part{part}", [x])
            for _ in range(ops):
                x = build.op([x], 10 * scale, seconds=scale, saves=[x], own=False)
            build.end()
        build.end()
    build.end()
    return build


def brute_force(planner: RegionPlanner) -> list[RegionChoice]:
    """Return all choices of calls that may be regions and of which none is in another."""
    calls, found = planner.calls, []
    free = [index for index, call in enumerate(calls) if not call.why_not]

    def is_in(index: int, other: int) -> bool:
        while index >= 0 and index != other:
            index = calls[index].parent
        return index == other

    for size in range(len(free) + 1):
        for chosen in combinations(free, size):
            if not any(is_in(one, other) or is_in(other, one) for one, other in combinations(chosen, 2)):
                found.append(planner.simulate(chosen))
    return found


def evenly_spaced(planner: RegionPlanner, prefix: str) -> list[RegionChoice]:
    """Return what it takes to make some layers regions, from none of them to all."""
    group = [index for index, call in enumerate(planner.calls) if call.name.startswith(prefix) and call.name.count(".") == 1]
    size = len(group)
    return [planner.simulate([group[place * size // count] for place in range(count)]) for count in range(1, size + 1)]


@pytest.mark.parametrize("costs", [ON_HOST, ON_DEVICE])
@pytest.mark.parametrize("seed", range(16))
def test_calls_are_chosen_as_well_as_can_be(seed: int, costs: HostCosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nearly as well where not all choices are looked at."""
    everything = brute_force(random_tree(seed).planner(costs))
    planner = random_tree(seed).planner(costs)
    planner.least()
    monkeypatch.setattr(planning, "_MOST_LISTED", -1)
    searching = random_tree(seed).planner(costs)

    for budget in range(0, planner.simulate(()).peak_bytes + 1, 3):
        quickest_s = min((planner.seconds(choice) for choice in everything if choice.peak_bytes <= budget), default=None)
        for each, most in ((planner, 1 + 1e-9), (searching, 1.06)):
            found = each.best(budget)
            assert (found is None) == (quickest_s is None)
            if found is not None and quickest_s is not None:
                assert found.peak_bytes <= budget
                assert quickest_s * (1 - 1e-9) <= planner.seconds(found) <= most * quickest_s


def test_peak_of_a_region_is_what_it_makes_on_top_of_what_was_held_before() -> None:
    planner = layers(4, parts=1).planner(ON_HOST)
    blocks = [index for index, call in enumerate(planner.calls) if call.name.count(".") == 1]

    assert planner.simulate(()).peak_bytes == 11 * 10  # the first save is of the root, which takes nothing
    assert planner.simulate(blocks).peak_bytes == (3 + 3) * 10  # the inputs of three, and all of the last
    assert planner.simulate(blocks[:1]).peak_bytes == 9 * 10
    assert planner.dropped(planner.simulate(blocks[:1])) == {1, 2}


def test_what_only_a_region_reads_is_held_by_it() -> None:
    build = Build()
    x = build.root(0)
    y = build.op([x], 5, own=False)  # which nobody saves
    build.begin("0", [y])
    z = build.op([y], 7, own=True)
    z = build.op([z], 7, own=True)
    build.end()
    build.op([z], 1, own=False)
    planner = build.planner(ON_HOST)

    assert planner.simulate((0,)).peak_bytes == 5 + 14
    assert planner.best(14) == planner.simulate(())


@pytest.mark.parametrize("costs", [ON_HOST, ON_DEVICE])
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("count", [5, 12, pytest.param(24, marks=pytest.mark.slow)])
def test_never_slower_than_evenly_spaced_layers(count: int, uneven: bool, costs: HostCosts) -> None:
    planner = layers(count, uneven=uneven).planner(costs)
    for choice in evenly_spaced(planner, "layers"):
        assert planner.seconds(planner.best(choice.peak_bytes)) <= planner.seconds(choice)


@pytest.mark.covering(2)
@pytest.mark.parametrize("count", [8, pytest.param(24, marks=pytest.mark.slow)])
@pytest.mark.parametrize("costs", [ON_HOST, pytest.param(ON_DEVICE, marks=pytest.mark.slow)])
@pytest.mark.parametrize("uneven", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_more_budget_never_takes_longer(uneven: bool, costs: HostCosts, count: int) -> None:
    whole = layers(count, uneven=uneven).planner(costs)
    budgets = range(whole.least().peak_bytes, whole.simulate(()).peak_bytes + 1, 5 * count + 1)  # about as many for any count
    planners = [layers(count, uneven=uneven).planner(costs) for _ in budgets]  # what was asked before plays no part
    seconds_s = [planner.seconds(planner.best(budget)) for planner, budget in zip(planners, budgets, strict=True)]

    assert seconds_s == sorted(seconds_s, reverse=True)
    assert whole.best(whole.simulate(()).peak_bytes) == whole.simulate(())


def compiled_blocks(*seconds: float) -> list[ModuleCall]:
    """Return the calls of a model of blocks that run compiled, each for so long, of which the second is in another module."""
    whole = ModuleCall(name="model", number=0, parent=-1, saves=(0, 6), ops=(0, 0), num_ops=3, inputs=(), why_not="it writes")
    calls, parent = [whole], 0
    block = replace(whole, num_ops=1, why_not="")
    for number, device_s in enumerate(seconds):
        given = {"saves": (2 * number, 2 * number + 2), "inputs": (2 * number,)}
        if number == 1:
            parent = len(calls)
            calls.append(replace(block, name="outer", parent=0, **given))
        calls.append(replace(block, name=str(number), parent=parent, device_s=device_s, **given))
        parent = 0
    return calls


def planner_of_compiled(*seconds: float) -> RegionPlanner:
    lineage = GrowingLineage()
    saves = [lineage.add_root(num_bytes) for _ in seconds for num_bytes in (1, 10)]
    step = Step(lineage=lineage, saves=tuple(saves), uses=tuple(reversed(saves)), retained_bytes=dict.fromkeys(saves, 1))
    return RegionPlanner(step, compiled_blocks(*seconds), ON_DEVICE, num_ops=3)


def test_compiled_calls_count_where_they_are_run_again_and_once_in_the_step() -> None:
    planner = planner_of_compiled(1.0, 2.0, 4.0)

    assert planner.plain_device_s == 3 * 7
    assert [planner.simulate([index]).device_s for index in range(5)] == [7, 1, 2, 2, 4]


@pytest.mark.parametrize(
    ("seconds", "cheapest"), [((1.0, 2.0, 4.0), {"0"}), ((4.0, 2.0, 1.0), {"1", "outer"}), ((4.0, 1.0, 2.0), {"1", "outer"})]
)
def test_cheapest_compiled_call_is_run_again(seconds: tuple[float, ...], cheapest: set[str]) -> None:
    planner = planner_of_compiled(*seconds)
    assert planner.best(33).chosen == ()
    (chosen,) = planner.best(32).chosen  # to run the last one again would take as much

    assert planner.calls[chosen].name in cheapest


def test_compiled_call_behind_the_last_save_of_a_region_is_not_run_again() -> None:
    calls = compiled_blocks(1.0, 2.0)
    calls = [calls[0], replace(calls[1], saves=(0, 2)), calls[2], replace(calls[3], parent=1, saves=(2, 2))]
    lineage = GrowingLineage()
    saves = [lineage.add_root(10) for _ in range(4)]
    step = Step(lineage=lineage, saves=tuple(saves), uses=tuple(reversed(saves)))

    assert RegionPlanner(step, calls, ON_DEVICE, num_ops=3).simulate([1]).device_s == 1


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


def test_spans_by_hand() -> None:
    assert spans_of("ab" * 5) == [(0, 10), (0, 8), (0, 4), (0, 2), (2, 4), (4, 8), (4, 6), (6, 8), (8, 10)]  # two by two
    assert spans_of("abcdefg") == [(0, 7), (0, 4), (0, 2), (2, 4), (4, 7), (4, 6)]  # which does not repeat
    assert {(0, 6), (0, 4), (0, 2), (2, 4), (4, 6), (6, 12), (6, 8)} <= set(spans_of("abcdef" * 4))  # also in large blocks
    assert (0, 2) not in spans_of("abcd" * 4)


def test_what_belongs_together_is_not_parted() -> None:
    found = spans_of("crcrmcrcrm", joined="r")

    assert all(stop == 10 or "crcrmcrcrm"[stop] != "r" for _, stop in found)
    assert {(0, 2), (2, 4), (5, 7), (7, 9), (0, 5), (5, 10)} <= set(found)


@pytest.mark.parametrize("seed", range(10))
def test_spans_are_a_tree_and_no_more_than_members(seed: int) -> None:
    draw = random.Random(seed)
    row = "".join(draw.choice("abcr") for _ in range(draw.randint(2, 60)))
    found = spans_of(row, joined="r")

    assert len(set(found)) == len(found) < len(row)
    assert found == sorted(found, key=lambda span: (span[0], -span[1]))
    for (first, stop), (start, end) in combinations(found, 2):
        assert stop <= start or end <= stop, (first, stop, start, end)


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
                build.begin(f"{first}:{stop}", [x], is_span=True)
        build.begin(f"{place}", [x])
        x = build.op([x], sizes[kind], saves=[x], own=False)
        build.end()
        for first, stop in reversed(spans):
            if stop == place + 1 and stop - first < len(kinds):
                build.end()
    build.end()
    return build


@pytest.mark.parametrize("costs", [pytest.param(ON_HOST, marks=pytest.mark.slow), ON_DEVICE])
def test_flat_row_keeps_to_budgets_that_single_members_do_not(costs: HostCosts) -> None:
    kinds, sizes = "abcd" * 40, {"a": 10, "b": 10, "c": 20, "d": 20}
    planner, alone = (row_of(kinds, sizes, with_spans=with_spans).planner(costs) for with_spans in (True, False))
    whole = planner.simulate(()).peak_bytes

    assert alone.best(whole // 2) is None
    assert all(":" in planner.calls[index].name for index in planner.best(whole // 2).chosen)
    assert planner.least().peak_bytes < whole / 5
    for choice in alone._explored():
        assert planner.seconds(planner.best(choice.peak_bytes)) <= planner.seconds(choice) + 1e-9  # with spans it is no worse


# Two blocks, of 30 and 40 bytes inside and inputs of 10 bytes, and a loss: saved in the slots 0 to 4, asked for in 5 to 9.
_SIZES = {0: (10, 0, 9), 1: (30, 1, 8), 2: (10, 2, 7), 3: (40, 3, 6), 4: (20, 4, 5)}


def _problem(
    working_bytes: Sequence[int] = (0,) * 10, sizes: Mapping[int, tuple[int, int, int]] = _SIZES, *, forward_s: float = 1.0
) -> Problem:
    """Return a step with a base of 1000 bytes, and values of which each has a number, bytes, a first save and a request. The
    fifth of the first ones can neither leave nor be made again."""
    num_slots = 2 * len(sizes)
    held = [
        SimpleNamespace(
            value=value,
            num_bytes=num_bytes,
            made=made,
            released=made + 1,
            use=use,
            freed=min(use + 1, num_slots),
            is_anchor=False,
            choices=frozenset({Action.KEEP}) if value == 4 and sizes is _SIZES else frozenset(Action),
        )
        for value, (num_bytes, made, use) in sizes.items()
    ]
    made: Any = SimpleNamespace(
        num_slots=num_slots,
        values=held,
        index={each.value: place for place, each in enumerate(held)},
        base_bytes=1000,
        working_bytes=tuple(working_bytes),
        points=tuple(range(num_slots)),
        num_forward_points=len(sizes),
        starts_s=tuple(forward_s * slot / len(sizes) for slot in range(num_slots + 1)),
        retained={9: (2, 5)},
    )
    return made  # type: ignore[no-any-return]


def _block(value: int, given: int, more_bytes: int = 0) -> RegionBytes:
    return RegionBytes(frozenset({value}), (given,), _SIZES[value][0] + more_bytes)


_NONE = RegionNeeds(110, ())
_FIRST = RegionNeeds(85, (_block(1, 0),))
_BOTH = RegionNeeds(65, (_block(1, 0), _block(3, 2)))
_CHOICES = [_NONE, _FIRST, _BOTH]


_BESIDE = RegionNeeds(70, (_block(1, 0), RegionBytes(frozenset({3}), (9,), 40)))
_SHARED = (RegionBytes(frozenset({1}), (9,), 30), RegionBytes(frozenset({3}), (9,), 40))


@pytest.mark.parametrize(
    ("working", "choices", "enough_bytes", "limit_bytes"),
    [
        ({}, _CHOICES, 1080, 85),  # 80 at the turn
        # the second block, and the inputs of both, beside the loss: its backward is over by then
        ({}, [_NONE, _BOTH], 1060, 65),
        ({4: 500}, [_NONE, _BOTH], 1540, 65),  # the loss needs much, and the blocks are away
        ({8: 100}, _CHOICES, 1140, 85),  # late in the backward, as the first block is back
        # what a second run makes on its way: 10 and 55, and 10 yet of what the block gives
        ({}, [RegionNeeds(65, (_block(1, 0, more_bytes=25), _block(3, 2)))], 1065, 65),
        # the workspace of a convolution that makes the second block's value, in its second run: 80 beside 60, and 5
        ({3: 80, 6: 5}, [_BOTH], 1145, 65),
        ({}, [_BESIDE], 1065, 70),  # what is held for a region and not saved
        ({}, [RegionNeeds(70, _SHARED)], 1065, 70),  # for several: once, and as long as the last runs
        ({}, [RegionNeeds(70, (RegionBytes(frozenset({1}), (9,), 80), _SHARED[1]))], 1095, 70),  # 10, 80 and 5
    ],
)
def test_quickest_choice_that_keeps_to_the_budget_in_each_slot(
    working: dict[int, int], choices: list[RegionNeeds], enough_bytes: int, limit_bytes: int
) -> None:
    problem = _problem([working.get(slot, 0) for slot in range(10)])

    assert fit_regions(problem, choices, enough_bytes) == limit_bytes
    assert fit_regions(problem, choices, enough_bytes - 1) != limit_bytes
    assert fit_regions(problem, [_NONE], 2000) is None  # to recompute nothing is no choice


def test_call_of_which_nothing_is_asked_for_is_not_run_again() -> None:
    problem = _problem(sizes={**_SIZES, 3: (40, 3, 10)})

    assert fit_regions(problem, [RegionNeeds(90, (_block(3, 2, more_bytes=100),))], 1090) == 90


def _six_blocks() -> tuple[Problem, RegionNeeds]:
    """Of 40 bytes, with inputs of 10: the first that is run again stands beside all of these, or beside two."""
    sizes = {value: (40 if value % 2 else 10, value, 23 - value) for value in range(12)}
    blocks = (RegionBytes(frozenset({value + 1}), (value,), 40) for value in range(0, 12, 2))
    return _problem([0] * 24, sizes), RegionNeeds(100, tuple(blocks))


def test_what_leaves_makes_room_for_calls_of_which_the_inputs_alone_are_too_many() -> None:
    problem, needs = _six_blocks()

    assert fit_regions(problem, [needs], 1100) == 100
    assert fit_regions(problem, [needs], 1099) is None
    assert fit_copies(problem, [needs], 1060, 1000.0) == Moving(100, 60, 60, 20)
    assert fit_copies(problem, [needs], 1059, 1000.0) is None
    assert fit_copies(problem, [_NONE], 2000, 1000.0) is None
    assert fit_copies(problem, [needs], 1060, 20.0) is None  # no more leaves than may be on its way
    assert fit_copies(problem, [needs], 1100, 50.0) == Moving(100, 60, 40, 20)  # what would pass the 45 that hide stays
    for held in problem.values:  # what leaves is back once it is asked for, though it is free only later, as what several read
        held.freed = 24  # type: ignore[misc]
    assert fit_copies(problem, [needs], 1300, 1000.0) is not None
    assert fit_copies(problem, [needs], 1299, 1000.0) is None


def test_input_that_is_free_before_its_call_is_run_again_is_held_for_it() -> None:
    """It is saved behind the call as well, and asked for before."""
    sizes = {0: (50, 0, 5), 1: (20, 1, 8), 2: (5, 2, 6), 3: (1, 3, 9), 4: (1, 4, 7)}
    problem = _problem([25 if slot == 8 else 0 for slot in range(10)], sizes)
    needs = RegionNeeds(56, (RegionBytes(frozenset({1}), (0,), 20),))

    assert fit_regions(problem, [needs], 1096) == 56  # the input, 20, 25 and 1
    assert fit_regions(problem, [needs], 1095) is None


def test_nothing_leaves_beside_what_has_no_backward() -> None:
    made: Any = SimpleNamespace(points=(0, 1), num_forward_points=2)

    assert fit_copies(made, _CHOICES, 10**9, 1000.0) is None
