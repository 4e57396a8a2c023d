"""`memkit.plan.eviction`: what `tests/plan/test_remat.py` does not see of a walk in its simulated steps."""

from __future__ import annotations

import random
import weakref
from typing import Any

import pytest

from memkit.plan import DTRScore, GrowingLineage, Step, Walk
from tests.plan.reference import chain


class Store:
    """Values on the device, all of `saved` at first; what is dropped is logged."""

    def __init__(self, step: Step, limit_bytes: float) -> None:
        self.sizes, self.present, self.log = step.lineage.num_bytes, set(step.saves), list[int]()
        self.walk = Walk(step.lineage, DTRScore(), limit_bytes, self)
        for value in step.saves:
            self.walk.clock += 1
            self.walk.admit(value)

    @property
    def live_bytes(self) -> int:
        return sum(self.sizes[value] for value in self.present)

    def is_available(self, value: int) -> bool:
        return value in self.present or value == 0

    def is_wanted(self, value: int) -> bool:
        return True

    def distance(self, value: int) -> int:
        return 1

    def drop_call(self, needed: object) -> bool:
        return False

    def drop(self, value: int) -> bool:
        self.log.append(value)
        self.present.remove(value)
        return True

    def run(self, op: int, in_place: Any) -> None: ...

    def keep(self, value: int) -> None:
        self.present.add(value)

    def forget(self, value: int) -> None: ...


def star(sizes: list[int], seconds: list[float]) -> Step:
    """Return a step of ops beside each other."""
    lineage = GrowingLineage()
    root = lineage.add_root(0)
    saves = [lineage.add_op([root], [size], cost)[0] for size, cost in zip(sizes, seconds, strict=True)]
    return Step(lineage=lineage, saves=tuple(saves), uses=tuple(reversed(saves)))


def test_walk_does_not_keep_its_store_alive() -> None:
    """Without a cycle: what a store holds is free as soon as nothing else asks for it."""
    store = Store(star([10], [1.0]), 10)
    reference, walk = weakref.ref(store), store.walk
    del store

    assert reference() is None
    assert list(walk.evictable) == [1]


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
    store = Store(Step(lineage=lineage, saves=tuple(values), uses=()), 200)
    store.walk.drop(1)
    assert store.walk.missing_cost_s(last) == 7.0
    store.walk.limit_bytes = 100
    store.walk.make_room(0)  # ranks them: 5 s against 7
    assert store.log == [1, 2]
    store.walk.limit_bytes = 300
    store.walk.rebuild(2)
    store.walk.rebuild(1)
    store.walk.limit_bytes = 200

    store.walk.make_room(0)

    assert store.log == [1, 2, last]  # 3 s by now


def test_ranking_of_many_finds_the_lowest_scores() -> None:
    rng = random.Random(0)
    seconds = [float(rng.randint(1, 10**6)) for _ in range(1000)]
    store = Store(star([10] * 1000, seconds), 5000)

    store.walk.make_room(0)

    assert store.log == sorted(range(1, 1001), key=lambda value: seconds[value - 1])[:500]


def test_make_room_tells_when_nothing_can_go() -> None:
    store = Store(star([10, 20], [1.0, 1.0]), 25)

    assert store.walk.make_room(0, needed={1})
    assert store.walk.make_room(15, needed={1})
    assert not store.walk.make_room(16, needed={1})
    assert store.log == [2]
    assert store.walk.make_room(16)
    assert store.log == [2, 1]


def test_missing_root_is_an_error() -> None:
    store = Store(chain(1), 1000)
    store.walk.drop(1)
    store.is_available = lambda value: False  # type: ignore[method-assign]  # a root that is gone

    with pytest.raises(AssertionError, match="a root that is needed for a replay is gone"):
        store.walk.rebuild(1)
