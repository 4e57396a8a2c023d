"""Where the bytes of a layer that streams are, in each part of a step."""

from __future__ import annotations

import torch
from torch import nn

import memkit
from memkit.device import ReferenceDevice
from memkit.plan.chunks import Residency

HOST, IN_FLIGHT, DEVICE, DIRTY = Residency.HOST, Residency.IN_FLIGHT, Residency.DEVICE, Residency.DIRTY


class _Overlapping(nn.Module):
    """One of its parameters is a part of another, and its counter says nothing of writes to that. A backward writes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Parameter(torch.linspace(-1, 1, 256).view(16, 16), requires_grad=False)
        self.part = nn.Parameter(self.whole.data[:1].view(16), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return [batch, 16]."""
        y = x @ self.whole
        y.register_hook(self._write)
        return y * 2.0

    def _write(self, _: object) -> None:
        with torch.no_grad():
            self.part.mul_(1.5)


def test_weight_that_is_written_to_through_another_parameter_in_the_backward_is_that_of_the_plain_run() -> None:
    device, model = ReferenceDevice(), nn.Sequential(*[_Overlapping() for _ in range(4)])
    plain = nn.Sequential(*[_Overlapping() for _ in range(4)])
    with memkit.LayerOffload(model, offload_ratio=1.0, device=device):
        for _ in range(3):
            found, expected = (torch.linspace(-1, 1, 64).view(4, 16).requires_grad_() for _ in range(2))
            model(found).sum().backward()
            plain(expected).sum().backward()
            assert found.grad is not None
            assert expected.grad is not None
            assert torch.equal(found.grad, expected.grad)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)
    device.synchronize()
    assert not device.races
