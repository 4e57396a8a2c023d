"""What `CPUOffload` does with each saved tensor: which may leave, and what the caller is told where none does."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from memkit import torch_private
from memkit.activations.offloading.ratio import RatioDecider
from memkit.activations.offloading.steady import OffloadOptions, SteadyStage, paused
from memkit.activations.offloading.window import OffloadWindow
from memkit.activations.saved.forward import Forward
from memkit.activations.saved.small import all_too_small
from memkit.activations.saved.state import OffloadState
from memkit.device import Device, open_device, why_nothing_is_freed
from memkit.kept import FlattenedHandle, KeptHandle
from memkit.plan import Action
from memkit.storages import is_range_of_bytes, storage_key
from memkit.torch_state import dynamo_is_loaded, has_own_dispatch

_MANY_SAVES, _MOST = 9, 0.75
"""No operator saves so many tensors by itself; and how much of all is too much to be saved at once."""
_MAX_VIEWS = 8


class MovingStage(SteadyStage):
    """Lets saved tensors leave for host memory: see `SteadyStage`."""

    moves = True

    def __init__(
        self,
        state: OffloadState,
        options: OffloadOptions,
        ratio: float,
        resident: Mapping[int, weakref.ref[torch.UntypedStorage]],
    ) -> None:
        super().__init__(state, options, ratio, resident)
        self._saw_shared: Device | None = None
        """A device without memory of its own: nothing moves there."""
        self._small_bytes: dict[int, int] | None = {} if state.looks_for_large and ratio > 0 else None
        """Bytes of what could be moved but for its size, by storage, as long as nothing larger is known."""
        self._may_be_compiled = dynamo_is_loaded()
        self.is_idle = False
        """Whether nothing is saved to it: there is nothing to do."""
        self._saves_of_nodes: defaultdict[int, list[int]] = defaultdict(list)
        """Where something may be compiled: bytes of each tensor that may leave, by the node that saved it."""

    def _backward_has_begun(self) -> bool:
        for _, forward in self._forwards.values():
            if not forward.is_forward:
                return True
        scheduled = self._scheduled
        return scheduled is not None and scheduled.has_backward and not self._forwards

    @property
    def take_own(self) -> Callable[[Tensor], KeptHandle]:
        return self._take_noting

    def _take_noting(self, tensor: Tensor) -> KeptHandle:
        if (self._may_follow or self._backward_has_begun()) and self._follow(tensor) is not None:
            assert self._saves is not None
            return self._saves.pack(tensor)  # type: ignore[no-any-return]  # what autograd is to hold
        capture, counts = self._capture, self.counts
        if capture is None:
            return self._take_any(tensor)
        before = counts.seen_bytes
        packed = self._take_any(tensor)
        num_values = sum(len(forward.share.follower.keys) for _, forward in self._forwards.values())
        capture.note(tensor, packed, num_values, counts.seen_bytes - before)
        return packed

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
            scheduled.end_forward()
            if not (scheduled.is_complete or scheduled.has_backward or has_failed or self._forwards):
                self._forward_on(scheduled.device)  # a shorter one
            self._end_scheduled(scheduled)
        if not has_failed and saw_device:
            self._state.idles_with = self._options if self.counts.ratio == 0 and self._is_alone else None
        for window, forward in self._forwards.values():
            window.end_forward(forward, learn=not has_failed)
        if not has_failed:
            self._file_seen()
        self._warn_of_whole_model()
        if not has_failed:
            self._warn_of_small()
        self._forwards.clear()  # the graph alone keeps a forward alive from here on: it counts in the limit until it dies
        if self._saw_shared is not None and not saw_device:
            self._state.warn_once("shared", f"nothing moves: {why_nothing_is_freed(self._saw_shared)}")

    def _warn_of_whole_model(self) -> None:
        """Warn where a model is compiled as one graph: that is one node, which saves its tensors once all of them are made."""
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

    # Saving

    def take(self, tensor: Tensor, action: Action | None = None) -> KeptHandle:
        if self._is_alone:
            self._stop_schedule()
        return self._take_any(tensor, action)

    def _stop_schedule(self) -> None:
        """Stop following a schedule, since an inner context or a mark decides what is done with a tensor."""
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
            if self._small_bytes is not None:
                self._note_small(tensor, storage)
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

    def _note_small(self, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        is_small = 0 < storage.nbytes() < self._options.min_bytes
        if self._small_bytes is not None and is_small and not (is_from_leaf(tensor) or self._is_resident(storage)):
            self._small_bytes[storage_key(storage)] = storage.nbytes()

    def _is_resident(self, storage: torch.UntypedStorage) -> bool:
        reference = self._resident.get(storage_key(storage))
        return reference is not None and reference() is storage

    def _open(self, torch_device: torch.device) -> Device | None:
        """Return the device that a tensor is moved from, None if nothing is moved from it."""
        asked = self._options.device
        device: Device | None = None
        if asked is None or torch_device == asked.torch_device:
            device = asked or (open_device(torch_device) if torch_device.type in ("cpu", "cuda") else None)
        if device is not None and not device.has_own_memory:
            device, self._saw_shared = None, device
        self._devices[torch_device] = device
        return device

    def _forward_on(self, device: Device) -> tuple[OffloadWindow, Forward]:
        """Return the forward that saves on a device belong to: a new one if a backward has begun since the last save."""
        found = self._forwards.get(device)
        if found is None or not found[1].is_forward:
            options = self._options
            window = self._state.planned_window(device, options.min_bytes)
            window.arena.limit_bytes = options.host_limit_bytes
            share = RatioDecider(window.traces, self.counts.ratio, options.window_bytes)
            if found is None and self._scheduled is not None and not self._scheduled.has_backward:
                self._resume(share, self._scheduled)
            elif found is not None:
                self._capture = None
            forward = Forward(share, self.counts)
            window.open_forward(forward)
            found = self._forwards[device] = (window, forward)
        return found

    def mark(self, tensor: Tensor, action: Action) -> None:
        """Apply a mark to what is in a tensor now. A mark to recompute counts from the next forward on, which is recorded."""
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


def _leaves_with(wrapper: Tensor, name: str) -> bool:
    """Tell whether one of the tensors that a wrapper is made of may leave with it.

    Tensors of the jagged layout have the same shape if they have the very same offsets, so these stay: their values leave.
    """
    return not wrapper.is_nested or name == torch_private.JAGGED_VALUES


def is_from_leaf(tensor: Tensor) -> bool:
    """Tell whether a tensor is a parameter or another leaf that requires grad, a view of one, or a cast of one.

    A linear layer saves `weight.t()`, which is no parameter; autocast saves `weight.to(dtype).t()`. Their owner keeps the first
    anyway, and autocast's cache the second, so to move them frees nothing.
    """
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
        if name == torch_private.CAST_NODE:
            return _is_leaf(_first_input(node))
        if name not in torch_private.VIEW_NODES:
            return False
        node = _first_input(node)
    return False


def _first_input(node: torch.autograd.graph.Node | None) -> torch.autograd.graph.Node | None:
    return node.next_functions[0][0] if node is not None and node.next_functions else None


def _is_leaf(node: torch.autograd.graph.Node | None) -> bool:
    return type(node).__name__ == torch_private.LEAF_NODE
