"""What a module's forward runs under that changes what it computes: random number generators, autocast, grad mode, and what is
set for the process. It is noted ahead of a forward, put in place for a recompute, and put back to what it was behind it.

All of this is asked on the way of each forward of a region: the functions here are few, and call torch's own in C.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memkit import torch_private
from memkit.device import default_generator

Autocast = tuple[bool, torch.dtype, bool, torch.dtype, bool]
"""Whether autocast is on and for which dtype, on the CPU and on CUDA, and whether it keeps the casts of weights."""


def current_autocast() -> Autocast:
    """Return what autocast does in this thread now."""
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.is_autocast_cache_enabled(),
    )


def set_autocast(wanted: Autocast) -> None:
    """Have autocast do this in this thread from now on; may be called again."""
    torch.set_autocast_enabled("cpu", wanted[0])
    torch.set_autocast_dtype("cpu", wanted[1])
    torch.set_autocast_enabled("cuda", wanted[2])
    torch.set_autocast_dtype("cuda", wanted[3])
    torch.set_autocast_cache_enabled(wanted[4])
    torch.autocast_increment_nesting()
    if torch.autocast_decrement_nesting() == 0:  # as `torch.autocast` does when the outermost is left
        torch.clear_autocast_cache()


GeneratorState = tuple[torch.Generator, Any]
"""A generator, and where it is: for the CPU's its state, for a CUDA device's its seed and how far it has come from there."""


def generator_states(devices: Sequence[torch.device]) -> tuple[GeneratorState, ...]:
    """Return where the default generators are: the CPU's, and those of some CUDA devices."""
    cpu = torch.default_generator
    states: list[GeneratorState] = [(cpu, cpu.get_state())]
    for device in devices:
        generator = default_generator(device)
        states.append((generator, (generator.initial_seed(), generator.get_offset())))
    return tuple(states)


def drawn_from(before: tuple[GeneratorState, ...]) -> tuple[GeneratorState, ...]:
    """Return, of generators that were somewhere before, those that are elsewhere now."""
    (cpu, state), *others = before
    if torch_private.num_dispatch_modes():
        with torch_private.without_python_dispatch():  # a comparison is no part of the forward
            is_same = torch.equal(state, cpu.get_state())
    else:
        is_same = torch.equal(state, cpu.get_state())
    if is_same and not others:
        return ()
    changed = [one for one in others if one[1] != (one[0].initial_seed(), one[0].get_offset())]
    return tuple(changed) if is_same else (before[0], *changed)


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
