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
    kind: type[BaseException] = KeyboardInterrupt

    def _count(self) -> None:
        if self.fails_in:
            self.fails_in -= 1
            if not self.fails_in:
                raise self.kind("on purpose")

    def wait_event(self, *args: Any, **kwargs: Any) -> Any:
        self._count()
        return super().wait_event(*args, **kwargs)

    def record_event(self, *args: Any, **kwargs: Any) -> Any:
        self._count()
        return super().record_event(*args, **kwargs)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("way", [{"when": "backward"}, {"overlap_forward": True}], ids=["backward", "beside"])
@pytest.mark.parametrize(
    "call",
    [1, 2, *range(5, 30, 8), *(pytest.param(n, marks=pytest.mark.full) for n in range(3, 80) if n not in (2, 5, 13, 21, 29))],
)
def test_step_is_completed_by_the_next(call: int, way: dict[str, Any], kind: type[BaseException]) -> None:
    device = Breaking()
    device.kind = kind
    plain, model = make_net(device), make_net(device)
    plain_optimizer, optimizer = (torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True) for net in (plain, model))
    with offload(optimizer, device, update="host", **way) as states:
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
        assert_same_training(plain, plain_optimizer, model, optimizer)
