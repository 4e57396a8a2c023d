"""`StateOffload(when="backward")` over shards in host memory, in one process: bits, order, failures, what is refused. On two
ranks see test_two_ranks."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

import memkit
from memkit.device import ReferenceDevice
from memkit.distributed.sharding import HostLayer
from memkit.errors import ProfileError, StateOffloadError
from memkit.optimizers.steppers import layers_of
from memkit.states.pieces import ConsumedGradient
from memkit.states.shard_steps import ShardSteps
from memkit.transfer import ReferenceDisk
from tests.distributed import stepping
from tests.distributed.cases import Model, assert_same, local, make, step
from tests.distributed.hosting import on_host, racing
from tests.distributed.stepping import OPTIMIZERS, Spied, late_gradients, outcome, raise_for, spied, train, trained
from tests.engine import LateThread
from tests.states.test_group_edits import Program
from tests.test_forks import RAISED, in_fork

pytestmark = pytest.mark.filterwarnings("ignore:StateOffload.* without its fused kernel")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in stepping.OFTEN else pytest.mark.slow) for name in stepping.WORKS]
)
def test_one_rank(one: None, name: str, tmp_path: Path) -> None:
    stepping.WORKS[name](str(tmp_path))


def opened(model: nn.Module, kind: str = "fused AdamW", **options: Any) -> memkit.StateOffload:
    return memkit.StateOffload(OPTIMIZERS[kind](trained(model)), when="backward", **options)


def test_thread_is_there_before_the_first_backward(one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system refuses one within a backward, other ranks would wait."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("memkit"):
            raise RuntimeError("can't start new thread")
        start(thread)

    model, plain = on_host(make()), on_host(make())
    with opened(model) as states:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        step(model, 0, 0)
        states.optimizer.step()
    step(plain, 0, 0)
    OPTIMIZERS["fused AdamW"](trained(plain)).step()
    assert_same([local(item) for item in model.parameters()], [local(item) for item in plain.parameters()])

    with pytest.raises(RuntimeError, match="can't start new thread"):
        opened(model)
    states.optimizer.zero_grad()
    step(model, 0, 1)
    assert {type(item.grad) for item in model.parameters()} == {DTensor}  # nobody has stepped it


def spied_states(model: nn.Module) -> tuple[Spied, memkit.StateOffload]:
    optimizer = spied(model)
    return optimizer, memkit.StateOffload(optimizer, when="backward")


def spied_model() -> tuple[Any, Spied, memkit.StateOffload]:
    model: Any = on_host(make())
    return model, *spied_states(model)


def _fail() -> None:
    raise ArithmeticError("of the backward")


def held_backward(model: Model, wait: Callable[[], object]) -> None:
    """Have the backward wait when all layers but the first have gradients."""
    model.blocks[0].register_forward_hook(
        lambda _module, _args, output: output.register_hook(lambda _: wait() and None) and None
    )


# Order


def test_last_layer_is_stepped_before_the_backward_is_over(one: None) -> None:
    model, stepped = make(), threading.Event()
    found: list[bool] = []
    held_backward(model, lambda: found.append(stepped.wait(30)))
    model = on_host(model)
    optimizer, _ = spied_states(model)
    num_threads: set[int] = set()
    optimizer.after = lambda _: (num_threads.add(torch.get_num_threads()), stepped.set())
    step(model, 0, 0)

    assert found == [True]
    assert num_threads == {torch.get_num_threads()}


@pytest.mark.parametrize("waits", [True, False])
def test_gradient_that_is_on_its_way_is_waited_for(one: None, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is not, the copies that are as late as they may be show it."""
    expected = train(plain := on_host(make()), spied(plain), numbers=[0])
    model, stepped = make(), threading.Event()
    held_backward(model, lambda: stepped.wait(30))
    with late_gradients():
        model = on_host(model)
    optimizer, _ = spied_states(model)
    optimizer.after = lambda _: stepped.set()
    if not waits:
        monkeypatch.setattr(HostLayer, "landing", lambda _: [])
    found = train(model, optimizer, numbers=[0])

    assert all(map(torch.equal, found, expected)) == waits


@pytest.mark.parametrize("waits", [True, False])
def test_gradient_of_a_backward_that_has_failed_is_waited_for(one: None, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """That has not, and FSDP2 neither: what a step has left of it may be on its way."""
    outcomes = []
    for is_late in (False, True):
        model = make()
        held_backward(model, _fail)
        with late_gradients() if is_late else nullcontext():
            model = on_host(model)
        optimizer, states = spied_states(model)
        with pytest.raises(ArithmeticError), states.accumulate():
            step(model, 0, 0)
        if not waits:
            monkeypatch.setattr(HostLayer, "landing", lambda _: [])
        optimizer.step()
        outcomes.append([local(item.detach()) for item in model.parameters()])

    assert all(map(torch.equal, *outcomes)) == waits


def test_thread_waits_for_the_last_copy_of_each_layer(one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with racing() as device:
        model = memkit.shard(make(), offload_policy=CPUOffloadPolicy())
    states = opened(model)
    waited: list[object] = []
    synchronize = device.synchronize

    def note(event: Any = None) -> None:
        if threading.current_thread().name.startswith("memkit-step"):
            waited.append(event)
        synchronize(event)

    monkeypatch.setattr(device, "synchronize", note)
    step(model, 0, 0)
    layers = {*layers_of(states.optimizer).values()}

    assert len(waited) == len(layers) == 5
    assert {*waited} == {layer.last_read for layer in layers}


def test_copy_of_a_shard_waits_for_its_step(one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an interrupt, when the backward has not waited for the thread."""
    model, optimizer, _ = spied_model()
    seen: list[bool] = []
    goes_on = threading.Event()
    optimizer.before = lambda _: goes_on.wait(30)
    monkeypatch.setattr(ShardSteps, "_end_backward", lambda *_: None)
    timer = threading.Timer(0.05, goes_on.set)
    optimizer.after = lambda _: seen.append(goes_on.is_set())
    step(model, 0, 0)
    timer.start()
    with torch.no_grad():
        model(torch.arange(8))

    assert seen == [True] * 5


# Steps


class _Backwards(Model):
    """Runs its blocks from the last to the first, so that what is gathered ahead was stepped already."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(x)


def _reversed(**options: Any) -> Model:
    torch.manual_seed(0)
    return on_host(_Backwards(), **options)


def _used_twice() -> Model:
    model = make()
    model.blocks = nn.ModuleList(model.blocks[number] for number in (0, 1, 0, 2))
    return on_host(model, layers=["blocks.0", "blocks.1", "blocks.3"])


def _without_trained_layers() -> Model:
    """Gradients are reduced when the backward is over."""
    model = make()
    model.blocks.requires_grad_(False)
    model.head.requires_grad_(False)
    return on_host(model)


def _reached_in_part(model: Any, optimizer: Any) -> None:
    """What a backward does not reach has a gradient that was set by hand, and is left for the step."""
    others = model.embedding, model.blocks[0].norm
    for module in others:
        module.requires_grad_(False)
    step(model, 0, 0)
    for module in others:
        module.requires_grad_(True)
        for item in module.parameters():
            item.grad = item.detach() * 0.5
    optimizer.step()


def _closure(model: Any, optimizer: Any) -> None:
    for number in range(2):
        optimizer.zero_grad()
        optimizer.step(lambda number=number: step(model, 0, number).sum())  # type: ignore[misc]


def _not_synchronized(model: Any, optimizer: Any) -> None:
    for is_last in (False, True):
        model.set_requires_gradient_sync(is_last)
        step(model, 0, int(is_last))
    optimizer.step()


def _group_in_between(model: Any, optimizer: Any) -> None:
    step(model, 0, 0)
    optimizer.add_param_group({"params": trained(model)[:1], "lr": 1e-3})
    optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, numbers=[1, 2])


Run = Callable[[Any, Any], object]
PROGRAMS: dict[str, tuple[Run, Callable[[], Model], Callable[[Any], Any]]] = {
    "reached in part": (_reached_in_part, lambda: on_host(make()), spied),
    "group in between": (
        *(_group_in_between, lambda: on_host(make())),
        lambda model: torch.optim.AdamW(trained(model)[1:], lr=1e-2, fused=True),
    ),
    "reversed": (train, _reversed, spied),
    "closure": (_closure, lambda: on_host(make()), lambda model: OPTIMIZERS["fused AdamW"](trained(model))),
    "not synchronized": (_not_synchronized, lambda: on_host(make()), spied),
    "reversed, at random": (train, lambda: _reversed(seed=0), spied),
    "reversed, none ahead": (train, lambda: _reversed(prefetch=0), spied),
    "used twice": (train, _used_twice, spied),
    "no trained layers": (lambda *given: train(*given, numbers=range(2)), _without_trained_layers, spied),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (at > 2)) for at, name in enumerate(PROGRAMS)])
def test_model_ends_as_alone(one: None, name: str) -> None:
    run, build, optimizer_of = PROGRAMS[name]
    found = []
    for opens in (True, False):
        model = build()
        optimizer = optimizer_of(model)
        with memkit.StateOffload(optimizer, when="backward") if opens else nullcontext():
            run(model, optimizer)
            found.append(outcome(model, optimizer))

    assert_same(*found)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])
def test_groups_that_are_edited_between_steps(one: None, seed: int) -> None:
    def run(opens: bool) -> list[Tensor]:
        model, choices = on_host(make()), random.Random(seed)
        program = Program(model, lambda _: OPTIMIZERS["AdamW"](stepping.groups_by_decay(model)))
        if opens:
            memkit.StateOffload(program.optimizer, when="backward")
        for number in range(6):
            program.edit(choices)
            step(model, 0, number)
            program.optimizer.step()
            model.zero_grad()
        return outcome(model, program.optimizer)

    assert_same(run(True), run(False))


def test_option_that_is_set_behind_the_backward_raises(one: None) -> None:
    model = on_host(make())
    states = opened(model)
    step(model, 0, 0)
    states.optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(StateOffloadError, match=r'"lr" of a group was set between the backward and optimizer\.step\(\)'):
        states.optimizer.step()
    states.optimizer.step()

    assert states.stats().num_steps == 1


def test_another_backward_of_one_step_raises(one: None) -> None:
    model = on_host(make())
    states = opened(model)
    step(model, 0, 0)
    with pytest.raises(StateOffloadError, match="was stepped within an earlier backward of this step"):
        step(model, 0, 1)
    states.optimizer.step()
    states.optimizer.zero_grad()
    step(model, 0, 2)
    states.optimizer.step()

    assert states.stats().num_steps == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("act", ["step", pytest.param("state_dict", marks=pytest.mark.slow)])
def test_fork_that_uses_the_optimizer_raises_by_name(one: None, act: str) -> None:
    model = on_host(make())
    optimizer = opened(model).optimizer
    step(model, 0, 0)

    assert in_fork(getattr(optimizer, act)) == RAISED
    optimizer.step()


def test_closing_gives_the_optimizer_back(one: None) -> None:
    model = on_host(make())
    optimizer = spied(model)
    expected = train(model, optimizer, numbers=range(4))
    model, optimizer, states = spied_model()
    train(model, optimizer, states=states, numbers=range(2))
    states.close()
    states.close()
    calls: list[int] = []
    optimizer.before = lambda stepped: calls.append(len(stepped))
    found = train(model, optimizer, numbers=range(2, 4))

    assert_same(found[2:], expected[4:])
    assert calls == [len(trained(model))] * 2
    assert repr(states) == "<StateOffload of Spied: closed>"
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


# Failures


def test_step_that_fails_ahead_of_writing_is_made_by_the_next(one: None) -> None:
    model = on_host(make())
    expected = train(model, spied(model), numbers=range(2))
    model, optimizer, states = spied_model()
    optimizer.before = raise_for(local(model.embedding.weight).numel())
    with pytest.raises(StateOffloadError, match=r"has failed: ArithmeticError: on purpose\. What has failed is as before"):
        step(model, 0, 0)
    assert type(model.blocks[0].up.weight.grad) is ConsumedGradient
    assert type(model.embedding.weight.grad) is not ConsumedGradient
    optimizer.step()
    optimizer.zero_grad()

    assert_same(train(model, optimizer, states=states, numbers=[1])[1:], expected[2:])


def test_step_that_fails_after_writing_says_what_is_lost(one: None) -> None:
    model, optimizer, _ = spied_model()
    train(model, optimizer, numbers=[0])
    saved = optimizer.state_dict()
    optimizer.after = raise_for(local(model.embedding.weight).numel())
    said = (
        r"ArithmeticError: on purpose\), and may have written a part .*: they are lost\. Load a checkpoint of the model and of"
    )
    with pytest.raises(StateOffloadError, match=said):
        step(model, 0, 1)
    for _ in range(2):
        with pytest.raises(StateOffloadError, match=said):
            optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(StateOffloadError, match=said):
        step(model, 0, 2)
    optimizer.load_state_dict(saved)
    optimizer.zero_grad()
    train(model, optimizer, numbers=[3])


def test_rest_that_fails_in_the_step_is_made_by_the_next(one: None) -> None:
    model, optimizer, states = spied_model()
    with states.accumulate():
        step(model, 0, 0)
    fail, calls = raise_for(local(model.embedding.weight).numel()), list[int]()
    optimizer.before = lambda stepped: (fail(stepped), calls.append(len(stepped)))
    with pytest.raises(StateOffloadError, match="on purpose"):
        optimizer.step()
    calls.clear()
    optimizer.step()

    assert calls == [2]
    assert states.stats().num_steps == 1


@pytest.mark.parametrize("kind", [ArithmeticError, KeyboardInterrupt])
def test_backward_that_fails_leaves_each_parameter_old_or_new(one: None, kind: type[BaseException]) -> None:
    model = make()

    def fail() -> None:
        raise kind("on purpose")

    held_backward(model, fail)
    model = on_host(model)
    optimizer, _ = spied_states(model)
    with pytest.raises(kind, match="on purpose"):
        step(model, 0, 0)
    stepped = [item for item in model.parameters() if type(item.grad) is ConsumedGradient]
    assert {id(item) for item in stepped} == {id(item) for block in model.blocks[1:] for item in block.parameters()}
    assert set(optimizer.state) == set(stepped)
    optimizer.step()
    optimizer.zero_grad()

    assert set(optimizer.state) == set(stepped)


@pytest.mark.parametrize("act", ["step", "close", "load"])
def test_backward_that_fails_while_a_thread_of_the_engine_is_at_a_node(
    one: None, act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes next waits for that thread, which may be about to have a layer stepped."""
    log, model = list[str](), make()
    held_backward(model, _fail)
    model = on_host(model)
    optimizer, states = spied_states(model)
    saved, late = optimizer.state_dict(), LateThread(monkeypatch)
    with pytest.raises(ArithmeticError):
        step(model, 0, 0)
    late.leave(lambda: log.append("node"), after_s=0.02)
    {"step": optimizer.step, "close": states.close, "load": lambda: optimizer.load_state_dict(saved)}[act]()
    log.append("next")
    late.join()

    assert log == ["node", "next"]


def test_failure_is_told_behind_what_fsdp_reduces_at_the_end(one: None) -> None:
    """Also where a layer is gathered in the backward ahead of all that FSDP2 does there: the model itself runs again."""
    model, optimizer, _ = spied_model()
    optimizer.before = raise_for(local(model.blocks[3].up.weight).numel())
    x = torch.ones((), requires_grad=True)
    with pytest.raises(StateOffloadError, match="on purpose"):
        (checkpoint(model, torch.arange(8), use_reentrant=False) * x).sum().backward()
    stepped = {item for item in model.parameters() if type(item.grad) is ConsumedGradient}

    assert stepped == {*model.parameters()} - {*model.blocks[3].parameters()}


def test_interrupt_of_the_wait_leaves_nothing_half_way(one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = on_host(make())
    expected = train(plain, spied(plain))
    model, optimizer, states = spied_model()
    wait, is_over = ShardSteps._wait_for_thread, False

    def interrupted(steps: ShardSteps) -> None:
        nonlocal is_over
        if not is_over:
            is_over = True
            raise KeyboardInterrupt
        wait(steps)

    monkeypatch.setattr(ShardSteps, "_wait_for_thread", interrupted)
    with pytest.raises(KeyboardInterrupt):
        step(model, 0, 0)
    optimizer.step()
    optimizer.zero_grad()

    assert_same(train(model, optimizer, states=states, numbers=[1, 2]), expected[1:])


# What is refused


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"update": "device"}, 'update="device"'),
        ({"master": torch.float32}, r"master=torch\.float32"),
        ({"device_budget": "1MiB"}, "device_budget=1048576"),
        ({"host_budget": "1MiB"}, "host_budget=1048576"),
        ({"device": ReferenceDevice()}, "device="),
        ({"disk": ReferenceDisk()}, "disk="),
    ],
)
def test_refuses_what_would_move_something(one: None, options: dict[str, Any], found: str) -> None:
    with pytest.raises(ValueError, match=f"shards in host memory where they are, .* and moves nothing; found {found}"):
        opened(on_host(make()), **options)
    with pytest.raises(ValueError, match=r"overlap_forward=True needs a step behind the backward"):
        opened(on_host(make()), overlap_forward=True)


class _Drawing(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for item in group["params"]:
                torch.rand_like(item)
        return super().step(closure)


def _by_hand() -> list[nn.Parameter]:
    return trained(fully_shard(make(), offload_policy=CPUOffloadPolicy(pin_memory=False)))


_MIXES = "for which each element has to be stepped by itself"
REFUSED: dict[str, tuple[Callable[[], torch.optim.Optimizer], str]] = {
    "others beside them": (
        lambda: torch.optim.SGD([*on_host(make()).parameters(), nn.Parameter(torch.ones(2))], lr=0.1),
        r"found beside them parameter 0\.\d+, a Parameter on cpu\. Leave it to another",
    ),
    "brought by FSDP2": (
        lambda: OPTIMIZERS["fused AdamW"](_by_hand()),
        r"by memkit\.shard\(model, offload_policy=CPUOffloadPolicy\(\)\), are stepped with",
    ),
    "drawing": (lambda: _Drawing(on_host(make()).parameters(), lr=0.1), _MIXES),
    "mixing": (lambda: torch.optim.Adafactor(on_host(make()).parameters()), _MIXES),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_it_cannot_step(one: None, name: str) -> None:
    make_optimizer, message = REFUSED[name]

    with pytest.raises(ValueError, match=message):
        memkit.StateOffload(make_optimizer(), when="backward")


def test_refuses_gradients_that_are_split_otherwise(one: None) -> None:
    model = on_host(make())
    states = opened(model)
    weight: Any = model.head.weight
    weight.grad = weight.detach().redistribute(placements=[Replicate()])
    with pytest.raises(StateOffloadError, match=r"a shard, by a gradient that is split in the same way"):
        states.optimizer.step()


def test_refuses_shards_that_another_one_steps(one: None) -> None:
    model = on_host(make())
    states = opened(model)
    with pytest.raises(
        ValueError, match=r"that the StateOffload of another optimizer steps, .* Call close\(\) of that one first"
    ):
        memkit.StateOffload(spied(model), when="backward")
    states.close()
    opened(model)


@pytest.mark.slow
def test_profile_that_would_train_is_refused(one: None) -> None:
    model = on_host(make())
    states = opened(model)
    with pytest.raises(ProfileError, match="such as an optimizer step in the backward: a profile would train the model"):
        memkit.profile_memory(model, torch.arange(8), backward=True)
    states.close()
    report = memkit.profile_memory(model, torch.arange(8), backward=True)

    assert report.sharding is not None


def test_layer_that_is_needed_again_once_it_was_stepped_raises(one: None) -> None:
    """A block that is run again in the backward also computes with another one, without gradients."""
    model = make()
    model.blocks[0] = _Again(model.blocks[0])
    model = on_host(model, layers=[f"blocks.{number}" for number in range(4)])
    model.blocks[0].other.append(model.blocks[3])  # type: ignore[operator, union-attr]
    states = opened(model)
    with pytest.raises(StateOffloadError, match="gathers a layer once more whose gradients it has reduced"):
        step(model, 0, 0)
    assert not states.optimizer.state.keys() & {*model.blocks[0].parameters()}


class _Again(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.other: list[nn.Module] = []
        """None of its own modules."""

    def _run(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            other = self.other[0](x)
        return self.block(x) + other

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._run, x, use_reentrant=False)
