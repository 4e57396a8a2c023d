"""A file for bytes that the host has no room for: without a name, of a fixed size, gone with the process."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from memkit.core.sizes import DISK_PAGE_BYTES, format_bytes, rounded
from memkit.errors import DiskError
from memkit.transfer.host_memory import Range

BLOCK_BYTES = 8 * 2**20
"""The most to read or write at once: large enough for full speed, small enough that several threads share one chunk."""
_MOST_BUFFERS = 512
"""Half of what Linux takes at once."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DiskBlock:
    offset: int
    buffers: tuple[memoryview, ...]
    num_bytes: int
    is_aligned: bool
    """Whether each buffer begins at a page's multiple and is of whole pages, so that the disk may fill it itself."""


def cut_in_blocks(ranges: Sequence[Range], pieces: Sequence[Tensor], *, block_bytes: int = BLOCK_BYTES) -> list[DiskBlock]:
    """Return the blocks that move all bytes of some memory, in order; a rest that fills no page is a block of its own."""
    memories = [(piece.data_ptr(), piece.numpy().data) for piece in pieces if piece.numel()]
    total = sum(len(memory) for _, memory in memories)
    whole = total // DISK_PAGE_BYTES * DISK_PAGE_BYTES
    blocks, done = [], 0
    for start, end in ranges:
        while start < end and done < total:
            blocks.append(_block(start, memories, min(block_bytes, end - start, (whole if done < whole else total) - done)))
            start += rounded(blocks[-1].num_bytes, DISK_PAGE_BYTES)
            done += blocks[-1].num_bytes
    assert done == total, "more bytes than the file has room for"
    return blocks


def _block(offset: int, memories: list[tuple[int, memoryview]], num_bytes: int) -> DiskBlock:
    taken, left = [], num_bytes
    while left:
        address, memory = memories[0]
        part = memory[:left]
        taken.append((address, part))
        left -= len(part)
        memories[:1] = [(address + len(part), memory[len(part) :])] if len(part) < len(memory) else []
    is_aligned = len(taken) <= _MOST_BUFFERS and all(
        address % DISK_PAGE_BYTES == 0 == len(part) % DISK_PAGE_BYTES for address, part in taken
    )
    return DiskBlock(offset=offset, buffers=tuple(part for _, part in taken), num_bytes=num_bytes, is_aligned=is_aligned)


_MOST_TRIES = 8
"""A disk may move less than a page this often in a row before that is an error."""
_MODE = 0o600


class DiskFile(ABC):
    directory: Path
    num_bytes: int
    is_direct: bool
    """Whether bytes go between the disk and memory without the system's cache."""
    refusal: str | None
    """If not direct: why, and the cost."""

    def __init__(self) -> None:
        self._local = threading.local()

    @abstractmethod
    def extend(self, num_bytes: int) -> None:
        """Have room for so many bytes, at least as many as before."""

    @abstractmethod
    def _read_some(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Read up to the buffers' size, and return how many bytes."""

    @abstractmethod
    def _write_some(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Write up to the buffers' size, and return how many bytes."""

    @abstractmethod
    def _forget_cached(self, offset: int, num_bytes: int) -> None:
        """Drop the file's pages from the system's cache."""

    @abstractmethod
    def map(self, place: Range) -> memoryview:
        """Return bytes of the file as writable memory, which holds the file's room."""

    def settle_map(self, place: Range, mapped: memoryview) -> None:  # noqa: B027  # memory stands for the reference file
        """Have writes to such memory go to the disk, and take no room in host memory until the next use."""

    def note_free(self, place: Range) -> None:  # noqa: B027  # the reference file poisons it
        """Hear that bytes mean nothing any more."""

    @abstractmethod
    def close(self) -> None:
        """Give the room on the disk back. Calling it again does nothing."""

    def move(self, block: DiskBlock, *, is_read: bool) -> None:
        is_straight = block.is_aligned or not self.is_direct
        buffers = block.buffers if is_straight else (self._buffer(block.num_bytes),)
        pairs = [] if is_straight else [*_paired(block.buffers, buffers[0])]
        for memory, part in () if is_read else pairs:
            part[:] = memory
        self._move_all(self._read_some if is_read else self._write_some, buffers, block.offset)
        for memory, part in pairs if is_read else ():
            memory[:] = part
        if not self.is_direct:
            self._forget_cached(block.offset, block.num_bytes)

    def _buffer(self, num_bytes: int) -> memoryview:
        num_bytes = rounded(num_bytes, DISK_PAGE_BYTES)
        found: mmap.mmap | None = getattr(self._local, "buffer", None)
        if found is None or len(found) < num_bytes:
            found = self._local.buffer = mmap.mmap(-1, num_bytes)
        return memoryview(found)[:num_bytes]

    def _move_all(self, move: Callable[[Sequence[memoryview], int], int], buffers: Sequence[memoryview], offset: int) -> None:
        num_bytes, done, num_tries = sum(map(len, buffers)), 0, 0
        while done < num_bytes:
            moved = move(buffers if done == 0 else _behind(buffers, done), offset + done)
            if self.is_direct:  # only whole pages: the next ones have to begin at one
                moved -= moved % DISK_PAGE_BYTES
            num_tries = 0 if moved else num_tries + 1
            if num_tries == _MOST_TRIES:
                raise OSError(errno.EIO, f"only {done} of {num_bytes} bytes were moved")
            done += moved


def _paired(memories: Sequence[memoryview], buffer: memoryview) -> Iterator[tuple[memoryview, memoryview]]:
    for memory in memories:
        yield memory, buffer[: len(memory)]
        buffer = buffer[len(memory) :]


def _behind(buffers: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    left = []
    for memory in buffers:
        if num_bytes < len(memory):
            left.append(memory[num_bytes:])
        num_bytes = max(num_bytes - len(memory), 0)
    return left


class ScratchFile(DiskFile):
    """A file without a name, whose room is reserved at the start: the system takes it back when the process ends."""

    def __init__(self, directory: Path, num_bytes: int) -> None:
        super().__init__()
        self.directory, self.num_bytes = directory, num_bytes
        self.is_direct, self.refusal = False, None
        self._handle = -1
        try:
            self._handle = _open_unnamed(directory)
            self._reserve(0, num_bytes)
            self._go_direct()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise _refused(directory, num_bytes, error) from error
            raise

    def _reserve(self, start: int, end: int) -> None:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._handle, start, end - start)
        else:  # macOS: a full disk shows when it is written to
            os.ftruncate(self._handle, end)

    def extend(self, num_bytes: int) -> None:
        if num_bytes <= self.num_bytes:
            return
        try:
            self._reserve(self.num_bytes, num_bytes)
        except OSError as error:
            raise _refused(self.directory, num_bytes - self.num_bytes, error) from error
        self.num_bytes = num_bytes

    def _go_direct(self) -> None:
        """Bypass the system's cache, which would take host memory for all bytes moved, if the file system lets us."""
        self.is_direct = True
        try:
            if not hasattr(os, "O_DIRECT"):
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            self._set_direct(True)
            page = self._buffer(DISK_PAGE_BYTES)  # some file systems say no only when it comes to that
            self._move_all(self._write_some, (page,), 0)
            self._move_all(self._read_some, (page,), 0)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY):
                raise
            self.is_direct = False
            with contextlib.suppress(OSError, AttributeError):
                self._set_direct(False)
            self.refusal = (
                f"the file system of '{self.directory}' has no direct reads and writes (O_DIRECT: {error.strerror}), so that "
                "they go through the system's cache: slower, and host memory fills with it for moments. Use a directory on a "
                "local disk (ext4, xfs)"
            )

    def _set_direct(self, is_direct: bool) -> None:
        import fcntl  # not on Windows, which has no file of this kind either

        flags = fcntl.fcntl(self._handle, fcntl.F_GETFL)
        fcntl.fcntl(self._handle, fcntl.F_SETFL, flags | os.O_DIRECT if is_direct else flags & ~os.O_DIRECT)

    def map(self, place: Range) -> memoryview:
        start, end = place
        return memoryview(mmap.mmap(self._handle, end - start, offset=start))

    def settle_map(self, place: Range, mapped: memoryview) -> None:
        memory = mapped.obj
        assert isinstance(memory, mmap.mmap)
        memory.flush()
        if hasattr(mmap, "MADV_DONTNEED"):
            memory.madvise(mmap.MADV_DONTNEED)  # of a file's bytes that loses nothing
        self._forget_cached(place[0], place[1] - place[0])

    def _read_some(self, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(self._handle, buffers, offset)

    def _write_some(self, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(self._handle, buffers, offset)

    def _forget_cached(self, offset: int, num_bytes: int) -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._handle, offset, rounded(num_bytes, DISK_PAGE_BYTES), os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


def _open_unnamed(directory: Path) -> int:
    unnamed = getattr(os, "O_TMPFILE", None)
    if unnamed is not None:
        with contextlib.suppress(OSError):  # an old kernel or a file system without it: other errors show below
            return os.open(directory, unnamed | os.O_RDWR | os.O_CLOEXEC | os.O_EXCL, _MODE)
    handle, path = tempfile.mkstemp(prefix="memkit-", dir=directory)  # mode 0600, O_CLOEXEC
    try:
        os.unlink(path)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _refused(directory: Path, num_bytes: int, error: OSError) -> DiskError:
    free = ""
    with contextlib.suppress(OSError):
        stat = os.statvfs(directory)
        free = f" ({format_bytes(stat.f_bavail * stat.f_frsize)} are free)"
    return DiskError(
        f"a scratch file of {format_bytes(num_bytes)} is needed in '{directory}'; found: {error.strerror}{free}. "
        "Nothing was moved. Give another directory, make room in it, or put less on disk.",
        path=directory,
        errno=error.errno,
    )
