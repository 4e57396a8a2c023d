"""Figures for `memkit.stats` of steps that recompute."""

from __future__ import annotations

import math
from typing import Any

from memkit.activations.recomputing.budget import NO_BUDGET
from memkit.activations.saved.state import remat_states
from memkit.recording.cost import recording_cost_s


def remat_figures(tag: str) -> dict[str, Any] | None:
    """Return the figures of a tag, by the fields of `SavedTensorStats`; None if there are none."""
    state = remat_states.get(tag)
    if state is None:
        return None
    with state.lock:
        state.sweep()
        counts, ledgers = state.counts, [window.ledger for window in state.windows()]
        counter = None if state.costs.device is None else state.costs.device.memory_counter()
        return {
            "num_iterations": state.num_iterations - state.num_inner,
            "live_records": sum(ledger.num_records for ledger in ledgers),
            "live_bytes": sum(ledger.live_bytes for ledger in ledgers),
            "peak_allocated_bytes": None if counter is None else counter.peak_bytes(),
            "peak_reserved_bytes": None if counter is None else counter.peak_reserved_bytes(),
            "num_deviations": state.num_deviations,
            "budget_bytes": None if counts.budget_bytes >= NO_BUDGET else math.ceil(counts.budget_bytes),
            "follows_plan": counts.follows_plan,
            "num_ops": counts.num_ops,
            "is_recorded": state.is_recorded,
            "recorder_s": counts.num_ops * recording_cost_s() if state.is_recorded else 0.0,
            "num_saved": counts.num_saved,
            "saved_bytes": counts.saved_bytes,
            "num_kept": counts.num_saved - counts.num_dropped,
            "num_dropped": counts.num_dropped,
            "dropped_bytes": counts.dropped_bytes,
            "ledger_peak_bytes": counts.peak_bytes,
            "num_replays": counts.num_replays,
            "num_replayed_ops": counts.num_replayed_ops + counts.num_replays * counts.ops_of_region,
            "estimated_replay_s": counts.replayed_s + counts.num_replays * counts.region_s,
            "measured_replay_s": counts.replayed.total_s(),
            **(counts.figures_of_copies() if counts.moved_out.num_copies else {}),
        }
