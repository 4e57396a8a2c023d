"""A hook on the steps of all optimizers, which torch keeps until it is removed: it goes with whoever holds it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle


class StepHook:
    """Calls `hook(optimizer)` before each step of every optimizer, once it is `set`, until it is removed or dropped.

    torch refers to neither this nor the hook, so that they may belong to what they hold. If this is dropped within a step, what
    torch has in their place does nothing and goes when the next is set: torch goes through all hooks of its kind there, and
    fails if one goes meanwhile.
    """

    def __init__(self, hook: Callable[[torch.optim.Optimizer], None]) -> None:
        self.hook = hook
        self._handle: RemovableHandle | None = None

    def set(self) -> None:
        """Have the hook be called from now on. Whoever removes this holds it by then, so that an interrupt leaves no hook."""
        _remove_left()
        self._handle = register_optimizer_step_pre_hook(partial(_call, weakref.ref(self)))
        weakref.finalize(self, _remove_outside_of_steps, self._handle).atexit = False

    def remove(self) -> None:
        """Have the hook be called no more, but not within a call of it. Calling this again does nothing."""
        if self._handle is not None:
            self._handle.remove()


def _call(reference: weakref.ref[StepHook], optimizer: torch.optim.Optimizer, *_: object) -> None:
    found = reference()
    if found is not None:
        found.hook(optimizer)


def put_last(handle: RemovableHandle) -> None:
    """Have a hook run behind all others of its kind, also those that were set since."""
    hook: Any = handle
    hook.hooks_dict_ref().move_to_end(hook.id)


_STEP = torch.optim.Optimizer.profile_hook_step(lambda _: None).__code__
"""What calls the hooks around every step."""

_left: list[RemovableHandle] = []
"""Hooks that were dropped within a step. They do nothing any more, and go when the next is set."""


def _remove_outside_of_steps(handle: RemovableHandle) -> None:
    """Remove the hook of what has died: garbage may be collected within a step, or in another thread beside one."""
    _left.append(handle)
    if not any(map(_is_in_step, sys._current_frames().values())):
        _remove_left()


def _is_in_step(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not _STEP:
        frame = frame.f_back
    return frame is not None


def _remove_left() -> None:
    while _left:
        _left[-1].remove()
        _left.pop()
