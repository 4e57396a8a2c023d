"""What a module's forward runs under that changes what it computes: random number generators, autocast, grad mode, and what is
set for the process. It is noted ahead of a forward, put in place for a recompute, and put back to what it was behind it.

All of this is asked on the way of each forward of a region: the functions here are few, and call torch's own in C.
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
from memkit.recording.settings import change_settings, setting_getters

Surroundings = tuple[Any, ...]
"""What autocast does in a thread, and behind that the settings of the process."""

_NUM_AUTOCAST = 5
_NESTING = partial(torch.autocast_increment_nesting), partial(torch.autocast_decrement_nesting)
"""Called at once, so that no interrupt comes in between: the depth can only be read by changing it."""


@functools.cache
def _getters() -> tuple[partial[Any], ...]:
    """Return what reads each of them. It is asked for each call of each region, and so is no Python."""
    autocast = [partial(get, kind) for kind in ("cpu", "cuda") for get in (torch.is_autocast_enabled, torch.get_autocast_dtype)]
    return (*autocast, partial(torch.is_autocast_cache_enabled), *setting_getters())


def current_surroundings() -> Surroundings:
    """Return what is set now."""
    return tuple(map(partial.__call__, _getters()))


def set_surroundings(wanted: Surroundings) -> None:
    """Set what was wanted, where something else is; may be called again."""
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
"""A generator, and where it is: for the CPU's its state, for a CUDA device's its seed and how far it has come from there."""


_of_device: dict[torch.device, torch.Generator] = {}
"""The default generators, which stay the same."""


def states_on(devices: Sequence[torch.device]) -> tuple[GeneratorState, ...]:
    """Return where the default generators of some CUDA devices are.

    Raises:
        RuntimeError: that is not known, as the work is being captured into a graph.
    """
    states: list[GeneratorState] = []
    for device in devices:
        generator = _of_device.get(device)
        if generator is None:
            generator = _of_device[device] = default_generator(device)
        states.append((generator, (generator.initial_seed(), generator.get_offset())))
    return tuple(states)


def drawn_from(before: tuple[GeneratorState, ...]) -> tuple[GeneratorState, ...]:
    """Return, of generators that were somewhere before, the CPU's first, those that are elsewhere now."""
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
    """Have generators go on from where they were; may be called again."""
    for generator, state in states:
        if isinstance(state, Tensor):
            generator.set_state(state)
            continue
        seed, offset = state
        if generator.initial_seed() != seed:
            generator.manual_seed(seed)
        generator.set_offset(offset)


def states_of(generators: Sequence[GeneratorState]) -> tuple[GeneratorState, ...]:
    """Return where these generators are now."""
    return tuple(
        (generator, generator.get_state() if isinstance(state, Tensor) else (generator.initial_seed(), generator.get_offset()))
        for generator, state in generators
    )
