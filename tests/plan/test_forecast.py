"""The forecast of a backward's levels, against playing the backward through."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memkit.plan import Forecast

records = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 200), st.booleans()), min_size=1, max_size=12)


def _forecast(backward: list[tuple[int, int, bool]], *, limit_bytes: int = 0) -> Forecast:
    sizes, working, stays = zip(*backward, strict=True)
    return Forecast(sizes, working, stays, limit_bytes=limit_bytes)


def _played(backward: list[tuple[int, int, bool]]) -> int:
    """Return the peak of a backward that fetches each record when it is asked for: each operator makes as much as it reads."""
    live = {place for place, (_, _, stays) in enumerate(backward) if stays}
    peak = 0
    for place, (size, working, _) in enumerate(backward):
        live.add(place)
        peak = max(peak, working + size + sum(backward[other][0] for other in live))
        live.discard(place)
    return peak


@given(records)
def test_peak_is_that_of_the_backward_without_fetching_ahead(backward: list[tuple[int, int, bool]]) -> None:
    assert _forecast(backward).peak_bytes == max(_played(backward), backward[0][1])


@given(records, st.integers(0, 500))
def test_peak_has_room_for_what_the_backward_begins_with(backward: list[tuple[int, int, bool]], limit_bytes: int) -> None:
    found = _forecast(backward, limit_bytes=limit_bytes).peak_bytes

    assert found == max(limit_bytes + backward[0][1], _played(backward))


@given(records, st.data())
def test_level_is_the_most_on_the_way(backward: list[tuple[int, int, bool]], data: st.DataObject) -> None:
    now = data.draw(st.integers(0, len(backward) - 1))
    until = data.draw(st.integers(0, len(backward) + 2))
    live_bytes = data.draw(st.integers(0, 600)) + sum(size for size, _, _ in backward[now : until + 1])

    found = _forecast(backward).level_bytes(now, until, live_bytes)

    wanted = live_bytes
    levels = []
    for place in range(now + 1, min(until, len(backward) - 1) + 1):
        if place >= now + 2:  # what was asked for two places ago is free
            wanted -= backward[place - 2][0]
        levels.append(wanted + backward[place][0] + backward[place][1])
    assert found == max(levels, default=live_bytes)


def test_nothing_is_on_the_way_to_a_place_that_is_passed() -> None:
    assert _forecast([(4, 10, True), (4, 10, True)]).level_bytes(1, 1, 7) == 7
