"""Looks at stacks: of frames, and of a thread's saved-tensor hooks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

from torch import Tensor

from memkit import torch_private


def take_off(pack: Callable[[Tensor], object]) -> bool:
    """Remove the hooks with this pack function, even below others; return whether they were on."""
    top = torch_private.top_saved_tensor_hooks(True)
    above = []
    while top is not None and top[0] is not pack:
        above.append(top)
        torch_private.pop_saved_tensor_hooks()
        top = torch_private.top_saved_tensor_hooks(True)
    if top is not None:
        torch_private.pop_saved_tensor_hooks()
    for pair in reversed(above):
        torch_private.push_saved_tensor_hooks(*pair)
    return top is not None


def is_on_stack(frame: FrameType | None, start: FrameType | None) -> bool:
    """Tell whether `frame` is `start`, or one of its callers."""
    while start is not None and start is not frame:
        start = start.f_back
    return start is not None


def is_going_on(frame: FrameType) -> bool:
    """Tell whether a frame is on the stack of any thread."""
    return any(is_on_stack(frame, start) for start in sys._current_frames().values())
