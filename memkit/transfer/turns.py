"""Copies that take turns on two streams: see [Note: copies by turns] in `memkit.transfer.lanes`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from memkit.device.base import CopyBatch, Device, Piece, Stream

TURN_BYTES = 16 * 2**20
"""About as much is copied in one turn."""


class CopiesByTurns(CopyBatch):
    """A `CopyBatch` whose pieces are copied one after the other, on two streams by turns.

    Args:
        device: that of the storages.
        streams: both streams; the first copy is on the first one.
        pieces: all that is copied, those of each turn together.
        is_out: whether to the host.
        ahead: as of `CopyBatch`.
    """

    def __init__(
        self,
        device: Device,
        streams: tuple[Stream, Stream],
        pieces: Sequence[Sequence[Piece]],
        *,
        is_out: bool,
        ahead: CopyBatch | None,
    ) -> None:
        super().__init__(device, streams[0], [piece for turn in pieces for piece in turn], is_out=is_out, ahead=ahead)
        self.turns: list[CopyBatch] = []
        """A batch for each, which waits for the one before."""
        for number, turn in enumerate(pieces):
            before = self.turns[-1] if self.turns else ahead
            self.turns.append(device.copy_batch(streams[number % 2], turn, is_out=is_out, ahead=before))

    def start(self, storages: Sequence[torch.UntypedStorage], behind: CopyBatch | None = None) -> None:
        self.waited = None
        for turn in self.turns:
            turn.start(storages, behind)
            behind = None
        self.started, self.done = self.turns[0].started, self.turns[-1].done

    def wait(self) -> None:
        last = self.turns[-1]
        last.wait()
        self.waited = last.waited


def copy_by_turns(
    device: Device, streams: tuple[Stream, Stream], pieces: Sequence[Piece], *, is_out: bool, ahead: CopyBatch | None
) -> CopyBatch:
    """Return copies like those of `Device.copy_batch`, whose turns are not those of the batch ahead, which they wait for.

    Args:
        streams: which take turns.
        ahead: what was returned for the batch that is put on them just before; None for the first.
    """
    before = ahead.turns[-1] if isinstance(ahead, CopiesByTurns) else ahead
    if before is not None and before.stream == streams[0]:
        streams = streams[1], streams[0]
    turns = [*_cut(pieces)]
    if len(turns) > 1:
        return CopiesByTurns(device, streams, turns, is_out=is_out, ahead=ahead)
    return device.copy_batch(streams[0], pieces, is_out=is_out, ahead=ahead)


def _cut(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Yield the pieces of each turn: of small ones as many as it takes, of a large one a part."""
    turn, num_bytes = list[Piece](), 0
    for piece in pieces:
        for start in range(0, piece.num_bytes, TURN_BYTES):
            part = piece if piece.num_bytes <= TURN_BYTES else _part_of(piece, start)
            if turn and num_bytes + part.num_bytes > TURN_BYTES:
                yield turn
                turn, num_bytes = [], 0
            turn.append(part)
            num_bytes += part.num_bytes
    if turn:
        yield turn


def _part_of(piece: Piece, start: int) -> Piece:
    host = piece.host[start : start + TURN_BYTES]
    return replace(piece, start=piece.start + start, host=host, address=piece.address + start, num_bytes=len(host))
