"""The `StateOffload`s of a callback: made for each optimizer of a training, and closed when it ends."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch

from memkit.states import StateOffload, StateStats
from memkit.states.asked import check_options

_begun: weakref.WeakSet[StateOffload] = weakref.WeakSet()
"""The `StateOffload`s made by callbacks: a run that ended by an error may have left one open."""


class OptimizerStates:
    """A `StateOffload` for each optimizer of a training, which is there only once the training has begun.

    Args:
        owner: the name of the callback, for errors.
        asked: `memkit.StateOffload`, or a `functools.partial` of it that has its options.

    Raises:
        TypeError: it is neither, or an option is unknown.
        ValueError: options are out of range, or don't go together.
    """

    def __init__(self, owner: str, asked: object) -> None:
        if not is_asked_for(asked):
            raise TypeError(
                f"{owner} makes the StateOffload itself, once the trainer has its optimizer; found {asked!r}. Pass "
                'memkit.StateOffload, or functools.partial(memkit.StateOffload, device_budget="4GiB")'
            )
        self._owner = owner
        self._options: dict[str, Any] = {}
        if isinstance(asked, functools.partial):
            if asked.args:
                raise TypeError(
                    f"{owner} makes the StateOffload over the trainer's optimizer; found a functools.partial that has one "
                    f"already, {type(asked.args[0]).__name__}. Leave that out"
                )
            self._options = dict(asked.keywords)
        try:
            bound = inspect.signature(StateOffload).bind(None, **self._options)
        except TypeError as error:
            raise TypeError(f"{owner}: StateOffload {error}") from None
        bound.apply_defaults()
        options = {name: bound.arguments[name] for name in ("update", "master", "when", "overlap_forward", "disk")}
        check_options(**options)
        self.when: str = options["when"]
        self.overlaps: bool = options["overlap_forward"]
        self.opened: list[StateOffload] = []
        self._figures: list[StateStats] = []
        """The figures of the last training that has ended."""

    def begin(self, optimizers: Iterable[object]) -> None:
        """Make a `StateOffload` of each optimizer that has none yet.

        Args:
            optimizers: those of the training, also as wrapped by Accelerate or Lightning.

        Raises:
            ValueError: there is none, or one can't be stepped in pieces.
        """
        found = [inside(optimizer) for optimizer in optimizers]
        if not found:
            raise ValueError(f"{self._owner} needs the optimizer of the training for its StateOffload; the trainer has none")
        for states in [states for states in self.opened if not any(states.optimizer is one for one in found)]:
            states.close()
            self.opened.remove(states)
        known = [states.optimizer for states in self.opened]
        try:
            for optimizer in found:
                if any(optimizer is one for one in known):
                    continue
                for states in [states for states in _begun if states.optimizer is optimizer]:
                    states.close()
                made = StateOffload(optimizer, **self._options)  # refuses what is no optimizer
                self.opened.append(made)
                _begun.add(made)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Close them, which puts the states back where the parameters are."""
        self._figures = self.figures()
        while self.opened:
            states = self.opened.pop()
            states.close()
            _begun.discard(states)

    def figures(self) -> list[StateStats]:
        """Return the figures of each optimizer so far, or those of the last training that has ended."""
        return [states.stats() for states in self.opened] or self._figures


def is_asked_for(feature: object) -> bool:
    """Tell whether an argument stands for a `StateOffload` that is to be made."""
    return feature is StateOffload or (isinstance(feature, functools.partial) and feature.func is StateOffload)


def inside(optimizer: Any) -> Any:
    """Return the optimizer inside a wrapper, such as Accelerate's or Lightning's."""
    found = optimizer
    with suppress(AttributeError):
        while isinstance(found.optimizer, torch.optim.Optimizer):
            found = found.optimizer
    return found
