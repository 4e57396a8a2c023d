"""Move: bytes between a device and host memory."""

from memkit.transfer.arena import Arena, Span
from memkit.transfer.lanes import Lanes, Transfer, lanes_of
from memkit.transfer.link import Link, measure_link

__all__ = ["Arena", "Lanes", "Link", "Span", "Transfer", "lanes_of", "measure_link"]
