"""The states that an optimizer keeps for each parameter of a model, and the device memory for states in transfer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from memkit.core import torch_private
from memkit.core.sizes import rounded
from memkit.core.tensors import storage_bytes
from memkit.core.torch_state import local_of
from memkit.errors import ProfileError
from memkit.optimizers import KeptState, kept_states, unwrapped
from memkit.plan import ParameterCosts, plan_states
from memkit.plan.states import aligned
from memkit.profile.alive import AliveStorage, MemoryCategory, OptimizerMemory
from memkit.profile.step import ProfiledStep
from memkit.profile.tree import OUTSIDE_NAME, ModuleTree

if TYPE_CHECKING:
    OptimizerLike = str | torch.optim.Optimizer | type[torch.optim.Optimizer]

_BY_ELEMENT = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
_AS_A_WHOLE = (torch.optim.LBFGS, torch.optim.SparseAdam)  # their states can't leave


def check_optimizer(optimizer: OptimizerLike | None) -> OptimizerLike | None:
    if isinstance(optimizer, str):
        known = optimizer_names()
        if optimizer.lower() not in known:
            raise ValueError(
                f"optimizer must be one of {', '.join(known)}; found {optimizer!r}. Any other optimizer, such as one of "
                "another library, can be counted in Python: memkit.profile_memory(model, x, optimizer=instance), made on the "
                "model's parameters"
            )
        return optimizer
    is_class = isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)
    if optimizer is not None and not is_class and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            "optimizer is a torch.optim.Optimizer made on the model's parameters, a class of one, or a name such as "
            f'"adamw"; found {type(optimizer).__name__}'
        )
    return optimizer


def optimizer_names() -> dict[str, type[torch.optim.Optimizer]]:
    found = {
        name.lower(): kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    return dict(sorted({**found, "momentum": torch.optim.SGD}.items()))


def optimizer_memory(
    step: ProfiledStep, tree: ModuleTree, optimizer: OptimizerLike, *, device: torch.device, rounding_bytes: int
) -> tuple[OptimizerMemory, tuple[AliveStorage, ...]]:
    """Return the bytes that an optimizer keeps on the device, and its states, without those of streamed parameters."""
    there: list[Tensor] = []
    if isinstance(optimizer, torch.optim.Optimizer):
        made = unwrapped(optimizer)
        own = stepped = [parameter for group in made.param_groups for parameter in group["params"]]
        known = {id(parameter) for module in step.modules() for parameter in module.parameters()}
        strangers = [parameter for parameter in own if id(parameter) not in known]
        if strangers:
            raise ValueError(
                f"optimizer must be made on the model's parameters; found {len(strangers)} of {len(own)} that are not the "
                f'model\'s, the first of shape {tuple(strangers[0].shape)}. Make it anew, or pass a name such as "adamw"'
            )
        there = [leaf for leaf in torch_private.tree_leaves([*made.state.values()]) if isinstance(leaf, Tensor)]
    else:
        parameters = dict.fromkeys(parameter for module in step.modules() for parameter in module.parameters())
        own = [parameter for parameter in parameters if parameter.requires_grad]
        made, stepped = _made(optimizer, own)
    kept, streamed = _kept(made), {id(parameter) for parameter in step.streamed.parameters}
    names: dict[int, tuple[str, str]] = {}
    for tensor, category, row, name in step.named_tensors(tree):
        if category is MemoryCategory.PARAM:
            names.setdefault(id(tensor), (row, name))
    states, leaving = [], list[tuple[Tensor, int]]()
    for parameter, twin in zip(own, stepped, strict=True):
        if id(parameter) in streamed or not (parameter.requires_grad or isinstance(made, torch.optim.LBFGS)):
            continue
        module, name = names.get(id(parameter), (OUTSIDE_NAME, "parameter"))
        for state in kept[id(twin)]:
            if state.is_there and state.num_bytes:
                leaving.append((parameter, state.num_bytes))
                what, num_bytes = f"{name}.{state.name}", rounded(state.num_bytes, rounding_bytes)
                kind = MemoryCategory.OPTIMIZER_STATE
                states.append(AliveStorage(category=kind, module=module, what=what, num_bytes=num_bytes, begin=0, end=0))
    memory = OptimizerMemory(
        name=type(made).__name__,
        state_bytes=sum(num_bytes for _, num_bytes in leaving),
        there_bytes=storage_bytes(tensor for tensor in there if tensor.device == device and not tensor.is_meta),
        room_bytes=_room_bytes(type(made), leaving),
    )
    return memory, tuple(states)


def _room_bytes(kind: type[torch.optim.Optimizer], states: list[tuple[Tensor, int]]) -> int | None:
    """Return `OptimizerMemory.room_bytes`; `states` has parameters with their states' bytes, in the order of the groups."""
    if not states or issubclass(kind, _AS_A_WHOLE):
        return None
    is_known = any(kind is getattr(torch.optim, name) for name in _BY_ELEMENT)
    sizes: dict[int, tuple[Tensor, int]] = {}
    for parameter, num_bytes in states:
        sizes[id(parameter)] = local_of(parameter), sizes.get(id(parameter), (None, 0))[1] + aligned(num_bytes)
    costs = [
        ParameterCosts(
            name=str(number),
            numel=own.numel(),
            parameter_bytes=aligned(own.nbytes),
            state_bytes=num_bytes,
            is_elementwise=is_known and own.is_contiguous(),
        )
        for number, (own, num_bytes) in enumerate(sizes.values())
    ]
    plan = plan_states(costs)
    return plan.room_bytes + plan.undo_bytes


def state_bytes_of(parameters: Iterable[nn.Parameter], optimizer: str) -> int:
    kept = _kept(_made(optimizer, list(parameters))[0])
    return sum(state.num_bytes for states in kept.values() for state in states if state.is_there)


def _made(
    optimizer: str | type[torch.optim.Optimizer], parameters: list[nn.Parameter]
) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
    kind = optimizer_names()[optimizer.lower()] if isinstance(optimizer, str) else optimizer
    twins = [nn.Parameter(torch.empty_like(local_of(each), device="meta")) for each in parameters]
    options: dict[str, Any] = {"momentum": 0.9} if optimizer == "momentum" else {}
    try:
        return kind(twins, **options), twins
    except TypeError as error:
        raise TypeError(
            f"optimizer={kind.__name__} needs arguments beside the parameters: {error}. Pass an instance, made on the "
            "model's parameters"
        ) from error


def _kept(optimizer: torch.optim.Optimizer) -> dict[int, list[KeptState]]:
    try:
        return kept_states(optimizer).of
    except Exception as error:
        raise ProfileError(
            f"the states of {type(optimizer).__name__} cannot be counted: its step on parameters without data raises "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}. Pass a torch.optim optimizer with "
            "states of the same size, or leave optimizer out"
        ) from error
