"""Turns a recorded forward into the step that is planned: which op made which value, what autograd saved, when it is
requested."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from memkit.plan import NO_OP, Action, Step, ends_of
from memkit.recording.recording import Recording
from memkit.recording.roots import retained_bytes


def step_of(
    recording: Recording, saves: Sequence[int], nodes: Sequence[int], marks: Mapping[int, Action | None] | None = None
) -> Step:
    """Return the step of a finished forward. Until a backward was seen, requests are assumed to come in reverse order.

    Args:
        recording: the recording of its ops.
        saves: the value of each save that counts, in order.
        nodes: the sequence number of the graph node of each save.
        marks: the user's mark on each marked value.
    """
    recording.sync()
    lineage = recording.lineage.frozen()
    asked = {} if marks is None else marks
    unmade = frozenset(value for value in saves if lineage.maker[value] == NO_OP)
    return Step(
        lineage=lineage,
        saves=tuple(saves),
        uses=tuple(reversed(saves)),
        use_ends=ends_of(nodes[::-1]),
        fixed=unmade | {value for value, mark in asked.items() if mark is Action.KEEP},
        dropped=frozenset(value for value, mark in asked.items() if mark is Action.RECOMPUTE),
        moved=frozenset(value for value, mark in asked.items() if mark is Action.OFFLOAD),
        retained_bytes=retained_bytes(recording.roots),
        why_kept=recording.why_kept,
    )


def names_of(recording: Recording, values: Iterable[int]) -> dict[int, tuple[str, str]]:
    """Return the names of the op and the module that made each value, for values made by an op."""
    recording.sync()
    maker, calls, modules = recording.lineage.maker, recording.calls, recording.modules
    made = ((value, maker[value]) for value in values if maker[value] != NO_OP)
    return {value: (str(calls[op].func), modules.get(op, "")) for value, op in made}
