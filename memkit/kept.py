"""A saved tensor that stays as it is, and that nobody may have written to when it is asked for."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from memkit import torch_private

_Parameter = nn.Parameter


class KeptHandle:
    """A saved tensor that stays as it is.

    Saved-tensor hooks switch off autograd's check that no saved tensor was written to; this does it again. The alias shares
    the version counter of the tensor, so it counts writes through any view. It is not the tensor itself, which may hold the
    graph.
    """

    __slots__ = ("__weakref__", "alias", "version")

    def __init__(self, tensor: Tensor) -> None:
        kind = type(tensor)
        if kind is Tensor or kind is _Parameter:
            self.alias, self.version = tensor.detach(), torch_private.version_of(tensor)
        else:  # torch gives back no class that only has functions of its own, and it may refuse these
            with torch_private.without_subclass_functions():
                self.alias, self.version = tensor.detach(), torch_private.version_of(tensor)

    def unpack(self) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: it was written to since it was saved.
        """
        self.check_version()
        return self.alias

    def is_unchanged(self) -> bool:
        """Tell whether the tensor was not written to since it was saved."""
        return self.version_now == self.version

    def check_version(self) -> None:
        """Raise autograd's own error if the tensor was written to since it was saved."""
        if not self.is_unchanged():
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self._description()}] is at version {self.version_now}; expected version "
                f"{self.version} instead. Hint: the backtrace of the operation that failed to compute its gradient is shown "
                "by torch.autograd.set_detect_anomaly(True)."
            )

    def _description(self) -> str:
        try:
            return f"{self.alias.type()} {list(self.size)}"
        except RuntimeError:  # not every layout has these
            return f"{'nested ' * self.alias.is_nested}{self.alias.dtype}, {self.alias.layout}"

    @property
    def size(self) -> torch.Size:
        return self.alias.size()

    @property
    def version_now(self) -> int:
        """What `version` would be if it were saved now."""
        return torch_private.version_of(self.alias)


@functools.cache
def nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor without elements: an alias that holds no bytes shares its empty storage."""
    with torch_private.without_dispatch_modes():  # one of them might make it a tensor of its own kind, for good
        return torch.empty(0, dtype=dtype, device=device)
