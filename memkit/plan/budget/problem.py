"""What a planner decides on: one step cut into slots, what it takes in each, and the values that may leave or be dropped."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from memkit.plan.gpu import GpuSpec
from memkit.plan.plans import NEVER, Action
from memkit.plan.step import NO_OP, Lifetime, Lineage, StepTrace
from memkit.plan.timeline import Levels


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldValue:
    """A value that something can be decided on: a saved one, or an *anchor*, which replays may start from if it is held, and
    which is not held if it is recomputed. All its moments are slots."""

    value: int
    num_bytes: int
    made: int
    saved: int  # its first save; of an anchor the first save after it was made
    released: int  # from here on nobody but autograd holds it, and for an anchor nobody at all
    use: int  # its first request; of an anchor the first slot behind the step
    freed: int
    choices: frozenset[Action]
    is_anchor: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One step on one GPU. A *slot* is what runs between two moments at which something is saved, asked for, made, released or
    freed. A *point* is a slot that begins with a save or a request: only there can anything be done."""

    trace: StepTrace
    gpu: GpuSpec
    base_bytes: int  # what is there all along: parameters, buffers, inputs, optimizer states
    places: tuple[int, ...]  # for each slot, how many ops have run when it begins
    starts_s: tuple[float, ...]  # when each slot begins in the plain step; behind the last, when the step ends
    working_bytes: tuple[int, ...]  # the most bytes in each slot, beside the base and the saved values
    request_bytes: tuple[int, ...]  # the same as each slot begins: what replays come on top of
    values: tuple[HeldValue, ...]  # saved ones in the order of first saves, then anchors
    index: Mapping[int, int]  # the place of each value of the lineage among `values`
    points: tuple[int, ...]
    num_forward_points: int  # the first point with a request
    op_s: tuple[float, ...]
    retained: Mapping[int, tuple[int, int]]  # other roots that are gone unless held: from which slot on, and bytes
    plain: tuple[Action, ...]  # the plain step: all saved values stay, no anchor is held
    plain_peak_bytes: int
    save_at: Mapping[int, int]  # the last save of the step at each slot where one is
    request_at: Mapping[int, int]  # the first request of the step at each slot where one is

    @property
    def lineage(self) -> Lineage:
        return self.trace.step.lineage

    @property
    def num_slots(self) -> int:
        return len(self.places)

    @property
    def plain_s(self) -> float:
        return self.starts_s[-1]

    def point_of(self, slot: int) -> int:
        """Return the last point that is not after a slot; behind the step the number of points."""
        return len(self.points) if slot >= self.num_slots else bisect_right(self.points, slot) - 1

    def module_at(self, slot: int) -> tuple[str, str]:
        begin, num_ops = self.places[slot], len(self.trace.ops)
        end = self.places[slot + 1] if slot + 1 < self.num_slots else num_ops
        place = min(max(range(begin, end), key=self.trace.live_bytes.__getitem__, default=begin), num_ops - 1)
        if place < 0:
            return "", ""
        op, trace = self.trace.ops[place].name, self.trace
        if place < trace.num_forward_ops:
            made = bisect_left(trace.op_places, place)
            calls = [call for call in trace.modules if call.begin <= made < call.end]
            if calls or trace.modules:
                return (calls[-1].module if calls else ""), op
            # where calls of modules were not noted: that of the last saved value that was made by then
            values = (value for outs in reversed(self.lineage.outs[: made + 1]) for value in outs if value in trace.names)
            return next((trace.names[value][1] for value in values), ""), op
        asked = reversed(trace.step.uses[: bisect_right(trace.use_places, place)])
        modules = (trace.names.get(value, ("", ""))[1] for value in asked)
        return next(filter(None, modules), ""), op


def make_problem(
    trace: StepTrace, gpu: GpuSpec, *, optimizer_bytes: int = 0, measured_s: Sequence[float] | None = None
) -> Problem:
    step, lineage, num_ops = trace.step, trace.step.lineage, len(trace.ops)
    first_save = dict(zip(reversed(step.saves), reversed(trace.save_places), strict=True))
    first_use = dict(zip(reversed(step.uses), reversed(trace.use_places), strict=True))
    saved = {value: trace.lifetimes[value] for value in dict.fromkeys(step.saves) if value in trace.lifetimes}
    anchors = _anchors(trace, saved)
    cuts = {0, trace.num_forward_ops, *trace.save_places, *trace.use_places}
    for life in (*saved.values(), *anchors.values()):
        cuts.update((life.made_at, life.released_at, life.freed_at))
    places = sorted(place for place in cuts if 0 <= place < num_ops) or [0]
    num_slots = len(places)

    def slot(place: int) -> int:
        return num_slots if place >= num_ops else bisect_right(places, place) - 1

    seconds = measured_s
    if seconds is None:
        seconds = [gpu.seconds(op, is_backward=index >= trace.num_forward_ops) for index, op in enumerate(trace.ops)]
    reached = [0.0, *accumulate(seconds)]
    of_saved = Levels(num_ops)
    for value, life in saved.items():
        of_saved.add(max(life.made_at, 0), min(life.freed_at, num_ops), lineage.num_bytes[value])
    beside = [max(live - held, 0) for live, held in zip(trace.live_bytes, of_saved.each(), strict=False)]
    ends = [*places[1:], num_ops]
    working = tuple(max(beside[begin:end], default=0) for begin, end in zip(places, ends, strict=True))
    save_slots = [slot(place) for place in trace.save_places]
    use_slots = [slot(place) for place in trace.use_places]
    turn = slot(trace.num_forward_ops)
    points = sorted({0, *(at for at in save_slots if at < turn), *(at for at in use_slots if turn <= at < num_slots)})

    def held_value(value: int, life: Lifetime) -> HeldValue:
        made, released, is_anchor = slot(life.made_at), slot(life.released_at), value in anchors
        if is_anchor:
            after, released, use = bisect_left(points, made + 1), min(released, turn), num_slots
            saved_at = points[after] if after < len(points) and points[after] < turn else NEVER
            choices = {*Action} if saved_at != NEVER else {Action.RECOMPUTE, Action.KEEP}
        else:
            use, saved_at = slot(first_use.get(value, num_ops)), slot(first_save[value])
            is_movable = released < use and turn <= use < num_slots and saved_at < turn
            can_be_made = lineage.maker[value] != NO_OP
            if not is_movable or (value in step.fixed and can_be_made):
                choices = {Action.KEEP}
            elif not can_be_made:
                choices = {Action.KEEP, Action.OFFLOAD}
            else:
                choices = {Action.RECOMPUTE} if value in step.dropped else {*Action}
        return HeldValue(
            value=value,
            num_bytes=lineage.num_bytes[value],
            made=made,
            saved=saved_at,
            released=released,
            use=use,
            freed=released if is_anchor else slot(life.freed_at),
            choices=frozenset(choices),
            is_anchor=is_anchor,
        )

    values = [held_value(value, life) for value, life in (*saved.items(), *anchors.items())]
    index = {held.value: place for place, held in enumerate(values)}
    levels = Levels(num_slots)
    for held in values:
        if not held.is_anchor:
            levels.add(held.made, held.freed, held.num_bytes)
    base_bytes = trace.base_bytes + optimizer_bytes
    return Problem(
        trace=trace,
        gpu=gpu,
        base_bytes=base_bytes,
        places=tuple(places),
        starts_s=tuple(reached[place] for place in (*places, num_ops)),
        working_bytes=working,
        request_bytes=tuple(beside[begin - 1] if begin else 0 for begin in places),
        values=tuple(values),
        index=index,
        points=tuple(points),
        num_forward_points=bisect_left(points, turn),
        op_s=tuple(seconds[place] for place in trace.op_places),
        retained={
            root: (slot(trace.lifetimes[root].released_at) if root in trace.lifetimes else 0, num_bytes)
            for root, num_bytes in step.retained_bytes.items()
            if root not in index
        },
        plain=tuple(
            Action.RECOMPUTE if held.is_anchor or held.choices == {Action.RECOMPUTE} else Action.KEEP for held in values
        ),
        plain_peak_bytes=base_bytes + max(map(sum, zip(working, levels.each()[:num_slots], strict=True)), default=0),
        save_at={at: ordinal for ordinal, at in enumerate(save_slots)},
        request_at={at: len(use_slots) - 1 - ordinal for ordinal, at in enumerate(reversed(use_slots))},
    )


def _anchors(trace: StepTrace, saved: Mapping[int, Lifetime]) -> dict[int, Lifetime]:
    lineage = trace.step.lineage
    ops, pending = set[int](), list(saved)
    while pending:
        op = lineage.maker[pending.pop()]
        if op != NO_OP and op not in ops:
            ops.add(op)
            pending.extend(lineage.ins[op])
    read = {value for op in ops for value in lineage.ins[op]}
    written = {over for pairs in lineage.taken.values() for over, _ in pairs}
    return {
        value: trace.lifetimes[value]
        for value in sorted(read - saved.keys() - written)
        if lineage.maker[value] != NO_OP and value in trace.lifetimes
    }
