"""Devices that the tests of streamed optimizer states run on, and parameters that are cut."""

import pytest

from tests.states.cases import cut
from tests.weights.conftest import device

__all__ = ["device", "is_cut"]


@pytest.fixture
def is_cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Parameters with more than some hundred bytes of states are large, if it is True."""
    if request.param:
        cut(monkeypatch)
    return request.param
