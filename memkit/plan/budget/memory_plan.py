"""What is to happen to each value of a step under a budget of the whole device, and what the step then takes: frozen, as JSON,
and as a table."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from memkit.errors import PlanFormatError
from memkit.plan.actions import Action
from memkit.schemas import read_json
from memkit.sizes import format_bytes

if TYPE_CHECKING:
    from memkit.plan.step import Step, StepTrace

SCHEMA = "memkit.MemoryPlan"
SCHEMA_VERSION = 1
NEVER = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedValue:
    """What is to happen to one value.

    Its moments are ordinals, of saves in the forward and of requests in the backward: of several saves with no op between them
    the last, of several such requests the first.
    """

    value: int
    """Its number in the lineage of the step."""
    action: Action
    """To recompute an anchor is not to hold it: such anchors are in no plan."""
    num_bytes: int
    """Bytes of its storage."""
    cost_s: float = 0.0
    """What its replay takes, with what is made on the way; 0 for what is kept or leaves."""
    link_s: float = 0.0
    """What its copies take, out and back; compute goes on meanwhile."""
    module: str = ""
    op: str = ""
    """The op that makes it, and the module in which that ran; "" where they are not known."""
    reason: str = ""
    """Why, for people."""
    copy_at: int = NEVER
    """The save at which its copy to the host begins."""
    let_go_at: int = NEVER
    """The save at which compute waits for that copy and the device forgets the value; the number of saves for the first
    request."""
    fetch_at: int = NEVER
    """The request at which its copy back begins. Of those that begin at one request, what is needed first goes first."""
    needed_at: int = NEVER
    """The request at which compute waits for that one: its own, or that of the first replay that reads it."""
    held_until: int = NEVER
    """The last request whose replay reads it, if there is one: until then it stays, also if autograd frees it before."""
    is_anchor: bool = False
    """Whether autograd does not save it: it is held since values are recomputed from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedReplay:
    """What one request lets run again."""

    request: int
    """That for the value, or the first of several with no op between them: all their replays run before it is answered."""
    value: int
    """The value that is asked for, by its number in the lineage."""
    ops: tuple[int, ...]
    """Of the lineage of the step, in this order."""
    stays: tuple[int, ...] = ()
    """Other values that are made on the way, and stay for their own requests."""


def _saves_of(step: Step) -> tuple[tuple[int, int], ...]:
    sizes = step.lineage.num_bytes
    return tuple((value, sizes[value]) for value in step.saves)


def _digest_of(step: Step) -> str:
    read_and_made = repr((tuple(step.lineage.ins), tuple(step.lineage.outs)))
    return hashlib.sha256(read_and_made.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """Which step a plan is for."""

    model: str
    """The class of the model."""
    inputs: str
    """The shapes of its inputs, as text."""
    target: str
    """The device whose kernels the trace imitated, or was made on."""
    num_forward_ops: int
    """Ops of the forward and the loss."""
    num_ops: int
    """Ops of the whole step."""
    saves: tuple[tuple[int, int], ...]
    """For each save its value and bytes, in order."""
    uses: tuple[int, ...]
    """The value of each request, in order."""
    ops_digest: str
    """Of which values each op reads and makes: replays name ops by their numbers."""

    @classmethod
    def of(cls, trace: StepTrace) -> PlannedStep:
        """Return what a plan remembers of a step."""
        return cls(
            model=trace.model,
            inputs=trace.inputs,
            target=trace.target,
            num_forward_ops=trace.num_forward_ops,
            num_ops=len(trace.ops),
            saves=_saves_of(trace.step),
            uses=tuple(trace.step.uses),
            ops_digest=_digest_of(trace.step),
        )

    def difference(self, other: PlannedStep) -> str:
        """Return the first thing in which another step differs, "" if nothing does that a plan goes by."""
        difference = self._difference_of_values(other)
        if difference:
            return difference
        for what in ("model", "inputs", "target", "num_forward_ops", "num_ops"):
            there, here = getattr(self, what), getattr(other, what)
            if there != here:
                return f"{what.replace('num_', 'number of ').replace('_', ' ')}: {there} there, {here} here"
        return ""

    def difference_of(self, step: Step) -> str:
        """Return the first thing in which a step differs that runs, "" if nothing does."""
        here = replace(self, saves=_saves_of(step), uses=tuple(step.uses), ops_digest=_digest_of(step))
        return self._difference_of_values(here)

    def _difference_of_values(self, other: PlannedStep) -> str:
        for index, (mine, theirs) in enumerate(zip(self.saves, other.saves, strict=False)):
            if mine != theirs:
                return (
                    f"save {index} is value {mine[0]} of {format_bytes(mine[1])} there, "
                    f"and value {theirs[0]} of {format_bytes(theirs[1])} here"
                )
        for what, name in (("saves", "saves"), ("uses", "requests")):
            mine_all, theirs_all = getattr(self, what), getattr(other, what)
            if len(mine_all) != len(theirs_all):
                return f"it has {len(mine_all)} {name}, this one {len(theirs_all)}"
        for index, (asked, asks) in enumerate(zip(self.uses, other.uses, strict=True)):
            if asked != asks:
                return f"request {index} asks for value {asked} there, and for value {asks} here"
        return "" if self.ops_digest == other.ops_digest else "its ops read or make other values"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """One action for each value of a step, the moments at which it happens, and what the step takes.

    All bytes are what this process allocates on the device at once, with parameters, gradients and what else was counted.
    """

    budget_bytes: int
    """The budget that was asked for."""
    predicted_s: float
    """Seconds that the step takes by the plan."""
    plain_s: float
    """Seconds that the step takes if all is kept."""
    predicted_peak_bytes: int
    """The step's peak by the plan."""
    plain_peak_bytes: int
    """The step's peak if all is kept."""
    min_budget_bytes: int
    """The least budget for which a plan is found: below it `BudgetInfeasible` is raised. Not the least that there is: a plan
    for a larger one may happen to take a little less."""
    replayed_s: float
    """Seconds of ops that run again."""
    stall_s: float
    """Seconds that compute waits for copies."""
    moved_bytes: int
    """What leaves for host memory; as much comes back."""
    gpu: str
    """For which kind of GPU."""
    is_measured: bool
    """Whether predictions for it were compared with steps on it."""
    step: PlannedStep
    """The step that it is for, by which another one is told apart."""
    values: tuple[PlannedValue, ...]
    """The saved ones in the order of first saves, then the anchors that are held."""
    replays: tuple[PlannedReplay, ...] = ()
    """In the order of requests."""
    bound_s: float | None = None
    """What no plan can beat; None where it was not computed."""
    notes: tuple[str, ...] = field(default=())
    """What to know about the predictions: modules whose figures are guesses, for one."""

    @property
    def kept_bytes(self) -> int:
        """Bytes of saved values that stay on the device."""
        return self._bytes(Action.KEEP)

    @property
    def offload_bytes(self) -> int:
        """Bytes of saved values that leave for host memory."""
        return self._bytes(Action.OFFLOAD)

    @property
    def recompute_bytes(self) -> int:
        """Bytes of saved values that are recomputed."""
        return self._bytes(Action.RECOMPUTE)

    @property
    def anchor_bytes(self) -> int:
        """Bytes of values that autograd does not save and that are held, here or in host memory, since others are made from
        them."""
        return sum(value.num_bytes for value in self.values if value.is_anchor)

    @property
    def is_plain(self) -> bool:
        """Whether nothing is to be done: all stays."""
        return all(value.action is Action.KEEP for value in self.values)

    def _bytes(self, action: Action) -> int:
        return sum(value.num_bytes for value in self.values if value.action is action and not value.is_anchor)

    def check(self, trace: StepTrace) -> None:
        """Raise if the plan is for another step.

        Raises:
            ValueError: it is; it names the first difference.
        """
        difference = self.step.difference(PlannedStep.of(trace))
        if difference:
            raise ValueError(f"this plan is for another step: {difference}. Plan this step anew")

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.predicted_peak_bytes)} of {format_bytes(self.budget_bytes)}, "
            f"{1e3 * self.predicted_s:.1f} ms a step ({self.predicted_s / (self.plain_s or 1):.3f} of plain): "
            f"keep {format_bytes(self.kept_bytes)}, offload {format_bytes(self.offload_bytes)}, "
            f"recompute {format_bytes(self.recompute_bytes)}"
        )

    def explain(self, depth: int | None = None) -> str:
        """Return the plan as a table, with the totals below: by module and op what is done, with how many bytes, and why.

        Args:
            depth: so many parts of the names of modules are told apart, by default all, 0 for none.
        """
        groups: dict[tuple[str, str, str, str], list[PlannedValue]] = {}
        for value in self.values:
            module = ".".join(value.module.split(".")[:depth]) if depth is not None else value.module
            op = value.op if depth is None else ""
            action = f"hold, {value.action.value}" if value.is_anchor else value.action.value
            groups.setdefault((module, op, action, value.reason), []).append(value)
        rows: list[tuple[object, ...]] = [
            (
                module or "-",
                op or "-",
                action,
                len(group),
                format_bytes(sum(value.num_bytes for value in group)),
                _milliseconds(sum(value.cost_s for value in group)),
                _milliseconds(sum(value.link_s for value in group)),
                reason,
            )
            for (module, op, action, reason), group in groups.items()
        ]
        if depth is not None:
            rows = [(row[0], *row[2:]) for row in rows]
        names = ("module", "op", "action", "values", "size", "again (ms)", "link (ms)", "why")
        headers = names if depth is None else (names[0], *names[2:])
        aligned = ["left"] * (len(headers) - 5) + ["right"] * 4 + ["left"]
        return "\n".join([tabulate(rows, headers=headers, colalign=aligned, disable_numparse=True), *self._totals()])

    def _totals(self) -> Iterable[str]:
        share = self.predicted_s / (self.plain_s or 1)
        measured = "" if self.is_measured else "; predictions for it are not measured"
        yield (
            f"kept: {format_bytes(self.kept_bytes)}, offloaded: {format_bytes(self.offload_bytes)}, "
            f"recomputed: {format_bytes(self.recompute_bytes)}"
        )
        if self.anchor_bytes:
            yield f"held to make others from: {format_bytes(self.anchor_bytes)}"
        yield (
            f"budget: {format_bytes(self.budget_bytes)}, predicted peak {format_bytes(self.predicted_peak_bytes)} "
            f"of {format_bytes(self.plain_peak_bytes)}; least budget found: {format_bytes(self.min_budget_bytes)}"
        )
        yield (
            f"predicted step: {1e3 * self.predicted_s:.2f} ms, {share:.3f} of plain: replays {1e3 * self.replayed_s:.2f} ms, "
            f"stalls {1e3 * self.stall_s:.2f} ms"
        )
        if self.bound_s is not None and self.bound_s > 0:
            gap = 100 * (self.predicted_s / self.bound_s - 1)
            yield f"no plan is faster than {1e3 * self.bound_s:.2f} ms: this one is within {gap:.2f} % of that"
        yield f"GPU: {self.gpu}{measured}"
        yield from self.notes

    def to_json(self) -> str:
        """Return the whole plan as JSON, for `from_json`. Bytes and seconds are plain numbers."""
        return json.dumps({"schema": SCHEMA, "schema_version": SCHEMA_VERSION, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, source: str | os.PathLike[str]) -> MemoryPlan:
        """Read a plan that `to_json` wrote: its text, or (as a `pathlib.Path`) the file that holds it.

        Raises:
            PlanFormatError: it is no memory plan, or it was written by a newer memkit.
            OSError: the file cannot be read.
        """
        content, where = read_json(source, schema=SCHEMA, version=SCHEMA_VERSION, what="a memkit plan", error=PlanFormatError)
        try:
            return _plan_from(content)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanFormatError(f"{where} is not a whole memkit plan: {type(error).__name__}: {error}") from error


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}" if seconds else ""


def _plan_from(content: dict[str, Any]) -> MemoryPlan:
    """Return the plan that JSON tells. Any: JSON."""
    known = {entry.name for entry in fields(MemoryPlan)}
    plain = {name: content[name] for name in known & content.keys() - {"step", "values", "replays", "notes"}}
    for name, value in plain.items():
        if name.endswith("_bytes") and type(value) is not int:
            raise TypeError(f"{name} must be a whole number; found {value!r}")
        if name.endswith("_s") and type(value) not in (int, float) and (name, value) != ("bound_s", None):
            raise TypeError(f"{name} must be a number; found {value!r}")
    step = dict(content["step"])
    step["saves"] = tuple((int(value), int(num_bytes)) for value, num_bytes in step["saves"])
    step["uses"] = tuple(step["uses"])
    return MemoryPlan(
        **plain,
        step=PlannedStep(**step),
        values=tuple(PlannedValue(**{**value, "action": Action(value["action"])}) for value in content["values"]),
        replays=tuple(
            PlannedReplay(**{**replay, "ops": tuple(replay["ops"]), "stays": tuple(replay["stays"])})
            for replay in content["replays"]
        ),
        notes=tuple(content["notes"]),
    )
