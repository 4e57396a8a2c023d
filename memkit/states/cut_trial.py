"""Finding out by steps of a tensor, whole and in windows, whether an optimizer steps each element by itself.

Only then can a large parameter be stepped in windows. No list of classes decides that.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from memkit import torch_private
from memkit.optimizers.shells import Group, are_alike
from memkit.plan import WINDOW_NUMEL
from memkit.states.generators import are_in_states, generators_of, seed_all, states_of
from memkit.states.trial import Trial, have_same_bits, makes_states_in_steps, values_of
from memkit.torch_state import is_dtensor

_MOST_GROUPS = 16
_NUM_STEPS = 6


def find_elementwise(
    optimizer: torch.optim.Optimizer, groups: list[Group], *, torch_device: torch.device, master: torch.dtype | None
) -> list[bool]:
    """Return of each of some groups whether its parameters can be stepped in windows, bit for bit as whole.

    Of many groups, some are tried: the others can be if all of these can.
    """
    found = [_is_elementwise(optimizer, group, torch_device, master) for group in groups[:_MOST_GROUPS]]
    return found + [all(found)] * (len(groups) - len(found))


def refuse_mixed_shards(
    optimizer: torch.optim.Optimizer, *, where: str, torch_device: torch.device, master: torch.dtype | None
) -> None:
    """Raise if an optimizer has shards, and steps an element by others of its parameter: these may be on other ranks.

    Raises:
        ValueError: it does.
    """
    by_dim = defaultdict[int, list[Group]](list)
    for group in optimizer.param_groups:
        shards = [parameter for parameter in group["params"] if is_dtensor(parameter)]
        for dim in sorted({shard.dim() for shard in shards}):
            by_dim[dim].append({**group, "params": [shard for shard in shards if shard.dim() == dim]})
    for dim, groups in by_dim.items():
        if not all(find_elementwise(optimizer, groups, torch_device=torch_device, master=master)):
            raise ValueError(
                f"{where} steps shards (DTensor) on each rank by itself, for which each element has to be stepped by itself; "
                f"found {type(optimizer).__name__}, which steps those of {dim} dimensions otherwise. Use an optimizer such as "
                "AdamW for them, or leave them to one without a StateOffload"
            )


def _is_elementwise(
    optimizer: torch.optim.Optimizer, group: Group, torch_device: torch.device, master: torch.dtype | None
) -> bool:
    generators = generators_of(torch_device)
    before = states_of(generators)
    try:
        with torch.inference_mode(False), torch.no_grad():
            has_states = not makes_states_in_steps(optimizer, [group], torch_device, master)
            whole = _WholeTrial(optimizer, [group], torch_device, master, has_states=has_states)
            cut = _CutTrial(optimizer, [group], torch_device, master, has_states=has_states)
            for step in range(_NUM_STEPS):
                seed_all(generators, step)
                whole.step_all(leaves_out=False)
                drawn = states_of(generators)
                seed_all(generators, step)
                if not are_in_states(generators, drawn):
                    return False  # random numbers of windows are others than those of the whole
                if cut.step_each(leaves_out=False) is not None or not cut.is_like(whole):
                    return False
    except Exception:  # such as that of a class that steps matrices alone
        return False
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)
    return True


class _WholeTrial(Trial):
    """Has a tensor of each precision, some windows large, of as many dimensions as the parameters have."""

    def _tensors_like(self, parameter: Tensor, dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
        return [values_of(_size_like(parameter), dtype, generator)]


class _CutTrial(Trial):
    """Has the windows of these tensors instead."""

    def _tensors_like(self, parameter: Tensor, dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
        return _windows_of(values_of(_size_like(parameter), dtype, generator))

    def _give_gradients(self, *, leaves_out: bool) -> None:
        rest = iter(self.parameters)
        for parameter in rest:
            windows = [parameter, *(next(rest) for _ in range(_NUM_WINDOWS - 1))]
            flat = values_of([sum(map(Tensor.numel, windows))], parameter.dtype, self.generator).to(parameter.device)
            for window, grad in zip(windows, _windows_of(flat), strict=True):
                window.grad = grad

    def is_like(self, whole: Trial) -> bool:
        """Tell whether parameters, states and groups are bit for bit those of the whole tensors."""
        for number, parameter in enumerate(whole.parameters):
            windows = self.parameters[number * _NUM_WINDOWS : (number + 1) * _NUM_WINDOWS]
            if not self._are_like(parameter, windows, whole):
                return False
        return self.differs_in_groups(whole) is None

    def _are_like(self, parameter: nn.Parameter, windows: list[nn.Parameter], whole: Trial) -> bool:
        if not _is_made_of(parameter, windows, parameter):
            return False
        entries = whole.state.get(parameter, {})
        rows = [self.state.get(window, {}) for window in windows]
        if any(row.keys() != entries.keys() for row in rows):
            return False
        for name, value in entries.items():
            parts = [row[name] for row in rows]
            if isinstance(value, Tensor) and value.dim():
                if not _is_made_of(value, parts, parameter):
                    return False
            elif not all(are_alike(value, part) for part in parts):
                return False
        return True


_NUM_WINDOWS = 3


def _windows_of(values: Tensor) -> list[Tensor]:
    return list(values.reshape(-1).split(WINDOW_NUMEL))


def _size_like(parameter: Tensor) -> list[int]:
    """Return a size of two windows and a part of one, with an odd number of elements."""
    size = [7, *[1] * (parameter.dim() - 2)] if parameter.dim() > 1 else []
    rows = (2 * WINDOW_NUMEL + WINDOW_NUMEL // 3) // math.prod(size)
    return [rows + 1 - rows % 2, *size]


def _is_made_of(value: Tensor, parts: Sequence[Tensor], parameter: Tensor) -> bool:
    """Tell whether a state has an element for each of the parameter's, in the same order, and those of windows are the same."""
    if torch_private.is_wrapper(value) or value.size() != parameter.size() or not value.is_contiguous():
        return False
    if not all(isinstance(part, Tensor) and part.dim() == 1 for part in parts):
        return False
    return have_same_bits(value.view(-1), torch.cat(list(parts)))
