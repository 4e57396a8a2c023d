"""Running the step of a user's optimizer over a part of its parameters, without touching it: the class's own `step` runs on a
shell, an object that shares the optimizer's attributes, with groups and states of its own. Writes stay in the shell."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from memkit.core import torch_private

Group = dict[str, Any]
StateDict = dict[Any, Any]

_MISSING = object()
_MEMBERS = ("params", "param_names")


def step_of(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    step: Any = type(optimizer).step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    found: Callable[..., Any] = step
    return found


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    parameter = inspect.signature(step_of(optimizer)).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def put_in_train_mode(shell: torch.optim.Optimizer) -> None:
    """Let a shell of a schedule-free optimizer step: these are in eval mode at first, and raise there."""
    train = getattr(type(shell), "train", None)
    if callable(train):
        train(shell)


def shell_of(
    optimizer: torch.optim.Optimizer, groups: list[Group], state: StateDict, *, hooks: Iterable[str] | None = None
) -> torch.optim.Optimizer:
    """Return a shell with these groups and states, without the hooks, whose attributes `hooks` names if looked up before."""
    shell: torch.optim.Optimizer = object.__new__(type(optimizer))
    known = vars(shell)
    known.update(vars(optimizer))
    for name in hooks_of(optimizer) if hooks is None else hooks:
        known[name] = OrderedDict()
    known["param_groups"], known["state"] = groups, state
    return shell


def hooks_of(optimizer: torch.optim.Optimizer) -> list[str]:
    return [*filter(_is_of_hooks, vars(optimizer))]


def _is_of_hooks(name: str) -> bool:
    return name.endswith(("step_pre_hooks", "step_post_hooks"))


def hollow_shell(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    groups = [emptied(group) for group in optimizer.param_groups]
    return shell_of(optimizer, groups, type(optimizer.state)(dict) if optimizer.state is not None else {})


def emptied(group: Group) -> Group:
    return {name: [] if name in _MEMBERS else value for name, value in group.items()}


Changes = dict[str, Any]  # a step's writes on a shell; two parts of a separable optimizer's step write the same


def differing(one: Changes, other: Changes) -> str | None:
    names = {**one, **other}
    return next((name for name in names if not _are_equal(one.get(name, _MISSING), other.get(name, _MISSING))), None)


def versions_in(group: Group) -> list[tuple[str, int]]:
    return [(name, torch_private.version_of(value)) for name, value in tensors_in(group)]


def tensors_in(group: Group) -> list[tuple[str, Tensor]]:
    return [(name, value) for name, value in group.items() if isinstance(value, Tensor) and not value.is_inference()]


def changes_of_group(before: Group, after: Group) -> Changes:
    return _changed(before, after, lambda name: name in _MEMBERS)


def changes_of_shell(known: Mapping[str, Any], shell: torch.optim.Optimizer) -> Changes:
    return _changed(known, vars(shell), lambda name: name in ("param_groups", "state") or _is_of_hooks(name))


def _changed(before: Mapping[str, Any], after: Mapping[str, Any], is_left_out: Callable[[str], bool]) -> Changes:
    others = [name for name, value in after.items() if before.get(name, _MISSING) is not value]  # of most there are none
    others = [name for name in others if not is_left_out(name)]
    return {name: after[name] for name in others if not _are_equal(before.get(name, _MISSING), after[name])} if others else {}


def _are_equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        is_alike = isinstance(one, Tensor) and isinstance(other, Tensor) and one.dtype == other.dtype
        return is_alike and one.size() == other.size() and one.device == other.device and torch.equal(one, other)
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:  # an `==` without a truth value
        return False


_SHARED = (FunctionType, MethodType, BuiltinFunctionType, type, nn.Module)
_VALUES = (bool, int, float, complex, str, bytes, type(None))


def may_be_written(name: str, value: object) -> bool:
    """Tell whether a step may write to an attribute of the optimizer: neither code nor one of `torch.optim.Optimizer`'s own."""
    return name not in ("param_groups", "state", "defaults") and not name.endswith("_hooks") and not isinstance(value, _SHARED)


def own_attributes(optimizer: torch.optim.Optimizer, memo: dict[int, Any] | None = None) -> dict[str, Any]:
    memo = _memo(optimizer) if memo is None else memo
    found = {}
    for name, value in vars(optimizer).items():
        if may_be_written(name, value):
            try:
                found[name] = copy.deepcopy(value, memo)
            except Exception:  # a lock, a process group
                continue
    return found


def own_group(optimizer: torch.optim.Optimizer, group: Group, memo: dict[int, Any] | None = None) -> Group:
    """Return copies of a group's entries but the parameters: see `own_attributes`."""
    memo = _memo(optimizer) if memo is None else memo
    found = {}
    for name, value in group.items():
        if name in _MEMBERS:
            continue
        try:
            found[name] = copy.deepcopy(value, memo)
        except Exception:
            found[name] = value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)
    return found


def _memo(optimizer: torch.optim.Optimizer) -> dict[int, Any]:
    kept = [optimizer, optimizer.state, optimizer.param_groups, optimizer.defaults]
    kept += [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {id(value): value for value in kept}


def told_apart(entries: Any, number: int) -> Any:
    """Return a list with this number of entries, with its first two made different; any other value as it is."""
    if type(entries) not in (list, tuple) or len(entries) != number:
        return entries
    made = list(entries)
    if len(made) < 2 or not all(isinstance(entry, _VALUES) for entry in made):
        return entries
    other = next((index for index, entry in enumerate(made) if entry != made[0]), None)
    if other is not None:
        made[1], made[other] = made[other], made[1]
    elif isinstance(made[0], float):
        made[1] = made[0] / 2 or 0.5
    return type(entries)(made)


def are_alike(one: Any, other: Any, seen: set[int] | None = None) -> bool:
    """Tell whether two values are equal, tensors bit by bit, also inside of lists, dicts and objects."""
    seen = set() if seen is None else seen
    if one is other or id(one) in seen:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.size() == other.size() and torch.equal(one.nan_to_num(), other.nan_to_num())
    if isinstance(one, _VALUES):
        return bool(one == other) or (one != one and other != other)
    seen.add(id(one))
    if isinstance(one, dict):
        pairs = zip(one.values(), other.values(), strict=False)
        return len(one) == len(other) and all(are_alike(mine, others, seen) for mine, others in pairs)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(are_alike(*pair, seen) for pair in zip(one, other, strict=True))
    if isinstance(one, set | frozenset):
        return len(one) == len(other)
    return are_alike(getattr(one, "__dict__", None), getattr(other, "__dict__", None), seen)
