"""What must run again if values are dropped: shared ops once, told anew in microseconds for one value more or less."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from memkit.plan.actions import Action
from memkit.plan.lineage import NO_OP, Lineage

if TYPE_CHECKING:
    from memkit.plan.budget.problem import Problem


class ReplayCosts:
    """The ops that make all dropped values from what is there, each op counted once.

    An op runs again if something that it makes is not there and is wanted: by a request, or by an op that runs again.
    """

    __slots__ = ("_anchors", "_ins", "_is_there", "_maker", "_num_wanted", "_op_s", "_wanting", "seconds")

    def __init__(self, problem: Problem, actions: Sequence[Action]) -> None:
        lineage = problem.lineage
        self._maker, self._ins, self._op_s = lineage.maker, lineage.ins, problem.op_s
        self._anchors = frozenset(held.value for held in problem.values if held.is_anchor)
        self._is_there = bytearray(len(lineage.maker))
        self._wanting = [0] * len(lineage.maker)
        """How many ops that run again, and requests, want each value that is not there, or would if it were not."""
        self._num_wanted = [0] * len(lineage.ins)
        """How many of its results make each op run again."""
        self.seconds = 0.0
        """What all of them take."""
        for held, action in zip(problem.values, actions, strict=True):
            self._is_there[held.value] = action is not Action.RECOMPUTE or not held.is_anchor
        for held, action in zip(problem.values, actions, strict=True):
            if action is Action.RECOMPUTE and not held.is_anchor:
                self.drop(held.value)

    def drop(self, value: int) -> float:
        """Let a value that was there be gone; return the seconds that it takes more."""
        before_s = self.seconds
        self._is_there[value] = 0
        if value not in self._anchors:
            self._wanting[value] += 1
        if self._wanting[value]:
            self._want(value)
        return self.seconds - before_s

    def drop_telling(self, value: int) -> list[int]:
        """Let a value that was there be gone; return the ops that run again because of that, and did not before."""
        self._is_there[value] = 0
        if value not in self._anchors:
            self._wanting[value] += 1
        return self._want(value) if self._wanting[value] else []

    def hold(self, value: int) -> float:
        """Let a value that was gone be there; return the seconds that it takes less."""
        before_s = self.seconds
        if self._wanting[value]:
            self._leave(value)
        if value not in self._anchors:
            self._wanting[value] -= 1
        self._is_there[value] = 1
        return before_s - self.seconds

    def cost(self, value: int) -> float:
        """Return the seconds that it takes more without a value that is there."""
        cost_s = self.drop(value)
        self.hold(value)
        return cost_s

    def gain(self, value: int) -> float:
        """Return the seconds that it takes less with a value that is gone."""
        gain_s = self.hold(value)
        self.drop(value)
        return gain_s

    def cost_beside(self, value: int, anchor: int) -> float:
        """Return the seconds that it takes more without a value, if an anchor that is not held is held for it."""
        gain_s = self.hold(anchor)
        cost_s = self.drop(value)
        self.hold(value)
        self.drop(anchor)
        return cost_s - gain_s

    def _want(self, value: int) -> list[int]:
        maker, ins, num_wanted, wanting, is_there = self._maker, self._ins, self._num_wanted, self._wanting, self._is_there
        pending, added = [value], list[int]()
        while pending:
            op = maker[pending.pop()]
            if op == NO_OP:
                continue
            num_wanted[op] += 1
            if num_wanted[op] == 1:
                added.append(op)
                self.seconds += self._op_s[op]
                for source in ins[op]:
                    wanting[source] += 1
                    if wanting[source] == 1 and not is_there[source]:
                        pending.append(source)
        return added

    def _leave(self, value: int) -> None:
        maker, ins, num_wanted, wanting, is_there = self._maker, self._ins, self._num_wanted, self._wanting, self._is_there
        pending = [value]
        while pending:
            op = maker[pending.pop()]
            if op == NO_OP:
                continue
            num_wanted[op] -= 1
            if num_wanted[op] == 0:
                self.seconds -= self._op_s[op]
                for source in ins[op]:
                    wanting[source] -= 1
                    if wanting[source] == 0 and not is_there[source]:
                        pending.append(source)


def first_and_last_reads(
    problem: Problem, dropped: Sequence[int], is_there: bytearray
) -> tuple[dict[int, int], dict[int, int]]:
    """Return at which slots values that are there, and retained roots, are read first and last by what makes dropped ones
    again, if nothing that is made on the way stays.

    Args:
        problem: the step.
        dropped: the dropped values, in the order of their requests, as places in `Problem.values`.
        is_there: for each value of the lineage, whether it stays or comes back.
    """
    return _reads(problem, dropped, is_there), _reads(problem, reversed(dropped), is_there)


def _reads(problem: Problem, dropped: Iterable[int], is_there: bytearray) -> dict[int, int]:
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
    """Return the most bytes that ops have made and still hold: what no later one of them reads goes, but for what stays.

    Args:
        lineage: what the ops read and make.
        ops: in the order in which they run.
        stays: values that are held to the end.
    """
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


def dropped_of(problem: Problem, actions: Iterable[Action]) -> list[int]:
    """Return the saved values that are recomputed, as places in `Problem.values`."""
    return [index for index, action in enumerate(actions) if action is Action.RECOMPUTE and not problem.values[index].is_anchor]
