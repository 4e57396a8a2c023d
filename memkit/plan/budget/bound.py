"""How fast a step under a budget can be at the best: no plan is faster than this linear program, solved by scipy's HiGHS.

Values may leave, stay and be dropped in part, copies flow without latency, replays run each op once and need no room of their
own, and anchors are held only until something may be made from them first."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from memkit.core.extras import how_to_install
from memkit.plan.budget.problem import Problem
from memkit.plan.plans import Action
from memkit.plan.step import NO_OP

_MIB = 2**20
_TOLERANCE = 1e-6
Row = dict[int, float]


def why_no_bound() -> str:
    found = find_spec("scipy")
    if found is None or found.origin is None:  # a folder of that name is no package
        return f"no lower bound: it needs scipy ({how_to_install('scipy')})"
    return ""


@dataclass(frozen=True, slots=True)
class Bound:
    """The least seconds of any plan under a budget (infinity if none keeps to it), and what each byte less adds to them."""

    budget_bytes: int
    seconds: float
    seconds_per_byte: float

    def under(self, budget_bytes: int) -> float:
        return self.seconds + self.seconds_per_byte * (self.budget_bytes - budget_bytes)


def find_bound(
    problem: Problem, budget_bytes: int, *, allowed: Collection[Action] = frozenset({Action.OFFLOAD, Action.RECOMPUTE})
) -> Bound | None:
    """Return the bound of a step under a budget; None without scipy (see `why_no_bound`) or where its solver gives up."""
    if why_no_bound():
        return None
    found = _Program(problem, budget_bytes - problem.base_bytes, frozenset(allowed)).solve()
    if found is None:
        return None
    seconds, seconds_per_byte = found
    return Bound(budget_bytes, max(problem.plain_s, seconds * (1 - _TOLERANCE)), seconds_per_byte * (1 - _TOLERANCE))


class _Program:
    """The rows and columns, in MiB and milliseconds."""

    def __init__(self, problem: Problem, limit_bytes: int, allowed: frozenset[Action]) -> None:
        self.problem, self.limit_mib = problem, limit_bytes / _MIB
        self.upper: list[float] = []
        self.costs: list[float] = []
        self.rows: list[tuple[Row, float]] = []
        self.equal: list[tuple[Row, float]] = []
        needs = {held.value: held.use for held in problem.values if not held.is_anchor}  # for it, or what is made from it
        for op in range(len(problem.lineage.ins) - 1, -1, -1):
            made = problem.lineage.outs[op]
            soonest = min((needs.get(value, problem.num_slots) for value in made), default=problem.num_slots)
            for source in problem.lineage.ins[op]:
                needs[source] = min(needs.get(source, problem.num_slots), soonest)
        self.turn = [*problem.points, problem.num_slots][problem.num_forward_points]
        self.gaps: list[tuple[int, int]] = []  # from where to where a value need not be on the device
        for held in problem.values:
            begin = held.released if held.is_anchor else max(held.released, held.saved)
            self.gaps.append(
                (begin, max(needs.get(held.value, problem.num_slots) if held.is_anchor else min(held.use, held.freed), begin))
            )
        self.leaves = [
            self._column(1.0 if allowed >= {Action.OFFLOAD} and Action.OFFLOAD in held.choices else 0.0)
            for held in problem.values
        ]
        self.drops = [
            self._column(1.0 if held.is_anchor or Action.RECOMPUTE in allowed & held.choices else 0.0)
            for held in problem.values
        ]
        for held, leaves, drops in zip(problem.values, self.leaves, self.drops, strict=True):
            self.rows.append(({leaves: 1.0, drops: 1.0}, 1.0))
            if Action.KEEP not in held.choices and Action.OFFLOAD not in held.choices:
                self.equal.append(({drops: 1.0}, 1.0))
        self.late = [self._column(math.inf, 1.0) for _ in range(problem.num_slots)]
        self._replays()
        self._memory(self._lanes())

    def _column(self, upper: float = math.inf, cost: float = 0.0) -> int:
        self.upper.append(upper)
        self.costs.append(cost)
        return len(self.upper) - 1

    def _replays(self) -> None:
        problem, lineage = self.problem, self.problem.lineage
        ops, pending = dict[int, int](), [held.value for held in problem.values if not held.is_anchor]
        while pending:
            op = lineage.maker[pending.pop()]
            if op != NO_OP and op not in ops:
                ops[op] = self._column(1.0)
                pending.extend(lineage.ins[op])
        for index, held in enumerate(problem.values):
            made_by = lineage.maker[held.value]
            if not held.is_anchor and made_by in ops and held.use < problem.num_slots:
                self.rows.append(({self.drops[index]: 1.0, ops[made_by]: -1.0}, 0.0))
        for op, column in ops.items():
            for source in set(lineage.ins[op]):
                maker, place = lineage.maker[source], problem.index.get(source)
                if maker == NO_OP:
                    continue
                row: Row = {column: 1.0}
                _put(row, ops[maker], -1.0)
                if place is None:
                    self.rows.append((row, 0.0))
                else:
                    _put(row, self.drops[place], 1.0)  # runs again at least as far as dropped and read: both - 1
                    self.rows.append((row, 1.0))
        total: Row = {column: 1e3 * problem.op_s[op] for op, column in ops.items()}
        for late in self.late[self.turn :]:
            total[late] = -1.0
        self.rows.append((total, 0.0))

    def _lanes(self) -> list[int]:
        """Return for each slot the column of the MiB that are on the host alone."""
        problem, gpu, values = self.problem, self.problem.gpu, self.problem.values
        out_mib, back_mib = gpu.d2h_bytes_per_s / _MIB / 1e3, gpu.h2d_bytes_per_s / _MIB / 1e3
        saved: dict[int, Row] = defaultdict(dict)
        gone: dict[int, Row] = defaultdict(dict)
        for index, held in enumerate(values):
            if not self.upper[self.leaves[index]]:
                continue
            size, column = held.num_bytes / _MIB, self.leaves[index]
            _put(saved[held.saved], column, -size)
            begin, end = self.gaps[index]
            if begin < end:
                _put(gone[begin], column, -size)
                _put(gone[end], column, size)
        within, may_copy = self._states(gone), self._states(saved)
        alone, copied, fetched = ([self._column() for _ in range(problem.num_slots)] for _ in range(3))
        for slot in range(problem.num_slots):
            slot_ms = 1e3 * (problem.starts_s[slot + 1] - problem.starts_s[slot])
            late, before = self.late[slot], slot - 1
            out: Row = {copied[slot]: 1.0, late: -out_mib}
            back: Row = {fetched[slot]: 1.0, late: -back_mib}
            if slot:
                out[copied[before]] = back[fetched[before]] = -1.0
                self.rows.append(({copied[before]: 1.0, copied[slot]: -1.0}, 0.0))
                self.rows.append(({fetched[before]: 1.0, fetched[slot]: -1.0}, 0.0))
                came = {alone[before]: 1.0, alone[slot]: -1.0, fetched[slot]: -1.0, fetched[before]: 1.0}
                self.rows.append((came, 0.0))
            self.rows.append((out, out_mib * slot_ms))
            self.rows.append((back, back_mib * slot_ms))
            self.rows.append(({alone[slot]: 1.0, copied[slot]: -1.0, fetched[slot]: 1.0}, 0.0))
            self.rows.append(({copied[slot]: 1.0, may_copy[slot]: -1.0}, 0.0))
            self.rows.append(({alone[slot]: 1.0, within[slot]: -1.0}, 0.0))
        return alone

    def _states(self, changes: dict[int, Row]) -> list[int]:
        """Return a column for each slot that is the one before less the changes there: so rows stay short."""
        columns = [self._column() for _ in range(self.problem.num_slots)]
        for slot, column in enumerate(columns):
            row = dict(changes.get(slot, {}))
            row[column] = 1.0
            if slot:
                row[columns[slot - 1]] = -1.0
            self.equal.append((row, 0.0))
        return columns

    def _memory(self, alone: list[int]) -> None:
        """Bound the working bytes, the values no action frees, and those in their gap neither dropped nor on the host alone."""
        problem, num_slots = self.problem, self.problem.num_slots
        there, changes = [0.0] * (num_slots + 1), defaultdict[int, Row](dict)
        for index, held in enumerate(problem.values):
            size, (begin, end) = held.num_bytes / _MIB, self.gaps[index]
            if not held.is_anchor:
                there[held.made] += size
                there[held.freed] -= size
            elif begin < end:
                there[begin] += size
                there[end] -= size
            if begin < end:
                _put(changes[begin], self.drops[index], -size)
                _put(changes[end], self.drops[index], size)
        dropped = self._states(changes)
        self.first_of_memory = len(self.rows)
        present_mib = 0.0
        for slot in range(num_slots):
            present_mib += there[slot]
            needed_mib = problem.working_bytes[slot] / _MIB + present_mib - self.limit_mib
            if needed_mib > 0:
                self.rows.append(({dropped[slot]: -1.0, alone[slot]: -1.0}, -needed_mib))

    def solve(self) -> tuple[float, float] | None:
        """Return the least seconds, and by how much they rise for each byte less; None where the solver does not find them."""
        from scipy.optimize import linprog

        found: Any = linprog(  # scipy is not typed
            self.costs,
            A_ub=_matrix((row for row, _ in self.rows), len(self.rows), len(self.upper)),
            b_ub=[most for _, most in self.rows],
            A_eq=_matrix((row for row, _ in self.equal), len(self.equal), len(self.upper)),
            b_eq=[most for _, most in self.equal],
            bounds=[(0.0, None if most == math.inf else most) for most in self.upper],
            method="highs",
        )
        if found.status == 2:  # no solution
            return math.inf, 0.0
        if found.status != 0:
            return None
        prices = found.ineqlin.marginals[self.first_of_memory :]  # in ms for each MiB, none above 0
        return self.problem.plain_s + float(found.fun) / 1e3, -float(sum(prices)) / _MIB / 1e3


def _put(row: Row, column: int, share: float) -> None:
    row[column] = row.get(column, 0.0) + share


def _matrix(rows: Iterable[Row], num_rows: int, num_columns: int) -> Any:  # scipy is not typed
    from scipy.sparse import csr_array

    starts, columns, shares = [0], list[int](), list[float]()
    for row in rows:
        columns += row
        shares += row.values()
        starts.append(len(columns))
    return csr_array((shares, columns, starts), shape=(num_rows, num_columns))
