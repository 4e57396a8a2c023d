"""The device that is there on machines with a GPU alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

ON_GPU: list[Any] = [pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else []
"""A parameter of tests on devices: without a GPU there are no such tests, which thousands would be."""
