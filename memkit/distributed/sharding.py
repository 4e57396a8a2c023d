"""`shard`: FSDP2 with memkit's host copies; its refusals come before any change."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from memkit.core.agreement import together
from memkit.core.tensors import unique_storages
from memkit.core.torch_state import is_dtensor, is_sharded_by_fsdp
from memkit.device import open_device
from memkit.distributed.host_shards import HostShards
from memkit.errors import MissingTorchNameError, warn_user
from memkit.weights import LayerOffload
from memkit.weights.host_copies import is_streamed, shared_between
from memkit.weights.selection import LayerChoice, find_layers, quoted

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    mesh: DeviceMesh
    frozen_dtype: torch.dtype | None
    mp_policy: MixedPrecisionPolicy | None
    offload_policy: OffloadPolicy | None
    reshard_after_forward: bool
    prefetch: int

    def check(self) -> None:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

        fsdp, none = "torch.distributed.fsdp.", type(None)
        for name, kinds, what in (
            ("mesh", (DeviceMesh,), "a torch.distributed.device_mesh.DeviceMesh"),
            ("mp_policy", (MixedPrecisionPolicy, none), f"a {fsdp}MixedPrecisionPolicy"),
            ("offload_policy", (OffloadPolicy, none), f"a {fsdp}CPUOffloadPolicy or OffloadPolicy"),
            ("frozen_dtype", (torch.dtype, none), "a torch.dtype"),
        ):
            given = getattr(self, name)
            found = repr(given) if name == "frozen_dtype" else type(given).__name__
            if not isinstance(given, kinds):
                raise TypeError(f"shard: {name} is {what}; found {found}")
        if self.frozen_dtype is not None and not self.frozen_dtype.is_floating_point:
            raise ValueError(f"shard: frozen_dtype is a floating-point type; found {self.frozen_dtype}")
        if not isinstance(self.reshard_after_forward, bool):
            raise TypeError(
                f"shard: reshard_after_forward is True or False; found {self.reshard_after_forward!r}. "
                "torch.distributed.fsdp.fully_shard takes a number of ranks as well"
            )
        if isinstance(self.prefetch, bool) or not isinstance(self.prefetch, int):
            raise TypeError(f"shard: prefetch is a number of layers; found {self.prefetch!r}")
        if self.prefetch < 0:
            raise ValueError(f"shard: prefetch is a number of layers, 0 or more; found {self.prefetch}")


def check_model(model: nn.Module) -> None:
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


_Model = TypeVar("_Model", bound=nn.Module)


def shard(
    model: _Model,
    *,
    mesh: DeviceMesh | None = None,
    layers: LayerChoice = None,
    frozen_dtype: torch.dtype | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    reshard_after_forward: bool = True,
    prefetch: int = 1,
) -> _Model:
    """Split a model between the processes of the default group, layer by layer, with FSDP2.

    Each process, a rank, keeps its part of every parameter, and so of gradients and optimizer states. A layer is gathered just
    before its forward and its backward, and let go of after them. Parameters in no layer are gathered as one, and stay from
    their forward until their backward. Every rank calls it with the same model; a rank that cannot raises on all of them.

    The model stays what `torch.distributed.fsdp.fully_shard` makes of it: make the optimizer afterwards, clip by
    `torch.nn.utils.clip_grad_norm_`, save by `torch.distributed.checkpoint`. Freeze before: a parameter that doesn't require
    grad has no gradient, is left out of reductions, and may be of another dtype than those trained beside it.

    Args:
        model: on the CPU, from where it is sharded layer by layer; on this rank's device; or on "meta".
        mesh: of all ranks, with one dimension, or two with names: replicas of shards. By default of one dimension, on the
            accelerator if there is one and the group has a backend for it other than gloo, else on the CPU.
        layers: names, modules, or a predicate of name and module. By default the elements of lists (`ModuleList`, `Sequential`)
            whose elements are of one class; if they are stages, the blocks inside them: as `LayerOffload` finds them.
        frozen_dtype: the dtype that frozen floating-point parameters are converted to first. By default they stay as they are.
        mp_policy: FSDP2's, for every layer: in which dtypes parameters are gathered and gradients reduced.
        offload_policy: `torch.distributed.fsdp.CPUOffloadPolicy()` has parameters, gradients and the optimizer's step be on the
            host. memkit brings each layer's part to the device one layer ahead of where it is gathered, in one copy. With
            `pin_memory=False` that is left to FSDP2.
        reshard_after_forward: whether layers are let go of after their forward.
        prefetch: how many layers ahead are gathered, in the order in which they are registered in forward, and the other way
            round in backward. 0 leaves it to FSDP2, which goes by the order in which they ran.

    Returns:
        The model, whose parameters are shards (`DTensor`) from now on.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: there is no process group; the mesh is of another size or device; the model is sharded, replicated or
            streamed already, or has parameters that can't be sharded; layers overlap, or are tied.
        HostMemoryError: the host has no room for shards that are to be there.
        ShardError: one of these errors was raised on another rank, or ranks were given different models, or one has ended.

    Example:
        >>> import torch, memkit
        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
        >>> model = memkit.shard(model)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model(torch.randn(2, 64)).sum().backward()
        >>> optimizer.step()
        >>> torch.distributed.destroy_process_group()

    Source: `torch.distributed.fsdp.fully_shard`.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "shard needs a process group; found none. Start the script by torchrun --nproc-per-node N, and call "
            "torch.distributed.init_process_group() first; one process is a group as well"
        )
    over = _default_mesh() if mesh is None else mesh  # before ranks may raise: it chooses the device by LOCAL_RANK
    options = _Options(
        mesh=over,
        frozen_dtype=frozen_dtype,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        reshard_after_forward=reshard_after_forward,
        prefetch=prefetch,
    )

    def look() -> dict[str, nn.Module]:
        if not isinstance(model, nn.Module):
            raise TypeError(f"shard needs a torch.nn.Module; found {type(model).__name__}")
        options.check()
        check_mesh(over, model)
        check_model(model)
        found = find_layers(model, layers, feature="shard")
        check_layers(model, found)
        return found

    def describe(found: Mapping[str, nn.Module]) -> Iterator[object]:
        yield frozen_dtype, mp_policy, offload_policy, reshard_after_forward, prefetch, over.device_type, over.shape
        yield list(found)
        for name, item in model.named_parameters():
            yield name, tuple(item.shape), item.dtype, item.requires_grad

    found = together(look, describe, doing="looking at the model")
    together(lambda: _shard(model, found, options), lambda _: (), doing="sharding it, which is done in part now")
    return model


def _default_mesh() -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    kind = "cpu"
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None and f"{accelerator.type}:gloo" not in dist.get_backend_config().split(","):
        kind = accelerator.type
    return init_device_mesh(kind, (dist.get_world_size(),))


def _shard(model: nn.Module, layers: Mapping[str, nn.Module], options: _Options) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    if options.frozen_dtype is not None:
        frozen = [item for item in model.parameters() if not item.requires_grad and item.is_floating_point()]
        if not frozen:
            warn_user(f"memkit.shard: frozen_dtype={options.frozen_dtype} changes nothing: no parameter is frozen")
        for parameter in frozen:
            parameter.data = parameter.data.to(options.frozen_dtype)
    mesh, offload_policy, host = options.mesh, options.offload_policy or OffloadPolicy(), None
    if isinstance(offload_policy, CPUOffloadPolicy):
        if offload_policy.pin_memory:  # then memkit brings shards from there
            host = HostShards(open_device(device_of(mesh)), mesh.size(mesh.ndim - 1))
        if mesh.device_type == "cpu":
            offload_policy = CPUOffloadPolicy(pin_memory=False)  # there is no device to pin for
    policies: dict[str, Any] = {"mp_policy": options.mp_policy or MixedPrecisionPolicy(), "offload_policy": offload_policy}
    parts: list[FSDPModule] = []
    for module in (*layers.values(), model):
        # parameters in no layer may be needed again at once, last in the forward; None leaves that to FSDP2
        reshards = None if module is model and options.reshard_after_forward else options.reshard_after_forward
        parts.append(fully_shard(module, mesh=mesh, reshard_after_forward=reshards, **policies))
        if host is not None:
            try:
                (host.add_whole if module is model else host.add)(parts[-1])  # at once: until then a shard is there twice
            except MissingTorchNameError as error:
                warn_user(f"memkit.shard: parameters come from the host by FSDP2's own policy, in one copy each: {error}")
                host = None
    *parts, whole = parts
    _set_prefetch(whole, parts, options.prefetch, comes_from_host=host is not None)


def _set_prefetch(model: FSDPModule, layers: list[FSDPModule], prefetch: int, *, comes_from_host: bool) -> None:
    if prefetch == 0:
        return
    model.set_modules_to_forward_prefetch(layers[:prefetch])
    # The last layer's part comes from the host while the loss has its gradients, when most memory is in use: to gather it as
    # well takes all parts. The model itself is there: nothing is gathered ahead, as without a list FSDP2 would.
    model.set_modules_to_backward_prefetch([model] if comes_from_host else layers[::-1][:prefetch])
    for number, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[number + 1 : number + 1 + prefetch])
        layer.set_modules_to_backward_prefetch(layers[:number][::-1][:prefetch])
