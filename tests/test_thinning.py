"""Which of many combinations of parameters there are: no pair of values is left out, or no value."""

from __future__ import annotations

import itertools

import pytest

from tests import thinning
from tests.thinning import covering

pytest_plugins = ["pytester"]


def _pairs(cases: list[dict[str, object]]) -> set[tuple[object, ...]]:
    return {pair for case in cases for pair in itertools.combinations(case.items(), 2)}


@pytest.mark.parametrize("sizes", [(3, 4, 5), (7, 6, 2, 2), (5,)])
def test_each_pair_is_there_in_few_cases(sizes: tuple[int, ...]) -> None:
    cases = [dict(zip("abcd", values, strict=False)) for values in itertools.product(*map(range, sizes))]
    for given in (cases, cases[::3]):  # products are not always whole
        assert _pairs([given[index] for index in covering(given, 2)]) == _pairs(given)
    largest, second, *_ = (*sorted(sizes, reverse=True), 1)

    assert len(covering(cases, 2)) <= 1.7 * largest * second
    assert covering(cases, 2, cases) == []


def test_values_are_told_apart_by_type_and_need_no_hash() -> None:
    shared: list[int] = []
    cases = [{"a": True}, {"a": 1}, {"a": 1.0}, {"a": shared}, {"a": shared}, {"a": []}]

    assert covering(cases, 1) == [0, 1, 2, 3, 5]


_TESTS = """
import pytest

slow = pytest.mark.slow

@pytest.mark.parametrize("a", [0, pytest.param(1, marks=slow), pytest.param(2, marks=slow)])
@pytest.mark.parametrize("b", range(3))
@pytest.mark.parametrize("c", range(3))
def test_pairs(a, b, c):
    pass

@slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("a", [(number, name) for number in range(4) for name in "xy"])
@pytest.mark.parametrize("b", range(5))
def test_values(a, b):
    pass

@slow
@pytest.mark.parametrize(("a", "b", "c"), [(a, b, c) for a in range(2) for b in range(2) for c in range(2)])
def test_rows(a, b, c):
    pass

@pytest.mark.core(1)
@pytest.mark.parametrize("a", [*range(4), pytest.param(4, marks=slow)])
@pytest.mark.parametrize("b", range(3))
@pytest.mark.parametrize("c", range(3))
def test_core(a, b, c):
    pass

def test_alone():
    pass
"""


def test_marks_say_which_combinations_there_are(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nmarkers =\n    slow\n    covering\n    core")
    found = pytester.getitems(_TESTS)
    kept = thinning.thin(found)

    def params(name: str, among: list[pytest.Item]) -> list[dict[str, object]]:
        return [item.callspec.params for item in among if isinstance(item, pytest.Function) and item.originalname == name]

    assert len(params("test_pairs", kept)) < len(params("test_pairs", found))
    assert _pairs(params("test_pairs", kept)) == _pairs(params("test_pairs", found))
    assert len(params("test_values", kept)) == 5  # a tuple counts as several
    assert len(params("test_core", [item for item in kept if "slow" not in item.keywords])) == 4
    assert len(params("test_core", kept)) < 22
    assert _pairs(params("test_core", kept)) == _pairs(params("test_core", found))
    assert params("test_rows", kept) == params("test_rows", found)
    assert kept[-1] is found[-1]
