"""What a `LayerOffload` did."""

from __future__ import annotations

from dataclasses import dataclass

from tabulate import tabulate

from memkit.sizes import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStats:
    """What a `LayerOffload` has moved since it was made, and what it takes now."""

    num_streamed: int
    """Layers that stream."""
    num_resident: int
    """Layers that stay on the device."""
    streamed_bytes: int
    """Bytes of the layers that stream, as they are packed: what one fetch of each moves."""
    slot_bytes: int
    """Bytes of the device that slots take, those that were taken for a while included."""
    host_bytes: int
    """Pinned host memory that is held."""
    h2d_bytes: int
    d2h_bytes: int
    num_fetches: int
    """Copies of a layer to the device."""
    num_demand_fetches: int
    """Those among them that began no sooner than the layer was needed."""
    num_overflows: int
    """How often all slots were in use, so that one more was taken for a while."""
    stall_s: dict[str, float]
    """For each layer that streams, seconds that the device has waited for it, as far as they are known yet."""

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
            ("stalls", f"{1e3 * sum(self.stall_s.values()):.2f} ms"),
        ]
        return tabulate(rows, tablefmt="plain", disable_numparse=True)
