"""Where there is no GPU, the error of each call says what that call can do instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import memkit
from memkit.cli.main import main
from memkit.errors import DeviceUnavailableError

TRY = r"Run on a machine with a GPU, or pass device=memkit\.device\.Ref"
NEEDS_NONE = r'finds no CUDA device here\. Use device "meta", which needs none\.'
CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "CPUOffload": (lambda: memkit.CPUOffload(0.5, device="cuda"), TRY),
    "Rematerialize": (lambda: memkit.Rematerialize(0.5, device="cuda:0"), TRY),
    "LayerOffload": (lambda: memkit.LayerOffload(nn.Sequential(nn.Linear(2, 2)), offload_ratio=1.0, device="cuda"), TRY),
    "profile": (lambda: memkit.profile_memory(nn.Linear(2, 2), torch.ones(2, 2), device="cuda"), NEEDS_NONE),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_can_be_tried_instead_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    call, message = CALLS[name]

    with pytest.raises(DeviceUnavailableError, match=message):
        call()


def test_the_command_that_profiles_needs_none(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    status = main(["profile", "torch.nn:ReLU", "--input", "2x2", "--device", "cuda"])

    assert status == 2
    assert 'Use device "meta", which needs none.' in capsys.readouterr().err
