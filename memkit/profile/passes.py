"""The runs that a profile is made of (unwatched, for memory, for time, without data), and the rows of a report.

Memory and time are never taken in the same run: watching what is saved costs time, and would count as the model's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import Tensor

from memkit.core import torch_private
from memkit.core.hooks import HookSet, SavedTensorHooks
from memkit.device import Device
from memkit.profile.calls import CallStack, Gauge, PeakGauge, TimeGauge
from memkit.profile.report import ModuleRecord, SavedCategory, SavedTensorRecord
from memkit.profile.simulate import rounding_bytes
from memkit.profile.simulate.run import as_on_target, refuse_scripted, say_why_not, without_data
from memkit.profile.step import ProfiledStep, nothing, say_where
from memkit.profile.tree import Mark, ModuleTree, Signatures, children_of
from memkit.profile.watch import (
    HiddenRegions,
    OpObserver,
    OpWatch,
    ParamCasts,
    SavedStorages,
    SaveObserver,
    SaveTimes,
    StorageLog,
    Writes,
)


def module_records(
    tree: ModuleTree,
    watch: Watch,
    saved: Iterable[SavedTensorRecord],
    forward_s: Mapping[int, float],
    backward_s: Mapping[int, float],
) -> tuple[ModuleRecord, ...]:
    """Return the rows: each module of the tree, and the work outside of any."""
    parents = [*(node.parent for node in tree.nodes), None]
    below = children_of(parents)
    owners: dict[int, str] = {}  # each storage belongs to the module that saved it first
    self_bytes, num_storages, num_saves = Counter[str](), Counter[str](), Counter[str]()
    for record in saved:
        if record.category is not SavedCategory.PARAM_CAST:
            if record.storage not in owners:
                owners[record.storage] = record.module
                self_bytes[record.module] += record.storage_bytes
                num_storages[record.module] += 1
            num_saves[owners[record.storage]] += len(record.save_ordinals)
    param_bytes = _with_children({index: node.self_param_bytes for index, node in enumerate(tree.nodes)}, below)
    host_param_bytes = _with_children({index: node.self_host_param_bytes for index, node in enumerate(tree.nodes)}, below)
    activation_bytes = _with_children({index: self_bytes[tree.fqn(index)] for index in range(len(parents))}, below)
    backward_s = _with_children(backward_s, below)
    backward_peaks = _with_children(watch.gauge.backward_peaks, below, max)
    records = []
    for index, parent in enumerate(parents):
        node, fqn = tree.nodes[index] if index < tree.outside else None, tree.fqn(index)
        inputs, outputs, dtype, num_signatures = watch.signatures.of(index)
        records.append(
            ModuleRecord(
                fqn=fqn,
                type_name="" if node is None else type(node.module).__name__,
                parent=parent,
                depth=0 if node is None else node.depth,
                num_calls=watch.stack.num_calls.get(index, 0),
                param_bytes=param_bytes.get(index, 0),
                host_param_bytes=host_param_bytes.get(index, 0),
                activation_bytes=activation_bytes[index],
                self_bytes=self_bytes[fqn],
                num_storages=num_storages[fqn],
                num_saves=num_saves[fqn],
                input_shapes=inputs,
                output_shapes=outputs,
                num_signatures=num_signatures,
                dtype=dtype,
                peak_bytes=watch.gauge.forward_peaks.get(index),
                forward_s=forward_s.get(index),
                backward_s=backward_s.get(index),
                backward_peak_bytes=backward_peaks.get(index),
                marks=(*(() if node is None else node.marks), *watch.marks(index)),
            )
        )
    return tuple(records)


def _with_children(
    values: Mapping[int, Any], below: list[list[int]], how: Callable[[list[Any]], Any] = sum
) -> dict[int, Any]:  # Any: bytes or seconds
    found = dict(values)
    for parent in reversed(range(len(below))):  # children come after their parent
        there = [found[row] for row in (parent, *below[parent]) if row in found]
        if there:
            found[parent] = how(there)
    return found


def plain_pass(step: ProfiledStep, tree: ModuleTree) -> None:
    """Run the step unwatched: libraries start up, the allocator fills its cache, kernels are chosen."""
    step.run(CallStack(tree, Gauge()))


def time_pass(
    step: ProfiledStep, tree: ModuleTree, device: Device, *, num_calls: int
) -> tuple[dict[int, float], dict[int, float]]:
    """Run the step with events around each call; return seconds per module, forward (inclusive) and backward (its own)."""
    gauge = TimeGauge(device)
    device.make_events(2 * num_calls)
    device.synchronize()
    step.run(CallStack(tree, gauge))
    return gauge.read()


def save_times_pass(step: ProfiledStep, tree: ModuleTree, device: Device) -> SaveTimes:
    device.synchronize()
    times = SaveTimes(device)
    packing = SavedTensorHooks(times.pack, times.unpack)
    step.run(CallStack(tree, Gauge()), packing=packing, forward_done=times.start_backward)
    device.synchronize()
    return times


def memory_pass(step: ProfiledStep, tree: ModuleTree, device: Device) -> Watch:
    counter = device.memory_counter()
    log = None
    if not tree.has_compiled and (counter is None or step.backward or step.sharded):
        only = None if counter is None else device.torch_device.type
        log = StorageLog(step, rounding_bytes=rounding_bytes("cpu" if counter is None else "cuda"), only=only)
        counter = counter or log
    device.synchronize()
    watch = Watch(step, tree, Gauge() if counter is None else PeakGauge(counter), log)
    # Operations of compiled code cannot be watched: a dispatch mode would make it run eagerly.
    with nullcontext() if tree.has_compiled else OpWatch(*watch.observers):
        watch.run()
    watch.close()
    device.synchronize()
    return watch


def simulated_pass(step: ProfiledStep, tree: ModuleTree, target: str) -> Watch:
    """Run the step on meta as `target` would. The model has twins without data until `preserved`, around this, restores its
    tensors."""
    refuse_scripted(step)
    step = without_data(step)
    log = StorageLog(step, rounding_bytes=rounding_bytes(target))
    watch = Watch(step, tree, PeakGauge(log), log)
    with as_on_target(tree, target, watch.note_backend_dependent) as mode, OpWatch(*watch.observers):
        watch.run(at_node=mode.resume, explain=say_why_not)
    watch.close()
    return watch


def _pack(log: StorageLog | None, tracer: SaveObserver | None, saves: SavedStorages, tensor: Tensor) -> Any:
    if tracer is not None:
        traced = tracer.note_save(tensor)
        with torch_private.without_dispatch_modes():
            packed = saves.pack(tensor)
        packed.traced = traced
        return packed
    if log is not None:
        log.note_saved(tensor)
    return saves.pack(tensor)


def _unpack(tracer: SaveObserver | None, saves: SavedStorages, packed: Any) -> Tensor:
    if tracer is not None and packed.traced is not None:
        tracer.note_use(*packed.traced)
    return saves.unpack(packed)


class Watch:
    """Notes memory in a run: `log` counts the storages, if ops can be seen; `tracer`, if given, makes a trace."""

    def __init__(
        self,
        step: ProfiledStep,
        tree: ModuleTree,
        gauge: Gauge,
        log: StorageLog | None,
        tracer: SaveObserver | None = None,
    ) -> None:
        self._step = step
        self._tree = tree
        self._log = log
        self.gauge = gauge
        self.stack = CallStack(tree, gauge)
        self.signatures = Signatures()
        resident = step.resident_storages()
        casts = ParamCasts(resident)
        self.saves = SavedStorages(resident=resident, inputs=step.input_tensors(), casts=casts, stack=self.stack)
        if log is not None:
            log.follow(step, tree, self.stack, casts)
        # no methods: they would keep the model alive until garbage collection
        self._pack, self._unpack = partial(_pack, log, tracer, self.saves), partial(_unpack, tracer, self.saves)
        self._hidden = HiddenRegions(self._pack, self.stack)
        self.writes = Writes(step.names_of_storages())
        self.backend_dependent: set[int] = set()
        self.forward_peak_bytes: int | None = None
        self.backward_peak_bytes: int | None = None
        counting = [observer for observer in (tracer or log,) if observer is not None]
        self.observers: tuple[OpObserver, ...] = (*counting, casts, self._hidden, self.writes)

    @property
    def storages(self) -> StorageLog | None:
        """The storages on the device at each op; None without a backward, and if ops can't be seen."""
        return self._log if self._step.backward else None

    @property
    def gathered_bytes(self) -> int | None:
        """See `ShardInfo`; also None if no parameter is gathered."""
        return self._log.gathered_bytes() if self._log is not None and self._step.sharded else None

    def marks(self, index: int) -> list[str]:
        marked = {
            Mark.CHECKPOINTED: self._hidden.checkpointed,
            Mark.OTHER_HOOKS: self._hidden.under_other_hooks,
            Mark.BACKEND_DEPENDENT: self.backend_dependent,
        }
        return [mark.value for mark, rows in marked.items() if index in rows]

    def note_backend_dependent(self) -> None:
        """Note an operation whose saves only the backend knows."""
        self.backend_dependent.add(self.stack.current)

    def ends(self) -> dict[int, int]:
        return {} if self._log is None else self._log.ends()

    def run(
        self,
        *,
        forward_done: Callable[[], None] = nothing,
        at_node: Callable[[], None] | None = None,
        explain: Callable[[Exception, str], None] = say_where,
    ) -> None:
        def done() -> None:
            self.forward_peak_bytes = self.gauge.take_highest()
            forward_done()

        with HookSet() as hooks:
            self.signatures.hook(self._tree, hooks)
            self._step.run(
                self.stack,
                packing=SavedTensorHooks(self._pack, self._unpack),
                forward_done=done,
                backward_done=nothing if self._log is None else self._log.note_grads,
                at_node=at_node,
                explain=explain,
            )
        if self._step.backward:
            self.backward_peak_bytes = self.gauge.take_highest()

    def close(self) -> None:
        """Let the log count what has changed at last, and let go of the model."""
        if self._log is not None:
            self._log.look()
            self._log.leave()
