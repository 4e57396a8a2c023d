"""Where tensors lie in a chunk: bytes that move together. Plain numbers; no tensor is touched here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from memkit.core.sizes import ALIGNMENT_BYTES, rounded

HEADER_BYTES = 512
"""Where the first tensor of a chunk begins: compilers treat offset 0 as a case of its own."""


class Residency(Enum):
    """Where the current bytes of a chunk are: of a layer's weights, or of optimizer states that move together."""

    HOST = "host"
    """In host memory, and nowhere else."""
    IN_FLIGHT = "in flight"
    """Where they were, on the host or a disk; a copy to the device is under way, or about to be."""
    DEVICE = "device"
    """On the device, with an equal copy where they came from, unless the caller has written to host memory since. States that
    stay on the device have no such copy."""
    STEPPING = "stepping"
    """Where they came from: a step is running on the copy on the device, and may have written a part of it, and of the
    parameters. These are kept as they were before, so that the step can be undone."""
    DIRTY = "dirty"
    """On the device alone: written to, and the copy where they go back to is older. For states that were stepped on the host:
    these are current, and the parameters on the device are older."""
    DISK = "disk"
    """In a file, or in a buffer on their way there, and nowhere else."""

    def may_become(self, following: Residency) -> bool:
        """Tell whether this state may be followed by another one."""
        return following in _FOLLOWING[self]


_FOLLOWING = {
    Residency.HOST: (Residency.HOST, Residency.IN_FLIGHT, Residency.DISK),
    Residency.IN_FLIGHT: (Residency.IN_FLIGHT, Residency.DEVICE, Residency.STEPPING, Residency.HOST),
    Residency.DEVICE: (Residency.IN_FLIGHT, Residency.DEVICE, Residency.STEPPING, Residency.DIRTY, Residency.HOST),
    Residency.STEPPING: (Residency.STEPPING, Residency.DIRTY, Residency.HOST),
    Residency.DIRTY: (Residency.DIRTY, Residency.DEVICE),
    Residency.DISK: (Residency.DISK, Residency.HOST),
}
"""What is dirty is written back before anything else becomes of it; what is on disk is read to host memory first."""
WRITTEN = (Residency.STEPPING, Residency.DIRTY)
"""In these, the device has bytes that are nowhere else: nothing may be copied over them, and no step may begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A range of a chunk with one tensor, or several that share bytes."""

    start: int
    stop: int
    offsets: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLayout:
    """How a chunk is made up: its regions side by side, each aligned, behind a header."""

    regions: tuple[Region, ...]
    num_bytes: int
    """Of the whole chunk, the header and the room between regions included."""


def lay_out(groups: Sequence[Sequence[tuple[int, int]]]) -> ChunkLayout:
    """Return where tensors lie in a chunk. In each region, tensors begin and end at given bytes of whatever storage they
    share now: what they have in common there they have in common in the chunk."""
    regions, end = [], HEADER_BYTES
    for group in groups:
        low, high = min(begin for begin, _ in group), max(stop for _, stop in group)
        stop = end + high - low
        regions.append(Region(start=end, stop=stop, offsets=tuple(end + begin - low for begin, _ in group)))
        end = rounded(stop, ALIGNMENT_BYTES)
    return ChunkLayout(regions=tuple(regions), num_bytes=end)
