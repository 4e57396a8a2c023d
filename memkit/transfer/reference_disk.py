"""A stand-in for a disk, in memory, which shows every missing wait, and fails when told to."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from memkit.core.sizes import check_budget_bytes
from memkit.transfer.disk import Disk, DiskFile, DiskQueue, DiskTransfer
from memkit.transfer.host_memory import Range

POISON = 0xCB  # the content of memory until a read has landed in it, and of free places in the file
Fault = Callable[[str, int, int], int]  # kind of request, offset, bytes -> how many to move; may raise an `OSError`


class ReferenceDisk(Disk):
    """A disk that is not there. Reads and writes land as late as they may: when they are waited for, or at random moments.

    The memory of a read holds poison as soon as the read may write to it, and a write takes the memory's bytes when it lands.
    So a missing wait gives wrong bytes every time. A place in the file that became free is poisoned at once.

    Example:
        >>> import memkit
        >>> store = ReferenceDisk(limit="1MiB").open(8192, memkit.device.ReferenceDevice())
        >>> store.file.num_bytes, store.in_use_bytes
        (8192, 0)
        >>> store.close()
    """

    def __init__(
        self, *, limit: int | str | None = None, fault: Fault | None = None, seed: int | None = None, is_late: bool = True
    ) -> None:
        object.__setattr__(self, "directory", Path("reference"))
        object.__setattr__(self, "limit", None if limit is None else check_budget_bytes("limit", limit))
        object.__setattr__(self, "_made_by", (fault, seed, is_late))

    def _make_file(self, num_bytes: int) -> DiskFile:
        return _ReferenceFile(self.directory, num_bytes, self._made_by[0])

    def _make_queue(self, num_threads: int) -> DiskQueue:
        _, seed, is_late = self._made_by
        return _LateQueue(seed) if is_late else DiskQueue(num_threads)

    _made_by: tuple[Fault | None, int | None, bool]


class _ReferenceFile(DiskFile):
    def __init__(self, directory: Path, num_bytes: int, fault: Fault | None) -> None:
        self._lock, self._content = threading.Lock(), memoryview(b"")
        self._fault = fault or (lambda _what, _offset, num_bytes: num_bytes)
        super().__init__(directory, num_bytes)

    def _open(self) -> None:
        self.is_direct = True

    def _reserve(self, start: int, end: int) -> None:
        self._fault("reserve", start, end - start)
        with self._lock:
            self._content = memoryview(bytearray(self._content) + bytearray([POISON]) * (end - start))

    def _read_some(self, buffers: Sequence[memoryview], offset: int) -> int:
        return self._move("read", buffers, offset)

    def _write_some(self, buffers: Sequence[memoryview], offset: int) -> int:
        return self._move("write", buffers, offset)

    def _move(self, what: str, buffers: Sequence[memoryview], offset: int) -> int:
        left = num_bytes = self._fault(what, offset, sum(map(len, buffers)))
        with self._lock:
            for memory in buffers:
                memory = memory[:left]
                place = self._content[offset : offset + len(memory)]
                if what == "read":
                    memory[:] = place
                else:
                    place[:] = memory
                offset, left = offset + len(memory), left - len(memory)
        return num_bytes - left

    def map(self, place: Range) -> memoryview:
        return self._content[place[0] : place[1]]

    def settle_map(self, place: Range, mapped: memoryview) -> None:
        pass

    def note_free(self, place: Range) -> None:
        start, end = place
        self._content[start:end] = bytes([POISON]) * (end - start)

    def close(self) -> None:
        self._content = memoryview(b"")


class _LateQueue(DiskQueue):
    """Moves blocks in the thread that waits for them, after the transfers ahead."""

    def __init__(self, seed: int | None) -> None:
        self._random = None if seed is None else random.Random(seed)
        self._waiting = deque[DiskTransfer]()

    def put(self, transfer: DiskTransfer) -> None:
        if transfer.may_move:
            _poison(transfer)
        self._waiting.append(transfer)
        if self._random is not None:
            for _ in range(self._random.randrange(4)):
                self._move_one()

    def wait(self, transfer: DiskTransfer) -> None:
        while not transfer.is_over:
            self._move_one()

    def cancel(self, transfer: DiskTransfer) -> None:
        transfer.error = transfer.error or KeyboardInterrupt()

    def close(self) -> None:
        while self._waiting:
            self._move_one()

    def _move_one(self) -> None:
        self._waiting = deque(transfer for transfer in self._waiting if not transfer.is_over)
        if not self._waiting:
            return
        transfer = self._waiting[0] if self._random is None else self._random.choice(self._waiting)
        error, is_first = None, not transfer.may_move
        try:
            transfer.take_step()()
        except OSError as raised:
            error = raised
        transfer.end_step(error)
        if is_first:
            _poison(transfer)


def _poison(transfer: DiskTransfer) -> None:
    if transfer.is_read:
        for memory in (memory for block in transfer.blocks for memory in block.buffers):
            memory[:] = bytes([POISON]) * len(memory)
