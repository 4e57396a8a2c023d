"""Random number generators: a step that draws from one must keep to the order of the parameters."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from memkit.device import default_generator


def generators_of(torch_device: torch.device) -> list[torch.Generator]:
    """Return the default generators of the host and of a device."""
    return [torch.default_generator, default_generator(torch_device)]


def states_of(generators: Sequence[torch.Generator]) -> list[Tensor]:
    """Return the states of generators."""
    return [generator.get_state() for generator in generators]


def seed_all(generators: Sequence[torch.Generator], seed: int) -> None:
    """Seed all generators."""
    for generator in generators:
        generator.manual_seed(seed)


def are_in_states(generators: Sequence[torch.Generator], states: Sequence[Tensor]) -> bool:
    """Tell whether generators are in these states: nothing was drawn since."""
    return all(torch.equal(one.get_state(), state) for one, state in zip(generators, states, strict=True))


def has_generators(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether an optimizer has a generator of its own, of torch's, Python's or NumPy's, in an attribute or a group."""
    own = [value for entries in (vars(optimizer), *optimizer.param_groups) for value in entries.values()]
    return any(isinstance(value, torch.Generator | random.Random) or _is_numpys(value) for value in own)


def _is_numpys(value: object) -> bool:
    """Tell whether a value is a NumPy generator, without importing NumPy."""
    kind = type(value)
    return kind.__module__.startswith("numpy.random") and kind.__name__ in ("Generator", "RandomState")
