"""`when="backward"`: each parameter is stepped when its gradient is complete, bit for bit as by a step behind the backward."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memkit
from memkit.device import Device, ReferenceDevice
from memkit.errors import StateOffloadError
from memkit.states import host_steps, in_backward
from memkit.states.memory import StateSlot, StateSlots
from memkit.transfer import ReferenceDisk
from tests.engine import LateThread
from tests.states.cases import (
    WAYS,
    FailsOnHost,
    Pair,
    ScheduleFree,
    assert_same,
    assert_same_training,
    batch,
    cut,
    is_same,
    make_net,
    make_training,
    offload,
    skip_host_steps,
    train,
)
from tests.weights.cases import Stack, inputs

pytestmark = [
    pytest.mark.filterwarnings("ignore:StateOffload. .* steps on the host without its fused kernel"),
    pytest.mark.filterwarnings("ignore:LayerOffload frees no memory"),
]


@pytest.mark.parametrize("update", ["device", "host"])
def test_gradients_are_let_go_within_the_backward(device: Device, update: str) -> None:
    model, optimizer = make_training(device, fused=True)
    with offload(optimizer, device, when="backward", update=update) as states:
        train(model, optimizer, device, range(2), states=states)
        model(batch(device, 2)).square().mean().backward()
        sizes = [parameter.grad.untyped_storage().nbytes() for parameter in model.parameters() if parameter.grad is not None]
        assert len(sizes) == 9
        assert max(sizes) == 4
        optimizer.step()


@pytest.mark.parametrize("way", ["backward", "backward, host"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_beside_checkpoints(device: Device, reentrant: bool, way: str) -> None:
    skip_host_steps(device, way)
    pair = Pair(device, fused=True)
    with offload(pair.optimizer, device, **WAYS[way]):
        for net, own in pair:
            for step in range(3):
                x = batch(device, step).requires_grad_()
                for layer in net.layers:
                    x = checkpoint(layer, x, use_reentrant=reentrant)
                net.head(x).square().mean().backward()
                own.step()
                own.zero_grad()
        pair.assert_same()


@pytest.mark.parametrize(
    "use",
    [
        lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda model, optimizer: nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda model, optimizer: torch.amp.GradScaler("cpu").unscale_(optimizer),
        lambda model, optimizer: model.head.weight.grad + 1,
    ],
)
def test_use_of_a_consumed_gradient_is_refused(device: Device, use: Any) -> None:
    model, optimizer = make_training(device)
    with offload(optimizer, device, when="backward"):
        model(batch(device, 0)).square().mean().backward()
        with pytest.raises((StateOffloadError, AssertionError)) as caught:
            use(model, optimizer)
        if isinstance(caught.value, StateOffloadError):
            assert "was consumed by the step within the backward" in str(caught.value)
        optimizer.step()


@pytest.mark.parametrize("zeroes", [False, True])
def test_a_second_backward_without_accumulate_is_refused(device: Device, zeroes: bool) -> None:
    model, optimizer = make_training(device)
    with offload(optimizer, device, when="backward"):
        model(batch(device, 0)).square().mean().backward()
        if zeroes:
            optimizer.zero_grad()
        told = r"To accumulate, put `with states.accumulate\(\):` around.* gradients you have zeroed.*call optimizer\.step\(\)"
        with pytest.raises(StateOffloadError, match=told):
            model(batch(device, 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model(batch(device, 2)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("ends", "loads"),
    [
        ("backward", "optimizer, model"),
        *((ends, loads) for ends in ("backward", "failed backward") for loads in ("model, optimizer", "data, optimizer")),
        ("step", "model, optimizer"),
    ],
)
@pytest.mark.parametrize("way", [way for way in WAYS if "backward" in way])
def test_loading_between_steps(device: Device, way: str, ends: str, loads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that was stepped before overwrites what is loaded, wherever it was stepped."""
    skip_host_steps(device, way)
    cut(monkeypatch)
    pair = Pair(device, fused=True)
    with offload(pair.optimizer, device, **WAYS[way]) as states:
        pair.train_plain(range(3))
        train(pair.model, pair.optimizer, device, range(5, 7), states=states)
        if ends == "failed backward":
            handle = pair.model.layers[0].weight.register_hook(_fail)
            with pytest.raises(ArithmeticError):
                pair.model(batch(device, 8)).square().mean().backward()
            handle.remove()
            states.wait()  # for autograd's thread
        elif ends == "backward":
            pair.model(batch(device, 8)).square().mean().backward()
        for what in loads.split(", "):
            if what == "optimizer":
                pair.optimizer.load_state_dict(pair.plain_optimizer.state_dict())
            elif what == "data":
                for parameter, value in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
                    parameter.data.copy_(value.data)
            else:
                pair.model.load_state_dict(pair.plain.state_dict())
        pair.optimizer.zero_grad()
        pair.train(range(3, 5), states=states)
        pair.assert_same()


def _fail(_: torch.Tensor) -> None:
    raise ArithmeticError("the test's own")


@pytest.mark.parametrize("way", [way for way in WAYS if "backward" in way])
def test_parameters_are_stepped_once_the_backward_is_over(device: Device, way: str) -> None:
    """So may they be read, and written to, ahead of `optimizer.step()`."""
    skip_host_steps(device, way)
    pair = Pair(device, fused=True)
    with offload(pair.optimizer, device, **WAYS[way]):
        for number in range(3):
            for net, own in pair:
                net(batch(device, number)).square().mean().backward()
                if net is pair.plain:
                    own.step()
            assert_same(pair.plain.state_dict(), pair.model.state_dict())
            for net in pair.nets:
                net.head.weight.data.clamp_(-0.1, 0.1)
                nn.utils.vector_to_parameters(0.5 * nn.utils.parameters_to_vector(net.parameters()), net.parameters())
            pair.optimizer.step()
            for own in pair.optimizers:
                own.zero_grad()
            pair.assert_same()


def test_a_learning_rate_set_behind_the_backward_is_refused(device: Device) -> None:
    model, optimizer = make_training(device)
    with offload(optimizer, device, when="backward"):
        model(batch(device, 0)).square().mean().backward()
        optimizer.param_groups[0]["lr"] = 0.5
        with pytest.raises(StateOffloadError, match=r'"lr" of a group was set between the backward and optimizer\.step\(\)'):
            optimizer.step()
        optimizer.step()
        assert float(optimizer.state[model.head.weight]["step"]) == 1
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 0.25
        model(batch(device, 1)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("way", [way for way in WAYS if "backward" in way])
def test_closing_behind_a_backward(device: Device, way: str, saves: bool) -> None:
    skip_host_steps(device, way)
    pair = Pair(device, fused=True)
    pair.train_plain(range(1))
    states = offload(pair.optimizer, device, **WAYS[way])
    pair.model(batch(device, 0)).square().mean().backward()
    if saves:
        assert_same(pair.plain_optimizer.state_dict()["state"], pair.optimizer.state_dict()["state"])
    states.close()
    assert all(parameter.grad is None for parameter in pair.model.parameters())
    pair.optimizer.step()
    pair.assert_same()


class Slow(torch.optim.AdamW):
    """Steps once the gate lets it."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, fused=True, **options)
        self.gate = Gate()

    def step(self, closure: Any = None) -> Any:
        assert not any(group["params"] for group in self.param_groups) or self.gate.is_open.wait(60)
        return super().step(closure)


class Gate:
    """Lets steps through, or holds them. It is no part of the optimizer's state."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.is_open.set()

    def __deepcopy__(self, _: Any) -> Gate:
        return self


def test_no_gradient_waits_for_the_host(device: Device) -> None:
    pair = Pair(device, Slow)
    skip_host_steps(device, "host")
    with offload(pair.optimizer, device, when="backward", update="host"):
        gate = pair.optimizer.gate.is_open
        pair.model.layers[0].weight.register_hook(lambda _: gate.set())  # the last layer to have a gradient
        for step in range(3):
            pair.train_plain([step])
            gate.clear()
            train(pair.model, pair.optimizer, device, [step])
            pair.assert_same()


@pytest.mark.parametrize(("has_states", "fails_itself"), [(False, False), (True, False), (False, True)])
def test_an_error_on_the_host_is_raised_by_the_backward(device: Device, has_states: bool, fails_itself: bool) -> None:
    """Or by the step, if the backward fails for another reason."""
    model, optimizer = make_training(device, FailsOnHost)
    with offload(optimizer, device, when="backward", update="host") as states:
        if has_states:
            train(model, optimizer, device, range(2), states=states)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.told["fails"] = 3
        if fails_itself:
            handle = model.layers[0].weight.register_hook(_fail)
            with pytest.raises(ArithmeticError, match="the test's own"):
                model(batch(device, 5)).square().mean().backward()
            handle.remove()
        with pytest.raises(StateOffloadError, match=r"the step of .* on the host has failed: ArithmeticError: no") as caught:
            optimizer.step() if fails_itself else model(batch(device, 5)).square().mean().backward()
        assert sum(not is_same(*pair) for pair in zip(before, model.parameters(), strict=True)) == 8 - fails_itself
        assert isinstance(caught.value.__cause__, ArithmeticError)
        if has_states:
            with pytest.raises(StateOffloadError, match=r"they are lost\. Load a checkpoint"):
                optimizer.step()
            optimizer.load_state_dict(saved)
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, device, range(1), states=states)


@pytest.mark.parametrize("is_bounded", [False, True])
def test_the_backward_waits_for_steps_only_where_too_much_is_held(device: Any, monkeypatch: Any, is_bounded: bool) -> None:
    model, optimizer = make_training(device, fused=True)
    largest = max(parameter.nbytes for parameter in model.parameters())
    held_bytes, waits, waits_at_hooks = list[int](), list[Any](), list[int]()
    if is_bounded:
        monkeypatch.setattr(in_backward, "_HELD_BYTES", largest)
    with offload(optimizer, device, when="backward") as states:
        train(model, optimizer, device, range(2), states=states)
        steps, wait_event, current = states._in_backward, device.wait_event, device.current_stream()
        assert steps is not None

        def note(_: torch.Tensor) -> None:
            held_bytes.append(sum(gradient.nbytes for _, _, (gradient, *_) in steps._held))
            waits_at_hooks.append(len(waits))

        def note_wait(stream: Any, event: Any) -> None:
            waits.extend([event] if stream == current else [])
            wait_event(stream, event)

        hooks = [parameter.register_post_accumulate_grad_hook(note) for parameter in model.parameters()]
        monkeypatch.setattr(device, "wait_event", note_wait)
        model(batch(device, 2)).square().mean().backward()
        for hook in hooks:
            hook.remove()
        assert not steps._held
        assert len(waits) > waits_at_hooks[-1]
        if is_bounded:
            assert 0 < max(held_bytes) <= largest
            assert waits_at_hooks[-1] > 0
        else:
            assert max(held_bytes) > largest
            assert waits_at_hooks[-1] == 0


def test_interrupt_when_a_backward_ends_lets_no_gradient_go_ahead_of_the_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make_training(device := ReferenceDevice(), fused=True)
    with offload(optimizer, device, when="backward") as states:
        train(model, optimizer, device, range(2), states=states)
        waits, wait_event, current = list[Any](), device.wait_event, device.current_stream()

        def wait(stream: Any, event: Any) -> None:
            waits.extend([event] if stream == current else [])
            if len(waits) == 2:
                raise KeyboardInterrupt
            wait_event(stream, event)

        loss = model(batch(device, 2)).square().mean()
        with monkeypatch.context() as patch:
            patch.setattr(device, "wait_event", wait)
            with pytest.raises(KeyboardInterrupt):
                loss.backward()
        assert len(waits) == 2 + 8 + 1  # those of all gradients but the first, and of the stream for steps, are made again


@pytest.mark.parametrize("options", [{"when": "backward"}, {"overlap_forward": True}], ids=str)
def test_a_failed_step_on_the_host_is_told_of_though_an_interrupt_came_first(monkeypatch: Any, options: Any) -> None:
    model, optimizer = make_training(device := ReferenceDevice(), FailsOnHost)

    def interrupted(self: Any, piece: Any) -> None:
        self.settle()
        raise KeyboardInterrupt

    with offload(optimizer, device, update="host", **options) as states:
        optimizer.told["fails"] = 1
        with monkeypatch.context() as patch:
            patch.setattr(host_steps.HostSteps, "join", interrupted)
            with pytest.raises(KeyboardInterrupt):
                train(model, optimizer, device, range(2), states=states)
        with pytest.raises(StateOffloadError, match=r"the step of .* on the host has failed: ArithmeticError: no"):
            optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, device, range(2), states=states)


@pytest.mark.parametrize("call", ["close", "step", "wait"])
def test_backward_that_fails_while_a_thread_of_the_engine_is_at_a_node(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later code waits for that thread, which may be about to step a parameter."""
    device, log = ReferenceDevice(), list[str]()
    model, optimizer = make_training(device)

    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError("the test's own")

    with offload(optimizer, device, when="backward") as states:
        late = LateThread(monkeypatch)
        handle = list(model.parameters())[2].register_hook(fail)
        with pytest.raises(ArithmeticError):
            model(batch(device, 0)).square().mean().backward()
        handle.remove()
        late.leave(lambda: log.append("node"), after_s=0.02)
        {"close": states.close, "step": optimizer.step, "wait": states.wait}[call]()
        log.append("next")
        late.join()

    assert log == ["node", "next"]


@pytest.mark.parametrize("update", ["device", "host"])
def test_group_that_comes_between_the_backward_and_its_step(update: str) -> None:
    device = ReferenceDevice()
    outcomes = []
    for opens in (True, False):
        model = make_net(device)
        added = model.layers[0].weight
        optimizer = torch.optim.AdamW((item for item in model.parameters() if item is not added), lr=1e-2, fused=True)
        with offload(optimizer, device, when="backward", update=update) if opens else nullcontext():
            for number in range(3):
                model(batch(device, number)).square().mean().backward()
                if number == 1:
                    optimizer.add_param_group({"params": [added], "lr": 1e-3})
                optimizer.step()
                optimizer.zero_grad()
        outcomes.append(list(model.parameters()))

    assert all(map(torch.equal, *outcomes))


def test_a_replica_is_refused(tmp_path: Any) -> None:
    """`DistributedDataParallel` reduces gradients when they are complete: behind the step that would have used them."""
    device = ReferenceDevice()
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = make_net(device)
        replica = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        states = offload(optimizer, device, when="backward")
        with pytest.raises(StateOffloadError, match="is trained within DistributedDataParallel"):
            replica(batch(device, 0))
        states.close()
        assert_same(before, [parameter.detach() for parameter in model.parameters()])
        with offload(optimizer, device):
            replica(batch(device, 0)).square().mean().backward()
            optimizer.step()
    finally:
        torch.distributed.destroy_process_group()


class _Crossed(nn.Module):
    """Blocks whose gradients don't come in reverse order: each block calls its last-made layer first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(5)) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            for number in (3, 0, 4, 1, 2):
                x = x + block[number](x).tanh()
        return x


def test_pieces_come_to_slots_by_turns_in_the_order_of_the_backward(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _Crossed().to(device.torch_device)
    optimizer = torch.optim.AdamW(model.parameters())
    came: list[StateSlot] = []
    fetch = StateSlots.fetch
    monkeypatch.setattr(StateSlots, "fetch", lambda self, piece, span: came.append(self.of(piece)) or fetch(self, piece, span))
    with offload(optimizer, device, when="backward") as states:
        for _ in range(3):
            came.clear()
            model(torch.randn(4, 16, device=device.torch_device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        num_slots = len(states.plan.slot_bytes)
    assert num_slots == 4
    assert len(came) == 30
    assert all(len(set(came[start : start + num_slots])) == num_slots for start in range(30 - num_slots + 1))


def test_groups_that_are_copied_behind_the_backward_are_written_to_once(device: Device) -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1
                group["lr"] = 0.1 * group["count"]
            return super().step(closure)

    def trained(is_offloaded: bool) -> tuple[int, list[torch.Tensor]]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device.torch_device)
        optimizer = Counting(net.parameters(), lr=0.1)
        with offload(optimizer, device, when="backward") if is_offloaded else nullcontext():
            for _ in range(4):
                net(torch.ones(2, 4, device=device.torch_device)).square().mean().backward()
                optimizer.param_groups = [dict(group) for group in optimizer.param_groups]
                optimizer.step()
                optimizer.zero_grad()
        return optimizer.param_groups[0]["count"], [parameter.detach() for parameter in net.parameters()]

    (num_plain, plain), (num_steps, parameters) = trained(False), trained(True)

    assert num_steps == num_plain == 4
    assert all(map(torch.equal, parameters, plain))


FAILING_WAYS: dict[str, dict[str, Any]] = {update: {"update": update} for update in ("device", "host")}
FAILING_WAYS |= {"disk": {"disk": ReferenceDisk()}, "layered": {"streams": True}, "layered without states": {"streams": True}}
LOOPS = ["zeroed ahead", "filled with zeros ahead", "zeroed behind", "never zeroed"]


class Failing(Stack):
    """Its backward fails behind the second layer, if told so."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](self.stem(x)))
        if self.fails:
            x.register_hook(_fail)
        return self.head(self.layers[2](x))


def _train(model: Failing, optimizer: Any, device: Device, loop: str, *, is_plain: bool) -> None:
    (batch,) = inputs(device, 1)
    for step in range(5):
        if loop == "zeroed ahead" or is_plain:
            optimizer.zero_grad()
        elif loop == "filled with zeros ahead":
            optimizer.zero_grad(set_to_none=False)
        model.fails = step == 2
        with contextlib.suppress(ArithmeticError):
            model(batch + step / 10).square().mean().backward()
            optimizer.step()
            if loop == "zeroed behind":
                optimizer.zero_grad()
        if is_plain and model.fails:
            optimizer.step()


@pytest.mark.parametrize("make", [partial(torch.optim.AdamW, lr=1e-2), ScheduleFree], ids=["adamw", "schedule free"])
@pytest.mark.parametrize("loop", [LOOPS[0], *(pytest.param(loop, marks=pytest.mark.slow) for loop in LOOPS[1:])])
@pytest.mark.parametrize("way", FAILING_WAYS)
def test_loop_goes_on(way: str, loop: str, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    device, options = ReferenceDevice(), dict(FAILING_WAYS[way])
    torch.manual_seed(0)
    model = Failing(3)
    plain = copy.deepcopy(model)
    plain_optimizer = make(plain.parameters())
    _train(plain, plain_optimizer, device, loop, is_plain=True)
    with contextlib.ExitStack() as stack:
        optimizer: Any = None
        if options.pop("streams", False):
            if way == "layered without states" and make is ScheduleFree:
                pytest.skip("it keeps state in its groups, which LayerOffload refuses")
            layers = memkit.LayerOffload(model, train="fused", optimizer=make, device=device, offload_ratio=0.5, num_slots=2)
            optimizer = stack.enter_context(layers).optimizer
        else:
            optimizer = make(model.parameters())
        if way != "layered without states":
            stack.enter_context(offload(optimizer, device, when="backward", **options))
        _train(model, optimizer, device, loop, is_plain=False)
    assert_same_training(plain, plain_optimizer, model, optimizer)
    assert not device.races


@pytest.mark.parametrize("update", ["device", "host"])
def test_gradients_that_are_zeroed_are_of_another_step_where_no_forward_of_a_module_runs(update: str) -> None:
    weights = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizer = torch.optim.SGD(weights, lr=0.5, momentum=0.9)

    def loss(fails: bool = False) -> Tensor:
        found = weights[0] * 2
        if fails:
            found.register_hook(_fail)
        return (found.square() * weights[1]).sum()

    with offload(optimizer, ReferenceDevice(), when="backward", update=update):
        with pytest.raises(ArithmeticError):
            loss(fails=True).backward()
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    assert weights[1].tolist() == pytest.approx([-4.8] * 4)


def test_another_backward_of_gradients_that_are_not_zeroed_is_refused() -> None:
    weights = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    with offload(torch.optim.SGD(weights), ReferenceDevice(), when="backward"):
        found = weights[0] * 2
        found.register_hook(_fail)
        with pytest.raises(ArithmeticError):
            (found + weights[1]).sum().backward()
        with pytest.raises(StateOffloadError, match="was stepped within an earlier backward of this step"):
            weights[1].sum().backward()
