"""Random training programs come to the same parameters and states, after each step, as without offload."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from memkit.device import ReferenceDevice
from memkit.plan import StatePiece
from memkit.plan import states as state_pieces
from memkit.plan.states import with_disk
from memkit.transfer import ReferenceDisk
from tests.states.cases import Odd, Rebinding, assert_same, cut, offload

pytestmark = [
    pytest.mark.filterwarnings("ignore:StateOffload. .* steps on the host without its fused kernel"),
    pytest.mark.filterwarnings("ignore:StateOffload. states of .* were put elsewhere"),
]
NUM_STEPS = 10
SIZES: list[tuple[int, ...]] = [(), (1,), (7,), (8, 8), (16, 16), (3, 5, 2), (24, 22)]
"""The last one is stepped in windows, if the optimizer is elementwise."""
OPTIMIZERS: list[Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = [
    lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    lambda p: torch.optim.Adafactor(p, lr=1e-2, eps=(1e-8, 1e-3)),
    Rebinding,
    Odd,
]


class Program:
    """A sequence of acts on an optimizer, drawn from `seed`, equal in each run. With `edits_loaded`, states are edited in a
    saved state dict and loaded, since `optimizer.state` may not have them."""

    def __init__(self, seed: int, *, has_master: bool, edits_loaded: bool = False) -> None:
        self._random = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._dtypes = [torch.float32, torch.bfloat16] if has_master else [torch.float32, torch.float64, torch.bfloat16]
        self._saved: dict[str, Any] | None = None
        self._edits_loaded = edits_loaded
        self.parameters = self._more(self._random.choice([1, 4, 12, 40]))
        if has_master:
            self.parameters.append(nn.Parameter(torch.zeros(8, 8, dtype=torch.bfloat16)))
        self.optimizer = self._random.choice(OPTIMIZERS)(self.parameters)

    def _more(self, count: int) -> list[nn.Parameter]:
        made = []
        is_mixed = self._random.random() < 0.7
        dtypes = self._dtypes if self._random.random() < 0.7 else self._dtypes[-1:]
        for _ in range(count):
            size = self._random.choice(SIZES if is_mixed else SIZES[3:4])
            value = torch.randn(size, generator=self._generator).to(self._random.choice(dtypes))
            made.append(nn.Parameter(value.mT.contiguous().mT if len(size) == 2 and self._random.random() < 0.2 else value))
        return made

    def change(self) -> None:
        """Change something between two steps."""
        optimizer = self.optimizer
        what = self._random.choice(["nothing", "nothing", "add", "rebind", "clear", "save", "load", "edit"])
        parameter = self._random.choice(self.parameters)
        entries = optimizer.state.get(parameter, {})
        if what == "add":
            added = self._more(self._random.choice([1, 2, 14]))
            optimizer.add_param_group({"params": added})
            self.parameters += added
        elif what == "rebind":
            for name, value in entries.items():
                if isinstance(value, torch.Tensor) and name != "master":
                    entries[name] = value.clone()
        elif what == "edit":
            for value in self._entries_to_edit(parameter).values():
                if isinstance(value, torch.Tensor) and value.dim():
                    value.mul_(0.5)
            with torch.no_grad():
                parameter.mul_(0.5)
        elif what == "clear":
            optimizer.state.pop(parameter, None)
        elif what == "save":
            self._saved = copy.deepcopy(optimizer.state_dict())
        elif what == "load" and self._saved is not None and len({parameter.dtype for parameter in self.parameters}) == 1:
            groups = self._saved["param_groups"]
            if [len(group["params"]) for group in groups] == [len(group["params"]) for group in optimizer.param_groups]:
                optimizer.load_state_dict(copy.deepcopy(self._saved))

    def _entries_to_edit(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return the states of a parameter, first put into `optimizer.state` if needed."""
        optimizer = self.optimizer
        if self._edits_loaded and parameter in optimizer.state:
            number = next(index for index, other in enumerate(self._all()) if other is parameter)
            found = optimizer.state_dict()["state"][number]
            optimizer.state[parameter].update({name: value for name, value in found.items() if isinstance(value, torch.Tensor)})
        return optimizer.state.get(parameter, {})

    def _all(self) -> list[nn.Parameter]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def step(self) -> None:
        """Give gradients to all parameters, or some, and step."""
        share = self._random.choice([1.0, 1.0, 0.7, 0.2])
        for parameter in self.parameters:
            grad = torch.randn(parameter.shape, generator=self._generator).to(parameter.dtype)
            parameter.grad = grad if self._random.random() < share else None
        self.optimizer.step()


def _run(seed: int, update: str) -> None:
    choices = random.Random(seed)
    has_master = choices.random() < 0.25
    has_disk = update == "disk"
    plain, own = (Program(seed, has_master=has_master, edits_loaded=has_disk) for _ in range(2))
    options: dict[str, Any] = {"update": update, "device_budget": choices.choice([0, 0, "8KiB"])}
    options["overlap_forward"] = choices.random() < 0.3
    if has_disk:
        options = {"device_budget": options["device_budget"]}
        options["disk"] = ReferenceDisk(seed=choices.choice([None, seed]), is_late=choices.random() < 0.8)
    device = ReferenceDevice(seed=choices.choice([None, seed]))
    with contextlib.ExitStack() as stack:
        if has_master:
            options["master"] = torch.float32
            stack.enter_context(offload(plain.optimizer, ReferenceDevice(), master=torch.float32, device_budget="1GiB"))
        states = stack.enter_context(offload(own.optimizer, device, **options))
        for step in range(NUM_STEPS):
            for program in (plain, own):
                program.change()
                program.step()
            states.wait()
            assert_same(plain.parameters, own.parameters, f"parameters after step {step}")
            assert_same(plain.optimizer.state_dict(), own.optimizer.state_dict(), f"states after step {step}")
    assert_same(plain.optimizer.state_dict(), own.optimizer.state_dict(), "states once closed")
    device.synchronize()
    assert not device.races


def _every_other_on_disk(pieces: Sequence[StatePiece], *_: Any, **__: Any) -> list[StatePiece]:
    """Replaces `with_disk`, which would leave all states of a small test in host memory."""
    all_on_disk = with_disk(pieces, None)
    return [other if number % 2 else one for number, (one, other) in enumerate(zip(pieces, all_on_disk, strict=True))]


@pytest.mark.covering(1)
@pytest.mark.parametrize("update", ["device", "host", "disk"])
@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 60))])
def test_random_program(seed: int, update: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cut(monkeypatch)
    if seed % 3 == 1:
        monkeypatch.setattr(state_pieces, "with_disk", _every_other_on_disk)
    _run(seed, update)
