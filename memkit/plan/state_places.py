"""Where optimizer states lie between steps: on the device, in host memory, or on a disk, behind a few buffers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from memkit.errors import BudgetInfeasible, HostMemoryError
from memkit.sizes import HOST_PAGE_BYTES, format_bytes, rounded

if TYPE_CHECKING:
    from memkit.plan.state_costs import StatePiece

NUM_BUFFERS = 4
"""Buffers in host memory that pieces on a disk pass through: some are read to, one is in use, others are written from."""
BLOCK_BYTES = 256 * 2**20
"""Host memory for pieces is taken in blocks of about this size."""

_SPREAD = 0.98
"""So much of what may stay is to stay where that is evenly spread."""


def with_residents(pieces: list[StatePiece], budget_bytes: int, *, moves_large: bool = False) -> Iterator[StatePiece]:
    """Yield the pieces, with as many of them staying as fit, evenly spread: others are on their way while these are stepped.

    Args:
        pieces: all of them.
        budget_bytes: the most that may stay.
        moves_large: whether what is stepped in windows stays last: what stays is stepped at once, and while it is, nothing else
            leaves. Not where somebody waits for the parameters in their order.
    """
    sizes = [piece.state_bytes for piece in pieces]
    least = min(filter(None, sizes), default=0)
    if 0 < budget_bytes < least:
        raise BudgetInfeasible(
            f"device_budget needs at least {format_bytes(least)}, the smallest piece of states, for anything to stay on the "
            f"device; found {format_bytes(budget_bytes)}. Raise it, or leave it out: then all states leave",
            least,
        )
    first = [index for index, piece in enumerate(pieces) if not (moves_large and piece.windows)]
    share = min(1.0, budget_bytes / max(1, sum(sizes[index] for index in first)))
    spread = _filled(evenly(first, sizes, share, most=budget_bytes), sizes, budget_bytes)
    packed = _filled(set(), sizes, budget_bytes)
    spread_bytes, packed_bytes = (sum(sizes[index] for index in chosen) for chosen in (spread, packed))
    staying = spread if spread_bytes >= _SPREAD * packed_bytes else packed
    for index, piece in enumerate(pieces):
        yield replace(piece, is_resident=index in staying)


def _filled(chosen: set[int], sizes: Sequence[int], budget_bytes: int) -> set[int]:
    """Return indices with as many more, from the last one on, as there is room for."""
    room = budget_bytes - sum(sizes[index] for index in chosen)
    for index in reversed(range(len(sizes))):
        if index not in chosen and sizes[index] <= room:
            chosen.add(index)
            room -= sizes[index]
    return chosen


def evenly(indices: Iterable[int], sizes: Sequence[int], share: float, *, most: float = math.inf) -> set[int]:
    """Return some of the indices, evenly spread, whose sizes come to about a share of all of them, and at most to `most`."""
    chosen = set[int]()
    taken = passed = 0
    for index in indices:
        passed += sizes[index]
        # taken where that comes closer to the share of what has passed
        if taken + sizes[index] / 2 <= share * passed and taken + sizes[index] <= most:
            chosen.add(index)
            taken += sizes[index]
    return chosen


def interleaved(pieces: Sequence[StatePiece]) -> list[int]:
    """Return the indices of pieces in the order in which a step takes the device the least time: what stays comes evenly
    between what moves, so that the link never waits for it long. Both stay in their own order.

    By the order of the groups, what is large and stays, as a head at the end, would be stepped when nothing is left to move.

    Example:
        >>> from memkit.plan import ParameterCosts, interleaved, plan_states
        >>> sizes = [2**19] * 4 + [2**22]
        >>> costs = [ParameterCosts(name="", numel=n, parameter_bytes=2 * n, state_bytes=8 * n) for n in sizes]
        >>> plan = plan_states(costs, device_budget_bytes=8 * 2**22)
        >>> [piece.is_resident for piece in plan.pieces]
        [False, False, False, False, True]
        >>> interleaved(plan.pieces)
        [0, 1, 4, 2, 3]
    """
    moving = [index for index, piece in enumerate(pieces) if not piece.is_resident]
    staying = [index for index, piece in enumerate(pieces) if piece.is_resident]
    if not moving or not staying:
        return list(range(len(pieces)))
    moving_numel, staying_numel = (sum(pieces[index].numel for index in those) for those in (moving, staying))
    order: list[int] = []
    moved = stepped = num_taken = 0
    for index in moving:
        # taken where half of it is due by what has moved
        while num_taken < len(staying):
            numel = pieces[staying[num_taken]].numel
            if (2 * stepped + numel) * moving_numel > 2 * moved * staying_numel:
                break
            order.append(staying[num_taken])
            stepped += numel
            num_taken += 1
        order.append(index)
        moved += pieces[index].numel
    return order + staying[num_taken:]


def side_by_side(sizes_bytes: Sequence[int]) -> list[list[int]]:
    """Return sizes in the same order, in blocks that are each taken at once.

    Example:
        >>> side_by_side([2**27, 2**27, 2**20])
        [[134217728, 134217728], [1048576]]
    """
    blocks: list[list[int]] = []
    room = 0
    for num_bytes in sizes_bytes:
        if num_bytes > room or not blocks:
            blocks.append([])
            room = max(BLOCK_BYTES, num_bytes)
        blocks[-1].append(num_bytes)
        room -= num_bytes
    return blocks


def held_bytes(sizes_bytes: Sequence[int]) -> int:
    """Return the host memory that pieces of these sizes take."""
    return sum(_in_pages(sum(block)) for block in side_by_side(sizes_bytes))


def ring_bytes(pieces: Sequence[StatePiece]) -> tuple[int, ...]:
    """Return the sizes of the buffers that these pieces pass through on their way from and to a disk."""
    sizes = [part.state_bytes for piece in pieces if piece.is_on_disk for part in piece.parts]
    return (max(sizes),) * min(NUM_BUFFERS, len(sizes)) if sizes else ()


def with_disk(pieces: Sequence[StatePiece], host_budget_bytes: int | None, *, is_backward: bool = False) -> list[StatePiece]:
    """Return pieces, with those on the disk that host memory has no room for: the last to be stepped, while the first are
    stepped from host memory, the disk reads.

    Args:
        pieces: those that leave the device, and those that stay.
        host_budget_bytes: the most host memory to take, buffers included; None for no more than the buffers.
        is_backward: whether they are stepped in the order of a backward, from the last one to the first.

    Raises:
        HostMemoryError: that is less than the buffers take.
    """
    moving = [index for index, piece in enumerate(pieces) if not piece.is_resident and piece.state_bytes]
    moving = moving[::-1] if is_backward else moving
    in_host: list[int] = []
    if host_budget_bytes is not None:
        sizes = [pieces[index].state_bytes for index in moving]
        if held_bytes(sizes) <= host_budget_bytes:
            return list(pieces)
        ring = [_on_disk(pieces[index]) for index in moving]
        left_bytes = host_budget_bytes - sum(map(_in_pages, ring_bytes(ring)))
        if left_bytes < 0:
            raise HostMemoryError(
                f"StateOffload needs a host_budget of at least {format_bytes(host_budget_bytes - left_bytes)}, for the buffers "
                f"that states pass through on their way from and to the disk; found {format_bytes(host_budget_bytes)}. Raise "
                "it, or leave it out: then no more than these buffers is taken"
            )
        for index, num_bytes in zip(moving, sizes, strict=True):
            if held_bytes([*(pieces[other].state_bytes for other in in_host), num_bytes]) > left_bytes:
                break
            in_host.append(index)
    on_disk = {*moving} - {*in_host}
    return [_on_disk(piece) if index in on_disk else piece for index, piece in enumerate(pieces)]


def _on_disk(piece: StatePiece) -> StatePiece:
    return replace(piece, is_on_disk=True, windows=tuple(replace(window, is_on_disk=True) for window in piece.windows))


def _in_pages(num_bytes: int) -> int:
    return rounded(num_bytes, HOST_PAGE_BYTES)
