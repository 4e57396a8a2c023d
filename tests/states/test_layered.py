"""`StateOffload(when="backward")` on the optimizer of a `LayerOffload(train="fused")`: weights, gradients and states stream."""

from __future__ import annotations

import copy
import errno
import gc
import re
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

import memkit
from memkit.device import Device, ReferenceDevice
from memkit.device.reference import ReferenceStream
from memkit.errors import DiskError, LayerOffloadError, StateOffloadError
from memkit.plan import LayerCosts, plan_streamed_ratio
from memkit.states.in_backward import LayeredSteps
from memkit.transfer import ReferenceDisk
from memkit.weights import selection
from tests.interrupts import hooks_around
from tests.states.cases import WAYS, ScheduleFree, assert_same, assert_same_training, cut, offload
from tests.states.test_faults import ERRORS, Faulty, _failing, assert_old_or_new, snapshot
from tests.states.test_on_disk import Faults
from tests.weights.cases import RUNS, WIDTH, Block, Stack, inputs, only_lora

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
    "AdamW foreach": partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "AdamW fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "SGD": partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=0.01),
    "Adafactor": partial(torch.optim.Adafactor, lr=0.01),
    "schedule free": ScheduleFree,
}


def in_groups(make: Make) -> Make:
    """Return a maker of the optimizer in two groups, the second with another learning rate."""

    def made(parameters: Any) -> torch.optim.Optimizer:
        given = list(parameters)
        if len(given) == 1:  # asked how much state it keeps
            return make(given)
        return make([{"params": given[::2]}, {"params": given[1::2], "lr": 3e-3}])

    return made


def streamed(model: nn.Module, device: Device, make: Make = OPTIMIZERS["AdamW"], **options: Any) -> memkit.LayerOffload:
    return memkit.LayerOffload(model, train="fused", optimizer=make, device=device, **{"offload_ratio": 1.0, **options})


class Both:
    """A model whose layers stream with their states, and a plain one that must equal it after each step."""

    def __init__(
        self,
        device: Device,
        make: Make = OPTIMIZERS["AdamW"],
        *,
        model: nn.Module | None = None,
        ratio: float | str = 1.0,
        num_slots: int = 3,
        dtype: torch.dtype = torch.float32,
        plain_make: Make | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.device, self.dtype = device, dtype
        self.plain = (Stack(4) if model is None else model).to(device.torch_device, dtype)
        self.model = copy.deepcopy(self.plain)
        self.model.to("cpu")
        self.layers = streamed(self.model, device, make, offload_ratio=ratio, num_slots=num_slots)
        assert self.layers.optimizer is not None
        self.optimizer = self.layers.optimizer
        self.states = memkit.StateOffload(self.optimizer, when="backward", device=device, **options)
        trained = [parameter for parameter in self.plain.parameters() if parameter.requires_grad]
        self.plain_optimizer = (plain_make or make)(trained)
        self.plain_states: memkit.StateOffload | None = None
        if "master" in options:  # tests/states/test_master.py says what that is
            self.plain_states = offload(self.plain_optimizer, device, master=options["master"])
        self.num_steps = 0

    def batch(self) -> Tensor:
        (batch,) = inputs(self.device, 1)
        return (batch + self.num_steps / 100).to(self.dtype)

    def backward(self, model: nn.Module) -> None:
        model(self.batch()).float().square().mean().backward()

    def step(self, *, has_own: bool = False) -> None:
        """Train both for one step, and compare them."""
        batch = self.batch()
        self.num_steps += 1
        for one in (self.plain, self.model):
            one(batch).float().square().mean().backward()
        self.plain_optimizer.step()
        self.plain_optimizer.zero_grad()
        if has_own:
            self.optimizer.step()
            self.optimizer.zero_grad()
        assert_same(self.plain.state_dict(), self.model.state_dict(), f"parameters after step {self.num_steps}")

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.step()

    def assert_same_training(self) -> None:
        assert_same_training(self.plain, self.plain_optimizer, self.model, self.optimizer)

    def close(self, *, is_same: bool = True) -> None:
        if is_same:
            self.assert_same_training()
        self.states.close()
        self.layers.close()
        if self.plain_states is not None:
            self.plain_states.close()


def _each_way(names: Any) -> list[Any]:
    """Return optimizers, each in a loop with and without `step()`; a plain pytest run has one of the two."""
    alone = {"AdamW fused": True}
    ways = [(name, has_own) for name in names for has_own in (False, True)]
    return [way if alone.get(way[0]) is way[1] else pytest.param(*way, marks=pytest.mark.slow) for way in ways]


@pytest.mark.covering(2)
@pytest.mark.parametrize(("name", "has_own"), _each_way(OPTIMIZERS))
@pytest.mark.parametrize("disk", [None, pytest.param(ReferenceDisk(), marks=pytest.mark.slow)], ids=["host", "disk"])
def test_steps_are_the_plain_ones(name: str, has_own: bool, disk: memkit.Disk | None, device: Device) -> None:
    both = Both(device, in_groups(OPTIMIZERS[name]), disk=disk)
    schedulers = [StepLR(one, 3, gamma=0.5) for one in (both.plain_optimizer, both.optimizer)]
    for _ in range(12):
        both.step(has_own=has_own)
        for scheduler in schedulers:
            scheduler.step()

    both.assert_same_training()
    assert (both.states.plan.host_bytes == 0 < both.states.plan.disk_bytes) == (disk is not None)
    assert both.states.stats().num_steps == 12
    assert both.layers.stats().num_overflows == 0
    both.close()
    both.assert_same_training()


@pytest.mark.slow
def test_float32_copies_follow_what_is_written_to_host_copies(device: Device) -> None:
    both = Both(device, dtype=torch.bfloat16, master=torch.float32)
    for step in range(4):
        both.step()
        for one in (both.plain, both.model):
            one.get_submodule("layers.1.up").weight.data[step].mul_(1.5)

    both.step()
    both.close()


@pytest.mark.parametrize(
    ("run", "disk"),
    [
        pytest.param(run, disk, marks=() if run == "checkpoint" else pytest.mark.slow)
        for run in RUNS
        for disk in (None, ReferenceDisk(is_late=False))
    ],
)
def test_orders(run: str, disk: memkit.Disk | None, device: Device) -> None:
    both = Both(device, model=Stack(4, run=RUNS[run]), num_slots=1 if disk is None else 2, disk=disk)
    both.steps(3)

    both.close(is_same=False)  # unsaved
    both.assert_same_training()


def _frozen_and_tied() -> Stack:
    model = Stack(4)
    model.head = nn.Linear(WIDTH, WIDTH)
    model.head.weight = model.stem.weight
    for number, block in enumerate(model.layers):
        block.get_submodule("up").requires_grad_(number % 2 == 0)
    return model


@pytest.mark.parametrize("make", [_frozen_and_tied, lambda: only_lora(Stack(4))], ids=["tied", "lora"])
def test_frozen_and_tied_parameters(make: Callable[[], Stack], device: Device) -> None:
    """Frozen weights are read behind all steps of their layer, whose trained ones are written back ahead of that."""
    both = Both(device, model=make(), num_slots=2)
    both.steps(4)

    both.close()


@pytest.mark.parametrize("disk", [None, ReferenceDisk(seed=1, is_late=False)], ids=["host", "disk"])
@pytest.mark.parametrize("has_master", [pytest.param(False, marks=pytest.mark.slow), True])
def test_windows_of_large_parameters_hold_no_slot(has_master: bool, disk: Any, device: Device, monkeypatch: Any) -> None:
    cut(monkeypatch, numel=128)
    options: dict[str, Any] = {"master": torch.float32, "dtype": torch.bfloat16} if has_master else {}
    both = Both(device, num_slots=2, disk=disk, **options)
    assert any(len(piece.windows) > 1 for piece in both.states.plan.pieces)
    both.steps(4)

    assert both.layers.stats().num_overflows == 0
    both.close()


def test_states_are_in_host_memory_and_figures_are_true(device: Device) -> None:
    both = Both(device)
    both.steps(2)

    numel = sum(parameter.numel() for parameter in both.plain.parameters())
    stats, layers = both.states.stats(), both.layers.stats()
    assert both.states.plan.host_bytes >= 8 * numel
    assert stats.resident_bytes == 0
    assert stats.h2d_bytes == sum(piece.state_bytes for piece in both.states.plan.pieces)  # there were none at first
    assert stats.d2h_bytes == 2 * stats.h2d_bytes
    assert layers.d2h_bytes == 2 * layers.streamed_bytes
    for one, other in zip(both.plain.parameters(), both.model.parameters(), strict=True):
        entries = both.optimizer.state[other]
        assert {value.device.type for value in entries.values() if value.dim()} == {"cpu"}
        assert_same(both.plain_optimizer.state[one], entries, "states, read once the backward is over")
    both.close()


@pytest.mark.parametrize("loads", ["model, optimizer", "optimizer, model"])
@pytest.mark.parametrize("options", [{}, {"num_slots": 2, "disk": ReferenceDisk(seed=3)}], ids=["host", "disk"])
def test_loading_between_steps(device: Device, options: dict[str, Any], loads: str) -> None:
    both = Both(device, **options)
    both.steps(2)
    both.model(both.batch()).square().mean().backward()
    for what in loads.split(", "):
        if what == "model":
            both.model.load_state_dict(both.plain.state_dict())
        else:
            both.optimizer.load_state_dict(copy.deepcopy(both.plain_optimizer.state_dict()))
    both.steps(2)
    both.close()


def test_states_that_stay_on_the_device(device: Device) -> None:
    both = Both(device, device_budget="1MiB")
    both.steps(2)
    both.optimizer.load_state_dict(copy.deepcopy(both.plain_optimizer.state_dict()))
    both.step()

    assert both.states.plan.host_bytes == 0
    places = {value.device.type for entries in both.optimizer.state.values() for value in entries.values() if value.dim()}
    assert places == {device.torch_device.type}
    both.close()


@pytest.mark.slow
def test_layers_that_come_to_stay_on_the_device(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(candidates: Any, times: Any, plan: Any, **options: Any) -> Any:
        costs = [LayerCosts(name=layer.name, num_bytes=layer.num_bytes) for layer in plan.layers]
        return plan_streamed_ratio(costs, 0.5, num_slots=options["num_slots"])

    monkeypatch.setattr(selection, "plan_measured", half)
    both = Both(device, model=Stack(8), ratio="auto")
    both.steps(5)

    assert len(both.layers.plan.streamed) == 4
    both.close()


@pytest.mark.slow
def test_states_from_before_are_taken_over_and_given_back(device: Device) -> None:
    """The `StateOffload` may come and go while layers stream."""
    both = Both(device)
    both.step()
    for _ in range(2):
        both.states.close()
        both.step()
        both.states = memkit.StateOffload(both.optimizer, when="backward", device=device)
        both.step()

    both.close()
    assert all(parameter.grad is None for parameter in both.model.parameters())


def test_layers_closed_first_leave_states_that_can_be_closed(device: Device) -> None:
    both = Both(device)
    both.steps(2)
    both.layers.close()

    both.assert_same_training()
    with pytest.raises(StateOffloadError, match=r"within the backward, and that is closed\. Close the StateOffload as well"):
        both.optimizer.step()
    with pytest.raises(ValueError, match=r'"stem\.weight" is stepped by an optimizer with a StateOffload'):
        memkit.LayerOffload(both.model, offload_ratio=1.0, device=device)
    both.states.close()
    both.assert_same_training()
    streamed(both.model, device).close()


def test_nothing_is_left_once_both_are_closed() -> None:
    before = hooks_around()
    both = Both(ReferenceDevice())
    both.step()
    model = both.model
    found = [weakref.ref(one) for one in (both.states, both.layers, both.states._in_backward, both.optimizer)]
    both.close(is_same=False)
    del both
    gc.collect()

    assert [ref() for ref in found] == [None] * 4
    assert hooks_around() == before
    assert all(not weight._backward_hooks and not weight._post_accumulate_grad_hooks for weight in model.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, 'found when="step". Use when="backward"'),
        ({"when": "backward", "update": "host"}, 'found update="host". Use update="device"'),
        ({"overlap_forward": True}, "found overlap_forward=True. Leave it out"),
        ({"disk": True}, 'found when="step". Use when="backward"'),
    ],
    ids=str,
)
def test_other_ways_of_stepping_are_refused(options: dict[str, Any], message: str) -> None:
    device, model = ReferenceDevice(), Stack(2)
    if "disk" in options:
        options = {**options, "disk": ReferenceDisk()}
    with streamed(model, device, num_slots=1) as layers:
        with pytest.raises(ValueError, match=re.escape(message)):
            memkit.StateOffload(layers.optimizer, device=device, **options)
        model(inputs(device, 1)[0]).square().mean().backward()


def test_another_device_is_refused() -> None:
    elsewhere = ReferenceDevice()
    elsewhere.torch_device = torch.device("meta")
    layers = streamed(Stack(2), ReferenceDevice(), num_slots=1)
    with layers, pytest.raises(ValueError, match="needs parameters on meta; found them on cpu"):
        memkit.StateOffload(layers.optimizer, when="backward", device=elsewhere)


def test_accumulation_is_refused(device: Device) -> None:
    both = Both(device)
    with pytest.raises(StateOffloadError, match=re.escape('Use train="host", which accumulates')):
        both.states.accumulate()
    for _ in range(2):
        both.model(both.batch()).square().mean().backward()
    with pytest.raises(LayerOffloadError, match="after 2 backwards"):
        both.optimizer.step()
    both.close(is_same=False)


def test_gradient_that_no_backward_has_brought_is_refused(device: Device) -> None:
    both = Both(device)
    both.step()
    weight = both.model.get_submodule("layers.0.up").weight
    weight.grad = torch.ones_like(weight)
    with pytest.raises(StateOffloadError, match="streams, and has a gradient that no backward has brought"):
        both.optimizer.step()
    weight.grad = None
    both.optimizer.step()
    both.step()
    both.close()


def _is_behind_steps(both: Both) -> bool:
    """Tell whether the current stream has waited for all work on the stream for steps."""
    if not isinstance(both.device, ReferenceDevice):
        return True
    steps, current = both.states._in_backward, both.device.current_stream()
    assert isinstance(steps, LayeredSteps)
    assert isinstance(steps.stream, ReferenceStream)
    return all(current.clock.get(number, 0) >= count for number, count in steps.stream.clock.items())


@pytest.mark.parametrize("layer", [0, 1, 5], ids=["in part", "in its slot", "gone from there"])
def test_layer_that_was_stepped_is_used_within_the_same_backward(layer: int, device: Device) -> None:
    both = Both(device, model=Stack(6), num_slots=2)
    batch, found = both.batch(), []

    def use(_: Tensor) -> None:
        with torch.no_grad():
            found.append(both.model.get_submodule(f"layers.{layer}")(batch))

    stem = both.model.get_submodule("stem")
    handle = stem.register_forward_hook(lambda _, __, output: output.register_hook(use) and None)
    both.step()
    handle.remove()

    assert_same(found[0], both.plain.get_submodule(f"layers.{layer}")(batch))
    both.close()


def test_backward_leaves_all_behind_the_steps(device: Device) -> None:
    both = Both(device)
    were_behind = []
    stem = both.model.get_submodule("stem")
    handle = stem.register_forward_hook(
        lambda _, __, output: output.register_hook(lambda _: were_behind.append(_is_behind_steps(both))) and None
    )
    both.step()
    handle.remove()

    assert _is_behind_steps(both)
    assert were_behind == [not isinstance(device, ReferenceDevice)]
    both.close()


def test_parts_of_a_layer_are_stepped_in_backwards_of_their_own(device: Device) -> None:
    class Parts(Block):
        def forward(self, x: Tensor) -> Tensor:
            from torch.utils.checkpoint import checkpoint

            y = checkpoint(self.up, self.norm(x), use_reentrant=True)
            return x + checkpoint(self.down, y.tanh(), use_reentrant=True) + self.lora_b(self.lora_a(x))

    both = Both(device, model=Stack(3, block=Parts), num_slots=2)
    both.steps(3)

    both.close()


KINDS = {"adamw": torch.optim.AdamW, "adafactor": torch.optim.Adafactor}


class Ahead(Both):
    """The plain model is a step ahead."""

    def __init__(
        self,
        device: Device,
        kind: Any = torch.optim.AdamW,
        plain_kind: Any = None,
        *,
        has_master: bool = False,
        has_states: bool = True,
        disk: Any = None,
    ) -> None:
        options: dict[str, Any] = {"master": torch.float32, "dtype": torch.bfloat16} if has_master else {}
        make, plain_make = partial(kind, lr=1e-2), partial(plain_kind or kind, lr=1e-2)
        super().__init__(device, make, plain_make=plain_make, model=Stack(3), num_slots=2, disk=disk, **options)
        for _ in range(2 * has_states):
            self.step_plain()
        self.begin = copy.deepcopy((self.plain.state_dict(), self.plain_optimizer.state_dict()))
        self.old = snapshot(self.plain, self.plain_optimizer)
        self.step_plain()
        self.new = snapshot(self.plain, self.plain_optimizer)
        self.begin_anew()

    def begin_anew(self) -> None:
        self.model.load_state_dict(self.begin[0])
        self.optimizer.load_state_dict(copy.deepcopy(self.begin[1]))

    def step(self, **_: Any) -> None:
        self.backward(self.model)

    def step_plain(self) -> None:
        self.backward(self.plain)
        self.plain_optimizer.step()
        self.plain_optimizer.zero_grad()

    def assert_whole(self) -> int:
        """Assert that each parameter is old or new, with its states. Return how many are new."""
        with torch.no_grad():
            self.model(self.batch())  # which finishes interrupted work
        return assert_old_or_new(snapshot(self.model, self.optimizer), self.old, self.new)

    def assert_goes_on(self) -> None:
        """Assert that the next step equals that of a plain model in the same state."""
        self.plain.load_state_dict(self.model.state_dict())
        self.plain_optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        self.step()
        self.step_plain()
        self.assert_same_training()

    def close(self) -> None:
        super().close()
        self.device.synchronize()
        assert not self.device.races  # type: ignore[attr-defined]


@pytest.mark.slow
@settings(max_examples=30)
@given(
    name=st.sampled_from(sorted(KINDS)),
    at=st.integers(1, 260),
    error=st.sampled_from(ERRORS),
    has_states=st.booleans(),
    has_master=st.booleans(),
    is_cut=st.booleans(),
    disk=st.sampled_from([None, None, ReferenceDisk(), ReferenceDisk(seed=1), ReferenceDisk(is_late=False)]),
)
def test_a_fault_of_the_device(name, at, error, has_states, has_master, is_cut, disk) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if is_cut:
            cut(patch)
        device, kind = Faulty(), KINDS[name]
        trained = Ahead(device, kind, has_master=has_master, has_states=has_states, disk=disk)
        device.num_calls, device.fails_at = 0, {at: error("injected")}
        try:
            trained.step()
        except (*ERRORS, StateOffloadError, LayerOffloadError):
            device.fails_at = {}
            trained.assert_whole()
            trained.begin_anew()
        device.fails_at = {}
        trained.assert_goes_on()
        trained.close()


@pytest.mark.slow
@pytest.mark.core(1)
@pytest.mark.parametrize("is_behind", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id=""),
        pytest.param({"has_states": False}, id="new"),
        pytest.param({"has_master": True}, id="master"),
        pytest.param({"disk": ReferenceDisk()}, id="disk"),
    ],
)
@pytest.mark.parametrize("name", KINDS)
def test_a_fault_of_the_optimizer(name: str, options: dict[str, Any], is_behind: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer fails in its step of a parameter, ahead of its last line or behind it: that parameter is unchanged."""
    cut(monkeypatch)
    kind: Any = _failing(KINDS[name])
    trained = Ahead(ReferenceDevice(), kind, KINDS[name], **options)
    kind.is_behind = is_behind
    num_new = []
    for at in (1, 4, 9):
        trained.begin_anew()
        kind.num_calls, kind.fails_at = 0, {at: ArithmeticError("no")}
        with pytest.raises(ArithmeticError):
            trained.step()
        num_new.append(trained.assert_whole())
        trained.optimizer.step()
        assert trained.assert_whole() == num_new[-1]
        assert trained.layers.stats().num_overflows == 0

    assert num_new[0] == 0
    assert num_new[2] > num_new[1] > 0 or num_new[2] > 0
    trained.assert_goes_on()
    trained.close()


@pytest.mark.slow
def test_large_parameter_whose_rest_fails_as_well_is_refused_until_states_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    cut(monkeypatch)
    kind: Any = _failing(torch.optim.AdamW)
    trained = Ahead(ReferenceDevice(), kind, torch.optim.AdamW)
    number = next(n for n, piece in enumerate(reversed(trained.states.plan.pieces)) if len(piece.windows) > 1)
    kind.num_calls, kind.fails_at = 0, {number + at: ArithmeticError("no") for at in (2, 3)}
    with pytest.raises(StateOffloadError, match="The rest failed: ArithmeticError: no"):
        trained.step()
    with pytest.raises(StateOffloadError, match=r"a part of the parameter.* Load a checkpoint"):
        trained.step()

    trained.begin_anew()
    trained.assert_goes_on()
    assert trained.layers.stats().num_overflows == 0
    trained.close()


@pytest.mark.slow
@settings(max_examples=20)
@given(
    what=st.sampled_from(["read", "write"]),
    at=st.integers(0, 24),
    number=st.sampled_from([errno.EIO, errno.ENOSPC]),
    lasts=st.booleans(),
    has_states=st.booleans(),
    is_cut=st.booleans(),
    is_late=st.booleans(),
)
def test_a_disk_that_fails(what: str, at: int, number: int, lasts: bool, has_states: bool, is_cut: bool, is_late: bool) -> None:
    """Each weight is as before the step or as after it, with its states, and the next backward goes on."""
    with pytest.MonkeyPatch.context() as patch:
        if is_cut:
            cut(patch)
        faults = Faults()
        disk = ReferenceDisk(fault=faults, is_late=is_late)
        trained = Ahead(ReferenceDevice(), has_states=has_states, disk=disk)
        faults.arm(what, at, number, lasts=lasts)
        try:
            trained.step()
        except (DiskError, StateOffloadError, LayerOffloadError):
            faults.disarm()
            try:
                trained.assert_whole()
            except StateOffloadError as error:
                assert is_cut
                assert lasts
                assert "a part of the parameter" in str(error)  # noqa: PT017
                trained.begin_anew()  # its layer has left the slot: a checkpoint is loaded, as the error says
        faults.disarm()
        trained.assert_goes_on()
        trained.close()


# Layers that are stepped on the host, beside states of other parameters


def _made() -> Any:
    torch.manual_seed(0)
    return Stack(4)


def _rest_of(model: Any) -> list[nn.Parameter]:
    return [*model.stem.parameters(), *model.head.parameters()]


@pytest.mark.parametrize("way", ["device", "beside", "backward", "backward, disk"])
def test_weights_gradients_and_states_are_all_in_host_memory(device: Device, way: str) -> None:
    """Layers stream and are stepped on the host; the states of the rest pass through the device."""
    if device.torch_device.type != "cpu":
        pytest.skip("the plain steps of the layers differ from the host's in last bits")
    plain, model = _made(), _made()
    batches = inputs(device, 5)
    on_layers, on_rest = (torch.optim.AdamW(some, fused=True) for some in (plain.layers.parameters(), _rest_of(plain)))
    for batch in batches:
        plain(batch).square().mean().backward()
        for own in (on_layers, on_rest):
            own.step()
            own.zero_grad()

    with memkit.LayerOffload(model, offload_ratio=1.0, train="host", device=device):
        mine, rest = torch.optim.AdamW(model.layers.parameters(), fused=True), torch.optim.AdamW(_rest_of(model), fused=True)
        with offload(rest, device, **WAYS[way]) as states:
            for batch in batches:
                model(batch).square().mean().backward()
                for own in (mine, rest):
                    own.step()
                    own.zero_grad()
            states.wait()
            assert states.stats().host_bytes > 0
            assert (states.plan.host_bytes == 0) == ("disk" in way)
            assert_same(on_rest.state_dict()["state"], rest.state_dict()["state"])
        assert_same(on_layers.state_dict()["state"], mine.state_dict()["state"])
    assert_same([*plain.parameters()], [*model.parameters()])


def test_what_streams_is_refused(device: Device) -> None:
    model = _made()
    with memkit.LayerOffload(model, offload_ratio=1.0, train="host", device=device):
        with pytest.raises(ValueError, match=re.escape("parameter 0.0 streams by LayerOffload, and its states are in host")):
            offload(torch.optim.AdamW(model.layers.parameters(), fused=True), device)
        offload(torch.optim.AdamW(_rest_of(model), fused=True), device).close()
    offload(torch.optim.AdamW(model.to(device.torch_device).parameters(), fused=True), device).close()


@pytest.mark.parametrize("when", ["step", "backward"])
def test_what_is_stepped_within_the_backward_by_others_is_refused(device: Device, when: str) -> None:
    model = _made()

    make = partial(torch.optim.AdamW, fused=True)
    with memkit.LayerOffload(model, offload_ratio=1.0, train="fused", optimizer=make, device=device):
        for parameters in (model.layers.parameters(), _rest_of(model)):
            with pytest.raises(ValueError, match=re.escape('within the backward by LayerOffload(train="fused")')) as caught:
                offload(make(parameters), device, when=when)
            assert 'memkit.StateOffload(offload.optimizer, when="backward")' in str(caught.value)
    offload(make(model.to(device.torch_device).parameters()), device, when=when).close()


def test_layers_whose_states_are_offloaded_do_not_stream(device: Device) -> None:
    model = _made().to(device.torch_device)
    before = copy.deepcopy(model.state_dict())
    states = offload(torch.optim.AdamW(model.parameters(), fused=True), device)
    with pytest.raises(ValueError, match=re.escape('"stem.weight" is stepped by an optimizer with a StateOffload')):
        memkit.LayerOffload(model, offload_ratio=1.0, device=device)
    assert_same(before, model.state_dict())
    states.close()
    memkit.LayerOffload(model, offload_ratio=1.0, device=device).close()
