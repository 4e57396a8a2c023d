"""See where GPU memory goes in PyTorch training, and make it fit."""

from memkit import device
from memkit._version import __version__
from memkit.activations import (
    AttachedOffload,
    CPUOffload,
    OffloadStats,
    attach,
    no_offload,
    offload_stats,
    reset,
)
from memkit.errors import (
    DataDependentError,
    DeviceUnavailableError,
    HostMemoryError,
    MemkitError,
    ProfileError,
    RaceError,
    ReportFormatError,
)
from memkit.plan import schedules
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
    "AttachedOffload",
    "CPUOffload",
    "DataDependentError",
    "DeviceUnavailableError",
    "HostMemoryError",
    "MemkitError",
    "MemoryReport",
    "ModuleRecord",
    "OffloadStats",
    "ProfileError",
    "RaceError",
    "ReportFormatError",
    "RunInfo",
    "SavedCategory",
    "SavedTensorRecord",
    "__version__",
    "attach",
    "device",
    "find_report",
    "no_offload",
    "offload_stats",
    "profile_memory",
    "reset",
    "schedules",
]
