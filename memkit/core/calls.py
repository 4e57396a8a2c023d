"""The module forwards under way in each thread, and the clean-up when one ends; what stands around a module (`Around`)."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import FrameType
from typing import Any

from torch import nn

from memkit.core import torch_private
from memkit.core.torch_state import leave_untraced


class Ending(Enum):
    RETURNED = "returned"
    RAISED = "raised"  # by an exception, such as one that stops a checkpoint early: no code of the caller has run since
    LEFT = "left"  # by an interrupt that hid the end when it happened: any code may have run since


@dataclass(slots=True, eq=False)
class Call:
    module: nn.Module
    frame: FrameType | None  # the calling frame: once it is off the stack, the call is over
    is_outermost: bool
    end: Callable[[Ending], None] | None = None  # called at its end, again if interrupted; None until the call's work begins
    end_here: Callable[[], None] | None = None  # called before `end`, only in the thread of the call; again if interrupted


class Claims:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.thread = -1
        self.calls: list[Call] = []

    def _are_on_stack(self) -> bool:
        """Tell whether that thread, which may have died, has calls on its stack; a walk up a running thread's is repeated."""
        frames = {call.frame for call in self.calls}
        frame = sys._current_frames().get(self.thread) if frames else None
        while frame is not None and frame not in frames:  # in the end it is no frame of this call, which would hold itself
            frame = frame.f_back
        return frame is not None

    def end_left(self) -> None:
        with self.lock:
            self.may_end_left()

    def may_end_left(self) -> bool:
        if any(self._are_on_stack() for _ in range(_NUM_LOOKS)):
            return False
        for left in reversed(self.calls):
            _end(left, Ending.LEFT)
            left.frame = None  # it holds the forward's tensors
        self.calls = []
        return True


_NUM_LOOKS = 3


class Calls(threading.local):
    def __init__(self) -> None:
        self.under_way: list[Call] = []

    def __len__(self) -> int:
        return len(self.under_way)

    def begin(self, module: nn.Module, *, depth: int) -> Call:
        frame = sys._getframe(depth + 1)
        if self.under_way:
            last, caller = self.under_way[-1].frame, frame
            while caller is not last and caller.f_back is not None:  # it is not far away
                caller = caller.f_back
            if caller is not last:
                self.end_interrupted()
        call = Call(module, frame, not self.under_way)
        self.under_way.append(call)
        return call

    def cancel(self, call: Call) -> None:
        self.under_way.remove(call)

    def claim(self, claims: Claims) -> bool:
        """Make this thread the one with calls under way while its current call lasts; False while another thread has some."""
        with claims.lock:
            if claims.calls is not self.under_way and not claims.may_end_left():
                return False
            claims.thread, claims.calls = threading.get_ident(), self.under_way
            return True

    def is_last(self, module: nn.Module) -> bool:
        return bool(self.under_way) and self.under_way[-1].module is module

    def end(self, module: nn.Module, *, depth: int) -> None:
        if self.under_way and self.under_way[-1].module is module and self.under_way[-1].frame is sys._getframe(depth + 1):
            call = self.under_way[-1]
            try:  # as `_end_last` does
                if call.end_here is not None:
                    call.end_here()
                if call.end is not None:
                    call.end(Ending.RETURNED)
                    call.end = None
            except Exception:
                self.under_way.remove(call)
                raise
            self.under_way.remove(call)
            return
        stack = _stack()
        while self.under_way:
            last = self.under_way[-1]
            is_over = last.frame not in stack  # torch runs hooks after an exception when that has left the call
            if last.module is module and is_over:
                self._end_last(Ending.RAISED)
                return
            if not is_over:
                return
            self._end_last(Ending.LEFT)

    def end_interrupted(self) -> None:
        """End the calls that an interrupt has left: torch runs hooks after exceptions, but not after interrupts."""
        stack = _stack() if self.under_way else ()
        while self.under_way and self.under_way[-1].frame not in stack:
            self._end_last(Ending.LEFT)

    def _end_last(self, ending: Ending) -> None:
        call = self.under_way[-1]
        try:
            if call.end_here is not None:
                call.end_here()
            _end(call, ending)
        except Exception:
            self.under_way.remove(call)
            raise
        self.under_way.remove(call)  # last: the next call ends a call whose end an interrupt broke off


def _end(call: Call, ending: Ending) -> None:
    if call.end is not None:
        call.end(ending)
        call.end = None


def _stack() -> set[FrameType]:
    """Return the frames on the stack above the caller's: a frame that held itself would keep the others alive."""
    stack = set[FrameType]()
    frame = sys._getframe(1).f_back
    while frame is not None:
        stack.add(frame)
        frame = frame.f_back
    return stack


Code = Callable[..., Any]
Run = Callable[[nn.Module, Code, tuple[Any, ...], dict[str, Any]], Any]  # (module, what runs it, args, kwargs) -> result


class Around:
    """Replaces the function that runs a module, in the module's attribute `place`. `HookSet.add` has it removed."""

    def __init__(self, module: nn.Module, place: str, run: Run) -> None:
        self._module, self._place = module, place
        own = vars(module).get(place)  # read once: another thread may put something there, or take it off
        self.code: Code = getattr(module, place) if own is None else own
        self._is_own = own is not None
        self._run: Run | None = run  # None after the removal, since another wrapper may still call this one

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self._run
        return self.code(*args, **kwargs) if run is None else run(self._module, self.code, args, kwargs)

    vars(__call__).update(torch_private.UNTRACED_MARKS)  # where its caller is traced

    def put(self) -> None:
        vars(self._module)[self._place] = self

    def remove(self) -> None:
        self._run = None
        own, place = vars(self._module), self._place
        while isinstance(last := own.get(place), Around) and last._run is None:
            if last._is_own:
                own[place] = last.code
            else:
                del own[place]


leave_untraced(Around.__call__)


def within(function: Any) -> Any:
    while isinstance(function, Around):
        function = function.code
    return function
