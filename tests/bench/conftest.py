"""What tests of benches run on: a machine that is soon measured."""

from __future__ import annotations

import pytest

from memkit.cli import machine
from memkit.transfer import lanes


@pytest.fixture(autouse=True)
def _little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests run side by side: threads that wait for a core take seconds for what takes none. And copies of the reference
    device are not over by themselves: some updates beside them show as much as 10,000.
    """
    monkeypatch.setattr(machine, "_UPDATE_THREADS", (1,))
    monkeypatch.setattr(machine, "_BOTH_S", 0.05)
    monkeypatch.setattr(lanes, "_MOST_ACTS", 10)
