"""The features that a callback was given: set up on a model as its training begins, and taken off as it ends."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import suppress

import torch
from torch import nn

from memkit.activations import Attachment, MemoryBudget, SavedTensorStats, attach, stats
from memkit.activations.context import ForwardContext
from memkit.attached import attached_to
from memkit.integrations.in_place import keep_in_place
from memkit.integrations.optimizer_states import OptimizerStates, inside, is_asked_for
from memkit.live import values_of
from memkit.states import StateOffload, StateStats
from memkit.weights import LayerOffload, LayerStats

Feature = ForwardContext | LayerOffload

_begun: weakref.WeakKeyDictionary[nn.Module, list[Attachment]] = weakref.WeakKeyDictionary()
"""What was attached to models last: a run that has ended by an error may have left it there."""


class Features:
    """Contexts that are attached to a model while it trains, the `LayerOffload`s of models that stream already, and what makes
    a `StateOffload` of the optimizer.

    Args:
        owner: the name of the callback, for errors.
        features: what it was given.

    Raises:
        TypeError: there are none, or one is none of memkit's.
        ValueError: two are of one kind, or a `LayerOffload` is closed.
    """

    def __init__(self, owner: str, features: Iterable[object]) -> None:
        self.owner = owner
        self.contexts: list[ForwardContext] = []
        self.offloads: list[LayerOffload] = []
        self.states: OptimizerStates | None = None
        self._attached: list[Attachment] = []
        self._known: list[frozenset[str | int]] = []
        """The parameters of each model whose layers stream, as it was given here: their names and ids."""
        given: list[object] = list(features)
        if not given:
            raise TypeError(f'{owner} needs a feature, such as memkit.MemoryBudget("12GiB"); found none')
        for feature in given:
            if isinstance(feature, ForwardContext):
                if any(type(other) is type(feature) for other in self.contexts):
                    raise ValueError(f"{owner} needs at most one {type(feature).__name__}; found two. Leave one of them out")
                self.contexts.append(feature)
            elif isinstance(feature, LayerOffload):
                self.offloads.append(keep_in_place(feature))
                named = list(feature.model.named_parameters())
                self._known.append(frozenset((*(name for name, _ in named), *(id(parameter) for _, parameter in named))))
            elif is_asked_for(feature) or isinstance(feature, StateOffload):
                if self.states is not None:
                    raise ValueError(f"{owner} needs at most one StateOffload; found two. Leave one of them out")
                self.states = OptimizerStates(owner, feature)
            else:
                raise TypeError(
                    f'{owner} needs features such as memkit.MemoryBudget("12GiB") or memkit.LayerOffload(model, '
                    f"offload_ratio=0.75); found {feature!r}"
                )

    def check(self, model: nn.Module) -> None:
        """See that what streams is of the model that is to be trained, and has all of its parameters.

        Raises:
            ValueError: it is not so.
        """
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
            # one that was renamed is known by its id, one that was put in the place of another by its name
            added = [name for name, item in offload.model.named_parameters() if name not in known and id(item) not in known]
            if added:
                raise ValueError(
                    f"{self.owner}: the {found} has parameters that came after its LayerOffload was made, such as "
                    f'"{added[0]}". Put adapters in first (peft.get_peft_model), then make the LayerOffload, and give the '
                    "trainer that model"
                )

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, *, looks_ahead: bool = True) -> None:
        """Attach the contexts to a model.

        Args:
            model: around whose forward they are to be.
            optimizer: that steps it, if there is one: a `MemoryBudget` without one leaves room for its states.
            looks_ahead: False for a model that must not run without data.
        """
        self.end()
        for attachment in _begun.pop(model, []):
            attachment.remove()
        try:
            for context in self.contexts:
                told = _told(context, optimizer, looks_ahead=looks_ahead) if isinstance(context, MemoryBudget) else context
                self._attached.append(attach(model, told))
        except BaseException:
            self.end()
            self.end_states()
            raise
        _begun[model] = list(self._attached)

    def begin_states(self, optimizers: Iterable[object]) -> None:
        """Have the states of the training's optimizers be in host memory, if that was asked for: ahead of `begin`, so that what
        they take of the device is there when a budget is planned.

        Raises:
            ValueError: there is no optimizer, or it can't be stepped in pieces.
        """
        if self.states is not None:
            self.states.begin(optimizers)

    def end(self) -> None:
        """Take the contexts off. Layers go on streaming."""
        while self._attached:
            self._attached.pop().remove()

    def end_states(self) -> None:
        """Put the states of optimizers back."""
        if self.states is not None:
            self.states.end()

    def close(self) -> None:
        """Take all off: the contexts, the states in host memory, and what streams, whose weights are then where they were
        found."""
        self.end()
        self.end_states()
        for offload in self.offloads:
            offload.close()

    @property
    def is_on(self) -> bool:
        """Whether anything is done now."""
        has_states = self.states is not None and bool(self.states.opened)
        return bool(self._attached) or has_states or any(offload in attached_to(offload.model) for offload in self.offloads)

    def figures(self) -> dict[str, float]:
        """Return what `memkit.live_values` does, of contexts that have done something by now, layers that stream, and states in
        host memory."""
        streaming = [offload for offload in self.offloads if offload in attached_to(offload.model)]
        found: list[SavedTensorStats | LayerStats | StateStats] = [offload.stats() for offload in streaming]
        found += self.states.figures() if self.states is not None else ()
        for tag in dict.fromkeys(context.tag for context in self.contexts if context.tag):
            with suppress(ValueError):  # nothing has run under it yet
                found.append(stats(tag))
        return values_of(found)


def _told(budget: MemoryBudget, optimizer: torch.optim.Optimizer | None, *, looks_ahead: bool) -> MemoryBudget:
    inner = inside(optimizer)
    return budget.told(optimizer=inner if isinstance(inner, torch.optim.Optimizer) else None, look_ahead=looks_ahead)
