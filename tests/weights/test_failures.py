"""Whatever fails around streamed weights: they are whole in host memory, and the next step works."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.core import backwards, torch_private
from memkit.core.hooks import innermost_pack, stacked_owners
from memkit.core.owners import owner_of
from memkit.device import Device, ReferenceDevice
from memkit.transfer import host_memory
from memkit.weights import forwards
from memkit.weights.fused import _Sum
from memkit.weights.gradients import _LayerGradients
from tests.engine import LateThread
from tests.refusing import PinLimit
from tests.weights.cases import (
    TRAIN,
    Block,
    FailsBackward,
    Stack,
    assert_same,
    checkpointed,
    in_order,
    inputs,
    results,
    run_step,
    stack,
    streamed,
)


class ModelError(Exception):
    pass


class Failing(Block):
    """Raises behind its first half if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        half = super().forward(x)
        if self.error is not None:
            raise self.error
        return super().forward(half)


class Case:
    """A model with streamed layers, and a plain copy of it."""

    def __init__(self, device: Device, *, slots: int = 2) -> None:
        self.model = stack(block=Failing).to(device.torch_device)
        self.plain = copy.deepcopy(self.model)
        self.batches = inputs(device)
        self.offload = memkit.LayerOffload(self.model, offload_ratio=1.0, num_slots=slots, device=device)

    def assert_weights_are_whole(self) -> None:
        for (name, found), expected in zip(self.model.named_parameters(), self.plain.parameters(), strict=True):
            assert torch.equal(found.cpu(), expected.cpu()), name
            assert owner_of(found.untyped_storage()) is None, name

    def assert_next_step_works(self) -> None:
        self.model.zero_grad()
        self.plain.zero_grad()
        assert_same(run_step(self.model, self.batches), run_step(self.plain, self.batches))
        assert innermost_pack() is None
        assert not stacked_owners()
        self.assert_weights_are_whole()
        assert self.offload.stats().slot_bytes == sum(self.offload.plan.slot_bytes)


@contextmanager
def _layer_fails(case: Case, error: BaseException) -> Iterator[None]:
    case.model.layers[1].error = error
    yield
    case.model.layers[1].error = None


@contextmanager
def _backward_fails(case: Case, error: BaseException) -> Iterator[None]:
    def run(layers: nn.ModuleList, x: Tensor) -> Tensor:
        return in_order(layers[2:], FailsBackward.apply(in_order(layers[:2], x), error))

    with mock.patch.object(case.model, "_run", run):
        yield


@contextmanager
def _recomputation_fails(case: Case, error: BaseException) -> Iterator[None]:
    def run(layers: nn.ModuleList, x: Tensor) -> Tensor:
        x = checkpointed(False)(layers, x)
        layers[1].error = error
        return x

    with mock.patch.object(case.model, "_run", run):
        yield
    case.model.layers[1].error = None


def _forbidden(*_: object) -> AbstractContextManager[object]:
    return torch.autograd.graph.disable_saved_tensors_hooks("on purpose")


def _hook(name: str, *, closes: bool = False, **options: Any) -> Callable[..., AbstractContextManager[None]]:
    @contextmanager
    def entered(case: Case, error: BaseException) -> Iterator[None]:
        def fail(*_: object) -> None:
            if not closes:
                raise error
            case.offload.close()

        handle = getattr(case.model.layers[1], name)(fail, **options)
        yield
        handle.remove()

    return entered


FAILURES: dict[str, tuple[Callable[[Case, BaseException], AbstractContextManager[object]], str]] = {
    "a layer": (_layer_fails, "on purpose"),
    "a hook ahead": (_hook("register_forward_pre_hook"), "on purpose"),
    "a hook ahead of ours": (_hook("register_forward_pre_hook", prepend=True), "on purpose"),
    "a hook behind": (_hook("register_forward_hook"), "on purpose"),
    "hooks are forbidden": (_forbidden, "on purpose"),
    "close in a forward": (_hook("register_forward_hook", closes=True), "called within a forward"),
    "a backward": (_backward_fails, "on purpose"),
    "a recomputation": (_recomputation_fails, "on purpose"),
    "close in a backward": (_hook("register_full_backward_hook", closes=True), "called within a backward"),
}


@pytest.mark.core(1)
@pytest.mark.covering(2)
@pytest.mark.parametrize("is_written_next", [False, True])
@pytest.mark.parametrize("error", [ModelError("on purpose"), KeyboardInterrupt("on purpose")], ids=["exception", "interrupt"])
@pytest.mark.parametrize(
    ("failure", "is_sampling"),
    [*((name, False) for name in FAILURES), ("a layer", True), ("a hook ahead", True), ("close in a forward", True)],
)
def test_next_step_works(failure: str, is_sampling: bool, error: BaseException, is_written_next: bool, device: Device) -> None:
    case, (fails, message) = Case(device), FAILURES[failure]
    own = RuntimeError if failure == "hooks are forbidden" else type(error)
    kind = memkit.errors.LayerOffloadError if "close" in failure else own
    with case.offload:
        for _ in range(2):  # while a step is timed, and later
            with fails(case, error), torch.set_grad_enabled(not is_sampling), pytest.raises(kind, match=message):
                case.model(case.batches[0]).sum().backward()
            for tested in (case.model, case.plain) if is_written_next else ():
                with torch.no_grad():
                    tested.layers[1].up.weight.mul_(2)

            case.assert_next_step_works()
    assert innermost_pack() is None


@pytest.mark.parametrize("error", [ModelError("on purpose"), KeyboardInterrupt("on purpose")], ids=["exception", "interrupt"])
def test_next_step_works_behind_a_recomputation_in_another_thread(error: BaseException, device: Device) -> None:
    """The engine has a thread for each device, in which nothing of memkit need run before the next forward in the caller's."""
    case, backward = Case(device), Tensor.backward
    with (
        ThreadPoolExecutor(1) as pool,
        case.offload,
        mock.patch.object(Tensor, "backward", lambda loss: pool.submit(backward, loss).result()),
    ):
        with _recomputation_fails(case, error), pytest.raises(type(error), match="on purpose"):
            case.model(case.batches[0]).sum().backward()
        with torch.no_grad():
            for tested in (case.model, case.plain):
                tested.layers[1].up.weight.mul_(2)

        case.assert_next_step_works()


class Waiting:
    """A forward in a thread of its own, which waits in the middle of a layer until it is told to go on."""

    def __init__(self, case: Case, layer: int = 1) -> None:
        self.found: list[Tensor] = []
        self._entered, self._goes_on = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(case,))
        self._handle = case.model.layers[layer].up.register_forward_pre_hook(self._wait)

    def _run(self, case: Case) -> None:
        with torch.no_grad():
            self.found.append(case.model(case.batches[0]))

    def _wait(self, *_: Any) -> None:
        if threading.current_thread() is self._thread:
            self._entered.set()
            assert self._goes_on.wait(300)

    def __enter__(self) -> Waiting:
        self._thread.start()
        assert self._entered.wait(300)
        return self

    def __exit__(self, *_: object) -> None:
        self._goes_on.set()
        self._thread.join()
        self._handle.remove()


@pytest.mark.parametrize("is_sampling", [False, True])
@pytest.mark.parametrize("part", ["", "layers.1", "layers.2", "layers.3.up"])
def test_forward_while_one_in_another_thread_is_going_on(part: str, is_sampling: bool, device: Device) -> None:
    case = Case(device)
    with case.offload:
        refused = pytest.raises(memkit.errors.LayerOffloadError, match=r"a forward of Stack began .*one thread at a time")
        with Waiting(case) as waiting:
            for _ in range(2):
                with refused, torch.set_grad_enabled(not is_sampling):
                    case.model.get_submodule(part)(case.batches[1])

        assert torch.equal(waiting.found[0], case.plain(case.batches[0]))
        case.assert_next_step_works()


@pytest.mark.parametrize("error", [ModelError("a layer"), SystemExit("a layer")], ids=["exception", "interrupt"])
@pytest.mark.parametrize("lives", [False, True])
def test_forward_that_failed_in_another_thread_locks_nobody_out(lives: bool, error: BaseException, device: Device) -> None:
    case, is_over, ends = Case(device), threading.Event(), threading.Event()

    def run() -> None:
        try:
            case.model(case.batches[0])
        except (ModelError, SystemExit):
            is_over.set()
            assert not lives or ends.wait(300)

    with case.offload:
        case.model.layers[1].error = error
        thread = threading.Thread(target=run)
        thread.start()
        assert is_over.wait(300)
        if not lives:
            thread.join()
        case.model.layers[1].error = None
        case.assert_next_step_works()
        ends.set()
        thread.join()


def test_recomputation_while_a_forward_in_another_thread_is_going_on(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the engine's own threads do for CUDA, whose forwards are none of those that the user began."""
    case = Case(device)
    names = {name: getattr(torch_private, name) for name in ("functorch_stack", "top_saved_tensor_hooks")}
    with case.offload, Waiting(case), monkeypatch.context() as patched:
        patched.setattr(forwards, "torch_private", SimpleNamespace(**names, backward_task=lambda: 7))
        case.model.layers[3](case.batches[0])


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("train", TRAIN)
def test_backward_that_fails_while_a_thread_of_the_engine_is_at_a_node(
    train: str, closes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes next waits for that thread, which may be about to add to a gradient, or to have a layer lie in a slot."""
    device, error = ReferenceDevice(), ModelError("a backward")
    batches, log, model = inputs(device), list[str](), stack(train)
    models = model, copy.deepcopy(model)
    offloads = [memkit.LayerOffload(one, offload_ratio=1.0, device=device, **TRAIN[train]) for one in models]

    def fails(one: nn.Module, batch: Tensor) -> None:
        handle = one.get_submodule("layers.1").register_forward_hook(lambda *given: FailsBackward.apply(given[-1], error))
        with pytest.raises(ModelError, match="a backward"):
            one(batch).square().mean().backward()
        handle.remove()

    def at_a_node() -> None:
        log.append("node")
        late_layer = model.get_submodule("layers.2")
        chunk = next(chunk for chunk in offloads[0]._chunks if chunk.module is late_layer)
        log.extend("lent" for _ in chunk.uses)
        for parameter in late_layer.parameters():
            if parameter.requires_grad and train == "host":
                parameter.grad = torch.ones_like(parameter)

    run_step(models[0], batches[:1])
    run_step(models[1], batches[:1])
    with monkeypatch.context() as patch:
        late = LateThread(patch)
        fails(models[0], batches[0])
        late.leave(at_a_node, after_s=0.02)
        if closes:
            offloads[0].close()
        else:
            found = models[0](batches[1])
        log.append("next")
        late.join()
    fails(models[1], batches[0])

    assert log == ["node", "lent", "next"]
    if closes:
        offloads[1].close()
    else:
        assert torch.equal(found, models[1](batches[1]))
    assert_same(results(models[0], []), results(models[1], []))
    assert_same(run_step(models[0], batches), run_step(models[1], batches))
    assert_same(models[0].state_dict(), models[1].state_dict())
    for offload in offloads:
        offload.close()
    device.synchronize()
    assert not device.races


def test_forward_that_a_backward_in_another_thread_waits_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than to wait for ever."""
    found = list[BaseException]()

    def run_beside(_: Tensor) -> None:
        def run() -> None:
            try:
                model(batches[1])
            except memkit.errors.LayerOffloadError as error:
                found.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(300)
        assert not thread.is_alive()

    monkeypatch.setattr(backwards, "_MOST_S", 0.05)
    with streamed(Stack(4), ReferenceDevice(), train="host") as (model, plain, batches, _):
        hidden: list[Tensor] = []
        handle = model.get_submodule("layers.1").register_forward_hook(lambda *given: hidden.append(given[-1]))
        loss = model(batches[0]).square().mean()
        hidden[0].register_hook(run_beside)
        loss.backward()
        handle.remove()
        plain(batches[0]).square().mean().backward()
        assert_same(results(model, []), results(plain, []))
        assert_same(run_step(model, batches), run_step(plain, batches))

    assert ["while a backward in another was going on" in str(error) for error in found] == [True]


@pytest.mark.parametrize("is_backward", [False, True])
def test_device_has_no_room_for_an_overflow(is_backward: bool, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    class Returning(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x), self.weight.t()

    def allocate(device: Device, num_bytes: int) -> torch.UntypedStorage:
        raise torch.OutOfMemoryError("no room")

    model = Stack(4, block=lambda: Returning(16, 16)).to(device.torch_device)
    model.requires_grad_(False).stem.requires_grad_()
    x = model.stem(inputs(device)[0])
    expected = model.layers[2](model.layers[1](model.layers[0](x)[0])[0])[0].cpu()

    with memkit.LayerOffload(model, offload_ratio=1.0, num_slots=1, device=device):
        if is_backward:
            y = model.layers[1](model.layers[0](x)[0])[0]
        kept = model.layers[2](x)[1]
        with monkeypatch.context() as patch:
            patch.setattr(type(device), "allocate", allocate)  # of a GPU the first object that stood for it may be asked
            with pytest.raises(torch.OutOfMemoryError, match="no room"):
                y.sum().backward() if is_backward else model.layers[1](x)
        assert owner_of(model.layers[1].weight.untyped_storage()) is None
        del kept

        found = model.layers[2](model.layers[1](model.layers[0](x)[0])[0])[0]
        assert torch.equal(found.cpu(), expected)
        found.sum().backward()


def _no_host_memory(_: Device, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    patch.setattr(host_memory, "available_bytes", lambda: 1024)
    return {}


def _no_device_memory(device: Device, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    allocate, num_left = type(device).allocate, iter(range(2))

    def allocate_once(device: Device, num_bytes: int) -> torch.UntypedStorage:
        if next(num_left):
            raise torch.OutOfMemoryError("no room")
        return allocate(device, num_bytes)

    patch.setattr(type(device), "allocate", allocate_once)
    return {}


def _nothing_pinned(device: Device, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    PinLimit(device, patch, 0)  # the tests have warnings raise
    return {}


BEGINNINGS: dict[str, tuple[Callable[[Device, pytest.MonkeyPatch], dict[str, Any]], type[Exception], str]] = {
    "a limit": (lambda *_: {"host_limit_bytes": 1024}, memkit.errors.HostMemoryError, "host memory is needed"),
    "host memory": (_no_host_memory, memkit.errors.HostMemoryError, "available memory"),
    "device memory": (_no_device_memory, torch.OutOfMemoryError, "no room"),
    "a warning": (_nothing_pinned, UserWarning, "the system did not pin"),
}


@pytest.mark.parametrize("what", BEGINNINGS)
def test_what_cannot_begin_leaves_the_model_as_it_was(what: str, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    fails, error, message = BEGINNINGS[what]
    model = stack().to(device.torch_device)
    plain, batches = copy.deepcopy(model), inputs(device)
    storages = [parameter.untyped_storage()._cdata for parameter in model.parameters()]
    with monkeypatch.context() as patch:
        options = fails(device, patch)
        with pytest.raises(error, match=message):
            memkit.LayerOffload(model, offload_ratio=1.0, device=device, **options)

    if what != "device memory":  # which is taken last: layers have left, and come back
        assert [parameter.untyped_storage()._cdata for parameter in model.parameters()] == storages
    assert not [module for module in model.modules() if module._forward_hooks or module._forward_pre_hooks]
    assert not [thread for thread in threading.enumerate() if "memkit-staging" in thread.name]
    assert_same(run_step(model, batches), run_step(plain, batches))
    memkit.LayerOffload(model, offload_ratio=1.0, device=device).close()


@pytest.mark.parametrize("train", ["host", "fused"])
def test_gradient_that_is_left_to_the_end_cannot_be_handed_over(
    train: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Stack(4).to(device.torch_device)
    model, (batch,) = copy.deepcopy(plain), inputs(device, 1)
    make = functools.partial(torch.optim.SGD, lr=0.0) if train == "fused" else None
    monkeypatch.setattr(_Sum, "is_complete", lambda *_: False)  # as where another graph is alive
    monkeypatch.setattr(_LayerGradients, "has_several_graphs", lambda _: True)
    monkeypatch.setattr(_LayerGradients, "num_alive", lambda *_: 2)
    with memkit.LayerOffload(model, offload_ratio=1.0, train=train, optimizer=make, device=device) as offload:
        kind = type(offload._gradients)
        loss = model(batch).square().mean()
        with monkeypatch.context() as patch:
            patch.setattr(kind, "_take", _raise)
            with pytest.raises(torch.OutOfMemoryError, match="once"):
                loss.backward()
        taken, take = [], kind._take  # type: ignore[union-attr]

        def note(gradients: Any, made: Any, *rest: Any) -> None:
            taken.extend([made.name] if train == "fused" else [one.name for one in made])
            take(gradients, made, *rest)

        monkeypatch.setattr(kind, "_take", note)
        for _ in range(2):
            taken.clear()
            for one in (plain, model):
                one.zero_grad()
                one(batch).square().mean().backward()

            assert sorted(taken) == sorted(f"layers.{name}" for name, _ in plain.get_submodule("layers").named_parameters())
            if train == "host":
                for (name, wanted), found in zip(plain.named_parameters(), model.parameters(), strict=True):
                    assert wanted.grad is not None
                    assert found.grad is not None, name
                    assert torch.equal(found.grad.cpu(), wanted.grad.cpu()), name


def _raise(*_: object) -> None:
    raise torch.OutOfMemoryError("once")
