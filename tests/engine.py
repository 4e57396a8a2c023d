"""The threads that autograd's engine has for devices, and what stands in for them where only the host computes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from memkit.core import torch_private


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


def let_go_of_last_backward(torch_device: torch.device) -> None:
    """Have autograd's thread for a GPU be done with all backwards until now; elsewhere there is none.

    `backward()` returns when that thread has told of its end, which is ahead of its letting go: of the modes and hooks that
    were on as the backward began, and of the error that has broken it off, with the frames in its traceback and the graph in
    these. For that it needs Python's lock, which the caller may keep for long. It takes up nothing else before.

    Source: `Engine::thread_main` in torch/csrc/autograd/engine.cpp.
    """
    if torch_device.type != "cpu":
        torch.ones(1, device=torch_device, requires_grad=True).sum().backward()
