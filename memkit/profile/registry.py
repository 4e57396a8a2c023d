"""Reports by tag, for contexts with the same tag."""

from __future__ import annotations

from memkit.profile.report import MemoryReport

_reports: dict[str, MemoryReport] = {}


def file_report(report: MemoryReport) -> None:
    _reports[report.tag] = report


def find_report(tag: str) -> MemoryReport | None:
    """Return the last report that `profile_memory` filed under `tag` in this process, or None."""
    return _reports.get(tag)


def forget_report(tag: str) -> None:
    _reports.pop(tag, None)
