"""`shard`: which modules FSDP2 shards, in which order they are gathered, and what is refused. FSDP2 does all the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from memkit.agreement import together
from memkit.device import open_device
from memkit.distributed.checks import check_arguments, check_group, check_layers, check_mesh, check_model, device_of
from memkit.distributed.host_shards import HostShards
from memkit.errors import MissingTorchNameError, warn_user
from memkit.weights.selection import LayerChoice, find_layers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy

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
    before its forward and its backward, and let go of after them. What is in no layer is gathered as one, and stays from its
    forward on until its backward. Every rank calls it with the same model; a rank that cannot raises on all of them.

    The model stays what `torch.distributed.fsdp.fully_shard` makes of it: make the optimizer afterwards, clip by
    `torch.nn.utils.clip_grad_norm_`, save by `torch.distributed.checkpoint`. Freeze before: a parameter that doesn't require
    grad has no gradient, is left out of reductions, and may be of another dtype than those trained beside it.

    Args:
        model: on the CPU, from where it is sharded layer by layer; on this rank's device; or on "meta".
        mesh: of all ranks, with one dimension, or two with names: replicas of shards. By default of one dimension, on the
            accelerator if there is one and the group has a backend for it other than gloo, else on the CPU.
        layers: names, modules, or a predicate of name and module. By default the elements of lists (`ModuleList`, `Sequential`)
            whose elements are of one class; if they are stages, the blocks inside them: as `LayerOffload` finds them.
        frozen_dtype: what frozen floating-point parameters are converted to first. By default they stay as they are.
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
        ShardError: something of this was raised on another rank, or ranks were given different models, or one has ended.

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
    check_group()
    over = _default_mesh() if mesh is None else mesh  # before ranks may raise: it chooses the device by LOCAL_RANK

    def look() -> dict[str, nn.Module]:
        check_arguments(model, over, frozen_dtype, mp_policy, offload_policy, reshard_after_forward, prefetch)
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

    def act() -> None:
        if frozen_dtype is not None:
            _convert_frozen(model, frozen_dtype)
        host = HostShards(open_device(device_of(over)), over.size(over.ndim - 1)) if _is_brought(offload_policy) else None
        _shard(model, found, over, mp_policy, offload_policy, reshard_after_forward, prefetch, host)

    together(act, lambda _: (), doing="sharding it, which is done in part now")
    return model


def _default_mesh() -> DeviceMesh:
    """Return a mesh of all ranks, on what the group's backends are for."""
    from torch.distributed.device_mesh import init_device_mesh

    kind = "cpu"
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None and f"{accelerator.type}:gloo" not in dist.get_backend_config().split(","):
        kind = accelerator.type
    return init_device_mesh(kind, (dist.get_world_size(),))


def _convert_frozen(model: nn.Module, dtype: torch.dtype) -> None:
    frozen = [item for item in model.parameters() if not item.requires_grad and item.is_floating_point()]
    if not frozen:
        warn_user(f"memkit.shard: frozen_dtype={dtype} changes nothing: no parameter is frozen")
    for parameter in frozen:
        parameter.data = parameter.data.to(dtype)


def _shard(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy | None,
    offload_policy: OffloadPolicy | None,
    reshard_after_forward: bool,
    prefetch: int,
    host: HostShards | None,
) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    if isinstance(offload_policy, CPUOffloadPolicy) and mesh.device_type == "cpu":
        offload_policy = CPUOffloadPolicy(pin_memory=False)  # there is no device to pin for
    policies: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy() if mp_policy is None else mp_policy,
        "offload_policy": OffloadPolicy() if offload_policy is None else offload_policy,
    }
    parts: list[FSDPModule] = []
    for module in (*layers.values(), model):
        # what is in no layer is needed again at once where it is last in the forward; None leaves that to FSDP2
        reshards = None if module is model and reshard_after_forward else reshard_after_forward
        parts.append(fully_shard(module, mesh=mesh, reshard_after_forward=reshards, **policies))
        if host is not None:
            try:
                (host.add_whole if module is model else host.add)(parts[-1])  # at once: until then a shard is there twice
            except MissingTorchNameError as error:
                warn_user(f"memkit.shard: parameters come from the host by FSDP2's own policy, in one copy each: {error}")
                host = None
    *parts, whole = parts
    _set_prefetch(whole, parts, prefetch, comes_from_host=host is not None)


def _is_brought(offload_policy: OffloadPolicy | None) -> bool:
    """Tell whether shards are to be in pinned host memory, from where memkit brings them."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    return isinstance(offload_policy, CPUOffloadPolicy) and offload_policy.pin_memory


def _set_prefetch(model: FSDPModule, layers: list[FSDPModule], prefetch: int, *, comes_from_host: bool) -> None:
    """Have each layer gather those after it in forward, and those before it in backward."""
    if prefetch == 0:
        return
    model.set_modules_to_forward_prefetch(layers[:prefetch])
    # The last layer's part comes from the host while the loss has its gradients, when most memory is in use: to gather it as
    # well takes all parts. The model itself is there: nothing is gathered ahead, as without a list FSDP2 would.
    model.set_modules_to_backward_prefetch([model] if comes_from_host else layers[::-1][:prefetch])
    for number, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[number + 1 : number + 1 + prefetch])
        layer.set_modules_to_backward_prefetch(layers[:number][::-1][:prefetch])
