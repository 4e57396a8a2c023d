"""Imports optional libraries, and says how to install a missing one."""

from __future__ import annotations

import importlib
from typing import Any

_OLDEST = {
    "lightning": "2.4",
    "matplotlib": "3.8",
    "plotly": "5",
    "scipy": "1.9",
    "timm": "1.0",
    "torchvision": "0.25",
    "transformers": "4.50",
}


def how_to_install(package: str) -> str:
    """Return the command that installs a library, wherever memkit itself was installed from."""
    return f'pip install "{package}>={_OLDEST[package]}"' if package in _OLDEST else f"pip install {package}"


def library(module: str, needing: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        message = f"{needing} needs {package}, which cannot be imported ({error}). Run: {how_to_install(package)}"
        kind = ModuleNotFoundError if isinstance(error, ModuleNotFoundError) else ImportError
        raise kind(message, name=package) from error
