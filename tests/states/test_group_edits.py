"""A loop that edits `param_groups` between steps comes to the same parameters and states as without memkit, or to an error."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import memkit
from memkit.device import Device, ReferenceDevice
from memkit.errors import LayerOffloadError, StateOffloadError
from memkit.states.packing import OnDisk
from memkit.transfer import ReferenceDisk
from tests.states.cases import ScheduleFree, assert_same, assert_same_training, batch, make_net, offload, train
from tests.weights.cases import Stack, inputs

pytestmark = [
    pytest.mark.filterwarnings("ignore:StateOffload. .* steps on the host without its fused kernel"),
    pytest.mark.filterwarnings("ignore:LayerOffload frees no memory"),
]


class Program:
    """A model that is trained while its optimizer's groups change. With `freezes`, parameters that leave the optimizer are
    frozen until they come back."""

    def __init__(self, model: nn.Module, make: Callable[[Any], torch.optim.Optimizer], *, freezes: bool = False) -> None:
        self.model, self.freezes = model, freezes
        self.parameters = list(model.parameters())
        self.optimizer = make(self.parameters)

    def outside(self) -> list[nn.Parameter]:
        known = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        return [parameter for parameter in self.parameters if id(parameter) not in known]

    def kept(self) -> Any:
        """Return the states and the groups: a state dict can't be made if a parameter has left and its states stay."""
        optimizer, places = self.optimizer, {id(parameter): place for place, parameter in enumerate(self.parameters)}
        groups = [{**group, "params": [places[id(item)] for item in group["params"]]} for group in optimizer.param_groups]
        return [optimizer.state.get(parameter) or {} for parameter in self.parameters], groups

    def has_all(self) -> bool:
        """Tell whether the states are in `optimizer.state`, and not on a disk."""
        return not any(isinstance(value, OnDisk) for row in self.optimizer.state.values() for value in row.values())

    def edit(self, choices: random.Random) -> None:
        """Change the groups in one of the ways in which users do."""
        groups, outside = self.optimizer.param_groups, self.outside()
        group, other = choices.choice(groups), choices.choice(groups)
        members, place = group["params"], choices.randrange(1, 5)
        what = choices.choice(["leave", "slice", "move", "add", "back", "order", "groups", "options", "replace", "swap"])
        if what == "leave" and len(members) > 1:
            members.pop(choices.randrange(len(members)))
        elif what == "slice" and len(members) > place:
            group["params"] = members[place:] if choices.random() < 0.5 else members[:-place]
        elif what == "move" and len(members) > 1:
            other["params"].append(members.pop(choices.randrange(len(members))))
        elif what == "add" and outside:
            self.optimizer.add_param_group({"params": outside[:place], "lr": choices.choice([1e-3, 1e-2])})
        elif what == "back" and outside:
            members.append(choices.choice(outside))
        elif what == "order":
            choices.shuffle(members)
        elif what == "groups":
            choices.shuffle(groups)
        elif what == "options":
            group["lr"] = choices.choice([1e-3, 2e-2])
        elif what == "replace":
            self.optimizer.param_groups = [{**each, "params": [*each["params"]]} for each in groups]
        elif what == "swap" and outside:
            members[choices.randrange(len(members))] = outside[0]
        if self.freezes:
            left = {id(parameter) for parameter in self.outside()}
            for parameter in self.parameters:
                parameter.requires_grad_(id(parameter) not in left)


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    partial(torch.optim.AdamW, lr=1e-2, foreach=False),
    partial(torch.optim.AdamW, lr=1e-2, fused=True),
    partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    ScheduleFree,
]
NUM_STEPS = 6
WAYS: dict[str, dict[str, Any]] = {
    f"{when} {update}": {"when": when, "update": update} for when in ("step", "backward") for update in ("device", "host")
}
WAYS |= {f"beside {update}": {"overlap_forward": True, "update": update} for update in ("device", "host")}
WAYS |= {f"{when} copies": {"when": when, "master": torch.float32} for when in ("step", "backward")}
WAYS |= {f"{when} disk": {"when": when, "disk": ReferenceDisk(is_late=False)} for when in ("step", "backward")}
LAYERED: dict[str, dict[str, Any] | None] = {"alone": None, "states": {}, "copies": {"master": torch.float32}}


def in_two_groups(make: Callable[[Any], torch.optim.Optimizer], parameters: Any) -> torch.optim.Optimizer:
    given = list(parameters)
    return make([{"params": given[::2]}, {"params": given[1::2], "lr": 3e-3}]) if len(given) > 1 else make(given)


def run(seed: int, device: Device, plain: Program, own: Program, wait: Callable[[], object], *, has_step: bool = True) -> None:
    """Train both, and compare them. Edits come ahead of a forward, or between it and the backward."""
    when = random.Random(seed)
    (batch,) = inputs(device, 1)
    batch = batch.to(plain.parameters[0].dtype)
    for step in range(NUM_STEPS):
        is_late, number = when.random() < 0.3, when.choice([0, 1, 1, 2])
        for program in (plain, own):
            choices = random.Random(f"{seed} {step}")
            for _ in range(0 if is_late else number):
                program.edit(choices)
            if program is own:
                wait()  # behind the edits: what is stepped beside them is stepped as they were
            loss = program.model(batch + step / 10).float().square().mean()
            for _ in range(number if is_late else 0):
                program.edit(choices)
            loss.backward()
            if program is plain or has_step:
                program.optimizer.step()
            program.model.zero_grad()
        if when.random() < 0.5:
            wait()
            assert_same(plain.model.state_dict(), own.model.state_dict(), f"parameters after step {step}")
            if has_step and own.has_all():
                assert_same(plain.kept(), own.kept(), f"states after step {step}")
    wait()
    assert_same(plain.model.state_dict(), own.model.state_dict(), "parameters")


NUM_SEEDS = 8
SEEDS = [pytest.param(seed, marks=() if seed == 3 else pytest.mark.slow) for seed in range(NUM_SEEDS)]


def in_default(seed: int, way: str) -> bool:
    return seed == 3 and not way.startswith("step ")


@pytest.mark.parametrize(
    ("seed", "way"),
    [
        pytest.param(seed, way, marks=() if in_default(seed, way) else pytest.mark.slow)
        for way, seed in itertools.product(WAYS, range(NUM_SEEDS))
    ],
)
def test_edits_between_steps(seed: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device, options = ReferenceDevice(), WAYS[way]
    torch.manual_seed(seed)
    model = Stack(2).to(torch.bfloat16 if "master" in options else torch.float32)
    make = partial(in_two_groups, OPTIMIZERS[seed % len(OPTIMIZERS)])
    plain, own = Program(copy.deepcopy(model), make), Program(model, make)
    with contextlib.ExitStack() as stack:
        if "master" in options:
            stack.enter_context(offload(plain.optimizer, ReferenceDevice(), master=torch.float32, device_budget="1GiB"))
        states = stack.enter_context(offload(own.optimizer, device, **options))
        run(seed, device, plain, own, states.wait)
    assert not device.races


def streamed(model: nn.Module, make: Any, device: Device, **options: Any) -> memkit.LayerOffload:
    return memkit.LayerOffload(model, train="fused", optimizer=make, device=device, **{"offload_ratio": 1.0, **options})


@pytest.mark.covering(1)
@pytest.mark.parametrize("way", LAYERED)
@pytest.mark.parametrize("seed", SEEDS)
def test_edits_between_steps_while_layers_stream(seed: int, way: str) -> None:
    device, options = ReferenceDevice(), LAYERED[way]
    torch.manual_seed(seed)
    is_low = options is not None and "master" in options
    model = Stack(3).to(torch.bfloat16 if is_low else torch.float32)
    make = partial(in_two_groups, OPTIMIZERS[seed % (3 if options is None else 4)])  # alone, none may count in its groups
    plain = Program(copy.deepcopy(model), make, freezes=True)
    with contextlib.ExitStack() as stack:
        ratio = random.Random(seed).choice([1.0, 0.5])
        layers = stack.enter_context(streamed(model, make, device, offload_ratio=ratio, num_slots=2))
        own = Program(model, lambda _: layers.optimizer, freezes=True)
        if is_low:
            stack.enter_context(offload(plain.optimizer, ReferenceDevice(), master=torch.float32, device_budget="1GiB"))
        if options is not None:
            stack.enter_context(offload(own.optimizer, device, when="backward", **options))
        run(seed, device, plain, own, lambda: None, has_step=seed % 8 < 4)
    assert not device.races


def test_layer_that_leaves_the_optimizer_is_stepped_no_more() -> None:
    model = Stack(2)
    optimizer = torch.optim.AdamW(model.parameters())
    (batch,) = inputs(ReferenceDevice(), 1)
    with offload(optimizer, ReferenceDevice(), when="backward"):
        for _ in range(2):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        before = copy.deepcopy(model.stem.state_dict())
        del optimizer.param_groups[0]["params"][:2]
        model(batch).square().mean().backward()

    assert_same(model.stem.state_dict(), before)


SEVERAL = range(10)


@pytest.mark.parametrize("layered", [False, True])
@pytest.mark.parametrize("seed", [*SEVERAL[:4], *(pytest.param(seed, marks=pytest.mark.slow) for seed in SEVERAL[4:])])
def test_edit_behind_the_backward_is_as_without_memkit_or_refused(seed: int, layered: bool) -> None:
    device = ReferenceDevice()
    torch.manual_seed(seed)
    model, (batch,) = Stack(2), inputs(device, 1)
    make = partial(in_two_groups, OPTIMIZERS[0])
    with contextlib.ExitStack() as stack:
        plain = Program(copy.deepcopy(model), make)
        if layered:
            layers = stack.enter_context(streamed(model, make, device))
        own = Program(model, (lambda _: layers.optimizer) if layered else make)
        stack.enter_context(offload(own.optimizer, device, when="backward"))
        refusal = None
        for step in range(12):
            for program in (plain, own):
                choices = random.Random(f"{seed} {step}")
                program.model(batch).square().mean().backward()
                before = program.kept()[1]
                program.edit(choices)
                try:
                    program.optimizer.step()
                except StateOffloadError as error:
                    refusal = program, str(error)
                program.model.zero_grad()
            if refusal is not None:
                assert refusal[0] is own
                assert "of a group was set between the backward and optimizer.step()" in refusal[1]
                assert own.kept()[1] != before
                return
            assert_same(plain.model.state_dict(), own.model.state_dict())


def test_edit_between_two_backwards_of_a_step_is_refused() -> None:
    model, device = Stack(2), ReferenceDevice()
    optimizer = torch.optim.AdamW(model.parameters())
    (batch,) = inputs(device, 1)
    with offload(optimizer, device, when="backward"):
        model.head(batch).sum().backward()
        before = copy.deepcopy(model.stem.state_dict())
        del optimizer.param_groups[0]["params"][:2]
        with pytest.raises(StateOffloadError, match='"params" of a group was set between the backward and'):
            model.stem(batch).sum().backward()
        optimizer.step()

    assert_same(model.stem.state_dict(), before)


@pytest.mark.parametrize("ratio", [0.0, 1.0])
@pytest.mark.parametrize("has_states", [False, True])
def test_streamed_model_of_which_a_parameter_leaves_and_is_trained_on_is_refused(ratio: float, has_states: bool) -> None:
    device, model = ReferenceDevice(), Stack(2)
    (batch,) = inputs(device, 1)
    with contextlib.ExitStack() as stack:
        layers = stack.enter_context(streamed(model, torch.optim.AdamW, device, offload_ratio=ratio))
        assert layers.optimizer is not None
        if has_states:
            stack.enter_context(offload(layers.optimizer, device, when="backward"))
        model(batch).square().mean().backward()
        layers.optimizer.param_groups[0]["params"].pop()
        with pytest.raises(LayerOffloadError, match=r"has a gradient, and the optimizer does not know it.* set requires_grad"):
            model(batch).square().mean().backward()


@pytest.mark.filterwarnings("ignore:StateOffload. .* steps on the host without its fused kernel")
@pytest.mark.parametrize("update", ["device", "host"])
def test_parameters_that_come_where_all_states_fit(device: Device, update: str) -> None:
    if update == "host" and device.torch_device.type != "cpu":
        pytest.skip("the plain steps differ from the host's in last bits")

    def trained(streams: bool) -> Any:
        net, later = make_net(device), torch.nn.Linear(24, 400, device=device.torch_device)
        with torch.no_grad():
            later.weight.fill_(0.1)
            later.bias.fill_(0.2)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        states = offload(optimizer, device, device_budget="30KiB", update=update) if streams else None
        train(net, optimizer, device, range(2))
        if states is not None:
            assert states.plan.is_empty
        optimizer.add_param_group({"params": later.parameters()})
        for step in range(2, 4):
            net(later(batch(device, step))[:, :24]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if states is not None:
            assert states.stats().host_bytes > 0
            assert states.stats().resident_bytes <= 30 * 1024
            states.close()
        return torch.nn.ModuleList([net, later]), optimizer

    assert_same_training(*trained(False), *trained(True))
