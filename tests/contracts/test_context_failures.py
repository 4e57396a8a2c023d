"""Errors in and around a context reach the user unchanged, nothing is lost, and the next step works."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memkit
from memkit.activations.context import ForwardContext
from memkit.core.hooks import innermost_pack, stacked_owners
from tests.activations.cases import assert_same_bits
from tests.activations.chains import chain, leaf_on, step
from tests.activations.remat.conftest import NO_PLAN_FITS
from tests.contracts.conftest import Context

pytestmark = [pytest.mark.filterwarnings(NO_PLAN_FITS), pytest.mark.usefixtures("only_new_objects", "quick_plans")]

ERRORS = [ValueError("mine"), KeyboardInterrupt()]


class Fails(torch.autograd.Function):
    """Saves its input and raises in the chosen direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, error: BaseException, is_forward: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.error = error
        if is_forward:
            raise error
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        assert len(ctx.saved_tensors) == 1
        raise ctx.error


def _plain(context: Context, num_units: int = 8) -> list[Tensor]:
    return step(leaf_on(context.torch_device), [1] * num_units)


def _assert_next_steps_work(context: Context) -> None:
    x, plain = leaf_on(context.torch_device), _plain(context)
    for _ in range(2):
        assert_same_bits(step(x, [1] * 8, context), plain)
    gc.collect()
    assert innermost_pack() is None
    assert not stacked_owners()
    assert torch._C._len_torch_dispatch_stack() == 0
    assert context.num_live == 0


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_error_in_the_forward(error: BaseException, any_context: Context) -> None:
    x, made = leaf_on(any_context.torch_device), any_context()
    for _ in range(3):

        def fail() -> None:
            with made:
                Fails.apply(chain(x, [1] * 6), error, True)

        with pytest.raises(type(error)) as caught:
            fail()
        assert caught.value is error
        del caught
        error.__traceback__ = None
        assert innermost_pack() is None

        _assert_next_steps_work(any_context)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_error_in_the_backward(error: BaseException, any_context: Context) -> None:
    x = leaf_on(any_context.torch_device)
    for _ in range(3):
        with any_context():
            y = chain(Fails.apply(chain(x, [1] * 5), error, False), [1] * 5)
        with pytest.raises(type(error)) as caught:
            y.sum().backward()
        del caught
        error.__traceback__ = None
        del y

        _assert_next_steps_work(any_context)


def test_error_in_a_tensor_hook(any_context: Context) -> None:
    """The graph stays usable if it was retained."""

    def fail(grad: Tensor) -> None:
        raise ValueError("mine")

    x, plain = leaf_on(any_context.torch_device), _plain(any_context, 10)
    for _ in range(3):
        with any_context():
            middle = chain(x, [1] * 5)
            y = chain(middle, [1] * 5)
        handle = middle.register_hook(fail)
        with pytest.raises(ValueError, match="mine"):
            y.sum().backward(retain_graph=True)
        handle.remove()
        x.grad = None
        y.sum().backward()
        assert_same_bits([y.detach(), x.grad], plain)
        del y, middle

        _assert_next_steps_work(any_context)


def test_error_in_a_hook_of_the_users_pack(context: Context) -> None:
    def fail(tensor: Tensor) -> Tensor:
        raise ValueError("mine")

    x = leaf_on(context.torch_device)
    with context():
        y = chain(x, [1] * 3)
        with torch.autograd.graph.saved_tensors_hooks(fail, fail), pytest.raises(ValueError, match="mine"):
            y.sin()
    del y

    _assert_next_steps_work(context)


# Where it is not to be entered


def test_same_object_twice_at_once(context: Context) -> None:
    x, made = leaf_on(context.torch_device), context()
    with made:
        y = chain(x, [1] * 3)
        with pytest.raises(ValueError, match=r'"contract".* is already entered'), made:
            pytest.fail("entered twice")
        y = chain(y, [1] * 3)
    y.sum().backward()
    with torch.no_grad(), made, pytest.raises(ValueError, match="already entered"), made:
        pytest.fail("entered twice")

    assert_same_bits([y.detach(), x.grad], _plain(context, 6))
    del y
    _assert_next_steps_work(context)


@pytest.mark.parametrize("is_attached", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_inside_a_checkpointed_function(use_reentrant: bool, is_attached: bool, context: Context) -> None:
    block = nn.Tanh()
    made = context()
    if is_attached:
        if not isinstance(made, ForwardContext):
            pytest.skip("one is attached inside of another's call")
        memkit.attach(block, made)

    def run(x: Tensor) -> Tensor:
        with nullcontext() if is_attached else made:
            return block(x)

    with pytest.raises(ValueError, match=r'"contract".* was entered inside a checkpointed function.*[Pp]ut the context'):
        checkpoint(run, leaf_on(context.torch_device), use_reentrant=use_reentrant)

    assert innermost_pack() is None
    with pytest.raises(ValueError, match="Run a forward in a context with tag="):
        memkit.stats(context.tag)


@pytest.mark.slow
@pytest.mark.parametrize(
    "end",
    [
        "loss.backward(retain_graph=True); sys.exit(0)",
        "import threading; threading.Thread(target=loss.backward).start()",
    ],
)
def test_interpreter_shutdown_with_graphs_alive(end: str) -> None:
    program = """
        import sys, torch, memkit
        from tests.contracts.contexts import KINDS, MORE_KINDS
        device = memkit.device.ReferenceDevice()
        x = torch.randn(256, requires_grad=True)
        for name, kind in (KINDS | MORE_KINDS).items():
            for number in range(2):
                with kind.make(device, name):
                    y = x.clone()
                    for _ in range(8):
                        y = y.sin()
                globals()[f"alive {name} {number}"] = loss = y.sum()
        handle = memkit.attach(torch.nn.Linear(4, 4), memkit.CPUOffload(1.0, "attached", device=device))
    """
    ignore = f"import warnings; warnings.filterwarnings({NO_PLAN_FITS.split(':')[0]!r}, {NO_PLAN_FITS.split(':')[1]!r})"
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", f"{ignore}\n{textwrap.dedent(program)}\n{end}"],
        capture_output=True,
        text=True,
        timeout=600,
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
