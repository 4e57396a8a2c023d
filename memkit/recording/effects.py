"""Records ops that do more than make new values: ops that write to tensors, and ops of which nothing is known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from memkit.core import torch_private
from memkit.recording.recorded import CallNotes, OpCall, OpClass, Source, tensors_in, written_by

if TYPE_CHECKING:
    from memkit.recording.recorder import Recorder
    from memkit.recording.recording import Recording

_get_storage = Tensor.untyped_storage
_address_of, _version_of = torch_private.storage_address, torch_private.version_of


_COLLECTIVES = "c10d"
"""The namespace of ops whose schemas don't say what they write to, and whose writes raise no version counter: they may write to
any of their tensors."""


_GATHERS = "fsdp"
"""The namespace of FSDP2's ops. When they write to a parameter's storage, they restore its freed contents: shards are not
written to within a step, or else the tensors that autograd saved of the parameter would be wrong as well."""


def _run_gather(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Run an op of FSDP2. Its parameters are the caller's, with the same values as when they were gathered last."""
    recording = recorder.recording
    results = func(*args, **kwargs) if kwargs else func(*args)
    for target in written_by(recorder.kind_of(func), args, kwargs):
        storage = _get_storage(target)
        value = recording.find(storage)
        if value is None or (value in recording.roots and recording.roots[value].is_inside):  # just allocated, or seen so
            value = recording.add_root(target, storage, is_inside=False)
        recording.hidden.discard(value)  # no statistics, though they may be as small
    recording.add_roots(results, recorder.kind_of(func).why_kept)
    return results


def run_in_backward(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Run an op of a backward within the forward: nothing is recorded but that it writes to tensors."""
    kind, recording = recorder.kind_of(func), recorder.recording
    recording.see_versions()
    recording.note_effect()
    targets = [] if kind.op_class is OpClass.UNKNOWN else written_by(kind, args, kwargs)  # FSDP2 gathers parameters again
    if kind.statistics and args[kind.training_at]:
        targets += [args[position] for position in kind.statistics if args[position] is not None]
    return run_and_write(recording, func, args, kwargs, [target for target in targets if recording.is_known(target)])


def run_and_write(
    recording: Recording, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, targets: list[Tensor]
) -> Any:
    are_inside = [recording.before_write_to(target) for target in targets]
    results = func(*args, **kwargs) if kwargs else func(*args)
    recording.add_written(targets, are_inside)
    return results


def run_unknown(recorder: Recorder, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Run an op of which only the schema says what it does. A higher-order op has none: that it writes shows by the version
    counter, too late to copy the old contents. If an op returns a tensor that is neither new nor an argument, such as its own
    state, the contents may have changed."""
    kind, recording = recorder.kind_of(func), recorder.recording
    recording.note_effect()
    has_schema = isinstance(func, torch_private.OpOverload)
    if has_schema and func.namespace == _GATHERS:
        return _run_gather(recorder, func, args, kwargs)
    given = {_address_of(_get_storage(tensor)): tensor for tensor in tensors_in(torch_private.tree_leaves((args, kwargs)))}
    is_collective = has_schema and func.namespace == _COLLECTIVES
    targets = list(given.values()) if is_collective else written_by(kind, args, kwargs)
    are_inside = [recording.before_write_to(target) for target in targets]
    versions = {} if has_schema else {key: _version_of(each) for key, each in given.items() if not each.is_inference()}
    results = func(*args, **kwargs) if kwargs else func(*args)
    recording.add_written(targets, are_inside, kind.why_kept)
    changed = [given[key] for key, version in versions.items() if _version_of(given[key]) != version]
    changed += [tensor for tensor in tensors_in(results) if _address_of(_get_storage(tensor)) not in given]
    for tensor in changed:
        value = recording.find(_get_storage(tensor))
        if value is not None:
            root = recording.roots.get(value)
            recording.lose(value)
            recording.add_written([tensor], [root is None or root.is_inside], kind.why_kept)
    recording.add_roots(results, kind.why_kept)
    return results


def record_in_place(recorder: Recorder, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Run and record an op that writes to its first argument, reads that and others, and does nothing else."""
    recording, target = recorder.recording, args[0]
    if types or kwargs or not isinstance(target, Tensor):
        return recorder.record(func, types, args, kwargs)
    sources: list[Source] = []
    try:
        storage = _get_storage(target)
        value = recording.find(storage)
        if value is None:
            recording.note_effect(target)
            return func(*args)  # nothing here was made from it: a counter, a buffer
        kept = [recorder.take(key, argument, sources) for key, argument in enumerate(args)]
    except RuntimeError:  # an argument is no range of bytes
        return recorder.run_opaque(func, types, args, kwargs)
    num_bytes, is_root, is_inside = storage.nbytes(), value in recording.roots, recording.before_write_to(target)
    results = func(*args)
    if is_root or storage.nbytes() != num_bytes:
        recording.add_root(target, storage, is_inside=is_inside, is_written=True)
        return results
    op, made = len(recording.calls), recording.num_values
    if op >= len(recording.known_s):
        recording.seconds[op] = recorder.estimate_s(func, args, results)
    notes = CallNotes(recorder.kind_of(func), (), (value,))
    recording.add_call(OpCall(func, kept, None, sources, made, (num_bytes,), notes), (storage,))
    if made in recording.retained:
        recording.hold_made(made, target, is_written=True)
    return results


def run_on_strangers(
    recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, targets: list[Tensor]
) -> Any:
    """Run an op that writes to tensors that nothing in the forward was made from: counters, buffers."""
    for target in targets:
        recorder.recording.note_effect(target)
    results = recorder.run(func, args, kwargs)
    if results is not args[0]:
        written = {_address_of(_get_storage(target)) for target in targets}
        for tensor in tensors_in(results):
            if _address_of(_get_storage(tensor)) not in written:
                recorder.recording.add_roots(tensor)
    return results


def record_batch_norm(recorder: Recorder, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Run and record a batch norm that updates its statistics. Its replays don't."""
    kind, recording = recorder.kind_of(func), recorder.recording
    if types or not args[kind.training_at]:
        return recorder.record(func, types, args, kwargs)
    sources: list[Source] = []
    kept: list[Any] = []
    known: list[Tensor] = []
    statistics: list[Tensor] = []
    try:
        for position, argument in enumerate(args):
            if position not in kind.statistics:
                kept.append(recorder.take(position, argument, sources) if isinstance(argument, Tensor) else argument)
            elif argument is not None:
                recording.note_effect(argument)
                statistics.append(argument)
                if recording.is_known(argument):
                    known.append(argument)
    except RuntimeError:  # an argument is no range of bytes
        return recorder.run_opaque(func, types, args, kwargs)
    if kind.replayed_by is None:
        for position in kind.statistics:
            kept.insert(position, None)
    are_inside = [recording.before_write_to(tensor) for tensor in known]
    results = recorder.run(func, args, None)
    recording.add_written(known, are_inside)
    recorder.note(kind.replayed_by or func, kept, None, sources, args, results, kind=kind)
    for argument in statistics:  # as in `Recorder.record`: what reads them later is not to see the updates of another forward
        recording.note_hidden(argument)
    return results
