"""Sees what happens below autograd while a model runs: live storages, casts of parameters, and code whose saved tensors are
hidden, such as a checkpoint.

One dispatch mode calls a few observers after every operation. It is on in the memory run only, never when time is measured.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from memkit import torch_private
from memkit.device.base import MemoryCounter
from memkit.hooks import in_checkpoint, receiving_pack
from memkit.modes import Mode
from memkit.owners import ModelStorages
from memkit.profile.calls import CallStack
from memkit.storages import storage_key, storages_of, unique_storages

if TYPE_CHECKING:
    from memkit.torch_private import OpOverload


class StorageObserver(Protocol):
    """Is called when storages are made and freed."""

    def begin(self, key: int, num_bytes: int) -> None:
        """Called when a storage exists from now on."""

    def end(self, key: int) -> None:
        """Called when a storage was freed."""


class OpObserver(Protocol):
    """Sees every operation that runs under an `OpWatch`."""

    def saw(self, op: OpOverload, args: Sequence[Any], outputs: Any) -> None: ...


class OpWatch(Mode):
    """Reports each operation to its observers, after it ran."""

    def __init__(self, *observers: OpObserver) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._observers = observers

    def __torch_dispatch__(
        self, op: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        outputs = op(*args, **(kwargs or {}))
        for observer in self._observers:
            observer.saw(op, args, outputs)
        return outputs


class LiveStorages(MemoryCounter):
    """Counts the bytes of live storages on devices without a counting allocator: the CPU and the meta device.

    Scratch memory inside a kernel is not seen. A storage counts until nothing refers to it, rounded up as an allocator would.

    Args:
        initial: storages that already exist; all others count from the operation that made them.
        elsewhere: tensors in host memory, which do not count.
        rounding_bytes: sizes are rounded up to multiples of this.
        observer: is called when storages are made and freed, if given.
        only: the type of the device whose storages count, such as "cuda"; None for all.
        resized: returns storages whose sizes have changed since the last call without an op, if given.
    """

    def __init__(
        self,
        initial: Iterable[torch.UntypedStorage],
        *,
        elsewhere: Iterable[Tensor] = (),
        rounding_bytes: int = 1,
        observer: StorageObserver | None = None,
        only: str | None = None,
        resized: Callable[[], Iterable[torch.UntypedStorage]] = tuple,
    ) -> None:
        self._observer = observer
        self._resized = resized
        self._only = only
        self._elsewhere = unique_storages(elsewhere)
        self._rounding_bytes = rounding_bytes
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._allocated_bytes = 0  # of `_live`, kept by hand: it is read at every edge of a call
        self._peak_bytes = 0
        for storage in initial:
            self._add(storage)

    def allocated_bytes(self) -> int:
        self.look()
        return self._allocated_bytes

    def peak_bytes(self) -> int:
        self.look()
        return self._peak_bytes

    def peak_reserved_bytes(self) -> None:
        return None

    def reset_peak(self) -> None:
        self.look()
        self._peak_bytes = self._allocated_bytes

    def saw(self, op: OpOverload, args: Sequence[Any], outputs: Any) -> None:
        """Count the storages of an operation's outputs."""
        self.look()
        for tensor in tensors_in(outputs):
            self.add(tensor)

    def look(self) -> None:
        """Count storages anew whose sizes have changed."""
        for storage in self._resized():
            if storage.nbytes() or storage_key(storage) in self._live:
                self._add(storage)

    def add(self, tensor: Tensor) -> None:
        """Count the storages of a tensor that no operation has shown."""
        for storage in storages_of(tensor):
            self._add(storage)

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage_key(storage)
        if key in self._elsewhere or (self._only is not None and storage.device.type != self._only):
            return
        known = self._live.get(key)
        num_bytes = -(-storage.nbytes() // self._rounding_bytes) * self._rounding_bytes
        if known is not None and known[1] == num_bytes:
            return
        if known is not None:  # resized in place
            self._allocated_bytes -= known[1]
            self._live[key] = (known[0], num_bytes)
            if self._observer is not None:
                self._observer.end(key)
        else:
            self._live[key] = (weakref.ref(storage, self._forget(key)), num_bytes)
        if self._observer is not None:
            self._observer.begin(key, num_bytes)
        self._allocated_bytes += num_bytes
        self._peak_bytes = max(self._peak_bytes, self._allocated_bytes)

    def _forget(self, key: int) -> Callable[[Any], None]:
        # The reference back is weak: the callbacks live as long as the storages, which may outlive the profile.
        weak_self = weakref.ref(self)

        def forget(_: Any) -> None:
            counter = weak_self()
            if counter is not None:
                counter._allocated_bytes -= counter._live.pop(key)[1]
                if counter._observer is not None:
                    counter._observer.end(key)

        return forget


class ParamCasts:
    """Recognizes storages that hold a parameter or buffer in another dtype, as made by autocast.

    Args:
        resident: the storages of parameters and buffers.
    """

    def __init__(self, resident: ModelStorages) -> None:
        self._resident = resident
        self._casts: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def saw(self, op: OpOverload, args: Sequence[Any], outputs: Any) -> None:
        """Note the output of a cast whose input is a parameter, a buffer or such a cast."""
        if op in torch_private.known("to_copy") and any(
            source in self._resident or source in self for source in storages_of(args[0])
        ):
            for storage in storages_of(outputs):
                self._casts[storage_key(storage)] = weakref.ref(storage)

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        reference = self._casts.get(storage_key(storage))
        return reference is not None and reference() is storage


class Writes:
    """Notes which of some storages are written to in place.

    Args:
        names: what to call each storage, by its key.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self.written: dict[str, None] = {}

    def saw(self, op: OpOverload, args: Sequence[Any], outputs: Any) -> None:
        """Look at the arguments that the operation's schema says it writes to."""
        if not torch_private.schema_of(op).is_mutable:
            return
        for argument, value in zip(torch_private.schema_of(op).arguments, args, strict=False):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for tensor in tensors_in(value):
                for storage in storages_of(tensor):
                    if storage_key(storage) in self._names:
                        self.written[self._names[storage_key(storage)]] = None


class HiddenRegions:
    """Notes the modules that ran operations whose saved tensors our hooks can't see.

    Args:
        pack: our own pack hook, which saved tensors should come to.
        stack: tells which module is running.
    """

    def __init__(self, pack: Callable[..., Any], stack: CallStack) -> None:
        self._pack = pack
        self._stack = stack
        self.checkpointed: set[int] = set()
        self.under_other_hooks: set[int] = set()
        """Modules in which the innermost saved-tensor hooks were others, not a checkpoint's."""

    def saw(self, op: OpOverload, args: Sequence[Any], outputs: Any) -> None:
        """Look at the innermost hooks at this operation."""
        pack = receiving_pack()
        if self._stack.in_backward or (pack == self._pack and torch.is_grad_enabled()):
            return
        if in_checkpoint():
            self.checkpointed.add(self._stack.current)
        elif pack is not None and pack != self._pack:
            self.under_other_hooks.add(self._stack.current)


def tensors_in(value: Any) -> Iterable[Tensor]:
    """Yield the tensors in an operation's outputs: a tensor, or a flat or nested sequence of them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
