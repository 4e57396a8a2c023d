"""Copies of an optimizer's attributes and groups, which a step may write to, and whether two of them are equal."""

from __future__ import annotations

import copy
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from memkit.optimizers.shells import Group

_SHARED = (FunctionType, MethodType, BuiltinFunctionType, type, nn.Module)
_VALUES = (bool, int, float, complex, str, bytes, type(None))


def may_be_written(name: str, value: object) -> bool:
    """Tell whether a step may write to an attribute of the optimizer: neither code nor one of `torch.optim.Optimizer`'s own."""
    return name not in ("param_groups", "state", "defaults") and not name.endswith("_hooks") and not isinstance(value, _SHARED)


def own_attributes(optimizer: torch.optim.Optimizer, memo: dict[int, Any] | None = None) -> dict[str, Any]:
    """Return copies of an optimizer's attributes. What can't be copied is left out.

    Args:
        memo: by its id, what stands in a copy for a parameter, a group, or the optimizer; None for these themselves.
    """
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
        if name in ("params", "param_names"):
            continue
        try:
            found[name] = copy.deepcopy(value, memo)
        except Exception:
            found[name] = value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)
    return found


def _memo(optimizer: torch.optim.Optimizer) -> dict[int, Any]:
    """Return the memo for `copy.deepcopy` with all that is not to be copied."""
    kept = [optimizer, optimizer.state, optimizer.param_groups, optimizer.defaults]
    kept += [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {id(value): value for value in kept}


def told_apart(entries: Any, number: int) -> Any:
    """Return the entries of a list of that many with the first two of them differing; any other value as it is."""
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
