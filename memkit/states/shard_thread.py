"""The thread that steps shards in host memory, a layer's at a time, and what becomes of a step that fails there.

All steps are made in it, so that Ctrl-C comes before or after one. It works in order: whoever waits, waits for all.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from memkit.device.base import Device
from memkit.errors import StateOffloadError
from memkit.forks import OwnThreads
from memkit.interrupts import do_at_once
from memkit.states.one_step import OneStep
from memkit.states.records import StateRecord, version_of
from memkit.states.stepped import ConsumedGradient
from memkit.steppers import ReducedLayer


class _Batch:
    """Shards of one layer whose gradients have come together.

    Args:
        layer: whose shards they are.
        records: what is stepped.
        run: the step that this is a part of.
        landing: events of torch, behind which the gradients are in host memory.
    """

    def __init__(self, layer: ReducedLayer, records: Sequence[StateRecord], run: OneStep, landing: Sequence[Any]) -> None:
        self.layer, self.records, self.run, self.landing = layer, records, run, landing
        self.last_read = layer.last_read
        self.error: BaseException | None = None
        """Why it was not stepped."""


class ShardThread:
    """Steps shards, each as a whole or not at all.

    Args:
        optimizer: whose step it is.
        device: where layers are gathered, and gradients come from.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: Device) -> None:
        self._optimizer = optimizer
        self._device = device
        self._thread: OwnThreads | None = None
        self._batches: list[_Batch] = []
        """What the thread was given and nobody has waited for."""
        self._failed: list[_Batch] = []
        """What was not stepped, and of which nobody has heard."""
        self._lost: dict[StateRecord, str] = {}
        """Which may be stepped in part, and what to say of them."""
        self.met: dict[StateRecord, None] = {}
        """Which were stepped since the optimizer's last step."""
        self.step_s = 0.0
        """What steps have taken, without what these have waited for gradients."""

    def begin(self) -> None:
        """Have the thread be there. Within a backward, where a system may refuse one, other ranks would wait for this one.

        Raises:
            RuntimeError: the system starts no more threads.
        """
        thread = OwnThreads(1, "memkit-step", self._device.enter_thread)
        thread.submit(int).result()
        self._thread = thread

    @property
    def is_idle(self) -> bool:
        """Whether nothing of a step was made, or given to the thread."""
        return not (self.met or self._batches)

    def has(self, layer: ReducedLayer) -> bool:
        """Tell whether the thread may be stepping shards of a layer."""
        return any(batch.layer is layer for batch in self._batches)

    def send(self, layer: ReducedLayer, records: Sequence[StateRecord], run: OneStep, landing: Sequence[Any]) -> None:
        """Have shards of a layer stepped, once their gradients are in host memory and nobody reads them.

        Args:
            layer: whose shards they are.
            records: what is stepped.
            run: the step that this is a part of.
            landing: events of torch, behind which the gradients are in host memory.
        """
        assert self._thread is not None
        batch = _Batch(layer, records, run, landing)
        self._batches.append(batch)  # ahead: where an interrupt keeps it from the thread, its gradients stay
        self._thread.submit(self._step, batch)

    def wait(self) -> None:
        """Wait for all that the thread was given."""
        if self._thread is not None:
            self._thread.submit(int).result()
        failed = [batch for batch in self._batches if batch.error is not None]
        do_at_once(partial(self._failed.extend, failed), partial(self._batches.clear))

    def raise_failed(self) -> None:
        """Raise if a step has failed of which nobody has heard.

        Raises:
            StateOffloadError: one has.
        """
        failed = list(self._failed)
        self._failed.clear()
        if not failed:
            return
        error = failed[0].error
        lost = [self._lost[record] for batch in failed for record in batch.records if record in self._lost]
        if lost:
            raise StateOffloadError(lost[0]) from error
        raise StateOffloadError(
            f"the step of {_names(failed)} on the host has failed: {type(error).__name__}: {error}. What has failed is as "
            "before the step and keeps its gradient, all else is as after it. Another optimizer.step() steps what is left"
        ) from error

    def refuse_lost(self, records: Iterable[StateRecord]) -> None:
        """Raise if any of some parameters may be stepped in part.

        Raises:
            StateOffloadError: one may be.
        """
        for record in records:
            if record in self._lost:
                raise StateOffloadError(self._lost[record])

    def forget_failed(self) -> None:
        """What is loaded takes the place of what has failed."""
        self._failed.clear()

    def forget_step(self) -> None:
        """All was loaded."""
        self._lost.clear()
        self.met.clear()

    def _step(self, batch: _Batch) -> None:
        """Step shards: what the thread does."""
        optimizer, records, run = self._optimizer, batch.records, batch.run
        try:
            self.refuse_lost(records)
            for event in batch.landing:
                event.synchronize()
            if batch.last_read is not None:
                batch.layer.device.synchronize(batch.last_read)
            begin_s = time.perf_counter()
            with torch.no_grad():
                known = {record.parameter: optimizer.state.get(record.parameter) for record in records}
                state = defaultdict[Any, Any](dict, {key: entries for key, entries in known.items() if entries})
                prepared = run.prepare(records, list(known), state)
                before = _versions(known)
                try:
                    written = run.step(prepared)
                except BaseException as error:
                    if _versions(known) != before:
                        self._note_lost(batch, error)
                    raise
                consumed = [partial(setattr, key, "grad", ConsumedGradient.of(key)) for key in known]
            entered = [
                partial(optimizer.state.__setitem__, key, state[key])
                for key, entries in known.items()
                if key in state and not _are_same(entries, state[key])
            ]
            self.step_s += time.perf_counter() - begin_s
            do_at_once(*entered, *run.leave(written), partial(self.met.update, dict.fromkeys(records)), *consumed)
        except BaseException as error:
            batch.error = error

    def _note_lost(self, batch: _Batch, error: BaseException) -> None:
        said = (
            f"the step of {_names([batch])} on the host has failed within the optimizer ({type(error).__name__}: {error}), and "
            "may have written a part of these parameters and of their states: they are lost. Load a checkpoint of the model "
            "and of the optimizer (optimizer.load_state_dict), and go on"
        )
        self._lost.update(dict.fromkeys(batch.records, said))

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None


def _names(batches: Iterable[_Batch]) -> str:
    names = [record.name for batch in batches for record in batch.records]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _versions(known: dict[Tensor, dict[Any, Any] | None]) -> list[int]:
    """Return how often parameters and their states were written to."""
    tensors = [value for entries in known.values() for value in (entries or {}).values() if isinstance(value, Tensor)]
    return [version_of(tensor) for tensor in (*known, *tensors)]


def _are_same(entries: dict[Any, Any] | None, made: dict[Any, Any]) -> bool:
    """Tell whether states are the tensors that they were, written to in place, so that nothing is to be entered."""
    if entries is None or entries.keys() != made.keys():
        return False
    return all(value is made[name] for name, value in entries.items())
