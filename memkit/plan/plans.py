"""Plans: the action for each saved value of a step. A plan is frozen, readable as a table, and executable."""

from __future__ import annotations

import hashlib
import json
import os
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from typing import Any

from tabulate import tabulate

from memkit.core.schemas import read_json
from memkit.core.sizes import format_bytes
from memkit.errors import BudgetInfeasible, PlanFormatError
from memkit.plan.step import Step, StepTrace

SCHEMA = "memkit.MemoryPlan"
SCHEMA_VERSION = 1
NEVER = -1


class Action(str, Enum):
    """What to do with one saved storage."""

    KEEP = "keep"
    """Leave it on the device."""
    OFFLOAD = "offload"
    """Copy it to host memory, free it on the device, and copy it back for the backward."""
    RECOMPUTE = "recompute"
    """Free it, and run the ops that made it again for the backward."""


def limit_of(seen_bytes: int, ratio: float, window_bytes: int) -> int:
    """Return the most bytes of saved tensors that the device may hold: the share that the ratio keeps, and room for the last
    copies, a quarter of the window, or up to all of it if that is within a 64th of all saved bytes."""
    beside_bytes = max(window_bytes // 4, min(window_bytes, seen_bytes // 64))
    return max(round((1 - ratio) * seen_bytes) + beside_bytes, window_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedValue:
    """What happens to one value, and why.

    Its copies are timed by ordinals: of saves in the forward, of requests in the backward. Of several saves with no op between
    them it is the last, of several such requests the first.
    """

    num_bytes: int
    action: Action
    """A recomputed anchor is not held at all, so it is in no plan."""
    value: int = -1
    """Its number in the lineage of the step; -1 if no ops were recorded."""
    cost_s: float = 0.0
    """Seconds to run its op again, with the ops between it and kept values; 0 where it is not certain to be recomputed."""
    link_s: float = 0.0
    """Seconds of its copies, out and back; compute goes on meanwhile."""
    op: str = ""
    """The op that makes it; "" if none is known that can."""
    module: str = ""
    """The module in which that op ran; "" if unknown."""
    reason: str = ""
    is_anchor: bool = False
    """Whether autograd does not save it: it is held because values are recomputed from it."""
    index: int = -1
    """In a `Plan`, its index among the distinct storages in the order of first saves."""
    is_held: bool = False
    """Whether something else keeps it alive: moving it would free nothing, and no total counts it."""
    copy_at: int = NEVER
    """The save at which its copy to the host begins."""
    let_go_at: int = NEVER
    """The save at which compute waits for that copy and the device frees the value; the number of saves stands for the first
    request."""
    fetch_at: int = NEVER
    """The request at which its copy back begins. Of copies that begin at one request, the one needed first goes first."""
    needed_at: int = NEVER
    """The request at which compute waits for its copy back: its own, or that of the first replay that reads it."""
    held_until: int = NEVER
    """The last request whose replay reads it, if any: it stays until then, even if autograd frees it before."""

    def __str__(self) -> str:
        name = f"save {self.index}" if self.index >= 0 else f"value {self.value}"
        return f"{self.action.value} {self.op or name}: {format_bytes(self.num_bytes)}"


class _Explained:
    __slots__ = ()

    @property
    @abstractmethod
    def _bytes(self) -> Mapping[Action, int]: ...

    @abstractmethod
    def _told(self) -> tuple[Sequence[PlannedValue], Iterable[str]]: ...

    @property
    def kept_bytes(self) -> int:
        """Bytes of saved values that stay on the device."""
        return self._bytes[Action.KEEP]

    @property
    def offload_bytes(self) -> int:
        """Bytes of saved values that leave for host memory."""
        return self._bytes[Action.OFFLOAD]

    @property
    def recompute_bytes(self) -> int:
        """Bytes of saved values that are recomputed."""
        return self._bytes[Action.RECOMPUTE]

    def explain(self, depth: int | None = None) -> str:
        """Return the plan as a table, with the totals below: by module and op the actions, their bytes, and the reasons.

        Args:
            depth: how many parts of module names are told apart: by default all, 0 for none.
        """
        values, totals = self._told()
        groups: dict[tuple[str, ...], list[PlannedValue]] = {}
        for value in values:
            module = ".".join(value.module.split(".")[:depth]) if depth is not None else value.module
            op = () if depth is not None else (value.op,)
            action = f"hold, {value.action.value}" if value.is_anchor else value.action.value
            groups.setdefault((module, *op, action, value.reason), []).append(value)
        columns: dict[str, list[object]] = {}
        for (*names, action, reason), group in groups.items():
            row = dict(zip(("module", "op"), (name or "-" for name in names), strict=False))
            cells = {
                **row,
                "action": action,
                "values": len(group),
                "size": format_bytes(sum(value.num_bytes for value in group)),
                "again (ms)": _milliseconds(sum(value.cost_s for value in group)),
                "link (ms)": _milliseconds(sum(value.link_s for value in group)),
                "why": reason,
            }
            for name, cell in cells.items():
                columns.setdefault(name, []).append(cell)
        if not any(columns.get("link (ms)", ())):
            columns.pop("link (ms)", None)
        aligned = ["right" if name in ("values", "size", "again (ms)", "link (ms)") else "left" for name in columns]
        table = tabulate(columns, headers="keys", colalign=aligned, disable_numparse=True)
        shares = (
            f"kept: {format_bytes(self.kept_bytes)}, offloaded: {format_bytes(self.offload_bytes)}, "
            f"recomputed: {format_bytes(self.recompute_bytes)}"
        )
        return "\n".join([table, shares, *totals])


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}" if seconds else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(_Explained):
    """One action for each storage that a forward saves: `CPUOffload.plan` and `Rematerialize.plan`.

    It can be edited (`with_action`) and given to `Rematerialize` as `plan=`. It is valid for the step that it was made from: a
    step that saves anything else does not follow it.
    """

    saves: tuple[PlannedValue, ...]
    """The distinct saved storages, in the order of first saves."""
    ratio: float | None = None
    """The requested share of bytes that leave; None if a budget was requested."""
    budget_bytes: int | None = None
    """The requested budget; None if a ratio was requested."""
    limit_bytes: float
    """The most bytes of these storages that the device holds at once; replays keep to it as well."""
    window_bytes: int = 0
    """Of these, bytes that the device may hold in any case, so that compute need not wait for copies."""
    predicted_peak_bytes: int
    """The most bytes of saved storages and replay temporaries at once."""
    predicted_replay_s: float = 0.0
    """Expected seconds of the ops that run again."""
    num_replayed_ops: int = 0
    """Ops that run again in the backward."""
    retained: frozenset[int] = frozenset()
    """Values that are held on purpose because others are recomputed from them: roots, and values that autograd did not save."""
    _bytes: Mapping[Action, int] = field(init=False, repr=False, compare=False)  # summed once, since each forward asks

    def __post_init__(self) -> None:
        totals = dict.fromkeys(Action, 0)
        for save in self.saves:
            if not save.is_held:
                totals[save.action] += save.num_bytes
        object.__setattr__(self, "_bytes", totals)

    @property
    def actions(self) -> tuple[Action, ...]:
        """The action for each save."""
        return tuple(save.action for save in self.saves)

    @property
    def dropped(self) -> frozenset[int]:
        """The values that are recomputed."""
        return frozenset(save.value for save in self.saves if save.action is Action.RECOMPUTE)

    @property
    def saved_bytes(self) -> int:
        """Bytes of all saves, without those that something else keeps alive."""
        return sum(self._bytes.values())

    def __str__(self) -> str:
        shares = ", ".join(f"{action.value} {format_bytes(total)}" for action, total in self._bytes.items() if total)
        text = f"{shares or 'nothing'} of {format_bytes(self.saved_bytes)}, in {len(self.saves)} storages"
        if self.budget_bytes is None:
            return text
        peak = format_bytes(self.predicted_peak_bytes)
        return f"{text}; predicted peak {peak}, replays {1e3 * self.predicted_replay_s:.2f} ms"

    def with_action(self, index: int, action: Action) -> Plan:
        """Return the plan with another action for one of its saves. Its predictions are not updated.

        Raises:
            ValueError: nothing can recompute the save.
            IndexError: there is no such save.
        """
        save = self.saves[index]
        if action is Action.RECOMPUTE and not save.op:
            raise ValueError(
                f"save {index} cannot be recomputed: {save.reason if self.budget_bytes is not None else 'no op was recorded'}"
            )
        saves = list(self.saves)
        saves[index] = replace(save, action=action, reason="asked for")
        return replace(self, saves=tuple(saves))

    def with_moved(self, moved: Collection[int]) -> Plan:
        """Return the plan where an outer context moves some of the values that stay."""
        saves = [
            replace(save, action=Action.OFFLOAD, reason="the context outside moves it")
            if save.action is Action.KEEP and save.value in moved
            else save
            for save in self.saves
        ]
        return replace(self, saves=tuple(saves))

    def _told(self) -> tuple[Sequence[PlannedValue], Iterable[str]]:
        if self.budget_bytes is None:
            return self.saves, ()
        return self.saves, (
            f"budget: {format_bytes(self.budget_bytes)}, predicted peak {format_bytes(self.predicted_peak_bytes)}",
            f"predicted replays: {self.num_replayed_ops} ops, {1e3 * self.predicted_replay_s:.2f} ms",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedReplay:
    request: int  # that of the value, or the first of several with no op between them
    value: int
    ops: tuple[int, ...]  # ops of the lineage, in this order
    stays: tuple[int, ...] = ()  # other values that are made on the way, and stay for their own requests


def _values_of(step: Step) -> dict[str, Any]:
    lineage = step.lineage
    read_and_made = repr((tuple(lineage.ins), tuple(lineage.outs)))
    return {
        "saves": tuple((value, lineage.num_bytes[value]) for value in step.saves),
        "uses": tuple(step.uses),
        "ops_digest": hashlib.sha256(read_and_made.encode()).hexdigest(),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    model: str
    inputs: str
    target: str  # the device whose kernels the trace imitated or used
    num_forward_ops: int
    num_ops: int
    saves: tuple[tuple[int, int], ...]
    uses: tuple[int, ...]
    ops_digest: str  # digest of the values that each op reads and makes: replays name ops by number

    @classmethod
    def of(cls, trace: StepTrace) -> PlannedStep:
        return cls(
            model=trace.model,
            inputs=trace.inputs,
            target=trace.target,
            num_forward_ops=trace.num_forward_ops,
            num_ops=len(trace.ops),
            **_values_of(trace.step),
        )

    def difference_of(self, step: Step) -> str:
        return self.difference(replace(self, **_values_of(step)))

    def difference(self, other: PlannedStep) -> str:
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
        if self.ops_digest != other.ops_digest:
            return "its ops read or make other values"
        for what in ("model", "inputs", "target", "num_forward_ops", "num_ops"):
            there, here = getattr(self, what), getattr(other, what)
            if there != here:
                return f"{what.replace('num_', 'number of ').replace('_', ' ')}: {there} there, {here} here"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan(_Explained):
    """One action for each value of a step, when it happens, and the predicted time and memory of the step.

    All bytes are allocations of this process on the device at once, with parameters, gradients and whatever else was counted.
    """

    budget_bytes: int
    """The requested budget."""
    predicted_s: float
    """Seconds of the step under the plan."""
    plain_s: float
    """Seconds of the step if all is kept."""
    predicted_peak_bytes: int
    """The step's peak under the plan."""
    plain_peak_bytes: int
    """The step's peak if all is kept."""
    min_budget_bytes: int
    """The smallest budget with a plan: below it `BudgetInfeasible` is raised. It may not be the true minimum: a plan for a
    larger budget may happen to take a little less."""
    replayed_s: float
    """Seconds of ops that run again."""
    stall_s: float
    """Seconds that compute waits for copies."""
    moved_bytes: int
    """Bytes that leave for host memory; as many come back."""
    gpu: str
    is_measured: bool
    """Whether predictions for the GPU were compared with real steps."""
    step: PlannedStep
    values: tuple[PlannedValue, ...]
    """The saved values in the order of first saves, then the held anchors."""
    replays: tuple[PlannedReplay, ...] = ()
    """In the order of requests."""
    bound_s: float | None = None
    """Seconds that no plan can beat; None if not computed."""
    notes: tuple[str, ...] = field(default=())
    """Remarks on the predictions, such as modules whose figures are guesses."""

    @property
    def anchor_bytes(self) -> int:
        """Bytes of values that autograd does not save and that are held, here or in host memory, because others are recomputed
        from them."""
        return sum(value.num_bytes for value in self.values if value.is_anchor)

    @property
    def is_plain(self) -> bool:
        """Whether all values stay."""
        return all(value.action is Action.KEEP for value in self.values)

    @property
    def _bytes(self) -> Mapping[Action, int]:
        totals = dict.fromkeys(Action, 0)
        for value in self.values:
            if not value.is_anchor:
                totals[value.action] += value.num_bytes
        return totals

    def check(self, trace: StepTrace) -> None:
        """Raise if the plan is for another step.

        Raises:
            ValueError: the steps differ; the message names the first difference.
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

    def _told(self) -> tuple[Sequence[PlannedValue], Iterable[str]]:
        share = self.predicted_s / (self.plain_s or 1)
        measured = "" if self.is_measured else "; predictions for it are not measured"
        totals = [f"held to make others from: {format_bytes(self.anchor_bytes)}"] if self.anchor_bytes else []
        totals += [
            f"budget: {format_bytes(self.budget_bytes)}, predicted peak {format_bytes(self.predicted_peak_bytes)} "
            f"of {format_bytes(self.plain_peak_bytes)}; least budget found: {format_bytes(self.min_budget_bytes)}",
            f"predicted step: {1e3 * self.predicted_s:.2f} ms, {share:.3f} of plain: replays {1e3 * self.replayed_s:.2f} ms, "
            f"stalls {1e3 * self.stall_s:.2f} ms",
        ]
        if self.bound_s:
            gap = 100 * (self.predicted_s / self.bound_s - 1)
            totals.append(f"no plan is faster than {1e3 * self.bound_s:.2f} ms: this one is within {gap:.2f} % of that")
        return self.values, [*totals, f"GPU: {self.gpu}{measured}", *self.notes]

    def to_json(self) -> str:
        """Return the whole plan as JSON, for `from_json`. Bytes and seconds are plain numbers."""
        content = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, **asdict(self)}
        for value in content["values"]:
            del value["index"], value["is_held"]  # of a `Plan`
        return json.dumps(content, indent=1)

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


def _plan_from(content: dict[str, Any]) -> MemoryPlan:
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


def tell_kept(kept_bytes: Mapping[str, int]) -> str:
    """Return the end of a message about an infeasible budget: the bytes that stay under any plan, by reason."""
    most = sorted(kept_bytes, key=lambda why: -kept_bytes[why])[:3]
    return "".join(f"; {format_bytes(kept_bytes[why])} stay, since {why}" for why in most)


def infeasible(budget_bytes: int, smallest_bytes: int, kept: str = "") -> BudgetInfeasible:
    return BudgetInfeasible(
        f"a budget of {format_bytes(budget_bytes)} cannot be kept to: the smallest is {format_bytes(smallest_bytes)}{kept}",
        smallest_bytes,
    )
