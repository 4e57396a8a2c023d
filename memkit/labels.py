"""What memkit is doing, as `torch.profiler` shows it: its labels begin with `memkit::`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from memkit import torch_private

NO_LABEL = nullcontext()


class Named(Protocol):
    """What a label may be about."""

    @property
    def names(self) -> str:
        """What to call it."""


def label(name: str, of: Named | None = None) -> AbstractContextManager[object]:
    """Return a context whose work a profiler shows under a label. Where none runs it costs next to nothing.

    Args:
        name: what is done.
        of: with what, which is asked only where a profiler runs.

    Source: `torch.profiler.record_function`.
    """
    if not torch_private.profiler_is_on():
        return NO_LABEL
    return torch.profiler.record_function(f"memkit::{name}" if of is None else f"memkit::{name} ({of.names})")
