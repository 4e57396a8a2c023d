"""`QuietMode`: a dispatch mode that Dynamo doesn't trace; the base class of the recorder."""

from __future__ import annotations

from typing import Any

from memkit import torch_private
from memkit.compiled import note_asked
from memkit.modes import Mode
from memkit.torch_state import in_higher_order_op, leave_untraced

_IS_ASKED_OF_MODES = bool(torch_private.known("asks_modes_on_stack"))
"""Whether Dynamo asks each active mode whether it may compile a frame. Older versions read a process-wide flag that is set when
a mode is entered."""


def _may_compile() -> bool:
    may = in_higher_order_op()
    if not may:
        note_asked()
    return may


class _OutsideOfHigherOrderOps:
    """Stands for a process-wide flag that would be read too early."""

    def __bool__(self) -> bool:
        return not _may_compile()


class QuietMode(Mode):
    """A dispatch mode that Dynamo ignores when a higher-order op compiles its function. The op is compiled as without the mode,
    which sees the higher-order op. What the program itself compiles runs op by op, as under any mode."""

    supports_higher_order_operators = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]  # torch's
        leave_untraced(cls.__torch_dispatch__)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else each op would pass through Dynamo

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tell Dynamo whether it may compile as if the mode were not there."""
        return _may_compile()

    def __enter__(self) -> Any:
        is_in_other = torch_private.shows_to_compiler()
        super().__enter__()
        if not is_in_other:
            torch_private.set_shows_to_compiler(False if _IS_ASKED_OF_MODES else _OutsideOfHigherOrderOps())
            # What was compiled without the mode is good with it, and the other way round.
            torch_private.set_shows_to_guards(False)
        return self
