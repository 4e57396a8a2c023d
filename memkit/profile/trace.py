"""`profile_memory(..., trace=True)`: one step on the meta device, op by op, in the form that plans are made from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

from torch import Tensor

from memkit import torch_private
from memkit.device import CpuDevice, default_generator
from memkit.errors import ProfileError
from memkit.hooks import SavedTensorHooks
from memkit.kept import KeptHandle
from memkit.plan import Lifetime, ModuleOps, StepTrace, ends_of
from memkit.plan import Step as PlannedStep
from memkit.profile.calls import CallStack
from memkit.profile.gauges import CUDA_ROUNDING_BYTES, NoGauge
from memkit.profile.op_clock import ClockMode, OpClock
from memkit.profile.restore import preserved
from memkit.profile.signatures import dtype_name
from memkit.profile.simulate import META
from memkit.profile.step import Step
from memkit.profile.storage_log import StorageLog
from memkit.profile.tree import ModuleTree
from memkit.profile.watch import LiveStorages
from memkit.profile.without_data import as_on_target, refuse_scripted, say_why_not, without_data
from memkit.recording.expected import num_writes
from memkit.recording.module_calls import ModuleTrail
from memkit.recording.ops import op_kinds
from memkit.recording.recorder import Recorder
from memkit.recording.recording import Recording, names_of, step_of
from memkit.storages import PLAIN_TYPES, is_range_of_bytes
from memkit.torch_state import has_own_dispatch


def trace_step(step: Step, target: str, min_bytes: int, log: StorageLog | None = None) -> StepTrace:
    """Run a step twice without data, and return its trace; the model is left unchanged.

    The second run is of the forward alone, with autograd holding nothing: it shows which values others hold.

    Args:
        step: a step with a backward.
        target: whose kernels to imitate, "cuda" or "cpu".
        min_bytes: smaller saved storages are not listed one by one.
        log: gets a moment for each op, if given.

    Raises:
        ProfileError: the step can't run on meta, runs a backward within its forward, or doesn't do the same twice.
        DataDependentError: it reads the value of a tensor.
    """
    torch_private.require(torch_private.Feature.REMAT)  # ops are recorded, as it does
    refuse_scripted(step)
    tree = ModuleTree(step.model, step.streamed)
    with preserved(step.modules(), META, contents=False):
        whole = _run_whole(step, tree, target, max(1, min_bytes), log)
    with preserved(step.modules(), META, contents=False):
        alone = _run_alone(step, tree, target)
    clock, num_forward_ops = whole.clock, whole.num_forward_ops
    names = [work.name for work in clock.works[:num_forward_ops]]
    if names != [work.name for work in alone.clock.works]:
        raise ProfileError(
            "a trace needs a step that does the same each time; found a forward that has run other ops when it ran again. Take "
            "out what changes from one forward to the next (a counter, a global cache, the time), or pass trace=False"
        )
    lifetimes = _lifetimes(whole, alone)
    trainable = [parameter for module in step.modules() for parameter in module.parameters() if parameter.requires_grad]
    trainable = list(dict.fromkeys(trainable))
    return StepTrace(
        model=type(step.model).__name__,
        inputs=", ".join(_described(tensor) for tensor in step.input_tensors()),
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
        trainable_numel=sum(parameter.numel() for parameter in trainable),
        trainable_bytes=sum(parameter.numel() * parameter.itemsize for parameter in trainable),
        names=names_of(whole.recording, lifetimes),
        modules=whole.modules,
        backend_dependent=whole.backend_dependent,
    )


def _described(tensor: Tensor) -> str:
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"


# What autograd saves


class _SavedValue(KeptHandle):
    """A saved tensor whose value counts."""

    __slots__ = ("node", "value")

    def __init__(self, tensor: Tensor, value: int, node: int) -> None:
        super().__init__(tensor)
        self.value, self.node = value, node


class SavedValues:
    """Notes which values autograd saves and when it requests them, as `Rematerialize` would, and keeps all of them.

    Args:
        recording: the recording of the forward's ops.
        clock: numbers the ops of the step.
        min_bytes: smaller storages don't count; at least 1.
    """

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
        """Note a save."""
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
        """Count uses from here."""
        self._is_forward = False


class _ModuleSpans(NoGauge):
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
        """Yield the calls, in the order in which they begin."""
        for index, begin, end in self._calls:
            if index != self._tree.outside:
                node = self._tree.nodes[index]
                yield ModuleOps(module=node.fqn, kind=type(node.module).__name__, begin=begin, end=end)


# The two runs


@dataclass(frozen=True, slots=True, kw_only=True)
class _Whole:
    """What the run of the whole step has shown."""

    clock: OpClock
    recording: Recording
    saves: SavedValues
    step: PlannedStep
    num_forward_ops: int
    modules: tuple[ModuleOps, ...]
    backend_dependent: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alone:
    """What the run of the forward alone has shown."""

    clock: OpClock
    ends: Mapping[int, int]
    """For each storage freed in it, how many ops had run by then."""


def _run_whole(step: Step, tree: ModuleTree, target: str, min_bytes: int, log: StorageLog | None) -> _Whole:
    step = without_data(step)
    recording = Recording(CpuDevice(META))
    clock = _clock_of(step, target, recording, log)
    saves = SavedValues(recording, clock, min_bytes)
    spans = _ModuleSpans(tree, recording)
    found: list[tuple[PlannedStep, int]] = []
    stack, backend_dependent = CallStack(tree, spans), dict[int, None]()
    if log is not None:
        log.follow(step, tree, stack)
    with (
        as_on_target(tree, target, lambda: backend_dependent.setdefault(stack.current)) as mode,
        ExitStack() as watching,
    ):
        watching.enter_context(ModuleTrail(recording))
        watching.enter_context(Recorder(recording, op_kinds(), default_generator, lambda *_: 0.0))
        watching.enter_context(ClockMode(clock))

        def forward_done() -> None:
            watching.close()
            found.append((step_of(recording, saves.saves, saves.nodes), clock.now))
            recording.close()
            clock.end_forward()
            saves.end_forward()
            watching.enter_context(ClockMode(clock))

        step.run(
            stack,
            packing=SavedTensorHooks(saves.pack, saves.unpack),
            forward_done=forward_done,
            backward_done=_nothing if log is None else log.note_grads,
            at_node=mode.resume,
            explain=say_why_not,
        )
    clock.close()
    planned, num_forward_ops = found[0]
    return _Whole(
        clock=clock,
        recording=recording,
        saves=saves,
        step=replace(planned, uses=tuple(saves.uses), use_ends=ends_of(saves.use_nodes)),
        num_forward_ops=num_forward_ops,
        modules=tuple(spans.modules()),
        backend_dependent=tuple(tree.nodes[index].fqn for index in sorted(backend_dependent)),
    )


def _run_alone(step: Step, tree: ModuleTree, target: str) -> _Alone:
    step = replace(without_data(step), backward=False)
    clock, ends = _clock_of(step, target), dict[int, int]()
    with as_on_target(tree, target, _nothing) as mode, ClockMode(clock):
        step.run(
            CallStack(tree, NoGauge()),
            packing=SavedTensorHooks(_let_go, _refuse),
            forward_done=lambda: ends.update(clock.freed_at),
            at_node=mode.resume,
            explain=say_why_not,
        )
    clock.close()
    return _Alone(clock=clock, ends=ends)


def _clock_of(step: Step, target: str, recording: Recording | None = None, log: StorageLog | None = None) -> OpClock:
    rounding_bytes = CUDA_ROUNDING_BYTES if target == "cuda" else 1
    live = LiveStorages(step.storages(), elsewhere=step.streamed.parameters, rounding_bytes=rounding_bytes, observer=log)
    there = (tensor.untyped_storage() for tensor in step.streamed.parameters)
    return OpClock(live, [*step.storages(), *there], recording, log)


def _nothing(*_: object) -> None:
    pass


def _let_go(tensor: Tensor) -> None:
    """A pack hook that makes autograd hold nothing."""


def _refuse(packed: None) -> Tensor:
    raise ProfileError(
        "a trace needs one forward and then one backward; found a forward that asks for what autograd has saved. Profile with "
        "trace=False"
    )


def _lifetimes(whole: _Whole, alone: _Alone) -> dict[int, Lifetime]:
    """Return the lifetimes of saved values, and of other values of at least that size."""
    clock, saves = whole.clock, whole.saves
    num_bytes, saved = whole.step.lineage.num_bytes, set(whole.step.saves)
    found: dict[int, Lifetime] = {}
    for value in sorted(clock.values):
        if value >= len(num_bytes) or (value not in saved and num_bytes[value] < saves.min_bytes):
            continue
        number, made_at = clock.values[value]
        freed_at = clock.overwritten_at.get(value, clock.freed_at.get(number, clock.now))
        released_at = min(freed_at, alone.ends.get(number, freed_at))
        found[value] = Lifetime(made_at=made_at, released_at=released_at, freed_at=freed_at)
    return found
