"""What an optimizer's groups had when a backward stepped parameters: who changes it before the step has ended is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memkit.errors import StateOffloadError
from memkit.optimizers.shells import changes_of_group, versions_in


@dataclass(frozen=True, slots=True)
class _Noted:
    """What a group had: its entries, how often each tensor among these was written to, and its parameters."""

    entries: dict[str, Any]
    versions: list[tuple[str, int]]
    members: list[Tensor]

    def changed_in(self, now: _Noted) -> str | None:
        """Return the name of an entry that is another one by now; None if there is none."""
        names = [*changes_of_group(self.entries, now.entries).entries]
        names += [name for name, _ in {*now.versions} - {*self.versions}]
        names += ["params"] * ([*map(id, self.members)] != [*map(id, now.members)])
        return names[0] if names else None


class NotedOptions:
    """Parameters, learning rates and other entries of groups, as they were when they were noted.

    Args:
        optimizer: whose they are.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._noted: list[_Noted] = []

    def note(self) -> None:
        """What the groups have now is what parameters are stepped with."""
        self._noted = self._now()

    def forget(self) -> None:
        """The step has ended: anything may be set."""
        self._noted = []

    def check(self) -> None:
        """Raise if an entry of a group was set since, and forget what was noted. Other groups may have come.

        Raises:
            StateOffloadError: one was, and the backward has stepped without it.
        """
        if not self._noted:
            return
        now = self._now() + [_Noted({}, [], [])] * len(self._noted)  # a group that has gone has none
        changed = next(filter(None, map(_Noted.changed_in, self._noted, now)), None)
        if changed is not None:
            self._noted = []
            raise StateOffloadError(
                f'"{changed}" of a group was set between the backward and optimizer.step(), and the backward has stepped '
                "parameters with what it was before. Set it before the backward or after optimizer.step(), or use "
                'when="step". Another optimizer.step() ends this step as it is'
            )

    def _now(self) -> list[_Noted]:
        return [
            _Noted({key: value for key, value in group.items() if key not in _MEMBERS}, versions_in(group), [*group["params"]])
            for group in self._optimizer.param_groups
        ]


_MEMBERS = ("params", "param_names")
