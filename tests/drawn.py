"""How many examples a test draws: a quarter of them where pytest runs by itself, all with `-m full` and with `-m ""`."""

from __future__ import annotations

from hypothesis import settings

draws_few = False
"""Whether this is the plain run, which leaves out what takes long: tests/conftest.py says so before tests are imported."""

_FEWEST = 15


def examples(number: int) -> settings:
    """Return what a test by `given` is decorated with that is to draw so many examples."""
    return settings(max_examples=max(min(number, _FEWEST), number // 4) if draws_few else number)
