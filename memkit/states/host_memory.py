"""Host memory for the states of pieces: reserved once, in few large blocks, and used again in each step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from memkit.device.base import Device
from memkit.errors import HostMemoryError, warn_user
from memkit.plan.states import side_by_side
from memkit.sizes import format_bytes
from memkit.states.packing import Packed
from memkit.states.pieces import Layout, Piece
from memkit.storages import byte_view
from memkit.torch_state import num_users
from memkit.transfer.arena import Arena
from memkit.transfer.host_memory import PAGE_BYTES
from memkit.transfer.spans import Span, rounded
from memkit.wrappers import parts_of


class HostStates:
    """The host memory of one `StateOffload`.

    Args:
        device: whose copies use it.
        limit_bytes: the most to take.
    """

    def __init__(self, device: Device, *, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self.arena = Arena(device, limit_bytes=limit_bytes, must_pin=False)
        self._has_warned = False

    def reserve(self, pieces: Sequence[Piece]) -> None:
        """Set memory aside for pieces, as much as they are planned to take.

        Raises:
            HostMemoryError: there is not as much.
        """
        for piece, span in zip(pieces, self.take_side_by_side([piece.plan.state_bytes for piece in pieces]), strict=True):
            piece.room = span

    def take_side_by_side(self, sizes_bytes: Sequence[int]) -> list[Span]:
        """Return memory of these sizes, in few large blocks.

        Raises:
            HostMemoryError: there is not as much.
        """
        blocks = side_by_side(sizes_bytes)
        spans = []
        for block, whole in zip(blocks, self.take(list(map(sum, blocks))), strict=True):
            ends = list(itertools.accumulate(block, initial=0))
            spans += [whole.part(*ends_of) for ends_of in itertools.pairwise(ends)]
        return spans

    def take(self, sizes_bytes: Sequence[int]) -> list[Span]:
        """Return memory of these sizes.

        Raises:
            HostMemoryError: there is not as much.
        """
        if not sizes_bytes:
            return []
        needed_bytes = self.arena.held_bytes + sum(rounded(num_bytes, PAGE_BYTES) for num_bytes in sizes_bytes)
        if self._limit_bytes is not None and needed_bytes > self._limit_bytes:
            raise HostMemoryError(
                f"StateOffload needs a host_budget of at least {format_bytes(needed_bytes)}, in whole pages of "
                f"{format_bytes(PAGE_BYTES)}; found {format_bytes(self._limit_bytes)}. Raise it, or have more states stay "
                "on the device (device_budget)"
            )
        with torch.inference_mode(False):
            spans = self.arena.take_pinned_as_one(sizes_bytes)
        if self.arena.refusal is not None and not self._has_warned:
            self._has_warned = True
            warn_user(f"StateOffload: {self.arena.refusal}")
        return spans

    def room_for(self, piece: Piece, num_bytes: int) -> Span:
        """Return memory for the states of a piece: what was set aside, if it is enough, else more.

        Raises:
            HostMemoryError: there is not as much.
        """
        if piece.room is None or piece.room.num_bytes < num_bytes:
            (piece.room,) = self.take([num_bytes])
        return piece.room.part(0, num_bytes)

    def layout_of(
        self, piece: Piece, tensors: tuple[tuple[Packed, ...], ...], num_bytes: int, *, is_apart: bool = False
    ) -> Layout:
        """Return where states of a piece are from now on: where they have been, if that is enough and not needed yet.

        Raises:
            HostMemoryError: there is not as much.
        """
        span = self.take([num_bytes])[0] if is_apart else self.room_for(piece, num_bytes)
        return Layout(span, tensors, tuple({tensor.name: tensor.on_host(span) for tensor in row} for row in tensors))

    def give(self, span: Span) -> None:
        """Give memory back that was taken by itself. No copy is under way from or to it."""
        self.arena.give(span)
        self.arena.trim_gaps()

    def close(self, pieces: Sequence[Piece]) -> None:
        """Give all memory back. States that somebody still holds (a `state_dict`) keep their bytes."""
        layouts = [piece.layout for piece in pieces if piece.layout is not None and not piece.plan.is_on_disk]
        tensors = [tensor for layout in layouts for host in layout.host for tensor in host.values()]
        storages = [part.untyped_storage() for tensor in tensors for part in parts_of(tensor)]
        tensors.clear()
        for piece in pieces:
            piece.room = piece.layout = None
            piece.let_go()
        layouts.clear()
        held = [(storage, byte_view(storage).clone()) for storage in storages if num_users(storage) > 1]
        self.arena.give_all()
        self.arena.close()
        for storage, copied in held:  # the arena has given the memory back; the addresses still are whose tensors are there
            byte_view(storage).copy_(copied)
