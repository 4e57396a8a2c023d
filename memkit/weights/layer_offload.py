"""`LayerOffload`: weights of layers in host memory, streamed through a few slots on the device."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from memkit.core import torch_private
from memkit.core.features import EnteredOnce, NotCopied, note_attached, note_detached
from memkit.core.forks import forked
from memkit.core.hooks import HookSet, RemovableHandle
from memkit.core.sizes import check_budget_bytes, format_bytes
from memkit.device import Device, cuda_is_available, open_device
from memkit.errors import LayerOffloadError, warn_user
from memkit.plan import plan_again
from memkit.transfer.disk import Disk
from memkit.weights import selection
from memkit.weights.chunks import LayerChunk, StreamedParameter, adopt, refuse_tied, without_modes
from memkit.weights.forwards import Forwards
from memkit.weights.from_files import FilePath, FileWeights
from memkit.weights.fused import FusedSteps, MakeOptimizer, bring_state, state_bytes_of
from memkit.weights.gradients import HostGradients
from memkit.weights.host_copies import DevicePlacement, HostCopies, claim, is_streamed, refuse_streamed
from memkit.weights.selection import LayerChoice, StepTimes, StepTiming
from memkit.weights.streaming import Streamer

_FUSED = torch_private.SCALES_IN_STEP_MARK
_STEP = torch.amp.GradScaler.step.__code__


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` that waits for the scale's copy before it scales gradients in host memory.

    With `LayerOffload(train="host")` gradients of streamed weights are in host memory, those of the rest on the device. torch's
    own scaler, and its fused optimizers, copy the scale to the host without waiting for it, so that these gradients are
    multiplied by the former bytes of that memory. This one copies it first: the host waits for the device once in each step.
    Arguments and methods are those of `torch.amp.GradScaler`.

    Example:
        >>> import memkit
        >>> scaler = memkit.GradScaler("cpu", init_scale=1024.0)
    """

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step the optimizer unless a gradient is infinite or NaN, as `torch.amp.GradScaler.step` does."""
        if not getattr(optimizer, _FUSED, False):
            return super().step(optimizer, *args, **kwargs)
        setattr(optimizer, _FUSED, False)  # else the optimizer would bring the scale to the host itself
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            setattr(optimizer, _FUSED, True)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        # From pageable host memory to a device, torch has read a tensor when the call returns; the other way it may not wait.
        return torch_private.unscale_grads(self, optimizer, inv_scale.cpu(), found_inf.cpu(), allow_fp16)


def refuse_unscaled(is_streamed: Callable[[Tensor], bool], optimizer: torch.optim.Optimizer) -> None:
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code is not _STEP:
        frame = frame.f_back
    scaler = frame.f_locals.get("self") if frame.f_code is _STEP else None
    if scaler is None or isinstance(scaler, GradScaler):
        return
    scale = torch_private.scale_of(scaler)
    if scale is None or scale.is_cpu:
        return
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    if any(is_streamed(parameter) and parameter.grad is not None for parameter in parameters):
        raise LayerOffloadError(
            "torch.amp.GradScaler scales gradients in host memory without waiting for the scale to come there: they may have "
            'been multiplied by what was in memory before. With train="host" use memkit.GradScaler, which has the same '
            "arguments and methods"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStats:
    """The bytes that a `LayerOffload` has moved since it was made, and its present memory."""

    num_streamed: int
    """Layers that stream."""
    num_resident: int
    """Layers that stay on the device."""
    streamed_bytes: int
    """Bytes of the layers that stream, as they are packed: one fetch of each moves them."""
    slot_bytes: int
    """Bytes of the device that slots take, those that were taken for a while included."""
    host_bytes: int
    """Host memory that is held, pinned where the system does that."""
    h2d_bytes: int
    """Bytes that were copied to the device."""
    d2h_bytes: int
    """Bytes that were copied to the host: gradients with train="host", weights with train="fused"."""
    num_fetches: int
    """Copies of a layer to the device."""
    num_demand_fetches: int
    """Those among them that began no sooner than the layer was needed."""
    predicted_s: float | None
    """The planned seconds of a forward and a backward of the layers, once a step was timed: the second, or with
    `offload_ratio="auto"` one in which all streamed."""
    actual_s: float | None
    """The seconds that they took in the timed step, from the first layer to the last one; with "auto" the second since the
    share was chosen."""
    predicted_peak_bytes: int | None
    """With "auto", the predicted most bytes allocated on the device with the chosen share; without gradients and optimizer
    state that have come to stay on the device."""
    actual_peak_bytes: int | None
    """The most bytes that were allocated by the end of the timed step, since the device's peak was reset last."""
    num_overflows: int
    """How often all slots were in use, so that one more was taken for a while."""
    stall_s: dict[str, float]
    """For each layer that streams, seconds that the device has waited for it, as far as they are known yet."""
    disk_bytes: int = 0
    """Bytes of the layers that lie on a disk."""
    disk_read_bytes: int = 0
    """Bytes that were read from there."""

    def __str__(self) -> str:
        rows = [
            ("layers that stream", f"{self.num_streamed} ({format_bytes(self.streamed_bytes)})"),
            ("layers that stay", str(self.num_resident)),
            ("slots", format_bytes(self.slot_bytes)),
            ("host memory", format_bytes(self.host_bytes)),
            ("moved to the device", format_bytes(self.h2d_bytes)),
            ("moved to the host", format_bytes(self.d2h_bytes)),
            ("fetches", f"{self.num_fetches}, {self.num_demand_fetches} of them on demand"),
            ("overflows", str(self.num_overflows)),
            ("a step", f"{_ms(self.actual_s)}, predicted {_ms(self.predicted_s)}"),
            ("peak", f"{_bytes(self.actual_peak_bytes)}, predicted {_bytes(self.predicted_peak_bytes)}"),
            ("stalls", f"{1e3 * sum(self.stall_s.values()):.2f} ms"),
        ]
        if self.disk_bytes:
            rows += [("on the disk", format_bytes(self.disk_bytes)), ("read from there", format_bytes(self.disk_read_bytes))]
        return tabulate(rows, tablefmt="plain", disable_numparse=True)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.2f} ms"


def _bytes(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else format_bytes(num_bytes)


class LayerOffload(NotCopied, EnteredOnce):
    """Keep a share of a model's layers in host memory, and stream their weights to the device just before they are needed.

    Evenly spaced layers stream through a few slots, forward and backward; the others stay on the device. Of streamed weights
    autograd saves a reference to the layer, not the bytes. So gradients are exact, bit for bit, without checkpointing, in any
    order and with several graphs alive (but see the limits in `docs/layer-offload-details.md`). All else moves to the device.

    The weights stream until `close()`, or the end of a `with`. An object that is bound to no name goes on streaming, too: the
    model's hooks hold it, and `memkit.detach(model)` closes it.

    Between forwards and backwards the streamed parameters are tensors in host memory, and `state_dict()`, `load_state_dict()`
    and in-place writes work on those.

    Args:
        model: on any device; its parameters stay the same objects. On the CPU it may be larger than the device.
        layers: names, modules, or a predicate of name and module. By default the elements of lists (`ModuleList`, `Sequential`)
            whose elements are of one class, the one that frees the most memory; if they are stages, the blocks inside them.
        offload_ratio: the share of the layers' bytes that streams, from 0 to 1. "auto" measures it: all stream at first, and
            the second step is timed. From the third on as much streams as hides behind the computation, or more if the device
            has no room for the rest.
        budget: the weight budget, bytes of the device for the weights of layers, slots included; here and below, a number of
            bytes, or text such as "6GiB".
        num_resident: how many layers stay on the device. Give exactly one of these three.
        num_slots: how many layers of one size can be on the device at once: in use, ready, or being copied.
        train: "frozen": streamed parameters are not trained; parameters inside streamed layers that require grad (LoRA) stay on
            the device. "host": gradients of streamed parameters go to host memory as they are made, and an optimizer steps the
            host copies there. "fused": each parameter is stepped on the device within the backward, once its gradient is
            complete, and the host copy is updated then; gradients can't be accumulated, nor clipped by their global norm.
            "auto" is "fused" if there is an `optimizer`, else "host" if most of the layers' bytes require grad, else "frozen";
            `LayerOffload.train` says which.
        optimizer: for "fused": makes an optimizer of parameters, such as `functools.partial(torch.optim.AdamW, lr=1e-4)`. It is
            called with parameters on the meta device first, to see how much state it keeps, and then with all parameters that
            require grad; `LayerOffload.optimizer` is the one returned then, for schedulers and `state_dict`. Its state stays on
            the device, and counts towards `budget`.
        weights: safetensors files with the model's weights, as `load_state_dict` would load them: one, or a directory, with an
            index if there are several. The model may be built without data, within `with torch.device("meta")`. Streamed
            weights are read straight into their place in host memory.
        disk: where the layers that stream lie, in place of host memory, which then has a few buffers that they pass through.
            They must be frozen, and "auto" does not go with it.
        host_limit_bytes: the most host memory to use.
        device: where the model runs; by default the current CUDA device, or the CPU if there is none.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: an argument is out of range, there are no layers, or the model is managed by another library.
        DiskError: the disk has not enough room; nothing was moved.
        HostMemoryError: there is not enough host memory; nothing was moved. If there is, and the system does not pin it, that
            is a warning.
        torch.OutOfMemoryError: the device has no room for the tensors that stay there.

    Example:
        >>> import torch, memkit
        >>> model = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(8)).requires_grad_(False)
        >>> x = torch.randn(2, 64, requires_grad=True)
        >>> with memkit.LayerOffload(model, offload_ratio=0.5, device=memkit.device.ReferenceDevice()) as offload:
        ...     for layer in model:
        ...         x = layer(x)
        ...     x.sum().backward()
        >>> len(offload.plan.streamed)
        4
    """

    def __init__(
        self,
        model: nn.Module,
        layers: LayerChoice = None,
        *,
        offload_ratio: float | str | None = None,
        budget: int | str | None = None,
        num_resident: int | None = None,
        num_slots: int = 3,
        train: str = "auto",
        optimizer: MakeOptimizer | None = None,
        weights: FilePath | None = None,
        disk: Disk | None = None,
        host_limit_bytes: int | str | None = None,
        device: str | torch.device | Device | None = None,
    ) -> None:
        torch_private.require(torch_private.Feature.LAYERS)
        if not isinstance(model, nn.Module):
            raise TypeError(f"LayerOffload needs a torch.nn.Module; found {type(model).__name__}")
        if host_limit_bytes is not None:
            host_limit_bytes = check_budget_bytes("host_limit_bytes", host_limit_bytes, may_be_zero=True)
        selection.refuse_unmovable(model, reads_weights=weights is not None)
        self.model = model
        self.device = open_device(("cuda" if cuda_is_available() else "cpu") if device is None else device)
        self._layers = selection.find_layers(model, layers)
        refuse_streamed(model)
        self.train = selection.choose_mode(train, self._layers, optimizer)
        selection.check_disk(disk, train=self.train, offload_ratio=offload_ratio)
        selection.refuse_scripted(model, self._layers, steps_all=self.train == "fused")
        chunks = selection.chunks_of(model, self._layers, is_trained=self.train != "frozen")
        self._candidates = {name: chunks.get(name) for name in self._layers}
        in_layers = [item.parameter for chunk in chunks.values() for item in chunk.parameters]
        trained = [parameter for parameter in in_layers if parameter.requires_grad]
        self.plan = selection.plan_layers(
            self._candidates,
            offload_ratio=offload_ratio,
            budget=budget,
            num_resident=num_resident,
            num_slots=num_slots,
            state_bytes=0 if optimizer is None else state_bytes_of(optimizer, trained),
        )
        message = selection.why_layers_free_nothing(
            self._candidates, self.plan, self.device, train=self.train, num_slots=num_slots
        )
        if message is not None:
            warn_user(message)
        self._num_slots, self._is_open = num_slots, isinstance(offload_ratio, str)  # open: the share is to be found
        self._timing: StepTiming | None = None  # of a step in which all layers stream, then of one with the final plan
        self._times: StepTimes | None = None
        self._predicted_peak_bytes: int | None = None
        self._chunks = self._streaming()
        self._placement, self._hooks = DevicePlacement(), HookSet()
        self._process = os.getpid()
        self._forwards = Forwards(model, self._before_pass, self._note_adopted)
        self._streamer: Streamer | None = None
        self._gradients: HostGradients | FusedSteps | None = None
        self._leaving: list[LayerChunk] = []  # layers that stay on the device from now on, and have not given back their memory
        self._host = HostCopies(self.device, model, chunks.values(), limit_bytes=host_limit_bytes, disk=disk)
        self._arena = arena = self._host.arena
        files = FileWeights(model, weights)
        try:
            self._host.take(self._chunks)
            files.open()
            if self.train != "frozen":
                selection.refuse_replicas(self.model, self.train)
            if self.train == "host":
                rest, others = lambda: self._streams.rest(), self._host.spans
                self._gradients = HostGradients(self.device, arena, self._chunks, rest=rest, others=others)
                self._gradients.begin(self._chunks)
                self._hooks.before_any_step(partial(refuse_unscaled, is_streamed))
            self._host.warn_of_refusal()
            note_attached(self, is_on=lambda offload, module: offload.model is module, take_off=LayerOffload.close)
            self._begin(optimizer, files)
        except BaseException:
            self.close()
            files.undo()
            raise

    def _streaming(self) -> list[LayerChunk]:
        found = [chunk for name in self.plan.streamed if (chunk := self._candidates[name]) is not None]
        for position, chunk in enumerate(found):
            chunk.position = position
        return found

    def _begin(self, make: MakeOptimizer | None, files: FileWeights) -> None:
        streamed = {id(item.parameter) for chunk in self._chunks for item in chunk.parameters}
        for chunk in self._chunks:
            self._host.move_in(chunk, files.read)
        tensors = [tensor for tensor in (*self.model.parameters(), *self.model.buffers()) if id(tensor) not in streamed]
        files.fill(tensors)
        self._placement.place(tensors, self.device.torch_device)
        self._streamer = Streamer(self.device, self._chunks, self.plan.slot_bytes, self._host.disk)
        if self._is_open:
            self._streamer.handles = weakref.WeakSet()
        if make is not None:
            trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            self._gradients = FusedSteps(self.device, self._streamer, make, trained)
            self._gradients.begin(self._chunks)
        self._forwards.watch(self._streamer, self._gradients)
        if self._chunks:
            self._begin_timing()

    def _note_adopted(self, adopted: StreamedParameter) -> None:
        refuse_tied(adopted, self._chunks)
        claim(adopted, self._host)

    def _begin_timing(self) -> StepTiming:
        resident = {name: layer for name, layer in self._layers.items() if name not in self.plan.streamed}
        is_trained = any(parameter.requires_grad for parameter in self.model.parameters())
        self._timing = timing = StepTiming(self._streams, is_trained=is_trained, resets_peak=self._is_open)
        self._forwards.time_with(timing, resident)
        return timing

    def _before_pass(self) -> None:
        """End interrupted calls when a forward begins, and plan by the timed step."""
        self._host.warn_of_refusal()
        if self._streams.is_closed:  # by an interrupt while layers came to stay on the device
            self._stream_anew()
        self._release_leaving()
        if self._timing is None or not self._timing.begin_pass():
            return
        if self._is_open and (self._streams.handles or any(chunk.uses for chunk in self._chunks)):
            return  # a graph is alive, or another thread runs: later
        times = self._timing.result()
        for adopted in (adopted for chunk in self._chunks if self._is_open for adopted in adopt(chunk)):
            self._note_adopted(adopted)
        self._forwards.time_with(None, {})
        if not self._is_open:
            self._times, self._timing = times, None
            if self.plan.predicted_s is None:
                self.plan = plan_again(self.plan, selection.costs_of(self._candidates, times), times.h2d_bytes_per_s)
            return
        try:
            with without_modes():
                self._choose(times)
        except Exception:
            self._is_open, self._timing, self._streams.handles = False, None, None
            raise
        self._is_open, self._streams.handles = False, None
        self._begin_timing().begin_pass()

    def _choose(self, times: StepTimes) -> None:
        """Choose, by the timed step, which layers stay on the device from now on."""
        before, costs, counter = self.plan, selection.costs_of(self._candidates, times), self.device.memory_counter()
        capacity_bytes, num_slots = None if counter is None else counter.capacity_bytes(), self._num_slots
        chosen = selection.plan_measured(
            costs, times, before, train=self.train, num_slots=num_slots, capacity_bytes=capacity_bytes
        )
        staying = [chunk for chunk in self._chunks if chunk.name not in chosen.streamed]
        self.plan = before if staying else chosen
        if staying:
            try:
                self._arena.drain()
                self._streams.close()
                for chunk in staying:
                    chunk.restore()
                    self._placement.place([item.parameter for item in chunk.parameters], self.device.torch_device)
                self.plan, self._leaving = chosen, staying
                self._stream_anew()
            except BaseException:  # no room, or an interrupt: all go on streaming
                self.plan, self._leaving = before, []
                self._stream_anew()
                raise
            self._release_leaving()
        if times.peak_bytes is not None:
            self._predicted_peak_bytes = times.peak_bytes - before.device_bytes + self.plan.device_bytes

    def _stream_anew(self) -> None:
        """Stream the layers of the current plan, and no others."""
        before, self._chunks = self._streams, self._streaming()
        for chunk in self._chunks:
            if not chunk.is_at_rest:
                chunk.move_to_host()
        streamer = Streamer(self.device, self._chunks, self.plan.slot_bytes, self._host.disk)
        streamer.count_on(before)
        self._forwards.watch(streamer, self._gradients)
        if isinstance(self._gradients, FusedSteps):
            self._gradients.streamer = streamer
        self._streamer = streamer  # last: as long as it is the closed one, the next forward does this again

    def _release_leaving(self) -> None:
        """Give back the host memory of layers that stay on the device from now on, but for host copies that are held."""
        if not self._leaving:
            return
        if self._gradients is not None:
            for chunk in self._leaving:
                self._gradients.unwatch(chunk)
        self._host.give(self._leaving)
        if self.train == "host":
            parameters = [item.parameter for chunk in self._leaving for item in chunk.parameters]
            self._hooks.before_any_step(partial(bring_state, parameters))
        self._leaving = []

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer that steps the parameters with `train="fused"`, None otherwise. It need not be called; schedulers may
        change its groups, `state_dict` works, and a `StateOffload` with `when="backward"` has its states stream as well."""
        return self._gradients.optimizer if isinstance(self._gradients, FusedSteps) else None

    def __repr__(self) -> str:
        if self._is_closed:
            return f"<LayerOffload of {type(self.model).__name__}: closed>"
        plan = self.plan
        slots = "1 slot" if len(plan.slot_bytes) == 1 else f"{len(plan.slot_bytes)} slots"
        return (
            f"<LayerOffload of {type(self.model).__name__}: {len(plan.streamed)} of {len(plan.layers)} layers "
            f"({format_bytes(plan.streamed_bytes)}) stream through {slots} on {self.device.torch_device}, "
            f'train="{self.train}">'
        )

    @property
    def _streams(self) -> Streamer:
        assert self._streamer is not None
        if os.getpid() != self._process:
            raise forked("LayerOffload")
        return self._streamer

    def until_closed(self, handle: RemovableHandle) -> None:
        """Have `close()` also remove a handle, such as a hook on the model: at once if this is closed already."""
        self._hooks.add(handle)
        if self._is_closed:
            self._hooks.remove()

    def close(self) -> None:
        """Stop streaming, and put every tensor back to where it was found. Backwards of live graphs fail from then on. Calling
        it again does nothing, or the rest of an interrupted call."""
        if self._is_closed:
            return
        if os.getpid() != self._process:
            raise forked("LayerOffload")
        self._forwards.close()
        self._hooks.remove()
        self._timing = None
        if self._gradients is not None:
            self._gradients.reset_interrupted()
        self._arena.drain()
        if self._streamer is not None:
            self._streamer.close()
        self._host.restore(self._gradients)
        self._placement.restore()
        self._host.close()
        note_detached(self)
        self._is_closed = True

    @contextmanager
    def gather(self, layer: str | nn.Module) -> Iterator[nn.Module]:
        """Return a context in which the weights of a layer may be read and written in any way, in host memory.

        Slots forget its bytes.

        Args:
            layer: its name, or the module.

        Raises:
            ValueError: the model has no such layer, or this is closed.
        """
        if self._is_closed:
            raise ValueError("this LayerOffload is closed: the weights are where they were, use them there")
        name = layer if isinstance(layer, str) else next((name for name, item in self._layers.items() if item is layer), None)
        if name not in self._layers:
            raise ValueError(f"gather: {layer!r} is not one of the layers ({', '.join(self._layers)})")
        chunk = next((chunk for chunk in self._chunks if chunk.name == name), None)
        self._forwards.end_interrupted()
        if self._gradients is not None:
            self._gradients.reset_interrupted()
        self._streams.rest()
        try:
            yield self._layers[name]
        finally:
            if chunk is not None:
                chunk.num_changes += 1

    def stats(self) -> LayerStats:
        """Return the bytes moved so far, and the waits for them."""
        times, disk = self._times, self._host.disk
        with self._streams.lock:
            return LayerStats(
                num_resident=len(self._layers) - len(self._chunks),
                host_bytes=self._arena.held_bytes,
                d2h_bytes=0 if self._gradients is None else self._gradients.d2h_bytes,
                predicted_s=self.plan.predicted_s,
                actual_s=None if times is None else times.taken_s,
                predicted_peak_bytes=self._predicted_peak_bytes,
                actual_peak_bytes=None if times is None else times.peak_bytes,
                disk_bytes=0 if disk is None else disk.num_bytes,
                disk_read_bytes=0 if disk is None else disk.read_bytes,
                **self._streams.counts(),
            )
