"""The runs that a profile is made of (unwatched, for memory, for time, without data), and the rows of a report.

Memory and time are never taken in the same run: watching what is saved costs time, and would count as the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from memkit.device import Device
from memkit.hooks import HookSet, SavedTensorHooks
from memkit.profile.alive import StorageLog
from memkit.profile.calls import CUDA_ROUNDING_BYTES, CallStack, MemoryGauge, NoGauge, PeakGauge, TimeGauge
from memkit.profile.report import ModuleRecord
from memkit.profile.simulate.run import as_on_target, refuse_scripted, say_why_not, without_data
from memkit.profile.step import Step, say_where
from memkit.profile.tree import Mark, ModuleTree, Signatures, children_of
from memkit.profile.watch import (
    HiddenRegions,
    LiveStorages,
    OpObserver,
    OpWatch,
    ParamCasts,
    SavedStorages,
    SaveTimes,
    Writes,
)
from memkit.storages import unique_storages

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the runs of a profile found. Mappings are by the index of a module."""

    saves: SavedStorages
    signatures: Signatures
    num_calls: Mapping[int, int]
    checkpointed: set[int]
    under_other_hooks: set[int]
    backend_dependent: set[int]
    written: tuple[str, ...]
    before_bytes: int | None
    forward_peak_bytes: int | None
    backward_peak_bytes: int | None
    reserved_peak_bytes: int | None
    forward_peaks: Mapping[int, int]
    backward_peaks: Mapping[int, int]
    forward_s: Mapping[int, float]
    backward_s: Mapping[int, float]
    storages: StorageLog | None = None
    """What was on the device at each op; None without a backward, and if ops can't be seen."""
    gathered_bytes: int | None = None
    """See `ShardInfo`; also None if no parameter is gathered."""


def module_records(tree: ModuleTree, found: Found) -> tuple[ModuleRecord, ...]:
    """Return the rows: each module of the tree, and what was done outside of any."""
    parents = [*(node.parent for node in tree.nodes), None]
    below = children_of(parents)
    saved = found.saves.counts()
    self_param_bytes = {index: node.self_param_bytes for index, node in enumerate(tree.nodes)}
    self_host_param_bytes = {index: node.self_host_param_bytes for index, node in enumerate(tree.nodes)}
    self_bytes = {index: count.num_bytes for index, count in saved.items()}
    param_bytes = _with_children(self_param_bytes, below)
    host_param_bytes = _with_children(self_host_param_bytes, below)
    activation_bytes = _with_children(self_bytes, below)
    backward_s = _with_children(found.backward_s, below)
    backward_peaks = _highest_with_children(found.backward_peaks, below)
    rows = []
    for index in range(len(parents)):
        node = tree.nodes[index] if index < tree.outside else None
        inputs, outputs, dtype = found.signatures.first(index)
        count = saved.get(index)
        rows.append(
            ModuleRecord(
                fqn=tree.fqn(index),
                type_name="" if node is None else type(node.module).__name__,
                parent=parents[index],
                depth=0 if node is None else node.depth,
                num_calls=found.num_calls.get(index, 0),
                param_bytes=param_bytes.get(index, 0),
                host_param_bytes=host_param_bytes.get(index, 0),
                activation_bytes=activation_bytes.get(index, 0),
                self_bytes=self_bytes.get(index, 0),
                num_storages=0 if count is None else count.num_storages,
                num_saves=0 if count is None else count.num_saves,
                input_shapes=inputs,
                output_shapes=outputs,
                num_signatures=found.signatures.num_kinds(index),
                dtype=dtype,
                peak_bytes=found.forward_peaks.get(index),
                forward_s=found.forward_s.get(index),
                backward_s=backward_s.get(index),
                backward_peak_bytes=backward_peaks.get(index),
                marks=(() if node is None else node.marks) + _marks(index, found),
            )
        )
    return tuple(rows)


def _marks(index: int, found: Found) -> tuple[str, ...]:
    marks = {
        Mark.CHECKPOINTED: found.checkpointed,
        Mark.OTHER_HOOKS: found.under_other_hooks,
        Mark.BACKEND_DEPENDENT: found.backend_dependent,
    }
    return tuple(mark.value for mark, indices in marks.items() if index in indices)


def _with_children(values: Mapping[int, _Number], below: list[list[int]]) -> dict[int, _Number]:
    sums = dict(values)
    for index in reversed(range(len(below))):  # children come after their parent
        there = [sums[child] for child in below[index] if child in sums]
        if there:
            sums[index] = sums.get(index, 0) + sum(there)
    return sums


def _highest_with_children(values: Mapping[int, int], below: list[list[int]]) -> dict[int, int]:
    highest = dict(values)
    for index in reversed(range(len(below))):
        there = [highest[child] for child in (index, *below[index]) if child in highest]
        if there:
            highest[index] = max(there)
    return highest


def plain_pass(step: Step, tree: ModuleTree) -> None:
    """Run the step unwatched: libraries start up, the allocator fills its cache, kernels are chosen."""
    step.run(CallStack(tree, NoGauge()))


def time_pass(step: Step, tree: ModuleTree, device: Device, *, num_calls: int) -> tuple[dict[int, float], dict[int, float]]:
    """Run the step with events around each call; return seconds per module, forward (inclusive) and backward (its own)."""
    gauge = TimeGauge(device)
    device.make_events(2 * num_calls)
    device.synchronize()
    step.run(CallStack(tree, gauge))
    return gauge.read()


def save_times_pass(step: Step, tree: ModuleTree, device: Device) -> SaveTimes:
    device.synchronize()
    times = SaveTimes(device)
    packing = SavedTensorHooks(times.pack, times.unpack)
    step.run(CallStack(tree, NoGauge()), packing=packing, forward_done=times.start_backward)
    device.synchronize()
    return times


def memory_pass(step: Step, tree: ModuleTree, device: Device) -> Found:
    counter, rounding_bytes = device.memory_counter(), 1
    log = StorageLog() if (step.backward or step.sharded) and not tree.has_compiled else None
    live: list[LiveStorages] = []
    if not tree.has_compiled and (counter is None or log is not None):
        rounding_bytes = 1 if counter is None else CUDA_ROUNDING_BYTES
        live = [
            LiveStorages(
                step.storages(),
                elsewhere=step.streamed.parameters,
                rounding_bytes=rounding_bytes,
                observer=log,
                only=None if counter is None else device.torch_device.type,
                resized=step.sharded.gathered.resized,
            )
        ]
        counter = counter or live[0]
    device.synchronize()
    watch = _Watch(step, tree, NoGauge() if counter is None else PeakGauge(counter), log)
    # The operations of compiled code cannot be watched: under a dispatch mode it would run eagerly.
    below = nullcontext() if tree.has_compiled else OpWatch(*live, *watch.observers)
    with below:
        found = watch.run(packing=SavedTensorHooks(watch.pack, watch.saves.unpack), over=[it.look for it in live])
    device.synchronize()
    return found


def simulated_pass(step: Step, tree: ModuleTree, target: str) -> Found:
    """Run the step on meta as `target` would. The model has twins without data until `preserved`, around this, restores its
    tensors."""
    refuse_scripted(step)
    step = without_data(step)
    rounding_bytes = CUDA_ROUNDING_BYTES if target == "cuda" else 1
    log = StorageLog() if step.backward else None
    live = LiveStorages(step.storages(), elsewhere=step.streamed.parameters, rounding_bytes=rounding_bytes, observer=log)
    watch = _Watch(step, tree, PeakGauge(live), log)
    with as_on_target(tree, target, watch.note_backend_dependent) as mode, OpWatch(live, *watch.observers):
        packing = SavedTensorHooks(watch.pack, watch.saves.unpack)
        return watch.run(packing=packing, at_node=mode.resume, explain=say_why_not)


def _pack(log: StorageLog | None, saves: SavedStorages, tensor: Tensor) -> Any:
    if log is not None:
        log.note_saved(tensor)
    return saves.pack(tensor)


class _Watch:
    """Everything that is noted in the run for memory."""

    def __init__(self, step: Step, tree: ModuleTree, gauge: MemoryGauge, log: StorageLog | None) -> None:
        self._step = step
        self._tree = tree
        self._gauge = gauge
        self._stack = CallStack(tree, gauge)
        self._signatures = Signatures()
        resident = step.resident_storages()
        casts = ParamCasts(resident)
        self.saves = SavedStorages(
            resident=resident,
            inputs=set(unique_storages(step.input_tensors())),
            is_param_cast=casts.__contains__,
            stack=self._stack,
        )
        self._log = log
        if log is not None:
            log.follow(step, tree, self._stack)
        self.pack = partial(_pack, log, self.saves)  # no method, which would keep the model until it is collected
        """Notes a save, as `SavedStorages.pack`."""
        self._hidden = HiddenRegions(self.pack, self._stack)
        self._writes = Writes(step.names_of_storages())
        self._backend_dependent: set[int] = set()
        self._forward_peak_bytes: int | None = None
        self.observers: tuple[OpObserver, ...] = (casts, self._hidden, self._writes, *([log] if log is not None else []))

    def note_backend_dependent(self) -> None:
        """Note that an operation runs of which only the backend knows what it saves."""
        self._backend_dependent.add(self._stack.current)

    def run(
        self,
        *,
        packing: AbstractContextManager[Any],
        at_node: Callable[[], None] | None = None,
        explain: Callable[[Exception, str], None] = say_where,
        over: Iterable[Callable[[], None]] = (),
    ) -> Found:
        """Run the step and return what was noted. `over` is called once it is over; for the other arguments see `Step.run`."""
        with HookSet() as hooks:
            self._signatures.hook(self._tree, hooks)
            self._step.run(
                self._stack,
                packing=packing,
                forward_done=self._forward_done,
                backward_done=self._backward_done,
                at_node=at_node,
                explain=explain,
            )
        for look in over:
            look()
        return Found(
            saves=self.saves,
            signatures=self._signatures,
            num_calls=self._stack.num_calls,
            checkpointed=self._hidden.checkpointed,
            under_other_hooks=self._hidden.under_other_hooks,
            backend_dependent=self._backend_dependent,
            written=tuple(self._writes.written),
            before_bytes=self._gauge.before_bytes,
            forward_peak_bytes=self._forward_peak_bytes,
            backward_peak_bytes=self._gauge.take_highest() if self._step.backward else None,
            reserved_peak_bytes=self._gauge.highest_reserved_bytes,
            forward_peaks=self._gauge.forward_peaks,
            backward_peaks=self._gauge.backward_peaks,
            forward_s={},
            backward_s={},
            storages=self._log if self._step.backward else None,
            gathered_bytes=self._log.gathered_bytes() if self._log is not None and self._step.sharded else None,
        )

    def _forward_done(self) -> None:
        self._forward_peak_bytes = self._gauge.take_highest()
        self.saves.start_backward()

    def _backward_done(self, leaves: Sequence[Tensor]) -> None:
        if self._log is not None:
            self._log.note_grads(leaves)
