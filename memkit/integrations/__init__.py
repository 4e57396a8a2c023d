"""Callbacks for the Hugging Face Trainer and for Lightning, which use memkit's features in their training loops. Each library
is imported when its callback is first used.

- `trainer`: `MemkitCallback` for the Hugging Face Trainer
- `lightning`: `MemkitLightningCallback`
- `features`: attaches and removes features, for both; `keep_in_place`
- `refusals`: combinations that are refused or warned of
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from memkit.integrations.features import keep_in_place

if TYPE_CHECKING:
    from memkit.integrations.lightning import MemkitLightningCallback
    from memkit.integrations.trainer import MemkitCallback

__all__ = ["MemkitCallback", "MemkitLightningCallback", "keep_in_place"]

_HOMES = {"MemkitCallback": "memkit.integrations.trainer", "MemkitLightningCallback": "memkit.integrations.lightning"}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used. Source: PEP 562."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
