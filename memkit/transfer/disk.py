"""`Disk`: a directory and a limit; `DiskStore`: chunks in one file there, and the reads and writes that wait for their turn."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

from torch import Tensor

from memkit.core.forks import forked
from memkit.core.interrupts import mended
from memkit.core.sizes import DISK_PAGE_BYTES, check_budget_bytes, format_bytes, rounded
from memkit.device.base import Device, Event
from memkit.errors import DiskError, warn_user
from memkit.transfer.host_memory import Gaps, Range, Span

BLOCK_BYTES = 8 * 2**20  # the most to read or write at once: enough for full speed, and threads share one chunk
_MOST_BUFFERS = 512  # half of what Linux takes at once


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DiskBlock:
    offset: int
    buffers: tuple[memoryview, ...]
    num_bytes: int
    is_aligned: bool  # whether each buffer is whole pages from a page's multiple on, so that the disk may fill it itself


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


_MOST_TRIES = 8  # a disk may move less than a page this often in a row before that is an error
_MODE = 0o600


class DiskFile:
    """A file without a name, whose room is reserved at the start: the system takes it back when the process ends."""

    def __init__(self, directory: Path, num_bytes: int) -> None:
        self._local = threading.local()
        self.directory, self.num_bytes = directory, num_bytes
        self.is_direct = False  # whether bytes go between the disk and memory without the system's cache
        self.refusal: str | None = None
        self._handle = -1
        try:
            self._open()
            self._reserve(0, num_bytes)
            if not self.is_direct:
                self._go_direct()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise _refused(directory, num_bytes, error) from error
            raise

    def _open(self) -> None:
        self._handle = _open_unnamed(self.directory)

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

    def note_free(self, place: Range) -> None:
        """Hear that bytes mean nothing any more: the reference file poisons them."""

    def close(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    def move(self, block: DiskBlock, *, is_read: bool) -> None:
        is_straight = block.is_aligned or not self.is_direct
        buffers = block.buffers if is_straight else (self._buffer(block.num_bytes),)
        placed = zip(block.buffers, accumulate(map(len, block.buffers), initial=0), strict=False)
        pairs = [] if is_straight else [(memory, buffers[0][at : at + len(memory)]) for memory, at in placed]
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


def _behind(buffers: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    left = []
    for memory in buffers:
        if num_bytes < len(memory):
            left.append(memory[num_bytes:])
        num_bytes = max(num_bytes - len(memory), 0)
    return left


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


class DiskTransfer:
    def __init__(
        self,
        what: str,
        blocks: Sequence[DiskBlock],
        move: Callable[[DiskBlock], None],
        begin: Callable[[], None] | None = None,
        *,
        is_read: bool,
    ) -> None:
        self.what, self.blocks, self.move, self.is_read = what, blocks, move, is_read
        self.error: BaseException | None = None  # of the first block that failed; later blocks are not moved
        self._begin = begin
        self.is_beginning = False
        self._next = self._num_moving = 0

    @property
    def has_begun_all(self) -> bool:
        return self._next == len(self.blocks) or self.error is not None

    @property
    def is_over(self) -> bool:
        """Whether all is moved, or has failed and no block is under way any more."""
        return self.has_begun_all and not self._num_moving

    @property
    def may_move(self) -> bool:
        return self._begin is None and not self.is_beginning

    def take_step(self) -> Callable[[], None]:
        """Return the next piece of work, under the queue's lock. Call it without the lock, and then `end_step`."""
        self._num_moving += 1
        if self._begin is not None:
            begin, self._begin, self.is_beginning = self._begin, None, True
            return begin
        self._next += 1
        return partial(self.move, self.blocks[self._next - 1])

    def end_step(self, error: BaseException | None) -> None:
        """Note the end of a piece of work, or its error, under the queue's lock."""
        self.is_beginning = False
        self._num_moving -= 1
        self.error = self.error or error


class DiskQueue:
    """Transfers that a few threads work off side by side, several on one transfer."""

    def __init__(self, num_threads: int) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._waiting: deque[DiskTransfer] = deque()
        self._is_closed = False
        self._process = os.getpid()
        self._threads = [
            threading.Thread(target=self._work, name=f"memkit-disk-{number}", daemon=True) for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def _of_this_process(self) -> threading.Condition:
        if os.getpid() != self._process:
            raise forked("a feature of memkit")
        return self._changed

    def put(self, transfer: DiskTransfer) -> None:
        assert not self._is_closed
        with self._of_this_process():
            self._waiting.append(transfer)
            self._changed.notify_all()

    def wait(self, transfer: DiskTransfer) -> None:
        with self._of_this_process():
            self._changed.notify_all()  # an interrupt may have kept `put` from it
            self._changed.wait_for(lambda: transfer.is_over)

    def cancel(self, transfer: DiskTransfer) -> None:
        with self._of_this_process():
            transfer.error = transfer.error or KeyboardInterrupt()
            if transfer in self._waiting:
                self._waiting.remove(transfer)
            self._changed.wait_for(lambda: transfer.is_over)

    def close(self) -> None:
        if os.getpid() != self._process:
            return  # a fork has no threads, and perhaps a lock that one of them held
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                while (transfer := next((found for found in self._waiting if not found.is_beginning), None)) is None:
                    if self._is_closed and not self._waiting:
                        return
                    self._changed.wait()
                step = transfer.take_step()
                if transfer.has_begun_all:
                    self._waiting.remove(transfer)
            error: BaseException | None = None
            try:
                step()
            except BaseException as raised:
                error = raised
            del step
            with self._changed:
                transfer.end_step(error)
                if transfer.error is not None and transfer in self._waiting:
                    self._waiting.remove(transfer)
                self._changed.notify_all()
            del transfer, error


class DiskCopy:
    def __init__(self, name: str, num_bytes: int) -> None:
        self.name, self.num_bytes = name, num_bytes
        self.places: tuple[tuple[Range, ...], tuple[Range, ...]] = (), ()  # in the file: of the last whole write, and under way
        self.transfer: DiskTransfer | None = None

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is under way, and the last read or write has not failed."""
        transfer = self.transfer
        return transfer is None or (transfer.is_over and transfer.error is None)

    def __repr__(self) -> str:
        return f'<DiskCopy of "{self.name}", {format_bytes(self.num_bytes)}>'


class DiskStore:
    """Chunks that lie in one file. Its methods may be called from several threads.

    [Note: new extent, then the flip] A write goes to free room in the file. Only when all its bytes are there does that room
    become the chunk's place, by one assignment, and its place before is free. So a write that fails or is broken off loses
    nothing on disk. The caller keeps the bytes in memory until it knows that the write has ended well: `wait`, which it owes
    each transfer, raises its error. If Ctrl-C breaks off a request, the transfer has not begun, or is `DiskCopy.transfer`.
    """

    def __init__(self, file: DiskFile, queue: DiskQueue, device: Device) -> None:
        self.file = file
        self.lock = threading.RLock()
        self.is_broken = False
        self.read_bytes = self.written_bytes = 0
        self._queue, self._device, self._block_bytes = queue, device, BLOCK_BYTES
        self._copies: dict[int, DiskCopy] = {}
        self._moving: dict[int, DiskCopy] = {}
        self._gaps = Gaps()
        self._gaps.ranges = [(0, file.num_bytes)]
        self._beginning: DiskCopy | None = None
        self._is_closed = False
        self._shut = weakref.finalize(self, _shut, queue, file)

    @property
    def in_use_bytes(self) -> int:
        return self.file.num_bytes - self._gaps.num_bytes

    @property
    def sizes(self) -> list[int]:
        return [copy.num_bytes for copy in self._copies.values()]

    def has(self, copy: DiskCopy) -> bool:
        return self._copies.get(id(copy)) is copy

    @mended
    def extend(self, num_bytes: int) -> None:
        before = self.file.num_bytes
        self.file.extend(num_bytes)
        if num_bytes > before:
            self._gaps.free((before, num_bytes))

    @mended
    def add(self, name: str, num_bytes: int) -> DiskCopy:
        assert num_bytes > 0
        copy = DiskCopy(name, num_bytes)
        self._copies[id(copy)] = copy
        return copy

    @mended
    def map(self, copy: DiskCopy) -> memoryview:
        """Give a chunk a place that it keeps, and return its bytes as memory, which holds the room on the disk."""
        assert not copy.places[0]
        ranges = self._gaps.take(rounded(copy.num_bytes, DISK_PAGE_BYTES))
        if not ranges:
            raise DiskError(f'"{copy.name}" has no room in one place in the scratch file', path=self.file.directory)
        copy.places = ranges, ()
        return self.file.map(ranges[0])

    def settle_map(self, copy: DiskCopy, mapped: memoryview) -> None:
        self.file.settle_map(copy.places[0][0], mapped)

    @mended
    def remove(self, copy: DiskCopy) -> None:
        self._end_transfer(copy)
        del self._copies[id(copy)]
        self._moving.pop(id(copy), None)
        freed, copy.places = copy.places[0], ((), ())
        self._free(freed)

    @mended
    def keep_only(self, copies: Iterable[DiskCopy]) -> None:
        kept = {*map(id, copies)}
        for copy in [copy for key, copy in self._copies.items() if key not in kept]:
            self.remove(copy)

    @mended
    def write(self, copy: DiskCopy, span: Span, *, after: Sequence[Event] = ()) -> None:
        """Begin to write a chunk to a new place, once `after` is reached. The span stays unchanged until `wait` returns."""
        self._prepare(copy, span)
        size = rounded(copy.num_bytes, DISK_PAGE_BYTES)
        if self._gaps.num_bytes < size:
            self._settle_all(must_wait=True)
        if self._gaps.num_bytes < size:
            raise DiskError(
                f"\"{copy.name}\" needs {format_bytes(size)} of the scratch file in '{self.file.directory}', beside what "
                f"it has there until that is written; found {format_bytes(self._gaps.num_bytes)} of "
                f"{format_bytes(self.file.num_bytes)} free. Reserve more for it, or write fewer chunks at once.",
                path=self.file.directory,
            )
        copy.places = copy.places[0], self._gaps.take(size, scatters=True)
        self.written_bytes += copy.num_bytes
        self._put(copy, span, copy.places[1], after, is_read=False)

    @mended
    def read(self, copy: DiskCopy, span: Span, *, after: Sequence[Event] = ()) -> None:
        """Begin to read a chunk, once `after` is reached. Until `wait` has returned, the span's bytes mean nothing."""
        self._prepare(copy, span)
        assert copy.places[0], f'"{copy.name}" is read, and was never written'
        self.read_bytes += copy.num_bytes
        self._put(copy, span, copy.places[0], (*span.free_events, *after), is_read=True)

    def wait(self, copy: DiskCopy) -> None:
        transfer = self._transfer_of(copy)
        if transfer is not None:
            self._queue.wait(transfer)  # without the lock: others may begin more meanwhile
            self._note_end(copy, transfer)

    @mended
    def _transfer_of(self, copy: DiskCopy) -> DiskTransfer | None:
        return copy.transfer

    @mended
    def _note_end(self, copy: DiskCopy, transfer: DiskTransfer) -> None:
        if copy.transfer is transfer:
            self._settle(copy)
        self._raise_error(transfer)

    @mended
    def close(self) -> None:
        self._shut()
        self._is_closed = True

    def _prepare(self, copy: DiskCopy, span: Span) -> None:
        assert not self._is_closed, "the disk store is closed"
        assert span.num_bytes == copy.num_bytes
        self._settle_all(must_wait=False)
        self._end_transfer(copy)
        self._forget_transfer(copy)

    def _end_transfer(self, copy: DiskCopy) -> None:
        assert self._copies.get(id(copy)) is copy, "a disk copy of another store, or one that was removed"
        if copy.transfer is not None:
            self._queue.wait(copy.transfer)
            self._settle(copy)

    def _put(self, copy: DiskCopy, span: Span, ranges: Sequence[Range], after: Sequence[Event], *, is_read: bool) -> None:
        begin = partial(_await, self._device, after) if after else None
        what = f'{"reading" if is_read else "writing"} "{copy.name}" ({format_bytes(copy.num_bytes)})'
        blocks = cut_in_blocks(ranges, span.pieces, block_bytes=self._block_bytes)
        self._beginning = self._moving[id(copy)] = copy
        copy.transfer = DiskTransfer(what, blocks, partial(self.file.move, is_read=is_read), begin, is_read=is_read)
        self._queue.put(copy.transfer)
        self._beginning = None

    def _settle_all(self, *, must_wait: bool) -> None:
        for copy in tuple(self._moving.values()):
            assert copy.transfer is not None
            if must_wait:
                self._queue.wait(copy.transfer)
            if copy.transfer.is_over:
                self._settle(copy)

    def _settle(self, copy: DiskCopy) -> None:
        assert copy.transfer is not None
        here, there = copy.places
        if copy.transfer.error is not None:
            copy.places, freed = (here, ()), there
        elif there:
            copy.places, freed = (there, ()), here
        else:
            freed = ()
        self._free(freed)
        if copy.transfer.error is None:
            self._forget_transfer(copy)

    def _forget_transfer(self, copy: DiskCopy) -> None:
        copy.transfer = None
        self._moving.pop(id(copy), None)

    def _free(self, places: Iterable[Range]) -> None:
        for place in places:
            if not self._is_closed:
                self.file.note_free(place)
            self._gaps.free(place)

    def mend(self) -> None:
        """Undo a request that an interrupt has broken off, and derive the gaps from the chunks' places."""
        copy = self._beginning
        if copy is not None and copy.transfer is not None:
            self._queue.cancel(copy.transfer)
            copy.transfer = None
        self._beginning = None
        self._moving = {key: copy for key, copy in self._copies.items() if copy.transfer is not None}
        self._gaps.ranges = [(0, self.file.num_bytes)]
        for copy in self._copies.values():
            if copy.transfer is None:
                copy.places = copy.places[0], ()
            for place in (*copy.places[0], *copy.places[1]):
                self._gaps.cut(place)
        self.is_broken = False

    def _raise_error(self, transfer: DiskTransfer) -> None:
        error = transfer.error
        if error is None:
            return
        if not isinstance(error, OSError):
            raise error
        raise DiskError(
            f"{transfer.what} failed, in the scratch file in '{self.file.directory}': {error.strerror}. What was on disk of it "
            "before is still there. Look at what the system says of the disk (dmesg), or use another directory.",
            path=self.file.directory,
            errno=error.errno,
        ) from error


def _await(device: Device, events: Sequence[Event]) -> None:
    device.enter_thread()
    for event in events:
        device.synchronize(event)


def _shut(queue: DiskQueue, file: DiskFile) -> None:
    queue.close()
    file.close()


@dataclass(frozen=True)
class Disk:
    """A directory on a local disk, and how much memkit may write there.

    The bytes go to one scratch file without a name, which no other user can open, and which the system removes when the process
    ends, in any way. It is no checkpoint. Its bytes stay on the medium until others overwrite them.

    A directory in memory (tmpfs, often `/tmp`) frees no host memory, and one on a network is slow.

    Args:
        directory: an existing one. If all users may write there, the sticky bit must be set, as in `/tmp`.
        limit: the most that may be there, as a number of bytes or as text such as "200GiB"; None for all free room.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: there is no such directory, other users could replace files in it, or the limit is no size.

    Example:
        >>> import tempfile, memkit
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     memkit.Disk(directory, limit="200GiB").limit
        214748364800
    """

    directory: Path
    limit: int | None

    def __init__(self, directory: str | os.PathLike[str], *, limit: int | str | None = None) -> None:
        if not isinstance(directory, str | os.PathLike):
            raise TypeError(f'Disk needs a directory, such as "/scratch"; found {directory!r}')
        path = Path(directory).absolute()
        object.__setattr__(self, "directory", path)
        object.__setattr__(self, "limit", None if limit is None else check_budget_bytes("limit", limit))
        self._check()

    def _check(self) -> None:
        if not hasattr(os, "preadv"):
            raise ValueError("Disk needs reads into given memory (os.preadv), which this system has not. Use Linux or macOS")
        if not self.directory.is_dir():
            raise ValueError(f"Disk needs a directory; found none at '{self.directory}'. Make it first")
        mode = self.directory.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise ValueError(
                f"Disk: all users may write in '{self.directory}', and replace each other's files (mode "
                f"{stat.S_IMODE(mode):o}). Use another directory, or set the sticky bit: chmod +t '{self.directory}'"
            )

    def open(self, num_bytes: int, device: Device, *, num_threads: int = 4) -> DiskStore:
        """Return a store for at most so many bytes of chunks, each rounded up to 4 KiB and counted twice while being
        written. Raises DiskError if the limit, or the free room on the disk, is less. Warns if all must go through the
        system's cache."""
        file = self._make_file(self._allowed(num_bytes))
        if file.refusal is not None:
            warn_user(f"Disk: {file.refusal}")
        return DiskStore(file, self._make_queue(num_threads), device)

    def extend(self, store: DiskStore, num_bytes: int) -> None:
        """Have a store that was opened here have room for so many bytes. Raises DiskError as `open` does."""
        store.extend(self._allowed(num_bytes))

    def _allowed(self, num_bytes: int) -> int:
        num_bytes = rounded(num_bytes, DISK_PAGE_BYTES)
        if self.limit is not None and num_bytes > self.limit:
            raise DiskError(
                f"{format_bytes(num_bytes)} are needed in '{self.directory}'; found limit={format_bytes(self.limit)}. "
                "Nothing was moved. Raise the limit, or put less on disk.",
                path=self.directory,
            )
        return num_bytes

    def _make_file(self, num_bytes: int) -> DiskFile:
        return DiskFile(self.directory, num_bytes)

    def _make_queue(self, num_threads: int) -> DiskQueue:
        return DiskQueue(num_threads)
