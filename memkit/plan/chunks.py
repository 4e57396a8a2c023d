"""The layout of a chunk: tensors that move together. Plain numbers; no tensor is touched here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from memkit.core.sizes import ALIGNMENT_BYTES, rounded

HEADER_BYTES = 512  # offset of the first tensor: compilers treat offset 0 as a special case


class Residency(Enum):
    """Where a chunk's current bytes are: a layer's weights, or optimizer states that move together."""

    HOST = "host"  # in host memory only
    IN_FLIGHT = "in flight"  # on the host or a disk; a copy to the device is under way or about to begin
    DEVICE = "device"  # with an equal copy at their origin, but for states that stay and what the caller has written since
    STEPPING = "stepping"  # a step may have written parts of the device's copy; old parameters are kept, so it can be undone
    DIRTY = "dirty"  # on the device only; of states stepped on the host, there: the parameters on the device are older
    DISK = "disk"  # in a file, or in a buffer on the way there, only

    def may_become(self, following: Residency) -> bool:
        return following in _FOLLOWING[self]


_FOLLOWING = {
    Residency.HOST: (Residency.HOST, Residency.IN_FLIGHT, Residency.DISK),
    Residency.IN_FLIGHT: (Residency.IN_FLIGHT, Residency.DEVICE, Residency.STEPPING, Residency.HOST),
    Residency.DEVICE: (Residency.IN_FLIGHT, Residency.DEVICE, Residency.STEPPING, Residency.DIRTY, Residency.HOST),
    Residency.STEPPING: (Residency.STEPPING, Residency.DIRTY, Residency.HOST),
    Residency.DIRTY: (Residency.DIRTY, Residency.DEVICE),
    Residency.DISK: (Residency.DISK, Residency.HOST),
}  # dirty chunks are written back before any other transition; chunks on disk are first read to host memory
WRITTEN = (Residency.STEPPING, Residency.DIRTY)  # only the device has current bytes: nothing may overwrite them


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A range of a chunk: one tensor, or several that share bytes."""

    start: int
    stop: int
    offsets: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLayout:
    """The regions of a chunk side by side, each aligned, after a header."""

    regions: tuple[Region, ...]
    num_bytes: int


def lay_out(groups: Sequence[Sequence[tuple[int, int]]]) -> ChunkLayout:
    """Return where groups of (begin, end) bytes, each in one storage, lie in a chunk; overlaps stay overlaps."""
    regions, end = [], HEADER_BYTES
    for group in groups:
        low, high = min(begin for begin, _ in group), max(stop for _, stop in group)
        stop = end + high - low
        regions.append(Region(start=end, stop=stop, offsets=tuple(end + begin - low for begin, _ in group)))
        end = rounded(stop, ALIGNMENT_BYTES)
    return ChunkLayout(regions=tuple(regions), num_bytes=end)
