"""Begins to record the forward of a context."""

from __future__ import annotations

from memkit.activations.recomputing.budget import RematOptions, Settling
from memkit.activations.recomputing.stage import RecordingStage
from memkit.activations.saved.entry import Entry, Stage, is_within
from memkit.activations.saved.state import remat_states
from memkit.hooks import SavedTensorHooks


def open_recording(
    tag: str,
    options: RematOptions,
    *,
    moving: Stage | None = None,
    outer: SavedTensorHooks | None = None,
    settling: Settling | None = None,
) -> RecordingStage:
    """Return the recording stage for a context that is about to be entered.

    Args:
        moving: the moving stage of the same context, if it has one.
        outer: the innermost hooks outside, if there is no moving stage.
        settling: see `RecordingStage`.
    """
    is_inner = moving is not None or is_within(tag)
    if moving is None and outer is not None and isinstance(outer.owner, Entry):
        moving = outer.owner.moving
    state = remat_states.open(tag)
    with state.lock:
        stage = RecordingStage(state, options, moving=moving, outer=outer, settling=settling)
        state.num_iterations += 1
        state.num_inner += is_inner
        state.counts, state.is_recorded, state.settled = stage.counts, True, None
        return stage
