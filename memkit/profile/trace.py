"""`profile_memory(..., trace=True)`: one step on the meta device, op by op, in the form that plans are made from."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memkit.core import torch_private
from memkit.core.hooks import SavedTensorHooks
from memkit.core.kept import KeptHandle
from memkit.core.tensors import PLAIN_TYPES, is_range_of_bytes, storage_key, storages_of
from memkit.core.torch_state import has_own_dispatch
from memkit.device import CpuDevice, default_generator
from memkit.device.ceilings import flops_of
from memkit.errors import ProfileError
from memkit.plan import Lifetime, ModuleOps, OpKind, OpWork, Step, StepTrace, ends_of
from memkit.profile.calls import CallStack, Gauge
from memkit.profile.simulate import META, rounding_bytes
from memkit.profile.simulate.run import as_on_target, refuse_scripted, say_why_not, without_data
from memkit.profile.step import ProfiledStep, nothing, preserved
from memkit.profile.tree import ModuleTree, dtype_name
from memkit.profile.watch import OpWatch, ParamCasts, StorageLog, tensors_in
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
    """Return what an op does that has run. Each storage counts once: broadcast dimensions are read once, of several views the
    largest counts, and an argument that the op writes over is both read and written."""
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
    """Return the kind of an op by its name without namespace and overload, such as "mm"."""
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), OpKind.POINTWISE)


def _num_bytes(
    op: OpOverload,
    name: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    given: Sequence[Tensor],
    made: Sequence[Tensor],
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
    numel = 1
    for size, stride in zip(tensor.size(), tensor.stride(), strict=True):
        numel *= size if stride else 1
    return numel * tensor.itemsize


_THERE_BEFORE = -1


class OpClock:
    """Numbers ops, and the storages that they make, from 0.

    Ops that return views are not counted: they neither compute nor move anything. The clock holds no tensor.

    Args:
        log: counts the bytes on the device, and gets a moment for each op.
        before: storages that exist before the step.
        recording: the recording of the forward's ops, if there is one. The clock must see ops inside the recorder's mode.
    """

    def __init__(self, log: StorageLog, before: Iterable[torch.UntypedStorage], recording: Recording | None = None) -> None:
        self._log = log
        self._recording = recording
        self._before = list(before)  # held, so that no other storage can have their keys
        self._numbers: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {
            storage_key(storage): (weakref.ref(storage), _THERE_BEFORE) for storage in self._before
        }
        self._value_in: dict[int, int] = {}
        self.base_bytes = log.allocated_bytes()
        """Bytes on the device before the first op."""
        self.works: list[OpWork] = []
        self.live_bytes: list[int] = []
        """Bytes beyond `base_bytes` just after each op."""
        self.made_at: list[int] = []
        """For each storage, the op that made it."""
        self.freed_at: dict[int, int] = {}
        """For each freed storage, how many ops had run by then."""
        self.op_places: list[int] = []
        """For each op of the recording, its index among all ops."""
        self.values: dict[int, tuple[int, int]] = {}
        """For each value of the recording in a storage made here: the storage's number, and the op that made the value."""
        self.overwritten_at: dict[int, int] = {}
        """For each overwritten value, the op that wrote over it."""

    @property
    def now(self) -> int:
        return len(self.works)

    def close(self) -> None:
        """Let go of the model at the end of the step."""
        self._before.clear()
        self._log.leave()

    def end_forward(self) -> None:
        self._recording = None

    def saw(self, op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], outputs: Any) -> None:
        log, recording = self._log, self._recording
        before_bytes = log.allocated_bytes()
        log.see(outputs)
        num_made = len(self.made_at)
        for storage in _storages_in(outputs):
            self._number(storage)
        num_recorded = 0 if recording is None else len(recording.calls) - len(self.op_places)
        has_made = len(self.made_at) > num_made or log.allocated_bytes() > before_bytes
        if not (has_made or num_recorded or torch_private.schema_of(op).is_mutable):
            return
        if recording is not None:
            self.op_places += [self.now] * num_recorded
            for storage in _storages_in([args, list(kwargs.values()), outputs]):
                value = recording.find(storage)
                if value is not None:
                    self.note_value(value, storage)
        self.works.append(work_of(op, args, kwargs, outputs))
        self.live_bytes.append(log.allocated_bytes() - self.base_bytes)
        log.note_op(str(op))

    def see_saved(self, tensor: Tensor) -> None:
        """Note a tensor that autograd saves, since perhaps no op has shown it, as one made from a list."""
        self._log.see(tensor)
        self._log.note_saved(tensor)

    def _number(self, storage: torch.UntypedStorage) -> None:
        key = storage_key(storage)
        found = self._numbers.get(key)
        if found is None or found[0]() is not storage:
            number = len(self.made_at)
            self.made_at.append(self.now)
            self._numbers[key] = (weakref.ref(storage, self._note_end(number)), number)

    def _note_end(self, number: int) -> Callable[[Any], None]:
        weak_self = weakref.ref(self)  # the callbacks live as long as the storages, which may outlive the trace

        def note(_: Any) -> None:
            clock = weak_self()
            if clock is not None:
                clock.freed_at[number] = clock.now

        return note

    def note_value(self, value: int, storage: torch.UntypedStorage) -> None:
        """Note that a storage has a value of the recording now."""
        reference, number = self._numbers.get(storage_key(storage), (None, _THERE_BEFORE))
        if reference is None or reference() is not storage or number == _THERE_BEFORE:
            return
        before = self._value_in.get(number)
        if before == value:
            return
        if before is not None:
            self.overwritten_at[before] = self.now
        self._value_in[number] = value
        self.values[value] = (number, self.made_at[number] if before is None else self.now)


def _storages_in(nested: Any) -> Iterator[torch.UntypedStorage]:
    for tensor in tensors_in(nested):
        yield from storages_of(tensor)


def trace_step(step: ProfiledStep, target: str, min_bytes: int) -> tuple[StepTrace, StorageLog]:
    """Run a step with a backward twice without data; return its trace and the log of its storages, and leave the model
    unchanged. The second run is of the forward alone, with autograd holding nothing: it shows which values others hold. Raises
    ProfileError or DataDependentError if the step can't run on meta, runs a backward within its forward, or doesn't do the same
    twice."""
    torch_private.require(torch_private.Feature.REMAT)  # ops are recorded, as it does
    refuse_scripted(step)
    tree = ModuleTree(step.model, step.streamed)
    with preserved(step.modules(), META, contents=False):
        whole = _run_whole(step, tree, target, max(1, min_bytes))
    with preserved(step.modules(), META, contents=False):
        alone, ends = _run_alone(step, tree, target)
    clock, num_forward_ops = whole.clock, whole.num_forward_ops
    if [work.name for work in clock.works[:num_forward_ops]] != [work.name for work in alone.works]:
        raise ProfileError(
            "a trace needs a step that does the same each time; found a forward that has run other ops when it ran again. Take "
            "out what changes from one forward to the next (a counter, a global cache, the time), or pass trace=False"
        )
    lifetimes = _lifetimes(whole, ends)
    parameters = dict.fromkeys(parameter for module in step.modules() for parameter in module.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    trace = StepTrace(
        model=type(step.model).__name__,
        inputs=", ".join(f"{dtype_name(tensor.dtype)}{list(tensor.shape)}" for tensor in step.input_tensors()),
        target=target,
        min_bytes=min_bytes,
        ops=tuple(clock.works),
        num_forward_ops=num_forward_ops,
        step=whole.step,
        op_places=tuple(clock.op_places),
        save_places=tuple(whole.saves.save_places),
        use_places=tuple(whole.saves.use_places),
        lifetimes=lifetimes,
        live_bytes=tuple(clock.live_bytes),
        base_bytes=clock.base_bytes,
        trainable_numel=sum(parameter.numel() for parameter in trained),
        trainable_bytes=sum(parameter.numel() * parameter.itemsize for parameter in trained),
        names=names_of(whole.recording, lifetimes),
        modules=whole.modules,
        backend_dependent=whole.backend_dependent,
    )
    return trace, whole.log


class _SavedValue(KeptHandle):
    """A saved tensor whose value counts."""

    __slots__ = ("node", "value")

    def __init__(self, tensor: Tensor, value: int, node: int) -> None:
        super().__init__(tensor)
        self.value, self.node = value, node


class TracedSaves:
    """Notes which values of at least `min_bytes` autograd saves and when it requests them, as `Rematerialize` would, and keeps
    all."""

    def __init__(self, recording: Recording, clock: OpClock, min_bytes: int) -> None:
        self._recording = recording
        self._clock = clock
        self.min_bytes = min_bytes
        self._versions: dict[int, int] = {}
        self._is_forward = True
        self.saves: list[int] = []
        self.nodes: list[int] = []
        self.save_places: list[int] = []
        self.uses: list[int] = []
        self.use_nodes: list[int] = []
        self.use_places: list[int] = []

    def pack(self, tensor: Tensor) -> KeptHandle:
        with torch_private.without_python_dispatch():
            self._clock.see_saved(tensor)
        if torch_private.backward_task() != -1:
            return KeptHandle(tensor)
        if type(tensor) not in PLAIN_TYPES and has_own_dispatch(tensor):
            with torch_private.without_dispatch_modes():
                return KeptHandle(tensor)
        with torch_private.without_python_dispatch():  # what is done here is no part of the forward
            return self._pack(tensor)

    def _pack(self, tensor: Tensor) -> KeptHandle:
        recording = self._recording
        if not is_range_of_bytes(tensor) or tensor.device != META:
            return KeptHandle(tensor)
        storage = tensor.untyped_storage()
        value = recording.find(storage)
        if value is None:
            return KeptHandle(tensor)  # it was there before
        root = recording.roots.get(value)
        if (root is not None and not root.is_inside) or storage.nbytes() < self.min_bytes:
            return KeptHandle(tensor)
        version = torch_private.version_of(tensor)
        if version and version > num_writes(recording, value):  # written to elsewhere, as by another thread
            value = recording.add_root(tensor, storage, is_inside=True)
            self._clock.note_value(value, storage)
        node = torch_private.node_number()
        self.saves.append(value)
        self.nodes.append(node)
        self.save_places.append(self._clock.now)
        recording.saved.append(value)
        recording.saved_at.append((len(recording.calls), len(recording.funcs)))
        if self._versions.setdefault(value, version) != version:
            return KeptHandle(tensor)  # it was written to behind the recorder's back
        return _SavedValue(tensor, value, node)

    def unpack(self, handle: KeptHandle) -> Tensor:
        """Note a use; return the tensor after checking that it was not written to."""
        if isinstance(handle, _SavedValue) and torch_private.backward_task() != -1:
            if self._is_forward:
                raise ProfileError(
                    "a trace needs one forward and then one backward; found a forward that runs a backward of its own (as for "
                    "the gradient of an input). Profile with trace=False"
                )
            self.uses.append(handle.value)
            self.use_nodes.append(handle.node)
            self.use_places.append(self._clock.now)
        return handle.unpack()

    def end_forward(self) -> None:
        self._is_forward = False


class _ModuleSpans(Gauge):
    """Notes which ops of a recording each module call has run."""

    def __init__(self, tree: ModuleTree, recording: Recording) -> None:
        super().__init__()
        self._tree = tree
        self._recording = recording
        self._open: list[int] = []
        self._calls: list[tuple[int, int, int]] = []

    def open(self, index: int) -> None:
        self._open.append(len(self._calls))
        self._calls.append((index, len(self._recording.calls), 0))

    def close(self, index: int) -> None:
        place = self._open.pop()
        self._calls[place] = (*self._calls[place][:2], len(self._recording.calls))

    def modules(self) -> Iterator[ModuleOps]:
        for index, begin, end in self._calls:
            if index != self._tree.outside:
                node = self._tree.nodes[index]
                yield ModuleOps(module=node.fqn, kind=type(node.module).__name__, begin=begin, end=end)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Whole:
    """What the run of the whole step has shown."""

    log: StorageLog
    clock: OpClock
    recording: Recording
    saves: TracedSaves
    step: Step
    num_forward_ops: int
    modules: tuple[ModuleOps, ...]
    backend_dependent: tuple[str, ...]


def _run_whole(step: ProfiledStep, tree: ModuleTree, target: str, min_bytes: int) -> _Whole:
    step = without_data(step)
    recording = Recording(CpuDevice(META))
    spans = _ModuleSpans(tree, recording)
    stack, backend_dependent = CallStack(tree, spans), dict[int, None]()
    log, clock, watch = _watching(step, tree, target, stack, recording)
    saves = TracedSaves(recording, clock, min_bytes)
    found: list[tuple[Step, int]] = []
    with (
        as_on_target(tree, target, lambda: backend_dependent.setdefault(stack.current)) as mode,
        ExitStack() as watching,
    ):
        watching.enter_context(ModuleTrail(recording))
        watching.enter_context(Recorder(recording, op_kinds(), default_generator, lambda *_: 0.0))
        watching.enter_context(watch)

        def forward_done() -> None:
            watching.close()
            found.append((step_of(recording, saves.saves, saves.nodes), clock.now))
            recording.close()
            clock.end_forward()
            saves.end_forward()
            watching.enter_context(watch)

        step.run(
            stack,
            packing=SavedTensorHooks(saves.pack, saves.unpack),
            forward_done=forward_done,
            backward_done=log.note_grads,
            at_node=mode.resume,
            explain=say_why_not,
        )
    clock.close()
    planned, num_forward_ops = found[0]
    return _Whole(
        log=log,
        clock=clock,
        recording=recording,
        saves=saves,
        step=replace(planned, uses=tuple(saves.uses), use_ends=ends_of(saves.use_nodes)),
        num_forward_ops=num_forward_ops,
        modules=tuple(spans.modules()),
        backend_dependent=tuple(tree.nodes[index].fqn for index in sorted(backend_dependent)),
    )


def _run_alone(step: ProfiledStep, tree: ModuleTree, target: str) -> tuple[OpClock, Mapping[int, int]]:
    """Return the clock, and for each storage freed in the forward how many ops had run by then."""
    step = replace(without_data(step), backward=False)
    stack, ends = CallStack(tree, Gauge()), dict[int, int]()
    _, clock, watch = _watching(step, tree, target, stack)
    with as_on_target(tree, target, nothing) as mode, watch:
        step.run(
            stack,
            packing=SavedTensorHooks(nothing, _refuse),  # autograd holds nothing
            forward_done=lambda: ends.update(clock.freed_at),
            at_node=mode.resume,
            explain=say_why_not,
        )
    clock.close()
    return clock, ends


def _watching(
    step: ProfiledStep, tree: ModuleTree, target: str, stack: CallStack, recording: Recording | None = None
) -> tuple[StorageLog, OpClock, OpWatch]:
    log, casts = StorageLog(step, rounding_bytes=rounding_bytes(target)), ParamCasts(step.resident_storages())
    log.follow(step, tree, stack, casts)
    there = (tensor.untyped_storage() for tensor in step.streamed.parameters)
    clock = OpClock(log, [*step.storages(), *there], recording)
    return log, clock, OpWatch(clock, casts)


def _refuse(packed: None) -> Tensor:
    raise ProfileError(
        "a trace needs one forward and then one backward; found a forward that asks for what autograd has saved. Profile with "
        "trace=False"
    )


def _lifetimes(whole: _Whole, ends: Mapping[int, int]) -> dict[int, Lifetime]:
    """Return the lifetimes of saved values, and of others of at least `min_bytes`."""
    clock, saves = whole.clock, whole.saves
    num_bytes, saved = whole.step.lineage.num_bytes, set(whole.step.saves)
    found: dict[int, Lifetime] = {}
    for value in sorted(clock.values):
        if value >= len(num_bytes) or (value not in saved and num_bytes[value] < saves.min_bytes):
            continue
        number, made_at = clock.values[value]
        freed_at = clock.overwritten_at.get(value, clock.freed_at.get(number, clock.now))
        released_at = min(freed_at, ends.get(number, freed_at))
        found[value] = Lifetime(made_at=made_at, released_at=released_at, freed_at=freed_at)
    return found
