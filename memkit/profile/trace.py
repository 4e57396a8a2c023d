"""`profile_memory(..., trace=True)`: one step on the meta device, op by op, in the form that plans are made from."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memkit.core import torch_private
from memkit.core.hooks import SavedTensorHooks
from memkit.core.tensors import PLAIN_TYPES, is_range_of_bytes, storage_key, storages_of
from memkit.core.torch_state import has_own_dispatch
from memkit.device import CpuDevice, default_generator
from memkit.device.ceilings import flops_of
from memkit.errors import ProfileError
from memkit.plan import Lifetime, ModuleOps, OpKind, OpWork, Step, StepTrace, ends_of
from memkit.profile.calls import CallStack, PeakGauge
from memkit.profile.passes import Watch
from memkit.profile.simulate import META, rounding_bytes
from memkit.profile.simulate.run import as_on_target, refuse_scripted, say_why_not, without_data
from memkit.profile.step import ProfiledStep, nothing, preserved
from memkit.profile.tree import ModuleTree, dtype_name
from memkit.profile.watch import OpWatch, ParamCasts, StorageLog, storages_in, tensors_in
from memkit.recording.expected import num_writes
from memkit.recording.module_calls import ModuleTrail
from memkit.recording.ops import op_kinds
from memkit.recording.recorder import Recorder
from memkit.recording.recording import Recording, names_of, step_of

if TYPE_CHECKING:
    from memkit.core.torch_private import OpOverload


_KINDS = (  # the first that matches
    (OpKind.ATTENTION, re.compile(r"scaled_dot_product|(flash|efficient)_attention")),
    (OpKind.CONVOLUTION, re.compile(r"conv(?!ert)")),
    (OpKind.MATMUL, re.compile(r"^_?(int_|scaled_|grouped_)*(add)?(mm|bmm|mv|r|bmm_dtype)(_v2)?_?$|baddbmm|^v?dot$|^linear$")),
    (OpKind.NORM, re.compile(r"(batch|layer|group|instance|rms)_norm")),
    (OpKind.POOL, re.compile(r"_pool\d?d|max_pool|avg_pool")),
)
_FEW_CHANNELS = 3
_UNFILLED = re.compile(r"^(new_)?empty")
_SPARSE_READERS = frozenset({"embedding", "index", "index_select", "gather", "nll_loss_forward", "nll_loss2d_forward"})
"""Ops that read at most as many bytes of their first argument as they write."""


def work_of(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], outputs: Any) -> OpWork:
    """Return the work of an op that has run. Each storage counts once: broadcast dimensions are read once, of several views the
    largest counts, and an argument that the op overwrites is both read and written."""
    name = str(torch_private.schema_of(op).name).rpartition("::")[2]
    given, made = [*tensors_in(args), *tensors_in(list(kwargs.values()))], list(tensors_in(outputs))
    has_few_channels = name == "convolution" and given[0].dim() > 2 and given[0].shape[1] <= _FEW_CHANNELS
    floating = (tensor.dtype for tensor in given or made if tensor.is_floating_point() or tensor.is_complex())
    other = (given or made)[0].dtype if given or made else torch.get_default_dtype()
    return OpWork(
        name=str(op),
        kind=OpKind.CONVOLUTION_OF_FEW if has_few_channels else kind_of(name),
        flops=flops_of(op, args, kwargs, outputs),
        num_bytes=_num_bytes(op, name, args, kwargs, given, made),
        dtype=dtype_name(next(floating, other)),
    )


def kind_of(name: str) -> OpKind:
    """Return an op's kind by its name without namespace and overload, such as "mm"."""
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), OpKind.POINTWISE)


def _num_bytes(
    op: OpOverload, name: str, args: Sequence[Any], kwargs: dict[str, Any], given: Sequence[Tensor], made: Sequence[Tensor]
) -> int:
    if _UNFILLED.search(name) or torch.Tag.inplace_view in op.tags:
        return 0
    kind = op_kinds().of(op)
    written = [kwargs.get(key) if isinstance(key, str) else args[key] if key < len(args) else None for key in kind.written]
    over = list(tensors_in(written))
    is_read = [not kind.overwrites or not any(tensor is target for target in over) for tensor in given]
    read = _bytes_by_storage(tensor for tensor, is_one in zip(given, is_read, strict=True) if is_one)
    writes = sum(_bytes_by_storage([*made, *over]).values())
    if name in _SPARSE_READERS and args and isinstance(args[0], Tensor):
        for storage in storages_of(args[0]):
            read[storage_key(storage)] = min(read.get(storage_key(storage), 0), writes)
    return sum(read.values()) + writes


def _bytes_by_storage(tensors: Iterable[Tensor]) -> dict[int, int]:
    found: dict[int, int] = {}
    for tensor in tensors:
        for storage in storages_of(tensor):
            key, whole = storage_key(storage), storage.nbytes()
            num_bytes = min(whole, _distinct_bytes(tensor)) if tensor.layout is torch.strided else whole
            found[key] = max(found.get(key, 0), num_bytes)
    return found


def _distinct_bytes(tensor: Tensor) -> int:
    if torch_private.is_wrapper(tensor) or tensor.is_nested or tensor.numel() == 0:
        return tensor.numel() * tensor.itemsize
    return tensor.itemsize * math.prod(size for size, stride in zip(tensor.size(), tensor.stride(), strict=True) if stride)


class _Tracer(PeakGauge):
    """Follows a step op by op: numbers the ops and notes their work, when storages are made, the ops of each module call of the
    forward, and the values of at least `min_bytes` that autograd saves and requests, as `Rematerialize` would.

    Ops that return views are not counted: they neither compute nor move anything. The tracer holds no tensor. It must see ops
    inside the recorder's mode.
    """

    def __init__(self, log: StorageLog, tree: ModuleTree, min_bytes: int = 0) -> None:
        super().__init__(log)
        self._log = log
        self._tree = tree
        self.recording = Recording(CpuDevice(META))
        self.min_bytes = min_bytes
        self._is_forward = True
        self._open: list[int] = []
        self._spans: list[tuple[int, int, int]] = []
        self._versions: dict[int, int] = {}
        self._value_in: dict[int, int] = {}
        self.num_forward_ops = 0
        self.base_bytes = log.allocated_bytes()
        """Bytes on the device before the first op."""
        self.works: list[OpWork] = []
        self.live_bytes: list[int] = []
        """Bytes beyond `base_bytes` just after each op."""
        self.op_places: list[int] = []
        """For each op of the recording, its index among all ops."""
        self.values: dict[int, tuple[int, int]] = {}
        """For each value of the recording in a storage made here: the storage's place in the log, and the op that made it."""
        self.overwritten_at: dict[int, int] = {}
        """For each overwritten value, the op that wrote over it."""
        self.saves: list[int] = []
        self.save_nodes: list[int] = []
        self.save_places: list[int] = []
        self.uses: list[int] = []
        self.use_nodes: list[int] = []
        self.use_places: list[int] = []

    @property
    def now(self) -> int:
        return len(self.works)

    def open(self, index: int) -> None:
        super().open(index)
        self._open.append(len(self._spans))
        self._spans.append((index, len(self.recording.calls), 0))

    def close(self, index: int) -> None:
        super().close(index)
        place = self._open.pop()
        self._spans[place] = (*self._spans[place][:2], len(self.recording.calls))

    def modules(self) -> tuple[ModuleOps, ...]:
        nodes = self._tree.nodes
        return tuple(
            ModuleOps(module=nodes[index].fqn, kind=type(nodes[index].module).__name__, begin=begin, end=end)
            for index, begin, end in self._spans
            if index != self._tree.outside
        )

    def end_forward(self) -> Step:
        step = step_of(self.recording, self.saves, self.save_nodes)
        self.num_forward_ops, self._is_forward = self.now, False
        self.recording.close()
        return step

    def saw(self, op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], outputs: Any) -> None:
        log, recording = self._log, self.recording
        before_bytes, num_before = log.allocated_bytes(), len(log)
        log.see(outputs)
        num_recorded = len(recording.calls) - len(self.op_places) if self._is_forward else 0
        has_made = len(log) > num_before or log.allocated_bytes() > before_bytes
        if not (has_made or num_recorded or torch_private.schema_of(op).is_mutable):
            return
        if self._is_forward:
            self.op_places += [self.now] * num_recorded
            for storage in storages_in([args, list(kwargs.values()), outputs]):
                value = recording.find(storage)
                if value is not None:
                    self._note_value(value, storage)
        self.works.append(work_of(op, args, kwargs, outputs))
        self.live_bytes.append(log.allocated_bytes() - self.base_bytes)
        log.note_op(str(op))

    def _note_value(self, value: int, storage: torch.UntypedStorage) -> None:
        place = self._log.place_of(storage)
        if place is None:
            return
        before = self._value_in.get(place)
        if before == value:
            return
        if before is not None:
            self.overwritten_at[before] = self.now
        self._value_in[place] = value
        self.values[value] = (place, self._log.begin_of(place) if before is None else self.now)

    def note_save(self, tensor: Tensor) -> tuple[int, int] | None:
        """Note a save; return its value and its node if it counts."""
        with torch_private.without_python_dispatch():  # not part of the forward
            self._log.see(tensor)  # perhaps no op returned it, such as a tensor from a list
            self._log.note_saved(tensor)
            if torch_private.backward_task() != -1 or (type(tensor) not in PLAIN_TYPES and has_own_dispatch(tensor)):
                return None
            return self._note_value_saved(tensor) if is_range_of_bytes(tensor) and tensor.device == META else None

    def _note_value_saved(self, tensor: Tensor) -> tuple[int, int] | None:
        recording, storage = self.recording, tensor.untyped_storage()
        value = recording.find(storage)
        if value is None:
            return None  # it was there before
        root = recording.roots.get(value)
        if (root is not None and not root.is_inside) or storage.nbytes() < self.min_bytes:
            return None
        version = torch_private.version_of(tensor)
        if version and version > num_writes(recording, value):  # written to elsewhere, as by another thread
            value = recording.add_root(tensor, storage, is_inside=True)
            self._note_value(value, storage)
        node = torch_private.node_number()
        self.saves.append(value)
        self.save_nodes.append(node)
        self.save_places.append(self.now)
        recording.saved.append(value)
        recording.saved_at.append((len(recording.calls), len(recording.funcs)))
        # None: written to without the recorder seeing it
        return (value, node) if self._versions.setdefault(value, version) == version else None

    def note_use(self, value: int, node: int) -> None:
        if torch_private.backward_task() == -1:
            return
        if self._is_forward:
            raise ProfileError(
                "a trace needs one forward and then one backward; found a forward that runs a backward of its own (as for the "
                "gradient of an input). Profile with trace=False"
            )
        self.uses.append(value)
        self.use_nodes.append(node)
        self.use_places.append(self.now)


def trace_step(step: ProfiledStep, tree: ModuleTree, target: str, min_bytes: int) -> tuple[StepTrace, Watch]:
    """Run a step with a backward twice without data; return its trace and its watch, and leave the model unchanged. The second
    run is of the forward alone, with autograd holding nothing: it shows which values others hold. Raises ProfileError or
    DataDependentError if the step can't run on meta, runs a backward within its forward, or differs between the runs."""
    torch_private.require(torch_private.Feature.REMAT)  # records ops as it does
    refuse_scripted(step)
    with preserved(step.modules(), META, contents=False):
        traced, planned, watch = _run_whole(step, tree, target, max(1, min_bytes))
    with preserved(step.modules(), META, contents=False):
        names, ends = _run_alone(step, tree, target)
    if [work.name for work in traced.works[: traced.num_forward_ops]] != names:
        raise ProfileError(
            "a trace needs a step that does the same each time; found a forward that has run other ops when it ran again. Take "
            "out what changes from one forward to the next (a counter, a global cache, the time), or pass trace=False"
        )
    lifetimes = _lifetimes(traced, watch, planned, ends)
    parameters = dict.fromkeys(parameter for module in step.modules() for parameter in module.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    trace = StepTrace(
        model=type(step.model).__name__,
        inputs=", ".join(f"{dtype_name(tensor.dtype)}{list(tensor.shape)}" for tensor in step.input_tensors()),
        target=target,
        min_bytes=min_bytes,
        ops=tuple(traced.works),
        num_forward_ops=traced.num_forward_ops,
        step=planned,
        op_places=tuple(traced.op_places),
        save_places=tuple(traced.save_places),
        use_places=tuple(traced.use_places),
        lifetimes=lifetimes,
        live_bytes=tuple(traced.live_bytes),
        base_bytes=traced.base_bytes,
        trainable_numel=sum(parameter.numel() for parameter in trained),
        trainable_bytes=sum(parameter.numel() * parameter.itemsize for parameter in trained),
        names=names_of(traced.recording, lifetimes),
        modules=traced.modules(),
        backend_dependent=tuple(tree.nodes[index].fqn for index in sorted(watch.backend_dependent)),
    )
    return trace, watch


def _run_whole(step: ProfiledStep, tree: ModuleTree, target: str, min_bytes: int) -> tuple[_Tracer, Step, Watch]:
    step, found = without_data(step), list[Step]()
    log = StorageLog(step, rounding_bytes=rounding_bytes(target))
    tracer = _Tracer(log, tree, min_bytes)
    watch = Watch(step, tree, tracer, log, tracer)
    with as_on_target(tree, target, watch.note_backend_dependent) as mode, ExitStack() as watching:
        watching.enter_context(ModuleTrail(tracer.recording))
        watching.enter_context(Recorder(tracer.recording, op_kinds(), default_generator, lambda *_: 0.0))
        watching.enter_context(OpWatch(*watch.observers))

        def forward_done() -> None:
            watching.close()
            found.append(tracer.end_forward())
            watching.enter_context(OpWatch(*watch.observers))

        watch.run(forward_done=forward_done, at_node=mode.resume, explain=say_why_not)
    watch.close()
    return tracer, replace(found[0], uses=tuple(tracer.uses), use_ends=ends_of(tracer.use_nodes)), watch


def _run_alone(step: ProfiledStep, tree: ModuleTree, target: str) -> tuple[list[str], dict[int, int]]:
    """Return the ops of the forward, and for each storage that is freed in it how many had run by then."""
    step, ends = replace(without_data(step), backward=False), dict[int, int]()
    log, casts = StorageLog(step, rounding_bytes=rounding_bytes(target)), ParamCasts(step.resident_storages())
    tracer = _Tracer(log, tree)
    stack = CallStack(tree, tracer)
    log.follow(step, tree, stack, casts)
    with as_on_target(tree, target, nothing) as mode, OpWatch(tracer, casts):
        step.run(
            stack,
            packing=SavedTensorHooks(log.see, _refuse),  # gives autograd nothing to hold
            forward_done=lambda: ends.update(log.ends()),
            at_node=mode.resume,
            explain=say_why_not,
        )
    log.leave()
    return [work.name for work in tracer.works], ends


def _refuse(packed: None) -> Tensor:
    raise ProfileError(
        "a trace needs one forward and then one backward; found a forward that asks for what autograd has saved. Profile with "
        "trace=False"
    )


def _lifetimes(traced: _Tracer, watch: Watch, step: Step, ends: Mapping[int, int]) -> dict[int, Lifetime]:
    num_bytes, saved, freed = step.lineage.num_bytes, set(step.saves), watch.ends()
    found: dict[int, Lifetime] = {}
    for value, (place, made_at) in sorted(traced.values.items()):
        if value >= len(num_bytes) or (value not in saved and num_bytes[value] < traced.min_bytes):
            continue
        freed_at = traced.overwritten_at.get(value, freed.get(place, traced.now))
        released_at = min(freed_at, ends.get(place, freed_at))
        found[value] = Lifetime(made_at=made_at, released_at=released_at, freed_at=freed_at)
    return found
