"""`memkit.plan.timeline`: the clocks of a step against playing its lanes through, and levels against counting at each place."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memkit.plan.timeline import Lane, Levels, Timeline

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

    assert [timeline.free_s(lane) for lane in Lane] == [done[lane][-1] for lane in Lane]


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
