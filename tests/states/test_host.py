"""Steps on the host: as the class steps CPU copies; the thread's work, the bytes over the link, and others' writes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from memkit.device import Device, ReferenceDevice
from memkit.errors import StateOffloadError
from memkit.plan import states as state_pieces
from memkit.states.host_steps import HostSteps, take_fingerprint
from memkit.transfer.host_memory import PromisedEvent
from tests.refusing import PinLimit
from tests.states.cases import FailsOnHost, assert_same, cut, make_training, offload, train

SIZES = [(64, 48), (48,), (7, 3), (5,), (64, 64), (1,), ()]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def make(device: Device, *, mixed: bool = False) -> list[nn.Parameter]:
    """Return bfloat16 parameters; some are float32 if `mixed`."""
    generator = torch.Generator().manual_seed(1)
    dtypes = [torch.float32 if mixed and number % 3 == 1 else torch.bfloat16 for number in range(len(SIZES))]
    return [
        nn.Parameter(torch.randn(size, generator=generator).to(device.torch_device, dtype))
        for size, dtype in zip(SIZES, dtypes, strict=True)
    ]


def give_grads(parameters: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        grad = torch.randn(parameter.size(), generator=generator)
        parameter.grad = grad.to(parameter.device, parameter.dtype)


def skip_a_gpu(device: Device) -> None:
    if device.torch_device.type != "cpu":
        pytest.skip("the device steps differ from the host's in last bits")


class _Seen(TorchDispatchMode):
    """Notes ops and the bytes that they touch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        touched = sum(leaf.nbytes for leaf in _tensors((args, kwargs)) if leaf.dim())
        self.calls.append((func.overloadpacket.__name__, touched))
        return result


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> _Seen:
    """Return the ops in the thread that steps."""
    mode, step = _Seen(), HostSteps._step

    def watched(*args: Any) -> None:
        with mode:
            step(*args)

    monkeypatch.setattr(HostSteps, "_step", watched)
    return mode


MARKS_BYTES = 16
"""Two fingerprints, which the thread compares."""
VIEWS = ("detach", "alias", "view", "empty", "set_")
"""They touch no bytes."""


@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "in windows"])
def test_in_a_steady_step_the_thread_runs_the_optimizer_alone(seen: _Seen, is_cut: bool, monkeypatch: Any) -> None:
    if is_cut:
        for name, value in (("PIECE_BYTES", 2**11), ("_LARGEST_PIECE_BYTES", 2**11), ("WINDOW_NUMEL", 64)):
            monkeypatch.setattr(state_pieces, name, value)
    device = ReferenceDevice()
    parameters = [parameter for parameter in make(device) if parameter.dim()]
    optimizer = adamw(parameters)
    numel = sum(parameter.numel() for parameter in parameters)
    with offload(optimizer, device, update="host", master=torch.float32) as states:
        for step in range(4):
            seen.calls.clear()
            give_grads(parameters, step)
            optimizer.step()
        num_pieces = sum(len(piece.parts) for piece in states.plan.pieces)
        assert is_cut == (num_pieces > len(states.plan.pieces))

    touching = [(name, num_bytes) for name, num_bytes in seen.calls if num_bytes and name not in VIEWS]
    steps = [num_bytes for name, num_bytes in touching if name.startswith("_fused_adamw")]
    assert len(steps) == num_pieces
    assert sum(steps) == 16 * numel  # the parameter, its gradient, and two states, as float32
    others = [(name, num_bytes) for name, num_bytes in touching if not name.startswith("_fused_adamw")]
    assert all(num_bytes <= MARKS_BYTES for _, num_bytes in others)


def test_a_step_moves_four_bytes_each_way_and_parameters_where_they_were_written_to() -> None:
    device = ReferenceDevice()
    parameters = [nn.Parameter(torch.ones(512, 32, dtype=torch.bfloat16)) for _ in range(6)]
    optimizer = adamw(parameters)
    numel = sum(parameter.numel() for parameter in parameters)
    found = []
    with offload(optimizer, device, update="host", master=torch.float32) as states:
        for step in range(4):
            before = states.stats()
            if step == 3:
                parameters[2].data[5, 7] += 1.0
            give_grads(parameters, step)
            optimizer.step()
            after = states.stats()
            found.append((after.d2h_bytes - before.d2h_bytes, after.h2d_bytes - before.h2d_bytes))
        marks = 512 * len(states.plan.pieces)
        assert sum(piece.sent_bytes for piece in states.plan.pieces) == 4 * numel
    first, _, steady, written = found
    assert first == (6 * numel + marks, 4 * numel)
    assert steady == (4 * numel + marks, 4 * numel)
    assert written == (4 * numel + marks + 2 * parameters[2].numel(), 4 * numel)


@pytest.mark.parametrize("options", [{}, {"when": "backward"}, {"overlap_forward": True}], ids=str)
@pytest.mark.parametrize("mixed", [False, True])
def test_steps_take_no_more_room_than_planned(device: Device, mixed: bool, options: dict[str, Any]) -> None:
    parameters = [parameter for parameter in make(device, mixed=mixed) if parameter.dim()]
    optimizer = adamw(parameters)
    with offload(optimizer, device, update="host", master=torch.float32, **options) as states:
        room_bytes, host_bytes = states.stats().room_bytes, states.stats().host_bytes
        assert room_bytes == states.plan.room_bytes
        for step in range(3):
            if options.get("when") == "backward":
                sum((parameter * (step + 1)).sum() for parameter in parameters).backward()
            else:
                give_grads(parameters, step)
            optimizer.step()
            states.wait()
        assert states.stats().room_bytes == room_bytes
        assert states.stats().host_bytes == host_bytes


def _swap_elements(parameters: list[nn.Parameter]) -> None:
    flat = parameters[0].data.view(-1)
    flat[[3, 1000]] = flat[[1000, 3]]


def _write_within(number: int, element: int, bits: int) -> Callable[[list[nn.Parameter]], None]:
    def write(parameters: list[nn.Parameter]) -> None:
        parameters[number].data.view(-1).view(torch.int16)[element] ^= bits

    return write


def _load(parameters: list[nn.Parameter]) -> None:
    model = nn.ParameterList(parameters)
    model.load_state_dict({name: torch.full_like(value, 0.5) for name, value in model.state_dict().items()})


WRITES: dict[str, Callable[[list[nn.Parameter]], object]] = {
    "nothing": lambda _: None,
    "through data": lambda parameters: parameters[4].data[2:9].fill_(0.25),
    "other data": lambda parameters: setattr(parameters[4], "data", torch.full_like(parameters[4], 2.0)),
    "a state dict": _load,
    "elements change places": _swap_elements,
    "two signs": lambda parameters: parameters[0].data.view(-1)[2:91:88].neg_(),
    "lowest bit": _write_within(0, 17, 1),
    "last element": _write_within(2, 20, 1),
    "a scalar": lambda parameters: parameters[6].data.fill_(3.0),
    "not a number": lambda parameters: parameters[0].data.view(-1)[5].fill_(math.nan),
    "minus zero": lambda parameters: parameters[0].data.view(-1)[5].fill_(-0.0),
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("mixed", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("write", WRITES)
def test_what_others_write_is_followed_as_on_the_device(device: Device, write: str, mixed: bool) -> None:
    skip_a_gpu(device)
    ends = []
    for update in ("device", "host"):
        parameters = make(device, mixed=mixed)
        optimizer = adamw(parameters)
        with offload(optimizer, device, update=update, master=torch.float32):
            for step in range(6):
                if step in (2, 4):
                    WRITES[write](parameters)
                give_grads(parameters, step)
                optimizer.step()
            ends.append(([parameter.detach() for parameter in parameters], optimizer.state_dict()))

    assert_same(*ends)


@pytest.mark.parametrize("how", ["in place", "another", "state dict"])
def test_what_is_written_to_a_copy_is_taken_back_as_on_the_device(device: Device, how: str) -> None:
    skip_a_gpu(device)
    ends = []
    for update in ("device", "host"):
        parameters = make(device)
        optimizer = adamw(parameters)
        with offload(optimizer, device, update=update, master=torch.float32):
            for step in range(5):
                if step == 3:
                    entries = optimizer.state[parameters[4]]
                    if how == "in place":
                        entries["master"].fill_(3.0)
                    elif how == "another":
                        entries["master"] = torch.full_like(entries["master"], 3.0)
                    else:
                        saved = copy.deepcopy(optimizer.state_dict())
                        saved["state"][4]["master"].fill_(3.0)
                        optimizer.load_state_dict(saved)
                with pytest.warns(UserWarning, match="were put elsewhere") if how == "another" and step == 3 else nullcontext():
                    give_grads(parameters, step)
                    optimizer.step()
            ends.append((parameters, optimizer.state_dict()))
    assert_same(*ends)


@pytest.mark.parametrize(("forms", "restored"), [("ctctct", 3), ("cctctc", 3)], ids=["as a whole", "in windows"])
def test_what_windows_have_stepped_since_is_known(forms: str, restored: int, device: Device, monkeypatch: Any) -> None:
    """A parameter that is contiguous in some steps ("c"), and in others transposed ("t") and stepped as a whole, is written
    back to its value from its last step of the same kind."""
    skip_a_gpu(device)
    cut(monkeypatch)
    ends = []
    for update in ("device", "host"):
        generator, found = torch.Generator().manual_seed(0), list[Tensor]()
        parameter = nn.Parameter(torch.randn(24, 22, generator=generator).bfloat16().to(device.torch_device))
        optimizer = adamw([parameter])
        with offload(optimizer, device, update=update, master=torch.float32):
            for step, form in enumerate(forms):
                value = found[restored] if step == len(forms) - 1 else parameter.detach()
                grad = torch.randn(24, 22, generator=generator).bfloat16().to(device.torch_device)
                parameter.data, parameter.grad = (
                    each.clone(memory_format=torch.contiguous_format) if form == "c" else each.mT.contiguous().mT
                    for each in (value, grad)
                )
                optimizer.step()
                found.append(parameter.detach().clone())
            ends.append(found)

    assert_same(*ends)


@pytest.mark.parametrize("mixed", [False, True])
def test_memory_that_is_not_pinned(device: Device, monkeypatch: pytest.MonkeyPatch, mixed: bool) -> None:
    skip_a_gpu(device)
    parameters, others = make(device, mixed=mixed), make(device, mixed=mixed)
    optimizer, other = adamw(parameters), adamw(others)
    with offload(other, device, update="device", master=torch.float32):
        for step in range(4):
            give_grads(others, step)
            other.step()
    PinLimit(device, monkeypatch, 2**18)
    with pytest.warns(UserWarning, match="pin"):
        states = offload(optimizer, device, update="host", master=torch.float32)
    with states:
        for step in range(4):
            give_grads(parameters, step)
            optimizer.step()
    assert_same(parameters, others)


def test_a_copy_to_memory_that_is_not_pinned_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has failed when the thread turns to its bytes: nothing is stepped with old gradients."""
    device = ReferenceDevice()
    parameters, is_reached = make(device), PromisedEvent.is_reached
    optimizer = adamw(parameters)
    PinLimit(device, monkeypatch, 2**18)

    def fail(*_: Any) -> None:
        raise ArithmeticError("no")

    def has_failed(event: PromisedEvent) -> bool:
        event._recording.exception()  # waits
        return is_reached(event)

    with pytest.warns(UserWarning, match="pin"):
        states = offload(optimizer, device, update="host", master=torch.float32)
    before = list[Tensor]()

    def steps(patch: pytest.MonkeyPatch) -> None:
        with states:
            for step in range(4):
                before[:] = [parameter.detach().clone() for parameter in parameters]
                give_grads(parameters, step)
                if step == 3:
                    patch.setattr("memkit.transfer.host_memory._Side.copy", fail)
                    patch.setattr(PromisedEvent, "is_reached", has_failed)
                optimizer.step()

    with monkeypatch.context() as patch, pytest.raises(ArithmeticError, match="no"):
        steps(patch)
    assert_same([parameter.detach() for parameter in parameters], before)


def test_host_follows_cpu_copies(device: Device) -> None:
    model, optimizer = make_training(device, fused=True)
    copies = [torch.nn.Parameter(parameter.detach().cpu().clone()) for parameter in model.parameters()]
    reference = torch.optim.AdamW(copies, lr=1e-2, fused=True)
    with offload(optimizer, device, update="host"):
        for step in range(4):
            model(torch.full((2, 24), 0.1 * step, device=device.torch_device)).square().mean().backward()
            for parameter, copied in zip(model.parameters(), copies, strict=True):
                copied.grad = None if parameter.grad is None else parameter.grad.cpu().clone()
            reference.step()
            optimizer.step()
            optimizer.zero_grad()
        for parameter, copied in zip(model.parameters(), copies, strict=True):
            assert_same(parameter.detach().cpu(), copied.detach())
        assert_same(reference.state_dict(), optimizer.state_dict())


@pytest.mark.filterwarnings("ignore:StateOffload. .* steps on the host without its fused kernel")
def test_an_error_of_the_class_on_the_host_says_what_is_lost(device: Device) -> None:
    model, optimizer = make_training(device, FailsOnHost)
    with offload(optimizer, device, update="host"):
        train(model, optimizer, device, range(2))
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        optimizer.told["fails"] = 1
        with pytest.raises(ArithmeticError, match="no"):
            train(model, optimizer, device, range(2, 3))
        assert_same(saved[0]["layers.0.weight"], model.state_dict()["layers.0.weight"])
        with pytest.raises(StateOffloadError, match=r"they are lost. Load a checkpoint"):
            optimizer.step()
        optimizer.load_state_dict(saved[1])
        optimizer.step()


# Fingerprints


MODULO = 2**64


def fingerprint(words: Tensor) -> int:
    found = torch.zeros(1, dtype=torch.int64)
    take_fingerprint(words, (torch.empty_like(words), torch.empty_like(words)), found)
    return int(found)


def by_hand(words: list[int]) -> int:
    """Compute the fingerprint with Python's numbers: SplitMix64's finalizer as its authors write it."""
    total = 0
    for index, word in enumerate(words):
        z = (word + index * 0x9E3779B97F4A7C15) % MODULO
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % MODULO
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % MODULO
        total += z ^ (z >> 31)
    total %= MODULO
    return total - MODULO if total >= MODULO // 2 else total


WORDS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40)


@settings(max_examples=15)
@given(WORDS)
def test_is_that_of_splitmix(words: list[int]) -> None:
    assert fingerprint(torch.tensor(words, dtype=torch.int64)) == by_hand(words)


def test_sees_any_two_signs() -> None:
    """The contributions of the first bits of two words must not cancel out."""
    words = torch.randint(-(2**62), 2**62, (60,), generator=torch.Generator().manual_seed(1))
    before, seen = fingerprint(words), set()
    for one in range(60):
        for other in range(one):
            flipped = words.clone()
            flipped[[one, other]] ^= -(2**63)
            seen.add(fingerprint(flipped))

    assert before not in seen
    assert len(seen) == 60 * 59 / 2
