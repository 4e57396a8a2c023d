"""Move: bytes between a device and host memory."""

from memkit.transfer.arena import Arena
from memkit.transfer.lanes import Lanes, Transfer, lanes_of
from memkit.transfer.link import Link, measure_link
from memkit.transfer.spans import Span

__all__ = ["Arena", "Lanes", "Link", "Span", "Transfer", "lanes_of", "measure_link"]
