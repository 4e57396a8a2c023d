"""Who steps parameters within the backward while their layers stream, and who does so for them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from memkit.device.base import Device, Event, Stream


class ParameterSteps(Protocol):
    """How a parameter is stepped within a backward, for a `LayerStepper`: behind the backward, on a stream for that."""

    @property
    def stream(self) -> Stream:
        """Where steps are put."""

    def begin_backward(self) -> None:
        """A backward is about to have its first parameter stepped."""

    def step(self, parameter: nn.Parameter) -> Event:
        """Step a parameter that lies where it is to be, by what is in its `grad`. Return what is reached once that is done."""

    def await_steps(self) -> None:
        """Let the current stream wait for all steps."""

    def end_backward(self) -> None:
        """A backward is over: have each parameter be stepped whole or not at all, and the current stream wait for that. The
        host waits for states on their way."""

    def leave(self) -> None:
        """The `LayerStepper` is closed."""


class LayerStepper(Protocol):
    """Who streams layers, and steps their parameters within the backward: it knows when, and where each lies then."""

    @property
    def device(self) -> Device:
        """Where steps are made."""

    def streamed(self) -> Iterable[Tensor]:
        """Return the parameters that are in host memory but for their uses."""

    def in_place(self, parameter: Tensor) -> AbstractContextManager[object]:
        """Return a context in which a parameter that a step has begun to write to lies where that has done so."""

    def have_stepped_by(self, steps: ParameterSteps | None) -> None:
        """Have parameters be stepped by somebody from now on; None: by the optimizer, as it is."""


steppers: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[LayerStepper]] = weakref.WeakKeyDictionary()
"""Optimizers whose parameters are stepped within the backward, each with who streams their layers."""


def stepper_of(optimizer: torch.optim.Optimizer) -> LayerStepper | None:
    """Return who streams the layers of an optimizer, and steps them within the backward; None if nobody does."""
    ref = steppers.get(optimizer)
    return None if ref is None else ref()
