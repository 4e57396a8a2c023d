"""`MemoryBudget`: the context that keeps a training step to a number of bytes of the device, by the best mix that it finds of
keep, offload and recompute."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from memkit.activations.budgeting.limits import Limits
from memkit.activations.budgeting.state import budget_states
from memkit.activations.context import RecordedContext
from memkit.activations.recomputing.budget import recorded_alone
from memkit.activations.saved.entry import Entry, entries_around, stop_recording
from memkit.activations.saved.settled import Way
from memkit.activations.stats import report_from
from memkit.core import torch_private
from memkit.core.features import refuse_in_profile
from memkit.core.interrupts import Block
from memkit.core.sizes import check_bytes, format_bytes
from memkit.core.torch_state import in_dual_level
from memkit.device import Device, open_device
from memkit.plan import MemoryPlan, Plan
from memkit.plan.asked import budget_or_share
from memkit.recording.borders import mark_sharded
from memkit.recording.ops import names_of_ops, op_kinds

_LOGGER = logging.getLogger(__name__)
_LIMITS = ("allocated", "reserved")


class MemoryBudget(RecordedContext):
    """Keep a training step within a budget for the device: parameters, gradients, optimizer states, activations, temporaries.

    Put it around the forward and the loss. Tensors that autograd saves inside stay on the device, move to host memory and come
    back during the backward, or are recomputed when the backward asks for them, in whichever mix is expected to be fastest.
    Gradients
    are those of the plain run, bit for bit, wherever its ops are deterministic.

    The first two steps under a tag are held to the budget as they go: where room gets short, modules whose calls have ended
    are recomputed, layer by layer, and what can't be recomputed moves. The second step is measured: what each op takes, and
    the bytes on the device at each op of the forward and between the requests of the backward. Then a plan is made, once for
    each sequence of ops, which takes a few seconds at most, and is followed from then on. If a step takes more than the
    budget, the plan is made again, at most three times. If everything fits, nothing is moved and nothing is recomputed. Steps
    of other sizes are not recorded: their layers are recomputed as a whole, but for as many as the budget leaves room for.

    Args:
        budget: the device budget, the most bytes that this process allocates on the device at once: text such as "12GiB", an
            int of bytes, or a share of the plain step's peak, a float above 0 and at most 1.
        tag: the name under which it remembers: one per model, or per kind of step.
        optimizer: room is left for its states until its first step has made them. Without it, 8 bytes are assumed for each
            element of a trainable parameter, until one of them was changed.
        limit: "allocated", the bytes of tensors, or "reserved", the bytes that the allocator holds for them, as the system
            shows.
        plan: a plan to follow instead, such as `MemoryBudget.plan` of a run that does the same.
        min_bytes: storages smaller than this stay: bytes, or text such as "1MiB".
        strict: raise if the budget can't be kept to, instead of warning.
        device: whose memory it is, such as "cuda:1"; by default the first device that saves anything.
        pure_ops: see `Rematerialize`.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: an argument is out of range or can be read in two ways; the budget is more than the device has; the plan is
            for another step; the object is entered twice at once, or with another context around it, or inside a function that
            `torch.utils.checkpoint` is checkpointing.
        BudgetInfeasible: with `strict`, no plan keeps to the budget. It names the least one, and what is on the device at the
            fullest moment.

    Example:
        >>> import torch, memkit
        >>> device = memkit.device.ReferenceDevice()  # on a GPU, leave it out
        >>> model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)])
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> for _ in range(4):
        ...     with memkit.MemoryBudget("48KiB", tag="example", optimizer=optimizer, min_bytes=0, device=device):
        ...         loss = model(torch.randn(32, 64)).sum()
        ...     loss.backward()
        ...     optimizer.step()
        >>> memkit.stats("example").follows_plan
        True
    """

    asks_for_shapes = True

    _compiling: AbstractContextManager[object] | None = None
    """Blocks are compiled with their chosen budget, where no op is recorded."""

    def __init__(
        self,
        budget: int | float | str,
        tag: str = "default",
        *,
        optimizer: torch.optim.Optimizer | None = None,
        limit: str = "allocated",
        plan: MemoryPlan | None = None,
        min_bytes: int | str = "1MiB",
        strict: bool = False,
        device: str | torch.device | Device | None = None,
        pure_ops: Iterable[Any] = (),
    ) -> None:
        torch_private.require(torch_private.Feature.REMAT)
        torch_private.require(torch_private.Feature.OFFLOAD)
        if not isinstance(tag, str):
            raise TypeError(f"tag is a string; found {type(tag).__name__}")
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer is a torch.optim.Optimizer, or None; found {type(optimizer).__name__}")
        if limit not in _LIMITS:
            raise ValueError(f'limit is "allocated" or "reserved"; found {limit!r}')
        if plan is not None and not isinstance(plan, MemoryPlan):
            raise TypeError(f"plan is a MemoryPlan, as MemoryBudget.plan is; found {type(plan).__name__}")
        if not isinstance(strict, bool):
            raise TypeError(f"strict is True or False; found {strict!r}")
        self.budget = budget_or_share(budget)
        self.tag = tag
        self._limits = Limits(
            budget=self.budget,
            is_of_reserved=limit == "reserved",
            optimizer=None if optimizer is None else weakref.ref(optimizer),
            min_bytes=check_bytes("min_bytes", min_bytes),
            plan=plan,
            raises=strict,
        )
        self._device = None if device is None else open_device(device)
        self._options = recorded_alone(self._limits.min_bytes, self._device, op_kinds(names_of_ops(pure_ops)))

    def told(self, *, optimizer: torch.optim.Optimizer | None = None) -> MemoryBudget:
        """Return a budget that does the same, with facts from a training loop. The user's arguments precede these.

        Args:
            optimizer: as in `MemoryBudget`, for a budget that was given none.
        """
        made = self.again()
        if optimizer is not None and made._limits.optimizer is None:
            made._limits = replace(made._limits, optimizer=weakref.ref(optimizer))
        return made

    def _begin(self, _: object, block: Block) -> None:
        self._check_place()
        stop_recording()
        around = entries_around()
        if around:
            article = "another" if around[0].name.startswith("MemoryBudget") else "a"
            raise ValueError(
                f"{self._title} was entered inside {article} {around[0].name}, which plans for itself: one budget holds for "
                "all that is saved. Use one of the two, and memkit.keep, memkit.offload or memkit.recompute for a part"
            )
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled() or in_dual_level():
            return
        refuse_in_profile(self._title)
        mark_sharded()
        from memkit.activations.budgeting.opening import open_budget  # imported here, since its imports are many

        self._entry = entry = Entry("MemoryBudget", self.tag, is_last=True, block=block)
        pair = open_budget(entry, self._options, self._limits, self.shapes)
        assert entry.recording is not None
        state = budget_states[self.tag]
        entry.unasked = state.unasked
        if not state.is_recorded:
            self._compiling = state.inside.for_all()
            self._compiling.__enter__()
        entry.recording.model = None if self._model is None else self._model()
        entry.begin(pair)
        if self.shapes is None and self._limits.plan is None and len(state.traces):
            from memkit.activations.budgeting.opening import open_layers_within
            from memkit.activations.recomputing.layers import watch_size

            watch_size(entry, state, partial(open_layers_within, state, self._limits))

    def end_block(self, *, has_failed: bool) -> None:
        state = budget_states.get(self.tag)
        if state is not None:
            state.end_forward()
        try:
            super().end_block(has_failed=has_failed)
        finally:  # what the stage has set within it is undone before
            compiling, self._compiling = self._compiling, None
            if compiling is not None:
                compiling.__exit__(None, None, None)

    def _check_place(self) -> None:
        self._refuse_in_capture()
        self._refuse_in_checkpoint(": a budget needs none")

    @property
    def plan(self) -> MemoryPlan | None:
        """The given plan, or the last one made under the tag; None before one. Steps that recompute whole calls of modules
        follow `regions`."""
        state = budget_states.get(self.tag)
        return self._limits.plan or (None if state is None else state.learning.last)

    @property
    def regions(self) -> Plan | None:
        """The calls of modules that the last step recomputed as a whole, and the values that stayed; None if it followed the
        plan."""
        state = budget_states.get(self.tag)
        return None if state is None or state.way is Way.OPS else state.of_regions.plan

    def __repr__(self) -> str:
        budget = self.budget
        held = f"{budget:.0%} of the plain step's peak" if isinstance(budget, float) else format_bytes(budget)
        return f'<MemoryBudget(tag="{self.tag}"): at most {held} of the device; what does not fit leaves or is recomputed>'


def _figures(tag: str) -> dict[str, Any] | None:
    state = budget_states.get(tag)
    if state is None:
        return None
    with state.lock:
        for each in (state, state.of_regions, state.of_copies):
            each.sweep()
        learning, plan, counts, ways, regions = state.learning, state.learning.last, state.counts, state.ways, state.regions
        copies = state.of_copies.counts if state.way is Way.REGIONS_AND_COPIES else counts
        figures = {
            **state.figures(),
            **copies.figures_of_copies(),
            "budget_bytes": state.budget_bytes,
            "num_kept": max(0, counts.num_saved - counts.num_dropped - copies.moved_out.num_copies),
            "predicted_peak_bytes": None if plan is None else plan.predicted_peak_bytes,
            "step_peak_bytes": learning.last_peak_bytes,
            "predicted_s": None if plan is None else plan.predicted_s,
            "step_s": learning.last_step_s(),
            "plain_s": None if plan is None else plan.plain_s,
            "min_budget_bytes": None if plan is None else plan.min_budget_bytes,
            "num_plans": learning.num_plans,
        }
        if state.of_layers is not None and state.of_layers[1].num_bytes:
            figures["step_peak_bytes"] = state.of_layers[1].num_bytes
        if ways is not None and regions is not None and plan is not None:
            peak_bytes, predicted_bytes = None if state.peak is None else state.peak.num_bytes, ways.predicted_bytes(regions)
            if peak_bytes is None and not ways.is_learning:
                peak_bytes = predicted_bytes  # the last one that was seen
            figures |= {
                "predicted_s": plan.plain_s + regions.plan.predicted_replay_s,
                "predicted_peak_bytes": predicted_bytes,
                "step_peak_bytes": peak_bytes,
            }
        return figures


report_from(MemoryBudget.__name__, tags=lambda: list(budget_states), figures=_figures)
