"""See where GPU memory goes in PyTorch training, and make it fit."""

from memkit._version import __version__
from memkit.errors import (
    DataDependentError,
    DeviceUnavailableError,
    MemkitError,
    ProfileError,
    ReportFormatError,
)
from memkit.profile import (
    MemoryReport,
    ModuleRecord,
    RunInfo,
    SavedCategory,
    SavedTensorRecord,
    find_report,
    profile_memory,
)

__all__ = [
    "DataDependentError",
    "DeviceUnavailableError",
    "MemkitError",
    "MemoryReport",
    "ModuleRecord",
    "ProfileError",
    "ReportFormatError",
    "RunInfo",
    "SavedCategory",
    "SavedTensorRecord",
    "__version__",
    "find_report",
    "profile_memory",
]
