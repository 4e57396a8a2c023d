"""Reads and writes of a file that wait for their turn, and the threads that do them."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from memkit.forks import forked
from memkit.transfer.blocks import Block


class DiskTransfer:
    """All bytes of one chunk on their way from or to a file.

    Args:
        what: says what is done with which chunk, for errors.
        blocks: what is moved.
        move: moves one of them, in any thread.
        begin: what to wait for before the first, in one of the threads that move them.
        is_read: whether memory is written to.
    """

    __slots__ = ("_begin", "_is_beginning", "_next", "_num_moving", "blocks", "error", "is_read", "is_told", "move", "what")

    def __init__(
        self,
        what: str,
        blocks: Sequence[Block],
        move: Callable[[Block], None],
        begin: Callable[[], None] | None = None,
        *,
        is_read: bool,
    ) -> None:
        self.what, self.blocks, self.move, self.is_read = what, blocks, move, is_read
        self.error: BaseException | None = None
        """What the first block has raised that failed. Those that had not begun then are not moved."""
        self.is_told = False
        """Whether the caller knows of the error."""
        self._begin = begin
        self._is_beginning = False
        self._next = self._num_moving = 0

    @property
    def has_begun_all(self) -> bool:
        """Whether no block is left to begin."""
        return self._next == len(self.blocks) or self.error is not None

    @property
    def is_over(self) -> bool:
        """Whether all is moved, or has failed and nothing is under way any more."""
        return self.has_begun_all and not self._num_moving

    @property
    def is_beginning(self) -> bool:
        """Whether a thread waits for what the first block waits for, so that there is nothing to do for others yet."""
        return self._is_beginning

    @property
    def may_move(self) -> bool:
        """Whether nothing has to be waited for ahead of the first block, or not any more."""
        return self._begin is None and not self._is_beginning

    def take_step(self) -> Callable[[], None]:
        """Take what is to be done next, under the queue's lock; it is to be called without, and then `end_step`."""
        self._num_moving += 1
        if self._begin is not None:
            begin, self._begin, self._is_beginning = self._begin, None, True
            return begin
        self._next += 1
        return partial(self.move, self.blocks[self._next - 1])

    def end_step(self, error: BaseException | None) -> None:
        """Note that it is done, or what it has raised, under the queue's lock."""
        self._is_beginning = False
        self._num_moving -= 1
        self.error = self.error or error


class DiskQueue(ABC):
    """Moves blocks, in the order in which transfers were put."""

    @abstractmethod
    def put(self, transfer: DiskTransfer) -> None:
        """Have a transfer done, behind those that were put before. Does not wait."""

    @abstractmethod
    def wait(self, transfer: DiskTransfer) -> None:
        """Wait until a transfer is over."""

    @abstractmethod
    def cancel(self, transfer: DiskTransfer) -> None:
        """Have a transfer end that may have been put or not: no more blocks of it are moved. Waits for those under way."""

    @abstractmethod
    def close(self) -> None:
        """Have all transfers end, and then every thread. Calling it again does nothing, or what an interrupt has prevented."""


class DiskThreads(DiskQueue):
    """A queue that a few threads work off side by side, several on one transfer."""

    def __init__(self, num_threads: int) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting: deque[DiskTransfer] = deque()
        """Those with blocks that no thread has begun."""
        self._is_closed = False
        self._process = os.getpid()
        self._threads = [
            threading.Thread(target=self._work, name=f"memkit-disk-{number}", daemon=True) for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, transfer: DiskTransfer) -> None:
        assert not self._is_closed
        if os.getpid() != self._process:
            raise forked("a feature of memkit")
        with self._lock:
            self._waiting.append(transfer)
            self._changed.notify_all()

    def wait(self, transfer: DiskTransfer) -> None:
        if os.getpid() != self._process:
            raise forked("a feature of memkit")
        with self._lock:
            self._changed.notify_all()  # an interrupt may have kept `put` from it
            while not transfer.is_over:
                self._changed.wait()

    def cancel(self, transfer: DiskTransfer) -> None:
        if os.getpid() != self._process:
            raise forked("a feature of memkit")
        with self._lock:
            transfer.error = transfer.error or KeyboardInterrupt()
            if transfer in self._waiting:
                self._waiting.remove(transfer)
            while not transfer.is_over:
                self._changed.wait()

    def close(self) -> None:
        if os.getpid() != self._process:
            return  # a fork has no threads, and perhaps a lock that one of them held
        with self._lock:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._lock:
                while (transfer := self._ready()) is None:
                    if self._is_closed and not self._waiting:
                        return
                    self._changed.wait()
                step = transfer.take_step()
                if transfer.has_begun_all:
                    self._waiting.remove(transfer)
            error: BaseException | None = None
            try:
                step()
            except BaseException as raised:  # it is told at the next call
                error = raised
            del step
            with self._lock:
                transfer.end_step(error)
                if transfer.error is not None and transfer in self._waiting:
                    self._waiting.remove(transfer)
                self._changed.notify_all()
            del transfer, error

    def _ready(self) -> DiskTransfer | None:
        """Return the first transfer with something to do now."""
        return next((transfer for transfer in self._waiting if not transfer.is_beginning), None)
