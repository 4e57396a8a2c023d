"""What chunks on a disk cost."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memkit.device import ReferenceDevice
from memkit.plan.states import disk_bytes, disk_step_s, terabytes_written
from memkit.transfer import Arena, ReferenceDisk

SIZES = st.lists(st.integers(1, 20_000), min_size=1, max_size=8)


@settings(max_examples=15)
@given(sizes=SIZES, num_at_once=st.integers(1, 4))
def test_planned_room_is_enough_and_no_page_too_much(sizes: list[int], num_at_once: int) -> None:
    """So many chunks are written at once in every step, the largest ones among them."""
    room = disk_bytes(sizes, num_written_at_once=num_at_once)
    arena = Arena(ReferenceDevice())
    store = ReferenceDisk().open(room, ReferenceDevice())
    copies = [store.add(str(number), size) for number, size in enumerate(sorted(sizes, reverse=True))]
    for _ in range(3):
        for first in range(0, len(copies), num_at_once):
            group = copies[first : first + num_at_once]
            for copy in group:
                store.write(copy, arena.take(copy.num_bytes))
            for copy in group:
                store.wait(copy)

    assert store.in_use_bytes == room - min(num_at_once, len(sizes)) * -(-max(sizes) // 4096) * 4096
    store.close()
    arena.give_all()
    arena.close()


def test_terabytes_of_a_training() -> None:
    states = 12 * 6_740_000_000

    assert terabytes_written(states) == pytest.approx(80.88)
    assert terabytes_written(states, num_steps=10_000) == pytest.approx(808.8)
    assert terabytes_written(states, kept_bytes=states // 4) == pytest.approx(60.66)
    assert terabytes_written(100, kept_bytes=200) == terabytes_written(0) == terabytes_written(states, num_steps=0) == 0.0


def test_step_reads_and_writes_all() -> None:
    assert disk_step_s(20 * 10**9, read_bytes_per_s=1e9, write_bytes_per_s=2e9) == 30.0


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: disk_bytes([1], num_written_at_once=0), ValueError, "num_written_at_once must be 1 or more; found 0"),
        (lambda: disk_bytes([-1]), ValueError, "chunk_bytes is a number of bytes, 0 or more; found -1"),
        (lambda: terabytes_written(1, num_steps=-1), ValueError, "num_steps must be 0 or more; found -1"),
        (lambda: terabytes_written(1.5), TypeError, "disk_bytes is a number of bytes"),  # type: ignore[arg-type]
        (lambda: disk_step_s(1, read_bytes_per_s=0, write_bytes_per_s=1), ValueError, "read_bytes_per_s must be above 0"),
        (lambda: disk_step_s(1, read_bytes_per_s=1, write_bytes_per_s=math.nan), ValueError, "write_bytes_per_s must be above"),
    ],
)
def test_bad_input(call: Callable[[], object], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        call()
