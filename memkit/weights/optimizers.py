"""What is asked of an optimizer that a user has made: how much state it keeps, and whether a step writes to its groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from memkit import torch_private
from memkit.optimizers import kept_states
from memkit.optimizers.shells import needs_closure

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""Makes an optimizer of parameters."""
Entries = dict[str, tuple[Any, int]]


def entries_of(group: dict[str, Any]) -> Entries:
    """Return the entries of an optimizer's group, and how often each was written to."""
    return {name: (value, _version(value)) for name, value in group.items() if name != "params"}


def changed_in(before: Entries, group: dict[str, Any]) -> str | None:
    """Return the name of an entry of a group that a step has changed, if any."""
    for name, (value, version) in entries_of(group).items():
        known, known_version = before.get(name, (_MISSING, 0))
        if known is value and known_version == version:
            continue
        if known is value or isinstance(known, Tensor) or isinstance(value, Tensor) or known != value:
            return name
    return None


_MISSING = object()


def _version(value: object) -> int:
    return torch_private.version_of(value) if isinstance(value, Tensor) and not value.is_inference() else 0


def state_bytes_of(make: MakeOptimizer, trained: Sequence[Tensor]) -> int:
    """Return how many bytes of state an optimizer keeps for some parameters.

    Raises:
        ValueError: it does not step them.
    """
    if not trained:
        return 0
    twins = [nn.Parameter(torch.empty_like(parameter, device="meta")) for parameter in trained]
    tried = "LayerOffload: optimizer= was called with parameters on the meta device, to see how much state it keeps"
    try:
        optimizer = make(twins)
        held = {id(item) for group in optimizer.param_groups for item in group["params"]}
    except Exception as error:
        raise ValueError(f"{tried}. This failed: {type(error).__name__}: {error}") from error
    if held != set(map(id, twins)):
        raise ValueError(f"{tried}. It makes an optimizer of the parameters that it is given; what it returned holds others")
    if needs_closure(optimizer):
        raise ValueError(f"{tried}. {type(optimizer).__name__} needs a closure. Use one whose step works without one")
    try:
        kept = kept_states(optimizer).of
    except Exception as error:
        raise ValueError(f"{tried}, and its step failed: {type(error).__name__}: {error}") from error
    return sum(state.num_bytes for states in kept.values() for state in states if state.is_there)


def bring_state(parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Bring what an optimizer keeps of some parameters to where these are: as `torch.optim.Optimizer.load_state_dict` does."""
    wanted = set(map(id, parameters))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in wanted:
                continue
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                is_moved = isinstance(value, Tensor) and value.device != parameter.device
                if is_moved and (name != "step" or group.get("fused") or group.get("capturable")):
                    state[name] = value.to(parameter.device)
