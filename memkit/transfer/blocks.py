"""What one read or write of a file moves: where it is in the file, and where in memory. No file here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from memkit.transfer.spans import Range, rounded

DISK_PAGE_BYTES = 4096
"""What is read or written without the system's cache is of this size, and begins at a multiple of it, in the file and in
memory. Disks know smaller ones as well; where one asks for more, the cache is used."""
BLOCK_BYTES = 8 * 2**20
"""The most that is read or written at once: large enough for full speed, small enough that several threads share one chunk."""
_MOST_BUFFERS = 512
"""Half of what Linux takes at once."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """Bytes that one thread reads or writes."""

    offset: int
    """In the file; a multiple of a page."""
    buffers: tuple[memoryview, ...]
    """Where in memory, in order."""
    num_bytes: int
    """Of these together. In the file they take whole pages."""
    is_aligned: bool
    """Whether each buffer begins at a page's multiple and is of whole pages, so that the disk may fill it itself."""


def cut_in_blocks(ranges: Sequence[Range], pieces: Sequence[Tensor], *, block_bytes: int = BLOCK_BYTES) -> list[Block]:
    """Return the blocks that move all bytes of some memory, in order, from or to some ranges of a file.

    What is left at the end that fills no page is a block of its own, so that all others may be aligned.

    Args:
        ranges: of whole pages; at least as many bytes as the pieces have.
        pieces: tensors of dtype uint8 in host memory.
        block_bytes: the most in one block, whole pages.

    Example:
        >>> import torch
        >>> [block.num_bytes for block in cut_in_blocks([(0, 12288)], [torch.zeros(9000, dtype=torch.uint8)])]
        [8192, 808]
    """
    memory = _Memory(pieces)
    whole = memory.num_bytes // DISK_PAGE_BYTES * DISK_PAGE_BYTES
    blocks, done = [], 0
    for start, end in ranges:
        while start < end and done < memory.num_bytes:
            num_bytes = min(block_bytes, end - start, (whole if done < whole else memory.num_bytes) - done)
            buffers, is_aligned = memory.take(num_bytes)
            blocks.append(Block(offset=start, buffers=buffers, num_bytes=num_bytes, is_aligned=is_aligned))
            start += rounded(num_bytes, DISK_PAGE_BYTES)
            done += num_bytes
    assert done == memory.num_bytes, "more bytes than the file has room for"
    return blocks


class _Memory:
    """Bytes of some tensors, taken from the first to the last."""

    def __init__(self, pieces: Sequence[Tensor]) -> None:
        self._pieces = [(piece.data_ptr(), piece.numpy().data) for piece in pieces if piece.numel()]
        self.num_bytes = sum(len(memory) for _, memory in self._pieces)
        self._at = self._offset = 0

    def take(self, num_bytes: int) -> tuple[tuple[memoryview, ...], bool]:
        """Return the next bytes, and whether a disk may fill them itself."""
        taken = list(self._take(num_bytes))
        is_aligned = len(taken) <= _MOST_BUFFERS and all(
            address % DISK_PAGE_BYTES == 0 == len(memory) % DISK_PAGE_BYTES for address, memory in taken
        )
        return tuple(memory for _, memory in taken), is_aligned

    def _take(self, num_bytes: int) -> Iterator[tuple[int, memoryview]]:
        while num_bytes:
            address, memory = self._pieces[self._at]
            part = memory[self._offset : self._offset + num_bytes]
            yield address + self._offset, part
            num_bytes -= len(part)
            self._offset += len(part)
            if self._offset == len(memory):
                self._at, self._offset = self._at + 1, 0
