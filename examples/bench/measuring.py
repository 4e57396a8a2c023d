"""Seconds and peaks of a training step, medians of several runs; and what memkit is compared with: plain PyTorch, and its own
ways to save memory."""

from __future__ import annotations

import gc
import statistics
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from memkit.activations.offloading.moving_stage import is_from_leaf
from memkit.device import Device, Event, cuda_is_available
from memkit.transfer import Link

Engine = Callable[[], AbstractContextManager[Any]]
"""Makes the context that a step's forward runs in: one for each step."""


def roofline_s(*, forward_s: float, backward_s: float, out_bytes: int, back_bytes: int, link: Link) -> float:
    """Return the least seconds of a step: the forward or the copies out, then the backward or the copies back."""
    return max(forward_s, out_bytes / link.d2h_bytes_per_s) + max(backward_s, back_bytes / link.h2d_bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One step of a model, by default a training step without its optimizer, cut where a context begins and ends."""

    name: str
    model: nn.Module
    forward: Callable[[], Any]
    """Runs inside the context."""
    loss: Callable[[Any], Tensor]
    """Makes a number of what `forward` returned, outside of the context; the backward starts from it."""
    backward: bool = True
    """Without one, the forward runs without grad mode, and there is no loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Medians of several steps; peaks are the largest."""

    num_steps: int
    step_s: float
    forward_s: float
    """From the entry into the context to the start of the backward, so the loss is in it."""
    backward_s: float
    """0 where there is none."""
    peak_allocated_bytes: int | None
    """None where the allocator does not count."""
    peak_reserved_bytes: int | None
    """Includes what the warm-up has left reserved: this is what the user sees as used."""
    in_a_row_s: float | None = None
    """A step's share of several that follow each other without the host waiting for the device in between, as in a loop
    that reads no loss. None where that was not measured."""


StepOf = Callable[[nn.Module], Workload]
"""Makes the step of a model."""


def measure(
    workload: Workload,
    engine: Engine,
    device: Device,
    *,
    num_steps: int,
    num_warmup: int,
    after_warmup: Callable[[], None] = lambda: None,
    num_in_a_row: int = 0,
) -> Measurement:
    """Return what a step takes in an engine's context. Gradients are dropped before each step, and after the last.

    Args:
        num_steps: steps that count. Ahead of each the host waits until the device has nothing left to do.
        num_warmup: steps ahead of them that do not.
        after_warmup: called in between, when the device has nothing left to do.
        num_in_a_row: so many steps follow one more, without such waits, and are timed together.
    """
    workload.model.zero_grad(set_to_none=True)
    gc.collect()
    device.empty_cache()
    counter = device.memory_counter()
    forward_s, backward_s, step_s = [], [], []
    for step in range(num_warmup + num_steps):
        workload.model.zero_grad(set_to_none=True)
        device.synchronize()
        if step == num_warmup:
            after_warmup()
            if counter is not None:
                counter.reset_peak()
        start, turn, end = _run(workload, engine, device)
        device.synchronize()
        if step >= num_warmup:
            forward_s.append(start.elapsed_s(turn))
            backward_s.append(turn.elapsed_s(end))
            step_s.append(start.elapsed_s(end))
    workload.model.zero_grad(set_to_none=True)
    peak_bytes = None if counter is None else counter.peak_bytes()
    peak_reserved_bytes = None if counter is None else counter.peak_reserved_bytes()
    return Measurement(
        num_steps=num_steps,
        step_s=statistics.median(step_s),
        forward_s=statistics.median(forward_s),
        backward_s=statistics.median(backward_s),
        peak_allocated_bytes=peak_bytes,
        peak_reserved_bytes=peak_reserved_bytes,
        in_a_row_s=_in_a_row_s(workload, engine, device, num_in_a_row) if num_in_a_row else None,
    )


def _run(workload: Workload, engine: Engine, device: Device) -> tuple[Event, Event, Event]:
    """Run a step; return when it has begun, when its backward has, and when it is over."""
    start = device.record_event()
    with nullcontext() if workload.backward else torch.no_grad(), engine():
        result = workload.forward()
    loss = workload.loss(result) if workload.backward else None
    del result
    turn = end = device.record_event()
    if loss is not None:
        loss.backward()
        loss = None
        end = device.record_event()
    return start, turn, end


def _in_a_row_s(workload: Workload, engine: Engine, device: Device, num_steps: int) -> float:
    ends = []
    for _ in range(1 + num_steps):  # the first begins when the device has nothing to do
        _, _, end = _run(workload, engine, device)
        ends.append(end)
        workload.model.zero_grad(set_to_none=True)
    device.synchronize()
    return ends[0].elapsed_s(ends[-1]) / num_steps


def let_go(error: BaseException, device: Device) -> None:
    """Free what the frames of a caught exception keep alive, also on the device."""
    traceback.clear_frames(error.__traceback__)
    gc.collect()
    device.empty_cache()


def plain() -> AbstractContextManager[Any]:
    """Do nothing."""
    return nullcontext()


def save_on_cpu() -> AbstractContextManager[Any]:
    """Every saved tensor to pinned memory and back, one at a time. Source: `torch.autograd.graph.save_on_cpu`."""
    return torch.autograd.graph.save_on_cpu(pin_memory=cuda_is_available())


def synchronous(num_bytes: int, *, min_bytes: int) -> AbstractContextManager[Any]:
    """The same for the first saved tensors, until so many bytes have moved: what a share costs without streams. Tensors smaller
    than `min_bytes` stay."""
    moved_bytes = 0

    def pack(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        nonlocal moved_bytes
        if moved_bytes >= num_bytes or tensor.nbytes < min_bytes or is_from_leaf(tensor):
            return tensor
        moved_bytes += tensor.nbytes
        host = torch.empty(tensor.size(), dtype=tensor.dtype, layout=tensor.layout, pin_memory=tensor.is_cuda)
        host.copy_(tensor)
        return tensor.device, host

    def unpack(packed: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed[1].to(packed[0], non_blocking=True)

    return saved_tensors_hooks(pack, unpack)


@contextmanager
def checkpointed(model: nn.Module) -> Iterator[None]:
    """Every block of the model checkpointed (without re-entry) for as long as the context is on.

    The forward that is wrapped must not run the blocks' backward inside the context.
    """
    with checkpointed_each(blocks_of(model)):
        yield


@contextmanager
def checkpointed_each(modules: Sequence[nn.Module], *, kept_ops: Sequence[Any] = ()) -> Iterator[None]:
    """The same for modules of one's choice.

    Args:
        kept_ops: overloads of ops whose results are kept.
            Source: `torch.utils.checkpoint.create_selective_checkpoint_contexts`.
    """
    options: dict[str, Any] = {}
    if kept_ops:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, list(kept_ops))
    own = [module.__dict__.get("forward") for module in modules]  # a compiled one, for instance
    for module in modules:
        module.forward = partial(_checkpointed_call, module.forward, options)
    try:
        yield
    finally:
        for module, forward in zip(modules, own, strict=True):
            if forward is None:
                del module.forward
            else:
                module.forward = forward


def _checkpointed_call(forward: Callable[..., Any], options: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Lists are copied: torchvision's DenseNet adds to what it has called a layer with."""
    args = tuple([*each] if isinstance(each, list) else each for each in args)
    return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)


def checkpointing(model: nn.Module) -> dict[str, Engine]:
    """Return the checkpointing that suits a model, by name: per block where it has blocks, else per child, else as a whole."""
    if blocks_of(model):
        return {"checkpoint per block": partial(checkpointed, model)}
    children = list(model.children())
    if children and not any(isinstance(child, (nn.ModuleList, nn.ModuleDict)) for child in children):
        return {"checkpoint per child": partial(checkpointed_each, children)}
    return {"checkpoint of the whole": partial(checkpointed_each, [model])}


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model: the children of its lists whose members are all of one class, and no leaves."""
    blocks = []
    for child in model.children():
        members = list(child.children())
        is_list = isinstance(child, (nn.ModuleList, nn.Sequential)) and len({type(member) for member in members}) == 1
        if is_list and next(members[0].children(), None) is not None:
            blocks += members
        else:
            blocks += blocks_of(child)
    return blocks


def torch_baselines(model: nn.Module) -> dict[str, Engine]:
    """Return torch's own means to lower a step's peak, by name."""
    return {"torch save_on_cpu": save_on_cpu, **checkpointing(model)}
