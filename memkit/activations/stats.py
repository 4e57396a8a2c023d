"""The frozen figures of contexts under a tag, for users."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from dataclasses import Field, dataclass, field, fields
from typing import Any

from tabulate import tabulate

from memkit.core.sizes import format_bytes

_USED_BY = "used by"


def _of(context: str, default: Any = 0) -> Any:
    return field(default=default, metadata={_USED_BY: context})


_of_offload = functools.partial(_of, "CPUOffload")
_of_remat = functools.partial(_of, "Rematerialize")
_of_budget = functools.partial(_of, "MemoryBudget")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensorStats:
    """Figures of memkit's contexts under one tag and of the tensors that autograd saved in them; unless said otherwise, of the
    last iteration.

    Figures of something that no context under the tag does are 0 or None. From `unique_bytes` and `num_saved` on, they count
    only what can be moved or dropped: distinct storages on the device of at least `min_bytes`, without parameters, their casts,
    and storages known to be held by others; for `Rematerialize`, only outputs of ops inside the context.
    """

    tag: str
    """The tag."""
    contexts: tuple[str, ...]
    """The kinds of context that were entered under the tag: "CPUOffload", "Rematerialize", "MemoryBudget"."""
    num_iterations: int
    """Entries with grad mode on, since the tag was new or reset. A `Rematerialize` inside of a `CPUOffload` under the same tag
    is part of that one's iteration, however often it is entered there."""
    live_records: int
    """Saved storages that a graph may still ask for."""
    live_bytes: int
    """Of these, the bytes on the device now."""
    peak_allocated_bytes: int | None
    """The allocator's peak since it was last reset; None without an allocator that counts."""
    peak_reserved_bytes: int | None
    """The most that the allocator held from the device since its peak was last reset; None without an allocator that counts."""

    ratios: tuple[float, ...] = _of_offload(())
    """The ratio asked for in each iteration (the last 10,000)."""
    window_bytes: int = _of_offload()
    """Bytes of saved tensors that the device may hold beside what the ratio keeps."""
    seen_bytes: int = _of_offload()
    """Bytes of all tensors that autograd saved while the context was on, each save counted."""
    unique_bytes: int = _of_offload()
    """Bytes of the distinct storage versions among them that could be moved."""
    kept_bytes: int = _of_offload()
    """Of these, the bytes that stayed on the device, by plan or because host memory was refused."""
    moved_out_bytes: int = _of_offload()
    """Of these, the bytes copied to the host."""
    moved_in_bytes: int = _of_offload()
    """Bytes copied back."""
    served_bytes: int = _of_offload()
    """Bytes that left but were still on the device when needed, and so were not copied back."""
    wasted_bytes: int = _of_offload()
    """Bytes copied out although something else kept the storage alive, so that nothing was freed. From then on it stays."""
    num_copies_out: int = _of_offload()
    """Storages copied to the host."""
    num_copies_in: int = _of_offload()
    """Storages copied back."""
    stall_out_s: float = _of_offload(0.0)
    """Seconds in which the forward waited for copies to the host. On a device, read from events that are reached by now."""
    stall_in_s: float = _of_offload(0.0)
    """Seconds in which the backward waited for copies from the host."""
    d2h_bytes_per_s: float | None = _of_offload(None)
    """Bytes copied to the host over the seconds in which that lane was copying; None if nothing was."""
    h2d_bytes_per_s: float | None = _of_offload(None)
    """The same for copies back to the device."""
    host_in_use_bytes: int = _of_offload()
    """Host memory that holds saved tensors now."""
    host_peak_bytes: int = _of_offload()
    """The most host memory that was in use at once, since the tag was new or reset."""
    host_held_bytes: int = _of_offload()
    """Pinned host memory that is held for the tag now."""
    num_pins: int = _of_offload()
    """How often memory was pinned since the tag was new or reset."""
    hint: str = _of_offload("")
    """Advice, if something is known to help."""

    num_deviations: int = _of_remat()
    """Forwards that turned out differently than planned, since the tag was new or reset."""
    budget_bytes: int | None = _of_remat(None)
    """The budget in bytes; None if there is no bound."""
    follows_plan: bool = _of_remat(False)
    """Whether the iteration has followed a plan to its end, or was carried by the score."""
    is_recorded: bool = _of_remat(False)
    """Whether the ops of the iteration were recorded. If not, because nothing is dropped or calls of modules are
    recomputed as a whole, figures of saves, drops, ops and peaks are those of the recorded ones and of the plan."""
    num_ops: int = _of_remat()
    """Ops that were seen in the forward."""
    recorder_s: float = _of_remat(0.0)
    """Estimated host seconds for recording them: their number times the seconds of a small op in a chain, without the time for
    saving."""
    num_saved: int = _of_remat()
    """Distinct values that autograd saved, and that the context decides about."""
    saved_bytes: int = _of_remat()
    """Their bytes."""
    num_kept: int = _of_remat()
    """Saved values that were not dropped, as far as the step has noted what stays."""
    num_dropped: int = _of_remat()
    """Saved values that were dropped in the forward or in the backward, each counted once."""
    dropped_bytes: int = _of_remat()
    """Their bytes."""
    ledger_peak_bytes: int = _of_remat()
    """The most bytes of saved values and temporaries of replays that were on the device at once."""
    num_replays: int = _of_remat()
    """Requests of the backward that ran ops again, or a module as a whole."""
    num_replayed_ops: int = _of_remat()
    """Ops that ran again in the backward."""
    estimated_replay_s: float = _of_remat(0.0)
    """Seconds that these ops took in the forward, measured or estimated."""
    measured_replay_s: float = _of_remat(0.0)
    """Seconds that they took in the backward: on a device read from events, as far as they are reached."""

    predicted_peak_bytes: int | None = _of_budget(None)
    """The step's peak on the device by the plan; None before there is one."""
    step_peak_bytes: int | None = _of_budget(None)
    """The peak of the last step that was checked. The first steps of a new plan are."""
    predicted_s: float | None = _of_budget(None)
    """Seconds that the step takes by the plan, from the entry to the end of the backward."""
    step_s: float | None = _of_budget(None)
    """Seconds that the last finished step took."""
    plain_s: float | None = _of_budget(None)
    """Seconds that the step would take with nothing moved and nothing recomputed, as far as is known."""
    min_budget_bytes: int | None = _of_budget(None)
    """The smallest budget that a plan was found for."""
    num_plans: int = _of_budget()
    """How many plans were made since the tag was new or reset."""

    @property
    def ratio(self) -> float:
        """The offload ratio asked for in the last iteration; 0 before the first."""
        return self.ratios[-1] if self.ratios else 0.0

    @property
    def ratio_reached(self) -> float:
        """The bytes copied out in the last iteration over those that could be moved.

        It is below `ratio` where the window holds more than the ratio keeps: tensors that would come back at once never
        leave.
        """
        return self.moved_out_bytes / self.unique_bytes if self.unique_bytes else 0.0

    def __str__(self) -> str:
        """Return a table, one figure per line, of what the contexts under the tag fill in."""
        rows = [("tag", self.tag), ("contexts", ", ".join(self.contexts))]
        if "CPUOffload" in self.contexts:
            rows.append(("ratio asked / reached", f"{self.ratio:.3f} / {self.ratio_reached:.3f}"))
        rows += [
            _row(item.name, getattr(self, item.name))
            for item in fields(self)
            if item.name not in ("tag", "contexts", "ratios", "hint") and self._shows(item)
        ]
        table = tabulate(rows, tablefmt="plain", colalign=("left", "right"), disable_numparse=True)
        return f"{table}\n{self.hint}" if self.hint else table

    def _shows(self, item: Field[Any]) -> bool:
        """Tell whether contexts under the tag fill a figure in. `MemoryBudget` fills in those of both others."""
        used_by = item.metadata.get(_USED_BY, self.contexts[0])
        return used_by in self.contexts or ("MemoryBudget" in self.contexts and getattr(self, item.name) != item.default)


def _row(name: str, value: Any) -> tuple[str, str]:
    unit = next((unit for unit in ("_bytes_per_s", "_bytes", "_s") if name.endswith(unit)), "")
    label = name.removesuffix(unit).replace("num_", "#").replace("_", " ")
    if unit == "_bytes_per_s":
        label = label.upper()
    if value is None:
        return label, "-"
    if unit == "_bytes_per_s":
        return label, f"{value / 1e9:.1f} GB/s"
    if unit == "_bytes":
        return label, format_bytes(value)
    return label, f"{1e3 * value:.2f} ms" if unit == "_s" else str(value)


_Tags = Callable[[], Iterable[str]]
_Figures = Callable[[str], dict[str, Any] | None]
_sources: dict[str, tuple[_Tags, _Figures]] = {}


def report_from(context: str, *, tags: _Tags, figures: _Figures) -> None:
    """Have `stats` ask contexts of one kind for their `tags`, and for the `figures` that they fill in for a tag."""
    _sources[context] = tags, figures


def stats(tag: str = "default") -> SavedTensorStats:
    """Return the figures of contexts under a tag. Seconds cover the work that is done by now; the call waits for none.

    Raises:
        ValueError: no context with that tag was entered with grad mode on, since it was reset.
    """
    asked = {context: figures(tag) for context, (_, figures) in _sources.items()}
    found = {context: figures for context, figures in asked.items() if figures is not None}
    if not found:
        known = sorted({known for tags, _ in _sources.values() for known in tags()})
        do = f"Pass one of {', '.join(map(repr, known))}, or run" if known else "Run"
        raise ValueError(
            f'memkit.stats needs a tag under which a context was entered with grad mode on; found none under "{tag}". {do} a '
            f'forward in a context with tag="{tag}" first'
        )
    every = [name for figures in found.values() for name in figures]
    merged = {name: _merged([figures[name] for figures in found.values() if name in figures], name) for name in every}
    return SavedTensorStats(tag=tag, contexts=tuple(found), **merged)


def _merged(values: list[Any], name: str) -> Any:
    said = [value for value in values if value is not None]
    if name == "num_iterations" or name.startswith("live_"):
        return sum(said)
    return max(said, default=None) if len(values) > 1 else values[0]


_FRAGMENTED = 1.35


def fragmentation_hint(allocated_bytes: int | None, reserved_bytes: int | None) -> str:
    """Return advice if the allocator holds far more than it has handed out and was not told to avoid that; else nothing."""
    if not allocated_bytes or not reserved_bytes or reserved_bytes <= _FRAGMENTED * allocated_bytes:
        return ""
    if any(
        "expandable_segments:True" in os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    ):
        return ""
    return (
        f"The allocator has reserved {reserved_bytes / allocated_bytes:.2f} times what was in use at the peak: set "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment to need less."
    )
