"""What tests on one process run in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.groups import group_of_one


@pytest.fixture
def one() -> Iterator[None]:
    """Have a process group of this process alone."""
    with group_of_one():
        yield
