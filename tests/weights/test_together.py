"""Streamed layers beside memkit's other features and those of torch: bit for bit the plain run."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import memkit
from memkit.activations.offloading.scheduled import ScheduledForward
from memkit.activations.saved.records import Ledger, Record
from memkit.activations.saved.state import offload_states
from memkit.core.owners import owner_of
from memkit.device import Device
from memkit.plan import copies
from memkit.weights.chunks import LayerChunk
from memkit.weights.slots import Slot
from memkit.weights.streaming import SavedWeight, Streamer
from tests.weights.cases import (
    RUNS,
    TRAIN,
    WIDTH,
    Block,
    Result,
    Stack,
    assert_same,
    compare,
    inputs,
    only_lora,
    results,
    run_step,
    stack,
    streamed,
)
from tests.weights.wrapped import BLOCKS as WRAPPED

pytestmark = pytest.mark.slow

Context = Callable[[Device], AbstractContextManager[object]]


def _offload(device: Device) -> AbstractContextManager[object]:
    return memkit.CPUOffload(1.0, min_bytes=0, device=device)


def _recompute_half(device: Device) -> AbstractContextManager[object]:
    return memkit.Rematerialize(0.5, min_bytes=0, device=device)


def _offload_and_recompute(device: Device) -> AbstractContextManager[object]:
    stack = ExitStack()
    stack.enter_context(_offload(device))
    stack.enter_context(_recompute_half(device))
    return stack


def _user_hooks(_: Device) -> AbstractContextManager[object]:
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor)


CONTEXTS: dict[str, Context] = {
    "offload": _offload,
    "recompute": _recompute_half,
    "offload and recompute": _offload_and_recompute,
    "hooks of the user": _user_hooks,
    "save on cpu": lambda _: torch.autograd.graph.save_on_cpu(),
    "nothing": lambda _: nullcontext(),
}


def _step_in(context: Context, device: Device) -> Callable[[nn.Module, list[Tensor]], Result]:
    """Return a step whose forwards run in a context if their model streams."""

    def step(model: nn.Module, batches: list[Tensor]) -> Result:
        outputs = []
        for batch in batches:
            with context(device) if model._forward_hooks else nullcontext():
                output = model(batch)
                loss = output.square().mean()
            loss.backward()
            outputs.append(output)
        return results(model, outputs)

    return step


@pytest.mark.covering(2)
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("block", ["plain", *WRAPPED])
@pytest.mark.parametrize("train", TRAIN)
@pytest.mark.parametrize("context", CONTEXTS)
def test_contexts_around_forwards(context: str, train: str, block: str, slots: int, device: Device) -> None:
    model = stack(train, 6, **({"block": WRAPPED[block]} if block in WRAPPED else {}))

    compare(model, device, step=_step_in(CONTEXTS[context], device), num_steps=3, num_slots=slots, **TRAIN[train])


@pytest.mark.filterwarnings("ignore:.*budget of 256 bytes cannot be kept to")
def test_recompute_where_an_op_returns_a_weight(device: Device) -> None:
    class Returning(Block):
        def forward(self, x: Tensor) -> Tensor:
            up = self.up.weight.detach().dequantize()  # that of a plain tensor is itself, and no view of it
            return super().forward(x + (x @ up.t()).tanh() @ self.down.weight.t())

    step = _step_in(lambda device: memkit.Rematerialize("256 B", min_bytes=0, device=device), device)
    compare(only_lora(Stack(block=Returning)), device, step=step, num_steps=3, offload_ratio=1.0, num_slots=2)


@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context")  # what it saves itself goes past all hooks
def test_selective_checkpoints(device: Device) -> None:
    products = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    save_products = functools.partial(create_selective_checkpoint_contexts, products)

    def run(layers: nn.ModuleList, x: Tensor) -> Tensor:
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False, context_fn=save_products)
        return x

    compare(only_lora(Stack(run=run)), device, offload_ratio=1.0, num_slots=2)


def test_hooks_outside_are_given_no_weights_that_stream(device: Device) -> None:
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    model = only_lora(Stack()).to(device.torch_device)
    with memkit.LayerOffload(model, offload_ratio=1.0, num_slots=2, device=device):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(inputs(device)[0])

        assert packed
        assert all(owner_of(tensor.untyped_storage()) is None for tensor in packed)


def test_hooks_of_the_user_inside_of_a_layer_that_keep_what_they_are_given(device: Device) -> None:
    """They hold the slot itself, which stays in use: exact, and an overflow."""

    class Hooked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
                return super().forward(x)

    model = only_lora(Stack(4, block=lambda: Hooked(WIDTH, WIDTH)))

    stats = compare(model, device, offload_ratio=1.0, num_slots=2)

    assert stats.num_overflows > 0


def test_profile_of_a_model_that_streams(device: Device) -> None:
    with streamed(only_lora(Stack()), device, num_slots=2) as (model, plain, batches, _):
        for where in (None, "meta"):
            report = memkit.profile_memory(model, batches[0], backward=True, device=where, print_table=False)
            expected = memkit.profile_memory(plain, batches[0], backward=True, device=where, print_table=False)
            assert (report.activation_bytes, report.param_bytes) == (expected.activation_bytes, expected.param_bytes)

        assert_same(run_step(model, batches), run_step(plain, batches))


def test_what_stands_for_weights_holds_no_bytes(device: Device) -> None:
    model = only_lora(Stack()).to(device.torch_device)
    known = set(map(id, model.parameters()))
    with memkit.LayerOffload(model, offload_ratio=1.0, num_slots=2, device=device) as offload:
        loss = model(inputs(device)[0]).sum()
        found = [saved for saved in gc.get_objects() if type(saved) is SavedWeight and id(saved[1]) in known]
        assert len(found) > 6
        for saved in found:
            assert [id(part) for part in saved if isinstance(part, Tensor)] == [id(saved[1])]
            assert owner_of(saved[1].untyped_storage()) is None
        loss.backward()

        assert offload.stats().num_overflows == 0


class _CheckpointInside(Block):
    """Checkpoints a part of its own forward, so that its modules run again in the backward without it, and use its weight."""

    use_reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        forward = super().forward
        return x + checkpoint(lambda x: forward(x) * self.scale, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_inside_of_a_layer_finds_its_weights_in_a_slot(use_reentrant: bool, device: Device) -> None:
    model = only_lora(Stack(4, block=_CheckpointInside)).to(device.torch_device)
    for layer in model.layers:
        layer.use_reentrant = use_reentrant
    plain, batches = copy.deepcopy(model), inputs(device)
    with memkit.LayerOffload(model, offload_ratio=1.0, num_slots=2, device=device) as offload:
        places = []
        for layer in model.layers:
            layer.up.register_forward_pre_hook(
                lambda module, _: places.append(offload._streams.ring.at(module.weight.untyped_storage()) is not None)
            )
        for _ in range(2):
            assert_same(run_step(model, batches), run_step(plain, batches))

        assert len(places) == 2 * 2 * 2 * 4
        assert all(places)


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("run", ["in order", "checkpoint"])
@pytest.mark.parametrize("last", [1, 4])  # decided as it goes, and by a schedule
def test_what_is_needed_sooner_goes_first(
    run: str, slots: int, last: int, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and activations come back on one lane: none is put there past another that the backward needs before it."""
    use_orders: list[tuple[int, bool]] = []
    fetch_layer, fetch_record = Streamer._fetch, Ledger.fetch

    def note_layer(self: Streamer, chunk: LayerChunk, slot: Slot) -> None:
        use_orders.append((chunk.use_order, True))
        fetch_layer(self, chunk, slot)

    def note_record(self: Ledger, record: Record) -> None:
        fetch_record(self, record)
        use_orders.append((record.use_order, False))

    def note_batch(self: ScheduledForward) -> bool:
        assert self.use_orders is not None
        use_orders.append((self._next_use_order(self.use_orders), False))
        return fetch_batch(self)

    fetch_batch = ScheduledForward._fetch_next
    monkeypatch.setattr(copies, "BATCH_BYTES", 1)
    model = only_lora(Stack(8, run=RUNS[run])).to(device.torch_device)
    with memkit.LayerOffload(model, offload_ratio=1.0, num_slots=slots, device=device):
        for step in range(last + 1):
            with memkit.CPUOffload(1.0, tag="order", min_bytes=0, device=device):
                loss = model(inputs(device)[0]).square().mean()
            (window,) = offload_states["order"].windows()
            assert (window.scheduled is not None) == (step >= 2)
            if step == last:
                monkeypatch.setattr(ScheduledForward, "_fetch_next", note_batch)
                monkeypatch.setattr(Streamer, "_fetch", note_layer)
                monkeypatch.setattr(Ledger, "fetch", note_record)
            loss.backward()
    memkit.reset("order")

    assert sum(is_layer for _, is_layer in use_orders) == 8 - slots
    assert sum(not is_layer for _, is_layer in use_orders) > 4
    for (use_order, is_layer), (later, is_later_layer) in itertools.combinations(use_orders, 2):
        assert is_layer == is_later_layer or later < use_order
