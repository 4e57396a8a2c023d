"""`Recording`: the calls of a forward and the roots that they start from. It holds no tensor but the roots of dropped values.
`recorder.py` writes it; `step_of` turns it into the numbers that `plan/` works on."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memkit.core import torch_private
from memkit.core.kept import KeptHandle
from memkit.core.owners import owner_of
from memkit.core.tensors import Geometry, byte_view, is_range_of_bytes
from memkit.core.torch_state import sharing_counters
from memkit.device.base import Device, Event
from memkit.plan import NO_OP, Action, GrowingLineage, Step, ends_of
from memkit.recording.recorded import CostKey, OpCall, tensors_in

if TYPE_CHECKING:
    from memkit.recording.expected import Expected

Setting = tuple[Callable[[], Any], Callable[[Any], None]]  # reads it (often, so it is not Python); sets it


def _fp32_precision(backend: str, op: str, place: Any) -> Setting:
    return partial(torch_private.fp32_precision_of, backend, op), partial(setattr, place, "fp32_precision")


def _reduced_precision(dtype: str) -> Setting:
    name, matmul = f"allow_{dtype}_reduced_precision_reduction", torch.backends.cuda.matmul
    return getattr(torch_private, f"get_cublas_{name}"), partial(setattr, matmul, name)


@functools.cache
def _settings() -> tuple[Setting, ...]:
    cuda: Any = torch.backends.cuda
    cudnn: Any = torch.backends.cudnn
    mkldnn: Any = torch.backends.mkldnn
    return (
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        *((getattr(torch_private, f"get_{name}"), getattr(torch_private, f"set_{name}")) for name in torch_private.SWITCHES),
        *map(_reduced_precision, ("fp16", "bf16")),
        _fp32_precision("cuda", "matmul", cuda.matmul),
        *(_fp32_precision("cuda", op, getattr(cudnn, op)) for op in ("conv", "rnn")),
        *(_fp32_precision("mkldnn", op, getattr(mkldnn, op)) for op in ("matmul", "conv")),
        *(
            (getattr(torch_private, f"get_{name}_sdp_enabled"), getattr(cuda, f"enable_{name}_sdp"))
            for name in torch_private.ATTENTIONS
        ),
    )


Settings = tuple[Any, ...]


@functools.cache
def setting_getters() -> tuple[partial[Any], ...]:
    return tuple(partial(get) for get, _ in _settings())


def current_settings() -> Settings:
    return tuple(map(partial.__call__, setting_getters()))


@contextmanager
def with_settings(wanted: Settings) -> Iterator[None]:
    found = current_settings()
    try:
        try:
            change_settings(found, wanted)
            yield
        finally:
            change_settings(wanted, found)
    finally:
        change_settings(current_settings(), found)  # again, where an interrupt came in between


def change_settings(found: Settings, wanted: Settings, also: tuple[Setting, ...] = ()) -> None:
    """Set the wanted settings that differ from those found; may be called again. Those `also` set come first."""
    for (_, change), before, after in zip((*also, *_settings()), found, wanted, strict=True):
        if before != after:
            change(after)


_MOST_STATISTICS = 2**16  # larger buffers are not taken for statistics (channels)
recordings_over: weakref.WeakValueDictionary[int, Recording] = weakref.WeakValueDictionary()
"""By id, recordings of finished forwards with living graphs: they copy values before a later forward overwrites them."""


class Root:
    """A value that no recorded op makes: referred to weakly, and held once something is to be recomputed from it."""

    __slots__ = ("alias", "is_inside", "is_lost", "lent", "num_bytes", "seen", "storage", "tensor", "version")

    def __init__(self, tensor: Tensor, storage: torch.UntypedStorage, version: int | None, *, is_inside: bool) -> None:
        owner = owner_of(storage)
        self.lent = None if owner is None else owner.lend(tensor)  # returns the tensor again, if its contents change at times
        self.tensor = weakref.ref(tensor)
        self.storage = weakref.ref(storage)
        self.num_bytes = storage.nbytes()
        self.version = version  # when it was seen; None between a write and the next op, and if it counts no writes
        self.seen: int | None = None  # the tensor's version once a copy is held: `version` is then the copy's
        self.is_inside = is_inside  # an op that can't run again made it in the forward, so nothing else may hold it
        self.is_lost = False  # it was or may have been overwritten
        self.alias: Tensor | None = None

    def living(self) -> Tensor | None:
        """Return the tensor, or the held alias, if it has the same storage and contents; else None."""
        tensor = self.tensor() if self.alias is None else self.alias
        if tensor is None or (self.alias is None and tensor.untyped_storage() is not self.storage()):
            return None
        is_as_seen = not self.is_lost and (self.version is None or torch_private.version_of(tensor) == self.version)
        return tensor if is_as_seen else None

    @property
    def is_rewritten(self) -> bool:
        """The tensor is alive and was written to since it was seen. Parameters don't count: they may be stepped within the
        backward, behind their last use, and autograd itself refuses earlier writes."""
        tensor, version = self.tensor(), self.version if self.seen is None else self.seen
        if tensor is None or version is None or tensor.requires_grad:
            return False
        return torch_private.version_of(tensor) != version

    def held_storage(self) -> torch.UntypedStorage:
        if self.lent is not None:
            return self.lent().untyped_storage()
        alias = self.alias
        assert alias is not None, "a root that is needed for a replay is not held"
        version = None if self.version is None else torch_private.version_of(alias)
        if version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{alias.type()} {list(alias.size())}], from which Rematerialize makes saved tensors again, is at version "
                f"{version}; expected version {self.version} instead. Hint: write to it after the backward, or mark "
                "with memkit.keep what is computed from it."
            )
        if self.is_lost:
            raise RuntimeError(
                f"one of the variables needed for gradient computation: [{alias.type()} {list(alias.size())}], from which "
                "Rematerialize makes saved tensors again, belongs to an op that has returned it again since, and may have "
                "written to it. Hint: let the op return a copy, or mark with memkit.keep what is computed from what it returns."
            )
        storage = alias.untyped_storage()
        if storage.nbytes() < self.num_bytes:
            raise RuntimeError(
                f"a tensor of {self.num_bytes} bytes, from which Rematerialize makes saved tensors again, has only "
                f"{storage.nbytes()} bytes now: was it resharded since, in the midst of a forward or a backward? Mark with "
                "memkit.keep what is computed from it."
            )
        return storage


def retained_bytes(roots: Mapping[int, Root]) -> dict[int, int]:
    """Return the bytes of roots that would be freed unless held. Holding the caller's storage takes none."""
    found = {}
    for value, root in roots.items():
        if root.is_inside or root.is_lost:
            found[value] = root.num_bytes
        elif root.alias is None and root.lent is None and root.living() is None:
            found[value] = 0 if root.storage() is not None else root.num_bytes
    return found


def rewritten_bytes(roots: Mapping[int, Root], overwritten: Container[int]) -> dict[int, int]:
    """Return the bytes of the roots written to since they were seen, without those `overwritten` by recorded ops."""
    return {value: root.num_bytes for value, root in roots.items() if root.is_rewritten and value not in overwritten}


def may_be_statistics(tensor: Tensor) -> bool:
    """Tell whether a tensor from before the forward may be a norm's statistics, whose writes raise no version counter."""
    is_vector = tensor.dim() == 1 and len(tensor) <= _MOST_STATISTICS
    return is_vector and tensor.is_floating_point() and not tensor.requires_grad


class Recording:
    """The record of one forward. It holds the `retained` values from when they are made, and expects writes to the `rewritten`
    roots before the backward. `is_verified` copies all values to host memory, to compare replays with them."""

    def __init__(
        self,
        device: Device,
        *,
        known_s: Sequence[float] = (),
        retained: frozenset[int] = frozenset(),
        rewritten: Iterable[int] = (),
        is_timed: bool = False,
        is_verified: bool = False,
    ) -> None:
        self.device = device
        self.known_s = known_s
        self.retained = retained
        self.is_timed = is_timed
        self.times: list[tuple[int, CostKey, Event, Event]] = []  # of timed ops: number, `cost_key`, start, end
        self.call_times: list[tuple[int, Event, Event]] = []  # of timed compiled modules: noted call, start, end
        self.seconds: dict[int, float] = {}  # estimated seconds of ops that `known_s` doesn't have
        self.originals: dict[int, Tensor] | None = {} if is_verified else None  # the contents of each value, in host memory
        self.settings = current_settings()
        self.calls: list[OpCall] = []
        self.funcs: list[Any] = []  # every op that was seen, recomputed or not: the sequence distinguishes forwards
        self.roots: dict[int, Root] = {}
        self.is_gathering = False  # parameters are being gathered, during which nothing is recorded
        self.is_over = False  # nothing more is recorded, so that writes may go unseen
        self.anchors: Any = None  # unsaved values that a plan needs: `memkit.activations.recomputing.sources`
        self.pinned: dict[int, KeptHandle] = {}
        """Saved values that can't be recomputed, but others are recomputed from them."""
        self.hidden = set(rewritten)  # roots held as copies: rewritten, or with unseen writes (batch norm statistics)
        self.why_kept: dict[int, str] = {}  # the reasons for users why values of ops are roots
        self.unversioned: list[Any] = []  # roots and handles of anchors that the last op wrote: their versions rise after it
        self.overwritten = set[int]()  # a saved tensor of one may be valid: parts of `unsafe_chunk` have own counters
        self.expected: Expected | None = None
        self.num_values = 0
        self.held_bytes = 0  # bytes of the roots that only this recording holds
        self.current: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}  # by address
        self.lent: dict[int, tuple[weakref.ref[torch.UntypedStorage]]] = {}  # not in `current`: their owner may change them
        self.lineage = GrowingLineage()  # the ops and values in numbers, as of the last `sync`
        self.saved: list[int] = []  # the value of each counted save
        self.saved_at: list[tuple[int, int]] = []  # the numbers of recorded ops and of all ops before each counted save
        self.effects: list[tuple[int, int, int]] = []  # number in `funcs`, from 1; storage written to, or 0; old value, or -1
        self.modules: dict[int, str] = {}

    def sync(self) -> None:
        lineage, calls, known_s = self.lineage, self.calls, self.known_s
        for op in range(len(lineage.ins), len(calls)):
            call = calls[op]
            self._sync_roots(call.first)
            unread, taken = (call.written, ()) if call.is_whole else ((), call.written)
            seconds = known_s[op] if op < len(known_s) else self.seconds.get(op, 0.0)
            ins = [source[1] for source in call.sources if source[1] not in unread]
            lineage.add_op(ins, call.outs_bytes, seconds, taken)
        self._sync_roots(self.num_values)

    def _sync_roots(self, end: int) -> None:
        found = map(self.roots.get, range(len(self.lineage.maker), end))
        # Without a root, an interrupt has left the number unused, or the op that made the value was not recorded.
        self.lineage.add_roots([0 if root is None else root.num_bytes for root in found])

    # Values

    def find(self, storage: torch.UntypedStorage) -> int | None:
        found = self.current.get(torch_private.storage_address(storage))
        return found[1] if found is not None and found[0]() is storage else None

    def was_there(self, storage: torch.UntypedStorage) -> bool:
        """Tell whether the storage of a result existed before, as when an op returns its argument."""
        address = torch_private.storage_address(storage)
        found = self.current.get(address) or self.lent.get(address)
        return found is not None and found[0]() is storage

    def is_known(self, tensor: Tensor) -> bool:
        return self.find(tensor.untyped_storage()) is not None

    def value_of(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        value = self.find(storage)
        return self.add_root(tensor, storage, is_inside=False) if value is None else value

    def add_root(
        self,
        tensor: Tensor,
        storage: torch.UntypedStorage,
        *,
        is_inside: bool,
        is_written: bool = False,
        is_hidden: bool = False,
        number: int = -1,
    ) -> int:
        """Return a new value for the current contents of a storage, which no recorded op makes; RuntimeError if these are no
        range of bytes. It `is_inside` if the forward made it, so that nothing else may hold it; `is_written` if its version
        counter is about to be raised; `is_hidden` if writes may not raise that. `number` is known ahead and unused."""
        if not is_range_of_bytes(tensor):
            raise RuntimeError("what is no range of bytes is no value")
        value = number
        if number < 0:
            value = self.num_values
            self.num_values = value + 1  # first: an interrupt may leave a number unused, but none used twice
        version = None if is_written or tensor.is_inference() else torch_private.version_of(tensor)
        base = torch_private.base_of(tensor)  # a view may die at once, as `weight.t()` does, while its base lives on
        whole = tensor if base is None else base
        root = self.roots[value] = Root(whole, storage, version, is_inside=is_inside)
        if is_written:
            self.unversioned.append(root)
        if is_hidden or (not is_inside and type(whole) is Tensor and may_be_statistics(whole)):
            self.hidden.add(value)
        if root.lent is None:
            self.current[torch_private.storage_address(storage)] = (weakref.ref(storage), value)
        else:
            self.current.pop(torch_private.storage_address(storage), None)
            self.lent[torch_private.storage_address(storage)] = (weakref.ref(storage),)
        if value in self.retained:
            self.hold(value, is_in_dispatch=True)
        return value

    def note_hidden(self, tensor: Tensor) -> None:
        """Note that writes to the root in a tensor may raise no version counter."""
        storage = tensor.untyped_storage()
        value = self.find(storage)
        if value is None:
            self.add_root(tensor, storage, is_inside=False, is_hidden=True)
        elif value in self.roots:
            self.hidden.add(value)

    def add_call(self, call: OpCall, storages: Sequence[torch.UntypedStorage]) -> range:
        current = self.current
        self.num_values = call.first + len(storages)  # first, as in `add_root`
        self.calls.append(call)
        for value, storage in enumerate(storages, start=call.first):
            current[torch_private.storage_address(storage)] = (weakref.ref(storage), value)
        return range(call.first, self.num_values)

    def add_roots(self, results: Any, why_kept: str = "") -> None:
        """Note the results of an op that is not run again, and the reason for users."""
        for tensor in tensors_in(results):
            storage = tensor.untyped_storage()
            if self.find(storage) is None:
                value = self.add_root(tensor, storage, is_inside=True)
                if why_kept:
                    self.why_kept[value] = why_kept

    # Roots

    def hold(self, value: int, *, counts: bool = True, is_in_dispatch: bool = False) -> bool:
        """Hold a root because something is to be recomputed from it; tell whether it is still there."""
        root = self.roots[value]
        if root.lent is not None:
            return not root.is_lost
        if self.unversioned and not is_in_dispatch:
            self.see_versions()
        tensor = root.living()
        if tensor is None or root.alias is not None:
            return tensor is not None
        if self.is_over and (value in self.hidden or tensor.is_inference()):
            return False  # no counter shows whether it was written to
        if value in self.hidden:
            if tensor.untyped_storage().nbytes() < root.num_bytes:  # emptied meanwhile: there is nothing to copy
                return False
            self._copy_root(root, tensor)
            return True
        if is_in_dispatch:  # below autograd, where an alias would count its own writes
            with sharing_counters(), torch_private.without_python_dispatch(), torch.no_grad():
                root.alias = tensor.detach()
        else:
            root.alias = tensor.detach()
        if root.is_inside and counts:
            self.held_bytes += root.num_bytes
        return True

    def _copy_root(self, root: Root, tensor: Tensor) -> None:
        root.seen = root.version if root.seen is None else root.seen
        root.alias = Geometry.of(tensor).over(tensor.untyped_storage().clone())
        root.version = torch_private.version_of(root.alias)
        self.held_bytes += root.num_bytes

    def see_versions(self) -> None:
        """Note the version counters that were raised after the op that wrote."""
        while self.unversioned:
            held = self.unversioned.pop()
            tensor = held.living() if isinstance(held, Root) else held.alias
            if tensor is not None and held.version is None and not tensor.is_inference():
                held.version = torch_private.version_of(tensor)

    def hold_made(self, value: int, tensor: Tensor, *, is_written: bool = False) -> None:
        """Hold a value that an op has just made, unless later writes to it would go unseen."""
        if self.anchors is not None and not tensor.is_inference():
            held = self.anchors.hold(value, tensor)
            if is_written:
                held.version = None
                self.unversioned.append(held)

    def before_write_to(self, target: Tensor) -> bool:
        """Note that an op is about to write to a tensor; tell whether the forward made its storage."""
        value = self.value_of(target)
        root = self.roots.get(value)
        self.note_effect(target, value)
        if self.expected is not None and value in self.expected.sources:  # no op was recorded that could recompute it
            self.pinned.setdefault(value, KeptHandle(byte_view(target.untyped_storage())))
        self.before_write(value)
        return root is None or root.is_inside

    def add_written(self, targets: Sequence[Tensor], are_inside: Sequence[bool], why_kept: str = "") -> None:
        for target, is_inside in zip(targets, are_inside, strict=True):
            value = self.add_root(target, target.untyped_storage(), is_inside=is_inside, is_written=True)
            if why_kept:
                self.why_kept[value] = why_kept

    def note_effect(self, target: Tensor | None = None, value: int = -1) -> None:
        """Note that an op writes to a tensor, or may have any effect."""
        storage = None if target is None else target.untyped_storage()
        address = 0 if storage is None else torch_private.storage_address(storage)
        self.effects.append((len(self.funcs), address, value))
        for over in () if storage is None else recordings_over.valuerefs():  # their backwards need what forwards have read
            if storage is not None and (other := over()) is not None and (read := other.find(storage)) is not None:
                other.current.pop(address, None)  # copied once
                other.before_write(read)

    def before_write(self, value: int) -> None:
        """Called before an op overwrites a value: copy the value if something is to be recomputed from it."""
        self.overwritten.add(value)
        pinned = self.pinned.get(value)
        if pinned is not None and pinned.is_unchanged():
            storage = pinned.unpack().untyped_storage()
            self.pinned[value] = KeptHandle(byte_view(storage).clone())
            self.held_bytes += storage.nbytes()
        if self.anchors is not None and value in self.retained:
            self.anchors.copy(value)
        root = self.roots.get(value)
        if root is None or root.lent is not None:
            return  # the owner of a lent one handles writes
        if root.alias is None and not (value in self.retained and self.hold(value, is_in_dispatch=True)):
            root.is_lost = True
            return
        alias = root.living()
        if alias is None or value in self.hidden:
            return  # it was written to unseen, or is a copy
        if root.is_inside:
            self.held_bytes -= root.num_bytes
        self._copy_root(root, alias)

    def lose(self, tensor: Tensor, why_kept: str) -> None:
        """Note that a tensor may have been written to, too late to copy its value."""
        value = self.find(tensor.untyped_storage())
        if value is None:
            return
        self.overwritten.add(value)
        if self.anchors is not None and value in self.retained:
            self.anchors.release(value)
        root = self.roots.get(value)
        if root is not None and (root.alias is None or value not in self.hidden):
            root.is_lost = True
        self.add_written([tensor], [root is None or root.is_inside], why_kept)

    def root_storage(self, value: int) -> torch.UntypedStorage:
        if value not in self.roots:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a saved "
                "tensor, from which others are recomputed. Hint: write to it after the backward, or mark with memkit.keep what "
                "is computed from it."
            )
        return self.roots[value].held_storage()

    # The end

    @property
    def largest_bytes(self) -> int:
        made = (sum(call.outs_bytes) for call in self.calls)
        return max((*made, *(root.num_bytes for root in self.roots.values() if root.is_inside)), default=0)

    def read_times(self) -> tuple[dict[CostKey, float], dict[int, float]]:
        """Store the seconds of timed ops, and return them by `cost_key`: the median, since now and then an op waits for
        something else. Return also the seconds of compiled modules, by the indices of their calls. The host waits for all."""
        if self.times or self.call_times:
            self.device.synchronize()
        alike = dict[CostKey, list[float]]()
        for _, key, start, end in self.times:
            alike.setdefault(key, []).append(start.elapsed_s(end))
        found = {key: median(taken_s) for key, taken_s in alike.items()}
        self.sync()
        for op, key, _, _ in self.times:
            if op < len(self.lineage.seconds):
                self.lineage.seconds[op] = found[key]
        return found, {place: start.elapsed_s(end) for place, start, end in self.call_times}

    def times_alone(self) -> Recording:
        self.sync()
        recording = Recording(self.device, is_timed=True)
        recording.lineage, recording.times, recording.call_times = self.lineage, self.times, self.call_times
        return recording

    def close(self, *, may_drop: bool = False) -> None:
        """Called at the end of the forward. With `may_drop`, more values may be dropped later."""
        self.see_versions()
        if may_drop:  # copy the roots that an op has read and that may be written to unseen from now on
            self.sync()
            for value in self.hidden.intersection(chain.from_iterable(self.lineage.ins)) & self.roots.keys():
                self.hold(value)
        self.is_over = True
        self.lent.clear()
        recordings_over[id(self)] = self


def step_of(
    recording: Recording, saves: Sequence[int], nodes: Sequence[int], marks: Mapping[int, Action | None] | None = None
) -> Step:
    """Return the step of a finished forward. Until a backward was seen, requests are assumed to come in reverse order."""
    recording.sync()
    lineage = recording.lineage.frozen()
    asked = {} if marks is None else marks
    unmade = frozenset(value for value in saves if lineage.maker[value] == NO_OP)
    return Step(
        lineage=lineage,
        saves=tuple(saves),
        uses=tuple(reversed(saves)),
        use_ends=ends_of(nodes[::-1]),
        fixed=unmade | {value for value, mark in asked.items() if mark is Action.KEEP},
        dropped=frozenset(value for value, mark in asked.items() if mark is Action.RECOMPUTE),
        moved=frozenset(value for value, mark in asked.items() if mark is Action.OFFLOAD),
        retained_bytes=retained_bytes(recording.roots),
        why_kept=recording.why_kept,
    )


def names_of(recording: Recording, values: Iterable[int]) -> dict[int, tuple[str, str]]:
    recording.sync()
    maker, calls, modules = recording.lineage.maker, recording.calls, recording.modules
    made = ((value, maker[value]) for value in values if maker[value] != NO_OP)
    return {value: (str(calls[op].func), modules.get(op, "")) for value, op in made}
