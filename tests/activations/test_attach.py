"""`attach`: the same context without a change to the loop; several on one module, in any order."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.activations.saved.state import offload_states
from memkit.core.hooks import innermost_pack
from memkit.device import Device, ReferenceDevice
from memkit.plan import plan_ratio
from tests.activations.cases import assert_same_bits
from tests.activations.conftest import Offload
from tests.activations.remat.conftest import NO_PLAN_FITS

Attach = Callable[..., memkit.activations.Attachment]


class Net(nn.Module):
    """Saves its input, a buffer and each hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 8)
        self.register_buffer("scale", torch.linspace(0.5, 2, 32).repeat(16, 1))

    def forward(self, x: Tensor, *, shift: Tensor) -> Tensor:
        hidden = self.first(x).sin()
        return self.last((hidden * self.scale).cos() * shift)


HIDDEN_BYTES = 16 * 32 * 4


@pytest.fixture
def attaching(device: Device) -> Attach:
    """Return `attach` for the device, with no storage too small and no window."""

    def attach(model: nn.Module, *args: Any, **options: Any) -> memkit.activations.Attachment:
        context = memkit.CPUOffload(*args, min_bytes=0, window_bytes=0, device=device, **options)
        return memkit.attach(model, context)

    return attach


def _net(device: Device) -> tuple[Net, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Net().to(device.torch_device)
    x, shift = torch.randn(16, 32), torch.randn(16, 32)
    return model, x.to(device.torch_device), shift.to(device.torch_device)


def _train(model: nn.Module, x: Tensor, shift: Tensor) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x, shift=shift).square().mean()
        loss.backward()
        optimizer.step()
    return [loss.detach(), *[param.detach().clone() for param in model.parameters()]]


def _hooks(model: nn.Module) -> int:
    return sum(len(value) for module in model.modules() for key, value in module.__dict__.items() if key.endswith("_hooks"))


def test_parameters_buffers_and_inputs_stay_from_the_first_step_on(device: Device, attaching: Attach) -> None:
    """Only the inputs of the sine, the cosine and the last layer move."""
    model, x, shift = _net(device)
    attaching(model, 1.0, "known")
    for _ in range(2):
        model(x, shift=shift).sum().backward()
        stats = memkit.stats("known")

        assert stats.unique_bytes == stats.moved_out_bytes == 3 * HIDDEN_BYTES
        assert stats.wasted_bytes == 0


def test_remove_takes_the_hooks_off(device: Device, attaching: Attach) -> None:
    model, x, shift = _net(device)
    before = {name: set(module.__dict__) for name, module in model.named_modules()}
    handle = attaching(model, 1.0, "removed")
    assert _hooks(model) > 0
    loss = model(x, shift=shift).sum()
    handle.remove()
    handle.remove()
    loss.backward()
    model(x, shift=shift).sum().backward()

    assert _hooks(model) == 0
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == before
    assert memkit.stats("removed").num_iterations == 1


def test_forward_that_raises_ends_the_context(device: Device, attaching: Attach) -> None:
    model, x, shift = _net(device)
    attaching(model, 1.0, "raises")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="size of tensor"):
            model(x, shift=shift[:, :5])
        assert innermost_pack() is None

    assert_same_bits(_train(model, x, shift), _train(*_net(device)))
    device.synchronize()
    assert memkit.stats("raises").host_in_use_bytes == 0


def test_entering_that_raises_leaves_the_model_usable(device: Device, attaching: Attach) -> None:
    model, x, shift = _net(device)
    ratios = [2.0]
    attaching(model, lambda iteration: ratios[0], "schedule")
    with pytest.raises(ValueError, match="for iteration 0 must be from 0"):
        model(x, shift=shift)
    assert innermost_pack() is None

    ratios[0] = 1.0
    assert_same_bits(_train(model, x, shift), _train(*_net(device)))


@pytest.mark.parametrize("inner", ["offload", "no offload"])
def test_inner_model_decides_for_itself(inner: str, device: Device, attaching: Attach) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)]).to(device.torch_device)
    x = torch.randn(16, 32, device=device.torch_device)
    model(x).sum().backward()
    plain = [param.grad.clone() for param in model.parameters()]
    attaching(model, 1.0, "outer")
    attaching(model[1], 0.0, "inner") if inner == "offload" else memkit.attach(model[1], memkit.no_offload())
    model.zero_grad()
    model(x).sum().backward()

    assert_same_bits([param.grad for param in model.parameters()], plain)
    assert inner == "no offload" or memkit.stats("inner").moved_out_bytes == 0
    # each GELU saves its input, which the linear layer made; each linear layer but the first its own
    assert memkit.stats("outer").moved_out_bytes == 3 * HIDDEN_BYTES


class Recursive(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor, depth: int = 1) -> Tensor:
        x = self.linear(x).sin()
        return self(x, depth - 1).cos() if depth else x


@pytest.mark.parametrize(("build", "num_calls"), [(lambda: nn.Sequential(nn.Linear(32, 32), nn.GELU()), 2), (Recursive, 4)])
def test_module_that_is_called_several_times(
    build: Callable[[], nn.Module], num_calls: int, device: Device, attaching: Attach
) -> None:
    def run(block: nn.Module) -> list[Tensor]:
        block.zero_grad()
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)).to(device.torch_device)
        block(block(x).tanh()).sum().backward()
        return [param.grad.clone() for param in block.parameters()]

    block = build().to(device.torch_device)
    plain = run(block)
    attaching(block, 1.0, "several")

    for count in (1, 2):
        assert_same_bits(run(block), plain)
        assert memkit.stats("several").num_iterations == num_calls * count
    assert innermost_pack() is None


def _report_and_plan(device: Device, tag: str, widths: tuple[int, ...] = (32, 64, 16)) -> tuple[nn.Module, Tensor, int]:
    """Return a profiled model, its input, and the bytes of half of its saved tensors."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(*pair, bias=False), nn.Tanh()) for pair in itertools.pairwise(widths)]
    model, x = nn.Sequential(*layers).to(device.torch_device), torch.randn(16, widths[0], device=device.torch_device)
    memkit.profile_memory(model, x, backward=True, tag=tag, print_table=False)
    sizes = [4 * 16 * width for width in widths]  # the input, and each tanh's result
    return model, x, plan_ratio(sizes, 0.5, window_bytes=0, held=frozenset({0})).offload_bytes


@pytest.mark.parametrize("widths", [(32, 64, 16), (16,) * 8])
def test_report_of_the_model_plans_the_first_step(widths: tuple[int, ...], device: Device, attaching: Attach) -> None:
    model, x, half_bytes = _report_and_plan(device, "report", widths)
    attaching(model, 0.5, "report")
    for _ in range(2):
        model(x).sum().backward()

        assert memkit.stats("report").moved_out_bytes == half_bytes


def test_report_of_another_model_warns_and_is_not_used(device: Device, attaching: Attach) -> None:
    model, x, shift = _net(device)
    _report_and_plan(device, "other")
    with pytest.warns(UserWarning, match=r"\"other\" is of another model \(Sequential\): it is not used. Profile this one"):
        attaching(model, 1.0, "other")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = _train(model, x, shift)

    assert memkit.profile.find_report("other") is None
    assert_same_bits(found, _train(*_net(device)))
    _report_and_plan(device, "elsewhere")
    with pytest.warns(UserWarning, match="is of another model"):
        attaching(_net(device)[0], 1.0, "passed", profile=memkit.profile.find_report("elsewhere"))


def test_interrupt_leaves_no_hook_once_the_handle_is_removed_or_the_model_runs_again(
    device: Device, offloading: Offload
) -> None:
    class Interrupted(nn.Linear):
        is_interrupted = True

        def forward(self, x: Tensor) -> Tensor:
            if self.is_interrupted:
                raise KeyboardInterrupt
            return super().forward(x)

    model = Interrupted(8, 8).to(device.torch_device)
    x = torch.randn(4, 8, device=device.torch_device)
    handle = memkit.attach(model, memkit.CPUOffload(1.0, "interrupted", min_bytes=0, device=device))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            model(x)

    model.is_interrupted = False
    model(x).sum().backward()
    assert innermost_pack() is None
    model.is_interrupted = True
    with pytest.raises(KeyboardInterrupt):
        model(x)
    handle.remove()

    assert innermost_pack() is None


def test_step_inside_an_except_block_counts_as_any_other(device: Device) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.GELU()).to(device.torch_device)
    memkit.attach(model, memkit.CPUOffload(1.0, "except", min_bytes=0, device=device, window_bytes=0))
    x = torch.randn(4, 8, device=device.torch_device, requires_grad=True)
    try:
        raise ValueError("out of something")
    except ValueError:
        model(x * 1).sum().backward()

    (window,) = offload_states["except"].windows()
    assert len(window.traces) == 1


# Several on one module, and what `attach` returns


DEVICE = ReferenceDevice()

CONTEXTS: dict[str, Callable[[], Any]] = {
    "CPUOffload": lambda: memkit.CPUOffload(1.0, "together", min_bytes=0, window_bytes=0, device=DEVICE),
    "Rematerialize": lambda: memkit.Rematerialize(0.5, "together", min_bytes=0, device=DEVICE),
    "no_offload": memkit.no_offload,
}


def _blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Tanh()) for _ in range(4)))


def _block_gradients(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    model(torch.linspace(-1, 1, 128).view(8, 16)).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.filterwarnings(NO_PLAN_FITS)
@pytest.mark.parametrize(
    "order", [*itertools.permutations(CONTEXTS), *itertools.permutations(("CPUOffload", "Rematerialize"))], ids=" ".join
)
def test_contexts_are_attached_in_any_order(order: tuple[str, ...]) -> None:
    plain, model = _block_gradients(_blocks()), _blocks()
    handles = [memkit.attach(model, CONTEXTS[name]()) for name in order]

    for _ in range(3):
        assert_same_bits(_block_gradients(model), plain)
    stats = memkit.stats("together")
    assert stats.contexts == ("CPUOffload", "Rematerialize")
    assert stats.num_iterations == 3
    assert {"ratio asked / reached", "#dropped"} <= {line[:21].strip() for line in str(stats).splitlines()}
    assert stats.num_dropped > 0
    assert (stats.moved_out_bytes > 0) == ("no_offload" not in order)
    for handle in handles:
        handle.remove()
    assert_same_bits(_block_gradients(model), plain)
    assert innermost_pack() is None
    assert _hooks(model) == 0


@pytest.mark.filterwarnings(NO_PLAN_FITS)
@pytest.mark.parametrize("name", ["CPUOffload", "Rematerialize"])
def test_budget_is_attached_alone(name: str) -> None:
    model = _blocks()
    plain = _block_gradients(model)
    budget = memkit.attach(model, memkit.MemoryBudget(0.5, "alone", min_bytes=0, device=DEVICE))
    other = memkit.attach(model, CONTEXTS[name]())
    with pytest.raises(ValueError, match=rf'was entered inside a ({name} \(tag "together"\)|MemoryBudget \(tag "alone"\))'):
        _block_gradients(model)
    other.remove()

    for _ in range(4):
        assert_same_bits(_block_gradients(model), plain)
    budget.remove()
    assert_same_bits(_block_gradients(model), plain)
    assert innermost_pack() is None


@pytest.mark.parametrize("name", ["CPUOffload", "Rematerialize", "MemoryBudget"])
def test_handle_has_the_plan_and_the_figures_of_its_context(name: str) -> None:
    budget = functools.partial(memkit.MemoryBudget, "64KiB", "together", min_bytes=0, device=DEVICE)
    model, context = _blocks(), {**CONTEXTS, "MemoryBudget": budget}[name]()
    handle = memkit.attach(model, context)
    before = handle.plan
    for _ in range(3):
        _block_gradients(model)

    assert before is None
    assert handle.plan is not None
    assert handle.plan.offload_bytes == (memkit.stats("together").moved_out_bytes or 0)
    assert handle.stats() == memkit.stats("together") == context.stats()
    assert handle.stats().num_iterations == 3
    assert repr(handle) == f"<attached {context!r}>"
    handle.remove()
    assert repr(handle) == f"<attached no more {context!r}>"


def test_handle_of_what_plans_nothing_says_so() -> None:
    handle = memkit.attach(_blocks(), memkit.no_offload())

    assert handle.plan is None
    with pytest.raises(ValueError, match=r"stats needs a context with a tag; found <no_offload: .*Ask the CPUOffload"):
        handle.stats()


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning", "ignore:`torch.jit:DeprecationWarning")
def test_module_that_torchscript_has_compiled_takes_nothing() -> None:
    scripted = torch.jit.script(_blocks())

    with pytest.raises(ValueError, match=r"needs a module that takes hooks; found Sequential as torch\.jit\.script has"):
        memkit.attach(scripted, memkit.no_offload())
