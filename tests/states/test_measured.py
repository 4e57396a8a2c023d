"""What is measured for the split of `update="both"`: a step as a piece makes it on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memkit.device import ReferenceDevice
from memkit.states import measured
from memkit.states.measured import measure_rates
from tests.states.cases import Rebinding, offload

MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "SGD without states": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "rebinding": Rebinding,
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "_SIZE", (64, 32))
    monkeypatch.setattr(measured, "_LINK_BYTES", 2**12)


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize(("has_master", "stepped"), [(True, torch.float32), (False, torch.bfloat16)])
def test_steps_what_a_piece_does(name: str, has_master: bool, stepped: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [nn.Parameter(torch.zeros(9, dtype=torch.bfloat16)), nn.Parameter(torch.zeros(2))]
    device, dtypes, step = ReferenceDevice(), set(), measured._Block.step

    def watched(block: Any) -> None:
        assert block.parameter.grad is not None
        dtypes.update({block.parameter.dtype, block.parameter.grad.dtype})
        step(block)

    monkeypatch.setattr(measured._Block, "step", watched)
    optimizer = MAKE[name](parameters)
    rates = measure_rates(device, optimizer, has_master=has_master)

    assert rates.host_numel_per_s > 0
    assert rates.link_bytes_per_s > 0
    assert dtypes == {stepped}
    assert not optimizer.state
    assert not device._pinned
    device.synchronize()
    assert not device.races


def test_a_round_that_was_disturbed_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([(0.1, 9e9), (20.0, 5e9), (19.0, 6e9)])
    monkeypatch.setattr(measured, "measure_beside_copies", lambda *_, **__: next(found))
    monkeypatch.setattr(measured, "_NUM_ROUNDS_ELSEWHERE", measured._NUM_ROUNDS)
    rates = measure_rates(ReferenceDevice(), torch.optim.SGD([nn.Parameter(torch.zeros(9))]), has_master=False)

    assert (rates.host_numel_per_s, rates.link_bytes_per_s) == (20.0 * 64 * 32, 5e9)
    assert next(found, None) is None


def test_an_optimizer_that_fails_leaves_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ArithmeticError("no")

    device, optimizer = ReferenceDevice(), torch.optim.AdamW([nn.Parameter(torch.zeros(9))])
    monkeypatch.setattr(measured, "measure_beside_copies", fail)
    with pytest.raises(ArithmeticError, match="no"):
        measure_rates(device, optimizer, has_master=False)

    assert not device._pinned


def test_how_long_the_host_has_stepped_is_told() -> None:
    found = {}
    for update in ("device", "host"):
        parameter = nn.Parameter(torch.ones(8, 8))
        optimizer = torch.optim.SGD([parameter], lr=1e-3, momentum=0.9, fused=True)
        with offload(optimizer, ReferenceDevice(), update=update) as states:
            parameter.grad = torch.ones(8, 8)
            optimizer.step()
            found[update] = states.stats()

    assert found["device"].host_step_s == 0.0
    assert "stepped on the host  " not in str(found["device"])
    assert 0.0 < found["host"].host_step_s < 60.0
    assert f"{found['host'].host_step_s:.3g} s" in str(found["host"])
