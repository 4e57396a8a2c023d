"""`Mode`: the base class of memkit's dispatch modes, which stays consistent at Ctrl-C. Import this file only when needed: it
looks up its own base, a private class of torch."""

from __future__ import annotations

from typing import Any

from memkit.core import torch_private
from memkit.core.torch_state import leave_mode

_LEAVING = (
    "dispatch_modes",
    "pop_dispatch_mode",
    "push_dispatch_mode",
    "set_in_mode",
    "set_in_mode_of_program",
    "set_shows_to_compiler",
    "set_shows_to_guards",
)


class Mode(torch_private.DispatchMode):
    def __enter__(self) -> Any:
        for name in _LEAVING:
            getattr(torch_private, name)  # before it is on
        try:
            return super().__enter__()  # type: ignore[no-untyped-call]  # torch's
        except BaseException:
            leave_mode(self)
            raise

    def __exit__(self, *_: object) -> None:
        leave_mode(self)

    def close(self) -> None:
        leave_mode(self)
