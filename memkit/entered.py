"""`EnteredOnce`: what is used in one `with`, and closed where that is left."""

from __future__ import annotations

from types import TracebackType
from typing import TypeVar

_Own = TypeVar("_Own", bound="EnteredOnce")


class EnteredOnce:
    """A context that is closed where it is left, and not entered again."""

    _is_closed = _is_entered = False

    def __enter__(self: _Own) -> _Own:
        if self._is_closed:
            raise ValueError(f"this {type(self).__name__} is closed; make a new one")
        if self._is_entered:
            raise ValueError(f"this {type(self).__name__} is already entered: one `with` is enough")
        self._is_entered = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError
