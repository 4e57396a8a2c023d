"""From what the user asks for to the layers that stream, and how they are trained."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from memkit.plan import LayerCosts, ResidencyPlan, plan_budget, plan_fraction, plan_resident
from memkit.sizes import parse_bytes
from memkit.weights.extents import LayerExtent
from memkit.weights.fused import MakeOptimizer

_TRAIN = ("auto", "frozen", "host", "fused")
_MOSTLY = 0.5
"""Layers are trained whose parameters require grad by more than this share of their bytes."""


def choose_mode(train: str, layers: Mapping[str, nn.Module], optimizer: MakeOptimizer | None) -> str:
    """Return how layers are trained.

    Raises:
        ValueError: there is no such mode, or it does not go with the optimizer that is given.
    """
    if train not in _TRAIN:
        raise ValueError(f"train is one of {_TRAIN}; found {train!r}")
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


def plan_share(
    layers: Mapping[str, LayerExtent | None],
    *,
    offload_fraction: float | None,
    device_budget: int | str | None,
    resident: int | None,
    num_slots: int,
    state_ratio: float,
) -> ResidencyPlan:
    """Return which layers stream.

    Args:
        layers: what may stream of each, by name, in their order; None for nothing.
        offload_fraction, device_budget, resident: see `LayerOffload`; exactly one is not None.
        num_slots: for layers of one size.
        state_ratio: bytes of optimizer state that stay on the device, for each byte of layers that is trained.

    Raises:
        TypeError, ValueError: an argument is wrong, or nothing may stream.
    """
    sizes = {"offload_fraction": offload_fraction, "device_budget": device_budget, "resident": resident}
    given = [name for name, size in sizes.items() if size is not None]
    if len(given) != 1:
        raise ValueError(
            "LayerOffload takes exactly one of offload_fraction, device_budget and resident; found "
            f"{' and '.join(given) or 'none'}"
        )
    if not any(layers.values()) and offload_fraction != 0 and resident != len(layers):
        raise ValueError(
            'LayerOffload: none of the layers has parameters that may stream. With train="frozen" those that require grad '
            "stay on the device, and tied ones do always"
        )
    costs = [_costs(name, extent) for name, extent in layers.items()]
    if offload_fraction is not None:
        return plan_fraction(costs, offload_fraction, num_slots=num_slots)
    if resident is not None:
        return plan_resident(costs, resident, num_slots=num_slots)
    assert device_budget is not None
    try:
        budget_bytes = parse_bytes(device_budget)
    except (TypeError, ValueError) as error:
        raise type(error)(f"device_budget: {error}") from None
    state_bytes = round(state_ratio * sum(layer.grad_bytes for layer in costs))
    return plan_budget(costs, budget_bytes - state_bytes, num_slots=num_slots)


def _costs(name: str, extent: LayerExtent | None) -> LayerCosts:
    if extent is None:
        return LayerCosts(name=name, num_bytes=0)
    trained = [item.parameter for item in extent.parameters if item.parameter.requires_grad]
    return LayerCosts(name=name, num_bytes=extent.num_bytes, grad_bytes=sum(parameter.nbytes for parameter in trained))
