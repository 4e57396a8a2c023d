"""Move: bytes between a device and host memory."""

from memkit.transfer.arena import Arena, Span
from memkit.transfer.lanes import Lanes, Passage, lanes_of
from memkit.transfer.link import Link, measure_link

__all__ = ["Arena", "Lanes", "Link", "Passage", "Span", "lanes_of", "measure_link"]
