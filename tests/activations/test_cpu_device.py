"""If copies to the host free nothing, as on the CPU, `CPUOffload` does nothing, and all that moves bytes says so."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.device import CpuDevice, Device, ReferenceDevice, why_nothing_is_freed


def _step(device: str | torch.device | Device | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16), nn.GELU()] * 3)
    with memkit.CPUOffload(1.0, "here", min_bytes=0, window_bytes=0, device=device):
        loss = model(torch.randn(4, 16)).sum()
    loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), CpuDevice(), None])
def test_nothing_moves_on_the_cpu_with_one_warning(device: str | torch.device | Device | None) -> None:
    with pytest.warns(UserWarning, match=r"nothing moves: the CPU has no memory apart from the host's") as caught:
        first = _step(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = _step(device)

    stats = memkit.stats("here")
    assert [warning.filename for warning in caught] == [__file__]
    assert (stats.seen_bytes, stats.moved_out_bytes, stats.host_held_bytes) == (0, 0, 0)
    assert all(map(torch.equal, first, second))


class Shared(ReferenceDevice):
    """A GPU that has no memory apart from the host's."""

    has_own_memory = False


def _offload(model: nn.Module, x: Tensor, device: Device) -> None:
    with memkit.CPUOffload(1.0, "shared", min_bytes=0, device=device):
        loss = model(x).sum()
    loss.backward()
    assert memkit.stats("shared").num_copies_out == 0


def _mark(model: nn.Module, x: Tensor, device: Device) -> None:
    with memkit.Rematerialize(1.0, "shared", min_bytes=0, device=device):
        loss = model(memkit.offload(x * 2)).sum()
    loss.backward()


def _budget(model: nn.Module, x: Tensor, device: Device) -> None:
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(4):
        with memkit.MemoryBudget(0.5, "shared", optimizer=optimizer, min_bytes=0, device=device):
            loss = model(x).sum()
        loss.backward()
    stats = memkit.stats("shared")
    assert (stats.follows_plan, stats.num_copies_out) == (True, 0)
    assert stats.num_dropped > 0


def _layers(model: nn.Module, _: Tensor, device: Device) -> None:
    memkit.LayerOffload(model.requires_grad_(False), offload_ratio=1.0, device=device).close()


def _states(model: nn.Module, _: Tensor, device: Device) -> None:
    memkit.StateOffload(torch.optim.AdamW(model.parameters()), device=device).close()


@pytest.mark.parametrize("device", [CpuDevice(), Shared()], ids=["cpu", "shared"])
@pytest.mark.parametrize("use", [_offload, _mark, _budget, _layers, _states])
def test_all_features_say_alike_that_copies_free_nothing(use: Callable[..., None], device: Device) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Tanh()) for _ in range(6)))
    with pytest.warns(UserWarning, match="moving bytes to the host frees nothing") as caught:
        use(model, torch.randn(4, 16), device)

    (message,) = (str(warning.message) for warning in caught)
    assert message.endswith(why_nothing_is_freed(device) or "")
    assert why_nothing_is_freed(ReferenceDevice()) is None
