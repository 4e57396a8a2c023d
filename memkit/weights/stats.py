"""The figures of a `LayerOffload`: bytes moved and held, and stalls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tabulate import tabulate

from memkit.core.sizes import format_bytes
from memkit.device.base import Event


class Stalls:
    """Seconds that the device has waited for each layer, read from events, as far as they are reached."""

    def __init__(self, seconds: Iterable[float]) -> None:
        self._seconds = list(seconds)
        self.pending: list[tuple[int, Event, Event]] = []

    def seconds(self) -> tuple[float, ...]:
        waiting = []
        for layer, start, end in self.pending:
            if end.is_reached():
                self._seconds[layer] += start.elapsed_s(end)
            else:
                waiting.append((layer, start, end))
        self.pending = waiting
        return tuple(self._seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStats:
    """The bytes that a `LayerOffload` has moved since it was made, and its present memory."""

    num_streamed: int
    """Layers that stream."""
    num_resident: int
    """Layers that stay on the device."""
    streamed_bytes: int
    """Bytes of the layers that stream, as they are packed: one fetch of each moves them."""
    slot_bytes: int
    """Bytes of the device that slots take, those that were taken for a while included."""
    host_bytes: int
    """Host memory that is held, pinned where the system does that."""
    h2d_bytes: int
    """Bytes that were copied to the device."""
    d2h_bytes: int
    """Bytes that were copied to the host: gradients with train="host", weights with train="fused"."""
    num_fetches: int
    """Copies of a layer to the device."""
    num_demand_fetches: int
    """Those among them that began no sooner than the layer was needed."""
    predicted_s: float | None
    """The planned seconds of a forward and a backward of the layers, once a step was timed: the second, or with
    `offload_ratio="auto"` one in which all streamed."""
    actual_s: float | None
    """The seconds that they took in the timed step, from the first layer to the last one; with "auto" the second since the
    share was chosen."""
    predicted_peak_bytes: int | None
    """With "auto", the predicted most bytes allocated on the device with the chosen share; without gradients and optimizer
    state that have come to stay on the device."""
    actual_peak_bytes: int | None
    """The most bytes that were allocated by the end of the timed step, since the device's peak was reset last."""
    num_overflows: int
    """How often all slots were in use, so that one more was taken for a while."""
    stall_s: dict[str, float]
    """For each layer that streams, seconds that the device has waited for it, as far as they are known yet."""
    disk_bytes: int = 0
    """Bytes of the layers that lie on a disk."""
    disk_read_bytes: int = 0
    """Bytes that were read from there."""

    def __str__(self) -> str:
        rows = [
            ("layers that stream", f"{self.num_streamed} ({format_bytes(self.streamed_bytes)})"),
            ("layers that stay", str(self.num_resident)),
            ("slots", format_bytes(self.slot_bytes)),
            ("host memory", format_bytes(self.host_bytes)),
            ("moved to the device", format_bytes(self.h2d_bytes)),
            ("moved to the host", format_bytes(self.d2h_bytes)),
            ("fetches", f"{self.num_fetches}, {self.num_demand_fetches} of them on demand"),
            ("overflows", str(self.num_overflows)),
            ("a step", f"{_ms(self.actual_s)}, predicted {_ms(self.predicted_s)}"),
            ("peak", f"{_bytes(self.actual_peak_bytes)}, predicted {_bytes(self.predicted_peak_bytes)}"),
            ("stalls", f"{1e3 * sum(self.stall_s.values()):.2f} ms"),
        ]
        if self.disk_bytes:
            rows += [("on the disk", format_bytes(self.disk_bytes)), ("read from there", format_bytes(self.disk_read_bytes))]
        return tabulate(rows, tablefmt="plain", disable_numparse=True)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.2f} ms"


def _bytes(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else format_bytes(num_bytes)
