"""`MovingStage` moves saved tensors to host memory, in the share that a ratio asks for (`RatioDecider`), or by a schedule."""

from __future__ import annotations

import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memkit.activations.offloading.scheduled import ScheduledForward, ScheduledSaves, Sized, make_schedule, take_spans
from memkit.activations.offloading.window import OffloadWindow
from memkit.activations.saved.counts import Counts
from memkit.activations.saved.entry import Stage, all_too_small
from memkit.activations.saved.records import Forward
from memkit.activations.saved.state import OffloadState, offload_states
from memkit.activations.saved.traces import NO_VALUE, STRANGER, Capture, Follower, SaveKey, SeenSave, Trace, Traces, key_of
from memkit.activations.stats import fragmentation_hint
from memkit.core import torch_private
from memkit.core.interrupts import Blocks, mended
from memkit.core.kept import FlattenedHandle, KeptHandle
from memkit.core.tensors import is_range_of_bytes, storage_key
from memkit.core.torch_state import dynamo_is_loaded, has_own_dispatch
from memkit.device import Device, open_device, why_nothing_is_freed
from memkit.plan import Action
from memkit.plan.ratio import Forecast, RatioSoFar

_LOGGER = logging.getLogger(__name__)
paused = Blocks()


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadOptions:
    min_bytes: int
    window_bytes: int | None
    host_limit_bytes: int | None
    device: Device | None


_MANY_SAVES, _MOST = 9, 0.75  # no operator saves so many tensors, and no more than this share should be saved at once


class MovingStage(Stage):
    """Moves saved tensors save by save or by a schedule. The caller holds the `resident` storages, by `storage_key`."""

    moves = True

    def __init__(
        self,
        state: OffloadState,
        options: OffloadOptions,
        ratio: float,
        resident: Mapping[int, weakref.ref[torch.UntypedStorage]],
    ) -> None:
        self.counts = Counts(ratio)
        self._state, self._options, self._resident = state, options, resident
        self._forwards: dict[Device, tuple[OffloadWindow, Forward]] = {}
        self._devices: dict[torch.device, Device | None] = {}
        self._capture: Capture | None = None if paused.are_any() else Capture()
        self._saves: ScheduledSaves | None = None
        self._scheduled: ScheduledForward | None = None
        self._may_follow = True  # the next save may begin or leave a schedule
        self._left: Trace | None = None
        self._saw_device = False
        self._is_alone = True
        self._saw_shared: Device | None = None
        self._small_bytes: dict[int, int] | None = {} if state.looks_for_large and ratio > 0 else None
        """By storage, bytes of tensors too small to move, until a larger one is found."""
        self._may_be_compiled = dynamo_is_loaded()
        self.is_idle = False
        self._saves_of_nodes: defaultdict[int, list[int]] = defaultdict(list)  # bytes, where something may be compiled

    @property
    def _asked(self) -> tuple[Hashable, ...]:
        return self._options.min_bytes, self._options.host_limit_bytes, bool(self._resident)

    def _backward_has_begun(self) -> bool:
        for _, forward in self._forwards.values():
            if not forward.is_forward:
                return True
        scheduled = self._scheduled
        return scheduled is not None and scheduled.has_backward and not self._forwards

    def begin(self) -> None:
        asked = self._options.device
        if self.is_idle:
            return
        windows = self._state.windows()
        if self._saves is not None and any(trace.seen is not None for window in windows for trace in window.traces):
            self._saw_device = True  # in an earlier step
            return  # the first save tells whether a schedule is followed
        if asked is None:
            for window in windows:
                self._forward_on(window.device)
        elif asked.has_own_memory:  # pin ahead of the first save
            self._forward_on(asked)

    def take_off(self) -> None:
        self._saves = None

    def end(self, *, has_failed: bool) -> None:
        saw_device = self._saw_device or bool(self._forwards) or self._scheduled is not None
        if self._scheduled is not None:
            scheduled = self._scheduled
            if not (scheduled.is_complete or scheduled.has_backward or has_failed or self._forwards):
                self._forward_on(scheduled.device)  # a shorter one
            self._end_scheduled(scheduled)
        for window, forward in self._forwards.values():
            window.end_forward(forward, learn=not has_failed)
        self._warn_of_whole_model()
        if not has_failed:
            if saw_device:
                self._state.idles_with = self._options if self.counts.ratio == 0 and self._is_alone else None
            self._file_seen()
            self._warn_of_small()
        self._forwards.clear()  # from here on only the graph keeps a forward alive, which counts in the limit until it dies
        if self._saw_shared is not None and not saw_device:
            self._state.warn_once("shared", f"nothing moves: {why_nothing_is_freed(self._saw_shared)}")

    def _warn_of_whole_model(self) -> None:
        sizes_bytes = max(self._saves_of_nodes.values(), key=sum, default=[])
        share = sum(sizes_bytes) / max(1, sum(map(sum, self._saves_of_nodes.values())))
        if len(sizes_bytes) >= _MANY_SAVES and share >= _MOST and self.counts.ratio != 0:
            self._state.warn_once(
                "whole model",
                f"one node of the graph saved {len(sizes_bytes)} tensors at once, {share:.0%} of all bytes, as it is when a "
                "model is compiled as a whole. Nothing can leave before its end, so that the peak of the forward is that of no "
                "offload. Compile each block of the model by itself (block.compile()).",
            )

    def _warn_of_small(self) -> None:
        if self._small_bytes is None or not (self._small_bytes or self.counts.unique_bytes):
            return
        self._state.looks_for_large = False
        if not self.counts.unique_bytes:
            message = all_too_small(self._small_bytes.values(), self._options.min_bytes, done="moved")
            self._state.warn_once("small", message)

    # Following a schedule

    def go_save_by_save(self) -> None:
        self._capture = None
        if self._scheduled is not None:
            self._scheduled.stop()

    def follow_schedules(self, take: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        self._saves = ScheduledSaves(take)
        return self._saves.pack

    def _follow(self, tensor: Tensor) -> ScheduledForward | None:
        self._may_follow, behind = False, self._scheduled
        if self._backward_has_begun():
            self._end_part()
            behind = None
        if self._forwards or self._saves is None or not self._is_alone or (paused.blocks and paused.are_any()):
            return None
        capture = self._capture
        if behind is None and capture is None:
            return None  # it began in a region of `no_offload`
        if behind is not None and behind.num_saves == 0:
            self._capture = Capture()
        if behind is not None and (behind.num_sent or behind.alone or not behind.is_over):
            return None
        state, options, windows = self._state, self._options, self._state.windows()
        if len(windows) != 1 or options.device not in (None, windows[0].device) or windows[0].traces.has_report():
            return None
        window, asked = windows[0], (self._asked, self.counts.ratio, options.window_bytes, options.min_bytes)
        with state.lock:
            window.arena.limit_bytes = options.host_limit_bytes
            forward = follow_schedule(window, self._saves, asked, self.counts, tensor, behind)
        if forward is not None:
            self._scheduled, self._capture, self._may_follow = forward, None, True
            self._devices[window.device.torch_device] = window.device
        return forward

    def _end_part(self) -> None:
        if self._scheduled is not None:
            self._end_scheduled(self._scheduled)
        self._file_seen()
        self._forwards.clear()
        self._saw_device = True
        self._capture = None if paused.are_any() or not self._is_alone else Capture()

    def _file_seen(self) -> None:
        capture, left = self._capture, self._left
        for _, forward in self._forwards.values():
            trace = forward.share.trace
            if left is not None and trace is left:
                left.seen_under = None  # the next forward shows what has changed
            elif left is not None and trace is not None:
                trace.await_whole()
            if capture is None or not capture.is_whole or len(self._forwards) > 1 or forward.marks or forward.is_broken:
                continue
            if {save.value for save in capture.saves} - {NO_VALUE} == set(forward.by_number):
                forward.share.file_seen(tuple(capture.saves), self._asked)
        self._left = None

    def _end_scheduled(self, scheduled: ScheduledForward) -> None:
        scheduled.end_forward()
        trace = scheduled.trace
        if scheduled.is_complete:
            sized, counts = scheduled.sized, self.counts
            counts.seen_bytes += sum(sized.seen_bytes)
            counts.unique_bytes += sized.unique_bytes
            counts.kept_bytes += sized.kept_bytes + scheduled.stayed_bytes
            counts.window_bytes = max(counts.window_bytes, sized.window_bytes)
            scheduled.window.traces.follow(trace)
        elif scheduled.has_backward and not self._forwards:
            trace.seen_under = None  # its backward began before the last saves
            self._count_followed(scheduled)
        self._scheduled = None

    def _count_followed(self, scheduled: ScheduledForward) -> None:
        counts, leaving = self.counts, scheduled.leaving
        counts.seen_bytes += sum(scheduled.sized.seen_bytes[: scheduled.num_saves])
        for value in range(scheduled.num_values):
            num_bytes = scheduled.sized.sizes_bytes.get(value, 0)
            counts.unique_bytes += num_bytes
            counts.kept_bytes += 0 if value in leaving else num_bytes

    # Saving

    @property
    def take_own(self) -> Callable[[Tensor], KeptHandle]:
        return self._take_noting

    def _take_noting(self, tensor: Tensor) -> KeptHandle:
        if (self._may_follow or self._backward_has_begun()) and self._follow(tensor) is not None:
            assert self._saves is not None
            return self._saves.pack(tensor)  # type: ignore[no-any-return]  # autograd holds it
        capture, counts = self._capture, self.counts
        if capture is None:
            return self._take_any(tensor)
        before = counts.seen_bytes
        packed = self._take_any(tensor)
        num_values = sum(len(forward.share.follower.keys) for _, forward in self._forwards.values())
        capture.note(tensor, packed, num_values, counts.seen_bytes - before)
        return packed

    def take(self, tensor: Tensor, action: Action | None = None) -> KeptHandle:
        if self._is_alone:
            self._stop_schedule()
        return self._take_any(tensor, action)

    def _stop_schedule(self) -> None:
        self._is_alone, self._capture, self._state.idles_with = False, None, None
        if self._scheduled is not None:
            self._scheduled.stop()

    def _take_any(self, tensor: Tensor, action: Action | None = None) -> KeptHandle:
        kind = type(tensor)
        if isinstance(tensor, nn.Parameter) or (paused.blocks and paused.are_any()):
            return KeptHandle(tensor)
        if kind is not Tensor and has_own_dispatch(tensor):
            if torch_private.is_wrapper(tensor) and not is_from_leaf(tensor):
                return FlattenedHandle(tensor, self._take_any, _leaves_with)
            return KeptHandle(tensor)
        state = self._state
        with state.lock:
            try:
                if kind is Tensor:
                    return self._take(tensor, action)
                with torch_private.without_subclass_functions():
                    return self._take(tensor, action)
            except BaseException:  # as `mended` does, at less cost
                state.is_broken = True
                raise

    def _take(self, tensor: Tensor, action: Action | None) -> KeptHandle:
        if not is_range_of_bytes(tensor):
            return KeptHandle(tensor)
        torch_device = tensor.device
        device = self._devices[torch_device] if torch_device in self._devices else self._open(torch_device)
        if device is None:
            return KeptHandle(tensor)
        counts, storage = self.counts, tensor.untyped_storage()
        num_bytes = storage.nbytes()
        counts.seen_bytes += tensor.nbytes
        if num_bytes < self._options.min_bytes or num_bytes == 0 or device.is_capturing():
            small_bytes, is_small = self._small_bytes, 0 < num_bytes < self._options.min_bytes
            if small_bytes is not None and is_small and not (is_from_leaf(tensor) or self._is_resident(storage)):
                small_bytes[storage_key(storage)] = num_bytes
            return KeptHandle(tensor)
        if is_from_leaf(tensor) or (self._resident and self._is_resident(storage)):
            if self._state.report is not None:
                self._forward_on(device)[1].share.follower.pass_over(tensor, storage)
            return KeptHandle(tensor)
        if self._may_be_compiled:
            self._saves_of_nodes[torch_private.node_number()].append(num_bytes)
        found = self._forwards.get(device)
        window, forward = found if found is not None and found[1].is_forward else self._forward_on(device)
        if window.is_broken:
            window.mend()
        if forward.marks and action is None:
            action = forward.marked(storage, tensor)
        return window.pack(forward, tensor, storage, action) or KeptHandle(tensor)

    def _is_resident(self, storage: torch.UntypedStorage) -> bool:
        reference = self._resident.get(storage_key(storage))
        return reference is not None and reference() is storage

    def _open(self, torch_device: torch.device) -> Device | None:
        asked = self._options.device
        device: Device | None = None
        if asked is None or torch_device == asked.torch_device:
            device = asked or (open_device(torch_device) if torch_device.type in ("cpu", "cuda") else None)
        if device is not None and not device.has_own_memory:
            device, self._saw_shared = None, device
        self._devices[torch_device] = device
        return device

    def _forward_on(self, device: Device) -> tuple[OffloadWindow, Forward]:
        found = self._forwards.get(device)
        if found is None or not found[1].is_forward:
            options = self._options
            window = self._state.planned_window(device, options.min_bytes)
            window.arena.limit_bytes = options.host_limit_bytes
            share = RatioDecider(window.traces, self.counts.ratio, options.window_bytes)
            scheduled = self._scheduled
            if found is None and scheduled is not None and not scheduled.has_backward:
                scheduled.stop()
                self._left = scheduled.trace
                if scheduled.num_saves:
                    share.resume(scheduled.keys(), scheduled.trace.held, scheduled.leaving)
                    self._count_followed(scheduled)
            elif found is not None:
                self._capture = None
            forward = Forward(share, self.counts)
            window.open_forward(forward)
            found = self._forwards[device] = (window, forward)
        return found

    def mark(self, tensor: Tensor, action: Action) -> None:
        self._stop_schedule()
        if action is Action.RECOMPUTE:
            self._state.is_recorded = True
            return
        with torch_private.without_python_dispatch(), self._state.lock:
            if not is_range_of_bytes(tensor):
                return
            device = self._devices[tensor.device] if tensor.device in self._devices else self._open(tensor.device)
            if device is None:
                return
            window, forward = self._forward_on(device)
            storage = tensor.untyped_storage()
            forward.mark(storage, tensor, action)
            record = forward.look_up(storage, tensor)[2]
            if record is not None:
                window.change(record, storage, action)


@mended
def follow_schedule(
    window: OffloadWindow,
    saves: ScheduledSaves,
    asked: tuple[Hashable, float, int | None, int],
    counts: Counts,
    tensor: Tensor,
    behind: ScheduledForward | None,
) -> ScheduledForward | None:
    """Have saves follow an earlier forward from a tensor on; None if no such forward is known, or another is running."""
    window.settle()
    under, ratio, window_bytes, min_bytes = asked
    place, tried = (0, ()) if behind is None else (behind.num_saves, behind.tried)
    before = None if behind is None else behind.trace.seen
    shapes = [] if behind is None else behind.sized.shapes[:place]
    found: list[Trace] = []
    for trace in window.traces:
        seen = trace.seen
        if seen is None or trace.requests is None or trace.seen_under != under:
            if trace.await_once():
                return None
        elif (
            trace not in tried
            and len(seen) > place
            and (before is None or all(map(SeenSave.is_alike, seen[:place], before)))
            and seen[place].is_like(tensor, of_any_size=window_bytes is None and not window.arena.is_staged)
        ):
            found.append(trace)
            shape = None if seen[place].shape is None else tensor.shape
    if not found or not is_free(window):
        return None
    if found[1:]:
        found = [trace for trace in found if _has_size(trace, shapes, shape)] or found
    trace = expected if (expected := window.traces.expected) in found else found[0]
    key = ratio, window_bytes, len(trace.held)
    if trace.schedule is None or trace.schedule[0] != key:
        plan = trace.plan(ratio, window_bytes)
        schedule = make_schedule(trace, plan, window.device, window_bytes=window_bytes, min_bytes=min_bytes)
        trace.schedule = key, schedule
        if not window.has_schedule:
            window.has_schedule = True
            window.device.empty_cache()  # steps without a schedule have left it in more pieces than later ones need
    schedule = trace.schedule[1]
    if place and not all(save.stays for save in schedule.saves[:place]):
        return None
    most_bytes = max(known.plan(ratio, window_bytes).offload_bytes for known in window.traces)
    window.fit_arena(max(most_bytes, schedule.most_host_bytes))
    sized: Sized | None = schedule.size_beginning_with(shapes, shape)
    if sized is None:
        sized = Sized() if behind is None else behind.sized.fork(schedule.saves[:place])
    spans = take_spans(window, sized)
    if spans is None and window.arena.is_staged:
        return None
    window.scheduled = made = ScheduledForward(window, schedule, sized, spans or (), trace, counts)
    made.num_saves = made.began_at = place
    made.tried = (trace, *(() if behind is None or behind.began_at < place else tried))
    saves.follow(made)
    return made


def _has_size(trace: Trace, shapes: list[torch.Size | None], shape: torch.Size | None) -> bool:
    schedule, seen = trace.schedule, trace.seen
    if schedule is None:
        return seen is not None and seen[len(shapes)].shape == shape
    return schedule[1].size_beginning_with(shapes, shape) is not None


def is_free(window: OffloadWindow) -> bool:
    ledger, is_used = window.ledger, window.scheduled is not None or window.is_broken or window.is_retired
    if is_used or window.device.is_capturing():
        return False
    for record in ledger.records:
        if record.num_handles and not (record.owner is not None and record.owner.is_spent):
            return False
    while ledger.backlog:  # it was copied, and stays on the host
        ledger.release(ledger.backlog[0])
    return True


class RatioDecider(RatioSoFar):
    """Decides which saves leave: by the plan of the followed trace, or by the share of bytes that left so far."""

    def __init__(self, traces: Traces, ratio: float, window_bytes: int | None) -> None:
        super().__init__(ratio, window_bytes)
        self.follower = Follower(traces)
        self._traces = traces
        self._held = set[int]()
        self._is_partial = False
        self._filed: Trace | None = None
        self._take_plan()

    def action(self, tensor: Tensor, storage: torch.UntypedStorage, asked: Action | None = None) -> Action | None:
        follower = self.follower
        index, trace = len(follower.keys), follower.trace
        place = follower.note(key_of(tensor, storage))
        if follower.trace is not trace:
            trace = follower.trace
            if index and trace is not None:
                _LOGGER.debug("save %d is not that of the plan: another one is followed", index)
            self._take_plan()
        if asked is None and (place is STRANGER or (trace is not None and place in trace.held)):
            self._held.add(index)
            return None
        return self.decide(storage.nbytes(), None if place is STRANGER else place, asked)

    def resume(self, keys: Sequence[SaveKey], held: Collection[int], leaving: Collection[int]) -> None:
        self._is_partial = True
        for value, key in enumerate(keys):
            followed = self.follower.trace
            place = self.follower.note(key)
            if self.follower.trace is not followed:
                self._take_plan()
            if value in held:
                self._held.add(value)
            else:
                self.decide(key.num_bytes, place, Action.OFFLOAD if value in leaving else Action.KEEP)

    def _take_plan(self) -> None:
        follower = self.follower
        plan = None if follower.trace is None else follower.trace.plan(self.ratio, self._asked_window_bytes)
        self.follow(plan, is_late=follower.has_changed)

    @property
    def most_offload_bytes(self) -> int:
        return max((trace.plan(self.ratio, self._asked_window_bytes).offload_bytes for trace in self._traces), default=0)

    @property
    def trace(self) -> Trace | None:
        return self._filed or self.follower.trace

    def finish(self) -> bool:
        follower, trace, keys = self.follower, self.follower.trace, self.follower.keys
        if not keys:
            return False
        was_misled = not follower.is_whole and self._traces.has_report()
        if trace is None or not follower.is_whole or trace.is_report:
            is_same = trace is not None and follower.is_whole and follower.num_strangers == 0 and len(trace.keys) == len(keys)
            order = trace.order if trace is not None and is_same else None
            held = set() if was_misled else set(self._held)  # a report of another model knows nothing about held storages
            trace = self._traces.find(keys) or Trace(keys=tuple(keys), held=held, order=order)
            _LOGGER.debug("a new forward: %s", trace.plan(self.ratio, self._asked_window_bytes))
        self._filed = trace
        self._traces.drop_report()
        self._traces.follow(trace)
        return was_misled

    def order(self) -> tuple[int, ...]:
        trace, num_saves = self.trace, len(self.follower.keys)
        if trace is None or trace.order is None or len(trace.keys) != num_saves:
            return tuple(range(num_saves))[::-1]
        return trace.order

    @property
    def _whole(self) -> Trace | None:
        """The trace, if the forward had all of its saves, each decided here."""
        trace = self.trace
        return None if trace is None or len(trace.keys) != len(self.follower.keys) or self._is_partial else trace

    def forecast(self) -> Forecast | None:
        return None if (trace := self._whole) is None else trace.forecast(self._plan, self.limit_bytes)

    def learn(
        self, order: tuple[int, ...], working_bytes: tuple[int, ...], requests: tuple[tuple[int, ...], ...], *, is_whole: bool
    ) -> None:
        trace = self._whole
        if trace is None:
            return
        if is_whole:
            if trace.order != order:
                trace.schedule = None
            trace.order, trace.working_bytes = order, working_bytes
        if trace.requests != requests:
            trace.schedule, trace.requests = None, requests

    def file_seen(self, seen: tuple[SeenSave, ...], under: object) -> None:
        trace, follower = self._filed, self.follower
        if trace is None or self._is_partial or not seen or seen[-1].num_values != len(follower.keys):
            return
        if (trace is follower.trace and follower.is_whole) or self._traces.have_noted(seen):
            if trace.seen != seen:
                trace.schedule = None
            trace.seen, trace.seen_under = seen, under
        trace.noted = seen  # a new forward is noted again, perhaps at another size


_MAX_VIEWS = 8


def _leaves_with(wrapper: Tensor, name: str) -> bool:
    """Tell whether a wrapper's part may leave. Jagged tensors of one shape need the same offsets, which stay."""
    return not wrapper.is_nested or name == torch_private.JAGGED_VALUES


def is_from_leaf(tensor: Tensor) -> bool:
    """Tell whether a tensor is a leaf, or a view or a cast of one: its owner, or autocast's cache, keeps it in any case."""
    if isinstance(tensor, nn.Parameter) or isinstance(torch_private.base_of(tensor), nn.Parameter):
        return True
    if not tensor.requires_grad:
        return False
    if tensor.is_leaf:
        return True
    node = tensor.grad_fn
    for _ in range(_MAX_VIEWS):
        name = type(node).__name__
        if name == torch_private.LEAF_NODE:
            return True
        is_cast = name == torch_private.CAST_NODE
        if node is None or not (is_cast or name in torch_private.VIEW_NODES):
            return False
        node = node.next_functions[0][0] if node.next_functions else None
        if is_cast:
            return type(node).__name__ == torch_private.LEAF_NODE
    return False


def offload_figures(tag: str) -> dict[str, Any] | None:
    state = offload_states.get(tag)
    if state is None:
        return None
    with state.lock:
        state.sweep()
        counts, windows = state.counts, state.windows()
        counters = [counter for counter in (window.device.memory_counter() for window in windows) if counter is not None]
        allocated_bytes = sum(counter.peak_bytes() for counter in counters) if counters else None
        reserved = [peak for peak in (counter.peak_reserved_bytes() for counter in counters) if peak is not None]
        return {
            **state.figures(),
            "ratios": tuple(state.ratios),
            "window_bytes": counts.window_bytes,
            "seen_bytes": counts.seen_bytes,
            "unique_bytes": counts.unique_bytes,
            "kept_bytes": counts.kept_bytes,
            **counts.figures_of_copies(),
            "peak_allocated_bytes": allocated_bytes,
            "peak_reserved_bytes": sum(reserved) if reserved else None,
            "hint": fragmentation_hint(allocated_bytes, sum(reserved)),
        }
