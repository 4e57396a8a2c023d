"""A fingerprint of words is another one whenever any of them is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
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
    """Return the same from Python's numbers: SplitMix64's finalizer as its authors write it."""
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


@settings(max_examples=15)
@given(WORDS, WORDS)
def test_tells_words_apart(one: list[int], other: list[int]) -> None:
    other = other[: len(one)] + one[len(other) :]

    assert (fingerprint(torch.tensor(one, dtype=torch.int64)) == fingerprint(torch.tensor(other, dtype=torch.int64))) == (
        one == other
    )


def _flip_signs(values: Tensor) -> None:
    values[[3, 11]] *= -1


def _swap(one: int, other: int) -> Callable[[Tensor], None]:
    def write(values: Tensor) -> None:
        values[[one, other]] = values[[other, one]]

    return write


def _flip_bit(number: int) -> Callable[[Tensor], None]:
    def write(values: Tensor) -> None:
        values.view(torch.int16)[5] ^= 1 << number if number < 15 else -(2**15)

    return write


WRITES: dict[str, Callable[[Tensor], object]] = {
    "two signs": _flip_signs,
    "all signs": lambda values: values.neg_(),
    "change places within a word": _swap(4, 5),
    "change places": _swap(1, 57),
    "words change places": lambda values: values.copy_(values.view(-1, 4).flip(0).reshape(-1)),
    "rolled": lambda values: values.copy_(values.roll(4)),
    **{f"bit {number}": _flip_bit(number) for number in range(16)},
    "zero of the other sign": lambda values: values[7].copy_(torch.tensor(-0.0)),
}


@pytest.mark.parametrize("name", WRITES)
def test_sees(name: str) -> None:
    values = torch.randn(64, generator=torch.Generator().manual_seed(1)).bfloat16()
    values[7] = 0.0
    before = fingerprint(values.view(torch.int64))
    WRITES[name](values)

    assert fingerprint(values.view(torch.int64)) != before


def test_sees_any_two_signs() -> None:
    """What the first bits of two words become must not cancel out."""
    words = torch.randint(-(2**62), 2**62, (60,), generator=torch.Generator().manual_seed(1))
    before, seen = fingerprint(words), set()
    for one in range(60):
        for other in range(one):
            flipped = words.clone()
            flipped[[one, other]] ^= -(2**63)
            seen.add(fingerprint(flipped))

    assert before not in seen
    assert len(seen) == 60 * 59 / 2
