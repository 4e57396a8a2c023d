"""What a step takes in which some calls of modules are recomputed as a whole, told without its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from memkit.plan.lineage import NO_OP, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCall:
    """One call of a module in a step that was recorded."""

    name: str
    """The module, as the one outermost calls it."""
    number: int
    """How many calls of the same module were before it."""
    parent: int
    """The call that it is in, by its place among all, -1 for an outermost one."""
    saves: tuple[int, int]
    """Its first save, and the first after it."""
    ops: tuple[int, int]
    """Its first op that may be run again, and the first after its last save: there the second run of a region ends."""
    num_ops: int
    """How many ops of any kind it runs until then."""
    inputs: tuple[int, ...]
    """Values that it reads, and that were made before it in the step."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Of the tensors that it is given."""
    why_not: str = ""
    """Why it cannot be a region, "" if it can."""
    device_s: float = 0.0
    """What the device takes for it, where it runs compiled, so that none of its ops is seen."""
    is_span: bool = False
    """Whether it is that of neighboring children of a `Sequential`, as if they were in a module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCosts:
    """What the host spends: seconds."""

    op_s: float
    """On an op, with all that belongs to it in a module."""
    recorded_s: float
    """On recording it, beyond that."""
    saved_s: float
    """On a save, and its request, where ops are recorded."""
    replayed_s: float
    """On an op that is run again from the record."""
    region_s: float
    """On a region, beyond the ops that are run again."""
    is_device: bool = False
    """Whether the host computes as well, so that nothing runs beside anything else."""

    def step_s(self, device_s: float, host_s: float) -> float:
        """Return what a step takes: what the device takes or the host, whichever is longer."""
        return device_s + host_s if self.is_device else max(device_s, host_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionChoice:
    """What a step takes in which some calls are regions."""

    chosen: tuple[int, ...]
    """The calls, in their order."""
    peak_bytes: int
    """The most bytes of saved values and replay temporaries at once."""
    device_s: float
    """What the device spends on running regions again."""
    host_s: float
    """What the host spends on them."""


class RegionBytes(NamedTuple):
    """What one call takes that is recomputed."""

    dropped: frozenset[int]
    """What it saves, and what is gone after it."""
    inputs: tuple[int, ...]
    """What is held for it, saved or not."""
    peak_bytes: int
    """The most bytes that its second run has made and still holds at once."""


class RegionNeeds(NamedTuple):
    """What a step takes in which some calls are recomputed."""

    peak_bytes: int
    """The most bytes of saved values and replay temporaries at once."""
    regions: tuple[RegionBytes, ...]
    """What each call that is recomputed takes."""


class RegionStep:
    """A step in which calls may be regions, simulated as it is asked for.

    Args:
        step: the step.
        calls: its calls, in the order of their beginnings.
        costs: what the host spends.
        num_ops: how many ops of any kind its forward runs.
    """

    def __init__(self, step: Step, calls: Sequence[ModuleCall], costs: HostCosts, *, num_ops: int) -> None:
        self.step, self.calls, self.costs = step, calls, costs
        lineage = step.lineage
        self.plain_device_s = 3 * (sum(lineage.seconds) + sum(call.device_s for call in calls))
        """Of the whole step without regions: a backward takes about as long as two forwards."""
        self.plain_host_s = 2 * costs.op_s * num_ops
        self._num_ops = num_ops
        self._bytes = lineage.num_bytes
        self._counted = frozenset(step.saves)
        self._inputs = [tuple(value for value in call.inputs if self._is_held(value)) for call in calls]
        self._saved = [frozenset(step.saves[slice(*call.saves)]) for call in calls]
        self._device_s = self._device_seconds()
        self._host_s = [costs.region_s + costs.op_s * call.num_ops for call in calls]
        self._peaks = [self._peak_of(index) if not call.why_not else 0 for index, call in enumerate(calls)]
        self._freed = self._freed_bytes()
        self._eligible = [not call.why_not and self._freed[index] > 0 for index, call in enumerate(calls)]
        self._children: list[list[int]] = [[] for _ in calls]
        self._ends = [index + 1 for index in range(len(calls))]
        for index in reversed(range(len(calls))):
            parent = calls[index].parent
            if parent >= 0:
                self._children[parent].append(index)
                self._ends[parent] = max(self._ends[parent], self._ends[index])
        self._work = 0
        self._found: dict[tuple[int, ...], RegionChoice] = {}

    def _is_held(self, value: int) -> bool:
        """Tell whether to hold a value takes bytes that the budget counts."""
        return self.step.lineage.maker[value] != NO_OP or value in self.step.retained_bytes or value in self._counted

    def _device_seconds(self) -> list[float]:
        """Return for each call what the device spends on running it again: ops, and compiled calls that have begun by its
        last save."""
        found = [sum(self.step.lineage.seconds[slice(*call.ops)]) for call in self.calls]
        for index, compiled in enumerate(self.calls):
            while compiled.device_s and index >= 0:
                around = self.calls[index]
                if compiled.saves[0] < around.saves[1]:
                    found[index] += compiled.device_s
                index = around.parent
        return found

    def _freed_bytes(self) -> list[int]:
        """Return for each call the bytes that are gone in the forward if it alone is a region."""
        first, last = dict[int, int](), dict[int, int]()
        for index, value in enumerate(self.step.saves):
            first.setdefault(value, index)
            last[value] = index
        found = []
        for index, call in enumerate(self.calls):
            start, stop = call.saves
            inputs = frozenset(self._inputs[index])
            gone = [value for value in self._saved[index] - inputs if start <= first[value] and last[value] < stop]
            more = [value for value in inputs if value not in self._counted]
            found.append(sum(self._bytes[value] for value in gone) - sum(self._bytes[value] for value in more))
        return found

    def _peak_of(self, index: int) -> int:
        """Return the most bytes that the second run of a region has made and still holds at once."""
        lineage, saved = self.step.lineage, self._saved[index]
        start, stop = self.calls[index].ops
        last = dict[int, int]()
        for op in range(start, stop):
            for value in (*lineage.ins[op], *lineage.outs[op]):
                last[value] = op
        ending: dict[int, list[int]] = {}
        for value, op in last.items():
            if value not in saved and start <= lineage.maker[value] < stop:
                ending.setdefault(op, []).append(value)
        live = peak = 0
        for op in range(start, stop):
            live += sum(self._bytes[value] for value in lineage.outs[op])
            live -= sum(self._bytes[old] for old, _ in lineage.taken.get(op, ()) if start <= lineage.maker[old] < stop)
            peak = max(peak, live)
            taken = {old for old, _ in lineage.taken.get(op, ())}
            live -= sum(self._bytes[value] for value in ending.get(op, ()) if value not in taken)
        return max(peak, sum(self._bytes[value] for value in saved.difference(self._inputs[index])))

    # One choice

    def simulate(self, chosen: Iterable[int]) -> RegionChoice:
        """Return what a step takes with these regions."""
        key = tuple(chosen)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = RegionChoice(
                chosen=key,
                peak_bytes=self._peak_bytes(key),
                device_s=sum(self._device_s[index] for index in key),
                host_s=sum(self._host_s[index] for index in key),
            )
        return found

    def _peak_bytes(self, chosen: Sequence[int]) -> int:
        """Return the most bytes at once: at the end of the forward, or while the backward is in a region.

        The backward lets go of values in the reverse order in which they came to be held.
        """
        saves, num_bytes, held = self.step.saves, self._bytes, set[int]()
        live = peak = position = 0
        for index in chosen:
            start, stop = self.calls[index].saves
            for value in (*saves[position:start], *self._inputs[index]):
                if value not in held:
                    held.add(value)
                    live += num_bytes[value]
            peak = max(peak, live + self._peaks[index])
            position = stop
        for value in saves[position:]:
            if value not in held:
                held.add(value)
                live += num_bytes[value]
        self._work += len(saves) + 3 * len(chosen)
        return max(peak, live)

    def seconds(self, choice: RegionChoice) -> float:
        """Return what a step takes."""
        return self.costs.step_s(self.plain_device_s + choice.device_s, self.plain_host_s + choice.host_s)

    def needs(self, choice: RegionChoice) -> RegionNeeds:
        """Return what a step takes, call by call."""
        dropped = self.dropped(choice)
        regions = (
            RegionBytes(self._saved[index] & dropped, self._inputs[index], self._peaks[index]) for index in choice.chosen
        )
        return RegionNeeds(choice.peak_bytes, tuple(regions))

    def dropped(self, choice: RegionChoice) -> frozenset[int]:
        """Return the saved values that are gone after the forward."""
        held, position = set[int](), 0
        for index in choice.chosen:
            start, stop = self.calls[index].saves
            held.update(self.step.saves[position:start], self._inputs[index])
            position = stop
        held.update(self.step.saves[position:])
        return self._counted - held
