"""The plain run draws fewer examples, and never none."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests import drawn


@pytest.mark.parametrize(("draws_few", "found"), [(False, [5, 40, 300]), (True, [5, 15, 75])])
def test_number_of_examples(draws_few: bool, found: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawn, "draws_few", draws_few)

    assert [drawn.examples(number).max_examples for number in (5, 40, 300)] == found


def test_what_says_no_number_draws_few_too(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--hypothesis-profile"):
        pytest.skip("another profile was asked for")

    assert settings().max_examples == (12 if pytestconfig.option.markexpr == "not full" else 100)
