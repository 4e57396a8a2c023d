"""No room on the device, or another result than in the forward: memkit mends it or raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import memkit
from memkit.device import CpuDevice, Device
from memkit.recording import replay
from tests.activations.cases import assert_same_bits, gradients, inputs_on
from tests.activations.chains import UNIT_BYTES, chain, leaf_on, step
from tests.activations.remat.cases import COMPUTATIONS
from tests.activations.remat.conftest import NO_PLAN_FITS, Remat

pytestmark = [pytest.mark.filterwarnings(NO_PLAN_FITS), pytest.mark.usefixtures("quick_plans")]


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[[Iterator[bool]], list[int]]:
    """Return a function that makes replays fail for want of memory where an iterator says so; it counts the evictable values
    then."""

    def start(refused: Iterator[bool]) -> list[int]:
        num_evictable: list[int] = []
        repeat = replay.Replay.run

        def repeat_or_refuse(run: replay.Replay, *args: Any) -> None:
            if next(refused, False):
                num_evictable.append(len(args[-1].__self__.walk.evictable))
                raise torch.OutOfMemoryError("injected: out of memory")
            repeat(run, *args)

        monkeypatch.setattr(replay.Replay, "run", repeat_or_refuse)
        return num_evictable

    return start


@pytest.mark.core(1)
@pytest.mark.parametrize("number", range(0, 12, 2))
@pytest.mark.parametrize("policy", ["plan", "dtr"])
@pytest.mark.parametrize("name", ["skips", "mlp", "relu_and_residuals", "many_results", "parts_that_count_their_writes_apart"])
def test_no_room_once(name: str, policy: str, number: int, refuse: Callable[[Iterator[bool]], list[int]]) -> None:
    """All that can go is dropped, also the replay's later inputs, and the op is run once more."""
    device = CpuDevice()
    plain = gradients(COMPUTATIONS[name], device.torch_device, lambda: torch.enable_grad())
    context = memkit.Rematerialize(0.5, "once", policy=policy, min_bytes=0, device=device)
    num_evictable = refuse(iter([False] * number + [True]))
    for _ in range(2):
        assert_same_bits(gradients(COMPUTATIONS[name], device.torch_device, lambda: context), plain)
    assert len(num_evictable) == 1
    assert memkit.stats("once").live_records == 0


def test_no_room_at_all_raises_the_original_error_with_a_note(
    device: Device, remat_on: Remat, refuse: Callable[[Iterator[bool]], list[int]]
) -> None:
    x, plain = leaf_on(device.torch_device), step(leaf_on(device.torch_device), [1] * 12)
    with remat_on(6 * UNIT_BYTES, "full"):
        y = chain(x, [1] * 12)
    with pytest.MonkeyPatch.context():
        num_evictable = refuse(iter([True] * 2))
        with pytest.raises(torch.OutOfMemoryError, match="injected: out of memory") as caught:
            y.sum().backward(retain_graph=True)

    (note,) = caught.value.__notes__
    assert "memkit: no room on the device to run aten." in note
    assert "again" in note
    assert "even after everything that Rematerialize may drop was dropped" in note
    assert len(num_evictable) == 2
    assert num_evictable[1] <= 1 < num_evictable[0]  # what the replay itself reads
    y.sum().backward()
    assert_same_bits([y.detach(), x.grad], plain)


class Fickle(torch.autograd.Function):
    """Makes something else each time, unseen by any recorder."""

    num_calls = 0

    @staticmethod
    def forward(ctx: object, x: Tensor, op: Callable[[Tensor], Tensor]) -> Tensor:
        return op(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@torch.library.custom_op("memkit_tests::fickle", mutates_args=())
def _fickle(x: Tensor) -> Tensor:
    Fickle.num_calls += 1
    return x + Fickle.num_calls


@torch.library.custom_op("memkit_tests::shrinks", mutates_args=())
def _shrinks(x: Tensor) -> Tensor:
    Fickle.num_calls += 1
    return x[: 8 // Fickle.num_calls].clone()


def test_verification_names_the_op_and_the_module(device: Device, remat_on: Remat) -> None:
    class Odd(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Fickle.apply(x * 2, torch.ops.memkit_tests.fickle)

    x, _ = inputs_on(device.torch_device)
    model = torch.nn.Sequential(torch.nn.Tanh(), Odd(), torch.nn.Sigmoid())
    with remat_on("1B", "verify", verify=True, pure_ops=["memkit_tests::fickle"]):
        loss = model(x).exp().sum()

    with pytest.raises(
        memkit.errors.ReplayMismatchError, match=r"memkit_tests\.fickle.* in 1 gave another result .* memkit.keep"
    ):
        loss.backward()


def test_verification_compares_each_call_of_an_op(device: Device, remat_on: Remat) -> None:
    x, root = inputs_on(device.torch_device)
    with remat_on("1B", "each", verify=True):
        loss = (root.detach().sin() * x.sin()[:1]).exp().sum()
    x.data.add_(1)  # no counter tells

    with pytest.raises(memkit.errors.ReplayMismatchError, match=r"aten\.sin.* gave another result"):
        loss.backward()


def test_op_that_makes_another_size_when_it_runs_again_raises(device: Device, remat_on: Remat) -> None:
    Fickle.num_calls = 0
    x, _ = inputs_on(device.torch_device)
    with remat_on("1B", "size", pure_ops=["memkit_tests::shrinks"]):
        loss = Fickle.apply(x * 2, torch.ops.memkit_tests.shrinks).sin().exp().sum()

    message = r"memkit_tests\.shrinks.* has made 1024 bytes in the forward, and 512 when it was run again"
    with pytest.raises(memkit.errors.ReplayMismatchError, match=message):
        loss.backward()
