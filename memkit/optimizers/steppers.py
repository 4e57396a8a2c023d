"""The interfaces between a `StateOffload` that steps within the backward, and features that know a complete gradient."""

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
    def stream(self) -> Stream: ...  # that steps run on
    def begin_backward(self) -> None: ...  # before the first step of a backward
    def step(self, parameter: nn.Parameter) -> Event: ...  # behind the step of a parameter on the device, with its `grad`
    def await_steps(self) -> None: ...  # let the current stream wait for all steps
    def end_backward(self) -> None:
        """A backward is over, or has failed: leave each parameter stepped whole or not at all, let the current stream wait for
        that, and the host for states that are being copied."""

    def leave(self) -> None: ...  # the `LayerStepper` is closed


class LayerStepper(Protocol):
    """Streams layers and steps their parameters within the backward: it knows when a gradient is complete."""

    @property
    def device(self) -> Device: ...  # that steps run on
    def streamed(self) -> Iterable[Tensor]: ...  # the parameters
    def in_place(self, parameter: Tensor) -> AbstractContextManager[object]:
        """Return a context in which a parameter is in the slot where a step has begun to write to it."""

    def have_stepped_by(self, steps: ParameterSteps | None) -> None: ...  # from now on; None for the optimizer itself


steppers: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[LayerStepper]] = weakref.WeakKeyDictionary()
"""Optimizers whose parameters are stepped within the backward, each with the stepper that streams their layers."""


def stepper_of(optimizer: torch.optim.Optimizer) -> LayerStepper | None:
    ref = steppers.get(optimizer)
    return None if ref is None else ref()


class ReducedSteps(Protocol):
    """Steps shards in host memory, on the host, when a layer's gradients have been reduced there."""

    def before_reduce(self, layer: ReducedLayer) -> None: ...  # in a backward, before its gradients are put to `grad`, if any
    def after_reduce(self, layer: ReducedLayer) -> None: ...  # their bytes may still be on their way: `ReducedLayer.landing`
    def is_stepping(self, layer: ReducedLayer) -> bool: ...  # whether the running backward has stepped shards, or has begun to
    def stepped(self, layer: ReducedLayer) -> Iterable[Tensor]: ...  # the shards of a layer that it steps
    def before_read(self, layer: ReducedLayer) -> None: ...  # before its shards are copied: wait until nobody writes to them


class ReducedLayer(Protocol):
    """A layer that is gathered and reduced as one, with its shards and their gradients in host memory."""

    @property
    def device(self) -> Device: ...  # that it is gathered on
    @property
    def last_read(self) -> Event | None: ...  # behind the last copy of shards to the device, if any
    def shards(self) -> Sequence[Tensor]: ...  # the parameters that an optimizer has
    def landing(self) -> Sequence[Any]: ...  # torch's events to synchronize: behind them, reduced gradients are in host memory
    @property
    def steppers(self) -> Collection[ReducedSteps]: ...  # of some of the shards, one for each optimizer; not kept alive
    def begin_steps(self, steps: ReducedSteps) -> None: ...  # have some of the shards stepped by another stepper as well
    def end_steps(self, steps: ReducedSteps) -> None: ...


reduced_layers: weakref.WeakSet[Any] = weakref.WeakSet()


def layers_of(optimizer: torch.optim.Optimizer) -> dict[int, ReducedLayer]:
    """Return the layers with an optimizer's parameters as shards in host memory, by parameter id."""
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    found = [(id(shard), layer) for layer in reduced_layers for shard in layer.shards() if id(shard) in own]
    return dict(found)


def stepped_shards() -> set[int]:
    """Return the ids of parameters that a backward may have stepped, though they have no hook: profiles refuse these."""
    return {id(shard) for layer in reduced_layers if layer.steppers for shard in layer.shards()}
