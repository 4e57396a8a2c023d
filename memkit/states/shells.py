"""Running the step of a user's optimizer over a part of its parameters, without touching the optimizer.

A shell is an object of the optimizer's class that shares its attributes, with groups and states of its own. The class's own
`step` runs on it. What that writes to groups or attributes (a counter, a sum of weights) stays in the shell, as `Changes`.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memkit import torch_private

Group = dict[str, Any]
StateDict = dict[Any, Any]

_MISSING = object()
_OWN = ("param_groups", "state")


def step_of(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Return the step that an optimizer's class defines, without the hooks that torch has put around it."""
    step: Any = type(optimizer).step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    found: Callable[..., Any] = step
    return found


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether a step of the optimizer cannot be made without a closure."""
    parameter = inspect.signature(step_of(optimizer)).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def shell_of(optimizer: torch.optim.Optimizer, groups: list[Group], state: StateDict) -> torch.optim.Optimizer:
    """Return a shell of an optimizer with these groups and states, and without its hooks."""
    shell: torch.optim.Optimizer = object.__new__(type(optimizer))
    known = vars(shell)
    known.update(vars(optimizer))
    for name in _hooks_in(known):
        known[name] = OrderedDict()
    known["param_groups"], known["state"] = groups, state
    return shell


def _hooks_in(attributes: Mapping[str, Any]) -> list[str]:
    return [name for name, value in attributes.items() if name.endswith(("step_pre_hooks", "step_post_hooks"))]


def hollow_shell(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a shell whose groups have no parameters."""
    groups = [cut_group(group, []) for group in optimizer.param_groups]
    return shell_of(optimizer, groups, type(optimizer.state)(dict) if optimizer.state is not None else {})


def cut_group(group: Group, positions: list[int]) -> Group:
    """Return a group with some of its parameters."""
    cut = {**group, "params": [group["params"][position] for position in positions]}
    names = group.get("param_names")
    if names is not None and len(names) == len(group["params"]):
        cut["param_names"] = [names[position] for position in positions]
    return cut


@dataclass(frozen=True, slots=True)
class Changes:
    """What a step on a shell has written to a group, or to the optimizer's attributes.

    Two parts of one step must write the same: an optimizer that does not is not separable.
    """

    entries: Mapping[str, Any]

    def differs_from(self, other: Changes) -> str | None:
        """Return the name of an entry that another part has written otherwise; None if there is none."""
        for name in {**self.entries, **other.entries}:
            if not _are_equal(self.entries.get(name, _MISSING), other.entries.get(name, _MISSING)):
                return name
        return None


def versions_in(group: Group) -> list[tuple[str, int]]:
    """Return how often each tensor in a group was written to in place."""
    return [
        (name, torch_private.version_of(value))
        for name, value in group.items()
        if isinstance(value, Tensor) and not value.is_inference()
    ]


def changes_of_group(before: Group, after: Group) -> Changes:
    """Return what a step has written to a cut of a group."""
    return Changes(dict(_changed(before, after, ("params", "param_names"))))


def changes_of_shell(known: Mapping[str, Any], shell: torch.optim.Optimizer) -> Changes:
    """Return what a step has written to the attributes of a shell, which were known before."""
    return Changes(dict(_changed(known, vars(shell), (*_OWN, *_hooks_in(known)))))


def _changed(before: Mapping[str, Any], after: Mapping[str, Any], left_out: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for name, value in after.items():
        known = before.get(name, _MISSING)
        if known is not value and name not in left_out and not _are_equal(known, value):
            yield name, value


def _are_equal(one: Any, other: Any) -> bool:
    """Tell whether two entries are the same, bit by bit where they are tensors."""
    if one is other:
        return True
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and _have_same_bits(one, other)
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:  # whatever compares otherwise than to a truth
        return False


def _have_same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.size() == other.size() and one.device == other.device and torch.equal(one, other)
