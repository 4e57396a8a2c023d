"""Devices that weights stream on, as in the tests of streamed weights."""

from __future__ import annotations

from tests.weights.conftest import device

__all__ = ["device"]
