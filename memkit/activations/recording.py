"""What is remembered of one forward so that its values can be made again: calls to repeat, and the roots that they start from.

A recording holds no tensor of the forward but the roots that something dropped is made from. `recorder.py` writes it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memkit import torch_private
from memkit.activations.eligibility import is_range_of_bytes
from memkit.activations.recorded import Call, CostKey, tensors_in
from memkit.activations.settings import current_settings
from memkit.device.base import Device, Event
from memkit.kept import KeptHandle
from memkit.owners import owner_of
from memkit.plan import NO_OP, GrowingLineage
from memkit.storages import Geometry, byte_view
from memkit.torch_state import sharing_counters


class Root:
    """A value that nothing here makes: weakly known until something is to be made from it, held from then on."""

    __slots__ = ("alias", "is_inside", "is_lost", "lent", "num_bytes", "storage", "tensor", "version")

    def __init__(self, tensor: Tensor, storage: torch.UntypedStorage, version: int | None, *, is_inside: bool) -> None:
        owner = owner_of(storage)
        self.lent = None if owner is None else owner.lend(tensor)
        """Gives the tensor again, where its storage is another's at times."""
        self.tensor = weakref.ref(tensor)
        self.storage = weakref.ref(storage)
        self.num_bytes = storage.nbytes()
        self.version = version
        """Of the tensor's counter when it was seen; None where that is not known, as just after a write."""
        self.is_inside = is_inside
        """Whether it was made here, by what cannot run again, so that nobody else may hold it."""
        self.is_lost = False
        """Whether something else has been written where it was, or may have been."""
        self.alias: Tensor | None = None

    def living(self) -> Tensor | None:
        """Return the tensor, if it is alive, over the storage that it had, and nothing else was written there."""
        tensor = None if self.is_lost else self.tensor()
        return tensor if tensor is not None and tensor.untyped_storage() is self.storage() else None


class Anchor:
    """A value that is held so that others can be made from it."""

    __slots__ = ("alias", "version")

    def __init__(self, alias: Tensor, version: int | None) -> None:
        self.alias = alias
        self.version = version
        """Of the tensor's counter when it was made, None where an op has just written to it."""

    def is_unchanged(self) -> bool:
        """Tell whether nobody has written to it since."""
        return self.version is None or torch_private.version_of(self.alias) == self.version


class Recording:
    """What is remembered of one forward.

    Args:
        device: where its values are.
        known_s: what each op takes, if another forward has told.
        retained: roots and other values that a plan needs: they are held from the moment when they come to be.
        is_timed: whether to measure what each op takes.
        is_verified: whether to copy all that is made to host memory, to compare replays with it.
    """

    def __init__(
        self,
        device: Device,
        *,
        known_s: Sequence[float] = (),
        retained: frozenset[int] = frozenset(),
        is_timed: bool = False,
        is_verified: bool = False,
    ) -> None:
        self.device = device
        self.known_s = known_s
        self.retained = retained
        self.is_timed = is_timed
        self.times: list[tuple[int, CostKey, Event, Event]] = []
        """When ops have begun and ended: the number of the op, and what it has in common with others."""
        self.seconds: dict[int, float] = {}
        """What ops are thought to take, where `known_s` does not tell."""
        self.originals: dict[int, Tensor] | None = {} if is_verified else None
        """What each value was, in host memory."""
        self.settings = current_settings()
        self.calls: list[Call] = []
        self.funcs: list[Any] = []
        """Every op that was seen, made again or not: the sequence that tells one forward from another."""
        self.roots: dict[int, Root] = {}
        self.anchors: dict[int, Anchor] = {}
        """Values that are held though autograd did not save them, in the order in which they were made."""
        self.pinned: dict[int, KeptHandle] = {}
        """Saved values that cannot be made again, but from which something is."""
        self.hidden = set[int]()
        """Roots that may be written to without a trace, as the statistics of a batch norm are."""
        self.why_kept: dict[int, str] = {}
        """Why values are roots that an op has made, where a user may wonder."""
        self.unversioned: list[Root | Anchor] = []
        """What is held since the op that wrote to it: the counter is raised after that."""
        self.overwritten = set[int]()
        """Values over which an op has written. What was saved of them may be whole: writes to the parts of `unsafe_chunk` count
        for each part alone."""
        self.num_values = 0
        self.held_bytes = 0
        """Bytes of the roots and anchors that are held and that nobody else may hold."""
        self.current: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        """Which value is in which storage now, by the storage's key."""
        self.lent: dict[int, tuple[weakref.ref[torch.UntypedStorage]]] = {}
        """Storages that were seen and are not in `current`, since they may have another's bytes when they are met again."""
        self.lineage = GrowingLineage()
        """The ops and values, in numbers, as of the last `sync`."""
        self.modules: dict[int, str] = {}
        """The module in which an op ran, where that was watched."""

    def sync(self) -> None:
        """Bring the lineage up to date."""
        lineage, calls, known_s = self.lineage, self.calls, self.known_s
        for op in range(len(lineage.ins), len(calls)):
            call = calls[op]
            while len(lineage.maker) < call.first:
                lineage.add_root(self._root_bytes(len(lineage.maker)))
            notes = call.notes
            skipped = notes.written if notes is not None and notes.is_whole else ()
            seconds = known_s[op] if op < len(known_s) else self.seconds.get(op, 0.0)
            lineage.add_op(
                [source[1] for source in call.sources if source[1] not in skipped],
                call.outs_bytes,
                seconds,
                () if notes is None or notes.is_whole else notes.written,
            )
        while len(lineage.maker) < self.num_values:
            lineage.add_root(self._root_bytes(len(lineage.maker)))

    def _root_bytes(self, value: int) -> int:
        root = self.roots.get(value)
        return 0 if root is None else root.num_bytes  # an interrupt has left the number unused

    # Values

    def find(self, storage: torch.UntypedStorage) -> int | None:
        """Return the value that is in a storage now, None if the storage was never seen."""
        found = self.current.get(torch_private.storage_address(storage))
        return found[1] if found is not None and found[0]() is storage else None

    def was_there(self, storage: torch.UntypedStorage) -> bool:
        """Tell whether a storage that an op has returned is no new one, as that of what an op returns as it is."""
        found = self.current.get(torch_private.storage_address(storage)) or self.lent.get(
            torch_private.storage_address(storage)
        )
        return found is not None and found[0]() is storage

    def is_known(self, tensor: Tensor) -> bool:
        """Tell whether a tensor's storage was seen."""
        return self.find(tensor.untyped_storage()) is not None

    def value_of(self, tensor: Tensor) -> int:
        """Return the value that is in a tensor's storage now: a root if it was never seen."""
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
    ) -> int:
        """Return a new value that is in a tensor's storage from now on, and that nothing here makes.

        Args:
            is_inside: whether nobody else may hold it.
            is_written: whether it was just written, so that the tensor's counter is about to be raised.
            is_hidden: whether it may be written to without a trace.

        Raises:
            RuntimeError: the tensor is no range of bytes: what reads it cannot run again.
        """
        if not is_range_of_bytes(tensor):
            raise RuntimeError("what is no range of bytes is no value")
        value = self.num_values
        self.num_values = value + 1  # first: an interrupt leaves a number that is nobody's, and none that is two values'
        version = None if is_written or tensor.is_inference() else torch_private.version_of(tensor)
        base = torch_private.base_of(tensor)  # a view may be gone at once, as `weight.t()` is, and what it is of lives on
        root = self.roots[value] = Root(tensor if base is None else base, storage, version, is_inside=is_inside)
        if is_hidden:
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
        """What is in a tensor now may be written to without a trace, if it is a root."""
        storage = tensor.untyped_storage()
        value = self.find(storage)
        if value is None:
            self.add_root(tensor, storage, is_inside=False, is_hidden=True)
        elif value in self.roots:
            self.hidden.add(value)

    def num_writes(self, value: int) -> float:
        """Return how often ops have written to what a value is in, no bound if that began before."""
        self.sync()
        found = 0
        while True:
            maker = self.lineage.maker[value]
            if maker == NO_OP:
                return math.inf
            call = self.calls[maker]
            place = value - call.first - (0 if call.notes is None else len(call.notes.places))
            if call.notes is None or place < 0:
                return found
            found, value = found + 1, call.notes.written[place]

    def add_call(self, call: Call, storages: Sequence[torch.UntypedStorage]) -> range:
        """Return the values that a call has made, which are in these storages from now on."""
        value, current = call.first, self.current
        self.num_values = value + len(storages)  # first, as in `add_root`
        self.calls.append(call)
        for storage in storages:
            current[torch_private.storage_address(storage)] = (weakref.ref(storage), value)
            value += 1
        return range(call.first, value)

    def add_roots(self, results: Any, why_kept: str = "") -> None:
        """Note what an op has returned that is not run again, and why, where a user may wonder."""
        for tensor in tensors_in(results):
            storage = tensor.untyped_storage()
            if self.find(storage) is None:
                value = self.add_root(tensor, storage, is_inside=True)
                if why_kept:
                    self.why_kept[value] = why_kept

    # Roots

    def hold(self, value: int, *, counts: bool = True, is_in_dispatch: bool = False) -> bool:
        """Hold a root, because something is to be made from it; tell whether it is there to be held.

        Args:
            counts: whether nobody else counts its bytes.
            is_in_dispatch: whether an op is just being recorded.
        """
        root = self.roots[value]
        if root.alias is not None or root.lent is not None:
            return not root.is_lost
        tensor = root.living()
        if tensor is None:
            return False
        if value in self.hidden:
            self._copy_root(root, tensor)
            return True
        root.alias = _alias_in_dispatch(tensor) if is_in_dispatch else tensor.detach()
        if root.version is None and not tensor.is_inference():
            if is_in_dispatch:
                self.unversioned.append(root)
            else:
                root.version = torch_private.version_of(tensor)
        if root.is_inside and counts:
            self.held_bytes += root.num_bytes
        return True

    def _copy_root(self, root: Root, tensor: Tensor) -> None:
        """Hold a root as it is now, whatever is written to it later."""
        root.alias = Geometry.of(tensor).over(tensor.untyped_storage().clone())
        root.version = torch_private.version_of(root.alias)
        self.held_bytes += root.num_bytes

    def see_versions(self) -> None:
        """Take note of counters that have been raised by now, since the op that did it is over."""
        while self.unversioned:
            held = self.unversioned.pop()
            if held.alias is not None and held.version is None and not held.alias.is_inference():
                held.version = torch_private.version_of(held.alias)

    def hold_made(self, value: int, tensor: Tensor, *, is_written: bool = False) -> None:
        """Hold a value that an op has just made."""
        anchor = self.anchors[value] = Anchor(
            _alias_in_dispatch(tensor), None if is_written else torch_private.version_of(tensor)
        )
        if is_written:
            self.unversioned.append(anchor)
        self.held_bytes += tensor.untyped_storage().nbytes()

    def release(self, value: int) -> None:
        """Let go of a value that was held."""
        anchor = self.anchors.pop(value)
        self.held_bytes -= anchor.alias.untyped_storage().nbytes()

    def before_write(self, value: int) -> None:
        """An op is about to write over a value. If something is to be made from that, copy it first."""
        self.overwritten.add(value)
        pinned = self.pinned.get(value)
        if pinned is not None and pinned.is_unchanged():
            storage = pinned.unpack().untyped_storage()
            self.pinned[value] = KeptHandle(byte_view(storage).clone())
            self.held_bytes += storage.nbytes()
        anchor = self.anchors.get(value)
        if anchor is not None:
            copied = anchor.alias.untyped_storage().clone()
            self.anchors[value] = Anchor(Geometry.of(anchor.alias).over(copied), None)
        root = self.roots.get(value)
        if root is None:
            return
        if root.lent is not None:
            return  # its owner minds writes
        if root.alias is None and not (value in self.retained and self.hold(value, is_in_dispatch=True)):
            root.is_lost = True
            return
        assert root.alias is not None
        if value in self.hidden:
            return  # it is a copy
        if root.is_inside:
            self.held_bytes -= root.num_bytes
        self._copy_root(root, root.alias)

    def lose(self, value: int) -> None:
        """Something else may be where a value was, and it is too late to copy it."""
        self.overwritten.add(value)
        if value in self.anchors:
            self.release(value)
        root = self.roots.get(value)
        if root is not None and value not in self.hidden:
            root.is_lost = True

    def retained_bytes(self) -> dict[int, int]:
        """Return the roots that are gone unless they are held on purpose, and what that takes.

        Made here, or written over; or gone by now: then they take nothing if the storage is somebody else's.
        """
        found = {}
        for value, root in self.roots.items():
            if root.is_inside or root.is_lost:
                found[value] = root.num_bytes
            elif root.alias is None and root.lent is None and root.living() is None:
                found[value] = 0 if root.storage() is not None else root.num_bytes
        return found

    def root_storage(self, value: int) -> torch.UntypedStorage:
        """Return the storage of a root that is held, and see that it is as it was.

        Raises:
            RuntimeError: it was written to, or resized, behind the recorder's back.
        """
        root = self.roots[value]
        if root.lent is not None:
            return root.lent().untyped_storage()
        alias = root.alias
        assert alias is not None, "a root that is needed for a replay is not held"
        version = None if root.version is None else torch_private.version_of(alias)
        if version != root.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{alias.type()} {list(alias.size())}], from which Rematerialize makes saved tensors again, is at version "
                f"{version}; expected version {root.version} instead. Hint: write to it after the backward, or mark "
                "with memkit.keep what is computed from it."
            )
        if root.is_lost:
            raise RuntimeError(
                f"one of the variables needed for gradient computation: [{alias.type()} {list(alias.size())}], from which "
                "Rematerialize makes saved tensors again, belongs to an op that has returned it again since, and may have "
                "written to it. Hint: let the op return a copy, or mark with memkit.keep what is computed from what it returns."
            )
        storage = alias.untyped_storage()
        if storage.nbytes() < root.num_bytes:
            raise RuntimeError(
                f"a tensor of {root.num_bytes} bytes, from which Rematerialize makes saved tensors again, has only "
                f"{storage.nbytes()} bytes now: was it resharded? Mark with memkit.keep what is computed from it."
            )
        return storage

    # The end

    def read_times(self) -> dict[CostKey, float]:
        """Enter what the ops took, if they were timed, and return it; makes the host wait for them."""
        found: dict[CostKey, float] = {}
        if self.times:
            self.device.synchronize()
            self.sync()
            seconds = self.lineage.seconds
            for op, key, start, end in self.times:
                found[key] = start.elapsed_s(end)
                if op < len(seconds):
                    seconds[op] = found[key]
        self.times.clear()
        self.is_timed = False
        return found

    def times_alone(self) -> Recording:
        """Return a recording that has the times of this one, and holds none of its values."""
        self.sync()
        recording = Recording(self.device, is_timed=True)
        recording.lineage, recording.times = self.lineage, self.times
        return recording

    def close(self) -> None:
        """The forward is over: nothing more is recorded."""
        self.see_versions()
        self.current.clear()
        self.lent.clear()


def _alias_in_dispatch(tensor: Tensor) -> Tensor:
    """Return an alias of a tensor that shares its version counter, though autograd's layers are off, as they are in a mode."""
    with sharing_counters(), torch_private.without_python_dispatch(), torch.no_grad():
        return tensor.detach()
