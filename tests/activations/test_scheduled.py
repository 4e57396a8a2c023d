"""Steps that follow a schedule, and steps that leave it: the same bits as without, and nothing is left behind."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import memkit
from memkit.activations.saved.state import offload_states
from memkit.device import Device, ReferenceDevice
from memkit.plan import copies
from tests.activations.cases import COMPUTATIONS, assert_same_bits, inputs_on
from tests.activations.chains import UNIT_BYTES, chain, leaf_on

TAG = "scheduled"


@pytest.fixture(params=[copies.BATCH_BYTES, pytest.param(1, marks=pytest.mark.full)], ids=["together", "one by one"])
def batch_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of small storages go together, or each by itself."""
    monkeypatch.setattr(copies, "BATCH_BYTES", request.param)


pytestmark = pytest.mark.usefixtures("batch_bytes")


class Offloads:
    """Makes contexts under one tag, on one device.

    Attributes:
        device: that.
    """

    def __init__(self, device: Device) -> None:
        self.device = device

    def __call__(self, ratio: float = 1.0, window_units: int = 0, **options: Any) -> memkit.CPUOffload:
        options = {"min_bytes": 0, "window_bytes": window_units * UNIT_BYTES, "device": self.device, **options}
        return memkit.CPUOffload(ratio, TAG, **options)

    @property
    def follows(self) -> bool:
        """Whether the last forward has followed a schedule to its end, and a graph may still ask for something of it."""
        (window,) = offload_states[TAG].windows()
        return window.scheduled is not None and window.scheduled.is_complete and not window.scheduled.is_over

    @property
    def moved_units(self) -> float:
        """What the last forward has moved."""
        return memkit.stats(TAG).moved_out_bytes / UNIT_BYTES

    def learn(self, forward: Callable[[], Tensor], **options: Any) -> None:
        """Take so many steps that the next one follows a schedule."""
        for _ in range(2):
            with self(**options):
                loss = forward()
            loss.sum().backward()

    def assert_nothing_is_left(self) -> None:
        """Fail where memory is held that no graph needs."""
        self.device.synchronize()
        stats = memkit.stats(TAG)
        assert (stats.live_records, stats.live_bytes, stats.host_in_use_bytes) == (0, 0, 0)


@pytest.fixture
def offloads(device: Device) -> Iterator[Offloads]:
    made = Offloads(device)
    yield made
    if TAG in offload_states:
        made.assert_nothing_is_left()


def gradient_of(y: Tensor, x: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(y.sum(), x)
    return found


# Without room


class Full(ReferenceDevice):
    """Has no room for some allocations.

    Attributes:
        refused: for each of the next ones, whether it is refused.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refused: Iterator[bool] = iter(())

    def allocate(self, num_bytes: int) -> torch.UntypedStorage:
        if next(self.refused, False):
            raise torch.OutOfMemoryError("injected: out of memory")
        return super().allocate(num_bytes)


IN_BATCHES = [*[1] * 8, 4, 4, 4]
"""Units of a chain of which several come back together, once one of the large ones has gone."""


@pytest.mark.parametrize("number", range(10))
@pytest.mark.parametrize("window_units", [0, 8])
def test_device_without_room_once(window_units: int, number: int) -> None:
    """For what is fetched ahead, perhaps together with others, or for what is needed now."""
    offloads = Offloads(device := Full())
    x = leaf_on(device.torch_device)
    wanted = gradient_of(chain(x, IN_BATCHES), x)
    offloads.learn(lambda: chain(x, IN_BATCHES), window_units=window_units)
    with offloads(window_units=window_units):
        y = chain(x, IN_BATCHES)
    assert offloads.follows
    device.refused = iter([False] * number + [True])

    assert_same_bits([gradient_of(y, x)], [wanted])
    del y
    offloads.assert_nothing_is_left()


def test_device_without_any_room_raises_the_original_error_with_a_hint() -> None:
    offloads = Offloads(device := Full())
    x = leaf_on(device.torch_device)
    wanted = gradient_of(chain(x, [1] * 6), x)
    offloads.learn(lambda: chain(x, [1] * 6))
    with offloads():
        y = chain(x, [1] * 6)
    assert offloads.follows
    device.refused = iter([True] * 100)

    with pytest.raises(torch.OutOfMemoryError, match="injected: out of memory") as caught:
        y.sum().backward(retain_graph=True)
    (note,) = caught.value.__notes__
    assert f'no room on the device for 0.00 MiB that CPUOffload (tag "{TAG}") had moved to the host' in note
    device.refused = iter(())
    assert_same_bits([gradient_of(y, x)], [wanted])


def test_peek_ahead_of_the_backward(offloads: Offloads) -> None:
    """What is fetched for it is among what the schedule fetches later with others."""
    x = leaf_on(offloads.device.torch_device)
    wanted = gradient_of(chain(x, IN_BATCHES), x)
    for place in range(11):
        offloads.learn(lambda: chain(x, IN_BATCHES), window_units=8)
        with offloads(window_units=8):
            y = chain(x, IN_BATCHES)
        assert offloads.follows
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


# Other streams


class OnSide:
    """Runs on another stream, behind what the current one has by now; which then waits for it."""

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


def _assert_steps_are_plain(offloads: Offloads, forward: Callable[[int], Tensor], x: Tensor, **options: Any) -> None:
    """Take steps, each the gradient of a forward that is given the number of the step."""
    for number in range(5):
        wanted = gradient_of(forward(number), x)
        with offloads(**options):
            y = forward(number)
        found = gradient_of(y, x)
        del y
        offloads.device.synchronize()
        assert_same_bits([found], [wanted])


@pytest.mark.parametrize("ratio", [1.0, 0.5])
@pytest.mark.parametrize("from_step", [0, 3])
@pytest.mark.parametrize("units", [[1] * 6, [1, 3, 2, 1, 1, 2]])
def test_forward_goes_on_on_another_stream(offloads: Offloads, units: list[int], from_step: int, ratio: float) -> None:
    """At a half what is saved there stays, while what leaves was saved before."""
    x, on_side = leaf_on(offloads.device.torch_device), OnSide(offloads.device)

    def forward(number: int) -> Tensor:
        y = chain(x, units)
        return on_side(lambda: chain(y, units)) if number >= from_step else chain(y, units)

    _assert_steps_are_plain(offloads, forward, x, ratio=ratio, window_units=3)


def test_context_is_left_on_another_stream(offloads: Offloads) -> None:
    """Where something waits to be sent until its op has run."""
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


@pytest.mark.parametrize("window_units", [0, 3, 6])
def test_backward_on_another_stream(offloads: Offloads, window_units: int) -> None:
    x, on_side = leaf_on(offloads.device.torch_device), OnSide(offloads.device)
    wanted = gradient_of(chain(x, IN_BATCHES), x)
    offloads.learn(lambda: chain(x, IN_BATCHES), window_units=window_units)
    with offloads(window_units=window_units):
        y = chain(x, IN_BATCHES)
    assert offloads.follows

    assert_same_bits([on_side(lambda: gradient_of(y, x))], [wanted])


def test_backward_on_another_stream_stops_halfway(offloads: Offloads) -> None:
    x, on_side = leaf_on(offloads.device.torch_device), OnSide(offloads.device)
    wanted = gradient_of(chain(x, IN_BATCHES), x)

    def forward() -> tuple[Tensor, Tensor]:
        middle = chain(x, IN_BATCHES[:6])
        return middle, chain(middle, IN_BATCHES[6:])

    offloads.learn(lambda: forward()[1], window_units=8)
    with offloads(window_units=8):
        middle, y = forward()
    assert offloads.follows
    on_side(lambda: gradient_of(y, middle))
    del middle, y

    offloads.assert_nothing_is_left()
    with offloads(window_units=8):
        y = forward()[1]
    assert_same_bits([gradient_of(y, x)], [wanted])


@pytest.mark.parametrize("units", [[1] * 6, [1, 3, 2, 1, 1, 2]])
def test_next_forward_is_on_another_stream(offloads: Offloads, units: list[int]) -> None:
    """It lets go of what the first has on its way."""
    x, on_side = leaf_on(offloads.device.torch_device), OnSide(offloads.device)

    def forward() -> Tensor:
        return functional.rrelu(chain(x, units), 0.25, 0.25, training=True)

    wanted = gradient_of(forward(), x)
    offloads.learn(forward, window_units=2)
    with offloads(window_units=2):
        first = forward()
    assert offloads.follows

    def second_forward() -> Tensor:
        with offloads(window_units=2):
            return forward()

    second = on_side(second_forward)
    assert_same_bits([gradient_of(first, x), gradient_of(second, x)], [wanted] * 2)


def test_graph_is_dropped_while_another_stream_is_the_current_one(offloads: Offloads) -> None:
    x, side = leaf_on(offloads.device.torch_device), offloads.device.new_stream("side")

    def forward() -> Tensor:
        return functional.rrelu(chain(x, [1] * 6), 0.25, 0.25, training=True)

    offloads.learn(forward)
    with offloads():
        y = forward()
    assert offloads.follows
    del y
    with offloads.device.on_stream(side):
        offloads.assert_nothing_is_left()


# Other saves than the schedule has


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
@pytest.mark.parametrize("place", [2, *[pytest.param(place, marks=pytest.mark.full) for place in (0, 1, 3, 4)]])
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

    _assert_steps_are_plain(offloads, forward, x)
    _assert_steps_are_plain(offloads, forward, x, ratio=0.5, window_units=1)


# What is asked for changes


def test_min_bytes_change_between_steps(offloads: Offloads) -> None:
    x = leaf_on(offloads.device.torch_device)
    wanted = gradient_of(chain(x, [1, 2, 1, 2]), x)
    for num_units in (0, 0, 0, 2, 2, 2, 0, 0, 3, 3, 3):
        with offloads(min_bytes=num_units * UNIT_BYTES):
            y = chain(x, [1, 2, 1, 2])
        assert offloads.moved_units == {0: 6, 2: 4, 3: 0}[num_units]
        assert_same_bits([gradient_of(y, x)], [wanted])
        del y


def test_ratio_and_window_change_between_steps(offloads: Offloads) -> None:
    x = leaf_on(offloads.device.torch_device)
    wanted, moved = gradient_of(chain(x, [1] * 8), x), {}
    for ratio, window_units in [(1.0, 0), (0.5, 0), (0.0, 0), (1.0, 3), (0.25, 0), (1.0, 0)] * 4:
        with offloads(ratio, window_units):
            y = chain(x, [1] * 8)
        assert moved.setdefault((ratio, window_units), offloads.moved_units) == offloads.moved_units
        assert_same_bits([gradient_of(y, x)], [wanted])
        del y
    assert moved == {(1.0, 0): 8, (0.5, 0): 4, (0.0, 0): 0, (1.0, 3): 5, (0.25, 0): 2}


@pytest.mark.parametrize("steps", ["....oo..", "oooo..oo", ".o.o.o.o"])
@pytest.mark.parametrize("where", ["inside", "around", "from outside to inside", "from inside to outside"])
def test_no_offload_comes_and_goes(offloads: Offloads, where: str, steps: str) -> None:
    x = leaf_on(offloads.device.torch_device)
    wanted = gradient_of(chain(x, [1] * 9), x)
    for kind in steps:
        pause: AbstractContextManager[object] = memkit.no_offload() if kind == "o" else nullcontext()
        if where == "around":
            with pause, offloads():
                y = chain(x, [1] * 9)
        elif where == "inside":
            with offloads():
                y = chain(x, [1] * 3)
                with pause:
                    y = chain(y, [1] * 4)
                y = chain(y, [1] * 2)
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


def test_steps_with_a_region_of_no_offload_follow_a_schedule(offloads: Offloads) -> None:
    x = leaf_on(offloads.device.torch_device)
    for number in range(4):
        with offloads():
            y = chain(x, [1] * 3)
            with memkit.no_offload():
                y = chain(y, [1] * 4)
            y = chain(y, [1] * 2)
        assert offloads.follows == (number >= 2)
        gradient_of(y, x)
        del y


# Everything that may be computed


@pytest.mark.parametrize(("ratio", "window_units"), [(1.0, 0), (0.5, 0), pytest.param(1.0, None, marks=pytest.mark.full)])
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
        figures.append({field: getattr(stats, field) for field in FIGURES if field not in (OF_COPIES if name == "masks" else ())})
    if not isinstance(offloads.device, ReferenceDevice) or offloads.device._random is None:
        assert figures[2] == figures[3] == figures[1]


OF_COPIES = ("moved_out_bytes", "num_copies_out", "ratio_reached", "host_peak_bytes")
"""They differ where a save dies ahead of its copy: a schedule has its storage leave all the same."""
FIGURES = (
    "seen_bytes",
    "unique_bytes",
    "kept_bytes",
    "moved_out_bytes",
    "moved_in_bytes",
    "num_copies_out",
    "num_copies_in",
    "served_bytes",
    "wasted_bytes",
    "window_bytes",
    "ratio_reached",
    "host_peak_bytes",
    "host_in_use_bytes",
    "live_records",
    "live_bytes",
)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_device_is_not_the_current_one() -> None:
    """To CUDA the default stream is that of the current device, whatever the tensors are on."""
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


# Backwards


def _learned(offloads: Offloads, forward: Callable[[], Tensor], **options: Any) -> Tensor:
    """Return what a forward has made that has followed a schedule."""
    offloads.learn(forward, **options)
    with offloads(**options):
        y = forward()
    assert offloads.follows
    return y


SETTINGS = [{"ratio": 1.0, "window_units": 0}, {"ratio": 0.5, "window_units": 0}, {"ratio": 1.0, "window_units": 6}]


@pytest.mark.parametrize("options", SETTINGS)
def test_backward_again_and_again(offloads: Offloads, options: dict[str, Any]) -> None:
    x = leaf_on(offloads.device.torch_device)
    wanted = gradient_of(chain(x, IN_BATCHES), x)
    y = _learned(offloads, lambda: chain(x, IN_BATCHES), **options)

    for _ in range(3):
        (found,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        assert_same_bits([found], [wanted])
    assert_same_bits([gradient_of(y, x)], [wanted])
    with pytest.raises(RuntimeError, match="second time"):
        gradient_of(y, x)


@pytest.mark.parametrize("options", SETTINGS)
def test_gradient_of_a_gradient(offloads: Offloads, options: dict[str, Any]) -> None:
    x = leaf_on(offloads.device.torch_device)

    def of_gradient(y: Tensor) -> list[Tensor]:
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        return [first.detach(), second]

    wanted = of_gradient(chain(x, IN_BATCHES))
    y = _learned(offloads, lambda: chain(x, IN_BATCHES), **options)
    assert_same_bits(of_gradient(y), wanted)


@pytest.mark.parametrize("options", SETTINGS)
def test_parts_of_the_backward_in_another_order(offloads: Offloads, options: dict[str, Any]) -> None:
    x = leaf_on(offloads.device.torch_device)

    def forward() -> tuple[Tensor, Tensor, Tensor]:
        trunk = chain(x, [1, 2, 1])
        return trunk, chain(trunk, [1] * 6), chain(trunk, [2, 1, 1])

    def backward(trunk: Tensor, first: Tensor, second: Tensor, order: int) -> list[Tensor]:
        if order == 0:
            return [gradient_of(first.sum() + second.sum(), x)]
        ends = (first, second) if order == 1 else (second, first)
        of_ends = [torch.autograd.grad(end.sum(), trunk)[0] for end in ends]
        return [*of_ends, torch.autograd.grad(trunk, x, sum(of_ends))[0]]

    for order in (0, 0, 0, 1, 2, 0, 1, 1, 1, 2, 2, 2, 0):
        wanted = backward(*forward(), order)
        with offloads(**options):
            made = forward()
        assert_same_bits(backward(*made, order), wanted)
        del made


def test_backward_in_another_thread(offloads: Offloads) -> None:
    x, found = leaf_on(offloads.device.torch_device), list[Tensor]()
    wanted = gradient_of(chain(x, IN_BATCHES), x)
    made = [_learned(offloads, lambda: chain(x, IN_BATCHES), window_units=4)]
    thread = threading.Thread(target=lambda: found.append(gradient_of(made.pop(), x)))
    thread.start()
    thread.join()

    assert_same_bits(found, [wanted])


def test_backward_in_another_thread_while_the_next_forward_runs(offloads: Offloads) -> None:
    x = leaf_on(offloads.device.torch_device)
    wanted = gradient_of(chain(x, [1] * 30), x)
    for _ in range(3):
        made = [_learned(offloads, lambda: chain(x, [1] * 30), window_units=4)]
        found: list[Tensor] = []
        thread = threading.Thread(target=lambda: found.append(gradient_of(made.pop(), x)))  # noqa: B023
        thread.start()
        with offloads(window_units=4):
            second = chain(x, [1] * 30)
        thread.join()
        assert_same_bits([*found, gradient_of(second, x)], [wanted] * 2)
        del second


@pytest.mark.parametrize("options", SETTINGS)
def test_two_forwards_are_alive_at_once(offloads: Offloads, options: dict[str, Any]) -> None:
    x = leaf_on(offloads.device.torch_device)
    wanted = gradient_of(chain(x, IN_BATCHES), x)
    for is_reversed in (False, True):
        graphs = [_learned(offloads, lambda: chain(x, IN_BATCHES), **options)]
        for _ in range(2):
            with offloads(**options):
                graphs.append(chain(x, IN_BATCHES))
        while graphs:
            assert_same_bits([gradient_of(graphs.pop(-1 if is_reversed else 0), x)], [wanted])


def test_backward_inside_the_context(offloads: Offloads) -> None:
    x = leaf_on(offloads.device.torch_device)
    wanted = gradient_of(chain(x, IN_BATCHES), x)
    for num_forwards in (1, 1, 1, 1, 2, 1, 1, 2, 2, 3, 1):
        with offloads(window_units=2):
            for _ in range(num_forwards):
                assert_same_bits([gradient_of(chain(x, IN_BATCHES), x)], [wanted])


@pytest.mark.parametrize("num_units", [[1] * 3, [1] * 12, [2, 1], []])
def test_forward_is_shorter_longer_or_other(offloads: Offloads, num_units: list[int]) -> None:
    x = leaf_on(offloads.device.torch_device)
    for units in ([1] * 6, [1] * 6, [1] * 6, num_units, [1] * 6, [1] * 6, num_units, num_units, num_units, num_units, [1] * 6):
        wanted = gradient_of(chain(x, units) * 1, x)
        for ratio, window in ((1.0, 0), (0.5, 2)):
            with offloads(ratio, window):
                y = chain(x, units) * 1
            assert_same_bits([gradient_of(y, x)], [wanted])
            del y


# Writes


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.0])
def test_write_to_what_was_saved_is_autograds_own_error(offloads: Offloads, ratio: float, place: int) -> None:
    x = leaf_on(offloads.device.torch_device)

    def forward(is_written: bool) -> Tensor:
        y, kept = x, []
        for _ in range(4):
            y = y.clone()
            kept.append(y)
            y = y.sin()
        if is_written:
            kept[place].add_(1)
        return y

    with pytest.raises(RuntimeError, match="modified by an inplace operation") as plain:
        forward(True).sum().backward()
    for _ in range(3):
        with offloads(ratio):
            y = forward(False)
        gradient_of(y, x)
        del y
    with offloads(ratio):
        y = forward(True)
    with pytest.raises(RuntimeError) as found:
        y.sum().backward()
    del y
    assert _unhinted(str(found.value)) == _unhinted(str(plain.value))
    del found, plain  # they hold the frames, and so the graph


def _unhinted(message: str) -> str:
    """Return autograd's message up to which output of which node it was, which hooks are not told."""
    return message.partition("]")[0]


# Ends


def test_graph_without_backward(offloads: Offloads) -> None:
    x = leaf_on(offloads.device.torch_device)
    for units in (0, 3, 40):
        y = _learned(offloads, lambda: chain(x, IN_BATCHES), window_units=units)
        del y
        offloads.assert_nothing_is_left()


@pytest.mark.parametrize("options", SETTINGS)
@pytest.mark.parametrize("place", [0, 5, 10])
def test_forward_fails(offloads: Offloads, place: int, options: dict[str, Any]) -> None:
    x = leaf_on(offloads.device.torch_device)
    wanted = gradient_of(chain(x, IN_BATCHES), x)
    for _ in range(2):
        offloads.learn(lambda: chain(x, IN_BATCHES), **options)
        with pytest.raises(KeyError), offloads(**options):
            y = chain(x, IN_BATCHES[:place])
            raise KeyError
        del y
        offloads.assert_nothing_is_left()
        with offloads(**options):
            y = chain(x, IN_BATCHES)
        assert_same_bits([gradient_of(y, x)], [wanted])
        del y


@pytest.mark.parametrize("options", SETTINGS)
def test_backward_fails_and_is_run_again(offloads: Offloads, options: dict[str, Any]) -> None:
    x = leaf_on(offloads.device.torch_device)
    wanted = gradient_of(chain(x, IN_BATCHES), x)
    for place in range(10):
        y = _learned(offloads, lambda: chain(x, IN_BATCHES), **options)
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


def test_reset_between_forward_and_backward(offloads: Offloads) -> None:
    x = leaf_on(offloads.device.torch_device)
    wanted = gradient_of(chain(x, IN_BATCHES), x)
    for _ in range(2):
        y = _learned(offloads, lambda: chain(x, IN_BATCHES), window_units=2)
        memkit.reset(TAG)
        assert_same_bits([gradient_of(y, x)], [wanted])
        del y


def test_many_steps_leave_what_three_did(offloads: Offloads) -> None:
    x, left = leaf_on(offloads.device.torch_device), []
    gc.collect()
    gc.disable()
    try:
        for number in range(60):
            with offloads(window_units=2):
                y = chain(x, IN_BATCHES)
            gradient_of(y, x)
            del y
            if number in (9, 59):
                offloads.assert_nothing_is_left()
                stats = memkit.stats(TAG)
                (window,) = offload_states[TAG].windows()
                left.append(
                    (stats.host_held_bytes, stats.num_pins, stats.host_peak_bytes, len(window.traces), len(window.forwards.live()))
                )
                left[-1] += (len(gc.get_objects()) // 50,)
    finally:
        gc.enable()
    assert left[0] == left[1]


# Other contexts


def test_marks_come_and_go(offloads: Offloads) -> None:
    x = leaf_on(offloads.device.torch_device)
    wanted = gradient_of(chain(x, [1] * 8), x)
    for mark in (None, None, None, memkit.keep, None, None, None, memkit.offload, None, None, memkit.recompute, None, None):
        for ratio in (1.0, 0.5):
            with offloads(ratio):
                y = chain(x, [1] * 4)
                if mark is not None:
                    mark(y)
                y = chain(y, [1] * 4)
            assert_same_bits([gradient_of(y, x)], [wanted])
            del y


def test_rematerialize_inside_comes_and_goes(offloads: Offloads) -> None:
    x = leaf_on(offloads.device.torch_device)
    wanted = gradient_of(chain(x, [1] * 8), x)
    for is_inside in (False, False, False, True, True, False, False, True, True, True, False, False, False):
        inside = memkit.Rematerialize(0.5, f"{TAG} inside", min_bytes=0, device=offloads.device)
        with offloads(), inside if is_inside else nullcontext():
            y = chain(x, [1] * 8)
        assert_same_bits([gradient_of(y, x)], [wanted])
        del y


def test_tags_beside_and_inside_each_other(offloads: Offloads) -> None:
    x = leaf_on(offloads.device.torch_device)
    wanted = gradient_of(chain(x, [1] * 12), x)

    def other(number: int) -> memkit.CPUOffload:
        return memkit.CPUOffload(1.0, f"{TAG} {number}", min_bytes=0, window_bytes=0, device=offloads.device)

    for _ in range(5):
        with offloads():
            y = chain(x, [1] * 3)
            with other(1):
                y = chain(y, [1] * 3)
            y = chain(y, [1] * 3)
        with other(2):
            y = chain(y, [1] * 3)
        assert_same_bits([gradient_of(y, x)], [wanted])
        del y


def test_hooks_of_the_user_inside_and_outside(offloads: Offloads) -> None:
    x, hooks = leaf_on(offloads.device.torch_device), torch.autograd.graph.saved_tensors_hooks
    wanted = gradient_of(chain(x, [1] * 9), x)
    for kind in ("", "", "", "inside", "inside", "", "", "outside", "outside", "", ""):
        user = lambda name: hooks(lambda t: t.clone(), lambda t: t) if kind == name else nullcontext()  # noqa: B023, E731
        with user("outside"), offloads():
            y = chain(x, [1] * 3)
            with user("inside"):
                y = chain(y, [1] * 3)
            y = chain(y, [1] * 3)
        assert_same_bits([gradient_of(y, x)], [wanted])
        del y


def test_host_limit_that_is_too_small(offloads: Offloads) -> None:
    x = leaf_on(offloads.device.torch_device)
    wanted = gradient_of(chain(x, [4] * 8), x)
    for limit in (None, None, None, 4 * 4 * UNIT_BYTES, 4 * 4 * UNIT_BYTES, 4 * 4 * UNIT_BYTES, 4 * 4 * UNIT_BYTES, None, None):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with offloads(host_limit_bytes=limit):
                y = chain(x, [4] * 8)
        assert_same_bits([gradient_of(y, x)], [wanted])
        del y


def test_grad_mode_is_off_in_between(offloads: Offloads) -> None:
    x = leaf_on(offloads.device.torch_device)
    wanted = gradient_of(chain(x, [1] * 8), x)
    for is_on in (True, True, True, False, True, True, False, False, True):
        with torch.set_grad_enabled(is_on), offloads():
            y = chain(x, [1] * 4)
            with torch.no_grad():
                chain(x, [1] * 2)
            y = chain(y, [1] * 4)
        if is_on:
            assert_same_bits([gradient_of(y, x)], [wanted])
        del y


def test_layer_is_frozen_and_trained_again(offloads: Offloads) -> None:
    torch_device = offloads.device.torch_device
    layers = [torch.nn.Linear(16, 16, device=torch_device) for _ in range(5)]
    x = torch.randn(16, 16, device=torch_device)

    def loss() -> Tensor:
        y = x
        for layer in layers:
            y = functional.dropout(functional.gelu(layer(y)), 0.3)
        return y.square().sum()

    def gradients() -> list[Tensor]:
        found = [p.grad for layer in layers for p in layer.parameters() if p.grad is not None]
        for layer in layers:
            layer.zero_grad()
        return found

    for number, frozen in enumerate(("", "", "", "0", "0", "0", "02", "2", "", "", "34", "34", "34")):
        for index, layer in enumerate(layers):
            layer.requires_grad_(str(index) not in frozen)
        torch.manual_seed(number)
        loss().backward()
        wanted = gradients()
        torch.manual_seed(number)
        with offloads():
            made = loss()
        made.backward()
        del made
        assert_same_bits(gradients(), wanted)
