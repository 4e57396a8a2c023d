"""A callback's features, attached when a training begins and removed when it ends."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from memkit.activations import Attachment, MemoryBudget, SavedTensorStats, attach, stats
from memkit.activations.context import ForwardContext
from memkit.core import torch_private
from memkit.core.calls import Around, Code
from memkit.core.features import attached_to
from memkit.errors import LayerOffloadError
from memkit.live import values_of
from memkit.optimizers import unwrapped
from memkit.states import StateOffload, StateStats
from memkit.states.asked import check_options
from memkit.weights import LayerOffload, LayerStats

Feature = ForwardContext | LayerOffload

_begun: weakref.WeakKeyDictionary[nn.Module, list[Attachment]] = weakref.WeakKeyDictionary()
_begun_states: weakref.WeakSet[StateOffload] = weakref.WeakSet()  # a run that ended by an error may leave some


class Features:
    """The features of a callback; `owner` is its name, for errors."""

    def __init__(self, owner: str, features: Sequence[object]) -> None:
        self.owner = owner
        self.contexts: list[ForwardContext] = []
        self.offloads: list[LayerOffload] = []
        self.states: OptimizerStates | None = None
        self._attached: list[Attachment] = []
        self._known: list[frozenset[str | int]] = []
        if not features:
            raise TypeError(f'{owner} needs a feature, such as memkit.MemoryBudget("12GiB"); found none')
        for feature in features:
            if isinstance(feature, ForwardContext):
                if any(type(other) is type(feature) for other in self.contexts):
                    raise ValueError(f"{owner} needs at most one {type(feature).__name__}; found two. Leave one of them out")
                self.contexts.append(feature)
            elif isinstance(feature, LayerOffload):
                self.offloads.append(keep_in_place(feature))
                named = list(feature.model.named_parameters())
                self._known.append(frozenset((*(name for name, _ in named), *(id(parameter) for _, parameter in named))))
            elif _is_asked_for(feature) or isinstance(feature, StateOffload):
                if self.states is not None:
                    raise ValueError(f"{owner} needs at most one StateOffload; found two. Leave one of them out")
                self.states = OptimizerStates(owner, feature)
            else:
                raise TypeError(
                    f'{owner} needs features such as memkit.MemoryBudget("12GiB") or memkit.LayerOffload(model, '
                    f"offload_ratio=0.75); found {feature!r}"
                )

    def check(self, model: nn.Module) -> None:
        """Raise a ValueError unless each `LayerOffload` is of the model to be trained, and has all of its parameters."""
        modules = {id(module) for module in model.modules()}
        for offload, known in zip(self.offloads, self._known, strict=True):
            if offload not in attached_to(offload.model):
                raise ValueError(
                    f"{self.owner} was given a LayerOffload that is closed by now. Make a new one, and a new {self.owner}"
                )
            found = type(offload.model).__name__
            if id(offload.model) not in modules:
                raise ValueError(
                    f"{self.owner} needs the LayerOffload of what is trained, a {type(model).__name__}; found that of another "
                    f"{found}. Give both the same model; one that the trainer makes itself (model_init) cannot stream"
                )
            # a renamed one is known by its id, a replacement by its name
            added = [name for name, item in offload.model.named_parameters() if name not in known and id(item) not in known]
            if added:
                raise ValueError(
                    f"{self.owner}: the {found} has parameters that came after its LayerOffload was made, such as "
                    f'"{added[0]}". Put adapters in first (peft.get_peft_model), then make the LayerOffload, and give the '
                    "trainer that model"
                )

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.end_contexts()
        for attachment in _begun.pop(model, []):
            attachment.remove()
        own = unwrapped(optimizer)
        try:
            for context in self.contexts:
                if isinstance(context, MemoryBudget):
                    known = own if isinstance(own, torch.optim.Optimizer) else None
                    context = context.told(optimizer=known)
                self._attached.append(attach(model, context))
        except BaseException:
            self.end()
            raise
        _begun[model] = list(self._attached)

    def begin_states(self, optimizers: Iterable[object]) -> None:
        if self.states is not None:
            self.states.begin(optimizers)

    def end_contexts(self) -> None:
        while self._attached:
            self._attached.pop().remove()

    def end(self) -> None:
        self.end_contexts()
        if self.states is not None:
            self.states.end()

    def close(self) -> None:
        self.end()
        for offload in self.offloads:
            offload.close()

    def _streaming(self) -> list[LayerOffload]:
        return [offload for offload in self.offloads if offload in attached_to(offload.model)]

    @property
    def is_on(self) -> bool:
        return bool(self._attached or (self.states is not None and self.states.opened) or self._streaming())

    def figures(self) -> dict[str, float]:
        found: list[SavedTensorStats | LayerStats | StateStats] = [offload.stats() for offload in self._streaming()]
        found += self.states.figures() if self.states is not None else ()
        for tag in dict.fromkeys(context.tag for context in self.contexts if context.tag):
            with suppress(ValueError):  # nothing has run under it yet
                found.append(stats(tag))
        return values_of(found)


class OptimizerStates:
    def __init__(self, owner: str, asked: object) -> None:
        if not _is_asked_for(asked):
            raise TypeError(
                f"{owner} makes the StateOffload itself, once the trainer has its optimizer; found {asked!r}. Pass "
                'memkit.StateOffload, or functools.partial(memkit.StateOffload, device_budget="4GiB")'
            )
        self._owner = owner
        self._options: dict[str, Any] = getattr(asked, "keywords", {})
        for given in getattr(asked, "args", ()):
            raise TypeError(
                f"{owner} makes the StateOffload over the trainer's optimizer; found a functools.partial that has one already, "
                f"{type(given).__name__}. Leave that out"
            )
        try:
            bound = inspect.signature(StateOffload).bind(None, **self._options)
        except TypeError as error:
            raise TypeError(f"{owner}: StateOffload {error}") from None
        bound.apply_defaults()
        options = {name: bound.arguments[name] for name in ("update", "master", "when", "overlap_forward", "disk")}
        check_options(**options)
        self.when: str = options["when"]
        self.overlaps: bool = options["overlap_forward"]
        self.opened: list[StateOffload] = []
        self._figures: list[StateStats] = []

    def begin(self, optimizers: Iterable[object]) -> None:
        found = {id(one): one for one in map(unwrapped, optimizers)}
        if not found:
            raise ValueError(f"{self._owner} needs the optimizer of the training for its StateOffload; the trainer has none")
        for states in [states for states in self.opened if id(states.optimizer) not in found]:
            states.close()
            self.opened.remove(states)
        known = {id(states.optimizer) for states in self.opened}
        try:
            for optimizer in (one for key, one in found.items() if key not in known):
                for states in [states for states in _begun_states if states.optimizer is optimizer]:
                    states.close()
                made = StateOffload(optimizer, **self._options)  # raises for any other object
                self.opened.append(made)
                _begun_states.add(made)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        self._figures = self.figures()
        while self.opened:
            states = self.opened.pop()
            states.close()
            _begun_states.discard(states)

    def figures(self) -> list[StateStats]:
        return [states.stats() for states in self.opened] or self._figures


def _is_asked_for(feature: object) -> bool:
    return feature is StateOffload or (isinstance(feature, functools.partial) and feature.func is StateOffload)


def keep_in_place(offload: LayerOffload) -> LayerOffload:
    """Keep a model whose layers stream in its place when a training loop moves it, or a module that contains it.

    Trainers move the given model to the device (`model.to("cuda")`), and with it all streamed layers. Until `offload.close()`
    such calls leave the model alone, and a cast of it raises. The callbacks call this themselves.

    Args:
        offload: one that is open.

    Returns:
        The same object.

    Raises:
        TypeError: it is no `LayerOffload`.
        ValueError: it is closed.

    Example:
        >>> import torch, memkit
        >>> from memkit.integrations import keep_in_place
        >>> model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)]).requires_grad_(False)
        >>> device = memkit.device.ReferenceDevice()  # on a GPU, leave it out
        >>> with keep_in_place(memkit.LayerOffload(model, offload_ratio=0.75, device=device)):
        ...     _ = torch.nn.ModuleDict({"inner": model}).to("meta")  # as a trainer would move it, to "cuda"
        >>> model[3].weight.device
        device(type='cpu')
    """
    if not isinstance(offload, LayerOffload):
        raise TypeError(f"keep_in_place needs a memkit.LayerOffload; found {type(offload).__name__}")
    if offload not in attached_to(offload.model):
        raise ValueError("keep_in_place needs a LayerOffload that streams; found one that is closed. Make a new one")
    place = torch_private.MOVING_ALL
    if not isinstance(vars(offload.model).get(place), Around):
        around = Around(offload.model, place, _stay)
        offload.until_closed(around)  # ahead: removing it before `put` does nothing
        around.put()
    return offload


def _stay(model: nn.Module, code: Code, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Replaces `_apply` of a model: leave its tensors where they are if the call moves them, raise if it casts them."""
    change = args[0] if args else kwargs["fn"]
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_floating_point() and not tensor.is_complex():
            continue
        changed = change(torch.empty(0, dtype=tensor.dtype))
        if changed.dtype != tensor.dtype:
            raise LayerOffloadError(
                f'a {type(model).__name__} whose layers stream was about to be cast: "{name}" is {tensor.dtype}, and was to be '
                f"{changed.dtype}. Cast the model before memkit.LayerOffload is made, and have the trainer leave it as it is"
            )
        if changed.device.type == "cpu" and changed.is_shared():
            return code(*args, **kwargs)  # to be used by several processes: refused by the next forward
    return model
