"""The saved storages of a report with their times, for planning copies."""

from __future__ import annotations

from memkit.plan import TimedSave
from memkit.profile.records import SavedCategory
from memkit.profile.report import MemoryReport


def timed_saves(report: MemoryReport, min_bytes: int) -> list[TimedSave]:
    """Return the storages of a report that `CPUOffload` would count, with their times.

    Raises:
        ValueError: the report has no times (it is of the meta device, or has no backward).
    """
    saves = []
    for record in report.saved:
        if record.storage_bytes < min_bytes or record.category is SavedCategory.PARAM_CAST:
            continue
        if record.saved_at_s is None:
            raise ValueError(
                "the report has no times: profile on a GPU, with backward=True, to know how long the step takes there"
            )
        needed_at_s = report.backward_s if record.needed_at_s is None else record.needed_at_s
        if needed_at_s is None:
            raise ValueError("the report has no backward: profile with backward=True")
        is_held = record.category is SavedCategory.INPUT
        saves.append(
            TimedSave(num_bytes=record.storage_bytes, saved_at_s=record.saved_at_s, needed_at_s=needed_at_s, is_held=is_held)
        )
    return saves
