"""Users' edits of `param_groups` between steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memkit.states.packing import OnDisk


class Program:
    """A model that is trained while its optimizer's groups change. With `freezes`, parameters that leave the optimizer are
    frozen until they come back."""

    def __init__(self, model: nn.Module, make: Callable[[Any], torch.optim.Optimizer], *, freezes: bool = False) -> None:
        self.model, self.freezes = model, freezes
        self.parameters = list(model.parameters())
        self.optimizer = make(self.parameters)

    def outside(self) -> list[nn.Parameter]:
        known = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        return [parameter for parameter in self.parameters if id(parameter) not in known]

    def kept(self) -> Any:
        """Return the states and the groups: a state dict can't be made if a parameter has left and its states stay."""
        optimizer, places = self.optimizer, {id(parameter): place for place, parameter in enumerate(self.parameters)}
        groups = [{**group, "params": [places[id(item)] for item in group["params"]]} for group in optimizer.param_groups]
        return [optimizer.state.get(parameter) or {} for parameter in self.parameters], groups

    def has_all(self) -> bool:
        """Tell whether the states are in `optimizer.state`, and not on a disk."""
        return not any(isinstance(value, OnDisk) for row in self.optimizer.state.values() for value in row.values())

    def edit(self, choices: random.Random) -> None:
        """Change the groups in one of the ways in which users do."""
        groups, outside = self.optimizer.param_groups, self.outside()
        group, other = choices.choice(groups), choices.choice(groups)
        members, place = group["params"], choices.randrange(1, 5)
        what = choices.choice(["leave", "slice", "move", "add", "back", "order", "groups", "options", "replace", "swap"])
        if what == "leave" and len(members) > 1:
            members.pop(choices.randrange(len(members)))
        elif what == "slice" and len(members) > place:
            group["params"] = members[place:] if choices.random() < 0.5 else members[:-place]
        elif what == "move" and len(members) > 1:
            other["params"].append(members.pop(choices.randrange(len(members))))
        elif what == "add" and outside:
            self.optimizer.add_param_group({"params": outside[:place], "lr": choices.choice([1e-3, 1e-2])})
        elif what == "back" and outside:
            members.append(choices.choice(outside))
        elif what == "order":
            choices.shuffle(members)
        elif what == "groups":
            choices.shuffle(groups)
        elif what == "options":
            group["lr"] = choices.choice([1e-3, 2e-2])
        elif what == "replace":
            self.optimizer.param_groups = [{**each, "params": [*each["params"]]} for each in groups]
        elif what == "swap" and outside:
            members[choices.randrange(len(members))] = outside[0]
        if self.freezes:
            left = {id(parameter) for parameter in self.outside()}
            for parameter in self.parameters:
                parameter.requires_grad_(id(parameter) not in left)
