"""A dispatch mode that stays out of Dynamo's way: the base of the recorder."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch._C._dynamo.guards import set_is_in_mode_without_ignore_compile_internals as _set_shows_to_guards
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from memkit.hooks import leave_mode, leave_untraced

_IS_ASKED_OF_MODES = hasattr(_python_dispatch, "any_torch_dispatch_mode_on_stack")
"""Whether Dynamo asks the modes that are on whether it may compile a frame. Before, it looked at a flag of the process that was
set when a mode was entered."""

_TRACER = torch._C._TorchDispatchModeKey.PROXY


def in_higher_order_op() -> bool:
    """Tell whether the caller runs inside what a higher-order op, such as `torch.cond` or `flex_attention`, compiles by itself.
    They do so also where the program compiles nothing.

    Source: `torch._higher_order_ops.utils.setup_compilation_env`.
    """
    utils: Any = sys.modules.get("torch._higher_order_ops.utils")
    if hasattr(utils, "_in_hop_compile"):
        return bool(utils._in_hop_compile())
    return "torch._dynamo" in sys.modules and bool(torch._dynamo.config.allow_empty_graphs)  # which is set there alone


def is_traced() -> bool:
    """Tell whether ops are being traced into a graph, as those of a branch of `torch.cond`: a tensor that is made unseen by the
    tracer becomes a constant of the graph."""
    return torch._C._get_dispatch_mode(_TRACER) is not None


class _OutsideOfHigherOrderOps:
    """Stands for a flag of the process that would be read too early."""

    def __bool__(self) -> bool:
        return not in_higher_order_op()


class QuietMode(TorchDispatchMode):
    """A dispatch mode that Dynamo overlooks where a higher-order op compiles what it was given: that is then done as it is
    without the mode, which sees the higher-order op. What the program itself compiles runs op by op, as in any mode.
    """

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
        return in_higher_order_op()

    def __enter__(self) -> Any:
        is_in_other = _python_dispatch._is_in_any_mode_without_ignore_compile_internals
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's
        if not is_in_other:
            flag: Any = False if _IS_ASKED_OF_MODES else _OutsideOfHigherOrderOps()
            _python_dispatch._is_in_any_mode_without_ignore_compile_internals = flag
            _set_shows_to_guards(False)  # what was compiled without the mode is good with it, and the other way round
        return self

    def __exit__(self, *_: object) -> None:
        leave_mode(self)
