"""What a context for saved tensors offers beside `with`, so that `attach` can put it around each forward of a module."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import TracebackType

import torch
from torch import nn


class ForwardContext(ABC):
    """A context around forwards. One object is entered once at a time; `again` makes another that does the same."""

    tag = ""
    """Under which it keeps what it learns; "" where it learns nothing."""

    @abstractmethod
    def __enter__(self) -> ForwardContext: ...

    @abstractmethod
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...

    @abstractmethod
    def again(self) -> ForwardContext:
        """Return a context that does the same, and was not entered yet. Cheap: it is called before each forward."""

    def attached_to(self, model: nn.Module) -> ForwardContext:
        """Return the context to be entered around each forward of a model."""
        return self

    def enter_knowing(self, resident: Mapping[int, weakref.ref[torch.UntypedStorage]]) -> None:
        """Enter; the storages in `resident`, by their keys (`storages.storage_key`), are held by others in any case."""
        self.__enter__()
