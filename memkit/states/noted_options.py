"""What an optimizer's groups had when a backward stepped parameters: who sets it before the step has ended is told."""

from __future__ import annotations

from typing import Any

import torch

from memkit.errors import StateOffloadError
from memkit.optimizers.shells import changes_of_group, versions_in


class NotedOptions:
    """Learning rates and other entries of groups, as they were when they were noted.

    Args:
        optimizer: whose they are.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._noted: list[tuple[dict[str, Any], list[tuple[str, int]]]] | None = None
        """Of each group its entries, and which version of which tensor is in it. None for nothing."""

    def note(self) -> None:
        """What the groups have now is what parameters are stepped with."""
        self._noted = self._now()

    def forget(self) -> None:
        """The step has ended: anything may be set."""
        self._noted = None

    def check(self) -> None:
        """Raise if an entry of a group was set since, and forget what was noted.

        Raises:
            StateOffloadError: it was: what was stepped has not had it.
        """
        known, self._noted = self._noted, None
        for (before, versions), (now, versions_now) in zip(known or [], self._now(), strict=False):
            if versions != versions_now or changes_of_group(before, now).entries:
                names = [*changes_of_group(before, now).entries, *(name for name, _ in {*versions_now} - {*versions})]
                raise StateOffloadError(
                    f'"{names[0]}" of a group was set between the backward and optimizer.step(), and the backward has stepped '
                    "parameters with what it was before. Set it ahead of the backward, or behind the step, or use "
                    'when="step". Another optimizer.step() ends this step as it is'
                )

    def _now(self) -> list[tuple[dict[str, Any], list[tuple[str, int]]]]:
        return [
            ({name: value for name, value in group.items() if name not in ("params", "param_names")}, versions_in(group))
            for group in self._optimizer.param_groups
        ]
