"""Which optimizers have a `StateOffload`, and hooks that don't keep one alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch

from memkit.device.base import Device
from memkit.errors import StateOffloadError
from memkit.owners import with_offloaded_states

_opened = weakref.WeakKeyDictionary[torch.optim.Optimizer, "weakref.ref[Any]"]()


def claim(optimizer: torch.optim.Optimizer, states: Any) -> None:
    """Note that an optimizer has a `StateOffload` from now on. If that is dropped without `close()`, the host waits for what is
    under way on the device, ahead of freeing anything: slots that copies go to, parameters that are being stepped.

    Raises:
        ValueError: it has one already: both would step it.
    """
    known = _opened.get(optimizer)
    found = None if known is None else known()
    if found is not None and found is not states:
        raise ValueError(f"this {type(optimizer).__name__} has a StateOffload already: {found!r}. Call close() of that first")
    _opened[optimizer] = ref = weakref.ref(states)
    with_offloaded_states[optimizer] = partial(_coming_bytes, ref)
    _dropped[states] = weakref.finalize(states, _await_all, states.device)
    _dropped[states].atexit = False


_dropped = weakref.WeakKeyDictionary[Any, "weakref.finalize[..., Any]"]()
"""What is done if one is dropped."""


def _await_all(device: Device) -> None:
    if not device.is_capturing():
        device.synchronize()


def _coming_bytes(ref: weakref.ref[Any]) -> int:
    """Return the bytes of states that will stay on the device, if no step has made any yet."""
    states = ref()
    return 0 if states is None or states.optimizer.state else int(states.plan.resident_bytes)


def release(optimizer: torch.optim.Optimizer, states: Any) -> None:
    """Note that the `StateOffload` of an optimizer is closed."""
    known = _opened.get(optimizer)
    if known is not None and known() is states:
        del _opened[optimizer]
        with_offloaded_states.pop(optimizer, None)
        _dropped.pop(states).detach()


class NotCopied:
    """What steps one optimizer, and no copy of that: see `copy.deepcopy`, `pickle`."""

    def __deepcopy__(self, _: dict[int, Any]) -> NoReturn:
        raise StateOffloadError(
            "a StateOffload was copied, or pickled, perhaps within an object that has it as an attribute. It belongs to one "
            "optimizer: copy the optimizer, or save optimizer.state_dict(), and make another StateOffload for that one"
        )

    def __reduce_ex__(self, _: Any) -> NoReturn:
        self.__deepcopy__({})


def weakly(method: Callable[..., Any], *, when_gone: Callable[[], object] = lambda: None) -> Callable[..., Any]:
    """Return a function that calls a method of an object without keeping the object alive.

    Args:
        method: the bound method.
        when_gone: called instead once the object is dead.
    """
    ref = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        found = ref()
        if found is not None:
            return found(*args)
        when_gone()
        return None

    return call
