"""Gradients of streamed parameters in host memory, where an optimizer finds them beside the host copies.

While a backward runs, the engine adds to `Parameter.grad` on the device. So an earlier `grad` is set aside, each new one is
taken away, and only when the backward is over the sum is put there, on the host as the parameter itself then. Gradients of a
layer are sent together: see [Note: gradients by the layer] in `memkit.weights.accumulation`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import attrgetter

import torch
from torch import Tensor

from memkit.core import torch_private
from memkit.core.forks import OwnThreads, forked
from memkit.core.sizes import ALIGNMENT_BYTES, rounded
from memkit.core.tensors import byte_view
from memkit.core.torch_state import num_users
from memkit.device.base import CopyBatch, Device, Event, Stream
from memkit.errors import LayerOffloadError
from memkit.transfer.arena import Arena
from memkit.transfer.host_memory import Span
from memkit.transfer.lanes import lanes_of
from memkit.weights.accumulation import LayerAccumulation, Made, sum_of
from memkit.weights.chunks import LayerChunk, StreamedParameter, without_modes

_NO_CONTEXT = nullcontext()


class GradientBuffer:
    """Pinned host memory for one gradient: `span`, which is `taken` of the arena, or a part of that."""

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
        return num_users(self.storage) == 1 + (self._view is not None)

    @property
    def view(self) -> Tensor:
        assert self._view is not None
        return self._view

    def lend(self, streamed: StreamedParameter) -> Tensor | None:
        """Return the gradient of a parameter as it lies here; None if the caller holds one that lies here."""
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
    """Buffers to which gradients of a layer are sent together, each of which was lent once: `lend` asks of all at once what
    `GradientBuffer.lend` asks of each."""

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
        """One call that compares gradients with the last ones' layout; None: look at each."""

    def lend(self) -> list[Tensor] | None:
        """Return the gradients as they lie here; None where each has to be asked."""
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
        """Return the storages of gradients, if each fills its own as it is to lie here."""
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
        """Return the same if each parameter has a gradient with the dtype and strides of the last time, and no graph."""
        if self._is_as_before is None or not self._is_as_before(*gradients):
            return None
        storages = [*map(Tensor.untyped_storage, gradients)]  # type: ignore[arg-type]  # each is a tensor, as those before
        return storages if [*map(torch.UntypedStorage.nbytes, storages)] == self._sizes_bytes else None


@dataclass(slots=True, eq=False)
class Flight:
    """Gradients that copies read, or are about to: their storages are held until then."""

    stream: Stream
    storages: Sequence[torch.UntypedStorage]
    num_bytes: int
    done: Event | None = None
    """None until it is known: an interrupt may come in between."""


_IDLE = {2}
_data_of = attrgetter("data")
_stride_of = attrgetter("gradient_stride")
_MOST_TARGETS = 8
"""For each layer, so many sets of parameters with gradients that come together are remembered."""


class HostGradients(LayerAccumulation):
    """Takes the gradients of streamed parameters to the host.

    Args:
        rest: has all parameters be where they are at rest.
        others: returns what others have taken of the arena.
    """

    def __init__(
        self,
        device: Device,
        arena: Arena,
        chunks: Sequence[LayerChunk],
        *,
        rest: Callable[[], None],
        others: Callable[[], list[Span]],
    ) -> None:
        super().__init__(device)
        self._rest = rest
        self._others = others
        self._arena = arena
        self._lanes = lanes_of(device)
        self._buffers: dict[StreamedParameter, list[GradientBuffer]] = {}
        """More than one where the caller keeps gradients of earlier steps."""
        self._before: dict[StreamedParameter, Tensor] = {}
        """While a backward runs: `grad` from before it."""
        self._totals: dict[StreamedParameter, Tensor] = {}
        """That, and all gradients that were brought to the host, or are on their way."""
        self._in_flight: deque[Flight] = deque()
        """Oldest first. The memory goes back to the stream when that has waited for the copies."""
        self._in_flight_bytes = 0
        self._targets: dict[tuple[StreamedParameter, ...], LayerBuffers] = {}
        """Buffers for parameters whose gradients came together, the last ones used."""
        self._window_bytes = 2 * max((chunk.num_bytes for chunk in chunks), default=0)
        self._last: Event | None = None
        self._threads = OwnThreads(1, "memkit-grad", device.enter_thread)
        self._additions: list[Future[None]] = []
        self._spans: list[Span] = []
        """Taken of the arena, and given back in the end."""
        self._kept: list[GradientBuffer] = []
        """With gradients that the caller holds, of layers that do not stream any more."""
        trained = [[item for item in chunk.parameters if item.parameter.requires_grad] for chunk in chunks]
        self._take_memory([parameters for parameters in trained if parameters])

    def _take_memory(self, groups: Sequence[Sequence[StreamedParameter]]) -> None:
        """Take memory for the gradients of groups of parameters, each group's pinned as one."""
        sizes = [[rounded(_gradient_bytes(item), ALIGNMENT_BYTES) for item in group] for group in groups]
        for group, found, span in zip(groups, sizes, self._take_pinned([*map(sum, sizes)]), strict=True):
            for item, start in zip(group, accumulate(found, initial=0), strict=False):
                self._buffers[item] = [GradientBuffer(span.part(start, start + _gradient_bytes(item)), span)]

    def _take_pinned(self, sizes_bytes: Sequence[int]) -> list[Span]:
        spans = self._arena.take_pinned_as_one(sizes_bytes)
        self._spans += spans
        return spans

    def unwatch(self, chunk: LayerChunk) -> None:
        super().unwatch(chunk)
        self._leave(chunk.parameters)
        self._give_unused()

    def close(self) -> list[tuple[torch.UntypedStorage, torch.UntypedStorage]]:
        """Leave the host memory; gradients stay where they are, in memory of their own. The arena goes next."""
        super().close()
        self._threads.shutdown()
        self._leave(list(self._buffers))
        self._rest, self._others = lambda: None, list  # those before belong to an object that holds this one
        return [(buffer.storage, byte_view(buffer.storage).clone().untyped_storage()) for buffer in self._kept]

    def _leave(self, parameters: Sequence[StreamedParameter]) -> None:
        self._targets.clear()  # first: what is given back is not to be sent to
        for streamed in parameters:
            buffers = self._buffers.get(streamed)
            if buffers is not None:
                _have_own_gradient(streamed)
                self._kept += [buffer for buffer in buffers if not buffer.is_idle]
                del self._buffers[streamed]

    def _give_unused(self) -> None:
        """Give back spans that no gradient lies in any more."""
        used = {buffer.taken for buffers in (*self._buffers.values(), self._kept) for buffer in buffers}
        unused = [span for span in self._spans if span not in used]
        self._spans = [span for span in self._spans if span in used]
        for span in unused:
            self._arena.give(span)

    # In a backward

    def _admit(self, parameters: Sequence[StreamedParameter]) -> None:
        unknown = [streamed for streamed in parameters if streamed not in self._buffers]
        if unknown:
            self._take_memory([unknown])

    def _set_aside(self, streamed: StreamedParameter, grad: Tensor) -> None:
        self._before[streamed] = grad

    def _finish(self, has_failed: bool) -> None:
        try:
            self._await()
        except Exception:
            self._lose()
            if not has_failed:
                raise
        if has_failed:
            self._give_lost()
        self._put_back()

    def _give_lost(self) -> None:
        """Give back spans that were taken and not noted. All copies have come."""
        self._threads.submit(int).result()  # an addition that was not noted has come to its end then
        self._arena.give_all(but_for=[*self._spans, *self._others()])

    def _lose(self) -> None:
        """A copy has failed, or may have: what came of this backward is not to be used."""
        self._arena.drain()
        self._device.synchronize()
        self._last = None
        self._in_flight.clear()
        self._in_flight_bytes = 0
        for addition in self._additions:
            with suppress(Exception):
                addition.result()
        self._additions.clear()
        self._totals.clear()

    def _put_back(self) -> None:
        self._rest()
        for streamed, found in {**self._before, **self._totals}.items():
            if streamed.parameter.is_cpu:
                streamed.parameter.grad = found
            else:
                streamed.set_gradient_at_rest(found)
        self._before.clear()  # last: an interrupt has all be put back again
        self._totals.clear()

    def _reset(self) -> None:
        self._lose()
        self._give_lost()
        self._before.clear()  # the user may have cleared `grad` since

    def _prepare(self, chunk: LayerChunk) -> None:
        self._make_room(min(chunk.num_bytes, self._window_bytes))

    def _take(self, made: Sequence[Made]) -> None:
        first = list[Made]()
        before, totals = self._before, self._totals
        for one in made:
            streamed, grad = one
            is_dense = grad.layout is torch.strided
            if is_dense and grad.dtype != streamed.dtype:
                raise LayerOffloadError(
                    f'"{streamed.name}" streams as {streamed.dtype}, and its gradient is {grad.dtype}: was its grad_dtype set? '
                    "Leave that as it was, or have this layer stay on the device: name the others by layers="
                )
            if streamed in before and streamed not in totals:
                totals[streamed] = before[streamed]
            if is_dense and streamed not in totals:
                first.append(one)
            else:
                self._take_more(streamed, grad)
        if first:
            parameters, gradients = zip(*first, strict=True)
            self._send(parameters, gradients)

    def _take_whole(self, parameters: tuple[StreamedParameter, ...], gradients: Sequence[Tensor | None]) -> bool:
        target = self._targets.get(parameters)
        storages = None if target is None else target.packed_as_before(gradients)
        is_first = self._before.keys().isdisjoint(parameters) and self._totals.keys().isdisjoint(parameters)
        totals = target.lend() if target is not None and storages is not None and is_first else None
        if target is None or storages is None or totals is None:
            return False
        self._start(target, parameters, gradients, storages, totals)  # type: ignore[arg-type]  # each is there, as before
        return True

    def _take_more(self, streamed: StreamedParameter, made: Tensor) -> None:
        """Add a gradient to an earlier one, or take a sparse one."""
        total = self._totals.get(streamed)
        if total is None or made.layout is not torch.strided or total.layout is not torch.strided:
            self._await()
            # Added where it is made, as in the plain run: the host's kernels add entries in another order.
            self._totals[streamed] = (made if total is None else sum_of(total.to(made.device), made)).to("cpu")
            return
        span = self._arena.take(_gradient_bytes(streamed))
        try:
            landed = self._copy_out(streamed, made, span)
        except BaseException:
            self._arena.give(span)
            raise
        self._additions.append(self._threads.submit(self._add, streamed, total, span, landed))

    def _add(self, streamed: StreamedParameter, total: Tensor, span: Span, landed: Event) -> None:
        """Add a gradient that has come to host memory; runs on a thread of its own, one after the other."""
        try:
            self._device.synchronize(landed)
            assert span.whole is not None
            brought = streamed.over_gradient(torch.frombuffer(span.whole.numpy(), dtype=torch.uint8).untyped_storage())
            with torch.no_grad():
                total.add_(brought)
            del brought
        finally:
            self._arena.give(span)

    def _packed(self, streamed: StreamedParameter, made: Tensor) -> torch.UntypedStorage:
        if made.is_conj() or made.is_neg():
            made = made.resolve_conj().resolve_neg()  # else the bytes are not yet what the elements are
        storage = made.untyped_storage()
        num_bytes = self._buffers[streamed][0].span.num_bytes
        if storage.nbytes() != num_bytes or made.stride() != streamed.gradient_stride:
            packed = streamed.over_gradient(self._device.allocate(num_bytes))
            packed.copy_(made)
            storage = packed.untyped_storage()
        return storage

    def _note_made(self, gradients: Sequence[Tensor], storages: Sequence[torch.UntypedStorage]) -> None:
        for gradient, storage in zip(gradients, storages, strict=True):
            self._device.note_written(storage, torch_private.version_of(gradient))

    def _send(self, parameters: tuple[StreamedParameter, ...], gradients: Sequence[Tensor]) -> None:
        target = self._targets.get(parameters)
        totals = None if target is None else target.lend()
        if target is None or totals is None:
            target, totals = self._claim(parameters)
        storages = target.packed(gradients)
        if storages is None:
            storages = [self._packed(*one) for one in zip(parameters, gradients, strict=True)]
        self._start(target, parameters, gradients, storages, totals)

    def _start(
        self,
        target: LayerBuffers,
        parameters: tuple[StreamedParameter, ...],
        gradients: Sequence[Tensor],
        storages: Sequence[torch.UntypedStorage],
        totals: Sequence[Tensor],
    ) -> None:
        """Put copies of gradients on the lane, from their storages to where the totals lie."""
        if self._device.takes_notes:
            self._note_made(gradients, storages)
        if target.copies is not None:
            self._fly(storages, target.num_bytes, partial(self._lanes.start_out, target.copies, storages))
        else:
            for storage, buffer in zip(storages, target.buffers, strict=True):
                self._fly([storage], storage.nbytes(), partial(self._copy_to, storage, buffer.span))
        self._totals.update(zip(parameters, totals, strict=True))

    def _claim(self, parameters: tuple[StreamedParameter, ...]) -> tuple[LayerBuffers, list[Tensor]]:
        """Return free buffers, and the tensors over them that become the gradients."""
        totals, buffers = list[Tensor](), list[GradientBuffer]()
        for streamed in parameters:
            known = self._buffers[streamed]
            found = next(((buffer, total) for buffer in known if (total := buffer.lend(streamed)) is not None), None)
            if found is None:  # the caller keeps the gradients of earlier steps
                (span,) = self._take_pinned([known[0].span.num_bytes])
                known.append(GradientBuffer(span, span))
                total = known[-1].lend(streamed)
                assert total is not None
                found = known[-1], total
            buffers.append(found[0])
            totals.append(found[1])
        spans = [buffer.span for buffer in buffers]
        is_pinned = all(span.staging is None for span in spans)  # else each is sent by itself: a thread of its own sees to it
        copies = self._lanes.batch_out(spans) if is_pinned else None
        if len(self._targets) >= _MOST_TARGETS * len(self._watched):  # other parameters each time: experts that are routed to
            del self._targets[next(iter(self._targets))]
        target = self._targets[parameters] = LayerBuffers(parameters, buffers, copies)
        return target, totals

    def _fly(self, storages: Sequence[torch.UntypedStorage], num_bytes: int, copy: Callable[[], Event]) -> Event:
        """Put copies of storages on the lane, which are held until the event that is returned."""
        flight = Flight(self._device.current_stream(), storages, num_bytes)
        self._make_room(num_bytes)
        self._in_flight.append(flight)
        self._in_flight_bytes += num_bytes
        flight.done = self._last = copy()
        self.d2h_bytes += num_bytes
        return flight.done

    def _copy_to(self, storage: torch.UntypedStorage, span: Span) -> Event:
        return self._lanes.copy_out(storage, span, after=self._device.record_event(timed=False)).done

    def _copy_out(self, streamed: StreamedParameter, made: Tensor, span: Span) -> Event:
        storage = self._packed(streamed, made)
        if self._device.takes_notes:
            self._note_made([made], [storage])
        return self._fly([storage], storage.nbytes(), partial(self._copy_to, storage, span))

    def _make_room(self, num_bytes: int) -> None:
        """Wait until gradients in flight, with so many bytes more, fit into the window."""
        while self._in_flight and self._in_flight_bytes + num_bytes > self._window_bytes:
            self._await_oldest()  # may raise, and then nothing writes to the span

    def _await_oldest(self) -> None:
        oldest = self._in_flight[0]
        if oldest.done is None:
            self._arena.drain()
            self._device.synchronize()
        else:
            self._device.wait_event(oldest.stream, oldest.done)  # where this raises, `_finish` meets it again
        self._in_flight.popleft()
        self._in_flight_bytes -= oldest.num_bytes

    def _await(self) -> None:
        """Make the host wait until all that was made has come."""
        if self._last is not None:
            self._device.synchronize(self._last)
        while self._in_flight:
            self._await_oldest()
        self._last, self._in_flight_bytes = None, 0
        for addition in self._additions:
            if not (self._threads.are_here or addition.done()):
                raise forked("LayerOffload")
            addition.result()
        self._additions.clear()


def _have_own_gradient(streamed: StreamedParameter) -> None:
    grad = streamed.parameter.grad
    if grad is not None:
        with without_modes():
            streamed.parameter.grad = grad.clone() if grad.layout is torch.strided else grad


def _gradient_bytes(streamed: StreamedParameter) -> int:
    return streamed.parameter.numel() * streamed.dtype.itemsize
