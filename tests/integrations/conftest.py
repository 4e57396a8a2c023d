"""What trainers leave behind: each `LayerOffload` that a test has made is closed behind it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import memkit


@pytest.fixture(autouse=True)
def _closes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made: list[memkit.LayerOffload] = []
    init = memkit.LayerOffload.__init__

    def note(self: memkit.LayerOffload, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        init(self, *args, **kwargs)

    monkeypatch.setattr(memkit.LayerOffload, "__init__", note)
    yield
    for offload in reversed(made):
        offload.close()
