"""Why a module can't be recomputed as a whole, as far as that shows without calling it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from memkit import torch_private
from memkit.activations.recomputing.module_state import NORMS, UPDATED_UNREAD
from memkit.compiled import is_compiled
from memkit.torch_state import is_sharded_by_fsdp, is_sharded_by_fsdp2, is_there_in_backward, local_of

_OWN = ("memkit.activations.recomputing.regions", "memkit.recording.module_calls")
"""Modules whose hooks a recompute may run again, or skip."""
_AROUND_SHARDED = ("torch.distributed.fsdp.", "memkit.recording.borders")
"""Prefixes of the modules with hooks for FSDP2: regions begin after their pre-hooks and end before their hooks."""


def why_not_region(module: nn.Module) -> str:
    """Return why no call of a module can be a region, as far as the module shows it; empty if it may be one.

    What only a call shows is not seen: a forward that writes to its inputs (such as `nn.ReLU(inplace=True)`), that counts in
    plain attributes, or that draws from Python's generator.
    """
    if getattr(module.forward, "__func__", None) is nn.Module.forward:
        return f"a {type(module).__name__} has no forward"
    for name in torch_private.MODULE_HOOKS:
        if not _are_own(vars(nn.modules.module)[f"_global{name}"]):
            return "hooks of all modules are set (torch.nn.modules.module.register_module_forward_hook), which would run twice"
    for part in module.modules():
        why = _why_not_inside(part, is_region=part is module)
        if why:
            return why if part is module else f"a {type(part).__name__} in it: {why}"
    return ""


def _why_not_inside(part: nn.Module, *, is_region: bool) -> str:
    """Return why a submodule prevents a module from being a region; with `is_region`, why the module itself does."""
    if isinstance(part, nn.modules.lazy.LazyModuleMixin) and part.has_uninitialized_params():
        return "its parameters are made by its first call"
    if isinstance(part, torch.jit.ScriptModule):
        return "it is scripted, and what that saves depends on how often it has run"
    is_gathering = is_region and is_sharded_by_fsdp2(part)
    if is_gathering:
        if why := _why_not_sharded(part):
            return why
    elif is_sharded_by_fsdp(part) or isinstance(part, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return "its forward talks to other processes or devices"
    if torch_private.GATHERED_MARK in vars(part) and not all(map(_is_plain, torch_private.parameters_of(part).values())):
        return "FSDP2 gathers parameters of it that are made up of others, and may count that as writes"
    if isinstance(part, nn.SyncBatchNorm) and part.training:
        return "its forward talks to other processes"
    if isinstance(part, NORMS) and type(part) not in UPDATED_UNREAD and part.running_mean is not None and not part.training:
        return "it reads statistics, which may be updated unseen"
    if "_hf_hook" in vars(part):
        return "accelerate moves its weights in its forward"
    for name in torch_private.MODULE_HOOKS:
        if not _are_own(getattr(part, name), _AROUND_SHARDED if is_gathering else ()):
            is_streamed = any(_home_of(hook).startswith("memkit.weights") for hook in getattr(part, name).values())
            return "LayerOffload streams its weights" if is_streamed else "it has hooks, which would run twice, or not at all"
    return ""


def _why_not_sharded(module: nn.Module) -> str:
    """Return why a module sharded by FSDP2 can't be a region. What its hooks enclose is recomputed in the module's own
    backward, for which FSDP2 has gathered the parameters."""
    if is_compiled(module):
        return "its forward talks to other processes or devices, and is compiled"
    if not is_there_in_backward(module):
        return "FSDP2 does not gather it for its backward"
    return ""


def has_other_hooks(module: nn.Module) -> bool:
    """Tell whether a module sharded by FSDP2 has hooks beside FSDP2's."""
    return not all(_are_own(getattr(module, name), _AROUND_SHARDED) for name in torch_private.MODULE_HOOKS)


def _is_plain(parameter: nn.Parameter | None) -> bool:
    return parameter is None or type(local_of(parameter)) in (Tensor, nn.Parameter)


def _are_own(hooks: Mapping[int, object], beside: tuple[str, ...] = ()) -> bool:
    """Tell whether a recompute may run all of these hooks again, or skip them.

    Args:
        beside: prefixes of further modules whose hooks may be run or skipped.
    """
    return all(home in _OWN or home.startswith(beside) for home in map(_home_of, hooks.values())) if hooks else True


def _home_of(hook: Any) -> str:
    """Return the name of the module that defines a hook."""
    hook = getattr(hook, "_hook", hook)
    return getattr(getattr(hook, "func", hook), "__module__", None) or ""
