"""Which backward runs, when it comes to what, and when it ends.

Autograd numbers its backwards: `torch_private.backward_task()` is the number of the one that runs in this thread, -1 outside of
one. What follows them notes the number, and is told of the end here.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memkit import torch_private


class BackwardEnd:
    """Tells when a backward is over: see `on_end`.

    The engine alone holds a callback: not even the frames of a traceback that the caller keeps do. It is called when the
    backward has ended well. Where that fails, or the backward does, the engine drops it, which tells as much.

    Source: DistributedDataParallel, which has the engine call it so.
    """

    __slots__ = ("_held", "_hook")

    def __init__(self, hook: Callable[[bool], None]) -> None:
        self._hook: Callable[[bool], None] | None = hook
        callback = functools.partial(self._tell, False)
        self._held = weakref.ref(callback, lambda _: self._tell(True))
        torch_private.engine.queue_callback(callback)

    @property
    def is_over(self) -> bool:
        """Whether the backward is over, also where an interrupt has kept the hook from hearing of it."""
        return self._hook is None or self._held() is None

    def _tell(self, has_failed: bool) -> None:
        hook = self._hook
        if hook is not None:
            hook(has_failed)
            self._hook = None  # last, so that the hook hears of it if it was interrupted itself


def on_end(hook: Callable[[bool], None]) -> BackwardEnd:
    """Call `hook(has_failed)` once the backward that runs in this thread is over, however that is.

    Where `hook(False)` raises, the backward fails by that, and `hook(True)` is called as well, which ends what that has begun.
    """
    return BackwardEnd(hook)


_IS_OUTPUT = "memkit.output"


def before(outputs: object, hook: Callable[[object], None]) -> bool:
    """Call `hook(gradients)` each time the autograd engine has a gradient of one of the tensors in `outputs`, a tensor or
    tensors in tuples, lists, dictionaries and whatever else `torch.utils._pytree` knows. The graph keeps the hook.

    What has come through from an earlier call, and was among its outputs, is left to that one.

    Returns:
        Whether there is any such tensor.
    """
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
    """Return the node that adds to a parameter's gradient: a new one if no graph that is alive has used it as it is now.

    Source: `torch.autograd.graph.get_gradient_edge`.
    """
    with torch.enable_grad(), torch_private.without_dispatch_modes():
        return torch.autograd.graph.get_gradient_edge(parameter).node
