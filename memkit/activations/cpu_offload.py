"""`CPUOffload`: the context that moves a share of what autograd saves to host memory, and what is kept under its tags."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memkit import torch_private
from memkit.activations.context import ForwardContext, TaggedEntry
from memkit.activations.counts import Counts
from memkit.activations.eligibility import counted_by, is_from_leaf, is_range_of_bytes, leaves_with
from memkit.activations.forward import Forward
from memkit.activations.remat_entry import Entry, end_yielding, open_recorder
from memkit.activations.small import all_too_small
from memkit.activations.stats import fragmentation_hint, report_from
from memkit.activations.window import OffloadWindow, settle_retired
from memkit.device import CpuDevice, Device, open_device
from memkit.errors import warn_user
from memkit.hooks import SavedTensorHooks, end_left, in_checkpoint, is_in_last, refuse_in_profile
from memkit.interrupts import Block, Blocks
from memkit.kept import FlattenedHandle, KeptHandle
from memkit.plan import Action, Plan, auto_ratio, call_schedule, check_ratio, takes_peak, timed_saves
from memkit.profile import MemoryReport, find_report
from memkit.profile.registry import forget_report
from memkit.profile.tree import ModuleTree
from memkit.sizes import check_budget_bytes, check_bytes, format_bytes
from memkit.storages import storage_key
from memkit.torch_state import dynamo_is_loaded, has_own_dispatch
from memkit.transfer.link import measure_link

Ratio = float | str | Callable[..., float]

_AutoKey = tuple[MemoryReport, int, int | None]

_MAX_RATIOS = 10_000
_MANY_SAVES, _MOST = 9, 0.75
"""No operator saves so many tensors by itself; and how much of all is too much to be saved at once."""


class _TagState:
    """What is remembered under a tag from one iteration to the next."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.lock = threading.RLock()
        self.num_iterations = 0
        self.ratios: deque[float] = deque(maxlen=_MAX_RATIOS)
        self.counts = Counts(0.0)
        self.report: MemoryReport | None = None
        self.auto: tuple[_AutoKey, float] | None = None
        self.has_warned_of_cpu = False
        self.has_warned_of_whole_model = False
        self.looks_for_large = True
        """Whether all that was saved so far was smaller than `min_bytes`, and nobody was told."""
        self.is_recorded = False
        """Whether forwards are recorded, since something of them was to be made again."""
        self._windows: dict[Device, OffloadWindow] = {}

    def window(self, device: Device, min_bytes: int) -> OffloadWindow:
        """Return the window of a device, planned by the report if there is one."""
        with self.lock:
            window = self._windows.get(device)
            if window is None:
                window = self._windows[device] = OffloadWindow(device, self.tag, self.lock)
            if self.report is not None and not len(window.traces):
                window.seed_from(self.report, min_bytes)
            return window

    def windows(self) -> list[OffloadWindow]:
        with self.lock:
            return list(self._windows.values())


_states: dict[str, _TagState] = {}
_states_lock = threading.RLock()


_paused = Blocks()
"""The `no_offload` regions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """What was asked for: see `CPUOffload`. An entry holds this and not the context, which dies once nobody is in it."""

    min_bytes: int
    window_bytes: int | None
    host_limit_bytes: int | None
    device: Device | None


class _Entry(TaggedEntry):
    """One time in the context: from `with` to its end."""

    def __init__(
        self,
        state: _TagState,
        options: _Options,
        ratio: float,
        resident: Mapping[int, weakref.ref[torch.UntypedStorage]],
        block: Block,
    ) -> None:
        self.tag = state.tag
        self._state = state
        self._options = options
        self._resident = resident
        self._block = block
        self._recorder: Entry | None = None
        """Records the forward, where something is to be made again."""
        self.counts = Counts(ratio)
        self._forwards: dict[Device, tuple[OffloadWindow, Forward]] = {}
        self._devices: dict[torch.device, Device | None] = {}
        self._saw_cpu = False
        self._small_bytes: dict[int, int] | None = {} if state.looks_for_large and ratio > 0 else None
        """Bytes of what could be moved but for its size, by storage, as long as nothing larger is known."""
        self._marks: dict[tuple[int, int, int], tuple[weakref.ref[Tensor], Action]] = {}
        """What the user has asked to do with what is in a tensor: see `_mark_key`."""
        self._may_be_compiled = dynamo_is_loaded()
        self._saves_of_nodes: defaultdict[int, list[int]] = defaultdict(list)
        """Where something may be compiled: bytes of each tensor that may leave, by the node that saved it."""
        self._hooks: SavedTensorHooks | None = SavedTensorHooks(
            self.pack,
            _unpack,
            owner=self,
            name=f'CPUOffload (tag "{state.tag}")',
            compiled=self._may_be_compiled,
            block=block,
        )

    def begin(self) -> None:
        asked = self._options.device
        if asked is None:
            for window in self._state.windows():
                self._forward_on(window.device)
        elif not isinstance(asked, CpuDevice):  # pin ahead of the first save
            self._forward_on(asked)
        assert self._hooks is not None
        self._hooks.__enter__()
        if self._state.is_recorded:
            options = self._options
            self._recorder = open_recorder(
                self._state.tag, min_bytes=options.min_bytes, device=options.device, block=self._block
            )
            self._recorder.begin()

    def end(self, *, has_failed: bool) -> None:
        """The context was left. After an interrupt in here this may be called again."""
        if self._recorder is not None:
            self._recorder.end(has_failed=has_failed)
        if self._hooks is not None:
            self._hooks.__exit__()
        self._hooks = None  # they hold `pack`, and so the entry
        saw_device = bool(self._forwards)
        for window, forward in self._forwards.values():
            end_forward = torch.compiler.disable(window.end_forward) if self._may_be_compiled else window.end_forward
            end_forward(forward, learn=not has_failed)
        self._warn_of_whole_model()
        if not has_failed:
            self._warn_of_small()
        self._forwards.clear()  # the graph alone keeps a forward alive from here on: it counts in the limit until it dies
        if self._saw_cpu and not saw_device and not self._state.has_warned_of_cpu:
            self._state.has_warned_of_cpu = True
            warn_user(
                f'CPUOffload (tag "{self._state.tag}") saw only tensors on the CPU, where there is nothing to move: it does '
                "nothing. Move the model to a GPU, or pass device=memkit.device.ReferenceDevice() to try it out."
            )

    def _warn_of_whole_model(self) -> None:
        """A model that is compiled as one graph is one node, which saves its tensors when all of them have been made."""
        sizes_bytes = max(self._saves_of_nodes.values(), key=sum, default=[])
        share = sum(sizes_bytes) / max(1, sum(map(sum, self._saves_of_nodes.values())))
        if len(sizes_bytes) < _MANY_SAVES or share < _MOST or self.counts.ratio == 0 or self._state.has_warned_of_whole_model:
            return
        self._state.has_warned_of_whole_model = True
        warn_user(
            f'CPUOffload (tag "{self._state.tag}"): one node of the graph saved {len(sizes_bytes)} tensors at once, '
            f"{share:.0%} of all bytes, as it is when a model is compiled as a whole. Nothing can leave before its end, so "
            "that the peak of the forward is that of no offload. Compile each block of the model by itself (block.compile())."
        )

    def _warn_of_small(self) -> None:
        if self._small_bytes is None or not (self._small_bytes or self.counts.unique_bytes):
            return
        self._state.looks_for_large = False
        if not self.counts.unique_bytes:
            message = all_too_small(self._small_bytes.values(), self._options.min_bytes, done="moved")
            warn_user(f'CPUOffload (tag "{self._state.tag}"): {message}')

    def take(self, tensor: Tensor, action: Action | None) -> KeptHandle:
        """See `Mover`."""
        if isinstance(tensor, nn.Parameter) or (_paused.blocks and _paused.are_any()):
            return KeptHandle(tensor)
        return self._pack(tensor, action)

    def mark(self, tensor: Tensor, action: Action) -> None:
        """See `Mover`. What is to be made again is so from the next forward on, which is recorded then."""
        if action is Action.RECOMPUTE:
            self._state.is_recorded = True
            return
        with torch_private.without_python_dispatch(), self._state.lock:
            if not is_range_of_bytes(tensor):
                return
            storage = tensor.untyped_storage()
            self._marks[_mark_key(tensor, storage)] = (weakref.ref(counted_by(tensor)), action)
            device = self._device_of(tensor)
            found = None if device is None else self._forwards.get(device)
            record = None if found is None else found[1].find(storage, tensor)
            if found is not None and record is not None:
                found[0].change(record, storage, action)

    def _marked(self, tensor: Tensor, storage: torch.UntypedStorage) -> Action | None:
        """Return what the user has asked to do with what is in a tensor."""
        found = self._marks.get(_mark_key(tensor, storage))
        return found[1] if found is not None and found[0]() is counted_by(tensor) else None

    def pack(self, tensor: Tensor) -> KeptHandle:
        """Take a tensor that autograd saves. This is a saved-tensor hook: grad mode is off, the tensor is the real one."""
        if torch_private.backward_task() != -1 or (_paused.blocks and _paused.are_any()):
            return KeptHandle(tensor)
        if type(tensor) is Tensor:
            return self._pack(tensor)
        if isinstance(tensor, nn.Parameter):
            return KeptHandle(tensor)
        if not has_own_dispatch(tensor):
            with torch_private.without_subclass_functions():
                return self._pack(tensor)
        if torch_private.is_wrapper(tensor) and not is_from_leaf(tensor):
            return FlattenedHandle(tensor, self.pack, leaves_with)
        return KeptHandle(tensor)

    def _pack(self, tensor: Tensor, action: Action | None = None) -> KeptHandle:
        if not is_range_of_bytes(tensor):
            return KeptHandle(tensor)
        device = self._device_of(tensor)
        if device is None:
            return KeptHandle(tensor)
        self.counts.seen_bytes += tensor.nbytes
        storage = tensor.untyped_storage()
        if storage.nbytes() < self._options.min_bytes or storage.nbytes() == 0 or device.is_capturing():
            if self._small_bytes is not None:
                self._note_small(tensor, storage)
            return KeptHandle(tensor)
        if is_from_leaf(tensor) or self._is_resident(storage):
            if self._state.report is not None and not isinstance(tensor, nn.Parameter):
                window, forward = self._forward_on(device)
                if forward.follows_report:
                    window.pass_over(forward, tensor, storage)
            return KeptHandle(tensor)
        if self._may_be_compiled:
            self._saves_of_nodes[torch_private.node_number()].append(storage.nbytes())
        window, forward = self._forward_on(device)
        if self._marks and action is None:
            action = self._marked(tensor, storage)
        handle = window.pack(forward, tensor, storage, action=action)
        return KeptHandle(tensor) if handle is None else handle

    def _note_small(self, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        is_small = 0 < storage.nbytes() < self._options.min_bytes
        if self._small_bytes is not None and is_small and not (is_from_leaf(tensor) or self._is_resident(storage)):
            self._small_bytes[storage_key(storage)] = storage.nbytes()

    def _is_resident(self, storage: torch.UntypedStorage) -> bool:
        reference = self._resident.get(storage_key(storage))
        return reference is not None and reference() is storage

    def _device_of(self, tensor: Tensor) -> Device | None:
        """Return where a tensor is, None if nothing is moved from there."""
        if tensor.device not in self._devices:
            self._devices[tensor.device] = self._open(tensor.device)
        return self._devices[tensor.device]

    def _open(self, torch_device: torch.device) -> Device | None:
        asked = self._options.device
        is_cpu = torch_device.type == "cpu" and (asked is None or isinstance(asked, CpuDevice))
        self._saw_cpu = self._saw_cpu or is_cpu
        if is_cpu or (asked is not None and torch_device != asked.torch_device):
            return None
        return asked or (open_device(torch_device) if torch_device.type == "cuda" else None)

    def _forward_on(self, device: Device) -> tuple[OffloadWindow, Forward]:
        """Return the forward that saves on a device belong to: a new one if a backward has begun since the last save."""
        found = self._forwards.get(device)
        if found is None or not found[1].is_forward:
            options = self._options
            window = self._state.window(device, options.min_bytes)
            window.arena.limit_bytes = options.host_limit_bytes
            forward = Forward(window.traces, ratio=self.counts.ratio, window_bytes=options.window_bytes, counts=self.counts)
            window.open_forward(forward)
            found = self._forwards[device] = (window, forward)
        return found


def _unpack(packed: KeptHandle) -> Tensor:
    return packed.unpack()


class CPUOffload(ForwardContext):
    """Move a share of what autograd saves in this context to pinned host memory, and have it back when the backward asks.

    Gradients are those of the plain run, bit for bit. Copies run beside the computation, on streams of their own. The storages
    saved earliest leave: they are needed last. On CPU tensors the context does nothing, and says so once.

    Everything that is learned from one iteration to the next (the order of saves and of the backward, the host memory) is kept
    under the tag, so to make a new context for each iteration is cheap. The same object may be entered again, but not twice at
    once. Of nested contexts the innermost decides. With grad mode off it does nothing.

    Args:
        offload_ratio: share of the bytes of distinct saved storages that leaves, 0 to 1; or a schedule, called at each entry as
            `ratio(iteration, last_peak_bytes)` or `ratio(iteration)` (see `memkit.schedules`; to know the peak of an iteration,
            the allocator's peak is reset at each entry); or "auto", the most that hides behind the computation, by the times in
            a report under the tag.
        tag: which memory to use: one per model, or per kind of step.
        min_bytes: storages smaller than this stay. Here and below: a number of bytes, or text such as "1MiB".
        window_bytes: bytes of saved tensors that the device may hold beside what the ratio keeps; by default twice the largest
            saved storage. Smaller saves memory, larger overlaps better.
        host_limit_bytes: most bytes of host memory to use; what does not fit stays on the device, with one warning.
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

    goes_outside = True  # what a Rematerialize keeps is offered to it

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
        self.min_bytes = check_bytes("min_bytes", min_bytes)
        self.window_bytes = None if window_bytes is None else check_bytes("window_bytes", window_bytes)
        self.host_limit_bytes = (
            None if host_limit_bytes is None else check_budget_bytes("host_limit_bytes", host_limit_bytes, may_be_zero=True)
        )
        self.profile = profile
        self.device = None if device is None else open_device(device)
        self._entry: _Entry | None = None

    def __enter__(self) -> CPUOffload:
        self.enter_with({})
        return self

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

    def enter_with(self, resident: Mapping[int, weakref.ref[torch.UntypedStorage]]) -> None:
        end_left()
        block = self.claim(f'this CPUOffload (tag "{self.tag}") is entered already; make a second one for a nested context')
        try:
            self.is_entered = True
            self._begin(resident, block)
        except BaseException:
            self.leave(has_failed=True)
            raise

    def _begin(self, resident: Mapping[int, weakref.ref[torch.UntypedStorage]], block: Block) -> None:
        is_on = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        if is_on:
            refuse_in_profile(f'CPUOffload (tag "{self.tag}")')
        if in_checkpoint():  # also with grad mode off: the reentrant kind turns it off for the forward
            raise ValueError(
                f'CPUOffload (tag "{self.tag}") was entered inside a checkpointed function, which would undo the '
                "checkpoint. Put the context around the checkpoint: then what the checkpoint saves is offloaded"
            )
        end_yielding()
        if is_in_last():
            raise ValueError(
                f'CPUOffload (tag "{self.tag}") was entered inside a Rematerialize, which would see no saved tensor any more. '
                "Put CPUOffload around it: then what Rematerialize keeps may be offloaded"
            )
        if is_on:
            state = _state_of(self.tag)
            with state.lock:
                state.report = self.profile or find_report(self.tag)
                ratio = self._ratio_of(state)
                state.num_iterations += 1
                state.ratios.append(ratio)
                options = _Options(
                    min_bytes=self.min_bytes,
                    window_bytes=self.window_bytes,
                    host_limit_bytes=self.host_limit_bytes,
                    device=self.device,
                )
                self._entry = _Entry(state, options, ratio, resident, block)
                state.counts = self._entry.counts
            self._entry.begin()

    @property
    def plan(self) -> Plan | None:
        """What is kept and what leaves, by the saves of the last forward under the tag; None before one."""
        with _states_lock:
            state = _states.get(self.tag)
        windows = [] if state is None else state.windows()
        traces = next((window.traces for window in windows if len(window.traces)), None)
        return None if state is None or traces is None else next(iter(traces)).plan(state.ratios[-1], self.window_bytes)

    def __repr__(self) -> str:
        asked = self.offload_ratio
        if isinstance(asked, float):
            share = f"{asked:.0%} of the saved bytes move" if asked else "nothing moves"
        else:
            share = "what hides behind the computation moves" if isinstance(asked, str) else "a share set by a schedule moves"
        stay = f"; storages under {format_bytes(self.min_bytes)} stay" if self.min_bytes else ""
        return f'<CPUOffload(tag="{self.tag}"): {share} to host memory{stay}>'

    def _ratio_of(self, state: _TagState) -> float:
        """Return the ratio for the iteration that begins."""
        asked = self.offload_ratio
        if isinstance(asked, str):
            return self._auto_ratio(state)
        if not callable(asked):
            return asked
        last_peak_bytes = self._last_peak_bytes(state) if takes_peak(asked) else None
        return call_schedule(asked, state.num_iterations, last_peak_bytes)

    def _last_peak_bytes(self, state: _TagState) -> int | None:
        """Return the allocator's peak since the iteration before, and start it again."""
        device = next((window.device for window in state.windows()), self.device)
        counter = None if device is None else device.memory_counter()
        if counter is None:
            return None
        peak_bytes = counter.peak_bytes() if state.num_iterations else None
        counter.reset_peak()
        return peak_bytes

    def _auto_ratio(self, state: _TagState) -> float:
        """Return the largest ratio whose copies hide behind the computation, by the times of the report."""
        report = state.report
        if report is None or report.forward_s is None or report.backward_s is None:
            raise ValueError(
                'offload_ratio="auto" needs a report with times: call memkit.profile_memory(model, ..., '
                f'backward=True, tag="{self.tag}") on the GPU first, or pass profile='
            )
        key = (report, self.min_bytes, self.window_bytes)
        if state.auto is None or state.auto[0] != key:
            device = self.device or open_device(torch.device(report.run.device))
            ratio = auto_ratio(
                timed_saves(report, self.min_bytes),
                forward_s=report.forward_s,
                backward_s=report.backward_s,
                link=measure_link(device),
                window_bytes=self.window_bytes,
            )
            state.auto = (key, ratio)
        return state.auto[1]


def _state_of(tag: str) -> _TagState:
    with _states_lock:
        return _states.setdefault(tag, _TagState(tag))


def forget(tag: str) -> None:
    """Forget what is kept under a tag: plans, counts, and the host memory once no graph needs it. Unknown tags are fine."""
    with _states_lock:
        state = _states.pop(tag, None)
    for window in state.windows() if state is not None else ():
        window.retire()
    settle_retired()


def _mark_key(tensor: Tensor, storage: torch.UntypedStorage) -> tuple[int, int, int]:
    """Return what tells what is in a tensor now from what is in others, or was in it before."""
    return storage_key(storage), id(counted_by(tensor)), torch_private.version_of(tensor)


class _NoOffload(ForwardContext):
    """What `no_offload` returns."""

    def __enter__(self) -> _NoOffload:
        end_left()
        block = self.claim("this no_offload is entered already; call no_offload() for each region")
        self.is_entered = True
        _paused.blocks.append(block)
        return self

    def end_block(self, *, has_failed: bool) -> None:
        _paused.leave(self._block)

    def __repr__(self) -> str:
        return "<no_offload: nothing that is saved here moves>"


def no_offload() -> ForwardContext:
    """Return a context, for inside of `CPUOffload`, in which nothing leaves. Saved tensors are still checked for writes."""
    return _NoOffload()


def _figures(tag: str) -> dict[str, Any] | None:
    """Return what `CPUOffload` knows under a tag, by the fields of `SavedTensorStats`."""
    with _states_lock:
        state = _states.get(tag)
    if state is None:
        return None
    windows = state.windows()
    for window in windows:
        window.settle()
    counts = state.counts
    counters = [counter for counter in (window.device.memory_counter() for window in windows) if counter is not None]
    allocated_bytes = sum(counter.peak_bytes() for counter in counters) if counters else None
    reserved = [peak for peak in (counter.peak_reserved_bytes() for counter in counters) if peak is not None]
    return {
        "num_iterations": state.num_iterations,
        "ratios": tuple(state.ratios),
        "window_bytes": counts.window_bytes,
        "seen_bytes": counts.seen_bytes,
        "unique_bytes": counts.unique_bytes,
        "kept_bytes": counts.kept_bytes,
        **counts.figures_of_copies(),
        "host_in_use_bytes": sum(window.arena.in_use_bytes for window in windows),
        "host_peak_bytes": sum(window.arena.peak_in_use_bytes for window in windows),
        "host_held_bytes": sum(window.arena.held_bytes for window in windows),
        "num_pins": sum(window.arena.num_pins for window in windows),
        "live_records": sum(window.ledger.num_records for window in windows),
        "live_bytes": sum(window.ledger.live_bytes for window in windows),
        "peak_live_bytes": sum(window.ledger.peak_live_bytes for window in windows),
        "peak_allocated_bytes": allocated_bytes,
        "peak_reserved_bytes": sum(reserved) if reserved else None,
        "hint": fragmentation_hint(allocated_bytes, sum(reserved)),
    }


report_from(CPUOffload.__name__, tags=lambda: list(_states), figures=_figures)
