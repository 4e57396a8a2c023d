"""Calls of torch's functions that are known ahead, in which no op is seen: the recorder is off in them.

[Note: quiet functions] A dispatch mode costs the host some 10 µs for each op that it sees, views included, whether it records
them or not. A mode that sees calls of torch's functions (`torch.overrides.TorchFunctionMode`) costs a third of that, and sees a
linear layer once where a dispatch mode sees a transposition, a product and two views. So where a forward is known op by op, it
is followed function by function, and the recorder is off in those that are *quiet*: nothing is recorded in them, or written to,
and nothing is made that is asked for by its number.

The recorder is on everywhere else: between functions, where TorchScript, C++ code and whoever hides from function modes run
their ops; in functions that write, or whose flags (`inplace`, `training`) are not those that were noted; and from the first
function on that is another one than is known. A quiet function must run no Python of the user's. So none is quiet while other
saved-tensor hooks are on top of memkit's, other dispatch modes are on, or the program is in a function mode of its own.

Some modules of torch choose another path where a function mode is on (`torch.overrides.has_torch_function`), with other bits.
They are called without it: a hook on all forwards takes it off for the rest of the step.
"""

from __future__ import annotations

from abc import abstractmethod
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodWrapperType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from memkit import torch_private
from memkit.compiled import num_asked
from memkit.hooks import HookSet
from memkit.torch_state import function_modes, leave_function_mode, leave_untraced

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from memkit.recording.expected import ExpectedOp
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
"""What is asked of a tensor, and runs nothing: how often is nobody's business."""
_PLAIN_TYPES = (Tensor, nn.Parameter)
_BUILT_IN = (BuiltinFunctionType, MethodDescriptorType)
_FLAGS = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_TENSOR = object()
"""Stands for any tensor among the arguments of a call."""
_WITH_FAST_PATHS = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
"""Modules that have another path where nothing is trained, and no function mode is on."""
_PER_OP = 3
"""What it costs that an op is seen, in what it costs that a function is."""


class FunctionCall(NamedTuple):
    """A call of a function that is known ahead."""

    func: Any
    is_quiet: bool
    begin: int
    """How many ops were seen before."""
    ops: tuple[Any, ...]
    """Those that it runs."""
    first: int
    """The number of the next value before it."""
    made: int
    """The same behind it."""
    flags: tuple[Any, ...] | None
    """Its arguments but for tensors, where these may say whether it writes to anything."""


def may_be_quiet(ops: Sequence[Any]) -> bool:
    """Tell whether functions may be followed in a forward of these ops: it compiles nothing."""
    names = ("function_mode_at", "pop_function_mode", "push_function_mode")
    return all(map(torch_private.known, names)) and all(hasattr(op, "overloadpacket") for op in set(ops))


class _FunctionMode(TorchFunctionMode):
    """A function mode that Ctrl-C leaves whole, and that Dynamo does not look into."""

    def __init__(self) -> None:
        super().__init__()
        self._hooks = HookSet()

    def __init_subclass__(cls) -> None:
        leave_untraced(cls.__torch_function__)
        leave_untraced(cls._before)

    def __enter__(self) -> Any:
        """Enter, right behind the recorder."""
        self._hooks.ahead_of_all_forwards(self._before)
        return super().__enter__()  # type: ignore[no-untyped-call]  # torch's

    def __exit__(self, *_: object) -> None:
        leave_function_mode(self)
        self._hooks.remove()

    @abstractmethod
    def stop(self) -> None:
        """Follow functions no more."""

    def _before(self, module: nn.Module, *_: Any) -> None:
        if isinstance(module, _WITH_FAST_PATHS) and not all(inner.training for inner in module.modules()):
            self.stop()
            leave_function_mode(self)


class FunctionNotes(_FunctionMode):
    """Notes the functions of a forward, each op of which is seen.

    Args:
        recording: of its ops.
    """

    def __init__(self, recording: Recording) -> None:
        super().__init__()
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
        if torch_private.backward_task() != -1 or _is_asked(func):
            return func(*args, **kwargs) if kwargs else func(*args)
        recording = self._recording
        begin, first, is_whole, self._is_whole = len(recording.funcs), recording.num_values, self._is_whole, False
        flags = _flags_of(args, kwargs) if _has_flags(func) else None
        may_write = not _are_plain(types) or _may_write(func, kwargs) or (flags is None and _has_flags(func))
        results = func(*args, **kwargs) if kwargs else func(*args)
        self._is_whole = is_whole and torch_private.num_dispatch_modes() == self._num_modes  # else it raised, or others see it
        ops = tuple(recording.funcs[begin:])
        self._calls.append(FunctionCall(func, not may_write, begin, ops, first, recording.num_values, flags))
        return results

    def known(self, ops: Sequence[ExpectedOp], needed: Collection[int], roots: Collection[int]) -> tuple[FunctionCall, ...]:
        """Return what is known ahead of a forward that goes like this one; nothing if functions are not to be followed.

        Args:
            ops: its ops, all of them.
            needed: the values that must have their numbers as soon as they are there.
            roots: those that nothing has made.
        """
        if not self._is_whole or num_asked() != self._num_asked or sum(len(call.ops) for call in self._calls) != len(ops):
            return ()
        read = set(needed).union(*((*op.ins, op.over) for op in ops if not op.is_skipped or op.over >= 0)) - set(roots)
        found = []
        for call in self._calls:
            inside = ops[call.begin : call.begin + len(call.ops)]
            are_skipped = all(op.is_skipped and not op.is_writer for op in inside)
            is_quiet = call.is_quiet and bool(inside) and are_skipped and read.isdisjoint(range(call.first, call.made))
            found.append(FunctionCall(call.func, is_quiet, *call[2:]))
        num_spared = sum(len(call.ops) for call in found if call.is_quiet)
        return tuple(found) if _PER_OP * num_spared > len(found) else ()


class QuietFunctions(_FunctionMode):
    """Has the recorder off in functions that are quiet: see [Note: quiet functions].

    Args:
        calls: what is known.
        recorder: which is off.
    """

    def __init__(self, calls: Sequence[FunctionCall], recorder: Recorder) -> None:
        super().__init__()
        self._calls = calls
        """Empty as soon as they are followed no more."""
        self._recorder = recorder
        self._num_modes = 0
        self._hooks_on_top: Any = None
        self._place = 0
        self.is_inside = False
        """Whether a function runs, in which this mode sees nothing."""

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
        calls = self._calls
        if not calls or torch_private.backward_task() != -1 or _is_asked(func):
            return func(*args, **kwargs) if kwargs else func(*args)
        place, recording = self._place, self._recorder.recording
        call, expected = calls[place] if place < len(calls) else None, recording.expected
        if (
            call is None
            or (func is not call.func and func != call.func)
            or len(recording.funcs) != call.begin
            or recording.num_values > call.first  # values have come that nobody knew of
            or expected is None
            or not expected.ops
        ):
            self.stop()
            return func(*args, **kwargs) if kwargs else func(*args)
        self._place = place + 1
        is_quiet = call.is_quiet and self._is_quiet(call, types, args, kwargs)
        self.is_inside = True
        try:
            if is_quiet:
                recording.funcs.extend(call.ops)
                recording.num_values = call.made
                torch_private.pop_dispatch_mode(None)
            return func(*args, **kwargs) if kwargs else func(*args)
        finally:
            self.is_inside = False
            if is_quiet and torch_private.num_dispatch_modes() < self._num_modes:
                torch_private.push_dispatch_mode(self._recorder)

    def _is_quiet(self, call: FunctionCall, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
        """Tell whether a call that is known as a quiet one writes to nothing, and runs nobody else's Python."""
        are_on_top = torch_private.top_saved_tensor_hooks(True) == self._hooks_on_top
        num_modes = torch_private.num_dispatch_modes()
        if num_modes < self._num_modes and self._recorder not in torch_private.dispatch_modes():
            torch_private.push_dispatch_mode(self._recorder)  # which an interrupt has kept off
        if not are_on_top or num_modes != self._num_modes:
            return False
        is_plain = (not kwargs or "out" not in kwargs) if call.flags is None else _flags_of(args, kwargs) == call.flags
        return is_plain and (not types or _are_plain(types))


def _are_plain(types: Iterable[type]) -> bool:
    """Tell whether tensors are of no class that says itself what functions do."""
    return all(kind in _PLAIN_TYPES for kind in types)


def _is_asked(func: Any) -> bool:
    kind = type(func)
    if kind is MethodWrapperType:
        return func.__self__ in _ASKED and func.__name__ == "__get__"
    return kind is MethodDescriptorType and func in _ASKED


def _has_flags(func: Any) -> bool:
    """Tell whether the arguments of a function may say whether it writes to anything."""
    return type(func) is FunctionType or "norm" in getattr(func, "__name__", "")


def _flags_of(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> tuple[Any, ...] | None:
    """Return the arguments of a call but for tensors; None if not all of them can be compared."""
    flags = [*args, *(kwargs or ()), *(kwargs or {}).values()]
    for place, flag in enumerate(flags):
        if isinstance(flag, Tensor):
            flags[place] = _TENSOR
        elif type(flag) not in _FLAGS and not (type(flag) in (tuple, list) and all(type(item) is int for item in flag)):
            return None
    return tuple(flags)


def _may_write(func: Any, kwargs: dict[str, Any] | None) -> bool:
    """Tell whether a function may write to what it is given, or do anything at all."""
    name, kind = getattr(func, "__name__", "_"), type(func)
    if kind is MethodWrapperType:
        return name != "__get__"
    is_torchs = kind in _BUILT_IN or (kind is FunctionType and func.__module__.partition(".")[0] == "torch")
    is_special = name.startswith("__") and name.endswith("__")
    writes = name == "__setitem__" if is_special else name.endswith("_")
    return writes or not is_torchs or bool(kwargs and "out" in kwargs)
