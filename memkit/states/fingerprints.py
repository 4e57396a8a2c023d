"""Fingerprints of parameters on the device: whether anybody has written to them since they were stepped."""

from __future__ import annotations

import torch
from torch import Tensor

WORD_BYTES = 8
"""What is taken together of the parameters' bytes."""


def _signed(number: int) -> int:
    """Return a number below 2**64 as an int64 has its bits."""
    return number - 2**64 if number >= 2**63 else number


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_ROUNDS = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)), (31, 1))
"""By how much to shift, and what to multiply by."""


def take_fingerprint(words: Tensor, scratch: tuple[Tensor, Tensor], found: Tensor) -> None:
    """Write a fingerprint of some words: it is another one if any bit of them is, but for one case in 2**64.

    Each word is added to its place times an odd number, and mixed with SplitMix64's finalizer, which is one to one; the results
    are added up modulo 2**64. What is written is told by neither a sum of what is there nor its order, so words that change
    places, or bits that flip in pairs, count as any other write does. It is no protection from those who mean to deceive.

    Args:
        words: int64, of one dimension.
        scratch: two tensors like it on the same device, which are written to.
        found: int64, one element: the fingerprint.

    Source: Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators (2014), and Stafford's variant 13 of its mixing.
    """
    mixed, shifted = scratch
    torch.arange(words.numel(), out=mixed, device=mixed.device)
    mixed.mul_(_GOLDEN).add_(words)
    for shift, factor in _ROUNDS:
        torch.bitwise_right_shift(mixed, shift, out=shifted)
        mixed.bitwise_xor_(shifted.bitwise_and_((1 << (64 - shift)) - 1))  # the shift has drawn the sign along
        if factor != 1:
            mixed.mul_(factor)
    torch.sum(mixed, dim=0, keepdim=True, out=found)
