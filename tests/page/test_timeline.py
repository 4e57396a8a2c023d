"""Few points that keep the shape of a step, and what is there at each of them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memkit.page.document import MOST_POINTS, MOST_STORAGES, categories_of, sampled, spans_of, timeline_of
from memkit.profile.alive import AliveStorage, MemoryCategory, Moment, Phase, StepMemory


def memory_of_ops(num_ops: int, *, seed: int = 0) -> StepMemory:
    """Return a step of so many ops, each of which makes a storage that stays for a while."""
    draw = random.Random(seed)
    storages = [
        AliveStorage(
            category=MemoryCategory.ACTIVATION if place % 3 else MemoryCategory.TEMP,
            module=f"layers.{place % 50}",
            what="mm",
            num_bytes=512 * draw.randint(1, 4000),
            begin=place,
            end=min(num_ops, place + draw.randint(1, 200)),
        )
        for place in range(num_ops)
    ]
    params = AliveStorage(category=MemoryCategory.PARAM, module="(model)", what="weight", num_bytes=2**24, begin=0, end=num_ops)
    moments = tuple(
        Moment(
            phase=Phase.FORWARD if place < num_ops // 3 else Phase.BACKWARD, op="aten.mm.default", module=f"layers.{place % 50}"
        )
        for place in range(num_ops)
    )
    return StepMemory(moments=moments, storages=(params, *storages))


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=500), st.integers(4, 60))
def test_no_peak_is_lost(levels: list[int], most: int) -> None:
    places = sampled(levels, most)

    assert max(levels[place] for place in places) == max(levels)
    assert min(levels[place] for place in places) == min(levels)
    assert places == sorted(set(places))
    assert len(places) <= most + 2


def test_each_stretch_keeps_its_highest() -> None:
    levels = [random.Random(1).randint(0, 1000) for _ in range(10_000)]
    places = set(sampled(levels, 1000))

    for begin in range(0, 10_000, 20):
        assert max(range(begin, begin + 20), key=levels.__getitem__) in places


def test_few_moments_are_all_there() -> None:
    assert sampled([3, 1, 2], 2000) == [0, 1, 2]


def test_parts_of_the_step_follow_each_other() -> None:
    assert spans_of(memory_of_ops(30)) == [("forward", 0, 10), ("backward", 10, 30)]


def test_categories_that_are_never_there_are_left_out() -> None:
    assert list(categories_of(memory_of_ops(30))) == ["param", "activation", "temp"]


@pytest.mark.parametrize("num_ops", [1, 30, 5000])
def test_timeline_is_the_memory(num_ops: int) -> None:
    memory = memory_of_ops(num_ops)

    line = timeline_of(memory)

    assert line["num_moments"] == num_ops
    assert line["x"][line["peak"]] == memory.peak
    for index, place in enumerate(line["x"]):
        assert sum(series["y"][index] for series in line["series"]) == memory.total_bytes[place]
        assert line["texts"][line["modules"][index]] == memory.moments[place].module
    assert len(line["x"]) <= MOST_POINTS + 20


def test_each_category_keeps_its_highest() -> None:
    memory = memory_of_ops(20_000)

    line = timeline_of(memory)

    for series in line["series"]:
        assert max(series["y"]) == max(memory.levels[MemoryCategory(series["key"])])


def test_storages_say_when_they_are_there() -> None:
    memory = memory_of_ops(40)

    line = timeline_of(memory)

    for moment in range(40):
        there = [row[3] for row in line["storages"] if row[4] <= moment < row[5]]
        assert sum(there) == memory.total_bytes[moment]


def test_of_many_storages_the_largest_are_known() -> None:
    memory = memory_of_ops(MOST_STORAGES + 500)

    sizes = sorted((row[3] for row in timeline_of(memory)["storages"]), reverse=True)

    assert len(sizes) == MOST_STORAGES
    assert sizes == sorted((storage.num_bytes for storage in memory.storages), reverse=True)[:MOST_STORAGES]
