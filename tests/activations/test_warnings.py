"""One warning says that nothing is done: nothing is large enough, no backward comes, nobody calls the module, or the device has
no memory of its own."""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

import memkit
from memkit import schedules
from memkit.activations.context import ForwardContext
from memkit.device import CpuDevice, Device, ReferenceDevice, why_nothing_is_freed

DEVICE = ReferenceDevice()
Context = Callable[..., Any]


# Nothing is large enough


def _small_net() -> tuple[nn.Module, Tensor]:
    """Return a model that saves eight hidden states of 2 KiB beside its input of the same size."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Sigmoid()) for _ in range(8))), torch.randn(16, 32)


def _small_step(context: Context, *args: Any, **options: Any) -> None:
    model, x = _small_net()
    with context(*args, device=DEVICE, **options):
        out = model(x)
    out.sum().backward()


@pytest.mark.parametrize(
    ("context", "did", "num_saved", "kib"),
    [(memkit.CPUOffload, "moved", 9, "18.00"), (memkit.Rematerialize, "dropped", 8, "16.00")],
)
def test_nothing_large_enough_warns_once_for_a_tag_at_the_users_line(
    context: Context, did: str, num_saved: int, kib: str
) -> None:
    message = (
        rf'{context.__name__} \(tag "(one|other)"\): nothing was {did}: only tensors of at least min_bytes \(1.00 MiB\) are, '
        rf"and the {num_saved} saved tensors have {kib} KiB in all, and the largest 2.00 KiB. Pass a smaller min_bytes \(min_"
    )
    for tag in ("one", "other", "one"):
        with pytest.warns(UserWarning, match=message) as caught:
            _small_step(context, 0.5, tag)
        for _ in range(2):
            _small_step(context, 0.5, tag)

        assert [warning.filename for warning in caught] == [__file__]
        if tag == "other":
            memkit.reset("one")  # which warns again


@pytest.mark.parametrize(
    ("context", "args", "options"),
    [
        (memkit.CPUOffload, (0.0,), {}),
        (memkit.CPUOffload, (schedules.constant(0.0),), {}),
        (memkit.CPUOffload, (0.5,), {"min_bytes": 2048}),
        (memkit.Rematerialize, (1.0,), {}),
        (memkit.Rematerialize, (8 * 2048,), {}),
        (memkit.Rematerialize, ("1MiB",), {}),
        (memkit.Rematerialize, (0.5,), {"min_bytes": 2048}),
    ],
)
def test_what_does_all_that_was_asked_for_does_not_warn(context: Context, args: tuple[Any, ...], options: Any) -> None:
    for _ in range(2):
        _small_step(context, *args, **options)


@pytest.mark.parametrize("context", [memkit.CPUOffload, memkit.Rematerialize])
def test_small_steps_after_a_large_one_and_parameters_alone_do_not_warn(context: Context) -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    with context(0.5, "parameters", device=DEVICE):
        loss = (weight * weight).sum()
    loss.backward()
    _small_step(context, 0.5, "mixed", min_bytes=1)
    _small_step(context, 0.5, "mixed")


@pytest.mark.parametrize("context", [memkit.CPUOffload, memkit.Rematerialize])
def test_forward_that_fails_leaves_the_warning_to_the_next(context: Context) -> None:
    model, x = _small_net()
    with pytest.raises(RuntimeError, match="cannot be multiplied"), context(0.5, "fails", device=DEVICE):
        model(x) @ x

    with pytest.warns(UserWarning, match="nothing was"):
        _small_step(context, 0.5, "fails")


def test_schedule_that_begins_at_zero_warns_when_something_is_to_move() -> None:
    ratio = schedules.linear(0, 1, num_iterations=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _small_step(memkit.CPUOffload, ratio)

    with pytest.warns(UserWarning, match="nothing was moved"):
        _small_step(memkit.CPUOffload, ratio)


def test_attached_model_warns_without_its_parameters_and_inputs() -> None:
    model, x = _small_net()
    memkit.attach(model, memkit.CPUOffload(0.5, "attached", device=DEVICE))
    with pytest.warns(UserWarning, match=r"the 8 saved tensors have 16.00 KiB in all"):
        model(x).sum().backward()


def test_one_small_tensor_is_named_as_one() -> None:
    with (
        pytest.warns(UserWarning, match=r"and the only saved tensor has 64 bytes\. Pass"),
        memkit.CPUOffload(0.5, device=DEVICE),
    ):
        torch.ones(16, requires_grad=True).mul(2).sigmoid()


# No backward asks for what forwards saved


UNASKED = r'\(tag "unasked"\): 4 forwards saved tensors for a backward, and none came'
MAKE: dict[str, Callable[[], ForwardContext]] = {
    "CPUOffload": lambda: memkit.CPUOffload(0.5, "unasked", min_bytes=0, device=ReferenceDevice()),
    "Rematerialize": lambda: memkit.Rematerialize(0.5, "unasked", min_bytes=0, device=ReferenceDevice()),
    "MemoryBudget": lambda: memkit.MemoryBudget("1MiB", "unasked", min_bytes=0, device=ReferenceDevice()),
}


@pytest.fixture(params=list(MAKE))
def make(request: pytest.FixtureRequest) -> Callable[[], ForwardContext]:
    return MAKE[request.param]


@pytest.fixture
def step() -> Callable[[Callable[[], ForwardContext]], Tensor]:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3))), torch.randn(4, 16)

    def run(make: Callable[[], ForwardContext]) -> Tensor:
        with make():
            return model(x).sum()

    return run


Step = Callable[[Callable[[], ForwardContext]], Tensor]


def test_six_steps_without_a_backward_warn_once(make: Callable[[], ForwardContext], step: Step) -> None:
    def steps(number: int) -> Tensor:
        for _ in range(number):
            loss = step(make)  # as in a loop of a training: the last graph is still alive
        return loss

    with pytest.warns(UserWarning, match=UNASKED) as seen:
        steps(6)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(10).backward()
    assert [warning.filename for warning in seen] == [__file__]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["steps", "evaluations before steps", "one backward for many", "nothing saved"])
def test_forwards_with_a_backward_or_nothing_saved_are_fine(kind: str, make: Callable[[], ForwardContext], step: Step) -> None:
    if kind == "one backward for many":
        torch.stack([step(make) for _ in range(8)]).sum().backward()
        return
    if kind == "nothing saved":
        step = torch.no_grad()(step)
    for _ in range(3 if kind == "evaluations before steps" else 0):
        step(make)
    for _ in range(8 if kind != "nothing saved" else 0):
        step(make).backward()
    for _ in range(8):
        step(make)


def test_attached_models_warn_as_well(make: Callable[[], ForwardContext]) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    memkit.attach(model, make())
    for _ in range(4):
        model(torch.randn(4, 16))

    with pytest.warns(UserWarning, match=UNASKED):
        output = model(torch.randn(4, 16))

    output.sum().backward()


# A module is trained without being called


class Lit(nn.Module):
    """As a LightningModule: a step calls parts of the module, and `forward` is for inference."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Sequential(nn.Linear(8, 8), nn.GELU()), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))

    def training_step(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x)).square().mean()


Trained = tuple[Lit, Tensor, torch.optim.Optimizer]


@pytest.fixture
def lit() -> Trained:
    model = Lit()
    return model, torch.randn(4, 8), torch.optim.SGD(model.parameters(), lr=0.1)


def _attach(model: nn.Module) -> memkit.activations.Attachment:
    return memkit.attach(model, memkit.CPUOffload(1.0, "unused", min_bytes=0, device=DEVICE))


def _step(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_training_step_that_calls_the_parts_warns_once_where_it_was_attached(lit: Trained) -> None:
    model, x, optimizer = lit
    line = sys._getframe().f_lineno + 1
    _handle = memkit.attach(model, memkit.CPUOffload(1.0, "unused", device=DEVICE))
    with pytest.warns(
        UserWarning,
        match=r'attach \(tag "unused"\) does nothing: a Lit is trained, and was never called itself with grad mode on\. .* '
        r"Attach to the modules in it that are called \(encoder, head\), or put the context around the forward",
    ) as caught:
        _step(model.training_step(x), optimizer)
    _step(model.training_step(x), optimizer)

    assert [(warning.filename, warning.lineno) for warning in caught] == [(__file__, line)]


@pytest.mark.parametrize("run", ["method", "parts behind a validation", "copy"])
def test_only_a_call_with_grad_mode_is_use_of_it(run: str, lit: Trained) -> None:
    model, x, optimizer = lit
    num_hooks = len(torch_optimizer._global_optimizer_pre_hooks)
    _attach(model)
    if run == "copy":  # it is left alone
        copied = copy.deepcopy(model)
        _step(copied.training_step(x), torch.optim.SGD(copied.parameters(), lr=0.1))
    with torch.no_grad():
        model(x)
    with pytest.warns(UserWarning, match="does nothing: a Lit is trained"):
        _step(model.forward(x).sum() if run == "method" else model.training_step(x), optimizer)
    model(x)

    assert len(torch_optimizer._global_optimizer_pre_hooks) == num_hooks  # the hook goes with the first forward


def test_model_that_is_called_and_steps_of_others_and_without_gradients_do_not_warn(lit: Trained) -> None:
    model, x, optimizer = lit
    num_hooks, other = len(torch_optimizer._global_optimizer_pre_hooks), nn.Linear(8, 2)
    _attach(model)
    _step(other(x).sum(), torch.optim.SGD(other.parameters(), lr=0.1))
    optimizer.step()
    with torch.no_grad():
        model.training_step(x)
        model(x)
    optimizer.step()
    for _ in range(2):
        _step(model(x).sum(), optimizer)

    assert len(torch_optimizer._global_optimizer_pre_hooks) == num_hooks


def test_gradients_from_before_put_the_warning_off_by_one_step(lit: Trained) -> None:
    model, x, optimizer = lit
    model(x).sum().backward()
    _attach(model)
    optimizer.step()

    with pytest.warns(UserWarning, match="does nothing"):
        _step(model.training_step(x), optimizer)


def test_model_that_is_gone_leaves_no_hook() -> None:
    num_hooks = len(torch_optimizer._global_optimizer_pre_hooks)
    model = Lit()
    _attach(model)
    assert len(torch_optimizer._global_optimizer_pre_hooks) == num_hooks + 1
    del model
    gc.collect()

    assert len(torch_optimizer._global_optimizer_pre_hooks) == num_hooks


def test_step_goes_on_where_others_have_hooks_behind_this_one(lit: Trained, request: pytest.FixtureRequest) -> None:
    model, x, optimizer = lit
    _attach(model)
    request.addfinalizer(torch_optimizer.register_optimizer_step_pre_hook(lambda *_: None).remove)

    for is_first in (True, False):
        before = model.head.weight.detach().clone()
        with pytest.warns(UserWarning, match="does nothing") if is_first else contextlib.nullcontext():
            _step(model.training_step(x), optimizer)
        assert not torch.equal(model.head.weight, before)


def test_model_that_is_collected_within_a_step_does_not_break_it(request: pytest.FixtureRequest) -> None:
    gc.collect()  # models of other tests
    model, other = Lit(), nn.Linear(8, 2)
    num_hooks = len(torch_optimizer._global_optimizer_pre_hooks)
    _attach(model)

    def collect(*_: object) -> None:
        gc.collect()

    collecting = torch_optimizer.register_optimizer_step_pre_hook(collect)
    request.addfinalizer(collecting.remove)
    request.addfinalizer(torch_optimizer.register_optimizer_step_pre_hook(lambda *_: None).remove)
    del model

    _step(other(torch.ones(1, 8)).sum(), torch.optim.SGD(other.parameters(), lr=0.1))
    memkit.attach(other, memkit.CPUOffload(1.0, "unused", device=DEVICE)).remove()

    assert len(torch_optimizer._global_optimizer_pre_hooks) == num_hooks + 2


# No memory of its own


def _cpu_step(device: str | torch.device | Device | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16), nn.GELU()] * 3)
    with memkit.CPUOffload(1.0, "here", min_bytes=0, window_bytes=0, device=device):
        loss = model(torch.randn(4, 16)).sum()
    loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), CpuDevice(), None])
def test_nothing_moves_on_the_cpu_with_one_warning(device: str | torch.device | Device | None) -> None:
    with pytest.warns(UserWarning, match=r"nothing moves: the CPU has no memory apart from the host's") as caught:
        first = _cpu_step(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = _cpu_step(device)

    stats = memkit.stats("here")
    assert [warning.filename for warning in caught] == [__file__]
    assert (stats.seen_bytes, stats.moved_out_bytes, stats.host_held_bytes) == (0, 0, 0)
    assert all(map(torch.equal, first, second))


class Shared(ReferenceDevice):
    """A GPU that has none."""

    has_own_memory = False


def _offload(model: nn.Module, x: Tensor, device: Device) -> None:
    with memkit.CPUOffload(1.0, "shared", min_bytes=0, device=device):
        loss = model(x).sum()
    loss.backward()
    assert memkit.stats("shared").num_copies_out == 0


def _mark(model: nn.Module, x: Tensor, device: Device) -> None:
    with memkit.Rematerialize(1.0, "shared", min_bytes=0, device=device):
        loss = model(memkit.offload(x * 2)).sum()
    loss.backward()


def _budget(model: nn.Module, x: Tensor, device: Device) -> None:
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(4):
        with memkit.MemoryBudget(0.5, "shared", optimizer=optimizer, min_bytes=0, device=device):
            loss = model(x).sum()
        loss.backward()
    stats = memkit.stats("shared")
    assert (stats.follows_plan, stats.num_copies_out) == (True, 0)
    assert stats.num_dropped > 0


def _layers(model: nn.Module, _: Tensor, device: Device) -> None:
    memkit.LayerOffload(model.requires_grad_(False), offload_ratio=1.0, device=device).close()


def _states(model: nn.Module, _: Tensor, device: Device) -> None:
    memkit.StateOffload(torch.optim.AdamW(model.parameters()), device=device).close()


@pytest.mark.parametrize("device", [CpuDevice(), Shared()], ids=["cpu", "shared"])
@pytest.mark.parametrize("use", [_offload, _mark, _budget, _layers, _states])
def test_all_features_say_alike_that_copies_free_nothing(use: Callable[..., None], device: Device) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Tanh()) for _ in range(6)))
    with pytest.warns(UserWarning, match="moving bytes to the host frees nothing") as caught:
        use(model, torch.randn(4, 16), device)

    (message,) = (str(warning.message) for warning in caught)
    assert message.endswith(why_nothing_is_freed(device) or "")
    assert why_nothing_is_freed(ReferenceDevice()) is None
