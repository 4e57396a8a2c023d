"""A wait that is broken off, by Ctrl-C or by the device, for what was stepped on the host: the next step completes that one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memkit.device import ReferenceDevice
from memkit.errors import StateOffloadError
from tests.states.cases import assert_same_training, batch, make_net, offload, train

pytestmark = pytest.mark.filterwarnings("ignore:StateOffload. .* steps on the host without its fused kernel")


class Breaking(ReferenceDevice):
    """Raises at one of the calls in which the caller's thread has a stream wait, or notes what it has been given."""

    fails_in = 0
    """How many calls from now on; 0 for never."""
    has_raised = False
    kind: type[BaseException] = KeyboardInterrupt

    def _count(self) -> None:
        if self.fails_in:
            self.fails_in -= 1
            if not self.fails_in:
                self.has_raised = True
                raise self.kind("on purpose")

    def wait_event(self, *args: Any, **kwargs: Any) -> Any:
        self._count()
        return super().wait_event(*args, **kwargs)

    def record_event(self, *args: Any, **kwargs: Any) -> Any:
        self._count()
        return super().record_event(*args, **kwargs)


WAYS: dict[str, dict[str, Any]] = {"backward": {"when": "backward"}, "beside": {"overlap_forward": True}}
NUM_CALLS = {"backward": 80, "beside": 140}
"""A step makes a few more."""


@pytest.mark.parametrize("kind", [KeyboardInterrupt, pytest.param(RuntimeError, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("way", "call"),
    [
        pytest.param(way, call, marks=() if call in (1, 13, 29) else pytest.mark.full)
        for way, num_calls in NUM_CALLS.items()
        for call in range(1, num_calls + 1)
    ],
)
def test_step_is_completed_by_the_next(way: str, call: int, kind: type[BaseException]) -> None:
    device = Breaking()
    device.kind = kind
    plain, model = make_net(device), make_net(device)
    plain_optimizer, optimizer = (torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True) for net in (plain, model))
    with offload(optimizer, device, update="host", **WAYS[way]) as states:
        for number in range(5):
            train(plain, plain_optimizer, device, range(number, number + 1))
            model(batch(device, 10 * number)).square().mean().backward()
            device.fails_in = call if number == 2 else 0
            try:
                optimizer.step()
                states.wait()
            except (kind, StateOffloadError):
                optimizer.step()
                states.wait()
            device.fails_in = 0
            optimizer.zero_grad()
        assert device.has_raised
        assert_same_training(plain, plain_optimizer, model, optimizer)
