"""From what the user asks for to the layers that stream, and how they are trained."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from memkit.device import Device, why_nothing_is_freed
from memkit.errors import warn_user
from memkit.plan import LayerCosts, ResidencyPlan, plan_again, plan_auto, plan_budget, plan_resident, plan_streamed_ratio
from memkit.sizes import check_budget_bytes, format_bytes
from memkit.storages import unique_storages
from memkit.transfer.disk import Disk
from memkit.weights.chunks import LayerChunk
from memkit.weights.optimizers import MakeOptimizer
from memkit.weights.placement import shared_between
from memkit.weights.timing import StepTimes
from memkit.wrappers import has_plain_parts, is_plain

_TRAIN = ("auto", "frozen", "host", "fused")
_MOSTLY = 0.5
"""Layers are trained whose parameters require grad by more than this share of their bytes."""
_USABLE = 0.95
"""Of what the process may allocate: the rest is lost between blocks."""
_BYTES_PER_TRAINED_BYTE = 4
"""A weight, its gradient, and two values of the optimizer."""


def choose_mode(train: str, layers: Mapping[str, nn.Module], optimizer: MakeOptimizer | None) -> str:
    """Return how layers are trained.

    Raises:
        ValueError: there is no such mode, or it does not go with the optimizer that is given.
    """
    if train not in _TRAIN:
        raise ValueError(
            f"LayerOffload needs train= one of {', '.join(map(repr, _TRAIN))}; found {train!r}. Omit it to have the mode "
            "chosen by what requires grad"
        )
    if optimizer is not None and (train not in ("auto", "fused") or not callable(optimizer)):
        raise ValueError(f'optimizer makes the optimizer for train="fused"; found {optimizer!r} with train="{train}"')
    if train == "fused" and optimizer is None:
        raise ValueError('train="fused" needs an optimizer, such as functools.partial(torch.optim.AdamW, lr=1e-4); found None')
    if train == "auto" and optimizer is not None:
        return "fused"
    if train != "auto":
        return train
    parameters = [parameter for layer in layers.values() for parameter in layer.parameters()]
    trained_bytes = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    return "host" if trained_bytes > _MOSTLY * sum(parameter.nbytes for parameter in parameters) else "frozen"


def check_disk(disk: object, *, train: str, offload_ratio: float | str | None) -> None:
    """Check that layers may lie on a disk.

    Raises:
        TypeError: it is none.
        ValueError: they are trained, or their share is to be measured.
    """
    if disk is None:
        return
    if not isinstance(disk, Disk):
        raise TypeError(f'disk is a memkit.Disk, such as memkit.Disk("/scratch"); found {disk!r}')
    if train != "frozen":
        raise ValueError(
            f'disk= is for frozen layers, train="frozen": others would be written to the disk in each step; found '
            f'train="{train}". Leave one of them out'
        )
    if isinstance(offload_ratio, str):
        raise ValueError(
            f"disk= needs a number as offload_ratio, or budget or num_resident: what is measured is the link, not the disk; "
            f'found offload_ratio="{offload_ratio}"'
        )


def chunks_of(model: nn.Module, layers: Mapping[str, nn.Module], *, is_trained: bool) -> dict[str, LayerChunk]:
    """Return what of each layer may stream, of those of which anything may.

    Args:
        model: whose layers they are: what they share with the rest of it stays.
        layers: by name.
        is_trained: whether parameters that require grad may stream.
    """
    tied, found = shared_between(model, layers), dict[str, LayerChunk]()
    seen = set[int]()
    for name, module in layers.items():
        chosen = []
        for parameter in module.parameters():
            must_be_frozen = not is_trained or not is_plain(parameter)
            if not has_plain_parts(parameter) or not parameter.numel() or (parameter.requires_grad and must_be_frozen):
                continue
            shared = [key for key in unique_storages([parameter]) if key in tied]
            for key in shared:
                if key not in seen:
                    seen.add(key)
                    warn_user(f"LayerOffload: {', '.join(tied[key])} share their bytes, so they stay on the device")
            if not shared:
                chosen.append(parameter)
        if chosen:
            found[name] = LayerChunk(name, module, chosen, len(found))
    return found


def plan_layers(
    layers: Mapping[str, LayerChunk | None],
    *,
    offload_ratio: float | str | None,
    budget: int | str | None,
    num_resident: int | None,
    num_slots: int,
    state_bytes: int,
) -> ResidencyPlan:
    """Return which layers stream.

    Args:
        layers: what may stream of each, by name, in their order; None for nothing.
        offload_ratio, budget, num_resident: see `LayerOffload`; exactly one is not None. Where the share is to be
            found out, all stream at first.
        num_slots: for layers of one size.
        state_bytes: of the optimizer's states of what is trained in layers, which stay on the device.

    Raises:
        TypeError, ValueError: an argument is wrong, or nothing may stream.
    """
    sizes = {"offload_ratio": offload_ratio, "budget": budget, "num_resident": num_resident}
    given = [name for name, size in sizes.items() if size is not None]
    if len(given) != 1:
        raise ValueError(
            f"LayerOffload takes exactly one of offload_ratio, budget and num_resident; found {' and '.join(given) or 'none'}"
        )
    if not any(layers.values()) and offload_ratio != 0 and num_resident != len(layers):
        raise ValueError(
            'LayerOffload: none of the layers has parameters that may stream. With train="frozen" those that require grad '
            "stay on the device, and tied ones do always"
        )
    costs = costs_of(layers)
    if isinstance(offload_ratio, str):
        if offload_ratio != "auto":
            raise ValueError(f'offload_ratio is a number from 0 to 1, or "auto"; found {offload_ratio!r}')
        return plan_streamed_ratio(costs, 1.0, num_slots=num_slots)
    if offload_ratio is not None:
        return plan_streamed_ratio(costs, offload_ratio, num_slots=num_slots)
    if num_resident is not None:
        return plan_resident(costs, num_resident, num_slots=num_slots)
    assert budget is not None
    budget_bytes = check_budget_bytes("budget", budget)
    return plan_budget(costs, budget_bytes, num_slots=num_slots, state_bytes=state_bytes)


def why_layers_free_nothing(
    layers: Mapping[str, LayerChunk | None],
    plan: ResidencyPlan,
    device: Device,
    *,
    train: str,
    num_slots: int,
) -> str | None:
    """Return what to say if layers stream, and the device has no byte more for it; None if that is not so.

    Args:
        layers: see `plan_layers`.
        plan: which of them stream.
        device: where they run.
        train: how they are trained: with "host", the gradients of what streams are not on the device either.
        num_slots: for layers of one size.
    """
    if why := why_nothing_is_freed(device):
        return f"LayerOffload: {why}"
    costs = costs_of(layers)
    grad_bytes = sum(layer.grad_bytes for layer in costs if layer.name in plan.streamed) if train == "host" else 0
    if not plan.streamed or plan.freed_bytes + grad_bytes > 0:
        return None
    found = "1 layer streams" if len(plan.streamed) == 1 else f"{len(plan.streamed)} layers stream"
    for count in range(num_slots, 0, -1):
        freed_bytes = plan_streamed_ratio(costs, 1.0, num_slots=count).freed_bytes
        if freed_bytes > 0:
            all_stream = all(layer.name in plan.streamed for layer in costs if layer.num_bytes)
            changes = [] if all_stream else ["offload_ratio=1.0"]
            changes += [] if count == num_slots else [f"num_slots={count}"]
            wanted = "Take fewer slots" if all_stream else "Let more stream"
            advice = f"{wanted} ({', '.join(changes)} frees {format_bytes(freed_bytes)})"
            break
    else:
        advice = "Leave LayerOffload out, or name modules that are smaller and of about one size (layers=)"
    return (
        f"LayerOffload frees no memory on the device: {found} ({format_bytes(plan.streamed_bytes)}), and the slots on the "
        f"device take {format_bytes(sum(plan.slot_bytes))}, up to {num_slots} for layers of about one size. {advice}."
    )


def plan_measured(
    layers: Mapping[str, LayerChunk | None],
    times: StepTimes,
    plan: ResidencyPlan,
    *,
    train: str,
    num_slots: int,
    capacity_bytes: int | None,
) -> ResidencyPlan:
    """Return the plan that streams the most that hides; where the device has no room for what stays then, the least that fits.

    Args:
        layers: see `plan_layers`.
        times: a step with another plan.
        plan: that one.
        train: how layers are trained: with "host", a layer that stays has its gradients and its optimizer's state on the device
            as well, as much as two values for each weight.
        num_slots: for layers of one size.
        capacity_bytes: what the process may allocate on the device; None if that is not known.
    """
    costs = costs_of(layers, times)
    if times.h2d_bytes_per_s is None:
        return plan_again(plan, costs, None)
    budget_bytes = None
    if capacity_bytes is not None and times.peak_bytes is not None:
        room_bytes = int(_USABLE * capacity_bytes) - times.peak_bytes
        budget_bytes = plan.device_bytes + room_bytes // (_BYTES_PER_TRAINED_BYTE if train == "host" else 1)
    try:
        return plan_auto(costs, num_slots=num_slots, link_bytes_per_s=times.h2d_bytes_per_s, budget_bytes=budget_bytes)
    except ValueError:  # not even the least fits by these figures, and yet it has run
        return plan_again(plan, costs, times.h2d_bytes_per_s)


def costs_of(layers: Mapping[str, LayerChunk | None], times: StepTimes | None = None) -> list[LayerCosts]:
    """Return what a plan has to know of the layers, with their seconds if they were measured."""
    return [_costs(name, chunk, times) for name, chunk in layers.items()]


def _costs(name: str, chunk: LayerChunk | None, times: StepTimes | None) -> LayerCosts:
    parameters = [] if chunk is None else [item.parameter for item in chunk.parameters]
    return LayerCosts(
        name=name,
        num_bytes=0 if chunk is None else chunk.num_bytes,
        forward_s=None if times is None else times.forward_s.get(name, 0.0),
        backward_s=None if times is None else times.backward_s.get(name, 0.0),
        grad_bytes=sum(parameter.nbytes for parameter in parameters if parameter.requires_grad),
    )
