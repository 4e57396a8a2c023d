"""The decider of `CPUOffload`: a share of the bytes that a forward saves leaves, and the rest stays."""

from __future__ import annotations

import logging
from collections.abc import Collection

import torch
from torch import Tensor

from memkit.activations.saved.seen import SeenSave
from memkit.activations.saved.traces import STRANGER, Follower, Trace, Traces
from memkit.plan import Action, Forecast, Plan, RatioSoFar

_LOGGER = logging.getLogger(__name__)


class RatioDecider(RatioSoFar):
    """Decides for each save of one forward whether it leaves: by the plan of the trace that is followed, or without one so that
    the share of bytes that left so far comes to the ratio.

    Args:
        traces: those of the tag.
        ratio: the share that leaves.
        window_bytes: how many bytes of what leaves the device may hold; None for twice the largest storage.
    """

    def __init__(self, traces: Traces, ratio: float, window_bytes: int | None) -> None:
        super().__init__(ratio, window_bytes)
        self.follower = Follower(traces)
        self._traces = traces
        self._held = set[int]()
        self._is_partial = False
        """Whether another has seen to the first values."""
        self._filed: Trace | None = None
        self._take_plan()

    def action(self, tensor: Tensor, storage: torch.UntypedStorage, asked: Action | None = None) -> Action | None:
        """Return what to do with the next value that is saved for the first time; None if moving it would free nothing.

        Args:
            asked: the action that the user, or an inner context, asked for.
        """
        follower = self.follower
        index, trace = len(follower.keys), follower.trace
        place = follower.note_tensor(tensor, storage)
        if follower.trace is not trace:
            trace = follower.trace
            if index and trace is not None:
                _LOGGER.debug("save %d is not that of the plan: another one is followed", index)
            self._take_plan()
        if asked is None and (place is STRANGER or (trace is not None and place in trace.held)):
            self._held.add(index)
            return None
        return self.decide(storage.nbytes(), None if place is STRANGER else place, asked)

    def resume(self, trace: Trace, num_values: int, leaving: Collection[int]) -> None:
        """Continue after the first values of a trace, which followed a schedule: some of them are leaving."""
        self._is_partial = True
        for value, key in enumerate(trace.keys[:num_values]):
            followed = self.follower.trace
            place = self.follower.note(key)
            if self.follower.trace is not followed:
                self._take_plan()
            if value in trace.held:
                self._held.add(value)
            else:
                self.decide(key.num_bytes, place, Action.OFFLOAD if value in leaving else Action.KEEP)

    def _take_plan(self) -> None:
        follower = self.follower
        plan = None if follower.trace is None else follower.trace.plan(self.ratio, self._asked_window_bytes)
        self.follow(plan, is_late=follower.has_changed)

    @property
    def most_offload_bytes(self) -> int:
        """The most bytes that leave in any known forward."""
        return max((trace.plan(self.ratio, self._asked_window_bytes).offload_bytes for trace in self._traces), default=0)

    @property
    def trace(self) -> Trace | None:
        """The trace that the forward follows; once it is over, the one that it was."""
        return self._filed or self.follower.trace

    def finish(self) -> bool:
        """File what the forward has saved as a trace. Return whether a report that was followed did not match."""
        follower, trace, keys = self.follower, self.follower.trace, self.follower.keys
        if not keys:
            return False
        was_misled = not follower.is_whole and self._traces.has_report()
        if trace is None or not follower.is_whole or trace.is_report:
            is_same = trace is not None and follower.is_whole and follower.num_strangers == 0 and len(trace.keys) == len(keys)
            order = trace.order if trace is not None and is_same else None
            held = set() if was_misled else set(self._held)  # a report of something else knows nothing about what is held
            trace = self._traces.find(keys) or Trace(keys=tuple(keys), held=held, order=order)
            _LOGGER.debug("a new forward: %s", trace.plan(self.ratio, self._asked_window_bytes))
        self._filed = trace
        self._traces.drop_report()
        self._traces.follow(trace)
        return was_misled

    # The backward

    def order(self) -> tuple[int, ...]:
        """Return the numbers of the saves in the order in which the backward is thought to ask for them."""
        trace, num_saves = self.trace, len(self.follower.keys)
        if trace is None or trace.order is None or len(trace.keys) != num_saves:
            return tuple(range(num_saves))[::-1]
        return trace.order

    def forecast(self) -> Forecast | None:
        """Return how full the device will be in the backward; None unless one like it was seen."""
        trace = self.trace
        if trace is None or len(trace.keys) != len(self.follower.keys) or self._is_partial:
            return None
        return forecast_of(trace, self._plan, limit_bytes=self.limit_bytes)

    def learn(
        self,
        order: tuple[int, ...],
        working_bytes: tuple[int, ...],
        requests: tuple[tuple[int, ...], ...],
        *,
        is_whole: bool,
    ) -> None:
        """Learn from a backward: the order of first requests, the bytes that were allocated beside saved values at each, and
        all requests of this backward and of earlier ones through the forward.

        Args:
            is_whole: whether no value is left to be requested. Otherwise the order is incomplete.
        """
        trace = self.trace
        if trace is None or len(trace.keys) != len(self.follower.keys) or self._is_partial:
            return
        if is_whole:
            if trace.order != order:
                trace.schedule = None
            trace.order, trace.working_bytes = order, working_bytes
        if trace.requests != requests:
            trace.schedule, trace.requests = None, requests

    def file_seen(self, seen: tuple[SeenSave, ...], paused: tuple[int, ...], under: object) -> None:
        """File all that the hooks were given: see `Trace`."""
        trace, follower = self._filed, self.follower
        if trace is None or trace is not follower.trace or not follower.is_whole or self._is_partial:
            return  # a forward that is new is looked at again
        if seen and seen[-1].num_values == len(follower.keys):
            if trace.seen != seen or trace.paused != paused:
                trace.schedule = None
            trace.seen, trace.paused, trace.seen_under = seen, paused, under


def forecast_of(trace: Trace, plan: Plan | None, *, limit_bytes: int) -> Forecast | None:
    """Return how full the device will be in the backward of a trace; None unless one like it was seen."""
    if trace.order is None or not trace.working_bytes:
        return None
    return Forecast(
        [trace.keys[index].num_bytes for index in trace.order],
        trace.working_bytes,
        [plan is not None and plan.saves[index].action is Action.KEEP for index in trace.order],
        limit_bytes=limit_bytes,
    )
