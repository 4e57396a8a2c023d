"""The seconds and bytes of a step under one action for each value, with the moments of its copies and its replays. Bytes follow
from saves and requests alone, where compute waits for copies: a link slower than expected costs time, never bytes."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import add

from memkit.plan.budget.problem import Problem
from memkit.plan.plans import Action
from memkit.plan.step import NO_OP, Lineage
from memkit.plan.timeline import Lane, Levels, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One value that leaves and comes back; all its moments are points of the problem."""

    index: int  # its place in `Problem.values`
    copy: int
    let_go: int  # when compute waits for that copy, and the device forgets the value
    fetch: int
    need: int  # when compute waits for that one: its first request, or the first replay that reads it


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedReplay:
    index: int  # the requested value's place in `Problem.values`
    point: int
    ops: tuple[int, ...]
    stays: tuple[int, ...]  # other values that are made on the way and stay, by their places in `Problem.values`


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    actions: tuple[Action, ...]  # as carried out: what would free nothing stays, and an anchor that no replay reads isn't held
    seconds: float
    peak_bytes: int
    over_bytes: int  # bytes above the budget at the worst slot; 0 if it fits
    excess_bytes: int  # the same, summed over all points
    worst_slot: int = 0
    replayed_s: float
    stall_s: float = 0.0
    moved_bytes: int = 0
    moves: tuple[Move, ...] = ()
    replays: tuple[SimulatedReplay, ...] = ()
    held_until: dict[int, int] = field(default_factory=dict)  # for each value that replays read, the last such slot
    levels: tuple[int, ...]  # the most bytes from each point to the next, but base and values fetched early

    @property
    def num_handled(self) -> int:
        return len(self.moves) + sum(len(replay.ops) for replay in self.replays)

    @property
    def rank(self) -> tuple[int, float, int]:
        """The lower rank is better: fewer bytes above the budget, then fewer seconds, then fewer bytes moved."""
        return self.excess_bytes, self.seconds, self.moved_bytes


class ReplayCosts:
    """The ops that make all dropped values from the values on the device, each op counted once."""

    __slots__ = ("_anchors", "_ins", "_is_there", "_maker", "_num_wanted", "_op_s", "_wanting", "seconds")

    def __init__(self, problem: Problem, actions: Sequence[Action]) -> None:
        lineage = problem.lineage
        self._maker, self._ins, self._op_s = lineage.maker, lineage.ins, problem.op_s
        self._anchors = frozenset(held.value for held in problem.values if held.is_anchor)
        self._is_there = bytearray(len(lineage.maker))
        self._wanting = [0] * len(lineage.maker)  # how many ops that run again, and requests, want each value
        self._num_wanted = [0] * len(lineage.ins)
        self.seconds = 0.0
        for held, action in zip(problem.values, actions, strict=True):
            self._is_there[held.value] = action is not Action.RECOMPUTE or not held.is_anchor
        for held, action in zip(problem.values, actions, strict=True):
            if action is Action.RECOMPUTE and not held.is_anchor:
                self.drop(held.value)

    def drop(self, value: int) -> list[int]:
        """Let a value that was there be gone; return the ops that run again because of that, and did not before."""
        self._is_there[value] = 0
        if value not in self._anchors:
            self._wanting[value] += 1
        return self._count(value, 1) if self._wanting[value] else []

    def hold(self, value: int) -> None:
        if self._wanting[value]:
            self._count(value, -1)
        if value not in self._anchors:
            self._wanting[value] -= 1
        self._is_there[value] = 1

    def cost(self, value: int) -> float:
        before_s = self.seconds
        self.drop(value)
        cost_s = self.seconds - before_s
        self.hold(value)
        return cost_s

    def cost_beside(self, value: int, anchor: int) -> float:
        """Return the seconds that it takes more without a value, if an anchor that is not held is held for it."""
        before_s = self.seconds
        self.hold(anchor)
        gain_s, cost_s = before_s - self.seconds, self.cost(value)
        self.drop(anchor)
        return cost_s - gain_s

    def gain(self, value: int) -> float:
        before_s = self.seconds
        self.hold(value)
        gain_s = before_s - self.seconds
        self.drop(value)
        return gain_s

    def _count(self, value: int, change: int) -> list[int]:
        """Let one more, or one less, want a value that is not there; return the ops that begin, or cease, to run again."""
        maker, ins, num_wanted, wanting, is_there = self._maker, self._ins, self._num_wanted, self._wanting, self._is_there
        pending, changed, edge = [value], list[int](), max(change, 0)
        while pending:
            op = maker[pending.pop()]
            if op == NO_OP:
                continue
            num_wanted[op] += change
            if num_wanted[op] == edge:
                changed.append(op)
                self.seconds += change * self._op_s[op]
                for source in ins[op]:
                    wanting[source] += change
                    if wanting[source] == edge and not is_there[source]:
                        pending.append(source)
        return changed


def reads_of(problem: Problem, dropped: Iterable[int], is_there: bytearray) -> dict[int, int]:
    """Return the slots at which replays of dropped values, in this order, first read what is on the device or retained."""
    maker, ins, values, retained = problem.lineage.maker, problem.lineage.ins, problem.values, problem.retained
    found, seen = dict[int, int](), set[int]()
    for index in dropped:
        slot, pending = values[index].use, [maker[values[index].value]]
        while pending:
            op = pending.pop()
            if op in seen or op == NO_OP:
                continue
            seen.add(op)
            for source in ins[op]:
                if is_there[source] or source in retained:
                    found.setdefault(source, slot)
                else:
                    pending.append(maker[source])
    return found


def replay_peak_bytes(lineage: Lineage, ops: Sequence[int], stays: Collection[int]) -> int:
    """Return the most bytes that a replay holds: an output goes after its last reader, unless it stays."""
    ins, outs, sizes, taken = lineage.ins, lineage.outs, lineage.num_bytes, lineage.taken
    last = {source: op for op in ops for source in ins[op]}
    made = set[int]()
    held_bytes = peak_bytes = 0
    for op in ops:
        for over, _ in taken.get(op, ()):
            if over in made and last[over] == op and over not in stays:
                made.discard(over)
                held_bytes -= sizes[over]
        for value in outs[op]:
            made.add(value)
            held_bytes += sizes[value]
        peak_bytes = max(peak_bytes, held_bytes)
        for value in (*ins[op], *outs[op]):
            if value in made and last.get(value, NO_OP) <= op and value not in stays:
                made.discard(value)
                held_bytes -= sizes[value]
    return peak_bytes


def simulate(problem: Problem, actions: Sequence[Action], budget_bytes: int, *, most_replayed_s: float = math.inf) -> Simulated:
    """Values leave in the order of saves, and come back in the order of need, as early as the budget allows."""
    while True:
        run = _Run(problem, actions, budget_bytes - problem.base_bytes, most_replayed_s)
        stays = run.memory()
        if run.most_replayed_s < 0:
            return Simulated(
                actions=tuple(actions),
                seconds=math.inf,
                peak_bytes=2**62,
                over_bytes=2**62,
                excess_bytes=2**62,
                replayed_s=math.inf,
                levels=tuple(run.levels),
            )
        if not stays:
            return run.outcome()
        changed = list(actions)
        for index in stays:
            changed[index] = Action.RECOMPUTE if problem.values[index].is_anchor and index in run.unread else Action.KEEP
        actions = changed


class _Run:
    """One walk over a step: the forward and its copies, the requests, the fetches, and then the clock of the backward."""

    def __init__(self, problem: Problem, actions: Sequence[Action], limit_bytes: int, most_replayed_s: float) -> None:
        self.problem, self.actions, self.limit_bytes = problem, actions, limit_bytes
        self.values = problem.values
        self.back = problem.num_forward_points
        self.timeline = Timeline()
        self.unread = set[int]()
        self.stall_s = 0.0
        self.most_replayed_s = most_replayed_s  # the seconds left for replays; below 0 the walk was given up
        self.moves: list[Move] = []
        self.replays: list[SimulatedReplay] = []
        self.let_go: dict[int, int] = {}
        self._is_there = bytearray(len(problem.lineage.maker))
        dropped: list[int] = []
        for index, (held, action) in enumerate(zip(self.values, actions, strict=True)):
            if action is not Action.RECOMPUTE:
                self._is_there[held.value] = 1
            elif not held.is_anchor and held.use < problem.num_slots:
                dropped.append(index)
        dropped.sort(key=lambda index: (self.values[index].use, -self.values[index].made))
        self.dropped = dropped
        self.first_read = reads_of(problem, dropped, self._is_there)
        self.last_read = reads_of(problem, reversed(dropped), self._is_there)
        self.need: dict[int, int] = {}  # for each value that is to leave, the point at which it is to be back

    def memory(self) -> list[int]:
        """Walk over the bytes of the step; stop at the values that would leave or be held for nothing, and return them."""
        problem = self.problem
        occupied = self._static()
        if self.unread:
            return list(self.unread)
        slots = list(map(add, problem.working_bytes, occupied))
        points = problem.points
        ends = (*points[1:], problem.num_slots)
        self.slots = slots
        self.levels = [max(slots[begin:end]) for begin, end in zip(points, ends, strict=True)]
        self._forward()
        self._replay_all([problem.request_bytes[slot] + occupied[slot] for slot in points])
        if self.most_replayed_s < 0:
            return []
        self.beside_fetches = tuple(self.levels)
        wanted = sorted((self.need[index], index) for index in self.leaving)
        staying = self._fitting(list(self.levels), self.back, wanted)  # not let go by the first request, and need not be
        if not staying:
            self._fetch()
        return staying

    def _static(self) -> list[int]:
        """Return for each slot the bytes of values that depend neither on copies nor on intermediates of replays."""
        problem, num_slots = self.problem, self.problem.num_slots
        levels = Levels(num_slots)
        put = levels.add
        first_back = problem.points[self.back] if self.back < len(problem.points) else num_slots
        first_read, last_read = self.first_read, self.last_read
        for index, (held, action) in enumerate(zip(self.values, self.actions, strict=True)):
            num_bytes = held.num_bytes
            if action is Action.RECOMPUTE:
                if not held.is_anchor:
                    gone = max(held.released, held.saved)
                    put(held.made, gone, num_bytes)
                    put(max(held.use, gone), held.freed, num_bytes)
                continue
            last = last_read.get(held.value, -1)
            if held.is_anchor and last < 0:
                self.unread.add(index)
                continue
            begin, end = held.released if held.is_anchor else held.made, max(held.freed, last + 1)
            if action is Action.OFFLOAD:
                need = min(held.use, first_read.get(held.value, num_slots))
                self.need[index] = problem.point_of(need)
                put(begin, first_back, num_bytes)
                put(need, end, num_bytes)
            else:
                put(begin, end, num_bytes)
        for root, (begin, num_bytes) in problem.retained.items():
            if root in last_read:
                put(begin, last_read[root] + 1, num_bytes)
        return levels.each()[:num_slots]

    def _forward(self) -> None:
        problem, values, timeline, limit_bytes = self.problem, self.values, self.timeline, self.limit_bytes
        gpu, points, starts_s, levels = problem.gpu, problem.points, problem.starts_s, self.levels
        copied_at = defaultdict[int, list[int]](list)
        for index in self.need:
            copied_at[values[index].saved].append(index)
        on_lane: deque[tuple[float, int]] = deque()
        copied: list[tuple[int, int]] = []  # values that others still hold: until which slot, and the index
        gone_bytes = 0
        for point in range(self.back):
            slot = points[point]
            moment_s = starts_s[slot]
            now_s = timeline.now_s(moment_s)
            for index in copied_at.get(slot, ()):
                copy_s = values[index].num_bytes / gpu.d2h_bytes_per_s
                on_lane.append((timeline.issue(Lane.OUT, copy_s, after_s=now_s, latency_s=gpu.copy_latency_s), index))
            while True:
                while on_lane and on_lane[0][0] <= now_s:
                    index = on_lane.popleft()[1]
                    heappush(copied, (values[index].released, index))
                while copied and copied[0][0] <= slot:
                    index = heappop(copied)[1]
                    self.let_go[index] = point
                    gone_bytes += values[index].num_bytes
                if levels[point] - gone_bytes <= limit_bytes:
                    break
                end_s = next((end_s for end_s, index in on_lane if values[index].released <= slot), math.inf)
                if end_s == math.inf:
                    break
                self.stall_s += timeline.wait(moment_s, end_s)
                now_s = end_s
            levels[point] -= gone_bytes
        self.leaving = [*(index for _, index in copied), *(index for _, index in on_lane)]
        self._free_s = timeline.free_s[Lane.OUT]

    def _replay_all(self, asked: list[int]) -> None:
        problem, values, lineage = self.problem, self.values, self.problem.lineage
        levels, static = self.levels, list(self.levels)
        is_there, index_of = self._is_there, problem.index
        maker, ins, outs = lineage.maker, lineage.ins, lineage.outs
        until: dict[int, int] = {}
        peaks: dict[int, int] = {}
        for wanted in self.dropped:
            held = values[wanted]
            value, slot = held.value, held.use
            if value in until:
                continue
            point = problem.point_of(slot)
            ops, pending = set[int](), [maker[value]]
            while pending:
                op = pending.pop()
                if op in ops or op == NO_OP:
                    continue
                ops.add(op)
                for source in ins[op]:
                    if not is_there[source] and until.get(source, -1) <= slot:
                        pending.append(maker[source])
            ordered = sorted(ops)
            self.most_replayed_s -= sum(problem.op_s[op] for op in ordered)
            if self.most_replayed_s < 0:
                return
            until[value] = held.freed
            found = sorted(
                (values[index].use, index)
                for op in ordered
                for index in (index_of[made] for made in outs[op] if made in index_of and made not in until)
                if slot <= values[index].use < values[index].freed
                and not values[index].is_anchor
                and not is_there[values[index].value]
            )
            beside_bytes = asked[point] + levels[point] - static[point]
            at_once = [index for use, index in found if use == slot]
            later = [(problem.point_of(use), index) for use, index in found if use > slot]
            stays = [*at_once, *self._fitting(levels, point, later)]
            same_bytes = held.num_bytes + sum(values[index].num_bytes for index in at_once)
            kept = {value, *(values[index].value for index in stays)}
            peak = replay_peak_bytes(lineage, ordered, kept) + beside_bytes - same_bytes
            until.update((values[index].value, values[index].freed) for index in stays)
            peaks[point] = max(peaks.get(point, 0), peak)
            self.replays.append(SimulatedReplay(index=wanted, point=point, ops=tuple(ordered), stays=tuple(stays)))
        for point, peak in peaks.items():
            levels[point] = max(levels[point], peak)
        self.replay_peaks = peaks

    def _fitting(self, levels: list[int], begin: int, wanted: Sequence[tuple[int, int]]) -> list[int]:
        """Add to levels those of `wanted` that fit from a point on up to their end, the one that ends first first."""
        fitting: list[tuple[int, int]] = []
        reached, most = begin, 0
        smallest = min((self.values[index].num_bytes for _, index in wanted), default=0)
        for end, index in wanted:
            if end > reached:
                most, reached = max(most, max(levels[reached:end])), end
            if most + smallest > self.limit_bytes:
                break
            num_bytes = self.values[index].num_bytes
            if most + num_bytes <= self.limit_bytes:
                most += num_bytes
                fitting.append((end, index))
        added = sum(self.values[index].num_bytes for _, index in fitting)
        reached = begin
        for end, index in fitting:
            if end > reached:
                levels[reached:end] = [level + added for level in levels[reached:end]]
                reached = end
            added -= self.values[index].num_bytes
        return [index for _, index in fitting]

    def _fetch(self) -> None:
        levels, values, limit_bytes, point_of = self.levels, self.values, self.limit_bytes, self.problem.point_of
        previous, fetched_bytes, gone_bytes, done = self.back, 0, 0, self.back
        order = sorted(self.need, key=lambda index: (self.need[index], -values[index].saved, index))
        ends = [self.need[index] for index in order]
        added = Levels(len(levels))
        # Values fetched for earlier needs are there until then. So the bytes at a point are its level, less the bytes needed
        # by then, plus all fetched bytes; the last point without room is on a stack of the points that no later one tops.
        stack: list[int] = []
        tops: list[int] = []
        position = 0
        for index in order:
            need, num_bytes = self.need[index], values[index].num_bytes
            while done < need:
                while position < len(ends) and ends[position] <= done:
                    gone_bytes += values[order[position]].num_bytes
                    position += 1
                top = levels[done] - gone_bytes
                while tops and tops[-1] <= top:
                    tops.pop()
                    stack.pop()
                tops.append(top)
                stack.append(done)
                done += 1
            room_bytes = limit_bytes - num_bytes - fetched_bytes
            place = bisect_left(tops, -room_bytes, key=lambda top: -top)  # the tops fall: those before are above
            fetch = min(max(previous, stack[place - 1] + 1 if place else previous), max(need, previous))
            fetched_bytes += num_bytes
            previous = fetch
            fetch = min(fetch, need)
            added.add(fetch, need, num_bytes)
            copy = point_of(values[index].saved)
            self.moves.append(Move(index=index, copy=copy, let_go=self.let_go.get(index, self.back), fetch=fetch, need=need))
        self.levels = list(map(add, levels, added.each()))

    def outcome(self) -> Simulated:
        problem, levels, limit_bytes = self.problem, self.levels, self.limit_bytes
        replayed_s = self._backward()
        over = [level - limit_bytes for level in levels]
        worst = max(range(len(levels)), key=levels.__getitem__)
        peak = max(levels[worst], 0)
        worst_slot, end = [*problem.points, problem.num_slots][worst : worst + 2]
        if self.replay_peaks.get(worst, -1) < self.beside_fetches[worst]:
            worst_slot = max(range(worst_slot, end), key=self.slots.__getitem__)
        return Simulated(
            actions=tuple(self.actions),
            seconds=problem.plain_s + self.timeline.late_s,
            peak_bytes=problem.base_bytes + peak,
            over_bytes=max(peak - limit_bytes, 0),
            excess_bytes=sum(excess for excess in over if excess > 0),
            worst_slot=worst_slot,
            replayed_s=replayed_s,
            stall_s=self.stall_s,
            moved_bytes=sum(self.values[move.index].num_bytes for move in self.moves),
            moves=tuple(self.moves),
            replays=tuple(self.replays),
            held_until=self.last_read,
            levels=self.beside_fetches,
        )

    def _backward(self) -> float:
        problem, values, timeline = self.problem, self.values, self.timeline
        gpu, points, starts_s, op_s = problem.gpu, problem.points, problem.starts_s, problem.op_s
        fetched, needed = defaultdict[int, list[Move]](list), defaultdict[int, list[int]](list)
        replays_s = defaultdict[int, float](float)
        for move in self.moves:
            fetched[move.fetch].append(move)
            needed[move.need].append(move.index)
        for replay in self.replays:
            replays_s[replay.point] += sum(op_s[op] for op in replay.ops)
        if self.leaving and self.back < len(points):  # values not freed by now are freed at the first request
            self.stall_s += timeline.wait(starts_s[points[self.back]], self._free_s)
        there_s: dict[int, float] = {}
        for point in range(self.back, len(points)):
            moment_s = starts_s[points[point]]
            for move in fetched.get(point, ()):
                copy_s = values[move.index].num_bytes / gpu.h2d_bytes_per_s
                after_s = timeline.now_s(moment_s)
                there_s[move.index] = timeline.issue(Lane.BACK, copy_s, after_s=after_s, latency_s=gpu.copy_latency_s)
            for index in needed.get(point, ()):
                self.stall_s += timeline.wait(moment_s, there_s[index])
            timeline.late_s += replays_s.get(point, 0.0)
        return sum(replays_s.values())
