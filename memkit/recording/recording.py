"""What is remembered of one forward so that its values can be recomputed: calls to repeat, and the roots that they start from.

A recording holds no tensor of the forward but the roots that something dropped is made from. `recorder.py` writes it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memkit import torch_private
from memkit.device.base import Device, Event
from memkit.kept import KeptHandle
from memkit.plan import GrowingLineage
from memkit.recording.recorded import Call, CostKey, tensors_in
from memkit.recording.roots import Held, Holder, Root, alias_in_dispatch, written_error
from memkit.recording.settings import current_settings
from memkit.storages import Geometry, byte_view, is_range_of_bytes

if TYPE_CHECKING:
    from memkit.recording.expected import Expected


_MOST_STATISTICS = 2**16
"""Of so many channels at most."""


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
        self.call_times: list[tuple[int, Event, Event]] = []
        """When compiled modules have begun and ended: the place of the call among those that are noted."""
        self.seconds: dict[int, float] = {}
        """What ops are thought to take, where `known_s` does not tell."""
        self.originals: dict[int, Tensor] | None = {} if is_verified else None
        """What each value was, in host memory."""
        self.settings = current_settings()
        self.calls: list[Call] = []
        self.funcs: list[Any] = []
        """Every op that was seen, recomputed or not: the sequence that tells one forward from another."""
        self.roots: dict[int, Root] = {}
        self.is_gathering = False
        """Whether parameters are being gathered, which is not recorded."""
        self.holder: Holder | None = None
        """Holds values that are made here and that a plan needs, though autograd did not save them."""
        self.pinned: dict[int, KeptHandle] = {}
        """Saved values that cannot be recomputed, but from which something is."""
        self.hidden = set[int]()
        """Roots that may be written to without a trace, as the statistics of a batch norm are."""
        self.why_kept: dict[int, str] = {}
        """Why values are roots that an op has made, where a user may wonder."""
        self.unversioned: list[Held] = []
        """What is held since the op that wrote to it: the counter is raised after that."""
        self.overwritten = set[int]()
        """Values over which an op has written. What was saved of them may be whole: writes to the parts of `unsafe_chunk` count
        for each part alone."""
        self.expected: Expected | None = None
        """What is known ahead: see `memkit.recording.expected`."""
        self.num_values = 0
        self.held_bytes = 0
        """Bytes of the roots that are held here and by nothing else."""
        self.current: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        """Which value is in which storage now, by the storage's key."""
        self.lent: dict[int, tuple[weakref.ref[torch.UntypedStorage]]] = {}
        """Storages that were seen and are not in `current`, since they may have another's bytes when they are met again."""
        self.lineage = GrowingLineage()
        """The ops and values, in numbers, as of the last `sync`."""
        self.saved: list[int] = []
        """The value of each save that counts."""
        self.saved_at: list[tuple[int, int]] = []
        """For each, how many ops to repeat, and how many of any kind, were before it."""
        self.effects: list[tuple[int, int, int]] = []
        """What ops did beside making new values: the number of the op among `funcs`, counted from 1; the storage written to, by
        its address; and the value that was there, -1 if it is not known. An address of 0 stands for anything at all."""
        self.modules: dict[int, str] = {}
        """The module in which an op ran, where that was watched."""

    def sync(self) -> None:
        """Bring the lineage up to date."""
        lineage, calls, known_s = self.lineage, self.calls, self.known_s
        for op in range(len(lineage.ins), len(calls)):
            call = calls[op]
            self._sync_roots(call.first)
            notes = call.notes
            skipped = notes.written if notes is not None and notes.is_whole else ()
            seconds = known_s[op] if op < len(known_s) else self.seconds.get(op, 0.0)
            lineage.add_op(
                [source[1] for source in call.sources if source[1] not in skipped],
                call.outs_bytes,
                seconds,
                () if notes is None or notes.is_whole else notes.written,
            )
        self._sync_roots(self.num_values)

    def _sync_roots(self, end: int) -> None:
        found = map(self.roots.get, range(len(self.lineage.maker), end))
        # Where there is none, an interrupt has left the number unused, or no op was recorded that has made the value.
        self.lineage.add_roots([0 if root is None else root.num_bytes for root in found])

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
        number: int = -1,
    ) -> int:
        """Return a new value that is in a tensor's storage from now on, and that nothing here makes.

        Args:
            is_inside: whether it was made here, so that nothing else may hold it.
            is_written: whether it was just written, so that the tensor's counter is about to be raised.
            is_hidden: whether it may be written to without a trace.
            number: that of the value, which no other has, where it is known ahead; by default the next one.

        Raises:
            RuntimeError: the tensor is no range of bytes: what reads it cannot run again.
        """
        if not is_range_of_bytes(tensor):
            raise RuntimeError("what is no range of bytes is no value")
        value = number
        if number < 0:
            value = self.num_values
            self.num_values = value + 1  # first: an interrupt leaves a number that no value has, and none that two have
        version = None if is_written or tensor.is_inference() else torch_private.version_of(tensor)
        base = torch_private.base_of(tensor)  # a view may be gone at once, as `weight.t()` is, and what it is of lives on
        whole = tensor if base is None else base
        root = self.roots[value] = Root(whole, storage, version, is_inside=is_inside)
        if is_hidden or (not is_inside and type(whole) is Tensor and _may_be_statistics(whole)):
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

    def add_call(self, call: Call, storages: Sequence[torch.UntypedStorage]) -> range:
        """Return the values that a call has made, which are in these storages from now on."""
        current = self.current
        self.num_values = call.first + len(storages)  # first, as in `add_root`
        self.calls.append(call)
        for value, storage in enumerate(storages, start=call.first):
            current[torch_private.storage_address(storage)] = (weakref.ref(storage), value)
        return range(call.first, self.num_values)

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
            counts: whether its bytes are counted nowhere else.
            is_in_dispatch: whether an op is just being recorded.
        """
        root = self.roots[value]
        if root.alias is not None or root.lent is not None:
            return not root.is_lost
        tensor = root.living()
        if tensor is None:
            return False
        if value in self.hidden:
            if tensor.untyped_storage().nbytes() < root.num_bytes:  # emptied meanwhile: there is nothing to copy
                return False
            self._copy_root(root, tensor)
            return True
        root.alias = alias_in_dispatch(tensor) if is_in_dispatch else tensor.detach()
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
        """Hold a value that an op has just made, unless nothing tells whether it is written to later."""
        if self.holder is not None and not tensor.is_inference():
            held = self.holder.hold(value, tensor)
            if is_written:
                held.version = None
                self.unversioned.append(held)

    def before_write_to(self, target: Tensor) -> bool:
        """Note that an op is about to write to a tensor; tell whether its storage was made here."""
        value = self.value_of(target)
        root = self.roots.get(value)
        self.note_effect(target, value)
        if self.expected is not None and value in self.expected.sources:  # no op was recorded that could recompute it
            self.pinned.setdefault(value, KeptHandle(byte_view(target.untyped_storage())))
        self.before_write(value)
        return root is None or root.is_inside

    def add_written(self, targets: Sequence[Tensor], are_inside: Sequence[bool], why_kept: str = "") -> None:
        """Note what an op has written to tensors, which is not recomputed, and why, where a user may wonder."""
        for target, is_inside in zip(targets, are_inside, strict=True):
            value = self.add_root(target, target.untyped_storage(), is_inside=is_inside, is_written=True)
            if why_kept:
                self.why_kept[value] = why_kept

    def note_effect(self, target: Tensor | None = None, value: int = -1) -> None:
        """Note that an op writes to a tensor, or that it may do anything."""
        address = 0 if target is None else torch_private.storage_address(target.untyped_storage())
        self.effects.append((len(self.funcs), address, value))

    def before_write(self, value: int) -> None:
        """An op is about to write over a value. If something is to be made from that, copy it first."""
        self.overwritten.add(value)
        pinned = self.pinned.get(value)
        if pinned is not None and pinned.is_unchanged():
            storage = pinned.unpack().untyped_storage()
            self.pinned[value] = KeptHandle(byte_view(storage).clone())
            self.held_bytes += storage.nbytes()
        if self.holder is not None and value in self.retained:
            self.holder.copy(value)
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
        if self.holder is not None and value in self.retained:
            self.holder.release(value)
        root = self.roots.get(value)
        if root is not None and value not in self.hidden:
            root.is_lost = True

    def retained_bytes(self) -> dict[int, int]:
        """Return the roots that are gone unless they are held on purpose, and what that takes.

        Made here, or written over; or gone by now: then they take nothing if the storage is the caller's.
        """
        found = {}
        for value, root in self.roots.items():
            if root.is_inside or root.is_lost:
                found[value] = root.num_bytes
            elif root.alias is None and root.lent is None and root.living() is None:
                found[value] = 0 if root.storage() is not None else root.num_bytes
        return found

    def root_storage(self, value: int) -> torch.UntypedStorage:
        """Return the storage of a root that is held: see `Root.held_storage`."""
        if value not in self.roots:
            raise written_error()
        return self.roots[value].held_storage()

    # The end

    @property
    def largest_bytes(self) -> int:
        """The most that one op has made."""
        made = (sum(call.outs_bytes) for call in self.calls)
        return max((*made, *(root.num_bytes for root in self.roots.values() if root.is_inside)), default=0)

    def read_times(self) -> dict[CostKey, float]:
        """Enter what the ops took, if they were timed, and return it; makes the host wait for them.

        Of ops that are alike it is the median: now and then one waits for something else.
        """
        found: dict[CostKey, float] = {}
        if self.times:
            self.device.synchronize()
            self.sync()
            seconds, alike = self.lineage.seconds, dict[CostKey, list[float]]()
            for _, key, start, end in self.times:
                alike.setdefault(key, []).append(start.elapsed_s(end))
            found = {key: median(taken_s) for key, taken_s in alike.items()}
            for op, key, _, _ in self.times:
                if op < len(seconds):
                    seconds[op] = found[key]
        self.times.clear()
        self.is_timed = False
        return found

    def read_call_times(self) -> dict[int, float]:
        """Return what compiled modules took, by the places of their calls; makes the host wait for them."""
        if self.call_times:
            self.device.synchronize()
        found = {place: start.elapsed_s(end) for place, start, end in self.call_times}
        self.call_times.clear()
        return found

    def times_alone(self) -> Recording:
        """Return a recording that has the times of this one, and holds none of its values."""
        self.sync()
        recording = Recording(self.device, is_timed=True)
        recording.lineage, recording.times, recording.call_times = self.lineage, self.times, self.call_times
        return recording

    def close(self) -> None:
        """The forward is over: nothing more is recorded."""
        self.see_versions()
        self.current.clear()
        self.lent.clear()


def _may_be_statistics(tensor: Tensor) -> bool:
    """Tell whether a tensor that was there before may be running statistics of a norm, which are written without a trace."""
    is_vector = tensor.dim() == 1 and len(tensor) <= _MOST_STATISTICS
    return is_vector and tensor.is_floating_point() and not tensor.requires_grad
