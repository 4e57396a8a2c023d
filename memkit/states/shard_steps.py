"""Stepping shards in host memory within the backward: each layer's, in a thread, once its reduced gradients are there.

FSDP2 with `CPUOffloadPolicy` has parameters, gradients and states in host memory: nothing is moved or copied here.

[Note: who reads shards] FSDP2 copies a layer's gradients to the host only after the layer was gathered, computed with and
reduced. So behind the event of that copy nobody reads the shards on the device any more, unless the layer is gathered again:
that copy waits for the step (`before_read`), and computing with it is refused. The thread waits for shards that were copied to
the device and not gathered (`ReducedLayer.last_read`).
"""

from __future__ import annotations

import operator
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memkit.core import backwards, torch_private
from memkit.core.forks import OwnThreads
from memkit.core.interrupts import do_at_once
from memkit.device.base import Device
from memkit.errors import StateOffloadError, warn_user
from memkit.optimizers.steppers import ReducedLayer
from memkit.states.asked import host_layers_of, refuse_gradients, weakly
from memkit.states.one_step import OneStep
from memkit.states.packing import are_same
from memkit.states.pieces import (
    Accumulating,
    ConsumedGradient,
    StateRecord,
    let_go_of_consumed,
    mark_of,
    refuse_another,
    some_of,
    version_of,
)

if TYPE_CHECKING:
    from memkit.states.state_offload import Members


class _Batch:
    def __init__(self, layer: ReducedLayer, records: Sequence[StateRecord], run: OneStep, landing: Sequence[Any]) -> None:
        self.layer, self.records, self.run, self.landing = layer, records, run, landing
        self.last_read = layer.last_read
        self.error: BaseException | None = None


class ShardSteps(Accumulating):
    def __init__(self, optimizer: torch.optim.Optimizer, members: Members, device: Device) -> None:
        self._optimizer, self._members, self._device = optimizer, members, device
        self._layers: dict[ReducedLayer, list[StateRecord]] = {}
        self._known: list[list[int]] = []
        self._thread: OwnThreads | None = None
        self._batches: list[_Batch] = []
        self._failed: list[_Batch] = []
        self._lost: dict[StateRecord, str] = {}
        self._met: dict[StateRecord, None] = {}
        self._marks: list[tuple[Any, int] | None] = []
        self._again: StateRecord | None = None  # a stepped shard that has got another gradient, which is dropped
        self._end: backwards.BackwardEnd | None = None
        self._ends = set[backwards.BackwardEnd]()
        self._in_backward: set[int] = set()
        self.unfinished: OneStep | None = None
        self.num_steps = 0
        self.host_step_s = 0.0

    def begin(self) -> None:
        """Step shards once their gradients are reduced. A thread that is refused raises here, not while other ranks wait."""
        thread = OwnThreads(1, "memkit-step", self._device.enter_thread)
        thread.submit(int).result()
        self._thread = thread
        self._follow_groups(is_tried_out=True)

    def _follow_groups(self, *, is_tried_out: bool = False) -> None:
        groups = self._optimizer.param_groups
        known = [[*map(id, group["params"])] for group in groups]
        if known == self._known:
            return
        layers = host_layers_of(self._optimizer)
        self._refuse_stepped(layers)
        if not is_tried_out:
            self._members.try_out()
        before = {id(record.parameter): record for record in self._records()}
        found = defaultdict[ReducedLayer, list[StateRecord]](list)
        for new in self._members.records():
            record = before.pop(id(new.parameter), new)
            record.group, record.position = new.group, new.position
            found[layers[id(record.parameter)]].append(record)
        for record in before.values():
            record.group = -1
        for layer in self._layers.keys() - found.keys():
            layer.end_steps(self)
        self._layers = dict(found)  # ahead: a layer that has begun may tell of a reduction
        for layer in found:
            layer.begin_steps(self)
        self._known = known

    def _refuse_stepped(self, layers: Mapping[int, ReducedLayer]) -> None:
        for layer in {*layers.values()}:
            for other in layer.steppers:
                if other is not self and any(id(shard) in layers for shard in other.stepped(layer)):
                    raise ValueError(
                        "StateOffload steps shards in host memory within the backward; found some that the StateOffload of "
                        "another optimizer steps, which may have been dropped. Call close() of that one first"
                    )

    def stepped(self, layer: ReducedLayer) -> list[Tensor]:
        return [record.parameter for record in self._layers[layer]]

    def _records(self) -> Iterator[StateRecord]:
        for records in self._layers.values():
            yield from records

    def before_reduce(self, layer: ReducedLayer) -> None:
        self.before_read(layer)
        let_go_of_consumed(self._layers[layer])
        self._marks = [mark_of(record) for record in self._layers[layer]]

    def after_reduce(self, layer: ReducedLayer) -> None:
        brought = []
        for record, mark in zip(self._layers[layer], self._marks, strict=True):
            grad = record.parameter.grad
            if record in self._met:
                record.parameter.grad = ConsumedGradient.of(record.parameter)
                if grad is not None:
                    self._again = record
            elif grad is not None and (mark is None or mark[0]() is not grad or mark[1] != version_of(grad)):
                brought.append(record)
        if brought and not self.num_accumulating:
            self._in_backward.add(id(layer))
            run, is_first = self._send(layer, brought, layer.landing())
            if is_first:
                run.note_options()

    def is_stepping(self, layer: ReducedLayer) -> bool:
        return id(layer) in self._in_backward and torch_private.backward_task() != -1 and not self._is_over

    def before_read(self, layer: ReducedLayer) -> None:
        if torch_private.backward_task() != -1 and self._is_over:
            self._end, self._in_backward = backwards.on_end(weakly(self._end_backward), among=self._ends), set()
        if any(batch.layer is layer for batch in self._batches):
            self._wait_for_thread()

    @property
    def _is_over(self) -> bool:
        return self._end is None or self._end.is_over

    def _end_backward(self, has_failed: bool) -> None:
        """Wait for the thread. Its errors are raised behind FSDP2's last reductions, where all ranks have come."""
        self._wait_for_thread()
        if has_failed:  # the next step raises it
            self._again = None
        else:
            backwards.on_end(weakly(self._raise_failed), among=self._ends)

    def _raise_failed(self, has_failed: bool) -> None:
        self._wait_for_thread()
        again, self._again = self._again, None
        if not has_failed:
            self._raise_all()
            if again is not None:
                refuse_another(again)

    def _send(self, layer: ReducedLayer, records: Iterable[StateRecord], landing: Sequence[Any]) -> tuple[OneStep, bool]:
        """Have the thread step shards of a layer. Return the optimizer's step, and whether it begins with these."""
        run, is_first = self.unfinished, not (self._met or self._batches)
        if run is None or is_first:
            self._follow_groups()
            run = self.unfinished = OneStep(self._optimizer, copies=True)
        due = [record for record in records if record.group >= 0]
        if due:
            assert self._thread is not None
            self._batches.append(batch := _Batch(layer, due, run, landing))
            self._thread.submit(self._step, batch)
        return run, is_first

    def _step(self, batch: _Batch) -> None:
        optimizer, records, run = self._optimizer, batch.records, batch.run
        try:
            self._refuse_lost(records)
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
                consumed = {key: ConsumedGradient.of(key) for key in known}
            self.host_step_s += time.perf_counter() - begin_s
            for key, entries in known.items():
                if key in state and (entries is None or not are_same(entries, state[key])):
                    optimizer.state[key] = state[key]
            for leave in run.leave(written):
                leave()
            self._met.update(dict.fromkeys(records))
            for key, grad in consumed.items():
                key.grad = grad
        except BaseException as error:
            batch.error = error

    def _note_lost(self, batch: _Batch, error: BaseException) -> None:
        names = some_of([record.name for record in batch.records])
        said = (
            f"the step of {names} on the host has failed within the optimizer ({type(error).__name__}: {error}), and "
            "may have written a part of these parameters and of their states: they are lost. Load a checkpoint of the model "
            "and of the optimizer (optimizer.load_state_dict), and go on"
        )
        self._lost.update(dict.fromkeys(batch.records, said))

    def _wait_for_thread(self) -> None:
        if self._thread is not None:
            self._thread.submit(int).result()
        self._failed.extend(batch for batch in self._batches if batch.error is not None)
        self._batches.clear()

    def _raise_all(self) -> None:
        failed = list(self._failed)
        self._failed.clear()
        if not failed:
            return
        error, names = failed[0].error, [record.name for batch in failed for record in batch.records]
        lost = [self._lost[record] for batch in failed for record in batch.records if record in self._lost]
        said = (
            f"the step of {some_of(names)} on the host has failed: {type(error).__name__}: {error}. What has failed is as "
            "before the step and keeps its gradient, all else is as after it. Another optimizer.step() steps what is left"
        )
        raise StateOffloadError(lost[0] if lost else said) from error

    def step(self) -> None:
        if self.unfinished is not None:
            self.unfinished.check_options()
        self.join()
        self._follow_groups()
        self._refuse_lost(self._records())
        due = {layer: [record for record in records if record.is_due()] for layer, records in self._layers.items()}
        refuse_gradients([record for records in due.values() for record in records])
        for layer, records in due.items():
            if records:
                self._send(layer, records, layer.landing())  # a backward that has failed has not waited for them
        self.join()
        run = self.unfinished if self._met else None
        if run is not None:
            run.write_changes()
        # the order of the parameters, as without memkit, and not of the backward
        state, groups = self._optimizer.state, self._optimizer.param_groups
        parameters = [parameter for group in groups for parameter in group["params"] if parameter in state]
        if not all(map(operator.is_, parameters, state)):
            ordered = {**dict.fromkeys(parameters), **state}
            do_at_once(partial(state.clear), partial(state.update, ordered))
        self.unfinished = run or OneStep(self._optimizer)
        self.unfinished.forget_options()
        self._met.clear()
        self.num_steps += 1

    def _refuse_lost(self, records: Iterable[StateRecord]) -> None:
        for record in records:
            if record in self._lost:
                raise StateOffloadError(self._lost[record])

    def join(self) -> None:
        self.wait()
        self._raise_all()

    def wait(self) -> None:
        backwards.join(self._ends)  # one that has failed may yet have something stepped
        self._wait_for_thread()

    def begin_loading(self) -> None:
        self.wait()
        self._failed.clear()

    def end_loading(self) -> None:
        self._lost.clear()
        self._met.clear()
        self.unfinished = None

    def close(self) -> None:
        try:
            self.join()
        except StateOffloadError as error:
            warn_user(f"StateOffload: {error}")
        for layer in self._layers:
            layer.end_steps(self)
        let_go_of_consumed(self._records())
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None


def _versions(known: dict[Tensor, dict[Any, Any] | None]) -> list[int]:
    tensors = [value for entries in known.values() for value in (entries or {}).values() if isinstance(value, Tensor)]
    return [version_of(tensor) for tensor in (*known, *tensors)]
