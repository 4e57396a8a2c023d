"""What `memkit.plan.remat.simulate` promises, told again in the plainest way, and random steps to compare the two on.

Every choice looks at everything, and every byte is counted where it lies, anew each time.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass

from hypothesis import strategies as st

from memkit.plan import NO_OP, DTRScore, GrowingLineage, Step, ends_of
from memkit.plan.step import Lineage

Content = tuple[int, int]
"""The op that has made something, and as which of its results; a root has made itself."""


@dataclass(eq=False)
class Cell:
    """A storage."""

    content: Content
    num_bytes: int


def content_of(lineage: Lineage, value: int) -> Content:
    maker = lineage.maker[value]
    return (NO_OP, value) if maker == NO_OP else (maker, lineage.outs[maker].index(value))


def ancestors(lineage: Lineage, value: int, stop: Collection[int] = ()) -> set[int]:
    """Return the ops that a value is made by, up to what is there and to the roots. Recursive, by definition."""
    maker = lineage.maker[value]
    found = {maker}
    for source in lineage.ins[maker]:
        if source not in stop and lineage.maker[source] != NO_OP:
            found |= ancestors(lineage, source, stop)
    return found


class Reference:
    """Carries out a step on storages that hold who has made them."""

    def __init__(self, step: Step, score: DTRScore, limit_bytes: float, anchors: frozenset[int] = frozenset()) -> None:
        self.step, self.lineage, self.score, self.limit_bytes, self.anchors = step, step.lineage, score, limit_bytes, anchors
        self.present: dict[int, Cell] = {}
        self.roots = {value: Cell((NO_OP, value), 0) for value, maker in enumerate(self.lineage.maker) if maker == NO_OP}
        self.temps: dict[int, Cell] = {}
        self.droppable: set[int] = set()
        self.held: set[int] = set()
        """The roots that something is to be made from."""
        self.given: list[int] = []
        """What the node that asks now was given."""
        self.saves: list[int] = []
        self.touched: dict[int, int] = {}
        self.times_made: dict[int, int] = {}
        self.place = -1
        self.clock = 0
        self.run_ops: list[int] = []
        self.peak_bytes = 0
        self.gone: set[int] = set()

    def bytes_now(self) -> int:
        """Count what exists."""
        return sum(cell.num_bytes for cell in {*self.present.values(), *self.temps.values(), *self.roots.values()})

    def put(self, value: int) -> Cell:
        return Cell(content_of(self.lineage, value), self.lineage.num_bytes[value])

    def distance(self, value: int) -> int:
        if self.score.distance == "staleness":
            return self.clock - self.touched[value] + 1
        if self.place == -1:
            return len(self.saves) - max(index for index, saved in enumerate(self.saves) if saved == value)
        later = [place for place, used in enumerate(self.step.uses) if used == value and place >= self.place]
        return later[0] - self.place + 1 if later else len(self.step.uses)

    def score_of(self, value: int) -> float:
        lineage = self.lineage
        cost_s = sum(lineage.seconds[op] for op in ancestors(lineage, value, self.present))
        return (cost_s + 1e-9) / (lineage.num_bytes[value] + 1) / self.distance(value)

    def make_room(self, num_bytes: int, needed: Collection[int] = ()) -> None:
        while self.bytes_now() + num_bytes > self.limit_bytes:
            able = [
                value
                for value in self.droppable
                if value not in {*needed, *self.given} and self.times_made.get(value, 0) < self.score.max_replays
            ]
            if not able:
                return
            self.drop(min(able, key=lambda value: (self.score_of(value), value)))

    def drop(self, value: int) -> None:
        del self.present[value]
        self.droppable.discard(value)
        for op in ancestors(self.lineage, value):
            for source in self.lineage.ins[op]:
                if source in self.roots:
                    self.held.add(source)
                    if source not in self.present:
                        self.roots[source].num_bytes = self.step.retained_bytes.get(source, 0)

    def is_wanted(self, value: int) -> bool:
        return value in self.saves and value in self.step.uses[self.place :]

    def find(self, value: int) -> Cell:
        cell = self.temps.get(value) or self.present.get(value) or self.roots[value]
        assert cell.content == content_of(self.lineage, value), "something else is there by now"
        return cell

    def make(self, target: int) -> None:
        lineage, ops = self.lineage, sorted(ancestors(self.lineage, target, self.present))
        for index, op in enumerate(ops):
            later = {source for other in ops[index + 1 :] for source in lineage.ins[other]} | {target}
            over = dict(lineage.taken.get(op, ()))
            mine = {
                value for value in over if value in self.temps and value not in later and not self.is_wanted(value)
            }  # nobody else will read them: they are written over
            made = {over_it: value for value, over_it in over.items()}
            new_bytes = sum(lineage.num_bytes[value] for value in lineage.outs[op] if made.get(value) not in mine)
            self.make_room(new_bytes, later | set(lineage.ins[op]))
            for value in lineage.ins[op]:
                self.find(value)
            for value in lineage.outs[op]:
                cell = self.temps.pop(made[value]) if made.get(value) in mine else self.put(value)
                cell.content = content_of(lineage, value)
                self.temps[value] = cell
            self.run_ops.append(op)
            self.peak_bytes = max(self.peak_bytes, self.bytes_now())
            for value in sorted({*lineage.outs[op], *lineage.ins[op]} & self.temps.keys()):
                if value in self.present:
                    del self.temps[value]
                elif value not in later:
                    self.settle(value)
        self.settle(target)
        assert not self.temps

    def settle(self, value: int) -> None:
        cell = self.temps.pop(value)
        if self.is_wanted(value):
            self.present[value] = cell
            self.droppable.add(value)
            self.touched[value] = self.clock
            self.times_made[value] = self.times_made.get(value, 0) + 1

    def run(self, dropped: Collection[int]) -> None:
        step = self.step
        for value in step.saves:
            for anchor in self.anchors:
                if anchor <= value and anchor not in self.present:
                    self.present[anchor] = self.put(anchor)
            self.saves.append(value)
            self.clock += 1
            if value in self.saves[:-1]:
                continue
            if value not in self.held:
                self.present[value] = self.put(value)
            if value not in self.roots and value not in step.fixed:
                self.droppable.add(value)
                self.touched[value] = self.clock
                if value in dropped:
                    self.drop(value)
            self.make_room(0)
            self.peak_bytes = max(self.peak_bytes, self.bytes_now())
        self.gone = set(self.saves) - self.present.keys() - self.held
        for place, value in enumerate(step.uses):
            self.release(place)
            self.place = place
            self.clock += 1
            if value not in self.saves or value in self.held:
                continue
            if value not in self.present:
                self.make(value)
            if value in self.present:
                self.given.append(value)
                if value not in self.times_made or value not in step.uses[place + 1 :]:
                    self.droppable.discard(value)
            self.peak_bytes = max(self.peak_bytes, self.bytes_now())

    def release(self, place: int) -> None:
        """Free what was used for the last time, and the anchors that nothing is made from any more."""
        to_come = [value for value in self.saves if value in self.step.uses[place:] or value not in self.step.uses]
        for anchor in self.anchors:
            if anchor > max(to_come, default=-1):
                self.present.pop(anchor, None)
        if place and self.step.use_end(place - 1) <= place:
            for value in self.given:
                if value not in self.step.uses[place:] and value not in self.held:
                    self.present.pop(value, None)
                    self.droppable.discard(value)
            self.given = []

    @property
    def replayed_s(self) -> float:
        return sum(self.lineage.seconds[op] for op in self.run_ops)


def random_step(seed: int, num_ops: int) -> Step:
    """Return a step with ops in place, of several results, with roots that must be retained, and repeated saves and uses."""
    rng, lineage = random.Random(seed), GrowingLineage()
    readable = [lineage.add_root(rng.randint(0, 9)) for _ in range(rng.randint(1, 3))]
    retained = {root: lineage.num_bytes[root] for root in readable if rng.random() < 0.3}
    saves: list[int] = []
    for _ in range(num_ops):
        if rng.random() < 0.1:
            readable.append(lineage.add_root(rng.randint(0, 9)))
            retained[readable[-1]] = lineage.num_bytes[readable[-1]]
        recent = readable[-4:] if rng.random() < 0.7 else readable
        ins = rng.sample(recent, min(len(recent), rng.randint(1, 3)))
        over = [value for value in ins if value not in saves][: rng.random() < 0.3]
        sizes = [rng.randint(0, 9) for _ in range(rng.choice((0, 1, 2) if over else (1, 1, 1, 2, 3)))]
        outs = lineage.add_op(
            ins, [*sizes, *(lineage.num_bytes[value] for value in over)], float(rng.randint(0, 9)), taken=over
        )
        for value in over:
            readable.remove(value)
            if lineage.maker[value] == NO_OP:
                retained[value] = lineage.num_bytes[value]
        readable += outs
        while rng.random() < 0.6:
            saves.append(rng.choice(readable[-4:]))
    uses = saves[::-1]
    if rng.random() < 0.4:
        rng.shuffle(uses)
    if rng.random() < 0.4:
        uses = uses[: rng.randint(0, len(uses))] + rng.sample(saves, min(2, len(saves)))
    nodes = [rng.randint(0, 2) for _ in uses] if rng.random() < 0.6 else list(range(len(uses)))
    roots = {value for value in saves if lineage.maker[value] == NO_OP}
    fixed = frozenset(roots | {value for value in saves if rng.random() < 0.1})
    dropped = frozenset(value for value in saves if rng.random() < 0.1) - fixed
    return Step(
        lineage=lineage,
        saves=tuple(saves),
        uses=tuple(uses),
        use_ends=ends_of(nodes),
        fixed=fixed,
        dropped=dropped,
        retained_bytes=retained | {root: lineage.num_bytes[root] for root in roots},
    )


def steps(max_ops: int = 14) -> st.SearchStrategy[Step]:
    return st.builds(random_step, st.integers(0, 2**32), st.integers(1, max_ops))


def chain(num_ops: int, num_bytes: int = 1000, seconds: float = 1.0) -> Step:
    """Return a step of ops one after the other, each of whose results is saved."""
    lineage = GrowingLineage()
    values = [lineage.add_root(num_bytes)]
    for _ in range(num_ops):
        values += lineage.add_op(values[-1:], [num_bytes], seconds)
    return Step(lineage=lineage, saves=tuple(values[1:]), uses=tuple(reversed(values[1:])))


def transformer(num_layers: int, num_idle: int = 1) -> Step:
    """Return a step with 17 saved values in each of its residual layers, whose stream itself is not saved.

    Args:
        num_layers: how many layers.
        num_idle: how many ops each product is followed by whose results are not saved.
    """
    lineage = GrowingLineage()
    weights = [lineage.add_root(50) for _ in range(7)]
    (stream,) = lineage.add_op([lineage.add_root(10)], [64], 1.0)
    saves: list[int] = []

    def op(ins: list[int], num_bytes: int, seconds: float, *, saved: bool = True) -> int:
        (out,) = lineage.add_op(ins, [num_bytes], seconds)
        if saved:
            saves.append(out)
        return out

    def norm(value: int) -> int:
        wide = op([value], 128, 2.0)
        square = op([wide], 128, 2.0, saved=False)
        scale = op([square], 1, 1.0)
        return op([op([wide, scale], 64, 3.0), weights[0]], 64, 2.0)

    def product(value: int, weight: int, num_bytes: int, seconds: float, *, saved: bool = True) -> int:
        out = op([value, weights[weight]], num_bytes, seconds, saved=saved and not num_idle)
        for index in range(num_idle):
            out = op([out], num_bytes, 2.0, saved=saved and index == num_idle - 1)
        return out

    for _ in range(num_layers):
        inside = norm(stream)
        query, key, value = (product(inside, weight, 64, 30.0) for weight in (1, 2, 3))
        attended, sums = lineage.add_op([query, key, value], [64, 1], 80.0)
        saves += [attended, sums]
        stream = op([stream, product(attended, 4, 64, 30.0, saved=False)], 64, 3.0, saved=False)
        inside = norm(stream)
        gate, up = (product(inside, weight, 176, 80.0) for weight in (5, 6))
        bent = op([gate], 176, 6.0)
        wide = op([bent, up], 176, 8.0)
        stream = op([stream, product(wide, 4, 64, 80.0, saved=False)], 64, 3.0, saved=False)
    return Step(lineage=lineage, saves=tuple(saves), uses=tuple(reversed(saves)))
