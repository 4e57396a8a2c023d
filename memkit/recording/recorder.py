"""`Recorder`: the dispatch mode that writes a recording. Each op costs the host time, so the common case is one function."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from memkit.core import torch_private
from memkit.core.compiled import note_asked
from memkit.core.modes import Mode
from memkit.core.tensors import byte_view
from memkit.core.torch_state import hide_mode, in_dual_level, in_higher_order_op, leave_untraced
from memkit.recording.borders import run_border
from memkit.recording.ops import OpKinds
from memkit.recording.recorded import (
    OpCall,
    OpClass,
    OpTraits,
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
from memkit.recording.recording import Recording

_IS_ASKED_OF_MODES = bool(torch_private.known("asks_modes_on_stack"))  # older versions read a flag that entering a mode sets


def _may_compile() -> bool:
    may = in_higher_order_op()
    if not may:
        note_asked()
    return may


class _OutsideOfHigherOrderOps:
    """Stands for a process-wide flag that torch would read too early."""

    def __bool__(self) -> bool:
        return not _may_compile()


class QuietMode(Mode):
    """A dispatch mode that Dynamo ignores when a higher-order op compiles its function: the mode sees the higher-order op. Code
    that the program itself compiles runs op by op, as under any mode."""

    supports_higher_order_operators = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]  # torch's
        leave_untraced(cls.__torch_dispatch__)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else each op would pass through Dynamo

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return _may_compile()

    def __enter__(self) -> Any:
        is_in_other = torch_private.shows_to_compiler()
        super().__enter__()
        if not is_in_other:
            torch_private.set_shows_to_compiler(False if _IS_ASKED_OF_MODES else _OutsideOfHigherOrderOps())
            # Code compiled without the mode is valid with it, and vice versa.
            torch_private.set_shows_to_guards(False)
        return self


_get_storage = Tensor.untyped_storage
_STRIDED = torch.strided
_address_of, _version_of = torch_private.storage_address, torch_private.version_of
_is_in_backward = torch_private.backward_task
_new_tuple = tuple.__new__  # a named tuple without its constructor, which costs more than its fields
_VIEW, _PLAIN, _COPY = "view", "plain", "copy"
_ALIAS = torch.ops.aten.alias.default  # the first op of `torch.autograd.forward_ad.make_dual`
_COLLECTIVES = "c10d"  # namespace of ops that may write to any of their tensors, with no sign in schemas or version counters
_GATHERS = "fsdp"
"""The namespace of FSDP2's ops. Their writes to a parameter's storage restore its freed contents. Shards are not written to
within a step, or the tensors that autograd saved of the parameter would be wrong as well."""


class Recorder(QuietMode):
    def __init__(
        self,
        recording: Recording,
        kinds: OpKinds,
        generator_of: Callable[[torch.device], torch.Generator],
        estimate_s: Callable[[Any, Sequence[Any], Any], float],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.recording = recording
        self.kind_of = kinds.of
        self._generator_of = generator_of
        self.estimate_s = estimate_s
        self.sees_dual = False  # a dual level was opened since: leave the mode at the next save, outside of any op
        self._paths: dict[Any, Any] = {}  # how to record each op: one of three words, or a method of the class

    def follow(self, recording: Recording) -> None:
        self.recording = recording
        self._paths.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _is_in_backward() != -1:
            return self._run_in_backward(func, args, kwargs)
        recording = self.recording
        if recording.is_gathering:
            if self.kind_of(func).op_class is OpClass.BORDER:
                run_border(self, func, types, args, kwargs)
            return func(*args, **kwargs) if kwargs else func(*args)
        if recording.unversioned:
            recording.see_versions()
        if func is _ALIAS and not self.sees_dual and in_dual_level() and torch_private.functorch_stack() is None:
            self.sees_dual = True
        funcs, expected = recording.funcs, recording.expected
        if expected is not None and expected.ops:
            op = expected.ops[len(funcs)] if len(funcs) < len(expected.ops) else None
            if op is not None and op.func is func and op.is_skipped and recording.num_values <= op.first and not types:
                funcs.append(func)
                recording.num_values = op.made
                if op.is_view and _is_of_number(args):
                    return _view_of_number(func, args, kwargs)
                results = func(*args, **kwargs) if kwargs else func(*args)
                if not op.is_view:
                    expected.add_unmade(recording, results)
                return results
            expected.begin_op(recording, op, func, args, kwargs, is_plain=not types)
        funcs.append(func)
        path = self._paths.get(func)
        if path is _VIEW:
            try:
                return func(*args, **kwargs) if kwargs else func(*args)
            except RuntimeError:
                if not _is_of_number(args):
                    raise
                return _view_of_number(func, args, kwargs)
        if (path is not _PLAIN and path is not _COPY) or types or (kwargs and has_tensors(kwargs)):
            record = Recorder.record if type(path) is str else path or Recorder._record_first
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
                    size, stride, offset = argument.size(), argument.stride(), argument.storage_offset()
                    is_conj, is_neg = argument.is_conj(), argument.is_neg()
                    sources.append((key, value, size, stride, offset, argument.dtype, is_conj, is_neg))  # `source_of`, in place
                    kept.append(None)
                elif type(argument) is list and argument and type(argument[0]) is not int:
                    kept.append(self._take_list(key, argument, sources))
                else:
                    kept.append(argument)
        except RuntimeError:  # an argument is no range of bytes
            return self.run_opaque(func, types, args, kwargs)
        results = func(*args, **kwargs) if kwargs else func(*args)
        if type(results) is not Tensor or results.layout is not _STRIDED or results.is_quantized:
            self.note(func, kept, kwargs, sources, args, results)
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
            recording.seconds[len(calls)] = self.estimate_s(func, args, results)
        recording.num_values = value + 1  # first, as in `Recording.add_root`
        made = (func, kept, kwargs, sources, value, (storage.nbytes(),), None, (0,), (), False, None, None)
        calls.append(_new_tuple(OpCall, made))
        current[address] = (weakref.ref(storage), value)
        if value in recording.retained:
            recording.hold_made(value, results)
        return results

    def _record_first(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        results = self.record(func, types, args, kwargs)
        self._paths[func] = self._path_of(self.kind_of(func))
        return results

    def _path_of(self, kind: OpTraits) -> Any:
        fixed = {
            OpClass.VIEW: _VIEW,
            OpClass.UNKNOWN: Recorder._run_unknown,
            OpClass.BORDER: run_border,
            OpClass.OPAQUE: Recorder.run_opaque,
        }
        if kind.op_class in fixed:
            return fixed[kind.op_class]
        if kind.statistics:
            return Recorder._record_batch_norm
        if self.recording.is_timed or self.recording.originals is not None:
            return Recorder.record
        if kind.is_plain:
            return _COPY if kind.may_cross else _PLAIN
        return Recorder._record_in_place if kind.is_in_place else Recorder.record

    # What is not plain

    def record(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        kind, recording = self.kind_of(func), self.recording
        if kind.op_class is OpClass.VIEW:
            if _is_of_number(args):
                return _view_of_number(func, args, kwargs)
            return func(*args, **kwargs) if kwargs else func(*args)
        if types or kind.op_class is not OpClass.REPLAYED or has_odd((*args, *(kwargs or {}).values())):
            return self.run_opaque(func, types, args, kwargs)
        if kind.statistics and args[kind.training_at]:
            return self._record_batch_norm(func, types, args, kwargs)
        for position in kind.statistics:  # another forward may update them unseen
            if args[position] is not None:
                recording.note_hidden(args[position])
        targets = written_by(kind, args, kwargs) if kind.written else []
        if targets and not any(map(recording.is_known, targets)):
            return self._run_on_strangers(func, args, kwargs, targets)
        sources: list[Source] = []
        kept = [self.take(key, argument, sources) for key, argument in enumerate(args)]
        kept_kwargs = {name: self.take(name, argument, sources) for name, argument in kwargs.items()} if kwargs else None
        given = func, kept, kept_kwargs, sources, args
        generator = state = None
        if kind.is_random:
            generator = self._generator(args, kwargs)
            if generator is not self._generator_of(generator.device):
                recording.note_effect()  # a region restores the state of the default one
            state = generator.get_state()
        if not kind.written:
            results = self.run(func, args, kwargs)
            if kind.may_cross and crosses(args[0], results):
                recording.add_roots(results)
            else:
                self.note(*given, results, kind=kind, generator=generator, state=state)
            return results
        written = {recording.value_of(target): target for target in targets}
        are_inside = [recording.before_write_to(target) for target in targets]
        sizes_bytes = [_get_storage(target).nbytes() for target in targets]
        results = self.run(func, args, kwargs)
        num_reads = sum(source[1] in written for source in sources) - len(targets)
        is_whole = kind.overwrites and num_reads == 0 and all(map(covers, targets))
        can_follow = all(
            value not in recording.roots or (is_inside and is_whole)
            for value, is_inside in zip(written, are_inside, strict=True)
        ) and sizes_bytes == [_get_storage(target).nbytes() for target in targets]
        if can_follow and not (kind.may_cross and crosses(args[0], args[1])):
            self.note(*given, results, kind=kind, written=written, is_whole=is_whole, generator=generator, state=state)
        else:
            recording.add_written(targets, are_inside)
            recording.add_roots(results)
        return results

    def take(self, key: int | str, argument: Any, sources: list[Source]) -> Any:
        """Return an argument as it is recorded; a tensor becomes a source and None."""
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
        for argument in (*args, *(kwargs or {}).values()):
            if isinstance(argument, torch.Generator):
                return argument
        device = next((tensor.device for tensor in tensors_in(args)), None) or (kwargs or {}).get("device")
        return self._generator_of(torch.device("cpu" if device is None else device))

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        recording = self.recording
        if not recording.is_timed:
            return func(*args, **kwargs) if kwargs else func(*args)
        start = recording.device.record_begin()
        results = func(*args, **kwargs) if kwargs else func(*args)
        recording.times.append((len(recording.calls), cost_key(func, args, results), start, recording.device.record_event()))
        return results

    def note(
        self,
        func: Any,
        kept: list[Any],
        kwargs: dict[str, Any] | None,
        sources: list[Source],
        args: tuple[Any, ...],
        results: Any,
        *,
        kind: OpTraits | None = None,
        written: dict[int, Tensor] | None = None,
        is_whole: bool = False,
        generator: torch.Generator | None = None,
        state: Tensor | None = None,
    ) -> None:
        recording = self.recording
        made, places, keys = list[Tensor](), list[int](), set[int]()
        for place, tensor in enumerate(tensors_in(results)):
            storage = _get_storage(tensor)
            if _address_of(storage) not in keys and not recording.was_there(storage):
                keys.add(_address_of(storage))
                made.append(tensor)
                places.append(place)
        made += (written or {}).values()
        if not made:
            return
        storages = [_get_storage(tensor) for tensor in made]
        op, first = len(recording.calls), recording.num_values
        if op >= len(recording.known_s):
            recording.seconds[op] = self.estimate_s(func, args, results)
        kind, outs_bytes = kind or self.kind_of(func), tuple([storage.nbytes() for storage in storages])
        replayed = (func, kept, kwargs, sources, first, outs_bytes, kind, tuple(places), tuple(written or ()))
        values = recording.add_call(_new_tuple(OpCall, (*replayed, is_whole, generator, state)), storages)
        if not recording.retained.isdisjoint(values):
            for value, tensor in zip(values, made, strict=True):
                if value in recording.retained:
                    recording.hold_made(value, tensor, is_written=value - first >= len(places))
        if recording.originals is not None:
            for value, storage in zip(values, storages, strict=True):
                if storage.device.type != "meta":  # there is nothing to compare
                    recording.originals[value] = byte_view(storage).to("cpu", copy=True)

    def run_opaque(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        kind = self.kind_of(func)
        if kind.op_class is OpClass.UNKNOWN:
            return self._run_unknown(func, types, args, kwargs)
        if kind.op_class is OpClass.BORDER:
            return run_border(self, func, types, args, kwargs)
        if types or kind.hides_state:
            self.recording.note_effect()
        results = self._run_and_write(func, args, kwargs, written_by(kind, args, kwargs) if kind.written else [])
        self.recording.add_roots(results)
        return results

    # Ops that do more than make new values

    def _run_gather(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Run an op of FSDP2. Its parameters are the caller's, with the same values as when they were last gathered."""
        recording = self.recording
        results = func(*args, **kwargs) if kwargs else func(*args)
        for target in written_by(self.kind_of(func), args, kwargs):
            storage = _get_storage(target)
            value = recording.find(storage)
            if value is None or (value in recording.roots and recording.roots[value].is_inside):  # just allocated, or seen so
                value = recording.add_root(target, storage, is_inside=False)
            recording.hidden.discard(value)  # no statistics, though they may be as small
        recording.add_roots(results, self.kind_of(func).why_kept)
        return results

    def _run_in_backward(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Run an op of a backward within the forward, and record only its writes."""
        kind, recording = self.kind_of(func), self.recording
        recording.see_versions()
        recording.note_effect()
        targets = [] if kind.op_class is OpClass.UNKNOWN else written_by(kind, args, kwargs)  # FSDP2 gathers parameters again
        if kind.statistics and args[kind.training_at]:
            targets += [args[position] for position in kind.statistics if args[position] is not None]
        return self._run_and_write(func, args, kwargs, [target for target in targets if recording.is_known(target)])

    def _run_and_write(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, targets: list[Tensor], why_kept: str = ""
    ) -> Any:
        recording = self.recording
        are_inside = [recording.before_write_to(target) for target in targets]
        results = func(*args, **kwargs) if kwargs else func(*args)
        recording.add_written(targets, are_inside, why_kept)
        return results

    def _run_unknown(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Run an op known only by its schema. A higher-order op has none: the version counter shows its writes, too late to
        copy the old contents. A returned tensor that is neither new nor an argument, such as a state, may have changed."""
        kind, recording = self.kind_of(func), self.recording
        recording.note_effect()
        has_schema = isinstance(func, torch_private.OpOverload)
        if has_schema and func.namespace == _GATHERS:
            return self._run_gather(func, args, kwargs)
        given = {_address_of(_get_storage(tensor)): tensor for tensor in tensors_in(torch_private.tree_leaves((args, kwargs)))}
        is_collective = has_schema and func.namespace == _COLLECTIVES
        targets = list(given.values()) if is_collective else written_by(kind, args, kwargs)
        versions = {} if has_schema else {key: _version_of(each) for key, each in given.items() if not each.is_inference()}
        results = self._run_and_write(func, args, kwargs, targets, kind.why_kept)
        changed = [given[key] for key, version in versions.items() if _version_of(given[key]) != version]
        changed += [tensor for tensor in tensors_in(results) if _address_of(_get_storage(tensor)) not in given]
        for tensor in changed:
            recording.lose(tensor, kind.why_kept)
        recording.add_roots(results, kind.why_kept)
        return results

    def _record_in_place(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Record an op that only writes to its first argument, and reads that and others."""
        recording, target = self.recording, args[0]
        if types or kwargs or not isinstance(target, Tensor):
            return self.record(func, types, args, kwargs)
        sources: list[Source] = []
        try:
            storage = _get_storage(target)
            value = recording.find(storage)
            if value is None:
                recording.note_effect(target)
                return func(*args)  # no value was made from it: a counter, a buffer
            kept = [self.take(key, argument, sources) for key, argument in enumerate(args)]
        except RuntimeError:  # an argument is no range of bytes
            return self.run_opaque(func, types, args, kwargs)
        num_bytes, is_root, is_inside = storage.nbytes(), value in recording.roots, recording.before_write_to(target)
        results = func(*args)
        if is_root or storage.nbytes() != num_bytes:
            recording.add_root(target, storage, is_inside=is_inside, is_written=True)
            return results
        op, made = len(recording.calls), recording.num_values
        if op >= len(recording.known_s):
            recording.seconds[op] = self.estimate_s(func, args, results)
        call = OpCall(func, kept, None, sources, made, (num_bytes,), self.kind_of(func), (), (value,))
        recording.add_call(call, (storage,))
        if made in recording.retained:
            recording.hold_made(made, target, is_written=True)
        return results

    def _run_on_strangers(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, targets: list[Tensor]) -> Any:
        for target in targets:
            self.recording.note_effect(target)
        results = self.run(func, args, kwargs)
        if results is not args[0]:
            written = {_address_of(_get_storage(target)) for target in targets}
            for tensor in tensors_in(results):
                if _address_of(_get_storage(tensor)) not in written:
                    self.recording.add_roots(tensor)
        return results

    def _record_batch_norm(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Record a batch norm that updates its statistics. Its replays don't."""
        kind, recording = self.kind_of(func), self.recording
        if types or not args[kind.training_at]:
            return self.record(func, types, args, kwargs)
        places, sources = kind.statistics, list[Source]()
        statistics = [args[place] for place in places if args[place] is not None]
        try:
            kept = [None if key in places else self.take(key, argument, sources) for key, argument in enumerate(args)]
            for argument in statistics:
                recording.note_effect(argument)
            known = [argument for argument in statistics if recording.is_known(argument)]
        except RuntimeError:  # an argument is no range of bytes
            return self.run_opaque(func, types, args, kwargs)
        if kind.replayed_by is not None:
            del kept[places[0] : places[-1] + 1]
        are_inside = [recording.before_write_to(tensor) for tensor in known]
        results = self.run(func, args, None)
        recording.add_written(known, are_inside)
        self.note(kind.replayed_by or func, kept, None, sources, args, results, kind=kind)
        for argument in statistics:  # as in `record`: later readers do not see another forward's updates
            recording.note_hidden(argument)
        return results


def hide_recorders() -> None:
    """Hide the active recorders from the running node of a graph.

    [Note: seen by formulas] Derivative formulas compute other bits while any dispatch mode is on. The engine runs nodes, and
    puts the modes back. An op can't take off the mode that it is running in: torch would put it back. So after a dual level was
    opened, the recorder is left at the next save, which is outside of its own part of the op.
    """
    if _is_in_backward() != -1:
        for mode in torch_private.dispatch_modes():
            if isinstance(mode, Recorder):
                mode.recording.note_effect()
                hide_mode(mode)


def _is_of_number(args: tuple[Any, ...]) -> bool:
    return bool(args) and isinstance(args[0], bool | int | float | complex)


def _view_of_number(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """A mode gets the number that torch made the tensor from."""
    number = args[0]
    dtype = torch.float64 if isinstance(number, float) else torch.complex128 if isinstance(number, complex) else None
    return func(torch.tensor(number, dtype=dtype), *args[1:], **(kwargs or {}))
