"""`profile_memory(..., trace=True)`: one step on the meta device, op by op, in the form that plans are made from."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memkit.core import torch_private
from memkit.core.tensors import PLAIN_TYPES, is_range_of_bytes, storage_key, storages_of
from memkit.core.torch_state import has_own_dispatch
from memkit.device import CpuDevice, default_generator
from memkit.device.ceilings import flops_of
from memkit.errors import ProfileError
from memkit.plan import Lifetime, ModuleOps, OpKind, OpWork, Step, StepTrace, ends_of
from memkit.profile.calls import PeakGauge
from memkit.profile.passes import simulated_pass
from memkit.profile.simulate import META
from memkit.profile.step import ProfiledStep, preserved
from memkit.profile.tree import Mark, ModuleTree, dtype_name
from memkit.profile.watch import SavedStorages, StorageLog, Watch, storages_in, tensors_in
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
_UNFILLED = re.compile(r"^(new_)?empty")
_SPARSE_READERS = frozenset({"embedding", "index", "index_select", "gather", "nll_loss_forward", "nll_loss2d_forward"})


def work_of(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], outputs: Any) -> OpWork:
    """Return the work of an op that has run, each storage counted once: of several views the largest."""
    name = str(torch_private.schema_of(op).name).rpartition("::")[2]
    given, made = [*tensors_in(args), *tensors_in(list(kwargs.values()))], list(tensors_in(outputs))
    has_few_channels = name == "convolution" and given[0].dim() > 2 and given[0].shape[1] <= 3
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
            distinct = tensor.numel()
            if distinct and not (torch_private.is_wrapper(tensor) or tensor.is_nested or tensor.layout is not torch.strided):
                distinct = math.prod(size for size, stride in zip(tensor.size(), tensor.stride(), strict=True) if stride)
            num_bytes = min(whole, distinct * tensor.itemsize) if tensor.layout is torch.strided else whole
            found[key] = max(found.get(key, 0), num_bytes)
    return found


class _Tracer(StorageLog):
    """Follows a step op by op; without `min_bytes` a forward alone, of which autograd holds nothing. It holds no tensor."""

    def __init__(self, step: ProfiledStep, *, rounding_bytes: int, min_bytes: int | None = None) -> None:
        super().__init__(step, rounding_bytes=rounding_bytes)
        self.recording = Recording(CpuDevice(META))
        self.spans: list[tuple[int, int, int]] = []  # of each call its module, its first op and the one after its last
        self._min_bytes = min_bytes
        self._recorded = ExitStack()
        self._is_forward = True
        self._versions: dict[int, int] = {}
        self._value_in: dict[int, int] = {}
        self.num_forward_ops = 0
        self.forward_step: Step | None = None
        self.forward_ends: dict[int, int] = {}  # for each storage that is freed in the forward, by its place, the ops by then
        self.base_bytes = self.allocated_bytes()
        self.works: list[OpWork] = []
        self.live_bytes: list[int] = []
        self.op_places: list[int] = []  # for each op of the recording, its index among all ops
        self.values: dict[int, tuple[int, int]] = {}  # for each value, its storage's place in the log and the op that made it
        self.overwritten_at: dict[int, int] = {}  # for each overwritten value, the op that wrote over it
        self.saves: list[tuple[int, int, int]] = []
        self.uses: list[tuple[int, int, int]] = []  # of each save and use: value, autograd node, ops by then

    @property
    def now(self) -> int:
        return len(self.works)

    def gauge(self) -> PeakGauge:
        return _Spans(self)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        with self._recorded as recorded:
            if self._min_bytes is not None:
                recorded.enter_context(ModuleTrail(self.recording))
                recorded.enter_context(Recorder(self.recording, op_kinds(), default_generator, lambda *_: 0.0))
            yield

    def end_forward(self) -> None:
        self._recorded.close()
        self.forward_ends = self.ends()
        values, nodes, _ = _columns(self.saves)
        self.forward_step = step_of(self.recording, values, nodes)
        self.num_forward_ops, self._is_forward = self.now, False
        self.recording.close()

    def saw(self, op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], outputs: Any) -> None:
        recording = self.recording
        before_bytes, num_before = self.allocated_bytes(), len(self)
        self.see(outputs)
        num_recorded = len(recording.calls) - len(self.op_places) if self._is_forward else 0
        has_made = len(self) > num_before or self.allocated_bytes() > before_bytes
        if not (has_made or num_recorded or torch_private.schema_of(op).is_mutable):
            return
        if self._is_forward:
            self.op_places += [self.now] * num_recorded
            for storage in storages_in([args, list(kwargs.values()), outputs]):
                value = recording.find(storage)
                if value is not None:
                    self._note_value(value, storage)
        self.works.append(work_of(op, args, kwargs, outputs))
        self.live_bytes.append(self.allocated_bytes() - self.base_bytes)
        self.note_op(str(op))

    def _note_value(self, value: int, storage: torch.UntypedStorage) -> None:
        place = self.place_of(storage)
        if place is None:
            return
        before = self._value_in.get(place)
        if before == value:
            return
        if before is not None:
            self.overwritten_at[before] = self.now
        self._value_in[place] = value
        self.values[value] = (place, self._entries[place].begin if before is None else self.now)

    def pack(self, saves: SavedStorages, tensor: Tensor) -> Any:
        if self._min_bytes is None:
            return self.see(tensor)
        with torch_private.without_python_dispatch():  # not part of the forward
            self.see(tensor)  # perhaps no op returned it, such as a tensor from a list
            self.note_saved(tensor)
            has_value = torch_private.backward_task() == -1 and (type(tensor) in PLAIN_TYPES or not has_own_dispatch(tensor))
            is_counted = has_value and is_range_of_bytes(tensor) and tensor.device == META
            traced = self._note_value_saved(tensor, self._min_bytes) if is_counted else None
        with torch_private.without_dispatch_modes():
            packed = saves.pack(tensor)
        packed.traced = traced
        return packed

    def _note_value_saved(self, tensor: Tensor, min_bytes: int) -> tuple[int, int] | None:
        recording, storage = self.recording, tensor.untyped_storage()
        value = recording.find(storage)
        if value is None:
            return None  # it was there before
        root = recording.roots.get(value)
        if (root is not None and not root.is_inside) or storage.nbytes() < min_bytes:
            return None
        version = torch_private.version_of(tensor)
        if version and version > num_writes(recording, value):  # written to elsewhere, as by another thread
            value = recording.add_root(tensor, storage, is_inside=True)
            self._note_value(value, storage)
        node = torch_private.node_number()
        self.saves.append((value, node, self.now))
        recording.saved.append(value)
        recording.saved_at.append((len(recording.calls), len(recording.funcs)))
        # None: written to without the recorder seeing it
        return (value, node) if self._versions.setdefault(value, version) == version else None

    def unpack(self, saves: SavedStorages, packed: Any) -> Tensor:
        if packed is None or (packed.traced is not None and self._is_forward and torch_private.backward_task() != -1):
            own = "runs a backward of its own (as for the gradient of an input)"
            found = "asks for what autograd has saved" if packed is None else own
            raise ProfileError(
                f"a trace needs one forward and then one backward; found a forward that {found}. Profile with trace=False"
            )
        if packed.traced is not None and torch_private.backward_task() != -1:
            self.uses.append((*packed.traced, self.now))
        return saves.unpack(packed)


def _columns(rows: Sequence[tuple[int, int, int]]) -> list[list[int]]:
    return [[row[column] for row in rows] for column in range(3)]


class _Spans(PeakGauge):
    """Also notes the ops of each module call."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__(tracer)
        self._tracer = tracer
        self._open: list[int] = []

    def open(self, index: int) -> None:
        super().open(index)
        self._open.append(len(self._tracer.spans))
        self._tracer.spans.append((index, len(self._tracer.recording.calls), 0))

    def close(self, index: int) -> None:
        super().close(index)
        place = self._open.pop()
        self._tracer.spans[place] = (*self._tracer.spans[place][:2], len(self._tracer.recording.calls))


def trace_step(step: ProfiledStep, tree: ModuleTree, target: str, min_bytes: int) -> tuple[StepTrace, Watch]:
    """Run a step, then its forward with autograd holding nothing: that shows what others hold. Return trace and watch."""
    torch_private.require(torch_private.Feature.REMAT)  # records ops as it does
    with preserved(step.modules(), META, contents=False):
        watch, traced = simulated_pass(step, tree, target, partial(_Tracer, min_bytes=max(1, min_bytes)))
    with preserved(step.modules(), META, contents=False):
        _, alone = simulated_pass(replace(step, backward=False), tree, target, _Tracer)
    assert traced.forward_step is not None
    uses, use_nodes, use_places = _columns(traced.uses)
    planned = replace(traced.forward_step, uses=tuple(uses), use_ends=ends_of(use_nodes))
    if [work.name for work in traced.works[: traced.num_forward_ops]] != [work.name for work in alone.works]:
        raise ProfileError(
            "a trace needs a step that does the same each time; found a forward that has run other ops when it ran again. Take "
            "out what changes from one forward to the next (a counter, a global cache, the time), or pass trace=False"
        )
    lifetimes = _lifetimes(traced, planned, max(1, min_bytes), alone.forward_ends)
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
        save_places=tuple(place for _, _, place in traced.saves),
        use_places=tuple(use_places),
        lifetimes=lifetimes,
        live_bytes=tuple(traced.live_bytes),
        base_bytes=traced.base_bytes,
        trainable_numel=sum(parameter.numel() for parameter in trained),
        trainable_bytes=sum(parameter.numel() * parameter.itemsize for parameter in trained),
        names=names_of(traced.recording, lifetimes),
        modules=tuple(
            ModuleOps(module=tree.nodes[index].fqn, kind=type(tree.nodes[index].module).__name__, begin=begin, end=end)
            for index, begin, end in traced.spans
            if index != tree.outside
        ),
        backend_dependent=tuple(tree.nodes[index].fqn for index in sorted(watch.marked[Mark.BACKEND_DEPENDENT])),
    )
    return trace, watch


def _lifetimes(traced: _Tracer, step: Step, min_bytes: int, ends: Mapping[int, int]) -> dict[int, Lifetime]:
    num_bytes, saved, freed = step.lineage.num_bytes, set(step.saves), traced.ends()
    found: dict[int, Lifetime] = {}
    for value, (place, made_at) in sorted(traced.values.items()):
        if value >= len(num_bytes) or (value not in saved and num_bytes[value] < min_bytes):
            continue
        freed_at = traced.overwritten_at.get(value, freed.get(place, traced.now))
        released_at = min(freed_at, ends.get(place, freed_at))
        found[value] = Lifetime(made_at=made_at, released_at=released_at, freed_at=freed_at)
    return found
