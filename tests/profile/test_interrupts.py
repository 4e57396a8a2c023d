"""Ctrl-C in a profile: the model runs in a context after it, and can be profiled again."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

import memkit
from tests.interrupts import count_lines, hooks_around, interrupts

EDGES = ["__enter__", "claim", "__exit__", "exit", "leave", "end_block"]
MODEL, X = nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.randn(2, 8)


def _profile() -> None:
    try:
        memkit.profile_memory(MODEL, X, print_table=False, backward=True, warmup=0)
    except KeyboardInterrupt as error:
        sys.last_value = error  # as Python does at its prompt; with it all frames live on
        raise


def _run_in_a_context() -> None:
    with memkit.Rematerialize(1.0, "after", min_bytes=0):
        loss = MODEL(X).sum()
    loss.backward()


@pytest.mark.slow
@pytest.mark.parametrize("run", [_run_in_a_context, _profile])
def test_profile_that_was_interrupted_at_its_edges_is_over(run: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    before = hooks_around(MODEL)
    num_places = 0

    for function in EDGES:
        for place in interrupts(_profile, 8, within=function) if count_lines(_profile, function) else ():
            num_places += "hooks.py" in place or "interrupts.py" in place
            run()
            assert hooks_around(MODEL) == before, place

    assert num_places
