"""What memkit is compared with: plain PyTorch, and PyTorch's own ways to save memory. Other packages are not part of this
one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from memkit.activations.offloading.moving_stage import is_from_leaf
from memkit.bench.measure import Engine
from memkit.device import cuda_is_available


def plain() -> AbstractContextManager[Any]:
    """Do nothing."""
    return nullcontext()


def save_on_cpu() -> AbstractContextManager[Any]:
    """Every saved tensor to pinned memory and back, one at a time. Source: `torch.autograd.graph.save_on_cpu`."""
    return torch.autograd.graph.save_on_cpu(pin_memory=cuda_is_available())


def synchronous(num_bytes: int, *, min_bytes: int) -> AbstractContextManager[Any]:
    """The same for the first saved tensors, until this many bytes have moved: the cost of a share without streams.

    Args:
        num_bytes: bytes to move.
        min_bytes: smaller tensors stay.
    """
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
        module.forward = partial(checkpoint, module.forward, use_reentrant=False, **options)
    try:
        yield
    finally:
        for module, forward in zip(modules, own, strict=True):
            if forward is None:
                del module.forward
            else:
                module.forward = forward


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
    """Return what torch itself has to lower a step's peak, by name: saving on the CPU, and the checkpointing that suits."""
    return {"torch save_on_cpu": save_on_cpu, **checkpointing(model)}
