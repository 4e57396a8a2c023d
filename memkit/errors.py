"""Every exception that the library raises at run time.

MemkitError
├── DeviceUnavailableError     the requested device is not on this machine
├── ProfileError               a profile cannot be measured as requested
│   └── DataDependentError     a run without data met code that needs values
├── ReportFormatError          a file is no memkit report, or no spec of a GPU, or is newer than this memkit
├── PlanFormatError            a file is no memkit plan, or is newer than this memkit
├── HostMemoryError            host memory cannot be locked, or a limit on it is met
├── DiskError                  a disk has no room, fails, or does not take a scratch file
├── BudgetInfeasible           no plan keeps to the requested budget
├── LayerOffloadError          streamed weights are not where they were left, or cannot be used like this
├── StateOffloadError          a step of streamed optimizer states can't be made exactly
├── ForkedError                a forked process uses an object of its parent process
├── ShardError                 a process of the group could not shard the model, or has another model
├── ReplayMismatchError        a replayed op gave another result
├── MissingTorchNameError      torch is newer than this memkit, and lacks a name that a feature needs
└── RaceError                  two streams touched the same bytes in no order (only `ReferenceDevice` can tell)

Wrong arguments raise the built-in `ValueError` and `TypeError`. Exceptions of the user's own model keep their type: memkit adds
a note that names the module (see `note_on`).
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path


class MemkitError(Exception):
    """Base of every exception in the tree above."""


class DeviceUnavailableError(MemkitError):
    """Raised when this machine does not have the requested device."""


class ProfileError(MemkitError):
    """Raised when a profile cannot be measured as asked: nothing would be recorded, or it would be wrong."""


class DataDependentError(ProfileError):
    """Raised when a model without data (device "meta") reads the value of a tensor."""


class ReportFormatError(MemkitError):
    """Raised when a file does not hold a memory report, or the spec of a GPU, that this memkit can read."""


class PlanFormatError(MemkitError):
    """Raised when a file does not hold a memory plan that this memkit can read."""


class HostMemoryError(MemkitError):
    """Raised when the system does not lock more host memory, or a limit on it is reached. `CPUOffload` then leaves tensors on
    the device. `LayerOffload` uses memory that is not locked, and raises only if there is none."""


class DiskError(MemkitError):
    """Raised when a disk has no room for the data, or a read or a write fails. Data already on disk is unaffected.

    Attributes:
        path: the directory of the scratch file.
        errno: the system's error number, such as `errno.ENOSPC`; None where memkit itself has found too little room.
    """

    def __init__(self, message: str, *, path: Path, errno: int | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.errno = errno


class BudgetInfeasible(MemkitError):  # noqa: N818  # it names a fact, as in linear programming
    """Raised when no plan keeps to a budget, or a step without a plan did not keep to it.

    Attributes:
        smallest_bytes: the smallest budget that can be kept to; after a step without a plan, the bytes that it took.
    """

    def __init__(self, message: str, smallest_bytes: int) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


class LayerOffloadError(MemkitError):
    """Raised when weights that `LayerOffload` streams were moved or cast by the caller or another library, or are used in a way
    that can't be kept exact."""


class StateOffloadError(MemkitError):
    """Raised when a step of an optimizer whose states `StateOffload` streams can't be made exactly, or states are lost."""


class ForkedError(MemkitError):
    """Raised when a forked process uses an object that its parent created. The parent is unaffected."""


class ShardError(MemkitError):
    """Raised on every rank by `shard`, and by `profile_memory` of a sharded model, when another rank failed, or when ranks were
    given different models.

    Attributes:
        rank: the first rank that failed; None if unknown.
    """

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class ReplayMismatchError(MemkitError):
    """Raised when an op or a module that `Rematerialize` ran again gave another result than in the forward, or when a module
    can't run again because something that it reads was written to."""


class MissingTorchNameError(MemkitError):
    """Raised when torch, newer than this memkit, lacks a private name that a feature needs. Everything else still works.

    Attributes:
        symbol: the name.
    """

    def __init__(self, message: str, symbol: str) -> None:
        super().__init__(message)
        self.symbol = symbol


class RaceError(MemkitError):
    """Raised by `memkit.device.ReferenceDevice` when work on one stream touches bytes without waiting for another's."""


def users_line() -> tuple[str, int]:
    """Return the file and line of the call, outside of memkit and torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("memkit", "torch"):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def warn_user(message: str) -> None:
    """Warn, and point at the user's line that made the call, however deep inside memkit it is."""
    filename, line = users_line()
    warnings.warn_explicit(message, UserWarning, filename, line)


def note_on(error: BaseException, note: str) -> None:
    """Add a line to the message of an exception from the model or torch, which keeps its type, arguments and traceback.
    `BaseException.add_note` came with Python 3.11; before, the note is only kept in `__notes__`."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        notes: list[str] = list(getattr(error, "__notes__", []))
        error.__notes__ = [*notes, note]  # type: ignore[attr-defined]  # PEP 678 by hand, for Python 3.10


def note_no_room(error: BaseException, what: str, name: str) -> None:
    """Note on the allocator's error the value that was to come back from the host, and the context that brings it."""
    note_on(
        error,
        f"memkit: no room on the device for {what} that {name} had moved to the host, even after everything that was fetched "
        "ahead was dropped. Use a higher offload_ratio.",
    )
