"""What is known of steps of which saved tensors leave for host memory, as figures for `memkit.stats`."""

from __future__ import annotations

from typing import Any

from memkit.activations.saved.state import offload_states
from memkit.activations.stats import fragmentation_hint


def offload_figures(tag: str) -> dict[str, Any] | None:
    """Return what is known under a tag, by the fields of `SavedTensorStats`."""
    state = offload_states.get(tag)
    if state is None:
        return None
    with state.lock:
        state.sweep()
        counts, windows = state.counts, state.windows()
        counters = [counter for counter in (window.device.memory_counter() for window in windows) if counter is not None]
        scheduled = [forward for window in windows for forward in window.all_scheduled]
        allocated_bytes = sum(counter.peak_bytes() for counter in counters) if counters else None
        reserved = [peak for peak in (counter.peak_reserved_bytes() for counter in counters) if peak is not None]
        return {
            "num_iterations": state.num_iterations,
            "ratios": tuple(state.ratios),
            "window_bytes": counts.window_bytes,
            "seen_bytes": counts.seen_bytes,
            "unique_bytes": counts.unique_bytes,
            "kept_bytes": counts.kept_bytes,
            **counts.figures_of_copies(),
            "host_in_use_bytes": sum(window.arena.in_use_bytes for window in windows),
            "host_peak_bytes": sum(window.arena.peak_in_use_bytes for window in windows),
            "host_held_bytes": sum(window.arena.held_bytes for window in windows),
            "num_pins": sum(window.arena.num_pins for window in windows),
            "live_records": sum(window.ledger.num_records for window in windows) + sum(each.num_live for each in scheduled),
            "live_bytes": sum(window.ledger.live_bytes for window in windows) + sum(each.live_bytes for each in scheduled),
            "peak_live_bytes": sum(window.ledger.peak_live_bytes for window in windows),
            "peak_allocated_bytes": allocated_bytes,
            "peak_reserved_bytes": sum(reserved) if reserved else None,
            "hint": fragmentation_hint(allocated_bytes, sum(reserved)),
        }
