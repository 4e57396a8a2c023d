"""The steps that are timed, and what is planned by them: which layers stream, where that is to be found out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from memkit.device.base import Device
from memkit.plan import ResidencyPlan, plan_again
from memkit.weights.shares import costs_of, plan_measured
from memkit.weights.timing import StepTimes, StepTiming

if TYPE_CHECKING:
    from memkit.weights.chunks import LayerChunk
    from memkit.weights.streaming import Streamer


class MeasuredChoice:
    """Times a step in which all layers stream and chooses by it, if the share is not given; and times a step of what streams.

    Args:
        device: where the layers run.
        layers: what may stream of each, by name; None for nothing.
        train: how they are trained.
        num_slots: for layers of one size.
        is_open: whether the share that streams is to be found out.
    """

    def __init__(
        self, device: Device, layers: Mapping[str, LayerChunk | None], *, train: str, num_slots: int, is_open: bool
    ) -> None:
        self.is_open = is_open
        self.timing: StepTiming | None = None
        """Of the step that is to be timed; None once there is nothing to find out."""
        self.times: StepTimes | None = None
        """What a step took with what streams for good."""
        self.predicted_peak_bytes: int | None = None
        self._device, self._layers = device, layers
        self._train, self._num_slots = train, num_slots

    def begin(self, streamer: Streamer, *, is_trained: bool) -> StepTiming:
        """Begin to time, see `StepTiming`."""
        self.timing = StepTiming(self._device, streamer.log_transfers, is_trained=is_trained, resets_peak=self.is_open)
        return self.timing

    def begin_pass(self, streamer: Streamer) -> StepTimes | None:
        """A pass begins. Return what a step took, if one was timed whole, and by that layers may be told to stay."""
        if self.timing is None or not self.timing.begin_pass():
            return None
        if self.is_open and (streamer.handles or any(chunk.uses for chunk in streamer.chunks)):
            return None  # of a graph that is alive, or in another thread: later
        return self.timing.result()

    def choose(self, plan: ResidencyPlan, times: StepTimes) -> ResidencyPlan:
        """Return the plan that is best by what a step took in which all stream, which is what `plan` says."""
        counter = self._device.memory_counter()
        return plan_measured(
            self._layers,
            times,
            plan,
            train=self._train,
            num_slots=self._num_slots,
            capacity_bytes=None if counter is None else counter.capacity_bytes(),
        )

    def note_chosen(self, before: ResidencyPlan, plan: ResidencyPlan, times: StepTimes) -> None:
        """Predict the peak with a plan by that of another one."""
        if times.peak_bytes is not None:
            self.predicted_peak_bytes = times.peak_bytes - before.device_bytes + plan.device_bytes

    def end(self, plan: ResidencyPlan, times: StepTimes) -> ResidencyPlan:
        """A step of what streams for good was timed: return the plan, with a prediction."""
        self.times, self.timing = times, None
        if plan.predicted_s is not None:
            return plan
        return plan_again(plan, costs_of(self._layers, times), times.h2d_bytes_per_s)
