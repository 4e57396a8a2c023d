"""The dispatch mode that writes a recording.

While it is on, every op costs the host some microseconds more: what most ops need is done in one function, without a call or an
object that can be spared.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from memkit import torch_private
from memkit.activations.dispatch import QuietMode
from memkit.activations.ops import OpClass, OpKind, OpKinds
from memkit.activations.recorded import (
    Call,
    CallNotes,
    Source,
    cost_key,
    covers,
    crosses,
    has_odd,
    has_tensors,
    source_of,
    tensors_in,
    written_by,
)
from memkit.activations.recording import Recording
from memkit.storages import byte_view

_get_storage = Tensor.untyped_storage
_STRIDED = torch.strided
_address_of, _version_of = torch_private.storage_address, torch_private.version_of
_is_in_backward = torch_private.backward_task
_new_tuple = tuple.__new__  # a named tuple without its constructor, which costs more than all that is in it
_VIEW, _PLAIN, _COPY = "view", "plain", "copy"


class Recorder(QuietMode):
    """The dispatch mode that writes a recording. In a backward it does nothing.

    Args:
        recording: what to write to.
        kinds: what is known of ops.
        generator_of: the random number generator that ops on a device draw from by default.
        estimate_s: what an op is thought to take, by the op, its arguments and its results; asked where it is not known.
    """

    def __init__(
        self,
        recording: Recording,
        kinds: OpKinds,
        generator_of: Callable[[torch.device], torch.Generator],
        estimate_s: Callable[[Any, Sequence[Any], Any], float],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.recording = recording
        self._kind_of = kinds.of
        self._generator_of = generator_of
        self._estimate_s = estimate_s
        self._paths: dict[Any, Any] = {}
        """Of the ops seen: how they are recorded. One of the three words, or a method of the class: bound to this object it
        would keep it alive."""

    def follow(self, recording: Recording) -> None:
        """Write to another recording from now on."""
        self.recording = recording
        self._paths.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _is_in_backward() != -1:
            return func(*args, **kwargs) if kwargs else func(*args)
        recording = self.recording
        if recording.unversioned:
            recording.see_versions()
        recording.funcs.append(func)
        path = self._paths.get(func)
        if path is _VIEW:
            try:
                return func(*args, **kwargs) if kwargs else func(*args)
            except RuntimeError:
                if not _is_of_number(args):
                    raise
                return _view_of_number(func, args, kwargs)
        if (path is not _PLAIN and path is not _COPY) or types or (kwargs and has_tensors(kwargs)):
            record = Recorder._record if type(path) is str else path or Recorder._record_first
            return record(self, func, types, args, kwargs)
        current = recording.current
        sources: list[Source] = []
        kept: list[Any] = []
        try:
            for key, argument in enumerate(args):
                if isinstance(argument, Tensor):
                    storage = _get_storage(argument)
                    found = current.get(_address_of(storage))
                    if found is not None and found[0]() is storage:
                        value = found[1]
                    else:
                        value = recording.add_root(argument, storage, is_inside=False)
                    sources.append(
                        (  # `source_of`, in place
                            key,
                            value,
                            argument.size(),
                            argument.stride(),
                            argument.storage_offset(),
                            argument.dtype,
                            argument.is_conj(),
                            argument.is_neg(),
                        )
                    )
                    kept.append(None)
                elif type(argument) is list and argument and type(argument[0]) is not int:
                    kept.append(self._take_list(key, argument, sources))
                else:
                    kept.append(argument)
        except RuntimeError:  # an argument is no range of bytes
            return self._run_opaque(func, types, args, kwargs)
        results = func(*args, **kwargs) if kwargs else func(*args)
        if type(results) is not Tensor or results.layout is not _STRIDED or results.is_quantized:
            self._note(func, kept, kwargs, sources, args, results)
            return results
        storage = _get_storage(results)
        address = _address_of(storage)
        before = current.get(address) or recording.lent.get(address)  # `was_there`, in place
        if before is not None and before[0]() is storage:
            return results
        if path is _COPY and results.device != args[0].device:
            recording.add_roots(results)
            return results
        calls, value = recording.calls, recording.num_values
        if len(calls) >= len(recording.known_s):
            recording.seconds[len(calls)] = self._estimate_s(func, args, results)
        recording.num_values = value + 1  # first, as in `Recording.add_root`
        calls.append(_new_tuple(Call, (func, kept, kwargs, sources, value, (storage.nbytes(),), None)))
        current[address] = (weakref.ref(storage), value)
        if value in recording.retained:
            recording.hold_made(value, results)
        return results

    def _record_first(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Run and record an op that is new to this recorder, and note how it is recorded from then on."""
        results = self._record(func, types, args, kwargs)
        self._paths[func] = self._path_of(self._kind_of(func))
        return results

    def _path_of(self, kind: OpKind) -> Any:
        """Return how ops of a kind are recorded from their second time on."""
        if kind.op_class is OpClass.VIEW:
            return _VIEW
        if kind.op_class is OpClass.UNKNOWN:
            return Recorder._run_unknown
        if kind.op_class is OpClass.OPAQUE:
            return Recorder._run_opaque
        if kind.statistics:
            return Recorder._record_batch_norm
        if self.recording.is_timed or self.recording.originals is not None:
            return Recorder._record
        if kind.is_plain:
            return _COPY if kind.may_cross else _PLAIN
        return Recorder._record_in_place if kind.is_in_place else Recorder._record

    # What is not plain

    def _record(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Run and record any op."""
        kind = self._kind_of(func)
        if kind.op_class is OpClass.VIEW:
            if _is_of_number(args):
                return _view_of_number(func, args, kwargs)
            return func(*args, **kwargs) if kwargs else func(*args)
        if types or kind.op_class is not OpClass.REPLAYED or has_odd((*args, *(kwargs or {}).values())):
            return self._run_opaque(func, types, args, kwargs)
        if kind.statistics and args[kind.training_at]:
            return self._record_batch_norm(func, types, args, kwargs)
        for position in kind.statistics:  # another forward may update them, and leave no trace
            if args[position] is not None:
                self.recording.note_hidden(args[position])
        targets = written_by(kind, args, kwargs) if kind.written else []
        if targets and not any(self.recording.is_known(target) for target in targets):
            return self._run_on_strangers(func, args, kwargs, targets)
        kept, kept_kwargs, sources = self._take_arguments(args, kwargs)
        generator = state = None
        if kind.is_random:
            generator = self._generator(args, kwargs)
            state = generator.get_state()
        if kind.written:
            return self._run_writer(func, kind, kept, kept_kwargs, sources, args, kwargs, targets, generator, state)
        results = self._run(func, args, kwargs)
        if kind.may_cross and crosses(args[0], results):
            self.recording.add_roots(results)
        else:
            self._note(func, kept, kept_kwargs, sources, args, results, kind=kind, generator=generator, state=state)
        return results

    def _take_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> tuple[list[Any], dict[str, Any] | None, list[Source]]:
        """Return the arguments without their tensors, and what is remembered of these."""
        sources: list[Source] = []
        kept = [self._take(key, argument, sources) for key, argument in enumerate(args)]
        if not kwargs:
            return kept, None, sources
        return kept, {name: self._take(name, argument, sources) for name, argument in kwargs.items()}, sources

    def _take(self, key: int | str, argument: Any, sources: list[Source]) -> Any:
        if isinstance(argument, Tensor):
            storage = _get_storage(argument)
            found = self.recording.current.get(_address_of(storage))
            if found is not None and found[0]() is storage:
                value = found[1]
            else:
                value = self.recording.add_root(argument, storage, is_inside=False)
            sources.append(source_of(key, value, argument))
            return None
        return self._take_list(key, argument, sources) if type(argument) is list else argument

    def _take_list(self, key: int | str, items: list[Any], sources: list[Source]) -> list[Any]:
        kept = list(items)
        for place, item in enumerate(items):
            if isinstance(item, Tensor):
                sources.append(source_of((key, place), self.recording.value_of(item), item))
                kept[place] = None
        return kept

    def _generator(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> torch.Generator:
        """Return the generator that an op draws from."""
        for argument in (*args, *(kwargs or {}).values()):
            if isinstance(argument, torch.Generator):
                return argument
        device = next((tensor.device for tensor in tensors_in(args)), None) or (kwargs or {}).get("device")
        return self._generator_of(torch.device("cpu" if device is None else device))

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        recording = self.recording
        if not recording.is_timed:
            return func(*args, **kwargs) if kwargs else func(*args)
        start = recording.device.record_event()
        results = func(*args, **kwargs) if kwargs else func(*args)
        recording.times.append((len(recording.calls), cost_key(func, args, results), start, recording.device.record_event()))
        return results

    def _note(
        self,
        func: Any,
        kept: list[Any],
        kwargs: dict[str, Any] | None,
        sources: list[Source],
        args: tuple[Any, ...],
        results: Any,
        *,
        kind: OpKind | None = None,
        written: dict[int, Tensor] | None = None,
        is_whole: bool = False,
        generator: torch.Generator | None = None,
        state: Tensor | None = None,
    ) -> None:
        """Note that an op has made what it returned, unless that was there before, and what is in the written tensors now."""
        recording = self.recording
        made: list[Tensor] = []
        storages: list[torch.UntypedStorage] = []
        places: list[int] = []
        keys = set[int]()
        for place, tensor in enumerate(tensors_in(results)):
            storage = _get_storage(tensor)
            if _address_of(storage) not in keys and not recording.was_there(storage):
                keys.add(_address_of(storage))
                made.append(tensor)
                storages.append(storage)
                places.append(place)
        if written:
            made += written.values()
            storages += [_get_storage(tensor) for tensor in written.values()]
        if not storages:
            return
        op, first = len(recording.calls), recording.num_values
        if op >= len(recording.known_s):
            recording.seconds[op] = self._estimate_s(func, args, results)
        notes = _new_tuple(
            CallNotes, (kind or self._kind_of(func), tuple(places), tuple(written or ()), is_whole, generator, state)
        )
        outs_bytes = tuple([storage.nbytes() for storage in storages])
        values = recording.add_call(_new_tuple(Call, (func, kept, kwargs, sources, first, outs_bytes, notes)), storages)
        if not recording.retained.isdisjoint(values):
            for value, tensor in zip(values, made, strict=True):
                if value in recording.retained:
                    recording.hold_made(value, tensor, is_written=value - first >= len(places))
        if recording.originals is not None:
            for value, storage in zip(values, storages, strict=True):
                if storage.device.type != "meta":  # there is nothing to compare
                    recording.originals[value] = byte_view(storage).to("cpu", copy=True)

    def _run_opaque(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Run an op that is not to be run again."""
        kind = self._kind_of(func)
        if kind.op_class is OpClass.UNKNOWN:
            return self._run_unknown(func, types, args, kwargs)
        if not kind.written:
            results = func(*args, **kwargs) if kwargs else func(*args)
            self.recording.add_roots(results)
            return results
        targets = written_by(kind, args, kwargs)
        are_inside = [self._before_write(target) for target in targets]
        results = func(*args, **kwargs) if kwargs else func(*args)
        self._add_written_roots(targets, are_inside)
        self.recording.add_roots(results)
        return results

    def _run_unknown(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Run an op of which nobody says what it does, beside what its schema says.

        A higher-order op has no schema: that it writes to a tensor shows by the tensor's counter, too late to copy what was
        there. And where an op returns a tensor that is neither new nor an argument, as a state of its own, other bytes may be
        there than before.
        """
        kind, recording = self._kind_of(func), self.recording
        targets = written_by(kind, args, kwargs)
        are_inside = [self._before_write(target) for target in targets]
        given = {_address_of(_get_storage(tensor)): tensor for tensor in tensors_in(torch_private.tree_leaves((args, kwargs)))}
        versions = {} if isinstance(func, torch_private.OpOverload) else _versions(given)
        results = func(*args, **kwargs) if kwargs else func(*args)
        self._add_written_roots(targets, are_inside, kind.why_kept)
        changed = [given[key] for key, version in versions.items() if _version_of(given[key]) != version]
        changed += [tensor for tensor in tensors_in(results) if _address_of(_get_storage(tensor)) not in given]
        for tensor in changed:
            value = recording.find(_get_storage(tensor))
            if value is not None:
                root = recording.roots.get(value)
                recording.lose(value)
                self._add_written_roots([tensor], [root is None or root.is_inside], kind.why_kept)
        recording.add_roots(results, kind.why_kept)
        return results

    def _record_in_place(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Run and record an op that writes to its first argument, reads that and others, and does nothing else."""
        recording, target = self.recording, args[0]
        if types or kwargs or not isinstance(target, Tensor):
            return self._record(func, types, args, kwargs)
        sources: list[Source] = []
        try:
            storage = _get_storage(target)
            value = recording.find(storage)
            if value is None:
                return func(*args)  # nothing here was made from it: a counter, a buffer
            kept = [self._take(key, argument, sources) for key, argument in enumerate(args)]
        except RuntimeError:  # an argument is no range of bytes
            return self._run_opaque(func, types, args, kwargs)
        num_bytes, is_root, is_inside = storage.nbytes(), value in recording.roots, self._before_write(target)
        results = func(*args)
        if is_root or storage.nbytes() != num_bytes:
            recording.add_root(target, storage, is_inside=is_inside, is_written=True)
            return results
        op, made = len(recording.calls), recording.num_values
        if op >= len(recording.known_s):
            recording.seconds[op] = self._estimate_s(func, args, results)
        notes = CallNotes(self._kind_of(func), (), (value,))
        recording.add_call(Call(func, kept, None, sources, made, (num_bytes,), notes), (storage,))
        if made in recording.retained:
            recording.hold_made(made, target, is_written=True)
        return results

    def _before_write(self, target: Tensor) -> bool:
        """Note that an op is about to write to a tensor; tell whether its storage was made here."""
        value = self.recording.value_of(target)
        root = self.recording.roots.get(value)
        self.recording.before_write(value)
        return root is None or root.is_inside

    def _add_written_roots(self, targets: list[Tensor], are_inside: list[bool], why_kept: str = "") -> None:
        for target, is_inside in zip(targets, are_inside, strict=True):
            value = self.recording.add_root(target, _get_storage(target), is_inside=is_inside, is_written=True)
            if why_kept:
                self.recording.why_kept[value] = why_kept

    def _run_writer(
        self,
        func: Any,
        kind: OpKind,
        kept: list[Any],
        kept_kwargs: dict[str, Any] | None,
        sources: list[Source],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        targets: list[Tensor],
        generator: torch.Generator | None,
        state: Tensor | None,
    ) -> Any:
        """Run an op that writes to its arguments."""
        recording = self.recording
        written = {recording.value_of(target): target for target in targets}
        are_inside = [self._before_write(target) for target in targets]
        sizes_bytes = [_get_storage(target).nbytes() for target in targets]
        results = self._run(func, args, kwargs)
        num_reads = sum(source[1] in written for source in sources) - len(targets)
        is_whole = kind.overwrites and num_reads == 0 and all(map(covers, targets))
        can_follow = all(
            value not in recording.roots or (is_inside and is_whole)
            for value, is_inside in zip(written, are_inside, strict=True)
        ) and sizes_bytes == [_get_storage(target).nbytes() for target in targets]
        if can_follow and not (kind.may_cross and crosses(args[0], args[1])):
            self._note(
                func,
                kept,
                kept_kwargs,
                sources,
                args,
                results,
                kind=kind,
                written=written,
                is_whole=is_whole,
                generator=generator,
                state=state,
            )
        else:
            self._add_written_roots(targets, are_inside)
            recording.add_roots(results)
        return results

    def _run_on_strangers(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, targets: list[Tensor]) -> Any:
        """Run an op that writes to what nothing here was made from: counters, buffers."""
        results = self._run(func, args, kwargs)
        if results is not args[0]:
            written = {_address_of(_get_storage(target)) for target in targets}
            for tensor in tensors_in(results):
                if _address_of(_get_storage(tensor)) not in written:
                    self.recording.add_roots(tensor)
        return results

    def _record_batch_norm(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Run and record a batch norm that updates its statistics. When it is run again, that is without them."""
        kind, recording = self._kind_of(func), self.recording
        if types or not args[kind.training_at]:
            return self._record(func, types, args, kwargs)
        sources: list[Source] = []
        kept: list[Any] = []
        known: list[Tensor] = []
        try:
            for position, argument in enumerate(args):
                if position not in kind.statistics:
                    kept.append(self._take(position, argument, sources) if isinstance(argument, Tensor) else argument)
                elif argument is not None and recording.is_known(argument):
                    known.append(argument)
        except RuntimeError:  # an argument is no range of bytes
            return self._run_opaque(func, types, args, kwargs)
        if kind.replayed_by is None:
            for position in kind.statistics:
                kept.insert(position, None)
        are_inside = [self._before_write(tensor) for tensor in known]
        results = self._run(func, args, None)
        self._add_written_roots(known, are_inside)
        self._note(kind.replayed_by or func, kept, None, sources, args, results, kind=kind)
        return results


def _is_of_number(args: tuple[Any, ...]) -> bool:
    return bool(args) and isinstance(args[0], bool | int | float | complex)


def _view_of_number(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Run an op that views a tensor which torch has made of a number, as when it adds one to zeros without bytes: a mode is
    given the number again."""
    number = args[0]
    dtype = torch.float64 if isinstance(number, float) else torch.complex128 if isinstance(number, complex) else None
    return func(torch.tensor(number, dtype=dtype), *args[1:], **(kwargs or {}))


def _versions(tensors: dict[int, Tensor]) -> dict[int, int]:
    """Return how often tensors were written to, as far as that is counted."""
    return {key: _version_of(tensor) for key, tensor in tensors.items() if not tensor.is_inference()}
