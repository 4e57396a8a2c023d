"""The saves of steps that follow a plan are known ahead: most need no record, and if nothing is recomputed, no op is recorded.

[Note: what a steady step leaves out] A plan refers to saves and requests by their ordinals. Once a step has followed it from
the first save to the last, later steps are expected to save the same. A tensor that stays then needs no record: autograd gets
an alias and its version, and requests of it are not seen. If replays read it, values made from it hold its handle. Values with
records are still found by their storages, so a step that deviates is exact all the same. A deviation is noticed by the shape of
a saved tensor, by the number of a value that is recomputed, moved or read, or at the end of the step; the step then goes on
without a plan.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from memkit.activations.offloading.scheduled import Schedule, ready_at
from memkit.activations.saved.traces import NO_VALUE, Capture, Trace
from memkit.core import torch_private
from memkit.plan import NO_OP, Action
from memkit.plan.copies import CopySchedule
from memkit.recording.expected import ExpectedOp
from memkit.recording.recorded import OpClass

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence, Set

    from memkit.activations.budgeting.learning import Planned
    from memkit.activations.budgeting.planned_forward import PlannedForward
    from memkit.activations.saved.traces import SeenSave
    from memkit.device import Device
    from memkit.plan import MemoryPlan
    from memkit.plan.step import Lineage
    from memkit.recording.ops import OpKinds
    from memkit.recording.recorded import OpTraits
    from memkit.recording.recording import Recording


def schedule_of_moves(
    plan: MemoryPlan, seen: Sequence[SeenSave], numbers: Mapping[int, int], places: Sequence[int], device: Device
) -> Schedule | None:
    """Return the schedule of a plan; None if the plan recomputes something, or has no fixed order of copies back."""
    moved = [planned for planned in plan.values if planned.action is Action.OFFLOAD]
    if plan.replays or any(planned.is_anchor or planned.value not in numbers for planned in plan.values):
        return None
    uses, num_saves = [numbers[value] for value in plan.step.uses], len(seen)
    first_saves = {save.value: place for place, save in reversed([*enumerate(seen)])}
    ready = first_saves | ready_at(seen)
    leaving = sorted(moved, key=lambda planned: ready[numbers[planned.value]])
    sent = [ready[numbers[planned.value]] for planned in leaving]
    at_request = num_saves + 1  # freed once the backward asks for anything
    gone = [places[planned.let_go_at] if planned.let_go_at < len(places) else at_request for planned in leaving]
    gone = list(accumulate(reversed(gone), min))[::-1]  # waiting for a later copy also waits for those before it
    gone = [max(gone_at, sent_at) for gone_at, sent_at in zip(gone, sent, strict=True)]
    first = {value: ordinal for ordinal, value in reversed([*enumerate(uses)])}
    ordinals = sorted(first.values())
    coming = sorted(moved, key=lambda planned: (planned.fetch_at, planned.needed_at))
    if any(numbers[planned.value] not in first or planned.fetch_at > ordinals[-1] for planned in moved):
        return None
    fetched = [ordinals[bisect_left(ordinals, planned.fetch_at)] for planned in coming]
    late = any(at > first[numbers[planned.value]] for at, planned in zip(fetched, coming, strict=True))
    if late or fetched != sorted(fetched):
        return None
    visible = {numbers[planned.value] for planned in moved} | {uses[ordinal] for ordinal in fetched}
    requests = sorted(visible, key=first.__getitem__)
    copies = CopySchedule(
        out=tuple((numbers[planned.value],) for planned in leaving),
        num_sent=tuple(_counts(sent, num_saves + 1)),
        num_released=tuple(_counts(gone, num_saves + 1)),
        back=tuple((numbers[planned.value],) for planned in coming),
        requests=tuple(requests),
        num_fetched=tuple(bisect_right(fetched, first[value]) for value in requests),
        peak_bytes=0,  # nobody asks
        num_released_at_request=len(leaving),
    )
    num_values = len({save.value for save in seen} - {NO_VALUE})
    return Schedule(seen, 0, frozenset(numbers[planned.value] for planned in moved), [copies], device, num_values, [uses])


def _counts(moments: Sequence[int], num_places: int) -> list[int]:
    due = [0] * num_places
    for moment in moments:
        if moment < num_places:
            due[moment] += 1
    return list(accumulate(due))


_Parameter = nn.Parameter


class SteadySave(NamedTuple):
    shape: torch.Size | None
    dtype: torch.dtype | None
    value: int
    """`NO_VALUE` if it has no number, or is the caller's."""
    ordinal: int
    """Its ordinal among the saves that count; -1 if it does not count."""
    has_record: bool
    """The value is moved or dropped, or does not count and is read by replays."""
    is_read: bool
    is_due: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyStep:
    planned: Planned
    saves: tuple[SteadySave, ...]
    """All tensors that its hooks were given, in order."""
    requests: tuple[int, ...]
    """For each request of a value with a record, in order, its ordinal among all requests."""
    num_values: int
    moves: tuple[Schedule, Trace] | None
    """Followed without recording ops, if nothing is recomputed."""
    only_moves: bool
    """The step is only known for steps that record no ops: values saved by compiled blocks have no numbers ahead of time."""
    figures: Mapping[str, Any]
    """Its totals for `memkit.stats`, without moves and recomputes."""
    ops: tuple[ExpectedOp, ...] = ()
    """Empty if all ops that can run again are recorded."""
    known_s: tuple[float, ...] = ()


@dataclass(eq=False, slots=True)
class StepNotes:
    planned: Planned
    is_whole: bool = True
    _saves: list[tuple[int, int, bool]] = field(default_factory=list)
    """For each save its value, its ordinal among those that count, and whether a record is waiting for it to end."""
    _capture: Capture = field(default_factory=Capture)
    _numbers: dict[int, int] = field(default_factory=dict)
    """For each value that counts, how many other values were saved before it."""
    _waits: bool = False
    _num_ahead: int = 0
    _counts_at: list[tuple[int, int]] = field(default_factory=list)
    """Before each op, the number of the next value, and how many ops had been recorded."""

    def begin_op(self, recording: Recording) -> None:
        self._counts_at.append((recording.num_values, len(recording.calls)))

    def note(self, tensor: Tensor, forward: PlannedForward, num_before: int) -> None:
        kind = type(tensor)
        if not (kind is Tensor or kind is _Parameter) or tensor.is_nested or tensor.layout is not torch.strided:
            self.is_whole = False
            return
        if not self._saves:
            self._num_ahead = len(forward.recording.funcs)
        ordinal = num_before if len(forward.saves) > num_before else -1
        value = forward.saves[-1] if ordinal >= 0 else NO_VALUE
        if ordinal < 0 and (found := forward.recording.find(tensor.untyped_storage())) is not None:  # it may be read
            root = forward.recording.roots.get(found)
            value = found if root is None or root.is_inside else NO_VALUE
        self._saves.append((value, ordinal, self._waits))
        self._waits = bool(forward.waiting)
        number = NO_VALUE if ordinal < 0 else self._numbers.setdefault(value, len(self._numbers))
        self._capture.add(tensor, number, len(self._numbers), 0 if ordinal < 0 else tensor.nbytes)

    def finish(self, trace: Trace, forward: PlannedForward, kinds: OpKinds) -> SteadyStep | None:
        planned, ops, recording = self.planned, trace.ops, forward.recording
        plan, uses = planned.plan, planned.plan.step.uses
        if not self.is_whole or not uses or ops is None:
            return None
        counts, seen, lineage = forward.counts, self._capture.saves, ops.step.lineage
        places = [place for place, (_, ordinal, _) in enumerate(self._saves) if ordinal >= 0]
        moves = schedule_of_moves(plan, seen, self._numbers, places, forward.ledger.device)
        recorded = self._recorded_ops(lineage, recording.overwritten)
        has_lent = any(root.lent is not None for root in recording.roots.values())  # lent roots get new numbers again
        if has_lent or not recording.overwritten.isdisjoint(planned.retained):
            recorded = set(range(len(lineage.ins)))
        ops_read = {op for replay in plan.replays for op in replay.ops} | recorded
        last = {value: request for request, value in enumerate(uses)}
        lent = {value for value, until in planned.held_until.items() if last.get(value, -1) < until}
        held = lent | planned.retained
        releases = {request for request, values in planned.releases.items() if not held.isdisjoint(values)}
        with_records = {each.value for each in plan.values if each.action is not Action.KEEP} | held
        with_records |= {uses[request] for request in (0, *planned.fetches, *releases) if request < len(uses)}
        read = {source for op in ops_read for source in lineage.ins[op]} - with_records
        due = {*planned.copies, *planned.lets_go}
        step = SteadyStep(
            planned=planned,
            saves=tuple(
                SteadySave(
                    *(save.shape, save.dtype, value, ordinal),
                    has_record=value in with_records or (value in read and ordinal < 0),
                    is_read=value in read and ordinal >= 0,
                    is_due=waits or ordinal in due,
                )
                for save, (value, ordinal, waits) in zip(seen, self._saves, strict=True)
            ),
            requests=tuple(request for request, value in enumerate(uses) if value in with_records),
            num_values=len(lineage.maker),
            moves=None if moves is None else (moves, Trace(keys=(), requests=(uses,))),
            only_moves=len(self._counts_at) != len(trace.funcs),
            figures={name: getattr(counts, name) for name in ("num_ops", "num_saved", "saved_bytes", "peak_bytes")},
        )
        if step.only_moves:
            return None if moves is None else step
        ends = [*self._counts_at[1:], (len(lineage.maker), len(lineage.ins))]
        spans = [
            (range(first, last), op if end == op + 1 else None)
            for (first, op), (last, end) in zip(self._counts_at, ends, strict=True)
        ]
        read = {value for value, _, _ in self._saves}.union(planned.retained, *(lineage.ins[op] for op in ops_read))
        must = [place < self._num_ahead or op in recorded for place, (_, op) in enumerate(spans)]
        expected = tuple(
            _expected(func, kinds.of(func), recording, lineage, numbers, op, None if is_recorded else read)
            for func, (numbers, op), is_recorded in zip(trace.funcs, spans, must, strict=True)
        )
        skipped = {op for (_, op), each in zip(spans, expected, strict=True) if each.is_skipped and op is not None}
        known_s = tuple(seconds for op, seconds in enumerate(lineage.seconds) if op not in skipped)
        return replace(step, ops=expected if skipped else (), known_s=known_s)

    def _recorded_ops(self, lineage: Lineage, overwritten: Collection[int]) -> set[int]:
        """Return the ops that make dropped values from saved values that stay or move, from roots, and from anchors."""
        plan = self.planned.plan
        saved_at = {value: place for place, (value, _, _) in reversed([*enumerate(self._saves)])}
        dropped = {each.value for each in plan.values if each.action is Action.RECOMPUTE}
        asked = set(plan.step.uses) - dropped
        retained = self.planned.retained
        recorded = {lineage.maker[value] for value in retained if lineage.maker[value] != NO_OP}
        found = set[int]()
        for until, first in sorted((saved_at[value], value) for value in dropped if value in saved_at):
            pending = [first]
            while pending:
                value = pending.pop()
                if value in found:
                    continue  # with fewer values saved before it, so all its ops are recorded
                found.add(value)
                recorded.add(lineage.maker[value])
                for source in lineage.ins[lineage.maker[value]]:
                    # requested values are not written to before: that would be an error without a plan as well
                    is_there = source in asked and source not in overwritten and saved_at.get(source, until) < until
                    if lineage.maker[source] != NO_OP and not is_there and source not in retained:
                        pending.append(source)
        return recorded


class SteadySaves:
    """The pack hook of a steady step, for as long as tensors are saved as expected."""

    def __init__(
        self,
        step: SteadyStep,
        forward: PlannedForward,
        take_one: Callable[[Tensor, SteadySave], Any],
        leave: Callable[[], None],
        take: Callable[[Tensor], Any],
    ) -> None:
        self.num_saves = 0
        self.is_on = True
        self._saves, self._forward = step.saves, forward
        self._device = forward.ledger.device
        self._notes = self._device.takes_notes
        self._take_one, self._leave, self._take = take_one, leave, take

    @property
    def is_complete(self) -> bool:
        return self.num_saves == len(self._saves)

    def pack(self, tensor: Tensor) -> Any:
        if self.is_on and torch_private.backward_task() == -1:
            place, kind = self.num_saves, type(tensor)
            save = self._saves[place] if place < len(self._saves) else None
            try:
                is_expected = (
                    save is not None
                    and (kind is Tensor or kind is _Parameter)
                    and tensor.shape == save.shape
                    and tensor.dtype is save.dtype
                    and self._forward.task == -1
                )
            except RuntimeError:  # it has no shape
                is_expected = False
            if save is not None and is_expected:
                self.num_saves = place + 1
                if save.has_record or save.is_due or save.is_read:
                    return self._take_one(tensor, save)
                with torch_private.without_python_dispatch():
                    version = torch_private.version_of(tensor)
                    if self._notes and save.ordinal >= 0:
                        self._device.note_written(tensor.untyped_storage(), version)
                    return tensor.detach(), version
            self._leave()
        return self._take(tensor)


def _expected(
    func: Any, kind: OpTraits, recording: Recording, lineage: Lineage, numbers: range, op: int | None, needed: Set[int] | None
) -> ExpectedOp:
    """Return what is to be known of an op. `numbers` are the roots that it reads first and the values that it makes; `op` is
    None if it cannot run again; `needed` values are saved, anchors, or read by ops that are recorded or run again: None if this
    one is recorded in any case."""
    first = numbers.start
    if op is None:
        is_view = kind.op_class is OpClass.VIEW
        return ExpectedOp(func, is_skipped=is_view, first=first, made=first, is_view=is_view)
    if needed is not None and kind.op_class is OpClass.REPLAYED and not (kind.written or kind.statistics):
        return ExpectedOp(func, is_skipped=True, first=first, made=lineage.outs[op][0])
    ins = tuple(source[1] for source in recording.calls[op].sources)
    roots = frozenset(value for value in ins if value in recording.roots)
    made = max((value + 1 for value in roots if value >= first), default=first)
    return ExpectedOp(func, is_skipped=False, first=first, made=made, ins=ins, roots=roots)
