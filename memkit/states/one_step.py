"""One step of the user's optimizer, made of steps of parts, whose writes to groups and attributes are written once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from memkit.core import torch_private
from memkit.core.torch_state import is_dtensor, local_of
from memkit.errors import StateOffloadError
from memkit.optimizers import shells
from memkit.optimizers.shells import Changes, Group, StateDict
from memkit.states.packing import described, lie_alike, local_gradient, note_written, shard_over

if TYPE_CHECKING:
    from memkit.states.pieces import StateRecord

Written = tuple[dict[int, Changes], Changes]
_MEMBERS = ("params", "param_names")


@dataclass(frozen=True, slots=True)
class Prepared:
    """The input of a step of some parameters: a shell and its groups, what these were, and tensors nobody may write to."""

    shell: torch.optim.Optimizer
    attributes: Mapping[str, Any]
    cuts: Mapping[int, Group]
    before: Mapping[int, Group]
    watched: list[tuple[str, Tensor, int]]
    local: LocalStep | None


class OneStep:
    """A step under way: each part begins with the groups as they were, with `copies` of their tensors: others write those."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, copies: bool = False) -> None:
        self._optimizer = optimizer
        self._copies = copies
        self._own: list[Group] = [*optimizer.param_groups]  # the user's; by the end of the step they may be elsewhere
        self._groups: list[Group] = [*self._own]
        self._attributes: dict[str, Any] = {}
        if copies:  # it goes on with the present groups and attributes, even if they are set meanwhile
            self._groups = [{**group, **_copied(group)} for group in self._groups]
            torchs = ("param_groups", "state", "defaults")
            own = {name: value for name, value in vars(optimizer).items() if name not in torchs and not name.endswith("_hooks")}
            self._attributes = {**own, **_copied(own)}
        self._step, self._hooks = shells.step_of(optimizer), shells.hooks_of(optimizer)
        self._tensors: dict[int, list[tuple[str, Tensor]]] = {}
        self._of_groups: dict[int, Changes] = {}
        self._of_optimizer: Changes | None = None
        self._is_over = False  # whether the step's writes to groups without due parameters are written
        self._noted: list[_Noted] = []
        self.awaited: set[int] = set()

    def prepare(self, records: Sequence[StateRecord], keys: Sequence[Tensor], state: StateDict) -> Prepared:
        has_shards = False
        members: dict[int, list[int]] = {}
        for index, record in enumerate(records):
            members.setdefault(record.group, []).append(index)
            has_shards = has_shards or record.is_shard
        local = LocalStep(records, keys, state) if has_shards else None
        keys = keys if local is None else local.keys
        cuts: dict[int, Group] = {}
        for number, indices in members.items():
            if number >= len(self._groups):  # it was added since the backward has begun to step
                added = self._optimizer.param_groups[len(self._own) :]
                self._own += added
                self._groups += [{**group, **_copied(group)} for group in added] if self._copies else added
            group = self._groups[number]
            if number not in self._tensors:
                self._tensors[number] = shells.tensors_in(group)
            cut = cuts[number] = {**group, "params": [keys[index] for index in indices]}
            if len(group.get("param_names") or ()) == len(group["params"]):
                cut["param_names"] = [group["param_names"][records[index].position] for index in indices]
        given = state if local is None else local.state
        shell = shells.shell_of(self._optimizer, list(cuts.values()), given, hooks=self._hooks)
        vars(shell).update(self._attributes)
        before = {number: dict(cut) for number, cut in cuts.items()}
        watched = []
        for number in cuts:
            for name, value in self._tensors[number]:
                watched.append((name, value, torch_private.version_of(value)))
        return Prepared(shell, dict(vars(shell)), cuts, before, watched, local)

    def step(self, prepared: Prepared) -> Written:
        self._step(prepared.shell)
        of_optimizer = shells.changes_of_shell(prepared.attributes, prepared.shell)
        self._check(self._of_optimizer, of_optimizer)
        found = {}
        for number, cut in prepared.cuts.items():
            found[number] = shells.changes_of_group(prepared.before[number], cut)
            self._check(self._of_groups.get(number), found[number])
        for name, value, version in prepared.watched:
            if torch_private.version_of(value) != version:
                self._refuse(name)
        if prepared.local is not None:
            prepared.local.finish()
        return found, of_optimizer

    def _check(self, known: Changes | None, found: Changes) -> None:
        name = shells.differing(known, found) if known is not None and (known or found) else None
        if name is not None:
            self._refuse(name)

    def _refuse(self, name: str) -> None:
        raise StateOffloadError(
            f"StateOffload steps parameters in pieces, and {type(self._optimizer).__name__} keeps state of all of them: two "
            f'pieces of one step have written different values to "{name}". The piece was not stepped. Use an optimizer '
            "that steps each parameter by its own gradient"
        )

    def leave(self, written: Written) -> list[partial[None]]:
        of_groups, of_optimizer = written
        return [partial(self._of_groups.update, of_groups), partial(setattr, self, "_of_optimizer", of_optimizer)]

    def write_changes(self) -> None:
        for number, changes in self._of_groups.items():
            if changes:
                self._now(self._own[number]).update(changes)
        if self._of_optimizer is not None:
            vars(self._optimizer).update(self._of_optimizer)

    def _now(self, own: Group) -> Group:
        groups = self._optimizer.param_groups
        if any(group is own for group in groups):
            return own
        members = [*map(id, own["params"])]
        return next((group for group in groups if [*map(id, group["params"])] == members), own)

    def write_of_others(self, hollow: torch.optim.Optimizer) -> None:
        if self._is_over:
            return
        due = [*map(self._own.__getitem__, (*self._of_groups, *self.awaited))]
        stepped = {*map(id, due)}
        for group, cut in zip(self._optimizer.param_groups, hollow.param_groups, strict=True):
            if id(group) not in stepped and not any(self._now(own) is group for own in due):
                group.update(shells.changes_of_group(group, cut))
        if self._of_optimizer is None and not self.awaited:
            vars(self._optimizer).update(shells.changes_of_shell(vars(self._optimizer), hollow))
        self._is_over = True

    def note_options(self) -> None:
        """Note the groups when the backward begins to step: their entries must stay until it is over."""
        self._noted = _options_of(self._optimizer)

    def forget_options(self) -> None:
        self._noted = []

    def check_options(self) -> None:
        """Raise if an entry of a group was set since, and forget the noted ones. Other groups may have come."""
        if not self._noted:
            return
        now = _options_of(self._optimizer) + [_Noted({}, [], [])] * len(self._noted)  # a group that has gone has none
        changed = next(filter(None, map(_Noted.changed_in, self._noted, now)), None)
        if changed is not None:
            self._noted = []
            raise StateOffloadError(
                f'"{changed}" of a group was set between the backward and optimizer.step(), and the backward has stepped '
                "parameters with what it was before. Set it before the backward or after optimizer.step(), or use "
                'when="step". Another optimizer.step() ends this step as it is'
            )

    def write_all(self) -> None:
        self.write_changes()
        hollow = shells.hollow_shell(self._optimizer)
        self._step(hollow)
        self.write_of_others(hollow)


def _copied(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _copy_of(value) for name, value in entries.items() if isinstance(value, Tensor | tuple)}


def _copy_of(value: Any) -> Any:
    if type(value) is tuple and any(isinstance(item, Tensor) for item in value):
        return tuple(map(_copy_of, value))
    return value.clone() if isinstance(value, Tensor) else value


def run_closure(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return tuple(args), kwargs
    with torch.enable_grad():
        result = closure()
    if len(args) > 1:
        return (args[0], lambda: result, *args[2:]), kwargs
    return tuple(args), {**kwargs, "closure": lambda: result}


@dataclass(frozen=True, slots=True)
class _Noted:
    entries: dict[str, Any]
    versions: list[tuple[str, int]]
    members: list[Tensor]

    def changed_in(self, now: _Noted) -> str | None:
        names = [*shells.changes_of_group(self.entries, now.entries)]
        names += [name for name, _ in {*now.versions} - {*self.versions}]
        names += ["params"] * ([*map(id, self.members)] != [*map(id, now.members)])
        return names[0] if names else None


def _options_of(optimizer: torch.optim.Optimizer) -> list[_Noted]:
    return [
        _Noted({key: it for key, it in group.items() if key not in _MEMBERS}, shells.versions_in(group), [*group["params"]])
        for group in optimizer.param_groups
    ]


class LocalStep:
    """The input of a step over the local tensors of shards, and shards made of its results."""

    def __init__(self, records: Sequence[StateRecord], keys: Sequence[Tensor], state: StateDict) -> None:
        self._rows = list(zip(records, keys, strict=True))
        self._state = state
        self.keys: list[Tensor] = []
        self.state: StateDict = defaultdict(dict)
        self._known: dict[int, tuple[Tensor, Tensor]] = {}
        for record, key in self._rows:
            own = _stand_in(key) if is_dtensor(key) else key
            self.keys.append(own)
            entries = state.get(key)
            if entries:
                self.state[own] = self._local_entries(record, entries) if record.is_shard else entries

    def _local_entries(self, record: StateRecord, entries: Mapping[Any, Any]) -> dict[Any, Any]:
        found = {}
        for name, value in entries.items():
            found[name] = value
            if isinstance(value, Tensor) and lie_alike(value, record.parameter):
                found[name] = local_of(value)
                self._known[id(found[name])] = found[name], value
            elif isinstance(value, Tensor) and value.dim():
                raise StateOffloadError(
                    f'StateOffload: {record.name} is a shard, and needs states that are split in the same way; found "{name}", '
                    f"a {described(value)}. Load states by "
                    "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, which splits them"
                )
        return found

    def finish(self) -> None:
        for (record, key), own in zip(self._rows, self.keys, strict=True):
            made = self.state.get(own)
            if made is None:
                self._state.pop(key, None)
            elif record.is_shard:
                self._state[key] = {name: self._shard_of(record, name, value) for name, value in made.items()}
            else:
                self._state[key] = made
            if own is not key:
                local = local_of(key)
                if own.data_ptr() != local.data_ptr():  # the class has put another tensor there
                    with torch.no_grad():
                        local.copy_(own)
                note_written(key)

    def _shard_of(self, record: StateRecord, name: Any, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim():
            return value
        if id(value) in self._known:
            return self._known[id(value)][1]
        if value.size() != local_of(record.parameter).size():
            raise StateOffloadError(
                f'StateOffload: the optimizer has made "{name}" of size {list(value.size())} for {record.name}, a shard with '
                f"{list(local_of(record.parameter).size())} here. Use an optimizer that steps each element by itself"
            )
        return shard_over(value, record.parameter)


def _stand_in(key: Tensor) -> nn.Parameter:
    stand_in = nn.Parameter(local_of(key), requires_grad=key.requires_grad)
    vars(stand_in).update(vars(key))
    stand_in.grad = local_gradient(key)
    return stand_in
