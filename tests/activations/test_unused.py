"""`attach` on a module that is trained without being called says so once."""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

import memkit
from memkit.device import ReferenceDevice

DEVICE = ReferenceDevice()


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


def test_training_step_that_calls_the_parts_warns_once_where_it_was_attached(
    lit: Trained,
) -> None:
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


@pytest.fixture
def _hook_of_the_user() -> Iterator[None]:
    handle = torch_optimizer.register_optimizer_step_pre_hook(lambda *_: None)
    yield
    handle.remove()


def test_step_goes_on_where_others_have_hooks_behind_this_one(lit: Trained, request: pytest.FixtureRequest) -> None:
    model, x, optimizer = lit
    _attach(model)
    request.getfixturevalue("_hook_of_the_user")

    for is_first in (True, False):
        before = model.head.weight.detach().clone()
        with pytest.warns(UserWarning, match="does nothing") if is_first else contextlib.nullcontext():
            _step(model.training_step(x), optimizer)
        assert not torch.equal(model.head.weight, before)


def test_each_of_two_modules_that_are_not_called_warns_once() -> None:
    first, second, x = Lit(), Lit(), torch.randn(4, 8)
    _attach(first)
    _attach(second)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    with pytest.warns(UserWarning, match="does nothing") as caught:
        _step(first.training_step(x) + second.training_step(x), optimizer)
    _step(first.training_step(x) + second.training_step(x), optimizer)

    assert len(caught) == 2


def test_model_that_is_collected_within_a_step_does_not_break_it(request: pytest.FixtureRequest) -> None:
    gc.collect()  # models of other tests
    model, other = Lit(), nn.Linear(8, 2)
    num_hooks = len(torch_optimizer._global_optimizer_pre_hooks)
    _attach(model)
    collecting = torch_optimizer.register_optimizer_step_pre_hook(lambda *_: _collect())
    request.addfinalizer(collecting.remove)
    request.getfixturevalue("_hook_of_the_user")
    del model

    _step(other(torch.ones(1, 8)).sum(), torch.optim.SGD(other.parameters(), lr=0.1))
    memkit.attach(other, memkit.CPUOffload(1.0, "unused", device=DEVICE)).remove()

    assert len(torch_optimizer._global_optimizer_pre_hooks) == num_hooks + 2


def _collect() -> None:
    gc.collect()
