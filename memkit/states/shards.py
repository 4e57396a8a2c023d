"""Parameters that are shards (`DTensor`): their local tensors are stepped, by elementwise optimizers alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from memkit.core.torch_state import is_dtensor, local_of
from memkit.errors import StateOffloadError

if TYPE_CHECKING:
    from memkit.optimizers.shells import StateDict
    from memkit.states.pieces import StateRecord


def local_gradient(parameter: Tensor) -> Tensor | None:
    grad = parameter.grad
    return None if grad is None else local_of(grad)


def shard_over(local: Tensor, like: Tensor) -> Tensor:
    """Return a `DTensor` with the size and placements of another one, over a local tensor of any device and dtype."""
    with torch.inference_mode(False), torch.no_grad():
        empty: Any = torch.empty_like(like.detach(), dtype=local.dtype, device="meta")
        names, context = empty.__tensor_flatten__()
        inner = {name: getattr(empty, name) for name in names}  # newer DTensors name their mesh as well
        inner = {name: local.detach() if isinstance(value, Tensor) else value for name, value in inner.items()}
        made: Tensor = type(empty).__tensor_unflatten__(inner, context, like.size(), like.stride())
    return made


def shard_like(parameter: Tensor, local: Tensor) -> Tensor:
    """Return a local tensor as a state of a parameter: as a `DTensor` if the parameter is one, else as it is."""
    return shard_over(local, parameter) if is_dtensor(parameter) else local


def write_local(parameter: Tensor, values: Tensor) -> None:
    local_of(parameter).copy_(values)
    note_written(parameter)


def note_written(parameter: Tensor) -> None:
    """Raise the version of a `DTensor` whose local tensor was written to: a write there does not count in the `DTensor`."""
    if is_dtensor(parameter):
        torch.autograd.graph.increment_version(parameter)


def are_one(one: Tensor, other: Tensor) -> bool:
    return local_of(one).data_ptr() == local_of(other).data_ptr()


def lie_alike(one: Tensor, other: Tensor) -> bool:
    if not is_dtensor(one) or not is_dtensor(other):
        return False
    first: Any = one
    second: Any = other
    return bool(first.device_mesh == second.device_mesh and tuple(first.placements) == tuple(second.placements))


class LocalStep:
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


def described(tensor: Any) -> str:
    split = f" with placements {tuple(tensor.placements)}" if is_dtensor(tensor) else ""
    return f"{type(tensor).__name__}{split}"
