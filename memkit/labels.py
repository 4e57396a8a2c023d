"""What memkit is doing, as `torch.profiler` shows it: its labels begin with `memkit::`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from memkit import torch_private

NO_LABEL = nullcontext()


def label(name: str) -> AbstractContextManager[object]:
    """Return a context whose work a profiler shows under a label. Where none runs it costs next to nothing.

    Source: `torch.profiler.record_function`.
    """
    return torch.profiler.record_function(f"memkit::{name}") if torch_private.profiler_is_on() else NO_LABEL
