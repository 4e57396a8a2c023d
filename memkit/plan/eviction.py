"""`Walk`: evicts values when room is needed, and recomputes them. The simulation of a plan and the real step share this code.

The policy is dynamic tensor rematerialization (Kirisame et al., arXiv 2006.09616): values that are cheap to recompute, large
and not needed soon go first. A value's cost includes all of its missing ancestors.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Container
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Protocol

from memkit.plan.step import NO_OP, Lineage


@dataclass(frozen=True, slots=True, kw_only=True)
class DTRScore:
    """The score by which saved values are evicted, lowest first.

        score = (own cost + cost of missing ancestors) / (bytes * distance)

    MegEngine adds the free bytes next to a value to its bytes; PyTorch doesn't tell where its allocator puts values, see
    `docs/rematerialize-details.md`. Source: arXiv 2006.09616, section 4; MegEngine 1.4.

    Args:
        distance: "next_use": requests of the backward until the next use, in the known order or else in the reverse of the
            forward; or "staleness", as in the paper: saves and requests since the last use.
        max_replays: a value that was replayed this often in one step stays, to avoid thrashing.

    Raises:
        ValueError: the distance is neither of them, or `max_replays` is below 1.
    """

    distance: str = "next_use"
    max_replays: int = 64

    def __post_init__(self) -> None:
        if self.distance not in ("next_use", "staleness"):
            raise ValueError(f'DTRScore: distance must be "next_use" or "staleness"; found {self.distance!r}')
        if self.max_replays < 1:
            raise ValueError(f"DTRScore: max_replays must be at least 1; found {self.max_replays}")


_RANKED_FOR = 64  # the ranking of N values stays valid for N over this many saves and requests: distances change little
_LEAST_COST_S = 1e-9
_ROOT_GONE = "a root that is needed for a replay is gone"


class ValueStore(Protocol):
    """The saved values of a step, real or simulated, as a `Walk` uses them."""

    @property
    def live_bytes(self) -> int: ...  # on the device

    def is_available(self, value: int) -> bool: ...  # to a replay

    def is_wanted(self, value: int) -> bool: ...  # by the backward

    def distance(self, value: int) -> int:
        """Return the number of requests until a value's next use, at least 1."""

    def drop(self, value: int) -> bool:
        """Drop a value on the device if it can be recomputed; return whether it was dropped."""

    def drop_call(self, needed: Container[int]) -> bool:
        """Drop what the next ended call of a module has saved, if nothing of it is needed; tell whether any was dropped."""

    def run(self, op: int, in_place: Collection[int]) -> None:
        """Run an op again; the replay holds its values. It may overwrite the values `in_place`."""

    def keep(self, value: int) -> None: ...  # a value of the replay

    def forget(self, value: int) -> None: ...  # a value of the replay


class Walk:
    """Follows the saves and requests of a step under a limit in bytes of storages; evicts and recomputes values."""

    def __init__(self, lineage: Lineage, score: DTRScore, limit_bytes: float, store: ValueStore) -> None:
        self.lineage = lineage
        self.score = score
        self.limit_bytes = limit_bytes
        self._store: ValueStore = weakref.proxy(store)
        self.num_replays: dict[int, int] = {}
        self.replayed_s = 0.0
        self.num_replayed_ops = 0
        self.temp_bytes = 0  # bytes of values that only a replay holds
        self.peak_bytes = 0
        self.evictable: dict[int, None] = {}  # the droppable values on the device, in order of arrival
        self.needed: dict[int, int] = {}  # the values that the current replay will read, and the last op that does
        self.clock = 0
        self.given = set[int]()  # held by the requesting node: to drop one frees nothing, to recompute it makes a second copy
        self._asks = -1
        self._touched: dict[int, int] = {}
        # [Note: ranking] The victim is found without a look at all values. Each value has a lower bound of its recompute cost,
        # at first its own op. A dropped value makes others cost more, so bounds stay valid; a new one makes its descendants
        # cheaper, so their bounds start anew. A heap holds a score per bound: the top is refined until one stays there.
        self._least_s: dict[int, float] = {}
        self._ranking: list[tuple[float, int]] = []
        self._ranked_until = -1
        self._come: list[int] = []  # values that arrived since the last look at the ranking
        self._last_evictable = -1  # the largest number of a droppable value

    def staleness(self, value: int) -> int:
        return self.clock - self._touched[value] + 1

    def note_request(self, value: int, node: int) -> None:
        """Note a request: its value is not dropped until another graph node requests one."""
        self.clock += 1
        if node != self._asks:
            self._asks = node
            self.given.clear()
        self.given.add(value)

    def admit(self, value: int) -> None:
        self.evictable[value] = None
        self._touched[value] = self.clock
        self._last_evictable = max(self._last_evictable, value)
        self._come.append(value)

    def drop(self, value: int) -> bool:
        self.evictable.pop(value, None)
        return self._store.drop(value)

    def note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self._store.live_bytes + self.temp_bytes)

    def make_room(self, num_bytes: int, needed: Container[int] = ()) -> bool:
        """Drop values, but none that are needed or given, until `num_bytes` more would fit; tell whether they do."""
        while self._store.live_bytes + self.temp_bytes + num_bytes > self.limit_bytes:
            if self._store.drop_call(needed):
                continue
            victim = self._victim(needed)
            if victim is None:
                return False
            self.drop(victim)
        return True

    def _victim(self, needed: Container[int]) -> int | None:
        """Return the value with the lowest score that is neither needed nor given: see [Note: ranking]."""
        evictable, num_replays, max_replays = self.evictable, self.num_replays, self.score.max_replays
        self._note_come()
        if self.clock > self._ranked_until:
            self._rank()
        ranking, passed, found = self._ranking, list[tuple[float, int]](), None
        while ranking and found is None:
            entry = heappop(ranking)
            value = entry[1]
            if value not in evictable or num_replays.get(value, 0) >= max_replays:
                continue
            if value in needed or value in self.given:
                passed.append(entry)
                continue
            enough_s = 2 * self._bound_s(value) + _LEAST_COST_S
            cost_s = self._least_s[value] = self.missing_cost_s(value, enough_s)
            entry = self._entry(value, cost_s)
            if cost_s <= enough_s and (not ranking or entry <= ranking[0]):
                found = value
            heappush(ranking, entry)
        for entry in passed:
            heappush(ranking, entry)
        return found

    def _rank(self) -> None:
        self._ranking = [self._entry(value, self._bound_s(value)) for value in self.evictable]
        heapify(self._ranking)
        self._ranked_until = self.clock + len(self.evictable) // _RANKED_FOR
        self._last_evictable = max(self.evictable, default=-1)

    def _entry(self, value: int, cost_s: float) -> tuple[float, int]:
        distance = self._store.distance(value) if self.score.distance == "next_use" else self.staleness(value)
        return (cost_s + _LEAST_COST_S) / (self.lineage.num_bytes[value] + 1) / distance, value

    def _bound_s(self, value: int) -> float:
        bound_s = self._least_s.get(value)
        return self.lineage.seconds[self.lineage.maker[value]] if bound_s is None else bound_s

    def _note_come(self) -> None:
        """Restart the bounds of values that are made from new arrivals: these may be cheaper now."""
        if not self._come:
            return
        lineage, evictable, latest = self.lineage, self.evictable, self._last_evictable
        lineage.link()
        users, outs = lineage.users, lineage.outs
        pending, changed = self._come, set(self._come)
        self._come = []
        while pending:
            for op in users[pending.pop()]:
                for made in outs[op]:
                    if made <= latest and made not in changed:
                        changed.add(made)
                        if not self._store.is_available(made):
                            pending.append(made)
        for value in changed:
            self._least_s.pop(value, None)
            if value in evictable:
                heappush(self._ranking, self._entry(value, self._bound_s(value)))

    def missing_cost_s(self, value: int, enough_s: float = math.inf) -> float:
        """Return the seconds of all ops that recompute a value; stops adding above `enough_s`."""
        return self._missing(value, enough_s)[1]

    def _missing(self, value: int, enough_s: float = math.inf) -> tuple[set[int], float]:
        lineage, is_available = self.lineage, self._store.is_available
        maker, ins, seconds = lineage.maker, lineage.ins, lineage.seconds
        ops, pending, total_s = set[int](), [value], 0.0
        while pending and total_s <= enough_s:
            op = maker[pending.pop()]
            if op not in ops:
                assert op != NO_OP, _ROOT_GONE
                ops.add(op)
                total_s += seconds[op]
                for source in ins[op]:
                    if not is_available(source):
                        pending.append(source)
        return ops, total_s

    def rebuild(self, target: int) -> None:
        """Recompute a value and its missing ancestors, each op once. Intermediates that are still wanted stay if they fit;
        others are freed at their last use. Where room is short, saved values that the replay does not need are dropped."""
        lineage = self.lineage
        ops = sorted(self._missing(target)[0])
        needed = self.needed = {target: len(lineage.ins)}
        for op in ops:
            for value in lineage.ins[op]:
                if value != target:
                    needed[value] = op
        temps = set[int]()
        for op in ops:
            taken = lineage.taken.get(op, ())
            in_place = {over for over, _ in taken if over in temps and needed[over] == op and not self._store.is_wanted(over)}
            reused_bytes = sum(lineage.num_bytes[over] for over in in_place)
            new_bytes = sum(lineage.num_bytes[value] for value in lineage.outs[op]) - reused_bytes
            self.make_room(new_bytes, needed)
            self._store.run(op, in_place)
            self.num_replayed_ops += 1
            self.replayed_s += lineage.seconds[op]
            temps -= in_place
            self.temp_bytes += new_bytes
            self.note_peak()
            for value in lineage.outs[op]:
                if self._store.is_available(value):  # a sibling that was never dropped
                    self.temp_bytes -= lineage.num_bytes[value]
                    self._store.forget(value)
                else:
                    temps.add(value)
            for value in {*lineage.outs[op], *lineage.ins[op]}:
                if needed.get(value, -1) > op:
                    continue
                needed.pop(value, None)
                if value in temps:
                    temps.discard(value)
                    self._settle(value)
        for value in temps:
            self._settle(value)

    def _settle(self, value: int) -> None:
        num_bytes = self.lineage.num_bytes[value]
        self.temp_bytes -= num_bytes
        if self._store.is_wanted(value):
            self._store.keep(value)
            self.num_replays[value] = self.num_replays.get(value, 0) + 1
            self.admit(value)
        else:
            self._store.forget(value)
