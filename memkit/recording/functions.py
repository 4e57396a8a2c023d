"""Calls of torch's functions that are known ahead: the recorder is off during them.

[Note: quiet functions] A dispatch mode costs the host some 10 µs for each op that it sees, recorded or not. A function mode
(`torch.overrides.TorchFunctionMode`) costs a third of that per call, and sees one call of a linear layer where a dispatch mode
sees a transposition, a product and two views. So a forward whose ops are known is followed function by function, and the
recorder is off during *quiet* functions: these write to nothing, draw no random numbers, save nothing before they return, and
only the value that they return is looked up by its number, which it gets when the function has returned.

A function that gets tensors of other shapes may save other tensors, and is not quiet. A quiet function may run ops that are to
be recorded: with the same values in the same geometry and the same flags, they do the same as before. So they are recorded as
noted, without being seen.

The recorder is on everywhere else: between functions, where TorchScript, C++ code and code that disables function modes run
their ops; in functions that write, or whose flags (`inplace`, `training`) or values differ; and from the first unexpected
function on. A quiet function must run no Python of the user's. So none is quiet while other saved-tensor hooks are inside of
memkit's, other dispatch modes are on, or the program is in a function mode of its own.

Some modules of torch take another path, with other bits, while a function mode is on (`torch.overrides.has_torch_function`).
For these, a global forward pre-hook turns the mode off for the rest of the step.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from dataclasses import dataclass, replace
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodWrapperType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from memkit.core import torch_private
from memkit.core.compiled import num_asked
from memkit.core.hooks import HookSet
from memkit.core.tensors import PLAIN_TYPES, Geometry
from memkit.core.torch_state import function_modes, leave_function_mode, leave_untraced
from memkit.recording.recorded import has_tensors, tensors_in

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from memkit.recording.expected import ExpectedOp
    from memkit.recording.recorded import OpCall
    from memkit.recording.recorder import Recorder
    from memkit.recording.recording import Recording


_ASKED = frozenset(
    getattr(Tensor, name, None)
    for name in (
        *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "requires_grad", "is_leaf", "grad_fn"),
        *("is_cpu", "is_cuda", "is_meta", "is_nested", "is_quantized", "is_sparse", "is_sparse_csr", "names", "output_nr"),
        *("size", "dim", "numel", "nelement", "ndimension", "stride", "storage_offset", "element_size", "is_contiguous"),
        *("data_ptr", "get_device", "is_complex", "is_floating_point", "is_inference", "is_conj", "is_neg"),
    )
)
"""Queries of a tensor, which run no op and need not be followed."""

_FLAGS = frozenset((int, str, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size))
_TENSOR = object()
"""Stands for any tensor among a call's arguments."""
_WITH_FAST_PATHS = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
"""Modules that take another path if nothing is trained and no function mode is on."""


class Input(NamedTuple):
    value: int
    """-1 for a tensor without a value."""
    geometry: Geometry
    is_root: bool = False
    """Its value gets a number when it is first met."""
    is_read: bool = False


@dataclass(frozen=True, slots=True)
class FunctionCall:
    func: Any
    is_quiet: bool
    begin: int
    ops: tuple[Any, ...]
    first: int
    made: int
    """The next value's number after it."""
    flags: tuple[Any, ...] | None
    """Its arguments other than tensors; None if they don't matter."""
    result: int = -1
    """The number of the returned value; -1 if the call did not make it or nothing needs it."""
    num_bytes: int = 0
    calls: tuple[OpCall, ...] = ()
    inputs: tuple[Input, ...] | None = ()
    """None if its recorded ops must always be seen."""
    saves: range = range(0)
    is_recorded: bool = False
    """A recorded op makes the returned value."""


class FunctionMode(TorchFunctionMode):
    """A function mode that stays consistent at Ctrl-C and that Dynamo doesn't trace."""

    def __init__(self) -> None:
        super().__init__()
        self._hooks = HookSet()

    def __init_subclass__(cls) -> None:
        leave_untraced(cls.__torch_function__)
        leave_untraced(cls._before)

    def __enter__(self) -> Any:
        self._hooks.ahead_of_all_forwards(self._before)
        return super().__enter__()  # type: ignore[no-untyped-call]  # torch's

    def __exit__(self, *_: object) -> None:
        leave_function_mode(self)
        self._hooks.remove()

    @abstractmethod
    def stop(self) -> None:
        """Stop following functions."""

    def _before(self, module: nn.Module, *_: Any) -> None:
        if isinstance(module, _WITH_FAST_PATHS) and not all(inner.training for inner in module.modules()):
            self.stop()
            leave_function_mode(self)


class QuietFunctions(FunctionMode):
    """Turns the recorder off during quiet functions: see [Note: quiet functions]."""

    def __init__(self, calls: Sequence[FunctionCall], recorder: Recorder) -> None:
        super().__init__()
        self._calls = calls
        """Empty once the mode follows no more functions."""
        self._recorder = recorder
        self._num_modes = 0
        self._hooks_on_top: Any = None
        self._place = 0
        self.is_inside = False
        """A function is running, during which this mode sees nothing."""

    def __enter__(self) -> Any:
        self._num_modes, self._hooks_on_top = torch_private.num_dispatch_modes(), torch_private.top_saved_tensor_hooks(True)
        if not all(isinstance(mode, torch_private.known("DeviceMode")) for mode in function_modes()):
            self.stop()  # it would run the program's Python within each function
            return self
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._hooks_on_top = None  # they hold saved tensors

    def stop(self) -> None:
        self._calls = ()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        calls, place = self._calls, self._place
        call = calls[place] if place < len(calls) else None
        if call is None or (func is not call.func and func != call.func):
            if call is not None and torch_private.backward_task() == -1 and not is_asked(func):
                self.stop()
            return func(*args, **kwargs) if kwargs else func(*args)
        if torch_private.backward_task() != -1:
            return func(*args, **kwargs) if kwargs else func(*args)
        recording = self._recorder.recording
        expected = recording.expected
        # if not, other ops have run, or unknown values have come
        if len(recording.funcs) != call.begin or recording.num_values > call.first or expected is None or not expected.ops:
            self.stop()
            return func(*args, **kwargs) if kwargs else func(*args)
        self._place = place + 1
        is_quiet = call.is_quiet and self._begin_quiet(call, types, args, kwargs)
        self.is_inside = True
        try:
            if is_quiet:
                recording.funcs.extend(call.ops)
                recording.num_values = call.calls[0].first if call.calls else call.made
                torch_private.pop_dispatch_mode(None)
            results = func(*args, **kwargs) if kwargs else func(*args)
            if is_quiet and (call.result >= 0 or call.calls) and not self._note(call, results):
                self.stop()
                expected.end(recording)
            return results
        finally:
            self.is_inside = False
            if is_quiet and torch_private.num_dispatch_modes() < self._num_modes:
                torch_private.push_dispatch_mode(self._recorder)

    def _note(self, call: FunctionCall, results: Any) -> bool:
        recording, value, storage, address = self._recorder.recording, call.result, None, 0
        if value >= 0:
            if type(results) is not Tensor or results.layout is not torch.strided:
                return False
            try:
                storage = results.untyped_storage()
            except RuntimeError:  # it wraps another, as a batch of `torch.vmap` does
                return False
            address = torch_private.storage_address(storage)
            before = recording.current.get(address) or recording.lent.get(address)  # `Recording.was_there`, in place
            if (before is not None and before[0]() is storage) or storage.nbytes() != call.num_bytes:
                return False
        if call.calls:
            if recording.num_values != call.calls[0].first:
                return False  # an unknown value was numbered
            recording.num_values = call.made  # first, as in `Recording.add_root`
            recording.calls.extend(call.calls)
        if storage is not None and recording.expected is None and not call.is_recorded:
            recording.add_root(results, storage, is_inside=True)  # unexpected saves: no recorded op makes the value
        elif storage is not None:
            recording.current[address] = (weakref.ref(storage), value)
            if recording.expected is not None and not call.is_recorded:
                recording.expected.unmade.add(value)
            if value in recording.retained:
                recording.hold_made(value, results)
        return True

    def _begin_quiet(self, call: FunctionCall, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
        """Begin a quiet call; tell whether it writes to nothing now and runs no other Python."""
        are_on_top = torch_private.top_saved_tensor_hooks(True) == self._hooks_on_top
        num_modes = torch_private.num_dispatch_modes()
        if num_modes < self._num_modes and self._recorder not in torch_private.dispatch_modes():
            torch_private.push_dispatch_mode(self._recorder)  # which an interrupt has kept off
        if not are_on_top or num_modes != self._num_modes:
            return False
        if types and not are_plain(types):
            return False
        is_alike = (not kwargs or "out" not in kwargs) if call.flags is None else flags_of(args, kwargs) == call.flags
        try:
            return is_alike and (not call.inputs or self._take_arguments(call.inputs, call.calls, tensors_in(args)))
        except RuntimeError:  # a tensor wraps another
            return False

    def _take_arguments(self, inputs: Sequence[Input], calls: Sequence[OpCall], tensors: Sequence[Tensor]) -> bool:
        """Number the roots that a function gets; tell whether it gets the expected values."""
        recording, roots = self._recorder.recording, []
        expected, current = recording.expected, recording.current
        if expected is None or len(tensors) != len(inputs):
            return False
        for tensor, (value, geometry, is_root, is_read) in zip(tensors, inputs, strict=True):
            if Geometry.of(tensor) != geometry:
                return False
            if is_read:
                storage = tensor.untyped_storage()
                found = current.get(torch_private.storage_address(storage))  # `Recording.find`, in place
                if found is not None and found[0]() is storage:
                    if found[1] != value:
                        return False
                elif is_root and value not in recording.roots and value not in expected.unmade:
                    roots.append((tensor, value))
                else:
                    return False
        if roots:
            recording.num_values = calls[0].first  # first: so no other value has one of these numbers, whatever comes
            with torch_private.without_python_dispatch():
                for tensor, value in roots:
                    expected.add_root(recording, tensor, value)
        return True


def are_plain(types: Iterable[type]) -> bool:
    return all(kind in PLAIN_TYPES for kind in types)


def is_asked(func: Any) -> bool:
    kind = type(func)
    if kind is MethodWrapperType:
        return func.__self__ in _ASKED and func.__name__ == "__get__"
    return kind is MethodDescriptorType and func in _ASKED


def has_flags(func: Any) -> bool:
    return type(func) is FunctionType or "norm" in getattr(func, "__name__", "")


def flags_of(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> tuple[Any, ...] | None:
    """None if not all can be compared."""
    flags = [*args, *(kwargs or ()), *(kwargs or {}).values()]
    for place, flag in enumerate(flags):
        if isinstance(flag, Tensor):
            flags[place] = _TENSOR
        elif type(flag) in (tuple, list):
            flags[place] = [_TENSOR if isinstance(item, Tensor) else _flag_of(item) for item in flag]
            if None in flags[place]:
                return None
        else:
            flags[place] = _flag_of(flag)
            if flags[place] is None:
                return None
    return tuple(flags)


def _flag_of(flag: Any) -> Any:
    kind = type(flag)
    if kind is float:
        return flag.hex()
    if kind is bool or flag is None:
        return str(flag)
    return flag if kind in _FLAGS else None


_BUILT_IN = (BuiltinFunctionType, MethodDescriptorType)
_PER_OP = 3
"""The cost of seeing an op, in multiples of the cost of seeing a function."""


def may_be_quiet(ops: Sequence[Any]) -> bool:
    """Tell whether functions may be followed in a forward with these ops: not if one of them compiles code."""
    names = ("function_mode_at", "pop_function_mode", "push_function_mode")
    return all(map(torch_private.known, names)) and all(hasattr(op, "overloadpacket") for op in set(ops))


class FunctionNotes(FunctionMode):
    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.num_saves = 0
        self._recording = recording
        self._calls: list[FunctionCall] = []
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
            except RuntimeError:  # they wrap other tensors, as the batches of `torch.vmap` do
                inputs, result, num_bytes, may_write = None, -1, 0, True
        call = FunctionCall(func, not may_write, begin, ops, first, recording.num_values, flags, result, num_bytes)
        self._calls.append(replace(call, inputs=inputs, saves=range(num_saves, self.num_saves)))
        return results

    def _inputs(self, args: tuple[Any, ...]) -> tuple[Input, ...]:
        found = []
        for tensor in tensors_in(args):
            value = self._recording.find(tensor.untyped_storage())
            found.append(Input(-1 if value is None else value, Geometry.of(tensor)))
        return tuple(found)

    def _result(self, results: Any, first: int) -> tuple[int, int]:
        """Return the number and the bytes of the returned value; -1 if it is older than the call."""
        if type(results) is not Tensor or not tensors_in(results):
            return -1, 0
        storage = results.untyped_storage()
        value = self._recording.find(storage)
        return (-1, 0) if value is None or value < first or value in self._recording.roots else (value, storage.nbytes())

    def known(
        self,
        ops: Sequence[ExpectedOp],
        recorded: Sequence[OpCall | None],
        needed: Collection[int],
        saves: Sequence[int],
    ) -> tuple[FunctionCall, ...]:
        if not self._is_whole or num_asked() != self._num_asked or sum(len(call.ops) for call in self._calls) != len(ops):
            return ()
        roots = self._recording.roots
        readers = dict[int, set[int]]()
        """For each value that needs a number, the functions that need it; -1 stands for all else."""
        for value in set(needed) - set(roots):
            readers[value] = {-1}
        for place, call in enumerate(self._calls):
            for op in ops[call.begin : call.begin + len(call.ops)]:
                for value in () if op.is_skipped and op.over < 0 else (*op.ins, op.over):
                    if value not in roots:
                        readers.setdefault(value, set()).add(place)
        found = []
        for place, call in enumerate(self._calls):
            inside = range(call.begin, call.begin + len(call.ops))
            asked = {value for value in range(call.first, call.made) if readers.get(value, set()) - {place}}
            is_later = asked <= {call.result} and asked.isdisjoint(saves[save] for save in call.saves)
            calls = [recorded[op] for op in inside if not ops[op].is_skipped]
            again = [each for each in calls if each is not None and _is_alike(each)]
            may_skip = is_later and len(again) == len(calls) and not any(ops[op].is_writer for op in inside)
            if not inside or not call.is_quiet or not may_skip or not self._are_given(call, again):
                call = replace(call, is_quiet=False, flags=None, result=-1)
            elif again:
                is_recorded = any(each.first <= call.result < each.first + len(each.outs_bytes) for each in again)
                given, read = call.inputs or (), _read_by(again)
                inputs = tuple(each._replace(is_root=each.value in roots, is_read=each.value in read) for each in given)
                call = replace(call, calls=tuple(again), inputs=inputs, is_recorded=is_recorded)
            else:
                flags, result = call.flags if has_flags(call.func) else None, call.result if asked else -1
                call = replace(call, flags=flags, result=result, inputs=call.inputs if asked else ())
            found.append(call)
        num_spared = sum(len(call.ops) for call in found if call.is_quiet)
        return tuple(found) if _PER_OP * num_spared > len(found) else ()

    def _are_given(self, call: FunctionCall, calls: Sequence[OpCall]) -> bool:
        """Tell whether a function's recorded ops read only its inputs and values made in it."""
        if call.inputs is None:
            return not calls
        given = {each.value for each in call.inputs}
        made = {value for value in range(call.first, call.made) if value not in self._recording.roots}
        return _read_by(calls) - made <= given


def _is_alike(call: OpCall) -> bool:
    """Tell whether a recorded op always does the same and writes to nothing."""
    kind = call.kind
    return kind is None or not (call.written or kind.written or kind.statistics or kind.is_random)


def _read_by(calls: Sequence[OpCall]) -> set[int]:
    return {source[1] for call in calls for source in call.sources}


def _may_write(func: Any, kwargs: dict[str, Any] | None) -> bool:
    name, kind = getattr(func, "__name__", "_"), type(func)
    if kind is MethodWrapperType:
        return name != "__get__"
    is_torchs = kind in _BUILT_IN or (kind is FunctionType and func.__module__.partition(".")[0] == "torch")
    is_special = name.startswith("__") and name.endswith("__")
    writes = name == "__setitem__" if is_special else name.endswith("_")
    return writes or not is_torchs or bool(kwargs and "out" in kwargs)
