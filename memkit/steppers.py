"""The interface between a `LayerOffload` that steps parameters within the backward and a `StateOffload` that does it for it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from memkit.device.base import Device, Event, Stream


class ParameterSteps(Protocol):
    """Steps parameters within a backward on a stream of its own, when a `LayerStepper` asks for it."""

    @property
    def stream(self) -> Stream:
        """The stream that steps run on."""

    def begin_backward(self) -> None:
        """Called before the first step of a backward."""

    def step(self, parameter: nn.Parameter) -> Event:
        """Step a parameter, which is on the device, with its `grad`. Return an event that is reached once that is done."""

    def await_steps(self) -> None:
        """Let the current stream wait for all steps."""

    def end_backward(self) -> None:
        """Called when a backward is over, or has failed: see to it that each parameter is stepped as a whole or not at all, let
        the current stream wait for that, and make the host wait for states that are being copied."""

    def leave(self) -> None:
        """Called when the `LayerStepper` is closed."""


class LayerStepper(Protocol):
    """Streams layers and steps their parameters within the backward: it knows when a gradient is complete."""

    @property
    def device(self) -> Device:
        """The device that steps run on."""

    def streamed(self) -> Iterable[Tensor]:
        """Return the parameters that stream."""

    def in_place(self, parameter: Tensor) -> AbstractContextManager[object]:
        """Return a context in which a parameter is in the slot where a step has begun to write to it."""

    def have_stepped_by(self, steps: ParameterSteps | None) -> None:
        """Set who steps the parameters from now on; None for the optimizer itself."""


steppers: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[LayerStepper]] = weakref.WeakKeyDictionary()
"""Optimizers whose parameters are stepped within the backward, each with who streams their layers."""


def stepper_of(optimizer: torch.optim.Optimizer) -> LayerStepper | None:
    """Return the `LayerStepper` that an optimizer belongs to, None if there is none."""
    ref = steppers.get(optimizer)
    return None if ref is None else ref()
