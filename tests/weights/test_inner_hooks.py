"""Hooks around the modules inside of a layer."""

from __future__ import annotations

import copy
import gc

import torch
from torch import nn

from memkit.weights.forwards import InnerHooks


class _Watched:
    """A module with such hooks, and what was called in which order."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.order, self.hooks = module, list[str](), InnerHooks()
        self.hooks.around_inner(module, before=self._before, after=self._after)

    def _before(self, *_: object) -> None:
        self.order.append("before")

    def _after(self, *_: object) -> None:
        self.order.append("after")

    def run(self) -> list[str]:
        """Call the module; return what was called."""
        self.order.clear()
        self.module(torch.zeros(1))
        return list(self.order)


def test_shallow_copy_shares_the_hooks() -> None:
    watched = _Watched(nn.Identity())
    watched.module = copy.copy(watched.module)

    for _ in range(2):
        assert watched.run() == ["before", "after"]


def test_hooks_that_are_set_aside_are_not_called_until_they_are_back_outside_of_the_users_own() -> None:
    watched = _Watched(nn.Identity())
    watched.hooks.set_aside()
    watched.module.register_forward_pre_hook(lambda *_: watched.order.append("user before"))
    watched.module.register_forward_hook(lambda *_: watched.order.append("user after"))

    assert watched.run() == ["user before", "user after"]

    watched.hooks.put_back()
    watched.hooks.put_back()

    assert watched.run() == ["before", "user before", "user after", "after"]


def test_hooks_that_the_caller_has_removed_do_not_come_back() -> None:
    watched = _Watched(nn.Identity())
    watched.module._forward_pre_hooks.clear()
    watched.module._forward_hooks.clear()

    watched.hooks.set_aside()
    watched.hooks.put_back()

    assert watched.run() == []


def test_module_that_is_no_more_is_left_out() -> None:
    watched = _Watched(nn.Identity())
    watched.hooks.around_inner(nn.Identity(), before=lambda *_: None, after=lambda *_: None)
    gc.collect()

    watched.hooks.set_aside()
    assert watched.run() == []

    watched.hooks.put_back()
    assert watched.run() == ["before", "after"]
