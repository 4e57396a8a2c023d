"""Where there is no GPU, the error of each call says what that call can do instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import memkit
from memkit.cli.main import main
from memkit.errors import DeviceUnavailableError

CALLS: dict[str, Callable[[], object]] = {
    "CPUOffload": lambda: memkit.CPUOffload(0.5, device="cuda"),
    "Rematerialize": lambda: memkit.Rematerialize(0.5, device="cuda:0"),
    "LayerOffload": lambda: memkit.LayerOffload(nn.Sequential(nn.Linear(2, 2)), offload_ratio=1.0, device="cuda"),
}


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("name", CALLS)
def test_contexts_can_be_tried_out_on_the_reference_device(name: str) -> None:
    with pytest.raises(
        DeviceUnavailableError, match=r"Run on a machine with a GPU, or pass device=memkit\.device\.Ref"
    ) as raised:
        CALLS[name]()

    assert "meta" not in str(raised.value)


def test_a_profile_needs_none() -> None:
    with pytest.raises(DeviceUnavailableError, match=r'finds no CUDA device here\. Use device "meta", which needs none\.'):
        memkit.profile_memory(nn.Linear(2, 2), torch.ones(2, 2), device="cuda")


def test_the_command_that_profiles_needs_none(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["profile", "torch.nn:ReLU", "--input", "2x2", "--device", "cuda"])

    assert status == 2
    assert 'Use device "meta", which needs none.' in capsys.readouterr().err
