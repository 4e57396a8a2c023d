"""When each copy of a step is due, the clocks of its lanes, and where tensors lie in a chunk."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from memkit.plan.chunks import ALIGNMENT_BYTES, HEADER_BYTES, Residency, lay_out
from memkit.plan.copies import BATCH_BYTES, CopySchedule, schedule_copies
from memkit.plan.ratio import Forecast
from memkit.plan.timeline import Lane, Levels, Timeline

SIZES = st.sampled_from([1, 512, 4096, BATCH_BYTES // 3, BATCH_BYTES - 1, BATCH_BYTES, 5 * BATCH_BYTES])


@dataclass(frozen=True)
class Step:
    """What is known of a step, and what it may have on the device."""

    sizes_bytes: dict[int, int]
    leaving: frozenset[int]
    saves: list[int]
    ready: dict[int, int]
    requests: list[int]
    limit_bytes: int

    def schedule(self, forecast: Forecast | None = None) -> CopySchedule:
        return schedule_copies(
            self.sizes_bytes,
            self.leaving,
            saves=self.saves,
            ready=self.ready,
            requests=self.requests,
            limit_bytes=self.limit_bytes,
            forecast=forecast,
        )

    def ready_at(self, value: int) -> int:
        return max(self.saves.index(value), self.ready.get(value, 0))

    @property
    def order(self) -> list[int]:
        return list(dict.fromkeys(self.requests))


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Draw saves, some again and some that do not count, and requests in about any order, some missing, some again."""
    num_values = draw(st.integers(0, 30))
    saves = [*range(num_values)]
    for place, value in draw(st.lists(st.tuples(st.integers(0, 60), st.integers(-1, num_values - 1)), max_size=20)):
        saves.insert(place, value)
    numbers = {value: number for number, value in enumerate(dict.fromkeys(value for value in saves if value >= 0))}
    saves = [numbers.get(value, -1) for value in saves]  # as they are numbered: by their first saves
    sizes_bytes = {value: draw(SIZES) for value in range(num_values)}
    leaving = frozenset(value for value in range(num_values) if draw(st.integers(0, 3)))
    ready = {
        value: draw(st.integers(saves.index(value) + 1, len(saves)))
        for value in range(num_values)
        if draw(st.integers(0, 4)) == 0
    }
    kind = draw(st.sampled_from(["reverse", "any"]))
    requests = saves[::-1] if kind == "reverse" else draw(st.lists(st.sampled_from(saves or [-1]), max_size=60))
    return Step(
        sizes_bytes,
        leaving,
        saves,
        ready,
        [value for value in requests if value >= 0],
        draw(st.integers(0, 8) | st.integers(0, 40 * BATCH_BYTES)),
    )


@settings(max_examples=60)
@given(steps())
@example(Step({0: 1, 1: 1}, frozenset({0, 1}), [0, 1], {1: 2}, [1, 0], 8))  # one is ready at the end
def test_forward_of_any_step(step: Step) -> None:
    copies = step.schedule()

    assert sorted(value for batch in copies.out for value in batch) == sorted(step.leaving)  # each is in one batch
    assert len(copies.num_sent) == len(copies.num_released) == len(step.saves) + 1
    assert all(released <= sent for released, sent in zip(copies.num_released, copies.num_sent, strict=True))
    for counts in (copies.num_sent, copies.num_released, copies.num_fetched):
        assert all(before <= after for before, after in pairwise(counts))
    assert copies.num_sent[-1] == len(copies.out)
    for number, batch in enumerate(copies.out):
        sizes = [step.sizes_bytes[value] for value in batch]
        assert 0 < len(batch) <= 64
        assert sum(sizes[:-1]) < BATCH_BYTES  # small copies share a batch, and a large one never waits
        assert len(batch) == 1 or max(sizes) < BATCH_BYTES
        sent_at = next(place for place, num_sent in enumerate(copies.num_sent) if num_sent > number)
        assert all(step.ready_at(value) <= sent_at for value in batch)  # there, and written
        assert sent_at - min(step.ready_at(value) for value in batch) <= 8


@settings(max_examples=60)
@given(steps())
def test_forward_keeps_to_the_limit_and_lets_go_of_no_more_than_it_must(step: Step) -> None:
    copies, on_device, peak_bytes, gone = step.schedule(), set[int](), 0, set[int]()
    for place, num_released in enumerate(copies.num_released):
        if place < len(step.saves) and step.saves[place] >= 0 and step.saves[place] not in step.saves[:place]:
            on_device.add(step.saves[place])
        peak_bytes = max(peak_bytes, sum(step.sizes_bytes[value] for value in on_device))
        before = copies.num_released[place - 1] if place else 0
        leaves = {value for batch in copies.out[before:num_released] for value in batch}
        on_device, gone = on_device - leaves, gone | leaves
        live_bytes = sum(step.sizes_bytes[value] for value in on_device)
        if live_bytes > step.limit_bytes:  # then nothing more can go
            assert {value for value in step.leaving if step.ready_at(value) <= place} <= gone
        if leaves:
            assert live_bytes + sum(step.sizes_bytes[value] for value in copies.out[num_released - 1]) > step.limit_bytes

    assert copies.peak_bytes == peak_bytes
    largest = max(step.sizes_bytes.values(), default=0)
    stays = sum(size for value, size in step.sizes_bytes.items() if value not in step.leaving)
    unwritten = sum(step.sizes_bytes[value] for value in step.leaving if value in step.ready)
    assert peak_bytes <= max(step.limit_bytes, stays + unwritten) + largest


# The backward


def _gone(copies: CopySchedule) -> set[int]:
    return {value for batch in copies.out[: copies.num_released[-1]] for value in batch}


def _forecast_of(step: Step, working_bytes: int) -> Forecast | None:
    order = step.order
    if not order:
        return None
    return Forecast(
        [step.sizes_bytes[value] for value in order],
        [working_bytes * (1 + place % 3) for place in range(len(order))],
        [value not in step.leaving for value in order],
        limit_bytes=step.limit_bytes,
    )


def _backward_levels(step: Step, copies: CopySchedule) -> list[tuple[int, bool]]:
    """Carry the backward out; return for each first request the bytes on the device, and whether it has fetched what is needed
    later."""
    order, gone = step.order, _gone(copies)
    on_device = set(step.sizes_bytes) - gone
    last = {value: max(place for place, asked in enumerate(step.requests) if asked == value) for value in order}
    first = {value: step.requests.index(value) for value in order}
    due = dict(zip(copies.requests, copies.num_fetched, strict=True))
    levels, fetched = [], 0
    for value in order:
        now, is_ahead = first[value], False
        on_device -= {other for other in order if last[other] < now}
        while fetched < due.get(value, 0):
            is_ahead = is_ahead or any(other != value for other in copies.back[fetched])
            on_device |= set(copies.back[fetched])
            fetched += 1
        levels.append((sum(step.sizes_bytes[other] for other in on_device), is_ahead))
    return levels


@settings(max_examples=60)
@given(steps(), st.sampled_from([None, 0, 1000, BATCH_BYTES]))
def test_backward_of_any_step(step: Step, working_bytes: int | None) -> None:
    copies = step.schedule(None if working_bytes is None else _forecast_of(step, working_bytes))

    wanted = [value for value in step.order if value in _gone(copies)]
    assert [value for batch in copies.back for value in batch] == wanted  # once
    for number, batch in enumerate(copies.back):
        fetched_at = next(place for place, num_fetched in enumerate(copies.num_fetched) if num_fetched > number)
        assert all(fetched_at <= copies.requests.index(value) for value in batch)  # and in time
    assert list(copies.requests) == [value for value in step.order if value in set(copies.requests)]
    assert set(step.order) & step.leaving <= set(copies.requests)
    for value, before, num_fetched in zip(copies.requests, (0, *copies.num_fetched), copies.num_fetched, strict=False):
        assert value in step.leaving or num_fetched > before
    largest_batch = max((sum(step.sizes_bytes[value] for value in batch) for batch in copies.back), default=0)
    for live_bytes, is_ahead in _backward_levels(step, copies):
        # a batch may have been gathered for earlier requests, which were served by then: its own room was there
        assert not is_ahead or live_bytes <= step.limit_bytes + largest_batch


def test_chain_leaves_and_comes_back_in_reverse() -> None:
    size = BATCH_BYTES
    step = Step(dict.fromkeys(range(6), size), frozenset(range(6)), [*range(6)], {}, [*range(6)][::-1], 2 * size)

    copies = step.schedule()

    assert copies.out == tuple((value,) for value in range(6))
    assert copies.num_sent == (1, 2, 3, 4, 5, 6, 6)
    assert copies.num_released == (0, 0, 1, 2, 3, 4, 4)
    assert copies.back == ((3,), (2,), (1,), (0,))
    assert copies.requests == (5, 4, 3, 2, 1, 0)
    assert copies.num_fetched == (0, 1, 2, 3, 4, 4)
    assert copies.peak_bytes == 3 * size


def test_nothing_leaves_and_nothing_is_asked_for() -> None:
    copies = Step({0: 8, 1: 8}, frozenset(), [0, 1, -1, 0], {}, [1, 0], 0).schedule()

    assert copies == CopySchedule(
        out=(), num_sent=(0,) * 5, num_released=(0,) * 5, back=(), requests=(), num_fetched=(), peak_bytes=16
    )


seconds = st.integers(0, 20)
lanes = st.sampled_from(list(Lane))
spans = st.lists(st.tuples(st.integers(0, 10), st.integers(0, 10), st.integers(-20, 50)), max_size=12)


@given(st.lists(st.tuples(lanes, seconds, seconds, seconds), max_size=15))
def test_each_lane_does_one_thing_after_the_other(work: list[tuple[Lane, int, int, int]]) -> None:
    timeline, done = Timeline(), {lane: [0.0] for lane in Lane}

    for lane, lasts, after, latency in work:
        end_s = timeline.issue(lane, lasts, after_s=after, latency_s=latency)

        assert end_s == max(done[lane][-1], after) + latency + lasts
        done[lane].append(end_s)

    assert timeline.free_s == [done[lane][-1] for lane in Lane]


@given(st.lists(st.tuples(seconds, seconds), max_size=12))
def test_what_compute_waits_for_makes_all_later_moments_late(stretches: list[tuple[int, int]]) -> None:
    """Each stretch of compute begins when it is there; compare with a clock that is set."""
    timeline, moment_s, clock_s = Timeline(), 0.0, 0.0
    for lasts, until in stretches:
        stall_s = timeline.wait(moment_s, until)

        assert stall_s == max(0.0, until - clock_s)
        clock_s += stall_s
        assert timeline.now_s(moment_s) == clock_s
        moment_s, clock_s = moment_s + lasts, clock_s + lasts
        assert timeline.late_s == clock_s - moment_s


@given(spans)
def test_levels_are_counted_at_each_place(found: list[tuple[int, int, int]]) -> None:
    levels = Levels(10)
    for start, end, num_bytes in found:
        levels.add(start, end, num_bytes)

    counted = [sum(num_bytes for start, end, num_bytes in found if start <= place < end) for place in range(11)]
    assert levels.each() == counted
    assert levels.peak_bytes == max(counted)
    assert counted[-1] == 0


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
