"""Steps that follow a schedule, also where they repeat in other ways: the same bits and figures as without one, in any
order."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memkit
from memkit.activations.offloading import moving_stage as steady
from memkit.activations.offloading.scheduled import ScheduledForward
from memkit.activations.saved.state import offload_states
from memkit.device import Device, ReferenceDevice
from memkit.errors import HostMemoryError
from tests.activations.cases import COMPUTATIONS, assert_same_bits, inputs_on
from tests.activations.chains import UNIT_BYTES, chain, leaf_on
from tests.activations.scheduled_steps import (
    IN_BATCHES,
    SETTINGS,
    TAG,
    Offloads,
    assert_steps_are_plain,
    batch_bytes,
    gradient_of,
    learned,
    offloads,
)
from tests.contracts.conftest import Case
from tests.contracts.test_context_orders import ORDERS

__all__ = ["batch_bytes", "offloads"]

pytestmark = [
    pytest.mark.usefixtures("batch_bytes"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),  # of the plain run as well
]


@pytest.mark.core(1)
@pytest.mark.parametrize(("ratio", "window_units"), [(1.0, 0), (0.5, 0), pytest.param(1.0, None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", COMPUTATIONS)
def test_steady_steps_have_the_same_bits_and_figures(
    offloads: Offloads, name: str, ratio: float, window_units: int | None
) -> None:
    inputs, figures = inputs_on(offloads.device.torch_device), []

    def loss_of(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return COMPUTATIONS[name](*inputs).square().mean()

    for number in range(4):
        loss_of(number).backward()
        wanted = [x.grad for x in inputs]
        for x in inputs:
            x.grad = None
        with offloads(ratio, **({} if window_units is None else {"window_units": window_units})):
            loss = loss_of(number)
        assert offloads.follows == (number >= 2)
        loss.backward()
        found = [x.grad for x in inputs]
        for x in inputs:
            x.grad = None
        del loss
        assert_same_bits([x for x in found if x is not None], [x for x in wanted if x is not None])
        offloads.device.synchronize()
        stats = memkit.stats(TAG)
        fields = set(FIGURES) - set(OF_COPIES if name == "masks" else ())
        figures.append({field: getattr(stats, field) for field in fields})
    if not isinstance(offloads.device, ReferenceDevice) or offloads.device._random is None:
        assert figures[2] == figures[3] == figures[1]


OF_COPIES = ("moved_out_bytes", "num_copies_out", "ratio_reached", "host_peak_bytes", "kept_bytes")
"""They differ if a save dies ahead of its copy: a schedule has its storage leave all the same."""
FIGURES = (
    *("seen_bytes", "unique_bytes", "kept_bytes", "moved_out_bytes", "moved_in_bytes", "num_copies_out", "num_copies_in"),
    *("served_bytes", "wasted_bytes", "window_bytes", "ratio_reached", "host_peak_bytes", "host_in_use_bytes"),
    *("live_records", "live_bytes"),
)


# Backwards


def test_backward_in_another_thread_while_the_next_forward_runs(offloads: Offloads) -> None:
    x = leaf_on(offloads.device.torch_device)
    wanted = gradient_of(chain(x, [1] * 30), x)
    for _ in range(3):
        made = [learned(offloads, lambda: chain(x, [1] * 30), window_units=4)]
        found: list[Tensor] = []
        thread = threading.Thread(target=lambda: found.append(gradient_of(made.pop(), x)))  # noqa: B023
        thread.start()
        with offloads(window_units=4):
            second = chain(x, [1] * 30)
        thread.join()
        assert_same_bits([*found, gradient_of(second, x)], [wanted] * 2)
        del second


def test_cache_of_the_allocator_is_emptied_once(offloads: Offloads, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    x = leaf_on(offloads.device.torch_device)
    monkeypatch.setattr(type(offloads.device), "empty_cache", lambda _: done.append("emptied"))

    for ratio in (1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 1.0):
        done.append("step")
        with offloads(ratio):
            y = chain(x, IN_BATCHES)
        gradient_of(y, x)

    assert done == [*["step"] * 3, "emptied", *["step"] * 4]


class Saves(torch.autograd.Function):
    """Saves a tensor that is not its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: Tensor) -> Tensor:
        ctx.save_for_backward(saved)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (saved,) = ctx.saved_tensors
        return grad * (1 if saved.device.type == "meta" else saved.to_dense().sum()), None


class Wrapping(torch.Tensor):
    """A tensor of a class of its own."""


ODD = {
    "sparse": lambda tensor: tensor.to_sparse(),
    "in rows": lambda tensor: tensor.to_sparse_csr(),
    "meta": lambda tensor: tensor.to("meta"),
    "half": lambda tensor: tensor.half(),
    "another shape": lambda tensor: tensor[:3].clone(),
    "a view": lambda tensor: torch.cat([tensor, tensor])[16:],
    "strided": lambda tensor: tensor.t(),
    "expanded": lambda tensor: tensor[:1].expand(16, 16),
    "leaf": lambda tensor: tensor.requires_grad_(),
    "parameter": lambda tensor: torch.nn.Parameter(tensor),
    "subclass": lambda tensor: tensor.as_subclass(Wrapping),
    "conjugated": lambda tensor: torch.complex(tensor, tensor).conj().imag,
    "empty": lambda tensor: tensor[:0].clone(),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("place", [2, *[pytest.param(place, marks=pytest.mark.slow) for place in (0, 1, 3, 4)]])
@pytest.mark.parametrize("kind", ODD)
def test_save_of_another_kind_leaves_the_schedule(offloads: Offloads, kind: str, place: int) -> None:
    torch_device = offloads.device.torch_device
    x = leaf_on(torch_device)

    def forward(number: int) -> Tensor:
        y = x
        generator = torch.Generator().manual_seed(number)
        for index in range(5):
            y = y.sin()
            odd = ODD[kind] if index == place and number == 3 else torch.clone
            y = Saves.apply(y, odd(torch.rand(16, 16, generator=generator).to(torch_device)))
        return y.sin()

    assert_steps_are_plain(offloads, forward, x)
    assert_steps_are_plain(offloads, forward, x, ratio=0.5, window_units=1)


# What is asked for changes


def test_settings_change_between_steps(offloads: Offloads) -> None:
    x, moved = leaf_on(offloads.device.torch_device), {}
    wanted = gradient_of(chain(x, [1, 2] * 4), x)
    every = [(1.0, 0, 0), (0.5, 0, 0), (0.0, 0, 0), (1.0, 3, 0), (0.25, 0, 0), (1.0, 0, 2), (1.0, 0, 2), (1.0, 0, 3)]
    for ratio, window_units, min_units in every * 4:
        with offloads(ratio, window_units, min_bytes=min_units * UNIT_BYTES):
            y = chain(x, [1, 2] * 4)
        key = (ratio, window_units, min_units)
        assert moved.setdefault(key, offloads.moved_units) == offloads.moved_units
        assert_same_bits([gradient_of(y, x)], [wanted])
        del y
    assert list(moved.values()) == [12, 6, 0, 9, 3, 8, 0]


@pytest.mark.parametrize("steps", ["....oo..", "oooo..oo", ".o.o.o.o"])
@pytest.mark.parametrize("where", ["inside", "around", "from outside to inside", "from inside to outside"])
def test_no_offload_comes_and_goes(offloads: Offloads, where: str, steps: str) -> None:
    x = leaf_on(offloads.device.torch_device)
    wanted = gradient_of(chain(x, [1] * 9), x)
    for number, kind in enumerate(steps):
        pause: AbstractContextManager[object] = memkit.no_offload() if kind == "o" else nullcontext()
        if where == "around":
            with pause, offloads():
                y = chain(x, [1] * 9)
        elif where == "inside":
            with offloads():
                y = chain(x, [1] * 3)
                with pause:
                    y = chain(y, [1] * 2)
                    with memkit.no_offload() if kind == "o" else nullcontext():
                        y = chain(y, [1])
                    y = chain(y, [1])
                y = chain(y, [1] * 2)
            assert offloads.follows or steps[max(0, number - 2) : number] != kind * 2
        elif where == "from outside to inside":
            pause.__enter__()
            with offloads():
                y = chain(x, [1] * 5)
                pause.__exit__(None, None, None)
                y = chain(y, [1] * 4)
        else:
            with offloads():
                y = chain(x, [1] * 5)
                pause.__enter__()
                y = chain(y, [1] * 4)
            pause.__exit__(None, None, None)
        staying = {"inside": 4, "around": 9, "from outside to inside": 5, "from inside to outside": 4}[where]
        assert offloads.moved_units == (9 if kind == "." else 9 - staying)
        assert_same_bits([gradient_of(y, x)], [wanted])
        del y


def test_attached_and_not(offloads: Offloads) -> None:
    """The model's tensors leave if it is not attached."""
    torch_device = offloads.device.torch_device

    class Table(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.rand(16))

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = (x * self.table).sin()
            return x

    model, x = Table().to(torch_device), torch.randn(16, 16, device=torch_device, requires_grad=True)
    wanted = gradient_of(model(x), x)
    for is_attached in (False, False, False, True, True, True, True, False, False, False):
        if is_attached:
            attachment = memkit.attach(model, offloads())
            y = model(x)
            attachment.remove()
        else:
            with offloads():
                y = model(x)
        assert_same_bits([gradient_of(y, x)], [wanted])
        if is_attached:
            assert offloads.moved_units == 3
        del y


# Without room


def test_host_memory_that_is_short_for_a_moment(offloads: Offloads, monkeypatch: pytest.MonkeyPatch) -> None:
    x, moved_units = leaf_on(offloads.device.torch_device), []
    wanted = gradient_of(chain(x, [1] * 6), x)
    offloads.learn(lambda: chain(x, [1] * 6))
    (window,) = offload_states[TAG].windows()
    take = window.arena.take

    def refuse(num_bytes: int) -> Any:
        if num_bytes > 5 * UNIT_BYTES:
            raise HostMemoryError("injected: no room")
        return take(num_bytes)

    for number in range(4):
        with monkeypatch.context() as patch:
            if number == 1:
                patch.setattr(window.arena, "take", refuse)
            with offloads():
                y = chain(x, [1] * 6)
        assert offloads.follows
        moved_units.append(offloads.moved_units)
        assert_same_bits([gradient_of(y, x)], [wanted])
        del y
    assert moved_units == [6] * 4


def test_peek_ahead_of_the_backward(offloads: Offloads) -> None:
    """The schedule would fetch its storages later, together with others."""
    x = leaf_on(offloads.device.torch_device)
    wanted = gradient_of(chain(x, IN_BATCHES), x)
    for place in range(11):
        y = learned(offloads, lambda: chain(x, IN_BATCHES), window_units=8)
        node = y.grad_fn
        for _ in range(place):
            while type(node).__name__ != "SinBackward0":
                node = node.next_functions[0][0]
            last, node = node, node.next_functions[0][0]
        if place:
            _ = last._saved_self
        assert_same_bits([gradient_of(y, x)], [wanted])
        del y, node
        memkit.reset(TAG)


@pytest.mark.parametrize("options", SETTINGS)
def test_backward_fails_and_is_run_again(offloads: Offloads, options: dict[str, Any]) -> None:
    x = leaf_on(offloads.device.torch_device)
    wanted = gradient_of(chain(x, IN_BATCHES), x)
    for place in range(10):
        y = learned(offloads, lambda: chain(x, IN_BATCHES), **options)
        node = y.grad_fn
        for _ in range(2 * place):
            node = node.next_functions[0][0]

        def fail(_: Any) -> None:
            raise KeyError

        handle = node.register_prehook(fail)
        with pytest.raises(KeyError) as caught:
            y.sum().backward(retain_graph=True)
        handle.remove()
        caught.value.__traceback__ = None
        assert_same_bits([gradient_of(y, x)], [wanted])
        del y, node, handle
        offloads.assert_nothing_is_left()


# Streams


class OnSide:
    """Runs on another stream, behind the current one's work so far; the current one then waits for it."""

    def __init__(self, device: Device) -> None:
        self._device, self._side = device, device.new_stream("side")

    def __call__(self, call: Callable[[], Any]) -> Any:
        device = self._device
        device.wait_event(self._side, device.record_event())
        with device.on_stream(self._side):
            made = call()
            done = device.record_event()
        device.wait_event(device.current_stream(), done)
        return made


@pytest.mark.parametrize("ratio", [1.0, 0.5])
@pytest.mark.parametrize("from_step", [0, 3])
@pytest.mark.parametrize("units", [[1] * 6, [1, 3, 2, 1, 1, 2]])
def test_forward_goes_on_on_another_stream(offloads: Offloads, units: list[int], from_step: int, ratio: float) -> None:
    """At a ratio of a half, the saves there stay, and earlier saves leave."""
    x, on_side = leaf_on(offloads.device.torch_device), OnSide(offloads.device)

    def forward(number: int) -> Tensor:
        y = chain(x, units)
        return on_side(lambda: chain(y, units)) if number >= from_step else chain(y, units)

    assert_steps_are_plain(offloads, forward, x, ratio=ratio, window_units=3)


def test_context_is_left_on_another_stream(offloads: Offloads) -> None:
    """At that point, a storage waits for its op before it is sent."""
    x, side = leaf_on(offloads.device.torch_device), offloads.device.new_stream("side")

    def forward() -> Tensor:
        return functional.rrelu(chain(x, [1] * 6), training=True)

    for number in range(4):
        torch.manual_seed(number)
        wanted = gradient_of(forward(), x)
        context = offloads()
        torch.manual_seed(number)
        context.__enter__()
        y = forward()
        with offloads.device.on_stream(side):
            context.__exit__(None, None, None)
        assert offloads.follows == (number >= 2)
        assert_same_bits([gradient_of(y, x)], [wanted])
        del y


def test_backward_on_another_stream_stops_halfway(offloads: Offloads) -> None:
    x, on_side = leaf_on(offloads.device.torch_device), OnSide(offloads.device)
    wanted = gradient_of(chain(x, IN_BATCHES), x)

    def forward() -> tuple[Tensor, Tensor]:
        middle = chain(x, IN_BATCHES[:6])
        return middle, chain(middle, IN_BATCHES[6:])

    offloads.learn(lambda: forward()[1], window_units=8)
    with offloads(window_units=8):
        made = forward()
    assert offloads.follows
    on_side(functools.partial(gradient_of, made[1], made[0]))
    del made

    offloads.assert_nothing_is_left()
    with offloads(window_units=8):
        y = forward()[1]
    assert_same_bits([gradient_of(y, x)], [wanted])


@pytest.mark.parametrize("units", [[1] * 6, [1, 3, 2, 1, 1, 2]])
def test_next_forward_is_on_another_stream(offloads: Offloads, units: list[int]) -> None:
    """It lets go of the first forward's storages under way."""
    x, on_side = leaf_on(offloads.device.torch_device), OnSide(offloads.device)

    def forward() -> Tensor:
        return functional.rrelu(chain(x, units), 0.25, 0.25, training=True)

    wanted = gradient_of(forward(), x)
    first = learned(offloads, forward, window_units=2)

    def second_forward() -> Tensor:
        with offloads(window_units=2):
            return forward()

    second = on_side(second_forward)
    assert_same_bits([gradient_of(first, x), gradient_of(second, x)], [wanted] * 2)


def test_graph_is_dropped_while_another_stream_is_the_current_one(offloads: Offloads) -> None:
    x, side = leaf_on(offloads.device.torch_device), offloads.device.new_stream("side")

    def forward() -> Tensor:
        return functional.rrelu(chain(x, [1] * 6), 0.25, 0.25, training=True)

    y = learned(offloads, forward)
    del y
    with offloads.device.on_stream(side):
        offloads.assert_nothing_is_left()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_device_is_not_the_current_one() -> None:
    """CUDA takes the default stream of the current device, wherever the tensors are."""
    assert torch.cuda.current_device() == 0
    x = torch.randn(2**22, device="cuda:1", requires_grad=True)

    def forward() -> Tensor:
        y = x
        for _ in range(12):
            y = y.sin() * 1.5
        return y

    wanted = gradient_of(forward(), x)
    for _ in range(5):
        with memkit.CPUOffload(1.0, TAG, min_bytes=0, window_bytes=0):
            y = forward()
        for _ in range(20):
            torch.randn(2**20, device="cuda:0").sin()
        assert_same_bits([gradient_of(y, x)], [wanted])
        del y


class Followed:
    """Counts forwards that follow a schedule; `made` has all that have begun to."""

    def __init__(self) -> None:
        self.made: list[ScheduledForward] = []

    def take(self) -> list[bool]:
        """Return, for each one since the last call, whether it and its backwards followed the schedule to the end."""
        found = [made.is_complete and not made._has_left for made in self.made]
        self.made.clear()
        return found


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Followed]:
    counted, follow_schedule = Followed(), steady.follow_schedule

    def follow(*args: object) -> ScheduledForward | None:
        found = follow_schedule(*args)  # type: ignore[arg-type]  # as they come
        if found is not None:
            counted.made.append(found)
        return found

    monkeypatch.setattr(steady, "follow_schedule", follow)
    yield counted
    counted.made.clear()


def test_step_on_the_cpu_alone_among_steady_ones_warns_of_nothing(offloads: Offloads, followed: Followed) -> None:
    if offloads.device.torch_device.type == "cpu":
        pytest.skip("everything is on the CPU here")
    x, on_cpu = leaf_on(offloads.device.torch_device), torch.randn(8, requires_grad=True)
    for number in range(6):
        with memkit.CPUOffload(1.0, TAG, min_bytes=0, window_bytes=0, device=offloads.device):
            y = on_cpu.sin().cos() if number == 3 else chain(x, IN_BATCHES)
        y.sum().backward()
        del y
    assert followed.take()[-2:] == [True] * 2


STEADY = ("retained", "double_backward", "double_backward_outside", "partial", "backward_inside", "interleaved", "in_a_thread")


@pytest.mark.parametrize("options", SETTINGS)
@pytest.mark.parametrize("name", STEADY)
def test_orders_that_repeat_follow_schedules(
    name: str, offloads: Offloads, followed: Followed, options: dict[str, float]
) -> None:
    """The contracts promise their bits."""
    moved = []
    for number in range(5):
        torch.manual_seed(7)
        ORDERS[name](Case(offloads.device, functools.partial(offloads, **options)))
        found = followed.take()
        assert number < 2 or (found and all(found))
        stats = memkit.stats(TAG)
        moved.append((stats.moved_out_bytes, stats.moved_in_bytes, stats.seen_bytes, stats.unique_bytes, stats.kept_bytes))
    assert moved[2:] == [moved[2]] * 3


# Shapes that come in turns


BUCKETS = {"A": (3, IN_BATCHES), "B": (2, [2, 1, 2, 1]), "C": (2, [2, 1, 2, 3])}
"""A multiple of the first save, and the later units; the last two begin alike."""


@pytest.mark.core(1)
@pytest.mark.parametrize("options", SETTINGS)
@pytest.mark.parametrize("turns", ["AB", "AAB", "BC", "ABC", "BBCC"])
def test_shapes_in_turns(offloads: Offloads, followed: Followed, turns: str, options: dict[str, float]) -> None:
    x, done = leaf_on(offloads.device.torch_device), ""
    found: list[bool] = []
    for kind in turns * 6:
        first, units = BUCKETS[kind]
        wanted = gradient_of(chain(x, [first, *units]), x)
        with offloads(**options):
            y = chain(x, [first, *units])
        assert_same_bits([gradient_of(y, x)], [wanted])
        del y
        done += kind
        found.append(followed.take()[-1:] == [True])
    steady = found[-len(turns) * 2 :]
    if turns in ("AB", "AAB"):
        assert found[len(turns) * 2 :] == [True] * (len(turns) * 4)
    else:  # among equal beginnings, the one is expected that followed the same two last time
        assert steady == [True] * len(steady)


@pytest.mark.parametrize("options", SETTINGS)
def test_forwards_that_go_another_way_for_good_follow_a_schedule_of_their_own(
    offloads: Offloads, followed: Followed, options: dict[str, float]
) -> None:
    """They begin as the others did, so at first each is taken for one of those."""
    x = leaf_on(offloads.device.torch_device)
    for sizes in [(*IN_BATCHES, 1, 1), (*IN_BATCHES, 2, 3, 1), (*IN_BATCHES, 2, 1)]:
        plain = gradient_of(chain(x, sizes), x)
        for _ in range(6):
            followed.made.clear()
            with offloads(**options):
                y = chain(x, sizes)
            assert_same_bits([gradient_of(y, x)], [plain])
            del y
        assert followed.take() == [True]


def test_first_save_that_lies_otherwise_costs_the_other_shapes_nothing(offloads: Offloads, followed: Followed) -> None:
    """A forward that differs at its first save is examined as a whole."""
    x = leaf_on(offloads.device.torch_device)

    def forward(kind: str) -> Tensor:
        y = x.reshape(16, 16).clone()
        y = (y.t() if kind == "B" else y).sin()
        return chain(y.flatten(), [1, 2] if kind == "B" else [2, 2, 1])

    steady = ""
    for kind in "AAAABBABBABAB":
        wanted = gradient_of(forward(kind), x)
        with offloads():
            y = forward(kind)
        assert_same_bits([gradient_of(y, x)], [wanted])
        del y
        steady += "sd"[followed.take()[-1:] != [True]]
    assert steady[:2] == "dd"
    assert steady[2:4] == "ss"
    assert steady[6] == "s"  # the others left its schedule
    assert steady[-4:] == "ssss"


# Saves that no backward asks for


@pytest.mark.covering(2)
@pytest.mark.core(1)
@pytest.mark.parametrize("options", SETTINGS)
@pytest.mark.parametrize("lives", ["until the backward", "until the next step", "through the next step"])
@pytest.mark.parametrize("aux_units", [[2, 1, 1], [1] * 6])
def test_output_that_the_loss_does_not_reach(
    offloads: Offloads, followed: Followed, aux_units: list[int], lives: str, options: dict[str, float]
) -> None:
    x = leaf_on(offloads.device.torch_device)

    def forward() -> tuple[Tensor, Tensor]:
        trunk = chain(x, [1, 2, 1])
        return chain(trunk, IN_BATCHES), chain(trunk, aux_units)

    wanted, aux, held = gradient_of(forward()[0], x), None, []
    for number in range(7):
        with offloads(**options):
            y, next_aux = forward()
            if lives == "through the next step":
                aux = next_aux
        aux = next_aux
        del next_aux
        if lives == "until the backward":
            aux = None
        assert_same_bits([torch.autograd.grad(y.sum(), x)[0]], [wanted])
        del y
        if lives == "until the next step":
            aux = None
        assert followed.take() == [True] * (number >= 2)
        held.append(memkit.stats(TAG).host_held_bytes)
    del aux
    assert held[3:] == [held[3]] * 4


def test_what_the_loss_does_not_reach_takes_no_more_host_memory_than_itself(offloads: Offloads) -> None:
    x = leaf_on(offloads.device.torch_device)
    aux, in_use = None, []
    for _ in range(6):
        with offloads():
            trunk = chain(x, [4, 4])
            y, aux = chain(trunk, [8] * 4), chain(trunk, [2, 2])
        del trunk
        gradient_of(y, x)
        del y
        memkit.stats(TAG)
        in_use.append(memkit.stats(TAG).host_in_use_bytes)
    assert in_use == [4 * UNIT_BYTES] * 6
    del aux


@pytest.mark.parametrize("options", SETTINGS)
def test_output_that_a_later_backward_reaches_after_all(
    offloads: Offloads, followed: Followed, options: dict[str, float]
) -> None:
    x = leaf_on(offloads.device.torch_device)
    head = chain(x, [1, 2]).detach().requires_grad_()

    def forward() -> tuple[Tensor, Tensor]:
        return chain(x, IN_BATCHES), chain(head, [2, 1, 1])

    made = forward()
    wanted, wanted_aux = gradient_of(made[0], x), gradient_of(made[1], head)
    kept: list[Tensor] = []
    for number in range(9):
        with offloads(**options):
            y, aux = forward()
            if kept and number > 5:  # while the next forward runs
                assert_same_bits([gradient_of(kept.pop(), head)], [wanted_aux])
        kept.append(aux)
        del aux
        assert_same_bits([gradient_of(y, x)], [wanted])
        del y
        if number > 4:  # when it is over
            assert_same_bits([gradient_of(kept.pop(0), head)], [wanted_aux])
    while kept:
        assert_same_bits([gradient_of(kept.pop(0), head)], [wanted_aux])


def test_forward_that_leaves_the_schedule_of_another_trace_for_the_latest(offloads: Offloads) -> None:
    """Its saves so far are of two traces: it goes by the plan of the trace that it turns out to follow."""
    weight = torch.ones(16).to(offloads.device.torch_device).requires_grad_()

    for number, is_cut in ((2, False), (6, False), (6, False), (4, True), (3, True), (4, True)):
        found = []
        for context in (nullcontext, offloads):
            y = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).to(weight.device) * weight
            with context():
                y = y * weight
                for _ in range(number):
                    y = y.sin()
                if is_cut:
                    y = y[:5].exp()
            found.append(gradient_of(y, weight))
        assert_same_bits(found[:1], found[1:])


class _Around:
    """The contexts between a `CPUOffload` and a `no_offload` whose saved tensors they see themselves."""

    @staticmethod
    def layers(model: nn.Module, device: Device) -> AbstractContextManager[object]:
        return memkit.LayerOffload(model, num_resident=0, train="host", device=device)

    @staticmethod
    def watching(model: nn.Module, device: Device) -> AbstractContextManager[object]:
        return memkit.Rematerialize("100MiB", tag="around", min_bytes=0)

    @staticmethod
    def regions(model: nn.Module, device: Device) -> AbstractContextManager[object]:
        return memkit.Rematerialize(0.8, tag="around", min_bytes=0)


@pytest.mark.parametrize("around", [_Around.layers, _Around.watching, _Around.regions])
def test_no_offload_in_a_context_within(around: Callable[[nn.Module, Device], AbstractContextManager[object]]) -> None:
    device = ReferenceDevice()
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Tanh()) for _ in range(6)])
    moved, recorded, is_streamed = list[int](), list[bool](), around is _Around.layers
    with around(model, device) if is_streamed else nullcontext():
        for kind in "------oooo--oo":
            inputs = torch.randn(8, 16, requires_grad=True)
            with (
                memkit.CPUOffload(1.0, tag="outer", min_bytes=0, device=device),
                nullcontext() if is_streamed else around(model, device),
            ):
                hidden = model[:2](inputs)
                with memkit.no_offload() if kind == "o" else nullcontext():
                    hidden = model[2:4](hidden)
                loss = model[4:](hidden).square().mean()
            loss.backward()
            moved.append(memkit.stats("outer").num_copies_out)
            recorded.append(not is_streamed and memkit.stats("around").is_recorded)

    assert max(moved[-7:-4] + moved[-2:]) < min(moved[4:6] + moved[-4:-2])
    assert not any(recorded[4:])
