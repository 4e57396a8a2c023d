"""A forked process has no threads, and zeros in memkit's host memory: it can't use the objects of its parent."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

from memkit.errors import ForkedError


class OwnThreads(ThreadPoolExecutor):
    are_here = True

    def __init__(self, num_threads: int, name: str, begin: Callable[[], object]) -> None:
        super().__init__(num_threads, name, begin)
        _all.add(self)


class _Elsewhere(OwnThreads):
    """Such threads in a fork, told by their class, so that no call of a steady step has to ask."""

    are_here = False

    def submit(self, *_: Any, **__: Any) -> NoReturn:
        raise forked("a feature of memkit")

    def shutdown(self, *_: Any, **__: Any) -> None:
        pass


def forked(what: str) -> ForkedError:
    return ForkedError(
        f"{what} can't be used in process {os.getpid()}, which was forked: its threads and its host memory stay in the parent. "
        'Use it in the parent, start workers by "spawn", or fork before you create it'
    )


_all = weakref.WeakSet[OwnThreads]()


def _note_fork() -> None:
    for threads in _all:
        threads.__class__ = _Elsewhere


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)
