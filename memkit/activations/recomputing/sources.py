"""`Sources` of dropped values: held roots, and kept values that no op recomputes."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memkit.activations.saved.records import Handle, SavedResidency
from memkit.core import torch_private
from memkit.core.kept import KeptHandle
from memkit.core.tensors import Geometry
from memkit.core.torch_state import sharing_counters
from memkit.plan import NO_OP

if TYPE_CHECKING:
    from memkit.activations.offloading.window import OffloadWindow
    from memkit.activations.recomputing.recorded_forward import RecordedForward
    from memkit.recording.recording import Recording


_NO_NODE = -1


class Anchors:
    def __init__(self, window: OffloadWindow) -> None:
        self.window = window
        self._handles: dict[int, Handle] = {}
        self._known: dict[int, weakref.ref[Handle]] = {}
        """Includes released handles, which values recomputed from them may still hold."""

    @property
    def last(self) -> int:
        return next(reversed(self._handles), -1)

    def hold(self, value: int, tensor: Tensor) -> Handle:
        handle = self._open(tensor)
        self._handles[value] = handle
        self._known[value] = weakref.ref(handle)
        return handle

    def copy(self, value: int) -> None:
        handle = self._handles.get(value)
        if handle is not None and handle.record.residency is SavedResidency.LEAVING:
            self.window.ledger.release(handle.record)  # the lane still reads the storage
        if handle is not None and handle.geometry is None:
            alias = handle.alias
            self._handles[value] = self._open(Geometry.of(alias).over(alias.untyped_storage().clone()))

    def release(self, value: int) -> None:
        self._handles.pop(value, None)

    def handle(self, value: int) -> Handle | None:
        handle, known = self._handles.get(value), self._known.get(value)
        if handle is None and known is not None:
            handle = known()
        return handle if handle is not None and (handle.version is None or handle.is_unchanged()) else None

    def find(self, value: int) -> torch.UntypedStorage | None:
        handle = self.handle(value)
        if handle is None:
            return None
        window = self.window
        if handle.geometry is not None:  # it has left
            return window.lend(handle)
        storage = handle.alias.untyped_storage()
        window.device.note_read(storage)
        return storage

    def _open(self, tensor: Tensor) -> Handle:
        window = self.window
        with window.lock:
            try:
                with sharing_counters(), torch_private.without_python_dispatch(), torch.no_grad():
                    return window.ledger.open(tensor, tensor.untyped_storage(), window, _NO_NODE)
            except BaseException:  # as `mended` does
                window.is_broken = True
                raise


class Origin(list["KeptHandle | Origin"]):
    """Handles that a dropped value's recompute needs, and the origins of intermediate values."""

    __slots__ = ("__weakref__",)


class Sources:
    def __init__(self, recording: Recording, forward: RecordedForward, anchors: Anchors) -> None:
        self._recording, self._forward, self._anchors = recording, weakref.proxy(forward), anchors
        self._secured: dict[int, bool] = {}
        self._secured_in = -1
        self._origins: weakref.WeakValueDictionary[int, Origin] = weakref.WeakValueDictionary()
        """Where not all ops are recorded: the origins that dropped values hold."""
        self.only_held = set[int]()
        """Anchors that could not be recomputed if they were released."""

    def secure(self, value: int) -> bool:
        """Hold all roots that a value is made from; tell whether it can be recomputed."""
        recording, secured = self._recording, self._secured
        recording.sync()
        if self._secured_in != self._forward.task:  # secured values may have been written to before this backward
            self._secured_in = self._forward.task
            secured.clear()
        if recording.expected is not None:
            return self._origin_where_unmade(value) is not None
        lineage = recording.lineage
        found, pending = set[int](), [value]
        while pending:
            value_here = pending.pop()
            if value_here in found or value_here in secured:
                continue
            found.add(value_here)
            if lineage.maker[value_here] != NO_OP:
                pending.extend(lineage.ins[lineage.maker[value_here]])
        for value_here in sorted(found):  # sources come before their value
            maker = lineage.maker[value_here]
            if maker == NO_OP:
                counts = self._forward.record_of(value_here) is None
                secured[value_here] = recording.hold(value_here, counts=counts) or self._pin(value_here)
            else:
                secured[value_here] = all(secured[source] or self._pin(source) for source in lineage.ins[maker])
        return secured[value]

    def origin_of(self, value: int) -> Origin | None:
        """Secure a value; return the origin that must be held for it; None if the value can't be recomputed."""
        if self._recording.expected is None:
            return Origin() if self.secure(value) else None
        return self._origin_where_unmade(value)

    def _origin_where_unmade(self, value: int) -> Origin | None:
        self._recording.sync()
        lineage, origins = self._recording.lineage, self._origins
        if lineage.maker[value] == NO_OP:
            return None
        made, pending = dict[int, Origin](), [value]
        while pending:  # visit each op once for all values made from it
            here, found, missing = pending[-1], Origin(), list[int]()
            for source in () if here in made else lineage.ins[lineage.maker[here]]:
                handle = self._handle(source)
                origin = origins.get(source) if handle is None else None
                if origin is not None:
                    found.append(origin)
                elif handle is None and lineage.maker[source] != NO_OP:
                    missing.append(source)
                elif not self._hold(source, handle, found):
                    return None
            if missing:
                pending += missing
                continue
            pending.pop()
            made[here] = origins[here] = made.get(here, found)
        return made[value]

    def _hold(self, source: int, handle: KeptHandle | None, origin: Origin) -> bool:
        """Hold a value that is not made again, by an origin if it has a handle; tell whether it is there."""
        recording, expected = self._recording, self._recording.expected
        assert expected is not None
        if handle is not None or source in expected.unmade:
            expected.sources.add(source)
        if handle is not None:
            origin.append(handle)
            return True
        return (source in recording.roots and recording.hold(source)) or self._pin(source)

    def _handle(self, value: int) -> KeptHandle | None:
        if value in self._recording.overwritten:
            return None
        return self._forward.handle_of(value) or self._anchors.handle(value) or self._forward.kept_source(value)

    def _pin(self, value: int) -> bool:
        recording, forward = self._recording, self._forward
        if value in recording.pinned:
            return True
        anchor = self._anchors.handle(value)
        if anchor is not None and anchor.version == 0:  # a fresh result of an op: no write to it goes unseen
            self.only_held.add(value)
            return True
        handle = forward.other(value)
        record = None if value in recording.overwritten else forward.record_of(value)
        if handle is None and record is not None:
            held = next((held for held in record.live_handles() if held.geometry is None and held.is_unchanged()), None)
            handle = None if held is None else KeptHandle(held.alias)  # the handle itself holds the forward
        if handle is None:
            return False
        recording.pinned[value] = handle
        return True
