"""A forked process that uses features of memkit of its parent: it gets an error by name, and the parent goes on."""

from __future__ import annotations

import copy
import os
import signal
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

import memkit
from memkit.device import ReferenceDevice
from memkit.errors import ForkedError
from memkit.transfer import ReferenceDisk
from tests.refusing import PinLimit
from tests.states.cases import assert_same
from tests.weights.cases import Stack, inputs, only_lora

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:StateOffload. .* steps on the host without its fused kernel"),
    pytest.mark.filterwarnings("ignore:LayerOffload frees no memory"),
    pytest.mark.filterwarnings("ignore:LayerOffload. the system did not pin"),
]
RAISED, _WENT_ON, _RAISED_ANOTHER = 3, 4, 5


def in_fork(act: Callable[[], object]) -> int:
    """Return how a fork ends that does this: `RAISED` if that raises `ForkedError`; a negative signal that has killed it."""
    child = os.fork()
    if child == 0:
        signal.alarm(5)
        try:
            act()
        except ForkedError:
            os._exit(RAISED)
        except RuntimeError as error:  # torch refuses a backward itself where one of its threads has run before the fork
            traceback.print_exc()
            os._exit(RAISED if "fork-based multiprocessing" in str(error) else _RAISED_ANOTHER)
        except BaseException:
            traceback.print_exc()
            os._exit(_RAISED_ANOTHER)
        os._exit(_WENT_ON)
    status = os.waitpid(child, 0)[1]
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def train(model: torch.nn.Module, optimizer: Any, number: int) -> None:
    (batch,) = inputs(ReferenceDevice(), 1)
    model(batch + number).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def each_with(ways: Iterable[str], acts: list[str], *in_default: str) -> list[Any]:
    """Return all pairs: of some ways, the plain run of pytest has one each."""
    pairs = [(way, acts[(number + turn) % len(acts)], turn) for number, way in enumerate(ways) for turn in range(len(acts))]
    is_full = {(way, act): turn > 0 or way not in in_default for way, act, turn in pairs}
    return [pytest.param(*pair, marks=pytest.mark.slow if is_full[pair] else ()) for pair in is_full]


STATES: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"update": "host"},
    "host in the backward": {"update": "host", "when": "backward"},
    "beside the forward": {"update": "host", "overlap_forward": True},
    "disk": {"disk": ReferenceDisk(is_late=False)},
    "disk in the backward": {"disk": ReferenceDisk(is_late=False), "when": "backward"},
}


STATE_ACTS = ["step", "state_dict", "load_state_dict", "close"]


@pytest.mark.parametrize(("way", "act"), each_with(STATES, STATE_ACTS, "device", "disk in the backward"))
def test_states(way: str, act: str) -> None:
    models = [Stack(2), Stack(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.AdamW(model.parameters(), fused=True) for model in models]
    with memkit.StateOffload(optimizers[1], device=ReferenceDevice(), **STATES[way]) as states:
        for model, optimizer in zip(models, optimizers, strict=True):
            train(model, optimizer, 0)
        saved = copy.deepcopy(optimizers[0].state_dict())
        does: dict[str, Callable[[], object]] = {
            "step": lambda: train(models[1], optimizers[1], 1),
            "state_dict": optimizers[1].state_dict,
            "load_state_dict": lambda: optimizers[1].load_state_dict(saved),
            "close": states.close,
        }
        ended = in_fork(does[act])
        for model, optimizer in zip(models, optimizers, strict=True):
            train(model, optimizer, 1)

    assert ended == RAISED
    assert_same(models[0].state_dict(), models[1].state_dict())
    assert_same(optimizers[0].state_dict(), optimizers[1].state_dict())


LAYERS: dict[str, dict[str, Any]] = {
    "frozen": {"train": "frozen"},
    "not pinned": {"train": "frozen"},
    "disk": {"train": "frozen", "disk": ReferenceDisk(is_late=False)},
    "host": {"train": "host"},
    "fused": {"train": "fused", "optimizer": torch.optim.AdamW},
}


@pytest.mark.parametrize(("way", "act"), each_with(LAYERS, ["forward", "train", "gather", "close"], "host", "fused"))
def test_layers(way: str, act: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = ReferenceDevice()
    if way == "not pinned":
        PinLimit(device, monkeypatch, 0)
    model = Stack(3) if way in ("host", "fused") else only_lora(Stack(3))
    plain = copy.deepcopy(model)
    options = {"device": device, "offload_ratio": 1.0, "num_slots": 2, **LAYERS[way]}
    (batch,) = inputs(ReferenceDevice(), 1)
    with memkit.LayerOffload(model, **options) as layers:
        optimizers = []
        for one in (plain, model):
            trained = [parameter for parameter in one.parameters() if parameter.requires_grad]
            own = layers.optimizer if one is model else None
            optimizers.append(torch.optim.AdamW(trained) if own is None else own)
        for number in range(3):
            for one, optimizer in zip((plain, model), optimizers, strict=True):
                train(one, optimizer, number)
            if number == 1:
                does: dict[str, Callable[[], object]] = {
                    "forward": lambda: model(batch),
                    "train": lambda: train(model, optimizers[1], 2),
                    "gather": lambda: layers.gather("layers.0").__enter__(),
                    "close": layers.close,
                }
                ended = in_fork(does[act])

    assert ended == RAISED
    assert_same(plain.state_dict(), model.state_dict())


def test_fork_while_gradients_are_added_up_on_the_host() -> None:
    model = Stack(3)
    (batch,) = inputs(ReferenceDevice(), 1)
    with memkit.LayerOffload(model, train="host", device=ReferenceDevice(), offload_ratio=1.0, num_slots=2):
        for _ in range(2):
            model(batch).square().mean().backward()

        assert in_fork(lambda: model(batch)) == RAISED
