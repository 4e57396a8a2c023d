"""Calls of torch's functions that are known ahead, in which no op is seen: the recorder is off but where ops are recorded.

[Note: quiet functions] A dispatch mode costs the host some 10 µs for each op that it sees, views included, whether it records
them or not. A mode that sees calls of torch's functions (`torch.overrides.TorchFunctionMode`) costs a third of that, and sees a
linear layer once where a dispatch mode sees a transposition, a product and two views. So where a forward is known op by op, it
is followed function by function: the recorder is on in those alone in which something is recorded, written to, or made that is
asked for by its number. In all others, which are *quiet*, nothing happens that anybody would have to know of.

Nothing is written to unseen. What writes is never quiet, and with the first function that is another one than is known the
recorder is on before that runs, up to the end of the forward. A function whose flags say whether it writes (`inplace`,
`training`) is quiet with the flags that it was noted with alone. In a forward of which an op was seen outside of all functions,
as those that TorchScript or C++ code runs, none is quiet.
"""

from __future__ import annotations

from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodWrapperType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from memkit import torch_private
from memkit.compiled import num_asked
from memkit.torch_state import leave_function_mode, leave_untraced

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from memkit.recording.expected import ExpectedOp
    from memkit.recording.recorder import Recorder
    from memkit.recording.recording import Recording

_ASKED = frozenset(
    getattr(Tensor, name, None)
    for name in (
        *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "requires_grad", "is_leaf", "grad_fn"),
        *("is_cpu", "is_cuda", "is_meta", "is_nested", "is_quantized", "is_sparse", "is_sparse_csr", "names", "output_nr"),
    )
)
"""What is asked of a tensor, and runs nothing: how often is nobody's business."""
_PLAIN_TYPES = (Tensor, nn.Parameter)
_BUILT_IN = (BuiltinFunctionType, MethodDescriptorType)
_FLAGS = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_TENSOR = object()
"""Stands for any tensor among the arguments of a call."""
_FAST_PATHS = frozenset({"aten._transformer_encoder_layer_fwd", "aten._native_multi_head_attention"})
"""Ops that torch's modules do not run where a function mode is on."""


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
    """Tell whether functions may be followed in a forward of these ops: it compiles nothing, and runs the same."""
    if not (torch_private.known("function_mode_at") and torch_private.known("pop_function_mode")):
        return False
    return all(hasattr(op, "overloadpacket") and str(op.overloadpacket) not in _FAST_PATHS for op in set(ops))


class _FunctionMode(TorchFunctionMode):
    """A function mode that Ctrl-C leaves whole, and that Dynamo does not look into."""

    def __init_subclass__(cls) -> None:
        leave_untraced(cls.__torch_function__)

    def __enter__(self) -> Any:
        return super().__enter__()  # type: ignore[no-untyped-call]  # torch's

    def __exit__(self, *_: object) -> None:
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
        """Enter, right behind the recorder."""
        self._num_asked, self._num_modes = num_asked(), torch_private.num_dispatch_modes()
        return super().__enter__()

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
        """Return what is known ahead of a forward that goes like this one; nothing if no function may be quiet.

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
            is_quiet = call.is_quiet and are_skipped and read.isdisjoint(range(call.first, call.made))
            found.append(FunctionCall(call.func, is_quiet, *call[2:]))
        num_spared = sum(len(call.ops) for call in found if call.is_quiet)
        return tuple(found) if _PER_OP * num_spared > len(found) else ()


class QuietFunctions(_FunctionMode):
    """Has the recorder off in functions that are quiet: see [Note: quiet functions].

    Args:
        calls: what is known.
        recorder: which is off.
        go_on: has it on from there on, where another function comes.
    """

    def __init__(self, calls: Sequence[FunctionCall], recorder: Recorder, go_on: Callable[[], None]) -> None:
        super().__init__()
        self._calls = calls
        """Empty as soon as they are followed no more."""
        self._recorder, self._go_on = recorder, go_on
        self._num_modes = torch_private.num_dispatch_modes()
        self._place = 0
        self.is_inside = False
        """Whether a function runs, in which this mode sees nothing."""

    def __enter__(self) -> Any:
        """Enter, right behind the recorder: what that has told Dynamo holds also where it is off."""
        super().__enter__()
        torch_private.pop_dispatch_mode(None)
        return self

    def stop(self) -> None:
        """Follow functions no more, and record all ops from here on."""
        if self._calls:
            self._calls = ()
            self._go_on()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        calls = self._calls
        if (
            not calls
            or torch_private.backward_task() != -1
            or (type(func) is MethodWrapperType and func.__self__ in _ASKED and func.__name__ == "__get__")
        ):
            return func(*args, **kwargs) if kwargs else func(*args)
        place, recording = self._place, self._recorder.recording
        call = calls[place] if place < len(calls) else None
        if (
            call is None
            or (func is not call.func and func != call.func)
            or recording.num_values > call.first  # values have come that nobody knew of
            or torch_private.num_dispatch_modes() != self._num_modes
        ):
            self.stop()
            return func(*args, **kwargs) if kwargs else func(*args)
        self._place = place + 1
        if (
            call.is_quiet
            and (not types or _are_plain(types))
            and ((not kwargs or "out" not in kwargs) if call.flags is None else _flags_of(args, kwargs) == call.flags)
        ):
            recording.funcs.extend(call.ops)
            recording.num_values = call.made
            self.is_inside = True
            results = func(*args, **kwargs) if kwargs else func(*args)
            self.is_inside = False
            return results
        return self._run_recorded(call, func, args, kwargs)

    def _run_recorded(self, call: FunctionCall, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Run a function with the recorder on; if it has done something else than is known, that stays on."""
        torch_private.push_dispatch_mode(self._recorder)
        self.is_inside = True
        try:
            return func(*args, **kwargs) if kwargs else func(*args)
        finally:
            self.is_inside = False
            recording = self._recorder.recording
            is_expected = recording.expected is not None and bool(recording.expected.ops)
            is_as_known = len(recording.funcs) == call.begin + len(call.ops) and recording.num_values <= call.made
            if not (is_expected and is_as_known and torch_private.num_dispatch_modes() == self._num_modes + 1):
                self._calls = ()
            if self._calls:
                torch_private.pop_dispatch_mode(None)


def _are_plain(types: Iterable[type]) -> bool:
    """Tell whether tensors are of no class that says itself what functions do."""
    return all(kind in _PLAIN_TYPES for kind in types)


def _is_asked(func: Any) -> bool:
    return type(func) is MethodWrapperType and func.__self__ in _ASKED and func.__name__ == "__get__"


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
