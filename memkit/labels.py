"""Labels of memkit's work for `torch.profiler`: they begin with `memkit::`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from memkit import torch_private

NO_LABEL = nullcontext()


class Named(Protocol):
    """Something that a label can name."""

    @property
    def names(self) -> str:
        """What to call it."""


def label(name: str, of: Named | None = None) -> AbstractContextManager[object]:
    """Return a context that a profiler shows under a label. Without a profiler it costs next to nothing.

    Args:
        name: what is done.
        of: what it is done with; its name is only asked for if a profiler runs.

    Source: `torch.profiler.record_function`.
    """
    if not torch_private.profiler_is_on():
        return NO_LABEL
    return torch.profiler.record_function(f"memkit::{name}" if of is None else f"memkit::{name} ({of.names})")
