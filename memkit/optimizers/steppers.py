"""The interfaces between a `StateOffload` that steps within the backward, and features that know when a gradient is
complete."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

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
        """Step a parameter, which is on the device, with its `grad`. Return an event behind the step."""

    def await_steps(self) -> None:
        """Let the current stream wait for all steps."""

    def end_backward(self) -> None:
        """Called when a backward is over, or has failed: leave each parameter stepped whole or not at all, let the current
        stream wait for that, and the host for states that are being copied."""

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
        """Set the stepper of the parameters from now on; None for the optimizer itself."""


steppers: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[LayerStepper]] = weakref.WeakKeyDictionary()
"""Optimizers whose parameters are stepped within the backward, each with the stepper that streams their layers."""


def stepper_of(optimizer: torch.optim.Optimizer) -> LayerStepper | None:
    ref = steppers.get(optimizer)
    return None if ref is None else ref()


class ReducedSteps(Protocol):
    """Steps shards in host memory, on the host, when a layer's gradients have been reduced there."""

    def before_reduce(self, layer: ReducedLayer) -> None:
        """Called within a backward, before gradients of a layer, if there are any, are reduced and put to `grad`."""

    def after_reduce(self, layer: ReducedLayer) -> None:
        """Called behind that. The bytes of the gradients may still be on their way: see `ReducedLayer.landing`."""

    def is_stepping(self, layer: ReducedLayer) -> bool:
        """Tell whether the running backward has had shards of a layer stepped, or has begun to."""

    def stepped(self, layer: ReducedLayer) -> Iterable[Tensor]:
        """Return the shards of a layer that it steps."""

    def before_read(self, layer: ReducedLayer) -> None:
        """Called before a layer's shards are copied to the device: wait until nobody writes to them."""


class ReducedLayer(Protocol):
    """A layer that is gathered and reduced as one, with its shards and their gradients in host memory."""

    @property
    def device(self) -> Device:
        """The device that it is gathered on."""

    @property
    def last_read(self) -> Event | None:
        """Reached when the last copy to the device has read the shards; None if there was none."""

    def shards(self) -> Sequence[Tensor]:
        """Return its parameters: the shards that an optimizer has."""

    def landing(self) -> Sequence[Any]:
        """Return torch's events for `synchronize()`: behind them the last reduced gradients are in host memory."""

    @property
    def steppers(self) -> Collection[ReducedSteps]:
        """The steppers of some of the shards, one for each optimizer that has such. It keeps none of them alive."""

    def begin_steps(self, steps: ReducedSteps) -> None:
        """Have some of the shards stepped by another stepper as well."""

    def end_steps(self, steps: ReducedSteps) -> None:
        """Undo `begin_steps`."""


reduced_layers: weakref.WeakSet[Any] = weakref.WeakSet()


def layers_of(optimizer: torch.optim.Optimizer) -> dict[int, ReducedLayer]:
    """Return the layers with an optimizer's parameters as shards in host memory, by parameter id."""
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    found = [(id(shard), layer) for layer in reduced_layers for shard in layer.shards() if id(shard) in own]
    return dict(found)


def stepped_shards() -> set[int]:
    """Return the ids of parameters that a backward may have stepped, though they have no hook: profiles refuse these."""
    return {id(shard) for layer in reduced_layers if layer.steppers for shard in layer.shards()}
