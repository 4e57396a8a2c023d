"""The module calls of a recorded forward: the module of each op, and whether each call, or each span of neighboring calls in a
`Sequential`, could run again without a side effect."""

from __future__ import annotations

import random
import sys
import threading
import types
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from memkit.core import torch_private
from memkit.core.hooks import HookSet
from memkit.core.sequentials import SpanReference, calls_in_turn
from memkit.core.tensors import is_range_of_bytes
from memkit.core.torch_state import has_gathered, is_sharded_by_fsdp2
from memkit.plan import ModuleCall, find_spans
from memkit.recording.recording import Recording


class Aftermath:
    """The last reader of each value of a finished forward, the writers of each storage, and the noted calls of each module."""

    def __init__(self, recording: Recording, noted: Iterable[NotedCall]) -> None:
        recording.sync()
        self.recording = recording
        self.last_read = {value: op for op, ins in enumerate(recording.lineage.ins) for value in ins}
        self.writes: dict[int, list[int]] = {}  # by address, the numbers of the writing ops among all ops, from 1 on
        for func, address, _ in recording.effects:
            self.writes.setdefault(address, []).append(func)
        self.alike: dict[int, list[NotedCall]] = {}  # calls by the identity of their module's weak reference
        for call in noted:
            self.alike.setdefault(id(call.module), []).append(call)
            for value in call.given:
                self.last_read[value] = max(call.begin.op, self.last_read.get(value, call.begin.op))


_NUMBERS = (int, float, complex, bool, str, bytes, type(None))
_CONSTANTS = (*_NUMBERS, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, slice, range, type(...))
_OF_GATHERS = (torch_private.MODULE_STATE[0], *torch_private.MODULE_HOOKS)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type)
_MOST_NESTED = 4
NO_GRAD = "gradients are off"
WRITES = "an op in it writes to what was there before"  # rules out a call as a region, but not its enclosing call


class _Begin(NamedTuple):
    """The next number of each kind when a call begins."""

    save: int
    op: int
    func: int
    value: int


class NotedCall:
    def __init__(self, module: nn.Module, name: str, number: int, parent: int, recording: Recording) -> None:
        self.module = weakref.ref(module)
        self.name, self.number, self.parent = name, number, parent
        self.begin = _Begin(len(recording.saved), len(recording.calls), len(recording.funcs), recording.num_values)
        self._is_sharded = is_sharded_by_fsdp2(module)
        self._state: list[Any] | None = list(_state_of(module, is_sharded=self._is_sharded))
        self._drawn = _python_generators()
        self.given = frozenset[int]()  # its inputs that the forward made
        self.made: tuple[int, frozenset[int]] = (0, frozenset())  # the next value's number after it, and what it returned
        self.weights: tuple[int, list[tuple[weakref.ref[Tensor], int, int]]] = (0, [])  # ops up to its end, its weights then
        self.stop: tuple[int, int] | None = None  # the next save and op after it; None while it runs, and if it failed
        self.inputs: tuple[int, ...] = ()
        self.shapes: tuple[tuple[int, ...], ...] = ()
        self._is_rewritten: bool | None = None  # None until `is_rewritten` is called
        self.needs_grad = False
        self.why_no_part = ""
        if not torch.is_grad_enabled():
            self.why_no_part = NO_GRAD
        elif any(
            is_lazy(tensor) or not is_range_of_bytes(tensor) or _values_of(tensor, recording)  # a lazy one is made in this call
            for tensor in self._state
            if isinstance(tensor, Tensor)
        ):
            self.why_no_part = "an attribute of it was computed in this step"
        self.why_not = self.why_no_part

    def end(self, module: nn.Module, given: tuple[Any, Any], output: Any, recording: Recording) -> None:
        self.stop = len(recording.saved), len(recording.calls)
        before, self._state = self._state, None
        self.given = frozenset(value for value in _values_of(given, recording) if value < self.begin.value)
        if recording.is_gathering:
            self.why_no_part = self.why_not = "it is in a module that FSDP2 does not gather for its backward"
        self.made = recording.num_values, frozenset(_values_of(output, recording))
        if self.why_not:
            self._drawn = ()
            return
        self.weights = len(recording.funcs), [(weakref.ref(tensor), *_place_of(tensor)) for tensor in _weights_of(module)]
        recording.sync()
        ins = chain.from_iterable(recording.lineage.ins[self.begin.op :])
        read = {value for value in ins if value < self.begin.value and _is_own(value, recording)}
        self.inputs = tuple(sorted(read | self.given))
        tensors = {id(leaf): leaf for leaf in torch_private.tree_leaves(given) if isinstance(leaf, Tensor)}
        self.shapes = tuple(tuple(tensor.shape) for tensor in tensors.values())
        self.needs_grad = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in torch_private.tree_leaves(output))
        if not _are_same(before or (), list(_state_of(module, is_sharded=self._is_sharded))):
            self.why_no_part = "its forward changes an attribute"
        elif self._drawn != _python_generators():
            self.why_no_part = "it draws random numbers of Python's or NumPy's"
        elif not all(map(_is_plain, given)):
            self.why_no_part = "it is given an object that it may change"
        self.why_not = self.why_no_part or _why_not_alone([self], read, recording)
        self._drawn = ()

    def is_rewritten(self, aftermath: Aftermath) -> bool:
        """Tell whether anything but calls of the same module writes to its parameters or buffers after it."""
        if self._is_rewritten is None:
            self._is_rewritten = self._look_for_writes(aftermath)
        return self._is_rewritten

    def _look_for_writes(self, aftermath: Aftermath) -> bool:
        module, (func, before) = self.module(), self.weights
        after = [] if module is None else list(_weights_of(module))
        if len(after) != len(before):
            return True
        spans = [(other.begin.func, other.weights[0]) for other in aftermath.alike[id(self.module)]]
        is_gathered = module is not None and has_gathered(module.modules())
        for tensor, (reference, address, version) in zip(after, before, strict=True):
            is_param = isinstance(tensor, nn.Parameter)
            if is_param and is_gathered:  # by now a shard has replaced it, and other tensors have its address
                gathered = reference()
                if gathered is None or _place_of(gathered)[1] != version:
                    return True
                continue
            now = _place_of(tensor)
            if reference() is not tensor or now[0] != address or (is_param and now[1] != version):
                return True
            for write in aftermath.writes.get(address, ()):
                if write > func and (is_param or not any(first < write <= last for first, last in spans)):
                    return True
        return False

    def as_planned(self, aftermath: Aftermath) -> ModuleCall:
        return _planned([self], self.why_not or ("" if self.stop is not None else "it failed"), self.inputs, aftermath)


def _planned(calls: Sequence[NotedCall], why_not: str, inputs: tuple[int, ...], aftermath: Aftermath) -> ModuleCall:
    """Return calls in a row as one, with the name of the first."""
    recording, first, last = aftermath.recording, calls[0], calls[-1]
    save, op, func, value = first.begin
    last_save, last_op = last.stop or (save, op)
    ops, funcs = recording.saved_at[last_save - 1] if last_save > save else (op, func)
    hidden = (made for made in range(value, last.made[0]) if made not in last.made[1] and _is_own(made, recording))
    if why_not:
        pass
    elif not recording.overwritten.isdisjoint(inputs):
        why_not = "what it is given is written to later"
    elif any(aftermath.last_read.get(made, -1) >= last_op for made in hidden):
        why_not = "what it makes is used elsewhere"
    elif any(call.is_rewritten(aftermath) for call in calls):
        why_not = "its weights are written after it has run"
    return ModuleCall(
        name=first.name,
        number=first.number,
        parent=first.parent,
        saves=(save, last_save),
        ops=(op, max(op, ops)),
        num_ops=max(0, funcs - func),
        inputs=inputs,
        shapes=first.shapes,
        why_not=why_not,
    )


def _why_not_alone(calls: Sequence[NotedCall], read: set[int], recording: Recording) -> str:
    """Return why calls in a row can't be a region, although an enclosing call may be one."""
    first, last, own = calls[0], calls[-1], None
    if not last.needs_grad:
        return "it returns no tensor that requires grad"
    effects = recording.effects
    for place in range(bisect_right(effects, first.begin.func, key=itemgetter(0)), len(effects)):
        after, address, value = effects[place]
        if after > last.weights[0]:
            break
        if address == 0:
            return "an op in it cannot run twice"
        if value >= first.begin.value and _is_own(value, recording):
            continue
        if own is None:
            buffers = (buffer for call in calls if (module := call.module()) is not None for buffer in module.buffers())
            own = {torch_private.storage_address(buffer.untyped_storage()) for buffer in buffers}
        if address not in own:
            return WRITES
    return "" if read <= first.given else "it reads what it was not given"


def _values_of(tensors: Any, recording: Recording) -> set[int]:
    found = set[int]()
    for leaf in torch_private.tree_leaves(tensors):
        storage = _storage_of(leaf) if isinstance(leaf, Tensor) and is_range_of_bytes(leaf) else None
        value = None if storage is None else recording.find(storage)
        if value is not None and _is_own(value, recording):
            found.add(value)
    return found


def _is_own(value: int, recording: Recording) -> bool:
    root = recording.roots.get(value)
    return root is None or root.is_inside


def _storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except RuntimeError:
        return None


def _weights_of(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _place_of(tensor: Tensor) -> tuple[int, int]:
    storage = _storage_of(tensor)
    version = -1 if tensor.is_inference() else torch_private.version_of(tensor)
    return 0 if storage is None else torch_private.storage_address(storage), version


def _python_generators() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    _, keys, place, *others = numpy.random.get_state()
    return random.getstate(), keys.tobytes(), place, *others


def _state_of(module: nn.Module, *, is_sharded: bool) -> Iterator[Any]:
    """Yield all that the attributes of a module and its submodules visibly hold."""
    left = _OF_GATHERS if is_sharded else ()
    left_with = torch_private.COMPOSED_MARK if is_sharded else ()
    for part in module.modules():
        for name, attribute in list(vars(part).items()):
            if name.startswith(torch_private.MODULE_HOOKS) and isinstance(attribute, dict):  # memkit may set hooks in the call
                hooks = () if name in left else attribute.values()  # some are True: a hook's option, by the hook's number
                yield from (hook for hook in hooks if hook is not True and type(hook).__module__ != HookSet.__module__)
                continue
            yield name
            yield from () if name in left or name.startswith(left_with) else _parts_of(attribute, _MOST_NESTED)


def _parts_of(attribute: Any, most_nested: int) -> Iterator[Any]:
    yield attribute
    if isinstance(attribute, (*_CONSTANTS, *_FUNCTIONS, Tensor, nn.Module)) or most_nested == 0:
        return
    if isinstance(attribute, dict):
        for key, part in list(attribute.items()):
            yield key
            yield from _parts_of(part, most_nested - 1)
    elif isinstance(attribute, list | tuple | set | frozenset):
        for part in list(attribute):
            yield from _parts_of(part, most_nested - 1)
    elif hasattr(attribute, "__dict__"):
        yield from _parts_of(vars(attribute), most_nested - 1)


def _are_same(before: Iterable[Any], after: list[Any]) -> bool:
    before = list(before)
    return len(before) == len(after) and all(
        one is other or (type(one) is type(other) and isinstance(one, _NUMBERS) and one == other)
        for one, other in zip(before, after, strict=True)
    )


def _is_plain(given: Any) -> bool:
    """Tell whether inputs are tensors, constants, and containers of these, and so hold no state."""
    if isinstance(given, (*_CONSTANTS, *_FUNCTIONS, Tensor)):
        return True
    if type(given) is dict:
        return all(map(_is_plain, given.values()))
    return isinstance(given, list | tuple) and all(map(_is_plain, given))


class SpanCall(NamedTuple):
    """Neighboring calls in a `Sequential`, as the call of one module."""

    call: ModuleCall  # its parent is the Sequential's call, by index among the noted calls
    calls: tuple[int, int]  # the index of its first noted call, and of the first one after it
    reference: SpanReference


def span_calls(noted: Sequence[NotedCall], aftermath: Aftermath) -> tuple[SpanCall, ...]:
    """Return the spans that may be regions, in the order of their beginnings, enclosing ones first."""
    inside: list[list[int]] = [[] for _ in noted]
    ends = [0] * len(noted)
    for place, call in enumerate(noted):
        if call.parent >= 0:
            inside[call.parent].append(place)
    for place in reversed(range(len(noted))):
        ends[place] = ends[inside[place][-1]] if inside[place] else place + 1
    places = dict[int, list[int]]()
    for place, call in enumerate(noted):
        if inside[place] and call.why_not != NO_GRAD:
            places.setdefault(id(call.module), []).append(place)
    found = list[SpanCall]()
    for wholes in places.values():
        module = noted[wholes[0]].module()
        if module is None or not calls_in_turn(module) or any(noted[place].stop is None for place in wholes):
            continue
        rows, in_turn = [[noted[place] for place in inside[place]] for place in wholes], list(module.children())
        if any([call.module() for call in row] != in_turn for row in rows):  # a child that occurs twice is called more often
            continue
        for first, stop in _spans_of(module, rows):
            children = [call.module for call in rows[0][first:stop]]
            reference = SpanReference(noted[wholes[0]].module, children, first, len(rows[0]))
            for parent, row in zip(wholes, rows, strict=True):
                calls = row[first:stop]
                name = f"{calls[0].name.rpartition('.')[0]}.{first}:{stop}".lstrip(".")
                read = {value for call in calls for value in call.inputs if value < calls[0].begin.value}
                why_not = _why_not_alone(calls, read, aftermath.recording)
                span = _planned(calls, why_not, tuple(sorted(read | calls[0].given)), aftermath)
                if not span.why_not:
                    bounds = inside[parent][first], ends[inside[parent][stop - 1]]
                    span = replace(span, name=name, number=noted[parent].number, parent=parent, is_span=True)
                    found.append(SpanCall(span, bounds, reference))
    return tuple(sorted(found, key=lambda span: (span.calls[0], -span.calls[1])))


def _spans_of(module: nn.Module, rows: Sequence[Sequence[NotedCall]]) -> Iterator[tuple[int, int]]:
    """Yield each span as its first child and the child after it. All calls have the same spans: nested or disjoint."""
    kinds = list(map(type, module.children()))
    size = len(kinds)
    is_free = [not any(row[place].why_no_part for row in rows) for place in range(size)]
    is_joined = [any(row[place].why_not == WRITES for row in rows) for place in range(size)]
    first = 0
    for is_part, group in groupby(is_free):
        stop = first + len(list(group))
        for start, end in find_spans(kinds[first:stop], is_joined[first:stop]) if is_part else ():
            if end - start < size:  # else it is the Sequential itself
                yield first + start, first + end
        first = stop


class ModuleTrail:
    """Notes the innermost module of each op in a recording, for modules that this thread runs."""

    def __init__(self, recording: Recording, *, notes_calls: bool = False) -> None:
        self._recording = recording
        self._hooks = HookSet()
        self._is_paused = False
        self._thread = threading.get_ident()
        self._running: list[tuple[nn.Module, int, int]] = []
        self._names: dict[nn.Module, str] = {}
        self._notes_calls = notes_calls
        self._num_calls = Counter[nn.Module]()
        self.calls: list[NotedCall] = []  # in the order of their beginnings
        self.ended: list[int] = []  # their indices, in the order of their ends

    def follow(self, recording: Recording) -> None:
        self._recording = recording
        self._notes_calls = False  # a backward ran within the context, and its calls are not known well enough
        self.calls, self.ended = [], []
        self._running = [(module, 0, -1) for module, _, _ in self._running]

    def __enter__(self) -> ModuleTrail:
        try:
            self._hooks.around_all_forwards(before=self._before, after=self._after)
            return self
        except BaseException:
            self._hooks.remove()
            raise

    def __exit__(self, *_: object) -> None:
        self._hooks.remove()
        self._is_paused = False

    @property
    def place(self) -> int:
        """The index in `calls` of the innermost running module; -1 if it is not noted."""
        return self._running[-1][2] if self._running else -1

    @property
    def is_on(self) -> bool:
        return len(self._hooks) > 0

    def pause(self) -> None:
        if self.is_on:
            self._is_paused = True
            self._hooks.remove()

    def go_on(self, ended: nn.Module | None = None) -> None:
        if self._is_paused:
            self._is_paused = False
            if ended is not None:
                self._after(ended)
            self.__enter__()

    def note_begin(self, module: nn.Module) -> None:
        if self.is_on or self._is_paused:
            self._before(module)

    def note_end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self.is_on or self._is_paused:
            self._after(module, args, kwargs, output)

    def _before(self, module: nn.Module, *_: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if not self._running:
            self._names.update({part: name or type(module).__name__ for name, part in module.named_modules()})
        recording, place = self._recording, -1
        if self._notes_calls and torch_private.backward_task() == -1:
            place = len(self.calls)
            name = self._names.get(module, type(module).__name__)
            self.calls.append(NotedCall(module, name, self._num_calls[module], self.place, recording))
            self._num_calls[module] += torch.is_grad_enabled()
        self._running.append((module, len(recording.calls), place))

    def _after(self, module: nn.Module, *given: Any) -> None:
        if threading.get_ident() != self._thread or not self._running:
            return
        entered, first, place = self._running.pop()
        name = self._names.get(entered, type(entered).__name__)
        modules = self._recording.modules
        for op in range(first, len(self._recording.calls)):
            modules.setdefault(op, name)  # inner modules end first
        if place >= 0 and len(given) == 3 and entered is module:  # torch passes the keywords unless the call has failed
            args, kwargs, output = given
            with torch_private.without_python_dispatch():
                self.calls[place].end(module, (args, kwargs), output, self._recording)
            self.ended.append(place)
