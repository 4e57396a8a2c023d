"""The largest batch that fits, found with few traces."""

from __future__ import annotations

import random

import pytest

from memkit.fronts.batches import largest


@pytest.mark.parametrize("begin", [1, 3, 32, 1000, 10**6])
@pytest.mark.parametrize("budget_bytes", [130, 5000, 123456])
def test_what_rises_in_proportion_is_found_in_few(begin: int, budget_bytes: int) -> None:
    tried = []

    def num_bytes(batch: int) -> int:
        tried.append(batch)
        return 100 + 27 * batch

    found = largest(num_bytes, budget_bytes, begin=begin, most=7)

    assert found == ((budget_bytes - 100) // 27, True)
    assert len(tried) == len(set(tried)) <= 7


def test_steps_and_kinks_are_found_as_well() -> None:
    for seed in range(50):
        draw = random.Random(seed)
        first, rise, block = draw.randrange(200), draw.randint(1, 50), draw.randint(1, 9)

        def num_bytes(batch: int, first: int = first, rise: int = rise, block: int = block) -> int:
            return first + rise * batch + (batch // block) * block * rise + (batch > 40) * 77

        budget_bytes = draw.randrange(10, 20000)
        found, is_found = largest(num_bytes, budget_bytes, begin=draw.randint(1, 100), most=60)

        assert is_found
        assert found == max((batch for batch in range(1, 21000) if num_bytes(batch) <= budget_bytes), default=0)


def test_any_start_leads_to_the_same_batch() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        first, rise, block = draw.choice([0, draw.randrange(10**9)]), draw.randint(1, 10**7), draw.choice([1, 8])

        def num_bytes(batch: int, first: int = first, rise: int = rise, block: int = block) -> int:
            return first + rise * batch + batch // block * block * rise // 50

        answer = draw.choice([0, 1, draw.randint(1, 5000)])
        budget_bytes = draw.randrange(num_bytes(answer), num_bytes(answer + 1))
        for begin in (1, 8, 64, 4096, 10**6):
            assert largest(num_bytes, budget_bytes, begin=begin, most=7) == (answer, True)


def test_nothing_may_fit() -> None:
    assert largest(lambda batch: 100 + batch, 50, begin=8, most=10) == (0, True)


def test_a_search_that_stops_says_so() -> None:
    found, is_found = largest(lambda batch: 1, 100, begin=4, most=3)

    assert found >= 4
    assert not is_found
