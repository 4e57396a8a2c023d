"""Stands in for the threads that the engine has for devices, where only the host computes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from memkit import torch_private


class LateThread:
    """A thread of the engine that is still at a node when `backward()` has raised: until it leaves, no backward is over."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._held = list[object]()
        self._threads = list[threading.Thread]()
        queue = torch_private.engine.queue_callback

        def queue_and_hold(callback: object) -> None:
            queue(callback)
            self._held.append(callback)  # as the thread holds the backward

        patch.setattr(torch_private, "engine", SimpleNamespace(queue_callback=queue_and_hold))

    def leave(self, ahead: Callable[[], object] = int, *, after_s: float = 0.0) -> None:
        """Have it do something at the node, some seconds from now, and then leave it."""

        def run() -> None:
            time.sleep(after_s)
            ahead()
            while self._held:
                self._held.pop()

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()

    def join(self) -> None:
        """Make the caller wait until it has left."""
        for thread in self._threads:
            thread.join()
