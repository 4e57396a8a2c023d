"""Host memory that the gradients of streamed parameters lie in."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from memkit import torch_private
from memkit.torch_state import num_users
from memkit.transfer.spans import Span
from memkit.weights.binding import StreamedParameter, without_modes

_NO_CONTEXT = nullcontext()


class GradientBuffer:
    """Pinned host memory for one gradient: `span`, which is `taken` of the arena, or a part of that."""

    __slots__ = ("_view", "span", "storage", "taken")

    def __init__(self, span: Span, taken: Span) -> None:
        self.span, self.taken = span, taken
        self.storage = self._over_span()
        self._view: Tensor | None = None
        """What lies here, of which `lend` gives an alias. Nobody is given this one."""

    def _over_span(self) -> torch.UntypedStorage:
        assert self.span.whole is not None
        return torch.frombuffer(self.span.whole.numpy(), dtype=torch.uint8).untyped_storage()

    @property
    def is_idle(self) -> bool:
        """Whether no gradient that lies here is held."""
        return num_users(self.storage) == 1 + (self._view is not None)

    def lend(self, streamed: StreamedParameter) -> Tensor | None:
        """Return the gradient of a parameter as it lies here, None if one that does is held."""
        assert self.span.whole is not None
        if self.storage.data_ptr() != self.span.whole.data_ptr():  # it was moved to other memory in place
            self.storage, self._view = self._over_span(), None  # (`Tensor.share_memory_`): its holders have that
        view = self._view
        if torch_private.num_storage_users(torch_private.storage_address(self.storage)) != 1 + (view is not None):
            return None
        is_seen = torch_private.num_dispatch_modes() or torch.is_inference_mode_enabled()
        with without_modes() if is_seen else _NO_CONTEXT:
            if view is None or view.stride() != streamed.gradient_stride:
                view = self._view = streamed.over_gradient(self.storage)
            return view.data


class HostGradient:
    """The gradient of one parameter, in host memory."""

    __slots__ = ("buffers", "kept", "num_bytes", "total")

    def __init__(self, buffer: GradientBuffer) -> None:
        self.num_bytes = buffer.span.num_bytes
        self.buffers = [buffer]
        self.kept: Tensor | None = None
        """What was in `grad` before."""
        self.total: Tensor | None = None
        """All that was brought, or is on its way."""
