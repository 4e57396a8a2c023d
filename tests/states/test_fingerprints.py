"""A fingerprint of words changes whenever one of them does."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memkit.states.host_routes import take_fingerprint

MODULO = 2**64


def fingerprint(words: Tensor) -> int:
    found = torch.zeros(1, dtype=torch.int64)
    take_fingerprint(words, (torch.empty_like(words), torch.empty_like(words)), found)
    return int(found)


def by_hand(words: list[int]) -> int:
    """Compute the fingerprint with Python's numbers: SplitMix64's finalizer as its authors write it."""
    total = 0
    for index, word in enumerate(words):
        z = (word + index * 0x9E3779B97F4A7C15) % MODULO
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % MODULO
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % MODULO
        total += z ^ (z >> 31)
    total %= MODULO
    return total - MODULO if total >= MODULO // 2 else total


WORDS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40)


@settings(max_examples=15)
@given(WORDS)
def test_is_that_of_splitmix(words: list[int]) -> None:
    assert fingerprint(torch.tensor(words, dtype=torch.int64)) == by_hand(words)


def test_sees_any_two_signs() -> None:
    """The contributions of the first bits of two words must not cancel out."""
    words = torch.randint(-(2**62), 2**62, (60,), generator=torch.Generator().manual_seed(1))
    before, seen = fingerprint(words), set()
    for one in range(60):
        for other in range(one):
            flipped = words.clone()
            flipped[[one, other]] ^= -(2**63)
            seen.add(fingerprint(flipped))

    assert before not in seen
    assert len(seen) == 60 * 59 / 2
