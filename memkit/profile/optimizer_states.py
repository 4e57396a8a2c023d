"""The states that an optimizer keeps for each parameter, found by stepping it on copies of the parameters without data."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from memkit.errors import ProfileError
from memkit.plan import ParameterCosts, aligned, plan_states
from memkit.profile.alive import AliveStorage, MemoryCategory, OptimizerMemory
from memkit.profile.step import Step
from memkit.profile.storage_log import parameter_names
from memkit.profile.tree import OUTSIDE_NAME, ModuleTree
from memkit.storages import storage_bytes, unique_storages
from memkit.torch_state import local_of

if TYPE_CHECKING:
    OptimizerLike = str | torch.optim.Optimizer | type[torch.optim.Optimizer]

_META = torch.device("meta")
_AS_ONE = ("foreach", "fused", "capturable")
"""Options for how a step runs, which change no state except where step counters are."""
_BY_ELEMENT = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
"""Classes of `torch.optim` that step each element by itself, so that a large parameter's states can move in parts. For others
this isn't known without data, and is assumed not to be so."""
_AS_A_WHOLE = (torch.optim.LBFGS, torch.optim.SparseAdam)
"""Classes whose parameters can't be stepped one by one, so that their states can't leave."""


def check_optimizer(optimizer: OptimizerLike | None) -> OptimizerLike | None:
    """Return an optimizer or class as given, or the class with a given name.

    Raises:
        TypeError: it is no optimizer, class of one, or name.
        ValueError: the name is unknown.
    """
    if isinstance(optimizer, str):
        known = optimizer_names()
        if optimizer.lower() not in known:
            raise ValueError(
                f"a name is one of {', '.join(known)}; found {optimizer!r}. Any other optimizer, such as one of another "
                "library, can be counted in Python: memkit.profile_memory(model, x, optimizer=instance), made on the model's "
                "parameters"
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
    """Return the classes of `torch.optim` by their names in lower case; "momentum" is SGD with momentum."""
    found = {
        name.lower(): kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    return dict(sorted({**found, "momentum": torch.optim.SGD}.items()))


def optimizer_memory(
    step: Step, tree: ModuleTree, optimizer: OptimizerLike, *, device: torch.device, rounding_bytes: int
) -> tuple[OptimizerMemory, tuple[AliveStorage, ...]]:
    """Return what an optimizer keeps on the device, and its states one by one, with sizes rounded up.

    Args:
        step: the step, whose parameters are counted; streamed ones have their states in host memory.
        tree: names the parameters.
        optimizer: an optimizer of these parameters; or a class or name, for one of the parameters that require grad.
        device: the device of the step.
        rounding_bytes: the allocator's.

    Raises:
        ProfileError: its step doesn't run without data.
        ValueError: it was made for other parameters.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizer = _unwrapped(optimizer)
        _check_parameters(step, optimizer)
        instance, kind = optimizer, type(optimizer)
    else:
        instance, kind = None, optimizer_names()[optimizer.lower()] if isinstance(optimizer, str) else optimizer
    streamed = {id(parameter) for parameter in step.streamed.parameters}
    names = parameter_names(step, tree)
    own = [parameter for module in step.modules() for parameter in module.parameters() if parameter.requires_grad]
    found = _counted(own, kind, instance, _options_of(optimizer))
    states, state_bytes = [], 0
    for parameter, what, num_bytes in found:
        if id(parameter) in streamed:
            continue
        module, name = names.get(id(parameter), (OUTSIDE_NAME, "parameter"))
        state_bytes += num_bytes
        states.append(
            AliveStorage(
                category=MemoryCategory.OPTIMIZER_STATE,
                module=module,
                what=f"{name}.{what}",
                num_bytes=-(-num_bytes // rounding_bytes) * rounding_bytes,
                begin=0,
                end=0,
            )
        )
    there = [] if instance is None else [tensor for state in instance.state.values() for _, tensor in _tensors_in(state)]
    there_bytes = storage_bytes(tensor for tensor in there if tensor.device == device and not tensor.is_meta)
    leaving = [(parameter, num_bytes) for parameter, _, num_bytes in found if id(parameter) not in streamed]
    memory = OptimizerMemory(
        name=kind.__name__, state_bytes=state_bytes, there_bytes=there_bytes, room_bytes=_room_bytes(kind, leaving)
    )
    return memory, tuple(states)


def _room_bytes(kind: type[torch.optim.Optimizer], states: list[tuple[Tensor, int]]) -> int | None:
    """Return the device memory that `StateOffload` would need for states in transfer: see `OptimizerMemory`.

    Args:
        kind: the class of the optimizer.
        states: each parameter with the bytes of its states, in the order of the groups.
    """
    if not states or issubclass(kind, _AS_A_WHOLE):
        return None
    is_known = any(kind is getattr(torch.optim, name) for name in _BY_ELEMENT)
    parameters = {id(parameter): parameter for parameter, _ in states}
    sizes = dict.fromkeys(parameters, 0)
    for parameter, num_bytes in states:
        sizes[id(parameter)] += aligned(num_bytes)
    costs = [
        ParameterCosts(
            name=str(number),
            numel=own.numel(),
            parameter_bytes=aligned(own.nbytes),
            state_bytes=sizes[key],
            is_elementwise=is_known and own.is_contiguous(),
        )
        for number, (key, own) in enumerate((key, local_of(parameter)) for key, parameter in parameters.items())
    ]
    plan = plan_states(costs)
    return plan.room_bytes + plan.undo_bytes


def state_bytes_of(parameters: Iterable[Tensor], optimizer: str) -> int:
    """Return what an optimizer keeps for parameters of which only shapes and dtypes count.

    Args:
        parameters: those that it steps.
        optimizer: a name, as `check_optimizer` takes it.

    Raises:
        ProfileError: its step does not run without data.
    """
    found = _counted(list(parameters), optimizer_names()[optimizer.lower()], None, _options_of(optimizer))
    return sum(num_bytes for _, _, num_bytes in found)


def _options_of(optimizer: object) -> dict[str, Any]:
    return {"momentum": 0.9} if optimizer == "momentum" else {}


def _counted(
    trainable: list[Any], kind: type[torch.optim.Optimizer], instance: torch.optim.Optimizer | None, options: dict[str, Any]
) -> list[tuple[Tensor, str, int]]:
    try:
        return list(_stepped(trainable, kind, instance, options))
    except (RuntimeError, NotImplementedError, AttributeError, KeyError) as error:
        raise ProfileError(
            f"the states of {kind.__name__} cannot be counted without data: its step on parameters without data raises "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}. Pass a torch.optim optimizer with "
            "states of the same size, or leave optimizer out"
        ) from error


def _unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer inside of one that wraps it, as accelerate's does."""
    inside = getattr(optimizer, "optimizer", None)
    return _unwrapped(inside) if isinstance(inside, torch.optim.Optimizer) else optimizer


def _check_parameters(step: Step, optimizer: torch.optim.Optimizer) -> None:
    own = {id(parameter) for module in step.modules() for parameter in module.parameters()}
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strangers = [parameter for parameter in given if id(parameter) not in own]
    if strangers:
        raise ValueError(
            f"optimizer must be made on the model's parameters; found {len(strangers)} of {len(given)} that are not the "
            f'model\'s, the first of shape {tuple(strangers[0].shape)}. Make it anew, or pass a name such as "adamw"'
        )


def _stepped(
    trainable: list[Any], kind: type[torch.optim.Optimizer], instance: torch.optim.Optimizer | None, options: dict[str, Any]
) -> Iterator[tuple[Tensor, str, int]]:
    """Step a copy of an optimizer without data; yield each state's parameter, name and bytes."""
    twins: dict[int, nn.Parameter] = {}
    originals: dict[int, Tensor] = {}

    def twin_of(parameter: Tensor) -> nn.Parameter:
        if id(parameter) not in twins:
            own = local_of(parameter)
            twin = nn.Parameter(
                torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device=_META),
                requires_grad=parameter.requires_grad,
            )
            twins[id(parameter)] = twin
            originals[id(twin)] = parameter
        return twins[id(parameter)]

    with warnings.catch_warnings(), torch.device("cpu"), torch.enable_grad():
        warnings.simplefilter("ignore")
        if instance is None:
            clone = kind([twin_of(parameter) for parameter in dict.fromkeys(trainable)], **_as_kind(kind, options))
        else:
            clone = _clone(instance, twin_of)
        with _without_data():
            _step(clone, list(twins.values()))
    seen = set[int]()
    on_device = {
        id(parameter): any(bool(group.get(option)) for option in ("capturable", "fused"))
        for group in (clone if instance is None else instance).param_groups
        for parameter in group["params"]
    }
    for twin, state in clone.state.items():
        original = originals[id(twin)]
        counts_scalars = on_device.get(id(original), False)
        for name, tensor in _tensors_in(state):
            is_there = tensor.is_meta or (counts_scalars and tensor.dim() == 0)
            for key, storage in unique_storages([tensor]).items():
                if is_there and key not in seen:
                    seen.add(key)
                    yield original, name, storage.nbytes()
    if isinstance(clone, torch.optim.LBFGS):  # of which a first step makes none: of steps and of changes of the gradient
        group = clone.param_groups[0]
        for name in ("old_dirs", "old_stps"):
            for parameter in group["params"]:
                num_bytes = parameter.numel() * parameter.itemsize
                yield originals[id(parameter)], name, group["history_size"] * num_bytes


def _as_kind(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> dict[str, Any]:
    """Return those options that a class takes."""
    taken = inspect.signature(kind).parameters
    return (
        options if any(it.kind is it.VAR_KEYWORD for it in taken.values()) else {k: v for k, v in options.items() if k in taken}
    )


def _clone(optimizer: torch.optim.Optimizer, twin_of: Any) -> torch.optim.Optimizer:
    """Return an optimizer of the same class and options for twins of the parameters; nothing of it is shared."""
    plain = {name: _plain(name, value) for name, value in optimizer.defaults.items()}
    groups = [
        {
            **{name: _plain(name, value) for name, value in group.items()},
            "params": [twin_of(parameter) for parameter in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    return type(optimizer)(groups, **_as_kind(type(optimizer), plain))


def _plain(name: str, value: Any) -> Any:
    if name in _AS_ONE:
        return False
    return torch.ones((), dtype=value.dtype) if isinstance(value, Tensor) else value


def _step(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    """Step once, from gradients as large as the parameters."""
    is_sparse = isinstance(optimizer, torch.optim.SparseAdam)
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = _sparse_like(parameter) if is_sparse else torch.empty_like(parameter)
    if not is_sparse:
        optimizer.step(lambda: torch.zeros(()))  # type: ignore[arg-type, return-value]  # LBFGS asks for a loss
        return
    for group in optimizer.param_groups:  # it makes a group's states first, then computes as nothing sparse can without data
        optimizer.param_groups = [group]
        with suppress(RuntimeError):
            optimizer.step()
        missing = [parameter for parameter in group["params"] if parameter.requires_grad and not optimizer.state[parameter]]
        if missing:
            raise RuntimeError(f"no states for a parameter of shape {tuple(missing[0].shape)}")


def _sparse_like(parameter: Tensor) -> Tensor:
    indices = torch.zeros(1, 1, dtype=torch.int64, device=_META)
    values = torch.empty(1, *parameter.shape[1:], dtype=parameter.dtype, device=_META)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, device=_META, check_invariants=False, is_coalesced=True)


def _tensors_in(state: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(state, Tensor):
        yield name, state
    elif isinstance(state, dict):
        for key, value in state.items():
            yield from _tensors_in(value, name or str(key))
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from _tensors_in(value, name)


def _without_data() -> Any:
    """Return a mode in which numbers can be read from tensors without data: the sizes of states don't depend on them."""
    from memkit.profile.simulate.numbers import NumbersWithoutData  # its base is a private class of torch

    return NumbersWithoutData()  # type: ignore[no-untyped-call]  # torch does not annotate its base
