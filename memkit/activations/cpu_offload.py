"""`CPUOffload`: the context that moves a share of what autograd saves to host memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from memkit.activations.context import ForwardContext
from memkit.activations.offloading.moving_stage import MovingStage, OffloadOptions, offload_figures, paused
from memkit.activations.recomputing.budget import recorded_alone
from memkit.activations.recomputing.recording_stage import open_recording
from memkit.activations.saved.entry import NO_PAIR, Entry, entries_around, refuse_in_budget, stop_recording, unpack
from memkit.activations.saved.state import OffloadState, offload_states
from memkit.activations.stats import report_from
from memkit.core import torch_private
from memkit.core.features import refuse_in_profile
from memkit.core.hooks import HookPair, SavedTensorHooks, in_checkpoint, innermost_hooks, innermost_pair
from memkit.core.interrupts import Block
from memkit.core.kept import KeptHandle
from memkit.core.sizes import check_budget_bytes, check_bytes, format_bytes
from memkit.core.torch_state import in_dual_level
from memkit.device import Device, open_device
from memkit.errors import HostMemoryError, warn_user
from memkit.plan import Plan
from memkit.plan.ratio import auto_ratio, check_ratio
from memkit.plan.schedules import call_schedule, takes_peak
from memkit.profile import MemoryReport, find_report, timed_saves
from memkit.profile.registry import forget_report
from memkit.profile.tree import ModuleTree
from memkit.recording.ops import op_kinds
from memkit.transfer.lanes import measure_link

Ratio = float | str | Callable[..., float]


class CPUOffload(ForwardContext):
    """Move a share of the tensors that autograd saves in this context to pinned host memory, and back when the backward asks.

    Gradients are those of the plain run, bit for bit. Copies run beside the computation, on streams of their own. The storages
    that are saved first move: they are needed last. On CPU tensors the context does nothing, and says so once.

    Everything that is learned from one iteration to the next (the order of saves and of the backward, the host memory) is kept
    under the tag, so making a new context for each iteration is cheap. The same object can be entered again, but not twice at
    once. If contexts are nested, the innermost decides. With grad mode off it does nothing.

    Args:
        offload_ratio: the share of the bytes of distinct saved storages that moves, 0 to 1; or a schedule, called at each entry
            as `ratio(iteration, last_peak_bytes)` or `ratio(iteration)` (see `memkit.schedules`; to know the peak of an
            iteration, the allocator's peak is reset at each entry); or "auto", the most that hides behind the computation,
            judging by the times in a report under the tag.
        tag: the name under which it remembers: one per model, or per kind of step.
        min_bytes: storages smaller than this stay. Here and below: a number of bytes, or text such as "1MiB".
        window_bytes: bytes of saved tensors that the device may hold beside what the ratio keeps; by default twice the largest
            saved storage. Smaller values save memory, larger ones overlap better.
        host_limit_bytes: the most host memory to use; tensors beyond it stay on the device, with one warning.
        profile: a report to plan the first iteration by, instead of the one that `profile_memory` filed under the tag.
        device: where to offload from, such as "cuda:1"; by default every CUDA device that holds saved tensors.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: an argument is out of range, the object is entered twice at once, or it is entered inside a function that
            `torch.utils.checkpoint` is checkpointing (which would undo the checkpoint).

    Example:
        >>> import torch, memkit
        >>> device = memkit.device.ReferenceDevice()  # on a GPU, leave it out
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64), torch.nn.GELU())
        >>> with memkit.CPUOffload(offload_ratio=0.5, tag="example", min_bytes=0, window_bytes=0, device=device):
        ...     loss = model(torch.randn(32, 64)).sum()
        >>> loss.backward()
        >>> memkit.stats("example").ratio_reached
        0.5
    """

    goes_outside = True  # a Rematerialize offers it the values that it keeps
    asks_what_is_resident = True

    def __init__(
        self,
        offload_ratio: Ratio,
        tag: str = "default",
        *,
        min_bytes: int | str = "1MiB",
        window_bytes: int | str | None = None,
        host_limit_bytes: int | str | None = None,
        profile: MemoryReport | None = None,
        device: str | torch.device | Device | None = None,
    ) -> None:
        torch_private.require(torch_private.Feature.OFFLOAD)
        if isinstance(offload_ratio, str):
            if offload_ratio != "auto":
                raise ValueError(f'offload_ratio is a number from 0 to 1, a schedule, or "auto"; found "{offload_ratio}"')
        elif not callable(offload_ratio):
            offload_ratio = check_ratio(offload_ratio, where="offload_ratio")
        if not isinstance(tag, str):
            raise TypeError(f"tag is a string; found {type(tag).__name__}")
        if profile is not None and not isinstance(profile, MemoryReport):
            raise TypeError(f"profile is a MemoryReport, as profile_memory returns; found {type(profile).__name__}")
        self.offload_ratio = offload_ratio
        self.tag = tag
        self.profile = profile
        if host_limit_bytes is not None:
            host_limit_bytes = check_budget_bytes("host_limit_bytes", host_limit_bytes, may_be_zero=True)
        self._options = OffloadOptions(
            min_bytes=check_bytes("min_bytes", min_bytes),
            window_bytes=None if window_bytes is None else check_bytes("window_bytes", window_bytes),
            host_limit_bytes=host_limit_bytes,
            device=None if device is None else open_device(device),
        )

    def attached_to(self, model: nn.Module) -> CPUOffload:
        report = self.profile or find_report(self.tag)
        made = self.again()
        if report is not None and report.run.fingerprint != ModuleTree(model).fingerprint():
            warn_user(
                f'the report under the tag "{self.tag}" is of another model ({report.run.model}): it is not used. Profile this '
                "one, or use another tag."
            )
            made.profile = None
            forget_report(self.tag)
        return made

    def _begin(self, resident: Mapping[int, weakref.ref[torch.UntypedStorage]], block: Block) -> None:
        is_on = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        if is_on:
            refuse_in_profile(self._title)
        if in_checkpoint():  # also with grad mode off: the reentrant kind turns it off for the forward
            raise ValueError(
                f"{self._title} was entered inside a checkpointed function, which would undo the "
                "checkpoint. Put the context around the checkpoint: then what the checkpoint saves is offloaded"
            )
        stop_recording()
        last = next((entry for entry in entries_around() if entry.is_last), None)
        if last is not None:
            refuse_in_budget(self._title)
            raise ValueError(
                f"{self._title} was entered inside a {last.name}, which would then see no saved tensors. "
                "Put CPUOffload around it: then what Rematerialize keeps may be offloaded"
            )
        if is_on:
            self._entry = entry = Entry("CPUOffload", self.tag, is_last=False, block=block)
            entry.begin(self._open(entry, resident))

    def _open(self, entry: Entry, resident: Mapping[int, weakref.ref[torch.UntypedStorage]]) -> HookPair | None:
        """Return the hooks that the entry needs, None for its own."""
        state = offload_states.open(self.tag)
        entry.unasked = state.unasked
        with state.lock:
            state.report = self.profile or find_report(self.tag)
            ratio = self._ratio_of(state)
            state.num_iterations += 1
            state.ratios.append(ratio)
            options = self._options
            entry.moving = moving = MovingStage(state, options, ratio, resident)
            if state.idles_with == options and ratio == 0 and innermost_pair() is None:
                moving.is_idle = True
                return NO_PAIR
            state.counts = moving.counts
        if state.is_recorded and not in_dual_level():
            no_plan = "dtr"  # a plan would also drop values that other replays make for free
            marks_alone = recorded_alone(self._options.min_bytes, self._options.device, op_kinds(), policy=no_plan)
            entry.recording = open_recording(self.tag, marks_alone, moving=moving)
            return None
        return moving.follow_schedules(entry.pack), unpack

    @property
    def plan(self) -> Plan | None:
        """The kept and the moved saves of the last forward under the tag; None before one."""
        state = offload_states.get(self.tag)
        windows = [] if state is None else state.windows()
        trace = next((trace for window in windows for trace in window.traces), None)
        return None if state is None or trace is None else trace.plan(state.ratios[-1], self._options.window_bytes)

    def __repr__(self) -> str:
        asked = self.offload_ratio
        if isinstance(asked, float):
            share = f"{asked:.0%} of the saved bytes move" if asked else "nothing moves"
        else:
            share = "what hides behind the computation moves" if isinstance(asked, str) else "a share set by a schedule moves"
        stay = f"; storages under {format_bytes(self._options.min_bytes)} stay" if self._options.min_bytes else ""
        return f'<CPUOffload(tag="{self.tag}"): {share} to host memory{stay}>'

    def _ratio_of(self, state: OffloadState) -> float:
        asked = self.offload_ratio
        if isinstance(asked, str):
            return self._auto_ratio(state)
        if not callable(asked):
            return asked
        last_peak_bytes = self._last_peak_bytes(state) if takes_peak(asked) else None
        return call_schedule(asked, state.num_iterations, last_peak_bytes)

    def _last_peak_bytes(self, state: OffloadState) -> int | None:
        device = next((window.device for window in state.windows()), self._options.device)
        counter = None if device is None else device.memory_counter()
        if counter is None:
            return None
        peak_bytes = counter.peak_bytes() if state.num_iterations else None
        counter.reset_peak()
        return peak_bytes

    def _auto_ratio(self, state: OffloadState) -> float:
        report = state.report
        if report is None or report.forward_s is None or report.backward_s is None:
            raise ValueError(
                'offload_ratio="auto" needs a report with times: call memkit.profile_memory(model, ..., '
                f'backward=True, tag="{self.tag}") on the GPU first, or pass profile='
            )
        key = (report, self._options.min_bytes, self._options.window_bytes)
        if state.auto is None or state.auto[0] != key:
            device, ratio = self._options.device or open_device(torch.device(report.run.device)), 0.0
            try:
                ratio = auto_ratio(
                    timed_saves(report, self._options.min_bytes),
                    forward_s=report.forward_s,
                    backward_s=report.backward_s,
                    link=measure_link(device),
                    window_bytes=self._options.window_bytes,
                )
            except HostMemoryError as error:
                state.warn_once("host", f"nothing moves, since there is no host memory for it: {error}")
            state.auto = (key, ratio)
        return state.auto[1]


class _NoOffload(ForwardContext):
    def _begin(self, resident: Mapping[int, weakref.ref[torch.UntypedStorage]], block: Block) -> None:
        around, entries, is_paused = innermost_hooks(), entries_around(), paused.are_any()
        paused.blocks.append(block)
        if is_paused:
            return
        if around is not None and entries and around.owner is entries[0] and entries[0].recording is None:
            self._entry = SavedTensorHooks(_kept, unpack, block=block)  # a forward that follows a schedule sees no save
            self._entry.__enter__()
            return
        for entry in entries:  # whose hooks others call, which have to see each save
            if isinstance(entry.moving, MovingStage):
                entry.moving.go_save_by_save()

    @property
    def _title(self) -> str:
        return "no_offload"

    def end_block(self, *, has_failed: bool) -> None:
        hooks, self._entry = self._entry, None
        if hooks is not None:
            hooks.__exit__()
        paused.leave(self._block)

    def __repr__(self) -> str:
        return "<no_offload: nothing that is saved here moves>"


def _kept(tensor: Tensor) -> KeptHandle:
    return KeptHandle(tensor)


def no_offload() -> ForwardContext:
    """Return a context for use inside `CPUOffload`: tensors saved in it stay on the device. They are still checked for
    writes."""
    return _NoOffload()


report_from(CPUOffload.__name__, tags=lambda: list(offload_states), figures=offload_figures)
