"""What an optimizer keeps for its parameters: how many bytes for each element, and of which precision."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KeptState:
    """One tensor that an optimizer keeps for a parameter of a group.

    Attributes:
        bytes_per_element: its bytes for each element of the parameter.
        dtype: of its elements, None if it wraps others.
    """

    name: str
    bytes_per_element: float
    dtype: torch.dtype | None


@dataclass(frozen=True, slots=True)
class Sampled:
    """What is kept for parameters of a group that are of one precision: of small ones, and of large ones.

    Some classes keep large ones otherwise than small ones: in 8 bits, or by rows and columns.
    """

    small_numel: int
    small: list[KeptState]
    large_numel: int
    large: list[KeptState]

    def of(self, numel: int) -> list[KeptState]:
        """Return what is kept for a parameter of so many elements. Between the two sizes that were tried either may be."""
        if numel <= self.small_numel or self.large_numel <= self.small_numel:
            return self.small
        if numel >= self.large_numel:
            return self.large
        small = {item.name: item for item in self.small}
        return [_either(small.get(item.name, item), item) for item in self.large]


def _either(one: KeptState, other: KeptState) -> KeptState:
    most = max(one.bytes_per_element, other.bytes_per_element)
    return KeptState(one.name, most, one.dtype if one.dtype == other.dtype else None)


Kept = dict[torch.dtype, Sampled]
"""What is kept for parameters of a group, by their precision."""
