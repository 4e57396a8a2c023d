"""Measuring: run a model, watch what it keeps, and give back a frozen report. Nothing is moved or decided here."""

from memkit.profile.records import ModuleRecord, RunInfo, SavedCategory, SavedTensorRecord
from memkit.profile.registry import find_report
from memkit.profile.report import MemoryReport
from memkit.profile.timed import timed_saves
from memkit.profile.tracker import profile_memory

__all__ = [
    "MemoryReport",
    "ModuleRecord",
    "RunInfo",
    "SavedCategory",
    "SavedTensorRecord",
    "find_report",
    "profile_memory",
    "timed_saves",
]
