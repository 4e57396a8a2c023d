"""Notice that a module is trained whose forward, around which a context was attached, is never called."""

from __future__ import annotations

import functools
import warnings
import weakref

import torch
from torch import nn

from memkit.errors import users_line
from memkit.hooks import HookSet

_MOST_NAMES = 3


class Unused:
    """Warns once, when an optimizer is about to step a module's parameters though its forward has not been called yet.

    As with a LightningModule, whose `training_step` calls the modules in it. Until `end()` this costs a look at each optimizer
    step, and nothing from then on. The parts of a module may be called ahead of its forward: only the step tells.

    The hook is never removed within a step: torch goes through all hooks of its kind there, and fails if one goes meanwhile.

    Args:
        module: held weakly.
        what: what was attached, for the warning. That points at the line outside of memkit from where this is made.
    """

    def __init__(self, module: nn.Module, what: str) -> None:
        self._module = weakref.ref(module)
        self._what = what
        self._filename, self._line = users_line()
        self._ignores_next = any(parameter.grad is not None for parameter in module.parameters())
        """Whether there are gradients of an earlier forward, which the next step is about."""
        self._has_warned = False
        self._hooks = HookSet()
        self._hooks.before_any_step(functools.partial(_note_step, weakref.ref(self)))  # so that it goes at once

    def end(self) -> None:
        """Warn of nothing any more: the forward was called with grad mode on, or nothing is attached any more."""
        self._hooks.remove()

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn if an optimizer is about to step parameters of the module, and its forward was never called."""
        module = self._module()
        if module is None or self._has_warned:
            return
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        stepped = {id(parameter) for parameter in parameters if parameter.grad is not None}
        names = [name for name, parameter in module.named_parameters() if id(parameter) in stepped]
        if not names:
            return
        if self._ignores_next:
            self._ignores_next = False
            return
        self._has_warned = True
        parts = list(dict.fromkeys(name.partition(".")[0] for name in names if "." in name))
        shown = ", ".join(parts[:_MOST_NAMES]) + (", ..." if len(parts) > _MOST_NAMES else "")
        called = f"the modules in it that are called ({shown})" if parts else "what is called"
        warnings.warn_explicit(
            f"{self._what} does nothing: a {type(module).__name__} is trained, and was never called itself with grad mode on. "
            "To call its parts, as a LightningModule's training_step does, or its forward() as a method, is not enough. "
            f"Attach to {called}, or put the context around the forward.",
            UserWarning,
            self._filename,
            self._line,
        )


def _note_step(reference: weakref.ref[Unused], optimizer: torch.optim.Optimizer) -> None:
    unused = reference()
    if unused is not None:
        unused.note_step(optimizer)
