"""Libraries that come with an extra, and what to install where one is missing."""

from __future__ import annotations

import importlib
from typing import Any

EXTRA = "torch-memkit[integrations]"


def library(module: str, needing: str) -> Any:
    """Import a module of another library.

    Args:
        module: its name.
        needing: what needs it, for the error.

    Raises:
        ImportError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f'{needing} needs {module}, which cannot be imported ({error}). Run: pip install "{EXTRA}"'
        ) from error
