"""Devices that the tests of streamed optimizer states run on."""

from tests.weights.conftest import device

__all__ = ["device"]
