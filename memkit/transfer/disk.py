"""`Disk`: which directory may be written to, how much, and from there to a store of chunks."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from memkit.device.base import Device
from memkit.errors import DiskError, warn_user
from memkit.sizes import check_budget_bytes, format_bytes
from memkit.transfer.blocks import DISK_PAGE_BYTES
from memkit.transfer.disk_queue import DiskQueue, DiskThreads
from memkit.transfer.disk_store import DiskStore
from memkit.transfer.scratch import DiskFile, ScratchFile
from memkit.transfer.spans import rounded


@dataclass(frozen=True)
class Disk:
    """A directory on a local disk, and how much memkit may write there.

    What goes there is in one scratch file without a name, which no other user can open, and which the system removes when the
    process ends, in whatever way. It is no checkpoint. Its bytes stay on the medium until something else is written over them.

    A directory in memory (tmpfs, often `/tmp`) frees no host memory, and one on a network is slow.

    Args:
        directory: where. If all users may write there, the sticky bit must be set, as in `/tmp`.
        limit: the most that may be there, as a number of bytes or as text such as "200GiB"; None for as much as is free.

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

    def open(self, num_bytes: int, device: Device, *, num_threads: int = 4, waits_for_all: bool = False) -> DiskStore:
        """Return a store of chunks that together take at most so many bytes, each rounded up to 4 KiB, with those that are
        being written counted twice. Warns if reads and writes must go through the system's cache.

        Args:
            num_bytes: these.
            device: whose events tell when bytes in host memory are ready.
            num_threads: that read and write.
            waits_for_all: whether errors are raised by `DiskStore.wait` alone.

        Raises:
            DiskError: the limit, or what is free on the disk, is less; or the system makes no file there.
        """
        file = self._make_file(self._allowed(num_bytes))
        if file.refusal is not None:
            warn_user(f"Disk: {file.refusal}")
        return DiskStore(file, self._make_queue(num_threads), device, waits_for_all=waits_for_all)

    def extend(self, store: DiskStore, num_bytes: int) -> None:
        """Have a store that was opened here have room for so many bytes.

        Raises:
            DiskError: the limit, or what is free on the disk, is less.
        """
        store.extend(self._allowed(num_bytes))

    def _allowed(self, num_bytes: int) -> int:
        """Return a number of bytes in whole pages, if the limit allows as many."""
        num_bytes = rounded(num_bytes, DISK_PAGE_BYTES)
        if self.limit is not None and num_bytes > self.limit:
            raise DiskError(
                f"{format_bytes(num_bytes)} are needed in '{self.directory}'; found limit={format_bytes(self.limit)}. "
                "Nothing was moved. Raise the limit, or put less on disk.",
                path=self.directory,
            )
        return num_bytes

    def _make_file(self, num_bytes: int) -> DiskFile:
        return ScratchFile(self.directory, num_bytes)

    def _make_queue(self, num_threads: int) -> DiskQueue:
        return DiskThreads(num_threads)
