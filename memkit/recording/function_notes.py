"""`FunctionNotes`: notes the functions of a forward, so that later forwards can follow them: see [Note: quiet functions] in
`memkit.recording.functions`."""

from __future__ import annotations

from dataclasses import replace
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodWrapperType
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from memkit import torch_private
from memkit.compiled import num_asked
from memkit.recording.functions import FunctionCall, FunctionMode, Input, are_plain, flags_of, has_flags, is_asked
from memkit.recording.recorded import has_tensors, tensors_in
from memkit.storages import Geometry

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from memkit.recording.expected import ExpectedOp
    from memkit.recording.recorded import Call
    from memkit.recording.recording import Recording

_BUILT_IN = (BuiltinFunctionType, MethodDescriptorType)
_PER_OP = 3
"""The cost of seeing an op, in multiples of the cost of seeing a function."""


def may_be_quiet(ops: Sequence[Any]) -> bool:
    """Tell whether functions may be followed in a forward with these ops: not if one of them compiles something."""
    names = ("function_mode_at", "pop_function_mode", "push_function_mode")
    return all(map(torch_private.known, names)) and all(hasattr(op, "overloadpacket") for op in set(ops))


class _Noted(NamedTuple):
    """What is noted of a function call, beside its `FunctionCall`."""

    saves: range
    """The saves in it, by their ordinals."""
    inputs: tuple[Input, ...] | None
    """Its tensors; None if ops in it that are recorded must always be seen."""
    is_whole: bool
    """Whether its flags tell all that may make a difference."""


class FunctionNotes(FunctionMode):
    """Notes the functions of a forward in which each op is seen.

    Args:
        recording: the recording of the ops.
    """

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.num_saves = 0
        """How many tensors were saved so far; counted by the pack hook."""
        self._recording = recording
        self._calls: list[FunctionCall] = []
        self._noted: list[_Noted] = []
        self._num_asked = self._num_modes = 0
        self._is_whole = True

    def __enter__(self) -> Any:
        self._num_asked, self._num_modes = num_asked(), torch_private.num_dispatch_modes()
        return super().__enter__()

    def stop(self) -> None:
        self._is_whole = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch_private.backward_task() != -1 or is_asked(func):
            return func(*args, **kwargs) if kwargs else func(*args)
        recording = self._recording
        begin, first, is_whole, self._is_whole = len(recording.funcs), recording.num_values, self._is_whole, False
        flags, num_saves = flags_of(args, kwargs), self.num_saves
        may_write = not are_plain(types) or _may_write(func, kwargs) or (flags is None and has_flags(func))
        results = func(*args, **kwargs) if kwargs else func(*args)
        self._is_whole = is_whole and torch_private.num_dispatch_modes() == self._num_modes  # else it raised, or others see it
        ops, is_alike = tuple(recording.funcs[begin:]), flags is not None and not has_tensors(kwargs or {})
        with torch_private.without_python_dispatch():
            try:
                inputs = self._inputs(args) if is_alike and not may_write else None
                result, num_bytes = self._result(results, first)
            except RuntimeError:  # they wrap others, as the batches of `torch.vmap` do
                inputs, result, num_bytes, may_write = None, -1, 0, True
        call = FunctionCall(func, not may_write, begin, ops, first, recording.num_values, flags, result, num_bytes)
        self._calls.append(call)
        self._noted.append(_Noted(range(num_saves, self.num_saves), inputs, has_flags(func)))
        return results

    def _inputs(self, args: tuple[Any, ...]) -> tuple[Input, ...]:
        found = []
        for tensor in tensors_in(args):
            value = self._recording.find(tensor.untyped_storage())
            found.append(Input(-1 if value is None else value, Geometry.of(tensor)))
        return tuple(found)

    def _result(self, results: Any, first: int) -> tuple[int, int]:
        """Return the number of the value that a function has returned, and its bytes; -1 if the value is older than the
        call."""
        if type(results) is not Tensor or not tensors_in(results):
            return -1, 0
        storage = results.untyped_storage()
        value = self._recording.find(storage)
        return (-1, 0) if value is None or value < first or value in self._recording.roots else (value, storage.nbytes())

    def known(
        self,
        ops: Sequence[ExpectedOp],
        recorded: Sequence[Call | None],
        needed: Collection[int],
        saves: Sequence[int],
    ) -> tuple[FunctionCall, ...]:
        """Return what is known ahead of a forward like this one; empty if functions are not to be followed.

        Args:
            ops: all of its ops.
            recorded: for each op, its recorded call, if that can be recorded again without seeing the op.
            needed: the values that need their numbers as soon as they are made.
            saves: the value of each saved tensor.
        """
        if not self._is_whole or num_asked() != self._num_asked or sum(len(call.ops) for call in self._calls) != len(ops):
            return ()
        roots = self._recording.roots
        readers = dict[int, set[int]]()
        """For each value that is to have its number, the functions that it is to have it for; -1 stands for all else."""
        for value in set(needed) - set(roots):
            readers[value] = {-1}
        for place, call in enumerate(self._calls):
            for op in ops[call.begin : call.begin + len(call.ops)]:
                for value in () if op.is_skipped and op.over < 0 else (*op.ins, op.over):
                    if value not in roots:
                        readers.setdefault(value, set()).add(place)
        found = []
        for place, (call, noted) in enumerate(zip(self._calls, self._noted, strict=True)):
            inside = range(call.begin, call.begin + len(call.ops))
            asked = {value for value in range(call.first, call.made) if readers.get(value, set()) - {place}}
            is_later = asked <= {call.result} and asked.isdisjoint(saves[save] for save in noted.saves)
            calls = [recorded[op] for op in inside if not ops[op].is_skipped]
            again = [each for each in calls if each is not None and _is_alike(each)]
            may_skip = is_later and len(again) == len(calls) and not any(ops[op].is_writer for op in inside)
            if not inside or not call.is_quiet or not may_skip or not self._are_given(call, noted, again):
                call = replace(call, is_quiet=False, flags=None, result=-1)
            elif again:
                is_recorded = any(each.first <= call.result < each.first + len(each.outs_bytes) for each in again)
                call = replace(call, calls=tuple(again), inputs=self._marked(noted, again), is_recorded=is_recorded)
            else:
                flags, result = call.flags if noted.is_whole else None, call.result if asked else -1
                call = replace(call, flags=flags, result=result, inputs=noted.inputs or () if asked else ())
            found.append(call)
        num_spared = sum(len(call.ops) for call in found if call.is_quiet)
        return tuple(found) if _PER_OP * num_spared > len(found) else ()

    def _are_given(self, call: FunctionCall, noted: _Noted, calls: Sequence[Call]) -> bool:
        """Tell whether all values read by the recorded ops of a function are inputs of the function, or made in it."""
        if noted.inputs is None:
            return not calls
        given = {each.value for each in noted.inputs}
        made = {value for value in range(call.first, call.made) if value not in self._recording.roots}
        return _read_by(calls) - made <= given

    def _marked(self, noted: _Noted, calls: Sequence[Call]) -> tuple[Input, ...]:
        read = _read_by(calls)
        roots = self._recording.roots
        return tuple(Input(each.value, each.geometry, each.value in roots, each.value in read) for each in noted.inputs or ())


def _is_alike(call: Call) -> bool:
    """Tell whether a recorded op does the same each time, and writes to nothing."""
    notes = call.notes
    return notes is None or not (notes.written or notes.kind.written or notes.kind.statistics or notes.kind.is_random)


def _read_by(calls: Sequence[Call]) -> set[int]:
    return {source[1] for call in calls for source in call.sources}


def _may_write(func: Any, kwargs: dict[str, Any] | None) -> bool:
    """Tell whether a function may write to its arguments, or have any other effect."""
    name, kind = getattr(func, "__name__", "_"), type(func)
    if kind is MethodWrapperType:
        return name != "__get__"
    is_torchs = kind in _BUILT_IN or (kind is FunctionType and func.__module__.partition(".")[0] == "torch")
    is_special = name.startswith("__") and name.endswith("__")
    writes = name == "__setitem__" if is_special else name.endswith("_")
    return writes or not is_torchs or bool(kwargs and "out" in kwargs)
