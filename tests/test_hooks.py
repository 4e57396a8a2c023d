"""Hooks on modules, optimizers and nodes, and handles of saved tensors."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer
from torch.utils.checkpoint import checkpoint

from memkit.core import torch_private
from memkit.core.hooks import HookSet, SavedTensorHooks, in_checkpoint, innermost_pack, may_step_in_backward, receiving_pack
from memkit.core.kept import FlattenedHandle, ForwardedHandle, KeptHandle
from memkit.core.owners import aside, owners_set_aside
from tests.weights.wrapped import Int8


def test_hooks_run_around_the_users_own() -> None:
    order: list[str] = []
    module = nn.Identity()
    module.register_forward_pre_hook(lambda *_: order.append("user before"))
    module.register_forward_hook(lambda *_: order.append("user after"))

    with contextlib.suppress(KeyError), HookSet() as hooks:
        hooks.around_forward(module, before=lambda *_: order.append("before"), after=lambda *_: order.append("after"))
        module(torch.zeros(1))
        assert len(hooks) == 2
        raise KeyError

    assert order == ["before", "user before", "user after", "after"]
    assert (len(hooks), len(module._forward_hooks), len(module._forward_pre_hooks)) == (0, 1, 1)


def test_hooks_are_removed_last_first() -> None:
    removed: list[int] = []
    hooks = HookSet()
    hooks._handles = [SimpleNamespace(remove=partial(removed.append, number)) for number in (0, 1)]
    hooks.remove()

    assert removed == [1, 0]


class _Stepped:
    """Notes the steps of all optimizers, until it is dropped."""

    def __init__(self) -> None:
        self.optimizers: list[torch.optim.Optimizer] = []
        self.hooks = HookSet()
        self.hooks.before_any_step(self.optimizers.append)
        self.hooks.before_any_step(self.note)

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizers.append(optimizer)


def _sgd() -> torch.optim.SGD:
    return torch.optim.SGD([torch.ones(1)], lr=0.1)


def _hooks_of_all_steps() -> list[int]:
    gc.collect()
    return list(torch_optimizer._global_optimizer_pre_hooks)


def test_hooks_on_all_steps_see_every_optimizer_until_they_are_removed_or_dropped() -> None:
    before, stepped, optimizers = _hooks_of_all_steps(), _Stepped(), [_sgd(), _sgd()]
    for optimizer in optimizers:
        optimizer.step()
    assert stepped.optimizers == [optimizers[0]] * 2 + [optimizers[1]] * 2

    stepped.hooks.remove()
    optimizers[0].step()

    assert len(stepped.optimizers) == 4
    assert _hooks_of_all_steps() == before
    stepped = _Stepped()
    dropped = weakref.ref(stepped)
    assert len(_hooks_of_all_steps()) == len(before) + 2
    del stepped
    assert _hooks_of_all_steps() == before
    assert dropped() is None


@pytest.mark.parametrize("is_beside", [False, True], ids=["in its thread", "in another thread"])
def test_hooks_of_a_set_that_is_dropped_within_a_step_go_with_the_next_that_is_set(
    request: pytest.FixtureRequest, is_beside: bool
) -> None:
    others, kept = _hooks_of_all_steps(), [_Stepped()]

    def drop(*_: Any) -> None:
        if is_beside and threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=drop)
            thread.start()
            thread.join()
        kept.clear()
        gc.collect()

    request.addfinalizer(torch_optimizer.register_optimizer_step_pre_hook(drop).remove)
    request.addfinalizer(torch_optimizer.register_optimizer_step_pre_hook(lambda *_: None).remove)
    _sgd().step()  # torch goes through all of these hooks, and fails where one goes meanwhile
    assert not kept
    _sgd().step()
    _Stepped().hooks.remove()

    assert len(_hooks_of_all_steps()) == len(others) + 2


def test_node_hook_sees_each_run_and_changes_nothing() -> None:
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    runs: list[int] = []

    with HookSet() as hooks:
        hooks.before_backward(y.grad_fn, lambda: runs.append(1))
        y.sum().backward(retain_graph=True)
    y.sum().backward()

    assert runs == [1]
    assert torch.equal(x.grad, 2 * torch.ones(3).exp())


def test_receiving_pack_is_behind_those_that_hand_on() -> None:
    pack, pass_on, of_the_user = (lambda tensor: tensor for _ in range(3))

    assert receiving_pack() is innermost_pack() is None
    with SavedTensorHooks(pack, pack), SavedTensorHooks(pass_on, pass_on, hands_on=True):
        assert innermost_pack() is pass_on
        assert receiving_pack() is pack
        with torch.autograd.graph.saved_tensors_hooks(of_the_user, of_the_user):
            assert receiving_pack() is of_the_user
    with SavedTensorHooks(pass_on, pass_on, hands_on=True):
        assert receiving_pack() is None


def test_hooks_that_may_step() -> None:
    parameter = nn.Parameter(torch.zeros(1))

    assert not may_step_in_backward(parameter)
    with HookSet() as hooks:
        hooks.around_accumulation(parameter, before=lambda: None, after=lambda: None)
        assert may_step_in_backward(parameter)
    assert not may_step_in_backward(parameter)


def test_hook_ahead_of_a_gradient_is_called_for_each_and_removed() -> None:
    parameter, seen = nn.Parameter(torch.ones(1)), list[tuple[float, bool]]()
    with HookSet() as hooks:
        hooks.before_accumulation(parameter, lambda grad: seen.append((grad.item(), parameter.grad is None)))
        (2 * parameter).backward()
        (3 * parameter).backward()
        torch.autograd.grad(4 * parameter, [parameter])

    assert not may_step_in_backward(parameter)
    (5 * parameter).backward()
    assert seen == [(2, True), (3, False), (4, False)]


def test_owners_are_set_aside_until_the_outer_context_is_left() -> None:
    with owners_set_aside():
        with pytest.raises(KeyError), owners_set_aside():
            raise KeyError
        assert aside.is_set
    assert not aside.is_set


def test_node_number_tells_the_saves_of_nodes_apart() -> None:
    class SavesThree(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x, 2 * x, 3 * x)
            return x.clone()

    numbers: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        numbers.append(torch_private.node_number())
        return tensor

    x = torch.ones(2, requires_grad=True)
    with SavedTensorHooks(pack, pack):
        SavesThree.apply(SavesThree.apply(x).sin())

    assert [numbers.count(number) for number in dict.fromkeys(numbers)] == [3, 1, 3]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_in_checkpoint_tells_both_kinds(use_reentrant: bool) -> None:
    inside: list[bool] = []

    def function(x: Tensor) -> Tensor:
        inside.append(in_checkpoint())
        return x * 2

    x = torch.ones(2, requires_grad=True)
    checkpoint(function, x, use_reentrant=use_reentrant)

    assert inside == [True]
    with torch.no_grad():
        assert not in_checkpoint()


@pytest.mark.parametrize("is_checked", [False, True])
def test_forwarded_is_what_the_hooks_outside_give_back_unless_it_is_written_to(is_checked: bool) -> None:
    tensor = torch.arange(4.0)
    handle = ForwardedHandle(tensor, lambda given: [given.clone()], lambda packed: packed[0], is_checked=is_checked)

    assert torch.equal(handle.unpack(), torch.arange(4.0))
    tensor.add_(1)

    assert handle.is_unchanged() is not is_checked
    if not is_checked:
        assert torch.equal(handle.unpack(), torch.arange(4.0))
        return
    assert (handle.alias.untyped_storage().nbytes(), handle.size) == (0, (4,))
    with pytest.raises(RuntimeError, match=r"FloatTensor \[4\]\] is at version 1; expected version 0"):
        handle.unpack()


def test_flattened_packs_what_a_tensor_wraps_but_for_what_does_not_leave() -> None:
    wrapper = Int8.of(torch.arange(6, dtype=torch.int8).view(2, 3), torch.ones(2, 1))
    first, *others = wrapper.__tensor_flatten__()[0]
    packed: list[Tensor] = []

    def pack(part: Tensor) -> KeptHandle:
        packed.append(part)
        return KeptHandle(part)

    whole = FlattenedHandle(wrapper, pack).unpack()
    assert (len(packed), type(whole)) == (1 + len(others), type(wrapper))
    assert torch.equal(whole.dequantize(), wrapper.dequantize())
    packed.clear()
    found: Any = FlattenedHandle(wrapper, pack, lambda _, name: name == first).unpack()

    assert [id(part) for part in packed] == [id(getattr(wrapper, first))]
    assert all(getattr(found, name) is getattr(wrapper, name) for name in others)
