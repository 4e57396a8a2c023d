"""Times one step: what each layer computes, how fast copies are, how full the device gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from memkit import backwards, torch_private
from memkit.device.base import Device, Event
from memkit.transfer.lanes import Transfer

_MOST_WITHOUT_BACKWARD = 3
"""After so many forwards in grad mode without a backward there is not going to be one."""
_MOST_SAMPLES = 32
"""After so many forwards without grad mode, a model that could be trained is not going to be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """What one step took."""

    forward_s: Mapping[str, float]
    """Seconds from when a layer's weights were there to the next layer, for each layer that has run."""
    backward_s: Mapping[str, float]
    taken_s: float
    """Seconds of all of that, and of waiting for weights."""
    h2d_bytes_per_s: float | None
    """None if nothing was copied."""
    peak_bytes: int | None
    """The most bytes that were allocated on the device; None where the device does not count them."""


class _Point:
    """A moment from which on a layer computes, or none does."""

    __slots__ = ("after", "before", "is_backward", "name")

    def __init__(self, name: str | None, is_backward: bool, before: Event) -> None:
        self.name = name
        self.is_backward = is_backward
        self.before = self.after = before
        """Ahead of waiting for its weights, and behind that."""


class StepTiming:
    """Times the second pass of its kind: the first one chooses kernels, and finds the order of the layers.

    Args:
        device: where the layers run.
        log_transfers: has each copy to the device added to a list from now on, or to none.
        is_trained: whether a backward is to be expected: a few samples ahead of it (a check of the validation) say little.
        resets_peak: whether the device's peak is that of the pass alone.
    """

    def __init__(
        self,
        device: Device,
        log_transfers: Callable[[list[Transfer] | None], None],
        *,
        is_trained: bool,
        resets_peak: bool,
    ) -> None:
        self._device = device
        self._log_transfers = log_transfers
        self._resets_peak = resets_peak
        self._num_unfit_left = {True: _MOST_WITHOUT_BACKWARD, False: _MOST_SAMPLES if is_trained else 0}
        """By grad mode, how many more passes without a backward are not what is to be timed."""
        self._points: list[_Point] = []
        self._transfers: list[Transfer] = []
        self._seen = set[bool]()
        """The passes that there were: in grad mode, or not."""
        self._has_grad = self._is_timing = self._is_timed = False
        self._backward = -1

    def begin_pass(self) -> bool:
        """A pass begins. Return whether one was timed whole before."""
        if self._is_timed:
            return True
        is_timed = any(not point.is_backward and point.name for point in self._points)
        if is_timed and not any(point.is_backward for point in self._points):
            self._num_unfit_left[self._has_grad] -= 1
            is_timed = self._num_unfit_left[self._has_grad] < 0
        if is_timed:
            self.end_layer()
            self._is_timed = True
            self._log_transfers(None)
            return True
        self._has_grad = torch.is_grad_enabled()
        self._is_timing = self._has_grad in self._seen
        self._seen.add(self._has_grad)
        self._points.clear()
        self._transfers = []
        self._log_transfers(self._transfers if self._is_timing else None)
        if self._is_timing and self._resets_peak:
            counter = self._device.memory_counter()
            if counter is not None:
                counter.reset_peak()
        return False

    def begin_layer(self, name: str) -> None:
        """The current stream has come to a layer, and is about to wait for its weights, if there are any to wait for."""
        if not self._is_timing or self._is_timed:
            return
        task = torch_private.backward_task()
        is_backward = task != -1
        last = self._points[-1] if self._points else None
        if last is not None and (last.name, last.is_backward) == (name, is_backward):
            return
        self._points.append(_Point(name, is_backward, self._device.record_event()))
        if is_backward and task != self._backward:
            backwards.on_end(lambda has_failed: self.fail() if has_failed else self.end_layer())
            self._backward = task

    def note_ready(self) -> None:
        """The weights of the layer are there."""
        if self._points and self._points[-1].after is self._points[-1].before:
            self._points[-1].after = self._device.record_event()

    def end_layer(self) -> None:
        """No layer is computing any more."""
        if self._points and self._points[-1].name is not None and not self._is_timed:
            self._points.append(_Point(None, self._points[-1].is_backward, self._device.record_event()))

    def fail(self) -> None:
        """The pass was left: it says nothing, and the next one is timed."""
        if not self._is_timed:
            self._points.clear()

    def result(self) -> StepTimes:
        """Return what the pass took, once it was timed whole; the host waits for it."""
        self._device.synchronize(self._points[-1].before)
        forward_s: dict[str, float] = {}
        backward_s: dict[str, float] = {}
        taken_s = 0.0
        for point, following in zip(self._points, self._points[1:], strict=False):
            if point.name is not None:
                seconds = backward_s if point.is_backward else forward_s
                seconds[point.name] = seconds.get(point.name, 0.0) + max(point.after.elapsed_s(following.before), 0.0)
                taken_s += point.before.elapsed_s(following.before)
        copied = [transfer for transfer in self._transfers if transfer.done.is_reached()]
        copied_s = sum(transfer.started.elapsed_s(transfer.done) for transfer in copied)
        counter = self._device.memory_counter()
        return StepTimes(
            forward_s=forward_s,
            backward_s=backward_s,
            taken_s=taken_s,
            h2d_bytes_per_s=sum(transfer.num_bytes for transfer in copied) / copied_s if copied_s > 0 else None,
            peak_bytes=None if counter is None else counter.peak_bytes(),
        )
