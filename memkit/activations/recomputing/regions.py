"""`Regions`: modules whose calls are recomputed as a whole. Their saved tensors are not kept; the module's forward runs again
in the backward.

The semantics are those of non-reentrant `torch.utils.checkpoint`: random state, autocast, early stop, nesting. Source:
`torch.utils.checkpoint._checkpoint_without_reentrant_generator`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from memkit.activations.recomputing.module_state import NORMS, UPDATED_UNREAD
from memkit.activations.recomputing.region_calls import RegionModule, RegionSpec, RegionStep, RegionsThread, end_after, watch
from memkit.activations.saved.counts import Counts
from memkit.core import torch_private
from memkit.core.compiled import is_compiled
from memkit.core.hooks import HookSet
from memkit.core.interrupts import Exclusive
from memkit.core.kept import KeptHandle
from memkit.core.sequentials import spanned_forwards
from memkit.core.torch_state import is_sharded_by_fsdp, is_sharded_by_fsdp2, is_there_in_backward, local_of

_OWN_HOOKS = (
    "memkit.activations.recomputing.region_calls",
    "memkit.activations.recomputing.compiled_calls",
    "memkit.activations.recomputing.layers",
    "memkit.recording.module_calls",
)
"""A recompute may run these modules' hooks again, or skip them."""
_AROUND_SHARDED = ("torch.distributed.fsdp.", "memkit.recording.borders")
"""Prefixes of the modules with hooks for FSDP2: regions begin after their pre-hooks and end before their hooks."""


def why_not_region(module: nn.Module) -> str:
    """Return why no call of a module can be a region, as far as the module shows it; empty if it may be one. Only a call shows
    a forward that writes to its inputs (such as `nn.ReLU(inplace=True)`), counts in plain attributes, or draws from Python's
    generator."""
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
    """Return why a submodule, or with `is_region` the module itself, rules out a region."""
    if isinstance(part, nn.modules.lazy.LazyModuleMixin) and part.has_uninitialized_params():
        return "its parameters are made by its first call"
    if isinstance(part, torch.jit.ScriptModule):
        return "it is scripted, and what that saves depends on how often it has run"
    is_gathering = is_region and is_sharded_by_fsdp2(part)
    if is_gathering:  # the part within its hooks is recomputed in its own backward, for which FSDP2 has gathered the parameters
        if is_compiled(part):
            return "its forward talks to other processes or devices, and is compiled"
        if not is_there_in_backward(part):
            return "FSDP2 does not gather it for its backward"
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


def _is_plain(parameter: nn.Parameter | None) -> bool:
    return parameter is None or type(local_of(parameter)) in (Tensor, nn.Parameter)


def _are_own(hooks: Mapping[int, object], beside: tuple[str, ...] = ()) -> bool:
    """Tell whether a recompute may run again or skip all of these hooks; also those of modules with prefixes `beside`."""
    return all(home in _OWN_HOOKS or home.startswith(beside) for home in map(_home_of, hooks.values())) if hooks else True


def _home_of(hook: Any) -> str:
    hook = getattr(hook, "_hook", hook)
    return getattr(getattr(hook, "func", hook), "__module__", None) or ""


class Regions(Exclusive):
    """A context in which calls of some modules are regions, for the thread that enters it and for recomputes of its calls.

    It may be entered any number of times. Backwards may run after it was left. A `SequentialSpan` among the `chosen` modules is
    called as one module meanwhile, and in recomputes. `keep` returns a handle for an input of a region, with grad mode off; by
    default inputs stay on the device. `step` may keep single calls, and is told what the others save.
    """

    def __init__(
        self,
        chosen: Mapping[nn.Module, RegionSpec],
        *,
        keep: Callable[[Tensor], KeptHandle] = KeptHandle,
        counts: Counts | None = None,
        step: RegionStep | None = None,
    ) -> None:
        torch_private.require(torch_private.Feature.REMAT)
        self.not_taken: dict[nn.Module, str] = {}
        self._numbers: dict[RegionModule, int] = {}
        self._thread = RegionsThread(keep, counts, self.not_taken, step)
        forwards = spanned_forwards(chosen)
        self._regions = [RegionModule(module, spec, self._thread, forwards.get(module)) for module, spec in chosen.items()]
        self._hooks = HookSet()

    @property
    def num_calls(self) -> dict[nn.Module, int]:
        """How often each was called in the last block."""
        return {region.module: count for region, count in self._numbers.items()}

    @property
    def has_hooks(self) -> bool:
        names, everywhere = torch_private.MODULE_HOOKS, vars(nn.modules.module)
        sharded = [region.module for region in self._regions if region.is_sharded]
        are_own = all(_are_own(getattr(module, name), _AROUND_SHARDED) for module in sharded for name in names)
        return (
            not all(_are_own(everywhere[f"_global{name}"]) for name in names)
            or any(region.state.have_hooks(region.is_sharded) for region in self._regions)
            or not are_own
        )

    def __enter__(self) -> Regions:
        self.claim("these regions are watched already: make a Regions for each context and each thread")
        self.is_entered = True
        thread = self._thread
        try:
            top = torch_private.top_saved_tensor_hooks(True)
            thread.outer, thread.is_in, self._numbers = None if top is None else top[0], True, {}
            watch(self._regions, self._hooks)
        except BaseException:
            self.leave(has_failed=True)
            raise
        return self

    def end_block(self, *, has_failed: bool) -> None:
        thread = self._thread
        self._hooks.remove()
        end_after(thread.calls, 0)
        self._numbers = thread.numbers or self._numbers
        thread.is_in, thread.outer, thread.numbers = False, None, {}
        thread.counted.clear()
