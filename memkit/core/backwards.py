"""Which backward is running, when it reaches a tensor, and when it ends.

State of a backward is kept under its number, `torch_private.backward_task()` (-1 outside of one); `on_end` tells its owner of
the end.

[Note: backwards that have failed and are not over] If a node of the host's thread fails, `backward()` raises at once, while the
engine's threads for devices finish the nodes that they have begun, and hooks run beside the caller's next code. So code that
changes what such hooks change waits for them first: `BackwardEnd.join`. A backward that is not over after a minute is taken for
one of another thread, which may itself wait for this one.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from memkit.core import torch_private

_POLL_S, _MOST_S = 1e-4, 60.0


class BackwardEnd:
    """Tells when a backward is over: see `on_end`. The engine calls its callbacks after a success, else it drops them, and it
    alone holds this one: its death means a failure. Source: DistributedDataParallel queues its callback the same way."""

    __slots__ = ("_among", "_held", "_hook", "_lock")

    def __init__(self, hook: Callable[[bool], None], among: set[BackwardEnd] | None) -> None:
        self._among = among
        self._hook: Callable[[bool], None] | None = hook
        self._lock = threading.RLock()
        callback = functools.partial(self._tell, False)
        self._held = weakref.ref(callback, lambda _: self._tell(True))
        torch_private.engine.queue_callback(callback)
        del callback  # an interrupt's traceback would hold it with this frame, and a wait for its death would never end
        if among is not None:
            among.add(self)

    @property
    def is_over(self) -> bool:
        return self._hook is None or self._held() is None

    def join(self) -> bool:
        """Wait until the backward is over, and its hook ran or never will; return whether. Within a backward don't wait."""
        if torch_private.backward_task() != -1:
            return self.is_over
        most_s = time.monotonic() + _MOST_S
        while self._hook is not None and self._held() is not None:
            if time.monotonic() > most_s:
                return False
            time.sleep(_POLL_S)
        with self._lock:
            self._hook = None
        if self._among is not None:
            self._among.discard(self)
        return True

    def _tell(self, has_failed: bool) -> None:
        with self._lock:
            hook = self._hook
            if hook is not None:
                hook(has_failed)
                self._hook = None  # last, so that the hook hears of it if it was interrupted itself
                if self._among is not None:
                    self._among.discard(self)


def on_end(hook: Callable[[bool], None], *, among: set[BackwardEnd] | None = None) -> BackwardEnd:
    """Call `hook(has_failed)` once this thread's backward is over; `hook(True)` also if `hook(False)` raised, so fails it."""
    return BackwardEnd(hook, among)


def pass_through(torch_device: torch.device) -> None:
    """Run a small backward within the current one: the engine's thread for the device then has ended the node it was at."""
    with torch_private.without_dispatch_modes(), torch.inference_mode(False), torch.enable_grad():
        leaf = torch.zeros((), device=torch_device, requires_grad=True)
        torch.autograd.grad(leaf.clone(), leaf)


def join(ends: Iterable[BackwardEnd]) -> bool:
    return all(end.join() for end in tuple(ends))


_IS_OUTPUT = "memkit.output"


def before(outputs: object, hook: Callable[[object], None]) -> bool:
    """Call `hook(gradients)` each time autograd has one of a tensor in `outputs`, a pytree; return whether there is any."""
    is_any = False
    tensors = (outputs,) if isinstance(outputs, Tensor) else torch_private.tree_leaves(outputs)
    for tensor in tensors:
        node = tensor.grad_fn if isinstance(tensor, Tensor) else None
        if node is not None:
            metadata: Any = node.metadata  # torch says that it is a method
            if _IS_OUTPUT not in metadata:
                metadata[_IS_OUTPUT] = True
                node.register_prehook(hook)
                is_any = True
    return is_any
