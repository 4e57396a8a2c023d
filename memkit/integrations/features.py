"""The features that a callback was given: attached to a model when its training begins, removed when it ends."""

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
"""What was last attached to each model: a run that ended by an error may have left it there."""


class Features:
    """The features of a callback: contexts that are attached to a model while it trains, `LayerOffload`s of models that already
    stream, and what makes a `StateOffload` of the optimizer.

    Args:
        owner: the name of the callback, for errors.
        features: the callback's arguments.

    Raises:
        TypeError: there are none, or one is no feature of memkit.
        ValueError: two are of one kind, or a `LayerOffload` is closed.
    """

    def __init__(self, owner: str, features: Iterable[object]) -> None:
        self.owner = owner
        self.contexts: list[ForwardContext] = []
        self.offloads: list[LayerOffload] = []
        self.states: OptimizerStates | None = None
        self._attached: list[Attachment] = []
        self._known: list[frozenset[str | int]] = []
        """The names and ids of the parameters of each model whose layers stream, as of now."""
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
        """Check that each `LayerOffload` is of the model to be trained, and has all of its parameters.

        Raises:
            ValueError: it is not.
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
            model: the module to attach to.
            optimizer: its optimizer, if there is one: a `MemoryBudget` without one leaves room for its states.
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
        """Make the `StateOffload`s, if there are to be any. Called before `begin`, so that their device memory is already
        allocated when a budget is planned.

        Raises:
            ValueError: there is no optimizer, or it can't be stepped in pieces.
        """
        if self.states is not None:
            self.states.begin(optimizers)

    def end(self) -> None:
        """Remove the contexts. Layers keep streaming."""
        while self._attached:
            self._attached.pop().remove()

    def end_states(self) -> None:
        """Close the `StateOffload`s, which puts the states back."""
        if self.states is not None:
            self.states.end()

    def close(self) -> None:
        """Remove everything: contexts, `StateOffload`s, and `LayerOffload`s, whose weights are then where they were before."""
        self.end()
        self.end_states()
        for offload in self.offloads:
            offload.close()

    @property
    def is_on(self) -> bool:
        """Whether any feature is active."""
        has_states = self.states is not None and bool(self.states.opened)
        return bool(self._attached) or has_states or any(offload in attached_to(offload.model) for offload in self.offloads)

    def figures(self) -> dict[str, float]:
        """Return `memkit.live_values` of the contexts that have done something, of streaming layers and of states in host
        memory."""
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
