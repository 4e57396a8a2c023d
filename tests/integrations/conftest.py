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


@pytest.fixture
def no_dynamo_by_environment(monkeypatch: pytest.MonkeyPatch, no_compiled_code_is_left: None) -> None:
    """Put back the environment by which Trainer has Accelerate compile the model."""
    for name in ("ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_DYNAMO_MODE"):
        monkeypatch.setenv(name, "no")
        monkeypatch.delenv(name)
