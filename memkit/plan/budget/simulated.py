"""What a step with keep, offload and recompute takes, as `simulate` tells it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memkit.plan.actions import Action


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One value that leaves and comes back. All its moments are points of the problem."""

    index: int
    """Its place in `Problem.values`."""
    copy: int
    """When its copy to the host is put on the lane."""
    let_go: int
    """When compute waits for that copy, and the device forgets the value."""
    fetch: int
    """When its copy back is put on the lane."""
    need: int
    """When compute waits for that one: its first request, or the first replay that reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What one request lets run again."""

    index: int
    """The value that is asked for, by its place in `Problem.values`."""
    point: int
    """The slot of the request."""
    ops: tuple[int, ...]
    """The ops that run, in order."""
    stays: tuple[int, ...]
    """Other dropped values that are made on the way and stay until they are freed, by their places in `Problem.values`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What a step takes."""

    actions: tuple[Action, ...]
    """What is done: what would leave and come back without being let go stays, an anchor that no replay reads is not held."""
    seconds: float
    """Seconds of the step."""
    peak_bytes: int
    """The most bytes at once, with the base."""
    over_bytes: int
    """Bytes above the budget at the worst slot; 0 if it fits."""
    excess_bytes: int
    """The same, summed over all points."""
    worst_slot: int
    """The slot with the most bytes."""
    replayed_s: float
    """Seconds of ops that run again."""
    stall_s: float
    """What compute waits for copies, either way."""
    moved_bytes: int
    """Bytes that leave; as many come back."""
    moves: tuple[Move, ...]
    """The copies to the host and back, one entry for each value."""
    replays: tuple[Replay, ...]
    """What runs again, in the order of requests."""
    held_until: dict[int, int]
    """For each value of the lineage that a replay reads, the slot of the last such replay: until then it is held."""
    levels: tuple[int, ...]
    """The most bytes at each point and up to the next, beside the base, but for what is fetched before it is needed."""

    @property
    def num_handled(self) -> int:
        """How often the host has to see to a value that moves, or to an op that runs again."""
        return len(self.moves) + sum(len(replay.ops) for replay in self.replays)

    @property
    def rank(self) -> tuple[int, float, int]:
        """Of two steps the lower one is better: that which fits, or comes nearer to it, then the faster, then that which moves
        less."""
        return self.excess_bytes, self.seconds, self.moved_bytes
