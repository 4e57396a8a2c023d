"""Devices that the tests of streamed optimizer states run on."""

from __future__ import annotations

from tests.weights.conftest import device

__all__ = ["device"]
