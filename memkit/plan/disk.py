"""What chunks on a disk cost: how much of it they take, how much a training writes, and how long a step waits for it."""

from __future__ import annotations

import math
from collections.abc import Iterable

from memkit.sizes import DISK_PAGE_BYTES, check_bytes


def disk_bytes(chunk_bytes: Iterable[int], *, num_written_at_once: int = 3) -> int:
    """Return the room that chunks need on a disk: each in whole pages of 4 KiB, and the largest once more for each that is
    being written, since its old bytes stay until the new ones are there.

    Args:
        chunk_bytes: of each chunk.
        num_written_at_once: how many may be on their way to the disk.

    Raises:
        TypeError: a size is no number of bytes.
        ValueError: one is negative, or fewer than one is written at once.

    Example:
        >>> disk_bytes([4096, 5000], num_written_at_once=1)
        20480
    """
    if num_written_at_once < 1:
        raise ValueError(f"num_written_at_once must be 1 or more; found {num_written_at_once}")
    pages = [-(-check_bytes("chunk_bytes", num_bytes) // DISK_PAGE_BYTES) for num_bytes in chunk_bytes]
    return DISK_PAGE_BYTES * (sum(pages) + min(num_written_at_once, len(pages)) * max(pages, default=0))


def terabytes_written(disk_bytes: int, *, num_steps: int = 1000, kept_bytes: int = 0) -> float:
    """Return how many terabytes (10¹² bytes) some steps write to a disk on which optimizer states are.

    Each step writes all that is there, but for what is still in host memory when its turn comes again. A consumer SSD is rated
    for 600 or so in all.

    Args:
        disk_bytes: of the chunks on the disk.
        num_steps: steps of the optimizer.
        kept_bytes: what of these stays in host memory from the end of a step to the begin of the next, if every other step goes
            through the chunks backward.

    Raises:
        TypeError: a size is no number of bytes.
        ValueError: an argument is negative.

    Example:
        >>> terabytes_written(81_000_000_000)
        81.0
    """
    if num_steps < 0:
        raise ValueError(f"num_steps must be 0 or more; found {num_steps}")
    per_step = max(check_bytes("disk_bytes", disk_bytes) - check_bytes("kept_bytes", kept_bytes), 0)
    return per_step * num_steps / 1e12


def disk_step_s(disk_bytes: int, *, read_bytes_per_s: float, write_bytes_per_s: float) -> float:
    """Return the seconds in which a step reads and writes all chunks on a disk that does one of the two at a time.

    Raises:
        TypeError: the size is no number of bytes.
        ValueError: it is negative, or a speed is not positive.

    Example:
        >>> disk_step_s(20_000_000_000, read_bytes_per_s=2e9, write_bytes_per_s=1e9)
        30.0
    """
    for name, speed in (("read_bytes_per_s", read_bytes_per_s), ("write_bytes_per_s", write_bytes_per_s)):
        if not 0 < speed < math.inf:
            raise ValueError(f"{name} must be above 0; found {speed}")
    num_bytes = check_bytes("disk_bytes", disk_bytes)
    return num_bytes / read_bytes_per_s + num_bytes / write_bytes_per_s
