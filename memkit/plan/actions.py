"""What is to happen to each save of a step: the frozen answer of every planner, which can be read, edited and given back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from tabulate import tabulate

from memkit.errors import BudgetInfeasible
from memkit.sizes import format_bytes, format_mib


class Action(str, Enum):
    """What to do with one saved storage."""

    KEEP = "keep"
    """Leave it on the device."""
    OFFLOAD = "offload"
    """Copy it to host memory, let go of it, and have it back for the backward."""
    RECOMPUTE = "recompute"
    """Let go of it, and run the ops that made it again for the backward."""


def limit_of(seen_bytes: int, ratio: float, window_bytes: int) -> int:
    """Return the most bytes of saved tensors that the device may hold: what the ratio keeps, and beside it so much that the
    last copies of a forward need not be over when it ends. That is a quarter of the window, or as much more of it as is within
    a 64th of what is saved. Or the whole window, if that is more."""
    beside_bytes = max(window_bytes // 4, min(window_bytes, seen_bytes // 64))
    return max(round((1 - ratio) * seen_bytes) + beside_bytes, window_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSave:
    """What is to happen to one saved storage."""

    index: int
    """Its place among the distinct ones, in the order of first saves."""
    num_bytes: int
    """Bytes of the storage."""
    action: Action
    """What is done with it."""
    cost_s: float = 0.0
    """What it takes to run its op, and the ops between it and what is kept, again; 0 where its op was not recorded."""
    reason: str
    """Why, in words."""
    is_held: bool = False
    """Whether something else keeps it alive: to move it would free nothing, and no total counts it."""
    value: int = -1
    """Its number in the recorded step; -1 where no ops were recorded."""
    op: str = ""
    """The op that makes it, "" where none is known that can."""
    module: str = ""
    """The module in which that ran, "" where it is not known."""

    def __str__(self) -> str:
        return f"{self.action.value} {self.op or f'save {self.index}'}: {format_bytes(self.num_bytes)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One action for each storage that a forward saves: `CPUOffload.plan` and `Rematerialize.plan`.

    It can be edited (`with_action`) and given to `Rematerialize` as `plan=`. It is for the step that it was made from: a step
    that saves anything else does not follow it.
    """

    saves: tuple[PlannedSave, ...]
    """The distinct saved storages, in the order of first saves."""
    ratio: float | None = None
    """The share of the bytes that was asked to leave; None where a budget was asked for."""
    budget_bytes: int | None = None
    """The bytes that were asked to be enough; None where a ratio was asked for."""
    limit_bytes: float
    """The most bytes of these storages that the device holds at once, and what replays keep to."""
    window_bytes: int = 0
    """Of these, bytes that the device may hold in any case, so that copies need not be waited for."""
    predicted_peak_bytes: int
    """The most bytes of saved storages and replay temporaries at once."""
    predicted_replay_s: float = 0.0
    """Seconds that the ops that run again are expected to take."""
    num_replayed_ops: int = 0
    """Ops that run again in the backward."""
    retained: frozenset[int] = frozenset()
    """Values that are held on purpose, because something is made from them: roots, and others that autograd did not save."""
    _bytes: Mapping[Action, int] = field(init=False, repr=False, compare=False)
    """Bytes of the saves by action, but for those that something else keeps alive: summed up once, as each forward asks."""

    def __post_init__(self) -> None:
        totals = dict.fromkeys(Action, 0)
        for save in self.saves:
            if not save.is_held:
                totals[save.action] += save.num_bytes
        object.__setattr__(self, "_bytes", totals)

    @property
    def actions(self) -> tuple[Action, ...]:
        """What is done with each save."""
        return tuple(save.action for save in self.saves)

    @property
    def dropped(self) -> frozenset[int]:
        """The values that are recomputed."""
        return frozenset(save.value for save in self.saves if save.action is Action.RECOMPUTE)

    @property
    def saved_bytes(self) -> int:
        """Bytes of all saves, but for those that something else keeps alive."""
        return sum(self._bytes.values())

    @property
    def kept_bytes(self) -> int:
        """Of these, the bytes that stay."""
        return self._bytes[Action.KEEP]

    @property
    def offload_bytes(self) -> int:
        """Of these, the bytes that leave for host memory."""
        return self._bytes[Action.OFFLOAD]

    @property
    def recompute_bytes(self) -> int:
        """Of these, the bytes that are recomputed."""
        return self._bytes[Action.RECOMPUTE]

    @property
    def _is_recorded(self) -> bool:
        """Whether it is known which ops make the saves."""
        return self.budget_bytes is not None

    def __str__(self) -> str:
        shares = ", ".join(f"{action.value} {format_bytes(total)}" for action, total in self._bytes.items() if total)
        text = f"{shares or 'nothing'} of {format_bytes(self.saved_bytes)}, in {len(self.saves)} storages"
        if not self._is_recorded:
            return text
        peak = format_bytes(self.predicted_peak_bytes)
        return f"{text}; predicted peak {peak}, replays {1e3 * self.predicted_replay_s:.2f} ms"

    def with_action(self, index: int, action: Action) -> Plan:
        """Return the plan with another action for one of its saves. What it predicts is not computed anew.

        Raises:
            ValueError: nothing can make the save again.
            IndexError: there is no such save.
        """
        save = self.saves[index]
        if action is Action.RECOMPUTE and not save.op:
            raise ValueError(f"save {index} cannot be recomputed: {save.reason if self._is_recorded else 'no op was recorded'}")
        saves = list(self.saves)
        saves[index] = replace(save, action=action, reason="asked for")
        return replace(self, saves=tuple(saves))

    def with_moved(self, moved: Collection[int]) -> Plan:
        """Return the plan where some of the values that stay are moved by a context outside."""
        moves = [save.action is Action.KEEP and save.value in moved for save in self.saves]
        if not any(moves):
            return self
        why = "the context outside moves it"
        saves = zip(self.saves, moves, strict=True)
        return replace(
            self,
            saves=tuple(replace(save, action=Action.OFFLOAD, reason=why) if is_moved else save for save, is_moved in saves),
        )

    def explain(self) -> str:
        """Return the plan as a table, with the totals below: a line for each save, or, where ops were recorded, for each module
        and op what is kept, what leaves, what is recomputed, and why."""
        lines = [
            self._table_of_ops() if self._is_recorded else self._table_of_saves(),
            f"saved: {format_bytes(self.saved_bytes)}",
            f"kept: {format_bytes(self.kept_bytes)}",
        ]
        if self.offload_bytes or not self._is_recorded:
            lines.append(f"offloaded: {format_bytes(self.offload_bytes)}")
        if self.budget_bytes is not None:
            peak = format_bytes(self.predicted_peak_bytes)
            lines.append(f"budget: {format_bytes(self.budget_bytes)}, predicted peak {peak}")
            lines.append(f"predicted replays: {self.num_replayed_ops} ops, {1e3 * self.predicted_replay_s:.2f} ms")
        return "\n".join(lines)

    def _table_of_saves(self) -> str:
        rows = [(save.index, format_mib(save.num_bytes), "held" if save.is_held else save.action.value) for save in self.saves]
        return tabulate(rows, headers=("save", "size", "action"), colalign=("right", "right", "left"), disable_numparse=True)

    def _table_of_ops(self) -> str:
        groups: dict[tuple[str, str, Action, str], list[PlannedSave]] = {}
        for save in self.saves:
            groups.setdefault((save.module, save.op, save.action, save.reason), []).append(save)
        rows = [
            (
                module or "-",
                op or "-",
                action.value,
                len(group),
                format_bytes(sum(save.num_bytes for save in group)),
                f"{1e3 * sum(save.cost_s for save in group):.3f}",
                reason,
            )
            for (module, op, action, reason), group in groups.items()
        ]
        return tabulate(
            rows,
            headers=("module", "op", "action", "values", "size", "cost (ms)", "why"),
            colalign=("left", "left", "left", "right", "right", "right", "left"),
            disable_numparse=True,
        )


_MOST_TOLD = 3


def tell_kept(kept_bytes: Mapping[str, int]) -> str:
    """Return the end of a sentence about a budget that is not kept to: what stays whatever the plan, in bytes by reason."""
    told = sorted(kept_bytes, key=lambda why: -kept_bytes[why])[:_MOST_TOLD]
    return "".join(f"; {format_bytes(kept_bytes[why])} stay, since {why}" for why in told)


def infeasible(budget_bytes: int, smallest_bytes: int, kept: str = "") -> BudgetInfeasible:
    """Return what to raise where no plan keeps to a budget.

    Args:
        smallest_bytes: the least that was found.
        kept: what stays whatever the plan, as `tell_kept` says it.
    """
    return BudgetInfeasible(
        f"a budget of {format_bytes(budget_bytes)} cannot be kept to: the smallest is {format_bytes(smallest_bytes)}{kept}",
        smallest_bytes,
    )
