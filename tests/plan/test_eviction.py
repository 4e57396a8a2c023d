"""`memkit.plan.eviction`: who goes when room is needed, and how what has gone is made again."""

from __future__ import annotations

import math
import random
import weakref
from collections.abc import Collection
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memkit.plan import NO_OP, DTRScore, GrowingLineage, Step, Walk
from tests.plan.reference import Cell, ancestors, chain, content_of, steps


class Storages:
    """Carries out replays on storages that hold who has made them; all of `saved` is on the device at first."""

    def __init__(self, step: Step, limit_bytes: float = math.inf, score: DTRScore | None = None) -> None:
        self.lineage = step.lineage
        self.walk = CheckedWalk(self, limit_bytes, DTRScore() if score is None else score)
        self.saved = {
            value: Cell(content_of(step.lineage, value), step.lineage.num_bytes[value])
            for value in dict.fromkeys(step.saves)
            if step.lineage.maker[value] != NO_OP
        }
        self.temps: dict[int, Cell] = {}
        self.wanted = set(step.saves)
        self.unwanted: set[int] = set()
        self.next_uses: dict[int, int] = {}
        self.log: list[Any] = []
        self.needs: dict[int, set[int]] = {}
        for value in self.saved:
            self.walk.clock += 1
            self.walk.admit(value)

    @property
    def live_bytes(self) -> int:
        return sum(cell.num_bytes for cell in self.saved.values())

    def is_available(self, value: int) -> bool:
        return value in self.saved or self.lineage.maker[value] == NO_OP

    def is_wanted(self, value: int) -> bool:
        return value in self.wanted and value not in self.unwanted

    def distance(self, value: int) -> int:
        return self.next_uses.get(value, 1)

    def drop(self, value: int) -> bool:
        self.log.append(("drop", value))
        del self.saved[value]
        return True

    def run(self, op: int, in_place: Collection[int]) -> None:
        self.log.append(("run", op))
        lineage = self.lineage
        for value in lineage.ins[op]:
            if lineage.maker[value] != NO_OP:
                cell = self.temps.get(value) or self.saved[value]
                assert cell.content == content_of(lineage, value)
        became = {after: before for before, after in lineage.taken.get(op, ())}
        for value in lineage.outs[op]:
            reused = became.get(value) in in_place
            cell = self.temps.pop(became[value]) if reused else Cell((0, 0), lineage.num_bytes[value])
            cell.content = content_of(lineage, value)
            self.temps[value] = cell

    def keep(self, value: int) -> None:
        self.log.append(("keep", value))
        assert value not in self.saved
        self.saved[value] = self.temps.pop(value)

    def forget(self, value: int) -> None:
        self.log.append(("forget", value))
        del self.temps[value]

    def logged(self, kind: str) -> list[int]:
        return [value for name, value in self.log if name == kind]


class CheckedWalk(Walk):
    """Counts the bytes anew each time."""

    def __init__(self, storages: Storages, limit_bytes: float, score: DTRScore) -> None:
        super().__init__(storages.lineage, score, limit_bytes, storages)
        self._storages = weakref.ref(storages)

    def note_peak(self) -> None:
        storages = self._storages()
        assert storages is not None
        assert self.temp_bytes == sum(cell.num_bytes for cell in storages.temps.values())
        assert not {id(cell) for cell in storages.temps.values()} & {id(cell) for cell in storages.saved.values()}
        super().note_peak()


def star(sizes: list[int], seconds: list[float]) -> Step:
    """Return a step of ops beside each other."""
    lineage = GrowingLineage()
    root = lineage.add_root(0)
    saves = [lineage.add_op([root], [size], cost)[0] for size, cost in zip(sizes, seconds, strict=True)]
    return Step(lineage=lineage, saves=tuple(saves), uses=tuple(reversed(saves)))


def test_walk_does_not_keep_its_store_alive() -> None:
    """Without a cycle: what a store holds is free as soon as nothing else asks for it."""
    residents = Storages(star([10], [1.0]))
    reference, walk = weakref.ref(residents), residents.walk
    del residents

    assert reference() is None
    assert list(walk.evictable) == [1]


# The score


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"distance": "age"}, 'distance must be "next_use" or "staleness"; found \'age\''),
        ({"max_replays": 0}, "max_replays must be at least 1; found 0"),
    ],
)
def test_bad_score_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        DTRScore(**changes)

    assert str(caught.value) == f"DTRScore: {text}"


def test_what_came_back_makes_others_cheaper_again() -> None:
    lineage = GrowingLineage()
    root = lineage.add_root(0)
    values = [lineage.add_op([source], [100], cost)[0] for source, cost in ((root, 4.0), (root, 5.0), (1, 3.0))]
    last = values[-1]
    residents = Storages(Step(lineage=lineage, saves=tuple(values), uses=()), 200)
    residents.walk.drop(1)
    assert residents.walk.missing_cost_s(last) == 7.0
    residents.walk.limit_bytes = 100
    residents.walk.make_room(0)  # ranks them: 5 s against 7
    assert residents.logged("drop") == [1, 2]
    residents.walk.limit_bytes = 300
    residents.walk.rebuild(2)
    residents.walk.rebuild(1)
    residents.walk.limit_bytes = 200

    residents.walk.make_room(0)

    assert residents.logged("drop") == [1, 2, last]  # 3 s by now


@given(step=steps(), data=st.data())
def test_missing_cost_equals_brute_force(step: Step, data: st.DataObject) -> None:
    residents = Storages(step)
    for value in data.draw(st.sets(st.sampled_from([*residents.saved, None]), max_size=8)):
        if value is not None:
            residents.walk.drop(value)

    for value, maker in enumerate(step.lineage.maker):
        if maker != NO_OP:
            expected = sum(step.lineage.seconds[op] for op in ancestors(step.lineage, value, residents.saved))
            assert residents.walk.missing_cost_s(value) == expected
            assert min(expected, 5.0) <= residents.walk.missing_cost_s(value, 5.0) <= expected


def test_ranking_of_many_finds_the_lowest_scores() -> None:
    rng = random.Random(0)
    seconds = [float(rng.randint(1, 10**6)) for _ in range(1000)]
    residents = Storages(star([10] * 1000, seconds), 5000)

    residents.walk.make_room(0)

    assert residents.logged("drop") == sorted(range(1, 1001), key=lambda value: seconds[value - 1])[:500]


def test_make_room_tells_when_nothing_can_go() -> None:
    residents = Storages(star([10, 20], [1.0, 1.0]), 25)

    assert residents.walk.make_room(0, needed={1})
    assert residents.logged("drop") == [2]
    assert residents.walk.make_room(15, needed={1})
    assert not residents.walk.make_room(16, needed={1})
    assert residents.logged("drop") == [2]
    assert residents.walk.make_room(16)
    assert residents.logged("drop") == [2, 1]


# Replays


def test_missing_root_is_an_error() -> None:
    step = chain(1)
    residents = Storages(step)
    residents.walk.drop(1)
    residents.is_available = lambda value: False  # type: ignore[method-assign]  # a root that is gone

    with pytest.raises(AssertionError, match="a root that is needed for a replay is gone"):
        residents.walk.rebuild(1)
    with pytest.raises(AssertionError, match="a root that is needed for a replay is gone"):
        residents.walk.missing_cost_s(1)


@given(step=steps(20), share=st.floats(0, 1), data=st.data())
def test_any_replays_are_exact_and_leave_nothing(step: Step, share: float, data: st.DataObject) -> None:
    residents = Storages(step, share * step.saved_bytes)
    if not residents.saved:
        return
    residents.walk.make_room(0)
    for value in data.draw(st.lists(st.sampled_from(sorted(residents.saved | dict.fromkeys(residents.wanted))), max_size=10)):
        if step.lineage.maker[value] == NO_OP or value in residents.saved:
            residents.unwanted.discard(value)
            continue
        missing = ancestors(step.lineage, value, residents.saved)
        residents.log.clear()
        residents.walk.clock += 1

        residents.walk.rebuild(value)

        assert residents.logged("run") == sorted(missing)
        assert residents.saved[value].content == content_of(step.lineage, value)
        assert not residents.temps
        assert residents.walk.temp_bytes == 0
        assert residents.walk.evictable.keys() == residents.saved.keys()
    assert residents.walk.peak_bytes >= residents.live_bytes or not residents.walk.num_replayed_ops
