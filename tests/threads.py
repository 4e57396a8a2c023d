"""Threads: which ones of memkit's are there, since libraries begin and end others when they like; and ones to run calls in."""

from __future__ import annotations

import threading
from collections.abc import Callable


def num_own_threads() -> int:
    return sum(thread.name.startswith("memkit") for thread in threading.enumerate())


def run_in_threads(*calls: Callable[[], object]) -> None:
    """Run each call in a thread of its own, all at once, and wait for them."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
