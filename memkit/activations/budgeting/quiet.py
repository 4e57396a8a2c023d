"""Calls of modules in which a steady step records nothing: noted in the step before, and run with no dispatch mode on.

[Note: quiet calls] A mode costs the host some 17 µs for each op that it sees, views included, whether it records them or not.
Where a plan runs nothing again of what a module does, and nothing in it writes, all that the mode would do is known ahead: how
many ops there are, what is saved, and the numbers of what is made. What is made there has its number where it is saved or
returned; a call of which something else is read by what is recorded later is no quiet one. Whether a call goes as it is known
shows by what it saves and returns. An op in it that writes to what was there before, against all that is known, shows by the
counter of the tensor: a value that a recorded op reads and that was written to more often than the recording says is none that
can be made again (`Recording.is_doubted`), and a replay that starts from such a root raises, as autograd does.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from memkit import torch_private
from memkit.hooks import HookSet, has_others_hooks
from memkit.storages import is_range_of_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from memkit.activations.budgeting.steady import SteadySave, SteadySaves
    from memkit.recording.expected import Expected, ExpectedOp
    from memkit.recording.recorder import Recorder
    from memkit.recording.recording import Recording

_FEWEST_OPS = 5
"""With fewer, to turn the mode off and on costs as much."""
_ELSEWHERE = -1
"""The number of what a call returns and has not made."""
_NO_TENSOR = (int, float, bool, str, type(None))


class QuietCall(NamedTuple):
    """A call of a module in which nothing is recorded."""

    module: weakref.ref[nn.Module]
    number: int
    """How many calls of it were before."""
    begin: int
    """How many ops were seen before."""
    funcs: tuple[Any, ...]
    """What it runs."""
    first: int
    """The number of the next value before."""
    made: int
    """The same behind it."""
    saves: tuple[int, int]
    """How many tensors were saved before, and behind it."""
    returns: tuple[int, ...]
    """For each tensor that it returns its value, or `_ELSEWHERE`."""


class CallNotes:
    """Notes the calls of modules in a step that is noted.

    Args:
        recording: of its ops.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self.num_saves = 0
        """How many tensors were saved by now."""
        self._thread = threading.get_ident()
        self._hooks = HookSet()
        self._counts = Counter[nn.Module]()
        self._running: list[tuple[nn.Module, int, int, int, int]] = []
        self._calls: list[QuietCall] = []

    def begin(self) -> None:
        """Note calls from here on."""
        self._hooks.around_all_forwards(before=self._before, after=self._after)

    def end(self) -> None:
        """Note no more; may be called again."""
        self._hooks.remove()

    def _before(self, module: nn.Module, *_: Any) -> None:
        if threading.get_ident() == self._thread:
            recording, number = self._recording, self._counts[module]
            self._counts[module] = number + 1
            self._running.append((module, number, len(recording.funcs), recording.num_values, self.num_saves))

    def _after(self, module: nn.Module, *given: Any) -> None:
        if threading.get_ident() != self._thread or not self._running or self._running[-1][0] is not module:
            return
        _, number, begin, first, num_saves = self._running.pop()
        recording = self._recording
        num_ops = len(recording.funcs) - begin
        if num_ops < _FEWEST_OPS or len(given) != 3 or has_others_hooks(module):
            return
        with torch_private.without_python_dispatch():
            returns = self._numbers_of(given[2], first)
        if returns is not None:
            funcs, saves = tuple(recording.funcs[begin:]), (num_saves, self.num_saves)
            self._calls.append(
                QuietCall(weakref.ref(module), number, begin, funcs, first, recording.num_values, saves, returns)
            )

    def _numbers_of(self, output: Any, first: int) -> tuple[int, ...] | None:
        """Return the numbers of what a call returns; None if not all of it is known."""
        found = []
        for leaf in torch_private.tree_leaves(output):
            if isinstance(leaf, Tensor):
                if type(leaf) is not Tensor or not is_range_of_bytes(leaf):
                    return None
                value = self._recording.find(leaf.untyped_storage())
                found.append(_ELSEWHERE if value is None or value < first else value)
            elif not isinstance(leaf, _NO_TENSOR):
                return None
        return tuple(found)

    def quiet(self, ops: Sequence[ExpectedOp], saves: Sequence[SteadySave], roots: Collection[int]) -> tuple[QuietCall, ...]:
        """Return the calls in which nothing need be seen, none of them within another.

        Args:
            ops: what is expected, each op that is seen.
            saves: the same of what is saved.
            roots: the values that nothing has made.
        """
        found: list[QuietCall] = []
        for call in sorted(self._calls, key=lambda call: (call.begin, -len(call.funcs))):
            if (not found or call.begin >= _end(found[-1])) and _is_quiet(call, ops, saves, roots):
                found.append(call)
        return tuple(found)


def _end(call: QuietCall) -> int:
    return call.begin + len(call.funcs)


def _is_quiet(call: QuietCall, ops: Sequence[ExpectedOp], saves: Sequence[SteadySave], roots: Collection[int]) -> bool:
    """Tell whether all that a call does is known ahead, and all that is read of it behind it has its number by then."""
    inside, until = ops[call.begin : _end(call)], call.saves[1]
    if any(not op.is_skipped or op.is_writer for op in inside):
        return False
    made = range(call.first, call.made)
    noted = {save.value for save in saves[slice(*call.saves)] if save.has_record or save.is_read}
    if any(value in made and value in roots for value in (*noted, *call.returns)):
        return False  # it would be numbered as it is saved, or read
    known = noted.union(call.returns)
    read: set[int] = {value for op in ops[_end(call) :] for value in _read_by(op)}
    read.update(save.value for save in (*saves[: call.saves[0]], *saves[until:]) if save.has_record or save.is_read)
    return all(value in known or value in roots for value in read.intersection(made))


def _read_by(op: ExpectedOp) -> Iterable[int]:
    """Return what must be known by its number as an op runs."""
    return () if op.is_skipped and op.over < 0 else (*op.ins, op.over)


class QuietCalls:
    """Has the recorder off in quiet calls, as long as they go as is known: see [Note: quiet calls].

    Args:
        calls: in the order in which they come.
        recorder: which is off in them.
        expected: what is known of the ops.
        saves: takes what is saved.
        leave: called as soon as a call goes another way.
    """

    def __init__(
        self,
        calls: Sequence[QuietCall],
        recorder: Recorder,
        expected: Expected,
        saves: SteadySaves,
        leave: Callable[[], None],
    ) -> None:
        self._recorder, self._recording = recorder, recorder.recording
        self._expected, self._saves, self._leave = expected, saves, leave
        self._thread = threading.get_ident()
        self._hooks = HookSet()
        self._counts: dict[nn.Module, int] = {}
        self._calls: dict[nn.Module, dict[int, QuietCall]] = {}
        for call in calls:
            module = call.module()
            if module is not None:
                self._calls.setdefault(module, {})[call.number] = call
        self._module: nn.Module | None = None
        self._call: QuietCall | None = None
        """That which goes on."""
        self._depth = 0
        """How many calls of the same module are within it."""

    def begin(self) -> None:
        """See the calls from here on."""
        for module in self._calls:
            self._hooks.around_forward(module, before=self._before, after=self._after, is_copied=False)

    def end(self) -> None:
        """See no more calls; may be called again."""
        self._hooks.remove()
        self._call = None

    def stop(self) -> None:
        """The step goes another way than is known: have the recorder on from here on, if it is off."""
        if self._call is not None:
            self._call = None
            if not torch_private.num_dispatch_modes():
                torch_private.push_dispatch_mode(self._recorder)

    def _before(self, module: nn.Module, *_: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if self._call is not None:
            self._depth += module is self._module
            return
        number = self._counts.get(module, 0)
        self._counts[module] = number + 1
        call, recording, recorder = self._calls[module].get(number), self._recording, self._recorder
        if (
            call is not None
            and self._expected.ops
            and self._saves.is_on
            and self._saves.num_saves == call.saves[0]
            and len(recording.funcs) == call.begin
            and recording.num_values <= call.first
            and recorder.recording is recording
            and torch_private.dispatch_modes() == [recorder]
            and torch_private.backward_task() == -1
        ):
            recording.num_values, recording.is_doubted = call.made, True
            self._module, self._call, self._depth = module, call, 0
            torch_private.pop_dispatch_mode(None)

    def _after(self, module: nn.Module, _: Any, output: Any) -> None:
        call = self._call
        if call is None or module is not self._module or threading.get_ident() != self._thread:
            return
        if self._depth:
            self._depth -= 1
            return
        self.stop()
        is_as_known = self._saves.num_saves == call.saves[1] and self._saves.is_on
        if is_as_known and self._number_all(output, call):
            self._recording.funcs.extend(call.funcs)
        else:
            self._leave()

    def _number_all(self, output: Any, call: QuietCall) -> bool:
        """Number what a call has returned; tell whether it is what is known."""
        tensors = [leaf for leaf in torch_private.tree_leaves(output) if isinstance(leaf, Tensor)]
        if len(tensors) != len(call.returns):
            return False
        for tensor, value in zip(tensors, call.returns, strict=True):
            if value != _ELSEWHERE and not self.number(tensor, value):
                return False
        return True

    def number(self, tensor: Tensor, value: int) -> bool:
        """Number what a quiet call has made; tell whether that is possible."""
        if type(tensor) is not Tensor or not is_range_of_bytes(tensor):
            return False
        recording, storage = self._recording, tensor.untyped_storage()
        found = recording.find(storage)
        if found is None and value not in self._expected.unmade:
            self._expected.unmade.add(value)
            recording.current[torch_private.storage_address(storage)] = (weakref.ref(storage), value)
            return True
        return found == value

    def see_save(self, tensor: Tensor, save: SteadySave) -> None:
        """Something is saved by its number: give it that, if it is made in the call that goes on."""
        call = self._call
        if call is not None and call.first <= save.value < call.made:
            self.number(tensor, save.value)
