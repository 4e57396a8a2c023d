"""Where tensors lie in a chunk, and where its bytes may go."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from memkit.plan.chunks import ALIGNMENT_BYTES, HEADER_BYTES, Residency, lay_out

RANGES = st.tuples(st.integers(0, 5000), st.integers(0, 3000)).map(lambda item: (item[0], item[0] + item[1]))


@given(st.lists(st.lists(RANGES, min_size=1, max_size=4), max_size=6))
def test_regions_lie_side_by_side_behind_the_header(groups: list[list[tuple[int, int]]]) -> None:
    layout = lay_out(groups)

    ends = [HEADER_BYTES, *(region.stop for region in layout.regions)]
    for group, region, before in zip(groups, layout.regions, ends, strict=False):
        low, high = min(begin for begin, _ in group), max(stop for _, stop in group)
        assert region.num_bytes == high - low
        assert 0 <= region.start - before < ALIGNMENT_BYTES
        assert region.start % ALIGNMENT_BYTES == 0
        assert [offset - region.start for offset in region.offsets] == [begin - low for begin, _ in group]
    assert 0 <= layout.num_bytes - ends[-1] < ALIGNMENT_BYTES


def test_bytes_that_are_newest_on_the_device_or_on_disk_are_not_lost() -> None:
    allowed = {(before, after) for before, after in itertools.product(Residency, Residency) if before.may_become(after)}

    assert {after for before, after in allowed if before is Residency.DIRTY} == {Residency.DIRTY, Residency.DEVICE}
    assert {after for before, after in allowed if before is Residency.DISK} == {Residency.DISK, Residency.HOST}
    assert {before for before, after in allowed if after is Residency.DISK} == {Residency.HOST, Residency.DISK}
