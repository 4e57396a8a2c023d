"""Host memory that the gradients of streamed parameters lie in, and what is on its way there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from operator import attrgetter

import torch
from torch import Tensor

from memkit import torch_private
from memkit.device.base import CopyBatch, Event, Stream
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

    @property
    def view(self) -> Tensor:
        """What lies here, and was lent once."""
        assert self._view is not None
        return self._view

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


class LayerBuffers:
    """Buffers to which gradients of a layer are sent together: what `GradientBuffer.lend` asks of each, asked of all at once.

    Args:
        parameters: whose gradients these are.
        buffers: one for each, all of which were lent once.
        copies: copy a storage to each.
    """

    __slots__ = (
        "_addresses",
        "_is_as_before",
        "_keys",
        "_parameters",
        "_sizes_bytes",
        "_storages",
        "_strides",
        "_views",
        "buffers",
        "copies",
        "num_bytes",
    )

    def __init__(
        self, parameters: Sequence[StreamedParameter], buffers: Sequence[GradientBuffer], copies: CopyBatch | None
    ) -> None:
        self._parameters, self.buffers, self.copies = parameters, buffers, copies
        self._storages = [buffer.storage for buffer in buffers]
        self._addresses = [buffer.storage.data_ptr() for buffer in buffers]
        self._keys = [torch_private.storage_address(storage) for storage in self._storages]
        self._views = [buffer.view for buffer in buffers]
        self._strides = [view.stride() for view in self._views]
        self._sizes_bytes = [buffer.span.num_bytes for buffer in buffers]
        self.num_bytes = sum(self._sizes_bytes)
        self._is_as_before: Callable[..., bool] | None = None
        """What tells in one call that gradients lie as those that were sent before. Without it they are looked at each time."""

    def lend(self) -> list[Tensor] | None:
        """Return the gradients as they lie here; None if one that does is held, or this is to be asked of each."""
        if torch_private.num_dispatch_modes() or torch.is_inference_mode_enabled():
            return None
        if [*map(_stride_of, self._parameters)] != self._strides:
            return None
        if [*map(torch.UntypedStorage.data_ptr, self._storages)] != self._addresses:  # one was moved in place
            return None
        if {*map(torch_private.num_storage_users, self._keys)} != _IDLE:
            return None
        return [*map(_data_of, self._views)]

    def packed(self, gradients: Sequence[Tensor]) -> list[torch.UntypedStorage] | None:
        """Return the storages of gradients, each of which fills its own, as it is to lie here; None if that is not so."""
        if any(map(Tensor.is_neg, gradients)) or any(map(Tensor.is_conj, gradients)):
            return None
        if [*map(Tensor.stride, gradients)] != self._strides:
            return None
        storages = [*map(Tensor.untyped_storage, gradients)]
        if [*map(torch.UntypedStorage.nbytes, storages)] != self._sizes_bytes:
            return None
        for make in torch_private.known("TensorGuards"):
            self._is_as_before = make(*gradients, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return storages

    def packed_as_before(self, gradients: Sequence[Tensor | None]) -> list[torch.UntypedStorage] | None:
        """Return the same where there is a gradient of each parameter, and each has the dtype, the strides and no graph, as the
        last time; None where that is to be looked at."""
        if self._is_as_before is None or not self._is_as_before(*gradients):
            return None
        storages = [*map(Tensor.untyped_storage, gradients)]  # type: ignore[arg-type]  # each is a tensor, as those before
        return storages if [*map(torch.UntypedStorage.nbytes, storages)] == self._sizes_bytes else None


class HostGradient:
    """Where the gradient of one parameter may lie in host memory."""

    __slots__ = ("buffers", "num_bytes")

    def __init__(self, buffer: GradientBuffer) -> None:
        self.num_bytes = buffer.span.num_bytes
        self.buffers = [buffer]


class Flight:
    """Gradients that copies read, or are about to: their storages, which are held until then."""

    __slots__ = ("done", "num_bytes", "storages", "stream")

    def __init__(self, stream: Stream, storages: Sequence[torch.UntypedStorage], num_bytes: int) -> None:
        self.stream = stream
        """Where they were made, and go back to."""
        self.storages = storages
        self.num_bytes = num_bytes
        self.done: Event | None = None
        """None until it is known: an interrupt may come in between."""


_IDLE = {2}
"""How many users each storage has that nobody is given: the buffer, and the view of it."""
_data_of = attrgetter("data")
_stride_of = attrgetter("gradient_stride")
