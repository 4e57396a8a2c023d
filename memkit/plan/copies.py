"""When each copy of a step is issued, and when its source is freed: computed once, for steps that repeat an earlier one, by the
rules of the byte window (`memkit.activations.offloading.window`). Small copies that are due close together are batched."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from memkit.plan.ratio import Forecast

BATCH_BYTES = 2**20  # smaller copies are batched up to this size: alone they do not fill the link


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySchedule:
    """What is due at each save and request; batches leave and return in order, so counts identify them."""

    out: tuple[tuple[int, ...], ...]  # the batches that leave, as numbers of values
    num_sent: tuple[int, ...]  # for each save, and for the end of the forward, the batches issued by then
    num_released: tuple[int, ...]  # for each save, and for the end of the forward, the batches freed by then
    back: tuple[tuple[int, ...], ...]
    requests: tuple[int, ...]  # by first request: the offloaded values, and those whose request starts a fetch
    num_fetched: tuple[int, ...]  # for each request, how many returning batches have been issued before it is served
    peak_bytes: int
    num_released_at_request: int = 0  # batches freed once the backward requests anything, if more than before


def schedule_copies(
    sizes_bytes: Mapping[int, int],
    leaving: Collection[int],
    *,
    saves: Sequence[int],
    ready: Mapping[int, int],
    requests: Sequence[int],
    limit_bytes: int,
    forecast: Forecast | None,
) -> CopySchedule:
    out, num_sent, num_released, peak_bytes = _forward(sizes_bytes, leaving, saves, ready, limit_bytes)
    gone = {value for batch in out[: num_released[-1]] for value in batch}
    order, back, num_fetched = _backward(sizes_bytes, gone, saves, requests, limit_bytes, forecast)
    before = [0, *num_fetched]
    shown = [place for place, value in enumerate(order) if value in leaving or num_fetched[place] != before[place]]
    return CopySchedule(
        out=tuple(out),
        num_sent=tuple(num_sent),
        num_released=tuple(num_released),
        back=tuple(back),
        requests=tuple(order[place] for place in shown),
        num_fetched=tuple(num_fetched[place] for place in shown),
        peak_bytes=peak_bytes,
    )


class _Batches:
    def __init__(self, sizes_bytes: Mapping[int, int]) -> None:
        self.closed: list[tuple[int, ...]] = []
        self.open: list[int] = []
        self._sizes_bytes = sizes_bytes
        self._open_bytes = 0

    def add(self, value: int) -> None:
        num_bytes = self._sizes_bytes[value]
        if num_bytes >= BATCH_BYTES:
            self.close()
        self.open.append(value)
        self._open_bytes += num_bytes
        if self._open_bytes >= BATCH_BYTES or len(self.open) == 64:
            self.close()

    def close(self) -> None:
        if self.open:
            self.closed.append(tuple(self.open))
            self.open, self._open_bytes = [], 0


def _forward(
    sizes_bytes: Mapping[int, int], leaving: Collection[int], saves: Sequence[int], ready: Mapping[int, int], limit_bytes: int
) -> tuple[list[tuple[int, ...]], list[int], list[int], int]:
    batches, seen = _Batches(sizes_bytes), set[int]()
    num_sent, num_released = [], []
    live_bytes = peak_bytes = released = opened_at = 0
    waiting: dict[int, list[int]] = {}
    for place in range(len(saves) + 1):
        value = saves[place] if place < len(saves) else -1
        if value >= 0 and value not in seen:
            seen.add(value)
            live_bytes += sizes_bytes[value]
            if value in leaving:
                waiting.setdefault(max(place, ready.get(value, place)), []).append(value)
        peak_bytes = max(peak_bytes, live_bytes)
        for ready_value in waiting.pop(place, ()):
            if not batches.open:
                opened_at = place
            batches.add(ready_value)
        is_end = place == len(saves)
        if is_end or place - opened_at >= 8:
            batches.close()
        while live_bytes > limit_bytes and (released < len(batches.closed) or batches.open):
            if released == len(batches.closed):
                batches.close()
            live_bytes -= sum(sizes_bytes[value] for value in batches.closed[released])
            released += 1
        num_sent.append(len(batches.closed))
        num_released.append(released)
    return batches.closed, num_sent, num_released, peak_bytes


def _backward(
    sizes_bytes: Mapping[int, int],
    gone: Collection[int],
    saves: Sequence[int],
    requests: Sequence[int],
    limit_bytes: int,
    forecast: Forecast | None,
) -> tuple[list[int], list[tuple[int, ...]], list[int]]:
    """Return the order of first requests, the batches that return, and how many are fetched by each request."""
    places: dict[int, int] = {}
    last: dict[int, int] = {}
    for value in requests:
        places.setdefault(value, len(places))
        last[value] = len(places) - 1
    order = list(places)
    dying: dict[int, int] = {}
    for value, place in last.items():
        dying[place + 1] = dying.get(place + 1, 0) + sizes_bytes[value]
    to_come = [value for value in order if value in gone]
    live_bytes = sum(sizes_bytes[value] for value in set(saves) if value >= 0 and value not in gone)
    batches, num_fetched, cursor = _Batches(sizes_bytes), [], 0
    for place, asked in enumerate(order):
        live_bytes -= dying.get(place, 0)
        while cursor < len(to_come):
            value = to_come[cursor]
            after_bytes = live_bytes + sizes_bytes[value]
            if value != asked and (
                after_bytes > limit_bytes
                or (forecast and forecast.level_bytes(place, places[value], after_bytes) > forecast.peak_bytes)
            ):
                break
            live_bytes = after_bytes
            batches.add(value)
            cursor += 1
        if batches.open and (places[batches.open[0]] - place <= 16):
            batches.close()
        num_fetched.append(len(batches.closed))
    return order, batches.closed, num_fetched
