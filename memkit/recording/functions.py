"""Calls of torch's functions that are known ahead: the recorder is off during them.

[Note: quiet functions] A dispatch mode costs the host some 10 µs for each op that it sees, views included, whether it records
them or not. A mode that sees calls of torch's functions (`torch.overrides.TorchFunctionMode`) costs a third of that, and sees
one call of a linear layer where a dispatch mode sees a transposition, a product and two views. So a forward whose ops are known
is followed function by function, and the recorder is off during functions that are *quiet*: nothing is written to in them, and
of the values that they make, only the returned one is looked up by its number, which it gets when the function has returned.

A function that gets tensors of other shapes may save other tensors, and is not quiet. Ops that are recorded may run in a quiet
function: if it gets the same values, in the same geometry, with the same flags, they do the same as when they were noted. So
they are recorded as noted, without being seen. Functions are not quiet if they write, draw random numbers, or save a value
before they return.

The recorder is on everywhere else: between functions, where TorchScript, C++ code and code that disables function modes run
their ops; in functions that write, or whose flags (`inplace`, `training`) or values differ; and from the first unexpected
function on. A quiet function must run no Python of the user's. So none is quiet while other saved-tensor hooks are inside of
memkit's, other dispatch modes are on, or the program is in a function mode of its own.

Some modules of torch take another path, with other bits, if a function mode is on (`torch.overrides.has_torch_function`). For
these, a global forward pre-hook turns the mode off for the rest of the step.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from dataclasses import dataclass
from types import FunctionType, MethodDescriptorType, MethodWrapperType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from memkit import torch_private
from memkit.hooks import HookSet
from memkit.recording.recorded import tensors_in
from memkit.storages import Geometry
from memkit.torch_state import function_modes, leave_function_mode, leave_untraced

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from memkit.recording.recorded import Call
    from memkit.recording.recorder import Recorder

_ASKED = frozenset(
    getattr(Tensor, name, None)
    for name in (
        *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "requires_grad", "is_leaf", "grad_fn"),
        *("is_cpu", "is_cuda", "is_meta", "is_nested", "is_quantized", "is_sparse", "is_sparse_csr", "names", "output_nr"),
        *("size", "dim", "numel", "nelement", "ndimension", "stride", "storage_offset", "element_size", "is_contiguous"),
        *("data_ptr", "get_device", "is_complex", "is_floating_point", "is_inference", "is_conj", "is_neg"),
    )
)
"""Queries of a tensor, which run no op: it doesn't matter how often they are made."""
_PLAIN_TYPES = (Tensor, nn.Parameter)

_FLAGS = frozenset((int, str, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size))
_TENSOR = object()
"""Stands for any tensor among the arguments of a call."""
_WITH_FAST_PATHS = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
"""Modules that take another path if nothing is trained and no function mode is on."""


class Input(NamedTuple):
    """A tensor among the arguments of a function."""

    value: int
    """The number of its value, -1 if it has none."""
    geometry: Geometry
    is_root: bool = False
    """Whether its value gets a number when it is first met."""
    is_read: bool = False
    """Whether a recorded op reads it."""


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A function call that is known ahead."""

    func: Any
    is_quiet: bool
    begin: int
    """How many ops were seen before it."""
    ops: tuple[Any, ...]
    """The ops that it runs."""
    first: int
    """The number of the next value before it."""
    made: int
    """The number of the next value after it."""
    flags: tuple[Any, ...] | None
    """Its arguments other than tensors, if they matter."""
    result: int = -1
    """The number of the value that it returns, -1 if that is not needed, or not made in it."""
    num_bytes: int = 0
    """The bytes of that value."""
    calls: tuple[Call, ...] = ()
    """Those of its ops that are recorded."""
    inputs: tuple[Input, ...] = ()
    """Its tensor arguments, if they matter."""
    is_recorded: bool = False
    """Whether one of the recorded ops makes the returned value."""


class FunctionMode(TorchFunctionMode):
    """A function mode that stays consistent at Ctrl-C, and that Dynamo doesn't trace."""

    def __init__(self) -> None:
        super().__init__()
        self._hooks = HookSet()

    def __init_subclass__(cls) -> None:
        leave_untraced(cls.__torch_function__)
        leave_untraced(cls._before)

    def __enter__(self) -> Any:
        """Enter, right after the recorder."""
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
    """Turns the recorder off during quiet functions: see [Note: quiet functions].

    Args:
        calls: the known calls.
        recorder: the recorder.
    """

    def __init__(self, calls: Sequence[FunctionCall], recorder: Recorder) -> None:
        super().__init__()
        self._calls = calls
        """Empty once functions are not followed any more."""
        self._recorder = recorder
        self._num_modes = 0
        self._hooks_on_top: Any = None
        self._place = 0
        self.is_inside = False
        """Whether a function is running, during which this mode sees nothing."""

    def __enter__(self) -> Any:
        self._num_modes, self._hooks_on_top = torch_private.num_dispatch_modes(), torch_private.top_saved_tensor_hooks(True)
        if not all(isinstance(mode, torch_private.known("DeviceMode")) for mode in function_modes()):
            self.stop()  # it would run the program's Python within each function
            return self
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._hooks_on_top = None  # they hold what is saved

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
        # if not, other ops have run, or values have come that nobody knew of
        if len(recording.funcs) != call.begin or recording.num_values > call.first or expected is None or not expected.ops:
            self.stop()
            return func(*args, **kwargs) if kwargs else func(*args)
        self._place = place + 1
        is_quiet = call.is_quiet and self._is_quiet(call, types, args, kwargs)
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
        """Note the value that a quiet function has made; tell whether it is what was expected."""
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
                return False  # something was numbered that nobody knew of
            recording.num_values = call.made  # first, as in `Recording.add_root`
            recording.calls.extend(call.calls)
        if storage is not None and recording.expected is None and not call.is_recorded:
            recording.add_root(results, storage, is_inside=True)  # what was saved in it was not as expected: nothing makes it
        elif storage is not None:
            recording.current[address] = (weakref.ref(storage), value)
            if recording.expected is not None and not call.is_recorded:
                recording.expected.unmade.add(value)
            if value in recording.retained:
                recording.hold_made(value, results)
        return True

    def _is_quiet(self, call: FunctionCall, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
        """Tell whether a call that is known to be quiet writes to nothing now, and runs no other Python."""
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
            return is_alike and (not call.inputs or self._is_given(call, tensors_in(args)))
        except RuntimeError:  # a tensor wraps another
            return False

    def _is_given(self, call: FunctionCall, tensors: Sequence[Tensor]) -> bool:
        """Tell whether a function gets the expected values; if so, number its roots."""
        recording, roots = self._recorder.recording, []
        expected, current = recording.expected, recording.current
        if expected is None or len(tensors) != len(call.inputs):
            return False
        for tensor, (value, geometry, is_root, is_read) in zip(tensors, call.inputs, strict=True):
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
            recording.num_values = call.calls[0].first  # first: so no other value has one of these numbers, whatever comes
            with torch_private.without_python_dispatch():
                for tensor, value in roots:
                    expected.add_root(recording, tensor, value)
        return True


def are_plain(types: Iterable[type]) -> bool:
    """Tell whether none of these tensor classes has a `__torch_function__` of its own."""
    return all(kind in _PLAIN_TYPES for kind in types)


def is_asked(func: Any) -> bool:
    kind = type(func)
    if kind is MethodWrapperType:
        return func.__self__ in _ASKED and func.__name__ == "__get__"
    return kind is MethodDescriptorType and func in _ASKED


def has_flags(func: Any) -> bool:
    """Tell whether the arguments of a function may determine whether it writes to a tensor."""
    return type(func) is FunctionType or "norm" in getattr(func, "__name__", "")


def flags_of(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> tuple[Any, ...] | None:
    """Return the arguments of a call other than tensors; None if not all of them can be compared."""
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
    """Return what an argument is compared by: 0.0 is not -0.0, and 1 is neither 1.0 nor True; None if it can't be compared."""
    kind = type(flag)
    if kind is float:
        return flag.hex()
    if kind is bool or flag is None:
        return str(flag)
    return flag if kind in _FLAGS else None
