"""Which backward is running, when it reaches a tensor, and when it ends.

Autograd numbers its backwards: `torch_private.backward_task()` is the number of the one that runs in this thread, -1 outside of
one. Whoever keeps state for a backward keeps it under this number, and registers with `on_end` to hear of the end.

[Note: backwards that have failed and are not over] The engine has a thread for each device but the host, whose part runs in
the thread that calls `backward()`. Where a node of that part fails, `backward()` raises at once, while the other threads are
still at the node that each has begun: until these are done the backward is not over, and hooks of it run beside what the caller
does next. So whoever is about to change what such hooks change waits for them first: `BackwardEnd.join`. A backward that is
not over after a minute is taken for one that another thread runs, and that may wait for who waits here.
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
    """Tells when a backward is over: see `on_end`. The engine calls its callbacks when a backward has succeeded, and drops them
    when it, or one of them, has failed. It alone holds this one, so the death of the callback means a failure. Source:
    DistributedDataParallel, which queues its callback the same way."""

    __slots__ = ("_among", "_held", "_hook", "_lock")

    def __init__(self, hook: Callable[[bool], None], among: set[BackwardEnd] | None) -> None:
        self._among = among
        self._hook: Callable[[bool], None] | None = hook
        self._lock = threading.RLock()
        callback = functools.partial(self._tell, False)
        self._held = weakref.ref(callback, lambda _: self._tell(True))
        torch_private.engine.queue_callback(callback)
        del callback  # an interrupt's traceback would hold it with this frame, and who waits for its death would wait for ever
        if among is not None:
            among.add(self)

    @property
    def is_over(self) -> bool:
        """Whether the backward is over, even if an interrupt kept the hook from being called."""
        return self._hook is None or self._held() is None

    def join(self) -> bool:
        """Make this thread wait until the backward is over and no thread is in the hook; return whether it is over. A hook that
        an interrupt has kept from being called is not called any more. Within a backward, which may be this one, nothing is
        waited for."""
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
    """Call `hook(has_failed)` once the backward that runs in this thread is over. If `hook(False)` raises, the backward fails
    with that error, and `hook(True)` is called as well, to finish the clean-up."""
    return BackwardEnd(hook, among)


def pass_through(torch_device: torch.device) -> None:
    """Run a backward of a tensor on a device within the one that runs: the engine puts it ahead of all else, so once it is
    over, the engine's thread for the device has ended the node that it was at."""
    with torch_private.without_dispatch_modes(), torch.inference_mode(False), torch.enable_grad():
        leaf = torch.zeros((), device=torch_device, requires_grad=True)
        torch.autograd.grad(leaf.clone(), leaf)


def join(ends: Iterable[BackwardEnd]) -> bool:
    """Make this thread wait until backwards are over, as `BackwardEnd.join` does. Return whether they are."""
    return all(end.join() for end in tuple(ends))


_IS_OUTPUT = "memkit.output"


def before(outputs: object, hook: Callable[[object], None]) -> bool:
    """Call `hook(gradients)` each time autograd has a gradient of one of the tensors in `outputs`, a pytree; return whether
    there is any. The graph keeps the hook. A tensor that was among the outputs of an earlier call keeps the hook of that
    call."""
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


def gradient_node(parameter: Tensor) -> Any:
    """Return the `AccumulateGrad` node of a parameter: a new one if no live graph has used the parameter as it is now."""
    with torch.enable_grad(), torch_private.without_dispatch_modes():
        return torch.autograd.graph.get_gradient_edge(parameter).node
