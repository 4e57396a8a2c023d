"""The oldest version of torch that memkit supports, checked before torch is imported, so that an older one is one clear
line."""

from __future__ import annotations

import re
from importlib import metadata

OLDEST = (2, 10)


def torch_version() -> str | None:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def require_torch() -> None:
    """Check the installed torch without importing it. Raises ImportError if it is too old, or there is none."""
    needed, found = ".".join(map(str, OLDEST)), torch_version()
    numbers = re.match(r"(\d+)\.(\d+)", found or "0.0")
    if found is None or (numbers is not None and (int(numbers[1]), int(numbers[2])) < OLDEST):
        raise ImportError(f'memkit needs torch {needed} or newer; found {found or "none"}. Run: pip install "torch>={needed}"')
