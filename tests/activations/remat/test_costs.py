"""What ops take is measured once for each trace, and not in every step."""

from __future__ import annotations

import pytest
import torch

from memkit.activations import remat
from tests.activations.chains import chain
from tests.activations.remat.conftest import Remat


@pytest.mark.parametrize("budget", [1.0, 0.5])
def test_ops_are_timed_in_the_second_step_only(budget: float, torch_device: torch.device, remat_on: Remat) -> None:
    x = torch.randn(256, device=torch_device, requires_grad=True)

    timed = []
    for _ in range(5):
        with remat_on(budget, "timed") as context:
            timed.append(context._entry._run.tape.is_timed)
            loss = chain(x, [1] * 12).sum()
        loss.backward()

    assert timed == [False, True, False, False, False]
    (trace,) = remat._states["timed"].traces
    assert trace.is_measured
    assert all(seconds > 0 for seconds in trace.step.lineage.seconds)
