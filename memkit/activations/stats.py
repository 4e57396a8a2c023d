"""What an offload did: counts of one iteration while it runs, and the frozen figures that users read."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, field, fields

from tabulate import tabulate

from memkit.device.base import Event
from memkit.sizes import format_mib
from memkit.transfer.lanes import Passage


class EventPairs:
    """Seconds between pairs of timed events, added up once both are reached."""

    def __init__(self) -> None:
        self._pending: deque[tuple[Event, Event]] = deque()
        self._total_s = 0.0

    def add(self, start: Event, end: Event) -> None:
        self._pending.append((start, end))

    def total_s(self) -> float:
        """Return the sum over the pairs that are reached. Does not wait for the others."""
        while self._pending and self._pending[0][1].is_reached():
            start, end = self._pending.popleft()
            self._total_s += start.elapsed_s(end)
        return self._total_s

    def rate(self, num_bytes: int) -> float | None:
        """Return bytes per second over the pairs, None unless all of them are reached and took any time."""
        total_s = self.total_s()
        return num_bytes / total_s if total_s > 0 and not self._pending else None


@dataclass(slots=True, eq=False)
class IterationCounts:
    """What one iteration has moved so far."""

    ratio: float
    window_bytes: int = 0
    seen_bytes: int = 0
    unique_bytes: int = 0
    kept_bytes: int = 0
    moved_out_bytes: int = 0
    moved_in_bytes: int = 0
    served_bytes: int = 0
    wasted_bytes: int = 0
    num_copies_out: int = 0
    num_copies_in: int = 0
    stall_out: EventPairs = field(default_factory=EventPairs)
    stall_in: EventPairs = field(default_factory=EventPairs)
    busy_out: EventPairs = field(default_factory=EventPairs)
    busy_in: EventPairs = field(default_factory=EventPairs)

    def note_out(self, passage: Passage) -> None:
        self.moved_out_bytes += passage.num_bytes
        self.num_copies_out += 1
        self.busy_out.add(passage.started, passage.done)

    def note_in(self, passage: Passage) -> None:
        self.moved_in_bytes += passage.num_bytes
        self.num_copies_in += 1
        self.busy_in.add(passage.started, passage.done)

    def note_stall_out(self, wait: tuple[Event, Event]) -> None:
        self.stall_out.add(*wait)

    def note_stall_in(self, wait: tuple[Event, Event]) -> None:
        self.stall_in.add(*wait)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadStats:
    """What `CPUOffload` did under one tag. Figures of bytes, copies and seconds are those of the last iteration.

    Only what may be moved at all is counted in `unique_bytes` and below it: distinct storages on the device of at least
    `min_bytes` that autograd saved, without parameters, their casts, and what is known to be held by somebody else.
    """

    tag: str
    num_iterations: int
    """Entries with grad mode on, since the tag was new or reset."""
    ratios: tuple[float, ...]
    """The ratio asked for in each iteration (the last 10,000)."""
    window_bytes: int
    """Bytes of saved tensors that the device may hold beside what the ratio keeps."""
    seen_bytes: int
    """Bytes of all tensors that autograd saved while the context was on, each save counted."""
    unique_bytes: int
    """Bytes of the distinct storage versions among them that could be moved."""
    kept_bytes: int
    """Of these, what stayed on the device by plan, or because host memory was refused."""
    moved_out_bytes: int
    """Of these, what was copied to the host."""
    moved_in_bytes: int
    """What was copied back."""
    served_bytes: int
    """What left but was still on the device when it was needed, and so was not copied back."""
    wasted_bytes: int
    """What was copied out though somebody else kept the storage alive, so that nothing was freed. It is kept from then on."""
    num_copies_out: int
    num_copies_in: int
    stall_out_s: float
    """Seconds in which the forward waited for copies to the host. On a device, read from events."""
    stall_in_s: float
    """Seconds in which the backward waited for copies from the host."""
    d2h_bytes_per_s: float | None
    """Bytes copied to the host over the seconds in which that lane was copying; None if nothing was."""
    h2d_bytes_per_s: float | None
    host_in_use_bytes: int
    """Host memory that holds saved tensors now."""
    host_peak_bytes: int
    """The most host memory that was in use at once, since the tag was new or reset."""
    host_held_bytes: int
    """Pinned host memory that is held for the tag now."""
    num_pins: int
    """How often memory was pinned since the tag was new or reset."""
    live_records: int
    """Storage versions that a graph may still ask for."""
    live_bytes: int
    """Of these, the bytes on the device now."""
    peak_live_bytes: int
    """The most bytes of these that were on the device at once."""
    peak_allocated_bytes: int | None
    """The allocator's peak since it was last reset; None without an allocator that counts."""
    peak_reserved_bytes: int | None
    hint: str = ""
    """What would help, if anything is known to."""

    @property
    def ratio(self) -> float:
        """The ratio asked for in the last iteration; 0 before the first."""
        return self.ratios[-1] if self.ratios else 0.0

    @property
    def ratio_reached(self) -> float:
        """The bytes copied out in the last iteration over those that could be moved.

        It is below `ratio` where the window holds more than the ratio keeps: what would come back at once never leaves.
        """
        return self.moved_out_bytes / self.unique_bytes if self.unique_bytes else 0.0

    def __str__(self) -> str:
        """Return a table, one figure per line."""
        rows = [("tag", self.tag), ("iterations", f"{self.num_iterations}")]
        rows.append(("ratio asked / reached", f"{self.ratio:.3f} / {self.ratio_reached:.3f}"))
        for name in (item.name for item in fields(self)):
            value = getattr(self, name)
            label = name.replace("num_", "#").replace("_bytes", "").replace("_", " ").removesuffix(" s").removesuffix(" per")
            if name in ("tag", "num_iterations", "ratios", "hint"):
                continue
            if name.endswith("_per_s"):
                rows.append((name.split("_")[0].upper(), "-" if value is None else f"{value / 1e9:.1f} GB/s"))
            elif name.endswith("_bytes"):
                rows.append((label, "-" if value is None else format_mib(value)))
            elif name.endswith("_s"):
                rows.append((label, f"{value * 1e3:.1f} ms"))
            else:
                rows.append((label, f"{value}"))
        table = tabulate(rows, tablefmt="plain", colalign=("left", "right"), disable_numparse=True)
        return f"{table}\n{self.hint}" if self.hint else table


_FRAGMENTED = 1.35


def fragmentation_hint(allocated_bytes: int | None, reserved_bytes: int | None) -> str:
    """Return advice if the allocator holds far more than it has handed out and was not told to avoid that; else nothing.

    Source: `expandable_segments` of PyTorch's CUDA caching allocator.
    """
    if not allocated_bytes or not reserved_bytes or reserved_bytes <= _FRAGMENTED * allocated_bytes:
        return ""
    if any(
        "expandable_segments:True" in os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    ):
        return ""
    return (
        f"The allocator has reserved {reserved_bytes / allocated_bytes:.2f} times what was in use at the peak: set "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment to need less."
    )
