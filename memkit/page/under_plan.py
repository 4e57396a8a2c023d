"""Bytes of a step on the device under a plan, moment by moment, computed from the plan and the trace that it was made from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from memkit.plan import NO_OP, Action, MemoryPlan, StepTrace
from memkit.plan.budget.simulate import replay_peak_bytes
from memkit.plan.plans import PlannedReplay, PlannedValue
from memkit.plan.timeline import Levels


def under_plan(trace: StepTrace, plan: MemoryPlan) -> tuple[list[int], list[int]]:
    """Return for each moment how the bytes under a plan differ from the plain step's, and what recomputing takes on top."""
    plan.check(trace)
    walk = _Walk(trace, plan)
    saved = walk.saved()
    return saved, walk.again(saved)


class _Walk:
    def __init__(self, trace: StepTrace, plan: MemoryPlan) -> None:
        self.trace, self.plan = trace, plan
        self.lineage, self.num_places = trace.step.lineage, len(trace.ops)
        self.first_save, self.first_use = dict[int, int](), dict[int, int]()
        for value, place in zip(trace.step.saves, trace.save_places, strict=True):
            self.first_save.setdefault(value, place)
        for value, place in zip(trace.step.uses, trace.use_places, strict=True):
            self.first_use.setdefault(value, place)
        self.sooner: Mapping[int, int] = {
            value: self.request_place(replay.request) for replay in reversed(plan.replays) for value in replay.stays
        }
        """When values are back that are recomputed on the way to others."""

    def request_place(self, request: int) -> int:
        return self.trace.use_places[request] if 0 <= request < len(self.trace.use_places) else self.num_places

    def save_place(self, save: int) -> int:
        places = self.trace.save_places
        return places[save] if 0 <= save < len(places) else self.request_place(0)

    def saved(self) -> list[int]:
        levels = Levels(self.num_places)
        for planned in self.plan.values:
            if planned.is_anchor:
                self._hold(levels, planned)
            else:
                self._leave(levels, planned)
        for root, (begin, end) in self._roots().items():
            levels.add(begin, min(end, self.num_places), self.trace.step.retained_bytes[root])
        return levels.each()[: self.num_places]

    def _leave(self, levels: Levels, planned: PlannedValue) -> None:
        life, value = self.trace.lifetimes[planned.value], planned.value
        if planned.action is Action.OFFLOAD:
            gone, back = max(self.save_place(planned.let_go_at), life.released_at), self.request_place(planned.fetch_at)
        elif planned.action is Action.RECOMPUTE:
            gone = max(life.released_at, self.first_save.get(value, life.released_at))
            back = min(self.first_use.get(value, self.num_places), self.sooner.get(value, self.num_places))
        else:
            gone = back = 0
        levels.add(gone, min(back, life.freed_at), -planned.num_bytes)
        if planned.held_until >= 0:
            end = min(self.request_place(planned.held_until) + 1, self.num_places)
            levels.add(life.freed_at, end, planned.num_bytes)

    def _hold(self, levels: Levels, planned: PlannedValue) -> None:
        """Add a value that is not saved and is held for recomputing others."""
        begin, end = self.trace.lifetimes[planned.value].released_at, self.request_place(planned.held_until) + 1
        levels.add(begin, min(end, self.num_places), planned.num_bytes)
        if planned.action is Action.OFFLOAD:
            gone, back = max(self.save_place(planned.let_go_at), begin), self.request_place(planned.fetch_at)
            levels.add(gone, min(back, end, self.num_places), -planned.num_bytes)

    def _roots(self) -> dict[int, tuple[int, int]]:
        """Return when the other roots of replays exist that would otherwise be freed."""
        retained = self.trace.step.retained_bytes
        known = {planned.value for planned in self.plan.values} | self.first_save.keys()
        found = dict[int, tuple[int, int]]()
        for replay in self.plan.replays:
            for op in replay.ops:
                for value in self.lineage.ins[op]:
                    if value in retained and value not in known and self.lineage.maker[value] == NO_OP:
                        life = self.trace.lifetimes.get(value)
                        found[value] = (0 if life is None else life.released_at, self.request_place(replay.request) + 1)
        return found

    def again(self, saved: Sequence[int]) -> list[int]:
        """Return for each place the bytes that replays take on top; they run before the op of their place."""
        trace = self.trace
        held = Levels(self.num_places)
        for value in self.first_save:
            life = trace.lifetimes.get(value)
            if life is not None:
                held.add(life.made_at, min(life.freed_at, self.num_places), self.lineage.num_bytes[value])
        beside = [max(live - level, 0) for live, level in zip(trace.live_bytes, held.each(), strict=False)]
        added = [0] * self.num_places
        at_place: dict[int, list[PlannedReplay]] = defaultdict(list)
        for replay in self.plan.replays:
            at_place[min(self.request_place(replay.request), self.num_places - 1)].append(replay)
        for place, replays in at_place.items():
            level = trace.live_bytes[place] + saved[place]
            under = (beside[place - 1] if place else 0) + level - beside[place]
            for replay in replays:
                left = {replay.value, *replay.stays}
                more = replay_peak_bytes(self.lineage, replay.ops, left) - sum(self.lineage.num_bytes[value] for value in left)
                added[place] = max(added[place], more + under - level)
        return added
