"""Hooks that are set aside while a layer runs."""

from __future__ import annotations

import gc

import torch
from torch import nn

from memkit.weights.inner_hooks import InnerHooks


def test_hooks_that_are_set_aside_are_not_called_until_they_are_back_outside_of_the_users_own() -> None:
    order: list[str] = []
    module = nn.Identity()

    with InnerHooks() as hooks:
        hooks.around_forward(module, before=lambda *_: order.append("before"), after=lambda *_: order.append("after"))
        hooks.set_aside()
        module.register_forward_pre_hook(lambda *_: order.append("user before"))
        module.register_forward_hook(lambda *_: order.append("user after"))
        module(torch.zeros(1))
        assert order == ["user before", "user after"]

        hooks.put_back()
        hooks.put_back()
        module(torch.zeros(1))

    assert order[2:] == ["before", "user before", "user after", "after"]


def test_hooks_that_were_removed_do_not_come_back() -> None:
    module = nn.Identity()
    hooks = InnerHooks()
    hooks.around_forward(module, before=lambda *_: None, after=lambda *_: None)
    hooks.set_aside()

    hooks.remove()
    hooks.put_back()

    assert not module._forward_pre_hooks
    assert not module._forward_hooks


def test_hooks_that_the_caller_has_removed_do_not_come_back() -> None:
    order: list[str] = []
    module = nn.Identity()

    with InnerHooks() as hooks:
        hooks.around_forward(module, before=lambda *_: order.append("before"), after=lambda *_: order.append("after"))
        module._forward_pre_hooks.clear()
        hooks.set_aside()
        hooks.put_back()
        module(torch.zeros(1))

    assert order == ["after"]


def test_setting_aside_again_loses_none() -> None:
    """As where an interrupt has kept the first from being undone."""
    order: list[str] = []
    module = nn.Identity()

    with InnerHooks() as hooks:
        hooks.around_forward(module, before=lambda *_: order.append("before"), after=lambda *_: order.append("after"))
        for _ in range(2):
            hooks.set_aside()
        hooks.put_back()
        module(torch.zeros(1))

    assert order == ["before", "after"]


def test_module_that_is_no_more_is_left_out() -> None:
    order: list[str] = []
    modules = [nn.Identity(), nn.Identity()]

    with InnerHooks() as hooks:
        for module in modules:
            hooks.around_forward(module, before=lambda *_: order.append("before"), after=lambda *_: order.append("after"))
        del modules[0]
        gc.collect()
        hooks.set_aside()
        modules[0](torch.zeros(1))
        assert not order

        hooks.put_back()
        modules[0](torch.zeros(1))

    assert order == ["before", "after"]
