"""`Rematerialize`: the context that drops saved tensors under a byte budget and recomputes them when the backward asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from memkit.activations.context import RecordedContext
from memkit.activations.recomputing.budget import RematOptions
from memkit.activations.recomputing.recording_stage import RecordingStage, open_recording, remat_figures
from memkit.activations.recomputing.unrecorded import open_steady
from memkit.activations.saved.entry import Entry, entries_around, refuse_in_budget, stop_recording
from memkit.activations.saved.state import RematState, remat_states
from memkit.activations.stats import report_from
from memkit.core import torch_private
from memkit.core.features import refuse_in_profile
from memkit.core.hooks import innermost_hooks
from memkit.core.interrupts import Block
from memkit.core.sizes import check_budget, check_bytes, format_bytes
from memkit.core.torch_state import in_dual_level
from memkit.device import CpuDevice, Device, open_device
from memkit.plan import DTRScore, Plan
from memkit.profile.step import ProfiledStep
from memkit.recording.borders import mark_sharded
from memkit.recording.ops import names_of_ops, op_kinds

_POLICIES = ("plan", "ops", "dtr")


class Rematerialize(RecordedContext):
    """Limit the bytes that autograd saves in this context: drop tensors that are cheap to recompute, and recompute them in the
    backward.

    Gradients are those of the plain run, bit for bit, wherever its ops are deterministic. No module has to be marked: the ops
    of the forward are recorded, and those that lead to a dropped tensor run again when the backward asks for it. Side effects
    don't happen twice: running statistics, random number generators and buffers are as in the plain run.

    The first step under a tag is held to the budget as it goes: what modules have saved whose calls have ended is dropped
    first, then single values by the score of dynamic tensor rematerialization. From the second on a plan is followed, which
    is made once for each sequence of ops. A step that goes another way is held to the budget as the first. From the fourth
    step on nothing is recorded if nothing is dropped, or if calls of modules are recomputed as a whole, which costs the host
    less. A step of another size than those recorded is not recorded either: its layers are recomputed as a whole, as many as
    the size asks for.

    Args:
        budget: the saved-tensor budget, what saved tensors and the temporaries of replays may take on the device: bytes, text
            such as "8GiB", or the share of the saved bytes that stays, a float above 0 and at most 1. What else the plain run
            saves (parameters, inputs, storages under `min_bytes`) does not count. The output of one op may exceed it.
        tag: the name under which it remembers: one per model, or per kind of step.
        policy: "plan"; "ops" for plans that run only single ops again, and never the Python of a module; or "dtr" to let the
            score decide in every step. The latter two record each step.
        plan: a plan to follow instead, such as `Rematerialize.plan`, or a result of `Plan.with_action`.
        score: how the next tensor to drop is chosen.
        min_bytes: storages smaller than this stay: bytes, or text such as "1MiB".
        strict: raise if the budget can't be kept to, instead of warning: at the entry if the plan is known there, or when
            another forward begins in the same context. A forward that the score carried is judged when the next begins, by
            whether its peak was above the budget by more than the largest output of one op. If only whole calls of modules can
            keep to the budget, nothing is raised: the steps before the fourth may exceed it.
        verify: compare everything that is recomputed with a copy of the original in host memory, and raise at the first
            difference. This is slow; use it to find out why a gradient is off.
        device: where to drop tensors, such as "cuda:1"; by default the first device that saves anything.
        pure_ops: ops that may run again, beside those of PyTorch and torchvision: the op (`torch.ops.mylib.myop`, or what
            `torch.library.custom_op` returns), its name (`"mylib::myop"`), or `"mylib::*"` for a whole library. By naming an op
            you promise that it only computes: it has no side effects, reads only its arguments, and uses no random number
            generator but the default one of its first tensor's device. The outputs of all other ops are kept.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: an argument is out of range, `pure_ops` has something that isn't the name of an op, or one of PyTorch's; the
            object is entered twice at once, or inside another `Rematerialize`, or inside a function that
            `torch.utils.checkpoint` is checkpointing.
        BudgetInfeasible: with `strict`, no plan keeps to the budget, or the last step, which followed none, did not.

    Example:
        >>> import torch, memkit
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64), torch.nn.GELU())
        >>> with memkit.Rematerialize(budget=0.5, tag="example", min_bytes=0):
        ...     loss = model(torch.randn(32, 64)).sum()
        >>> loss.backward()
        >>> memkit.stats("example").num_dropped > 0
        True

    Source: Kirisame et al., Dynamic Tensor Rematerialization, arXiv 2006.09616.
    """

    asks_for_shapes = True

    def __init__(
        self,
        budget: int | float | str,
        tag: str = "default",
        *,
        policy: str = "plan",
        plan: Plan | None = None,
        score: DTRScore = DTRScore(),  # noqa: B008  # frozen
        min_bytes: int | str = "1MiB",
        strict: bool = False,
        verify: bool = False,
        device: str | torch.device | Device | None = None,
        pure_ops: Iterable[Any] = (),
    ) -> None:
        torch_private.require(torch_private.Feature.REMAT)
        if not isinstance(tag, str):
            raise TypeError(f"tag is a string; found {type(tag).__name__}")
        if policy not in _POLICIES:
            raise ValueError(
                f'Rematerialize needs policy="plan", "ops" or "dtr"; found {policy!r}. Omit it to follow a plan from the '
                'second step on, pass "ops" to run again single ops alone, or "dtr" to let the score decide in every step'
            )
        if plan is not None and not isinstance(plan, Plan):
            raise TypeError(f"plan is a memkit.plan.Plan, as Rematerialize.plan is; found {type(plan).__name__}")
        if not isinstance(score, DTRScore):
            raise TypeError(f"score is a memkit.plan.DTRScore; found {type(score).__name__}")
        for name, flag in (("strict", strict), ("verify", verify)):
            if not isinstance(flag, bool):
                raise TypeError(f"{name} is True or False; found {flag!r}")
        self.budget = check_budget(budget)
        self.tag = tag
        self._options = RematOptions(
            budget=self.budget,
            policy=policy,
            plan=plan,
            score=score,
            min_bytes=check_bytes("min_bytes", min_bytes),
            strict=strict,
            verify=verify,
            device=None if device is None else open_device(device),
            kinds=op_kinds(names_of_ops(pure_ops)),
        )

    def _begin(self, _: object, block: Block) -> None:
        self._refuse_in_capture()
        is_on = torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and not in_dual_level()
        if is_on:
            refuse_in_profile(self._title)
            mark_sharded()
        self._refuse_in_checkpoint()
        stop_recording()
        outer = next((entry.name for entry in entries_around() if entry.recording is not None), None)
        if outer is not None:
            refuse_in_budget(self._title)
            raise ValueError(
                f"{self._title} was entered inside another {outer}: one budget holds for all that is "
                "saved. Use memkit.keep, memkit.offload and memkit.recompute to treat parts of a model differently"
            )
        if is_on:
            hooks, state = innermost_hooks(), remat_states.get(self.tag) or remat_states.open(self.tag)
            self._entry = entry = Entry("Rematerialize", self.tag, is_last=True, block=block)
            settled, options = state.settled, self._options
            # a share of a step's bytes by structure is one at every size, and so is nothing dropped
            is_for_all = settled is not None and (settled.regions is None or isinstance(options.budget, float))
            is_other = not is_for_all and state.is_of_other_size(self.shapes)
            steady = None if is_other else open_steady(state, self._options, hooks)
            if steady is None and (is_other or state.gives_up_plans):
                from memkit.activations.recomputing.layers import open_layers_of_share  # only now: a long chain of imports

                steady = open_layers_of_share(state, self._options, hooks, gives_up=not is_other)
                state.num_iterations += steady is not None
            entry.recording = steady or open_recording(self.tag, self._options, outer=hooks)
            entry.recording.model = None if self._model is None else self._model()
            entry.unasked = state.unasked
            entry.begin(None if steady is None else steady.pair)
            if self.shapes is None and not is_for_all and self._options.may_settle:
                from memkit.activations.recomputing.layers import open_layers_of_share, watch_size

                watch_size(entry, state, partial(open_layers_of_share, state, self._options, hooks))

    @property
    def plan(self) -> Plan | None:
        """The given plan, or the last one followed under the tag; None before one: the first step follows none. Kept values
        that a `CPUOffload` around has moved are OFFLOAD in it."""
        state = remat_states.get(self.tag)
        if self._options.plan is not None or state is None or state.plan is None:
            return self._options.plan
        return state.plan.with_moved(state.moved)

    def __repr__(self) -> str:
        budget = self.budget
        held = f"{budget:.0%} of the saved bytes" if isinstance(budget, float) else f"{format_bytes(budget)} of saved tensors"
        return f'<Rematerialize(tag="{self.tag}"): at most {held} stay; the others are recomputed>'

    @staticmethod
    def min_budget(
        model: nn.Module,
        *args: Any,
        kwargs: dict[str, Any] | None = None,
        loss_fn: Callable[[Any], Tensor] | None = None,
        target: str = "cuda",
        min_bytes: int | str = "1MiB",
        score: DTRScore = DTRScore(),  # noqa: B008  # frozen
        pure_ops: Iterable[Any] = (),
    ) -> int:
        """Return the smallest budget in bytes that `Rematerialize` can keep to, without a GPU and without running the model.

        The step is traced without data, and the least bytes of its plans are returned. Plans that run ops again more than a few
        times on average are not looked for.

        Args:
            model: on any device; it is left as it is.
            args, kwargs: the inputs of its forward; only shapes and dtypes count.
            loss_fn: called with what the model returns; must return one number. By default the sum of its outputs is the loss.
            target: whose kernels to imitate, "cuda" or "cpu".
            min_bytes, score, pure_ops: as for `Rematerialize`.

        Raises:
            TypeError: `model` is no module, or see `Rematerialize`.
            ProfileError, DataDependentError: as `profile_memory` with `device="meta"`.

        Example:
            >>> import torch, memkit
            >>> block = lambda: torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU())
            >>> model, x = torch.nn.Sequential(*[block() for _ in range(8)]), torch.randn(4096, 256)
            >>> report = memkit.profile_memory(model, x, print_table=False)
            >>> memkit.Rematerialize.min_budget(model, x) < report.activation_bytes / 3
            True
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"min_budget needs a torch.nn.Module; found {type(model).__name__}")
        from memkit.profile.simulate.run import run_without_data  # imported here: a base in it is a private class of torch

        step = ProfiledStep(model=model, args=args, kwargs=dict(kwargs or {}), loss_fn=loss_fn, backward=True)
        state = RematState("min_budget")
        device = CpuDevice(torch.device("meta"))
        everything = Rematerialize(1.0, state.tag, score=score, min_bytes=min_bytes, device=device, pure_ops=pure_ops)
        run_without_data(step, target, _recorded(state, everything._options))
        trace = state.traces.latest
        return 0 if trace is None or trace.ops is None else trace.ops.planner(score).walks.smallest().peak_bytes


@contextmanager
def _recorded(state: RematState, options: RematOptions) -> Iterator[None]:
    """`Rematerialize` for a state of its own, without a tag."""
    entry, has_failed = Entry("Rematerialize", state.tag, is_last=True, block=None), True
    entry.recording = RecordingStage(state, options)
    entry.begin()
    try:
        yield
        has_failed = False
    finally:
        entry.end(has_failed=has_failed)


report_from(Rematerialize.__name__, tags=lambda: list(remat_states), figures=remat_figures)
