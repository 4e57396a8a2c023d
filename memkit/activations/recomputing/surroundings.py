"""What surrounds a module's forward and changes what it computes: random number generators, autocast, grad mode, and
process-wide settings. They are noted before a forward, set for a recompute, and restored after it.

All of this runs in each forward of a region: the functions here are few, and call torch's own C functions.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from memkit import torch_private
from memkit.device import default_generator
from memkit.recording.recording import change_settings, setting_getters

Surroundings = tuple[Any, ...]
"""A thread's autocast state, followed by the process-wide settings."""

_NUM_AUTOCAST = 5
_NESTING = partial(torch.autocast_increment_nesting), partial(torch.autocast_decrement_nesting)
"""Both are called from C, so that no interrupt comes in between: the depth can only be read by changing it."""


@functools.cache
def _getters() -> tuple[partial[Any], ...]:
    """Return functions that read each of them. They are called for each call of each region, and so are not Python."""
    autocast = [partial(get, kind) for kind in ("cpu", "cuda") for get in (torch.is_autocast_enabled, torch.get_autocast_dtype)]
    return (*autocast, partial(torch.is_autocast_cache_enabled), *setting_getters())


def current_surroundings() -> Surroundings:
    """Return the current surroundings."""
    return tuple(map(partial.__call__, _getters()))


def set_surroundings(wanted: Surroundings) -> None:
    """Set the surroundings, where they differ; may be called again."""
    found = current_surroundings()
    if found[:_NUM_AUTOCAST] != wanted[:_NUM_AUTOCAST]:
        torch.set_autocast_enabled("cpu", wanted[0])
        torch.set_autocast_dtype("cpu", wanted[1])
        torch.set_autocast_enabled("cuda", wanted[2])
        torch.set_autocast_dtype("cuda", wanted[3])
        torch.set_autocast_cache_enabled(wanted[4])
        if list(map(partial.__call__, _NESTING))[-1] == 0:  # as `torch.autocast` does when the outermost is left
            torch.clear_autocast_cache()
    change_settings(found[_NUM_AUTOCAST:], wanted[_NUM_AUTOCAST:])


GeneratorState = tuple[torch.Generator, Any]
"""A generator with its state: for the CPU the state tensor, for a CUDA device the seed and the offset."""


_of_device: dict[torch.device, torch.Generator] = {}
"""The default generators, which stay the same objects."""


def states_on(devices: Sequence[torch.device]) -> tuple[GeneratorState, ...]:
    """Return the states of the default generators of CUDA devices.

    Raises:
        RuntimeError: they can't be read, since the work is being captured into a CUDA graph.
    """
    states: list[GeneratorState] = []
    for device in devices:
        generator = _of_device.get(device)
        if generator is None:
            generator = _of_device[device] = default_generator(device)
        states.append((generator, (generator.initial_seed(), generator.get_offset())))
    return tuple(states)


def drawn_from(before: tuple[GeneratorState, ...]) -> tuple[GeneratorState, ...]:
    """Return those of the given generator states, the CPU's first, whose generator has moved on since."""
    cpu, state = before[0]
    if torch_private.num_dispatch_modes():
        with torch_private.without_python_dispatch():  # a comparison is no part of the forward
            is_same = torch.equal(state, cpu.get_state())
    else:
        is_same = torch.equal(state, cpu.get_state())
    drawn = () if is_same else before[:1]
    for one in before[1:]:
        if one[1] != (one[0].initial_seed(), one[0].get_offset()):
            drawn += (one,)
    return drawn


def set_generators(states: tuple[GeneratorState, ...]) -> None:
    """Set generators to these states; may be called again."""
    for generator, state in states:
        if isinstance(state, Tensor):
            generator.set_state(state)
            continue
        seed, offset = state
        if generator.initial_seed() != seed:
            generator.manual_seed(seed)
        generator.set_offset(offset)


def states_of(generators: Sequence[GeneratorState]) -> tuple[GeneratorState, ...]:
    """Return the current states of the given generators."""
    return tuple(
        (generator, generator.get_state() if isinstance(state, Tensor) else (generator.initial_seed(), generator.get_offset()))
        for generator, state in generators
    )
