"""Host memory of the layers that stream: taken at first, given back when a layer comes to stay on the device, or at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from memkit.device.base import Device
from memkit.errors import warn_user
from memkit.storages import byte_view
from memkit.transfer.arena import Arena
from memkit.transfer.disk import Disk
from memkit.transfer.spans import Span
from memkit.weights import claims
from memkit.weights.disk_copies import DiskCopies

if TYPE_CHECKING:
    from memkit.weights.accumulation import Accumulation
    from memkit.weights.chunks import LayerChunk


class HostCopies:
    """The memory that host copies of weights are in, and gradients as well.

    Args:
        device: where the layers run.
        model: whose layers they are.
        chunks: what may stream of each layer.
        limit_bytes: the most to take.
        disk: where host copies are instead; None for nowhere.
    """

    def __init__(
        self,
        device: Device,
        model: nn.Module,
        chunks: Iterable[LayerChunk],
        *,
        limit_bytes: int | None,
        disk: Disk | None = None,
    ) -> None:
        self.model = model
        self.chunks = tuple(chunks)
        self.arena = Arena(device, limit_bytes=limit_bytes, must_pin=False)
        self.disk = None if disk is None else DiskCopies(disk, device)
        self._has_warned = False
        self._held: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] | None = None
        """Once all is where it was found: storages of host memory that the caller holds, each with one of the same bytes."""

    def take(self, chunks: Sequence[LayerChunk]) -> None:
        """Take memory for layers, or room on the disk.

        Raises:
            HostMemoryError: there is not enough of it.
            DiskError: there is not enough of that.
        """
        if self.disk is not None:
            self.disk.take(list(chunks), self.arena)
            return
        with torch.inference_mode(False):  # else host memory could not be written to outside of that
            spans = self.arena.take_pinned_as_one([chunk.num_bytes for chunk in chunks])
        for chunk, span in zip(chunks, spans, strict=True):
            chunk.span = span

    def move_in(self, chunk: LayerChunk, read: Callable[[Tensor, Tensor], None]) -> None:
        """Have the parameters of a layer be host copies, which are read by a function."""
        chunk.move_to_host(read)
        if self.disk is not None:
            self.disk.settle(chunk)

    def spans(self) -> list[Span]:
        """Return the memory that layers have."""
        return [chunk.span for chunk in self.chunks if chunk.span is not None]

    def warn_of_refusal(self) -> None:
        """Say once that host memory could not be pinned: in the beginning, or when more of it was needed later."""
        if self.arena.refusal is not None and not self._has_warned:
            self._has_warned = True
            warn_user(f"LayerOffload: {self.arena.refusal}")

    def give(self, leaving: Iterable[LayerChunk]) -> None:
        """Give back the memory of layers that stay on the device from now on, but for host copies that the caller holds."""
        for chunk in leaving:
            claims.release(chunk)
            if chunk.span is not None and not chunk.held:
                span, chunk.span = chunk.span, None
                self.arena.give(span)
        self.arena.trim_gaps()

    def restore(self, gradients: Accumulation | None) -> None:
        """Make all parameters, and their gradients, tensors of their own again. Calling it again does nothing, or finishes a
        call that was interrupted."""
        if self._held is not None:
            return
        held = [] if gradients is None else gradients.close()
        for chunk in self.chunks:
            if chunk.is_on_host:
                chunk.restore()
            held += [(storage, byte_view(storage).clone().untyped_storage()) for storage, _ in chunk.held]
            claims.release(chunk)
        self._held = held

    def close(self) -> None:
        """Give all memory back, once all is restored."""
        if self.disk is not None:
            self.disk.close()
            self._held = []  # whoever holds what was mapped has it there
            for chunk in self.chunks:
                chunk.let_go_of_disk()
        self.arena.give_all()
        self.arena.close()
        # The arena has given the memory back; the addresses still are whose tensors are there.
        for storage, copied in self._held or ():
            byte_view(storage).copy_(byte_view(copied))
