"""What streaming layers is compared with: other packages' means, FSDP2's, and a hand-made loop, each on a copy of the model."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from block_swap import BlockSwap
from measuring import Measurement, StepOf, let_go, measure, plain
from torch import nn

from memkit.device import Device
from memkit.weights.host_copies import DevicePlacement
from memkit.weights.selection import find_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPeer:
    """One way to have layers in host memory while they are not in use."""

    name: str
    has_backward: bool
    """Whether a backward through it is right, and keeps to what it promises."""
    counts_memory: bool
    """Whether its peak is told: not where nothing is fetched ahead, so that it is no measure for what does."""
    offloaded: Callable[[nn.Module, Device], AbstractContextManager[None]]
    """Takes a model on the CPU, which is thrown away afterwards."""


def measure_peer(
    peer: LayerPeer, step_of: StepOf, model: nn.Module, device: Device, *, num_steps: int, num_warmup: int
) -> Measurement | str:
    """Return what a step takes with one peer, or why it cannot do it.

    Args:
        peer: whose means.
        step_of: makes the step of a copy of the model.
        model: on the CPU, or on the device if that has room for it twice.
        device: where the steps run.
        num_steps, num_warmup: steps that count, and steps ahead of them that do not.
    """
    if step_of(model).backward and not peer.has_backward:
        return "it runs forwards only, and this step has a backward"
    try:
        return _measured(peer, step_of, model, device, num_steps, num_warmup)
    except ImportError as error:
        return f"not installed ({error})"
    except Exception as error:  # of others' code; the other lines are worth having
        text = (str(error).strip().splitlines() or [""])[0][:300]
        let_go(error, device)
        return f"it failed: {type(error).__name__}: {text}"


def _measured(
    peer: LayerPeer, step_of: StepOf, model: nn.Module, device: Device, num_steps: int, num_warmup: int
) -> Measurement:
    its_own = copy.deepcopy(model)
    with peer.offloaded(its_own, device):
        found = measure(step_of(its_own), plain, device, num_steps=num_steps, num_warmup=num_warmup, num_in_a_row=num_steps)
    return found if peer.counts_memory else replace(found, peak_allocated_bytes=None, peak_reserved_bytes=None)


@contextmanager
def _diffusers(model: nn.Module, device: Device, *, record_stream: bool) -> Iterator[None]:
    """Source: `diffusers.hooks.apply_group_offloading`."""
    hooks = importlib.import_module("diffusers.hooks")
    parents = {name.rpartition(".")[0].rpartition(".")[0] for name in find_layers(model, None) if "." in name}
    if len(parents) != 1:
        raise ValueError(f"it needs a list of layers inside of one module; found them in {len(parents)}")
    holder = model.get_submodule(parents.pop())  # it looks for lists among the children
    inside = {id(tensor) for tensor in (*holder.parameters(), *holder.buffers())}
    others = (tensor for tensor in (*model.parameters(), *model.buffers()) if id(tensor) not in inside)
    DevicePlacement().place(others, device.torch_device)
    hooks.apply_group_offloading(
        holder,
        onload_device=device.torch_device,
        offload_device=torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
        use_stream=True,
        record_stream=record_stream,
    )
    yield


@contextmanager
def _accelerate(model: nn.Module, device: Device) -> Iterator[None]:
    """Source: `accelerate.cpu_offload`."""
    importlib.import_module("accelerate").cpu_offload(model, execution_device=device.torch_device)
    yield


@contextmanager
def _fsdp(model: nn.Module, device: Device) -> Iterator[None]:
    """Each layer a group, and the rest of the model one. Source: `torch.distributed.fsdp.CPUOffloadPolicy`."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    if distributed.is_initialized():
        raise ValueError("it needs a process group of its own; found one that is there already. Run without torchrun")
    kind = device.torch_device.type
    store = distributed.HashStore()  # type: ignore[attr-defined]  # torch exports it, but not by name
    distributed.init_process_group("nccl" if kind == "cuda" else "gloo", store=store, rank=0, world_size=1)
    try:
        mesh, policy = init_device_mesh(kind, (1,)), CPUOffloadPolicy(pin_memory=kind == "cuda")
        for layer in find_layers(model, None).values():
            fully_shard(layer, mesh=mesh, offload_policy=policy)
        fully_shard(model, mesh=mesh, offload_policy=policy)
        yield
    finally:
        distributed.destroy_process_group()


@contextmanager
def _block_swap(model: nn.Module, device: Device) -> Iterator[None]:
    """Each layer, frozen weights only; all else on the device. Source: `block_swap.py`."""
    swap = BlockSwap([*find_layers(model, None).values()], device)
    moved = {id(parameter) for parameter in swap.parameters}
    DevicePlacement().place([x for x in (*model.parameters(), *model.buffers()) if id(x) not in moved], device.torch_device)
    try:
        yield
    finally:
        swap.close()


PEERS = (
    LayerPeer(name="block swap", has_backward=True, counts_memory=True, offloaded=_block_swap),
    LayerPeer(
        name="diffusers group offloading",
        has_backward=False,
        counts_memory=True,
        offloaded=partial(_diffusers, record_stream=False),
    ),
    LayerPeer(
        name="diffusers group offloading, record_stream",
        has_backward=False,
        counts_memory=True,
        offloaded=partial(_diffusers, record_stream=True),
    ),
    LayerPeer(name="accelerate cpu_offload", has_backward=False, counts_memory=False, offloaded=_accelerate),
    LayerPeer(name="FSDP2 CPUOffloadPolicy", has_backward=True, counts_memory=True, offloaded=_fsdp),
)
