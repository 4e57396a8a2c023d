"""`StepPeak`: the allocator's peak of one step, whoever else resets its counter."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memkit.device.base import MemoryCounter


class StepPeak:
    """The most bytes on the device from the entry of a step to the end of its backward.

    It is read as the backward ends, before anyone resets the counter between two steps. The counter is the user's as well, so
    only steps that teach something reset it. In any other step the peak is known only where it is higher than all before.

    Args:
        counter: the device's counter.
        resets: whether to reset it now.
    """

    def __init__(self, counter: MemoryCounter, *, resets: bool) -> None:
        if resets:
            counter.reset_peak()
        self._counter, self._resets = counter, resets
        self._before_bytes = -1 if resets else counter.peak_bytes()
        self._base_bytes = counter.allocated_bytes() if resets else 0
        self._held_bytes = 0
        self.num_bytes: int | None = None
        """The peak, once the backward has ended; None where it is not known."""
        self.is_over = False
        """Whether the backward has ended."""

    def end_forward(self) -> None:
        """Note what the forward has left on the device: a peak below that was reset within the backward, and is none."""
        if self._resets and not self.is_over:
            self._held_bytes = self._counter.allocated_bytes()

    def foretold_bytes(self) -> int | None:
        """Return the peak of a step whose forward has just ended, as if all in it had grown by as much as what that has left on
        the device; None if it is not known."""
        own_bytes = self._held_bytes - self._base_bytes
        if self.num_bytes is None or own_bytes <= 0:
            return None
        growth = (self._counter.allocated_bytes() - self._base_bytes) / own_bytes
        return int(self._base_bytes + growth * (self.num_bytes - self._base_bytes))

    def end_backward(self) -> None:
        """Read the peak."""
        if not self.is_over:
            peak_bytes, self.is_over = self._counter.peak_bytes(), True
            if peak_bytes >= self._held_bytes and peak_bytes != self._before_bytes:
                self.num_bytes = peak_bytes
