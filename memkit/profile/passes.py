"""The runs that a profile is made of, and a report's rows. No run takes both memory and time: to watch saves takes time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, nullcontext
from typing import Any, TypeVar

from memkit.core.hooks import SavedTensorHooks
from memkit.device import Device
from memkit.profile.calls import CallStack, Gauge, PeakGauge, TimeGauge
from memkit.profile.report import ModuleRecord, SavedCategory, SavedTensorRecord
from memkit.profile.simulate import rounding_bytes
from memkit.profile.simulate.run import as_on_target, refuse_scripted, say_why_not, without_data
from memkit.profile.step import ProfiledStep
from memkit.profile.tree import ModuleTree, children_of
from memkit.profile.watch import SaveTimes, StorageLog, Watch

_Log = TypeVar("_Log", bound=StorageLog)


def module_records(
    tree: ModuleTree, watch: Watch, kept: Iterable[SavedTensorRecord], forward_s: dict[int, float], backward_s: dict[int, float]
) -> tuple[ModuleRecord, ...]:
    parents = [*(node.parent for node in tree.nodes), None]
    below = children_of(parents)
    owners: dict[int, str] = {}  # each storage belongs to the module that saved it first
    self_bytes, num_storages, num_saves = Counter[str](), Counter[str](), Counter[str]()
    for record in kept:
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


def time_pass(
    step: ProfiledStep, tree: ModuleTree, device: Device, *, num_calls: int
) -> tuple[dict[int, float], dict[int, float]]:
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
    log: StorageLog | None = None
    if not tree.has_compiled and (counter is None or step.backward or step.sharded):
        only = None if counter is None else device.torch_device.type
        log = StorageLog(step, rounding_bytes=rounding_bytes("cpu" if counter is None else "cuda"), only=only)
        counter = counter or log
    device.synchronize()
    watch = Watch(step, tree, Gauge() if counter is None else PeakGauge(counter), log)
    # Operations of compiled code cannot be watched: a dispatch mode would make it run eagerly.
    with closing(watch), nullcontext() if tree.has_compiled else watch:
        watch.run()
    device.synchronize()
    return watch


def simulated_pass(step: ProfiledStep, tree: ModuleTree, target: str, make_log: Callable[..., _Log]) -> tuple[Watch, _Log]:
    """Run the step on meta as `target` would; the model has twins without data until `preserved`, around this, ends."""
    refuse_scripted(step)
    step = without_data(step)
    log = make_log(step, rounding_bytes=rounding_bytes(target))
    watch = Watch(step, tree, log.gauge(), log)
    with as_on_target(tree, target, watch.note_backend_dependent) as mode, log.recorded(), closing(watch), watch:
        watch.run(at_node=mode.resume, explain=say_why_not)
    return watch, log
