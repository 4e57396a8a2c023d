"""Measuring: run a model, watch what it keeps, and give back a frozen report. Nothing is moved or decided here."""

from memkit.profile.alive import AliveItem, AliveStorage, MemoryCategory, Moment, OptimizerMemory, Phase, StepMemory
from memkit.profile.compare import ComparedFigure, Comparison
from memkit.profile.fit import FeatureFit, Fit
from memkit.profile.records import ModuleRecord, RunInfo, SavedCategory, SavedTensorRecord, ShardInfo
from memkit.profile.registry import find_report
from memkit.profile.report import MemoryReport
from memkit.profile.timed import timed_saves
from memkit.profile.tracker import profile_memory

__all__ = [
    "AliveItem",
    "AliveStorage",
    "ComparedFigure",
    "Comparison",
    "FeatureFit",
    "Fit",
    "MemoryCategory",
    "MemoryReport",
    "ModuleRecord",
    "Moment",
    "OptimizerMemory",
    "Phase",
    "RunInfo",
    "SavedCategory",
    "SavedTensorRecord",
    "ShardInfo",
    "StepMemory",
    "find_report",
    "profile_memory",
    "timed_saves",
]
