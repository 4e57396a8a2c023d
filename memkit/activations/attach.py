"""`attach`: a context around each forward of a module, set by hooks on it."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from memkit.activations.context import ForwardContext, shapes_of
from memkit.activations.stats import SavedTensorStats
from memkit.core import torch_private
from memkit.core.calls import Calls, Ending
from memkit.core.features import attached_to, note_attached, note_detached
from memkit.core.hooks import HookSet
from memkit.core.tensors import unique_storages
from memkit.errors import users_line

_MOST_NAMES = 3


class Unused:
    """Warns once, at the user's line, if an optimizer is about to step a module's parameters before its first forward."""

    def __init__(self, module: nn.Module, what: str) -> None:
        self._module = weakref.ref(module)
        self._what = what
        self._filename, self._line = users_line()
        self._ignores_next = any(parameter.grad is not None for parameter in module.parameters())
        """Gradients of an earlier forward exist, and the next step uses these."""
        self._has_warned = False
        self._hooks = HookSet()
        note = weakref.WeakMethod(self.note_step)  # so that the object dies at once
        self._hooks.before_any_step(lambda optimizer: None if (alive := note()) is None else alive(optimizer))

    def end(self) -> None:
        self._hooks.remove()

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
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


def _end(leave: Callable[..., None], ending: Ending) -> None:
    """Leave a context as the call around which it was entered has ended."""
    leave(None if ending is Ending.RETURNED else BaseException, None, None)


class Attachment:
    """A context around each forward of a module, until `remove()`; `attach` returns it.

    It belongs to this module: a copy (`copy.deepcopy`), or one that was saved and loaded (`torch.save`, `pickle`), runs without
    the context until `attach` is called for it.
    """

    def __init__(self, model: nn.Module, context: ForwardContext) -> None:
        self.context = context
        """Each forward enters a copy of it."""
        self._model = weakref.ref(model)
        self._running = Calls()
        self._hooks = HookSet()
        self._unused: Unused | None = Unused(model, f'attach (tag "{context.tag}")' if context.tag else "attach")
        """None once the module has run."""
        try:
            self._hooks.around_forward(model, before=self._before, after=self._after, with_kwargs=True, is_copied=False)
            for other in attached_to(model):
                if isinstance(other, Attachment) and other.context.goes_outside:
                    other._hooks.put_outside()
            note_attached(self, is_on=lambda own, module: own._model() is module, take_off=Attachment.remove)
        except BaseException:  # the caller gets no handle that could remove them
            self._hooks.remove()
            raise

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _attached_to_nothing, ()  # if the model holds its handle

    @property
    def plan(self) -> Any:
        """The plan of the context: see `CPUOffload.plan` and `Rematerialize.plan`."""
        return self.context.plan

    def stats(self) -> SavedTensorStats:
        """Return the figures under the context's tag: see `memkit.stats`."""
        return self.context.stats()

    def __repr__(self) -> str:
        if not hasattr(self, "context"):
            return "<attached to nothing>"
        return f"<attached {self.context!r}>" if len(self._hooks) else f"<attached no more {self.context!r}>"

    def remove(self) -> None:
        """Let the module run without the context again. Graphs that are alive keep working."""
        self._running.end_interrupted()
        self._hooks.remove()
        self._end_unused()
        note_detached(self)

    def _end_unused(self) -> None:
        if self._unused is not None:
            self._unused.end()
            self._unused = None

    def _before(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        call = self._running.begin(model, depth=2)  # first: the other hook runs even if entering raises
        if self._unused is not None and torch.is_grad_enabled():
            self._end_unused()
        context = self.context.again()
        if context.asks_for_shapes:
            context.shapes = shapes_of(args, kwargs)
        call.end = functools.partial(_end, context.__exit__)  # held as long as the call is
        context.enter_with(_resident(model, args, kwargs) if context.asks_what_is_resident else {})

    def _after(self, model: nn.Module, *_: Any) -> None:
        self._running.end(model, depth=2)


def _resident(model: nn.Module, args: Any, kwargs: Any) -> dict[int, weakref.ref[torch.UntypedStorage]]:
    known = [*model.parameters(), *model.buffers()]
    known += [leaf for leaf in torch_private.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    return {key: weakref.ref(storage) for key, storage in unique_storages(known).items()}


def _attached_to_nothing() -> Attachment:
    handle = Attachment.__new__(Attachment)
    handle._running, handle._hooks, handle._unused = Calls(), HookSet(), None
    return handle


def attach(model: nn.Module, context: ForwardContext) -> Attachment:
    """Put a context around each forward of a module, without changing the training loop.

    A `CPUOffload` and a `Rematerialize` can be attached to the same module, in any order: the `CPUOffload` is entered first, as
    in `with memkit.CPUOffload(...), memkit.Rematerialize(...):`, and what the other keeps may move. If one module is inside the
    other, attach the `CPUOffload` to the outer one.

    An attached `CPUOffload` knows the module, and so which storages are parameters, buffers and inputs, before the first
    iteration. If the report under its tag was made of another model, it is not used, and a warning says so. Another warning
    says if an optimizer steps the module although it was never called itself. That happens with a LightningModule, whose
    `training_step` calls the modules inside it: attach to these.

    Args:
        model: the module, or a part of a model. It stays unchanged; its hooks are not copied or saved with it.
        context: `MemoryBudget`, `CPUOffload`, `Rematerialize` or `no_offload`, as it would stand in `with`.

    Returns:
        A handle whose `remove()` takes the hooks off again, as `memkit.detach(model)` does. Its `plan` and `stats()` are those
        of the context.

    Raises:
        TypeError: `model` is no module, or `context` is none of these.
        ValueError: a context of the kind is attached to the model already, or the model is one that `torch.jit.script` has
            made, which takes no hooks.

    Example:
        >>> import torch, memkit
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())
        >>> offload = memkit.CPUOffload(1.0, "attached", min_bytes=0, device=memkit.device.ReferenceDevice())
        >>> handle = memkit.attach(model, offload)
        >>> model(torch.randn(32, 64)).sum().backward()
        >>> memkit.detach(model)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"attach needs a torch.nn.Module; found {type(model).__name__}")
    if not isinstance(context, ForwardContext):
        hint = ". A LayerOffload works from when it is made on" if hasattr(context, "close") else ""
        raise TypeError(f"attach needs a context such as memkit.CPUOffload(0.3); found {context!r}{hint}")
    if isinstance(model, torch.jit.RecursiveScriptModule):  # type: ignore[attr-defined]  # it is there
        raise ValueError(
            f"attach needs a module that takes hooks; found {model.original_name} as torch.jit.script has compiled it. "
            "Attach to a module that contains it, or put its calls inside `with context:`"
        )
    for owner in attached_to(model):
        if isinstance(owner, Attachment) and type(owner.context) is type(context):
            raise ValueError(
                f"attach needs a {type(model).__name__} without such a context; found {owner!r}, which would decide in place "
                "of the new one. Call memkit.detach(model) first"
            )
    return Attachment(model, context.attached_to(model))
