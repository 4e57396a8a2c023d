"""`PlannedLink`: how fast copies between a device and the host are, as plans have it."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from memkit.errors import HostMemoryError
from memkit.plan import GpuSpec
from memkit.transfer import Link, measure_link

if TYPE_CHECKING:
    from collections.abc import Callable

    from memkit.device import Device

_OF_LINK = 0.9
"""Plans use this fraction of the link's measured bandwidth, since other processes may use the link too."""
_PROBED_BYTES = 64 * 2**20
_NO_LINK = Link(d2h_bytes_per_s=1.0, h2d_bytes_per_s=1.0)
"""With it no plan moves anything, unless there is no other."""
_links: WeakKeyDictionary[Device, Link] = WeakKeyDictionary()
"""The bandwidth of each device, measured once."""


class PlannedLink:
    """The link between one device and the host, for the steps of one tag.

    Args:
        warn: see `Learning`.
    """

    def __init__(self, warn: Callable[[str, str], None]) -> None:
        self._warn = warn
        self.known: GpuSpec | None = None
        """What plans are made with; None before the first one."""
        self.has_host = True
        """Whether there is host memory to move to, as far as is known."""

    def spec(self, device: Device) -> GpuSpec:
        """Return a spec with the bandwidths between a device and the host."""
        if self.known is None:
            link = self._link_of(device)
            counter = device.memory_counter()
            capacity_bytes = None if counter is None else counter.capacity_bytes()
            self.known = GpuSpec(
                name=device.name,
                memory_bytes=capacity_bytes or 2**62,
                bytes_per_s=1.0,
                flops_per_s={},
                d2h_bytes_per_s=_OF_LINK * link.d2h_bytes_per_s,
                h2d_bytes_per_s=_OF_LINK * link.h2d_bytes_per_s,
                both_bytes_per_s=_OF_LINK * min(link.d2h_bytes_per_s, link.h2d_bytes_per_s),
                copy_latency_s=link.latency_s,
                source="measured in this process",
                is_measured=link is not _NO_LINK,
            )
        return self.known

    def _link_of(self, device: Device) -> Link:
        """Return the speed of copies, as good as none where they free nothing or there is no host memory for them."""
        if device.has_own_memory and self.has_host and device not in _links:
            try:
                _links[device] = measure_link(device, num_bytes=_PROBED_BYTES)
            except HostMemoryError as error:
                self.note_no_host(error)
        return _links[device] if device.has_own_memory and self.has_host else _NO_LINK

    def note_no_host(self, error: HostMemoryError) -> None:
        """Warn that there is no host memory for a saved tensor. Later plans move none, so that they keep to the budget."""
        self._warn("host", f"saved tensors stay on the device, since there is no host memory for them: {error}")
        self.has_host, self.known = False, None
