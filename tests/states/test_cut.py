"""Large parameters are stepped in windows, bit for bit as whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memkit.device import Device
from memkit.plan import StateRates, state_pieces
from memkit.states import cut_trial, state_offload
from memkit.states.windows import CutPiece
from tests.states.cases import (
    OPTIMIZERS,
    Case,
    Odd,
    assert_same_training,
    offload,
    train,
)

pytestmark = pytest.mark.filterwarnings("ignore:StateOffload. .* steps on the host without its fused kernel")
CASES = [*OPTIMIZERS, Case("odd", Odd)]
WHOLE = ("Adafactor loop", "Adafactor foreach", "Muon")
"""What does not step each element by itself."""


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have parameters of more than some kilobytes of states be large, and be stepped in windows of 512 elements or more."""
    monkeypatch.setattr(state_pieces, "PIECE_BYTES", 6000)
    for module in (state_pieces, cut_trial):
        monkeypatch.setattr(module, "WINDOW_NUMEL", 512)
    rates = StateRates(link_bytes_per_s=8.0, host_numel_per_s=1.0)
    monkeypatch.setattr(state_offload, "measure_rates", lambda *_: rates)


class Net(nn.Module):
    """Has two large parameters."""

    def __init__(self, *, only_matrices: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(24, 64, bias=not only_matrices)
        self.second = nn.Linear(64, 63, bias=not only_matrices)
        self.head = nn.Linear(63, 3, bias=not only_matrices)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


def make_net(device: Device, case: Case | None = None, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(1)
    return Net(only_matrices=case is not None and case.name == "Muon").to(device.torch_device, dtype)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 3e-3}]


def num_cut(states: Any) -> int:
    """Return how many parameters are stepped in windows."""
    pieces = [piece for piece in states._members.pieces if isinstance(piece, CutPiece) and len(piece.parts) > 1]
    return len(pieces)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"when": "backward"},
    {"overlap_forward": True},
    {"update": "host"},
    {"update": "both"},
    {"device_budget": 20000},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_as_the_plain_optimizer(device: Device, case: Case, options: dict[str, Any]) -> None:
    if "update" in options and device.torch_device.type != "cpu":
        pytest.skip("the plain steps differ from the host's in last bits")
    nets = [make_net(device, case), make_net(device, case)]
    optimizers = [case.make(groups_of(net)) for net in nets]
    clip = None if "when" in options else 0.1
    if case.name == "odd":  # whose states the small steps at the beginning see none of
        for net, own in zip(nets, optimizers, strict=True):
            train(net, own, device, [100])
    with offload(optimizers[1], device, **options) as states:
        for step in range(20):
            for net, own in zip(nets, optimizers, strict=True):
                train(net, own, device, [step], clip=clip)
                for group in own.param_groups:
                    group["lr"] = group["lr"] * 0.9
            states.wait()
            assert_same_training(nets[0], optimizers[0], nets[1], optimizers[1])
        if case.name not in WHOLE:
            moving = [piece for piece in states.plan.pieces if piece.windows and not piece.is_resident]
            assert num_cut(states) == len(moving) >= (1 if "device_budget" in options else 2)
            assert states.plan.room_bytes <= 6 * 3 * 1024 * 8
        else:
            assert num_cut(states) == 0

    for net, own in zip(nets, optimizers, strict=True):
        train(net, own, device, range(20, 22))
    assert_same_training(nets[0], optimizers[0], nets[1], optimizers[1])
    device.synchronize()
