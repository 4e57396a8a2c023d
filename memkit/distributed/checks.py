"""What `shard` refuses, by name, before it changes anything."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from memkit.storages import unique_storages
from memkit.torch_state import is_dtensor, is_sharded_by_fsdp
from memkit.weights import LayerOffload
from memkit.weights.host_copies import is_streamed, shared_between
from memkit.weights.selection import quoted

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def check_group() -> None:
    """Raise where this process is of no group.

    Raises:
        ValueError: `torch.distributed` is not there, or has no process group yet.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "shard needs a process group; found none. Start the script by torchrun --nproc-per-node N, and call "
            "torch.distributed.init_process_group() first; one process is a group as well"
        )


def check_arguments(
    model: object,
    mesh: object,
    frozen_dtype: object,
    mp_policy: object,
    offload_policy: object,
    reshard_after_forward: object,
    prefetch: object,
) -> None:
    """Raise where an argument is of the wrong type, or out of range.

    Raises:
        TypeError: one is of the wrong type.
        ValueError: `prefetch` is negative, or `frozen_dtype` no floating-point type.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

    if not isinstance(model, nn.Module):
        raise TypeError(f"shard needs a torch.nn.Module; found {type(model).__name__}")
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"shard: mesh is a torch.distributed.device_mesh.DeviceMesh; found {type(mesh).__name__}")
    if not (mp_policy is None or isinstance(mp_policy, MixedPrecisionPolicy)):
        raise TypeError(f"shard: mp_policy is a torch.distributed.fsdp.MixedPrecisionPolicy; found {type(mp_policy).__name__}")
    if not (offload_policy is None or isinstance(offload_policy, OffloadPolicy)):
        raise TypeError(
            "shard: offload_policy is a torch.distributed.fsdp.CPUOffloadPolicy or OffloadPolicy; found "
            f"{type(offload_policy).__name__}"
        )
    if not (frozen_dtype is None or isinstance(frozen_dtype, torch.dtype)):
        raise TypeError(f"shard: frozen_dtype is a torch.dtype; found {frozen_dtype!r}")
    if frozen_dtype is not None and not frozen_dtype.is_floating_point:
        raise ValueError(f"shard: frozen_dtype is a floating-point type; found {frozen_dtype}")
    if not isinstance(reshard_after_forward, bool):
        raise TypeError(
            f"shard: reshard_after_forward is True or False; found {reshard_after_forward!r}. "
            "torch.distributed.fsdp.fully_shard takes a number of ranks as well"
        )
    if isinstance(prefetch, bool) or not isinstance(prefetch, int):
        raise TypeError(f"shard: prefetch is a number of layers; found {prefetch!r}")
    if prefetch < 0:
        raise ValueError(f"shard: prefetch is a number of layers, 0 or more; found {prefetch}")


def check_model(model: nn.Module) -> None:
    """Raise where something else has the model's parameters in its hands, or they can't be sharded.

    Raises:
        ValueError: it is sharded or replicated already, in whole or in part, or `LayerOffload` streams it; a parameter is lazy,
            a scalar, or two are views of one tensor.
    """
    for name, module in model.named_modules():
        where, kind = quoted(name), type(module).__name__
        if is_sharded_by_fsdp(module):
            raise ValueError(f"shard needs a model that is not sharded; found {where} sharded already ({kind}). Shard it once")
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise ValueError(f"shard: {where} is wrapped by {kind}. Use one of the two: give shard the plain model")
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(f"shard: {where} is compiled by torch.jit, which takes no hooks. torch.compile works")
    for name, parameter in model.named_parameters():
        if is_dtensor(parameter.data):
            raise ValueError(f'shard: "{name}" is a DTensor, which is on several devices already. Give shard the plain model')
        if is_streamed(parameter):
            raise ValueError(
                f'shard: "{name}" is streamed by {LayerOffload.__name__}. Close that first (memkit.detach(model)); '
                "offload_policy=torch.distributed.fsdp.CPUOffloadPolicy() has shards on the host"
            )
        if is_lazy(parameter):
            raise ValueError(f'shard: "{name}" has no data: its module is lazy. Run the model once first')
        if not parameter.is_contiguous() or not parameter.numel():
            kind = "has no elements" if not parameter.numel() else "is not contiguous"
            raise ValueError(f'shard: "{name}" {kind}, which FSDP2 can\'t shard. Leave it out, or make it contiguous')
        if parameter.dim() == 0:
            raise ValueError(f'shard: "{name}" is a scalar, which can\'t be sharded. Make it a tensor of shape [1]')
    _refuse_views_of_one(model)


def check_layers(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Raise where layers can't be gathered each by itself.

    Raises:
        ValueError: a layer is the model or has no forward, shares parameters with another or with what is no layer, or what is
            trained of one has several dtypes.
    """
    for name, layer in layers.items():
        if layer is model:
            raise ValueError("layers: the model itself is no layer of it. Leave layers out, or name modules in it")
        if isinstance(layer, nn.ModuleList | nn.ModuleDict) and type(layer).forward is nn.Module.forward:
            raise ValueError(f'layers: "{name}" is a {type(layer).__name__}, which is never called. Name what is in it')
    tied = shared_between(model, layers)
    if tied:
        names = ", ".join(f'"{name}"' for name in next(iter(tied.values())))
        raise ValueError(
            f"shard: {names} are one tensor, in several layers or in one and outside. Each layer is gathered by itself: leave "
            "out of layers= what shares (what is in no layer is gathered as one), or untie them"
        )
    inside = {id(parameter) for layer in layers.values() for parameter in layer.parameters()}
    named = dict(model.named_parameters())
    groups = {quoted(name): dict(layer.named_parameters(prefix=name)) for name, layer in layers.items()}
    groups["what is in no layer"] = {name: item for name, item in named.items() if id(item) not in inside}
    for where, parameters in groups.items():
        first_of = dict[torch.dtype, str]()
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                first_of.setdefault(parameter.dtype, name)
        if len(first_of) > 1:
            found = ", ".join(f'"{name}" is {str(dtype).removeprefix("torch.")}' for dtype, name in first_of.items())
            raise ValueError(
                f"shard needs one dtype for what is trained in {where}, whose gradients are reduced as one; {found}. "
                "Convert one, or make it a layer of its own"
            )


def check_mesh(mesh: DeviceMesh, model: nn.Module) -> None:
    """Raise where a mesh is not of all ranks of the group, or not of the model's device.

    Raises:
        ValueError: that is so.
    """
    world_size = dist.get_world_size()
    if mesh.size() != world_size:
        raise ValueError(
            f"shard needs a mesh of all {world_size} ranks of the process group; found one of {mesh.size()}. "
            "torch.distributed.fsdp.fully_shard takes a part of a mesh"
        )
    if mesh.ndim > 2 or (mesh.ndim == 2 and mesh.mesh_dim_names is None):
        raise ValueError(
            f"shard takes a mesh of one dimension (shards), or of two with names (replicas of shards); found {mesh.ndim}"
            + (" without names" if mesh.ndim == 2 else "")
        )
    expected = device_of(mesh)
    for name, parameter in model.named_parameters():
        device = parameter.device
        if device.type not in ("meta", "cpu") and device != expected:
            raise ValueError(
                f'shard: the mesh is of {expected}, and "{name}" is on {device}. Leave the model on the CPU, from where each '
                "layer is sharded, or choose the device first (torch.accelerator.set_device_index(LOCAL_RANK))"
            )


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return the device of a mesh on this rank."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _refuse_views_of_one(model: nn.Module) -> None:
    owners = defaultdict[int, dict[int, str]](dict)
    for name, parameter in model.named_parameters():  # each parameter once
        for storage in unique_storages([parameter]):
            owners[storage][id(parameter)] = name
    for names in owners.values():
        if len(names) > 1:
            found = " and ".join(f'"{name}"' for name in names.values())
            raise ValueError(f"shard: {found} are parameters over the same bytes, which shards would not share. Untie them")
