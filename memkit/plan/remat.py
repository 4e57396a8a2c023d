"""What is kept and what is made again, for one sequence of saves: a plan that can be read, edited and given back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from tabulate import tabulate

from memkit.plan.actions import Action
from memkit.sizes import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedValue:
    """What is to happen to one saved value."""

    value: int
    """Its number in the step."""
    num_bytes: int
    action: Action
    op: str
    """The op that makes it."""
    module: str
    """The module in which that ran, "" where it is not known."""
    cost_s: float
    """What it takes to run its op, and the ops between it and what is kept, again."""
    reason: str

    def __str__(self) -> str:
        return f"{self.action.value} {self.op}: {format_bytes(self.num_bytes)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RematPlan:
    """What is kept and what is made again, for one sequence of saves.

    It can be edited (`with_action`) and given to `Rematerialize` as `plan=`. It is for the step that it was made from: a step
    that saves anything else does not follow it.
    """

    values: tuple[PlannedValue, ...]
    """The distinct saved values, in the order of first saves."""
    budget_bytes: int
    limit_bytes: float
    """What replays keep to; at most the budget."""
    predicted_peak_bytes: int
    """The most bytes of saved values and replay temporaries at once."""
    predicted_replay_s: float
    num_replayed_ops: int
    retained: frozenset[int]
    """Values that are held on purpose, because something is made from them: roots, and others that autograd did not save."""

    @property
    def dropped(self) -> frozenset[int]:
        """The values that are made again."""
        return frozenset(planned.value for planned in self.values if planned.action is Action.RECOMPUTE)

    @property
    def actions(self) -> dict[int, Action]:
        """What is done with each value."""
        return {planned.value: planned.action for planned in self.values}

    @property
    def kept_bytes(self) -> int:
        """Bytes of the values that stay."""
        return self._bytes(Action.KEEP)

    @property
    def offload_bytes(self) -> int:
        """Bytes of the values that leave for host memory."""
        return self._bytes(Action.OFFLOAD)

    @property
    def saved_bytes(self) -> int:
        """Bytes of all values."""
        return sum(planned.num_bytes for planned in self.values)

    def __str__(self) -> str:
        shares = (f"{action.value} {format_bytes(self._bytes(action))}" for action in Action if self._bytes(action))
        peak = format_bytes(self.predicted_peak_bytes)
        return f"{', '.join(shares)}; predicted peak {peak}, replays {1e3 * self.predicted_replay_s:.2f} ms"

    def _bytes(self, action: Action) -> int:
        return sum(planned.num_bytes for planned in self.values if planned.action is action)

    def with_action(self, index: int, action: Action) -> RematPlan:
        """Return the plan with another action for one of its values. What it predicts is not computed anew.

        Raises:
            ValueError: nothing can make the value again.
            IndexError: there is no such value.
        """
        planned = self.values[index]
        if action is Action.RECOMPUTE and not planned.op:
            raise ValueError(f"value {index} cannot be made again: {planned.reason}")
        values = list(self.values)
        values[index] = replace(planned, action=action, reason="asked for")
        return replace(self, values=tuple(values))

    def with_moved(self, moved: Collection[int]) -> RematPlan:
        """Return the plan where some of the values that stay are moved by a context outside."""
        is_moved = [planned.action is Action.KEEP and planned.value in moved for planned in self.values]
        if not any(is_moved):
            return self
        return replace(
            self,
            values=tuple(
                replace(planned, action=Action.OFFLOAD, reason="the context outside moves it") if moves else planned
                for planned, moves in zip(self.values, is_moved, strict=True)
            ),
        )

    def explain(self) -> str:
        """Return the plan as a table: for each module and op what is kept, what is made again, and why."""
        groups: dict[tuple[str, str, Action, str], list[PlannedValue]] = {}
        for planned in self.values:
            groups.setdefault((planned.module, planned.op, planned.action, planned.reason), []).append(planned)
        rows = [
            (
                module or "-",
                op or "-",
                action.value,
                len(group),
                format_bytes(sum(planned.num_bytes for planned in group)),
                f"{1e3 * sum(planned.cost_s for planned in group):.3f}",
                reason,
            )
            for (module, op, action, reason), group in groups.items()
        ]
        table = tabulate(
            rows,
            headers=("module", "op", "action", "values", "size", "cost (ms)", "why"),
            colalign=("left", "left", "left", "right", "right", "right", "left"),
            disable_numparse=True,
        )
        return "\n".join(
            (
                table,
                f"saved: {format_bytes(self.saved_bytes)}",
                f"kept: {format_bytes(self.kept_bytes)}",
                *([f"offloaded: {format_bytes(self.offload_bytes)}"] if self.offload_bytes else []),
                f"budget: {format_bytes(self.budget_bytes)}, predicted peak {format_bytes(self.predicted_peak_bytes)}",
                f"predicted replays: {self.num_replayed_ops} ops, {1e3 * self.predicted_replay_s:.2f} ms",
            )
        )


_MOST_TOLD = 3


def tell_kept(kept_bytes: Mapping[str, int]) -> str:
    """Return the end of a sentence about a budget that is not kept to: what stays whatever the plan, in bytes by reason."""
    told = sorted(kept_bytes, key=lambda why: -kept_bytes[why])[:_MOST_TOLD]
    return "".join(f"; {format_bytes(kept_bytes[why])} stay, since {why}" for why in told)
