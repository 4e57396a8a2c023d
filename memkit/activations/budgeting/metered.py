"""`WatchedRecorder`: a recorder that calls a meter at each op."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memkit import torch_private
from memkit.recording.recorder import Recorder

if TYPE_CHECKING:
    from memkit.activations.budgeting.meter import Meter
    from memkit.activations.budgeting.steady import StepNotes


class WatchedRecorder(Recorder):
    """Records ops; calls a meter before and after each op, or notes the numbers of its values."""

    meter: Meter | None = None
    """The meter of the recorded forward, if it is measured."""
    notes: StepNotes | None = None
    """The notes of the recorded forward, if it is noted."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        meter, notes = self.meter, self.notes
        if self.recording.is_gathering or torch_private.backward_task() != -1:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if notes is not None:
            notes.begin_op(self.recording)
        if meter is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        meter.begin_op()
        results = super().__torch_dispatch__(func, types, args, kwargs)
        meter.end_op(str(func), results)
        return results
