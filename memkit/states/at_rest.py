"""Where states are between steps, whoever has put them there: adopting them, giving them back, saving and loading."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from memkit.device.base import Device
from memkit.errors import warn_user
from memkit.plan import Update
from memkit.states.host_memory import HostStates
from memkit.states.packing import copy_state, may_leave, moved_state, pack
from memkit.states.pieces import MASTER, Layout, Piece, StateRecord
from memkit.states.trial import KeptState

_HOST = torch.device("cpu")


class StatesAtRest:
    """What `optimizer.state` has of pieces between steps.

    Args:
        optimizer: whose states they are.
        device: where the parameters are.
        host: where the states are.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: Device, host: HostStates) -> None:
        self._optimizer = optimizer
        self._device = device
        self._host = host
        self._has_warned = False

    def is_at_home(self, piece: Piece) -> bool:
        """Tell whether `optimizer.state` has what was put there, and nothing else that could leave."""
        state, layout = self._optimizer.state, piece.layout
        if any(record.has_master and lacks_master(record, state.get(record.parameter)) for record in piece.records):
            return False
        if piece.plan.is_resident:
            return True
        is_on_host = piece.plan.update is Update.HOST
        for index, record in enumerate(piece.records):
            entries = state.get(record.parameter)
            if layout is None:
                if entries and any(map(may_leave, entries.values())):
                    return False
                continue
            host = layout.host[index]
            if not entries:
                if host:
                    return False
                continue
            num_known = 0
            for name, value in entries.items():
                if value is host.get(name, self):
                    num_known += 1
                elif name in host or may_leave(value) or (is_on_host and _is_elsewhere(value)):
                    return False
            if num_known != len(host):
                return False
        return True

    def adopt(self, piece: Piece, *, warns: bool = False) -> None:
        """Take over what others have put into `optimizer.state`: copy it to host memory, unless the piece stays on the device.

        Args:
            piece: what to take over.
            warns: whether nobody should have put anything there.
        """
        if self.is_at_home(piece):
            return
        if piece.plan.is_resident:
            self._make_masters(piece)
            return
        if warns and not self._has_warned:
            self._has_warned = True
            warn_user(
                f"StateOffload: states of {piece.names} were put elsewhere than where it keeps them, perhaps by a library that "
                "moves states to the device. They are taken back to host memory. Make the StateOffload after that"
            )
        if piece.left is not None:
            self._device.synchronize(piece.left.done)
        known = [dict(host) for host in piece.layout.host] if piece.layout is not None else [{} for _ in piece.records]
        rows: list[dict[str, Tensor]] = []
        for record in piece.records:
            entries = self._optimizer.state.get(record.parameter) or {}
            if record.has_master and entries:
                self._make_master(record, entries)
            if piece.plan.update is Update.HOST:
                entries.update({name: value.cpu() for name, value in entries.items() if _is_elsewhere(value)})
            rows.append({name: value for name, value in entries.items() if may_leave(value)})
        tensors, num_bytes = pack(rows)
        with torch.inference_mode(False), torch.no_grad():
            if piece.layout is not None and tensors == piece.layout.tensors:
                for row, mine in zip(rows, piece.layout.host, strict=True):
                    for name, value in row.items():
                        if value is not mine[name]:
                            copy_state(mine[name], value)
            elif not num_bytes:
                piece.layout = None
            else:
                span = self._host.room_for(piece, num_bytes)
                own = [
                    {name: moved_state(value, _HOST) if value is before.get(name) else value for name, value in row.items()}
                    for row, before in zip(rows, known, strict=True)
                ]
                host = tuple({tensor.name: tensor.on_host(span) for tensor in row} for row in tensors)
                for mine, values in zip(host, own, strict=True):
                    for name, tensor in mine.items():
                        copy_state(tensor, values[name])
                piece.layout = Layout(span, tensors, host)
        if piece.layout is not None:
            for record, mine in zip(piece.records, piece.layout.host, strict=True):
                if mine:
                    self._optimizer.state[record.parameter].update(mine)

    def bring(self, piece: Piece) -> None:
        """Have states that were loaded, and stay on the device, be there."""
        self._make_masters(piece)
        for record in piece.records:
            entries = self._optimizer.state.get(record.parameter) or {}
            for name, value in entries.items():
                if may_leave(value):
                    entries[name] = moved_state(value, record.parameter.device)

    def _make_masters(self, piece: Piece) -> None:
        for record in piece.records:
            entries = self._optimizer.state.get(record.parameter)
            if record.has_master and entries:
                self._make_master(record, entries)

    def _make_master(self, record: StateRecord, entries: dict[Any, Any]) -> None:
        """Give a parameter that was stepped itself so far a float32 copy, and the states of its precision that of the copy."""
        parameter = record.parameter
        if lacks_master(record, entries):
            entries[MASTER] = parameter.detach().to(torch.float32)
        for name, value in entries.items():
            if isinstance(value, Tensor) and value.dtype == parameter.dtype:
                entries[name] = value.to(torch.float32)

    def _bring_numbers(self, record: StateRecord, entries: dict[Any, Any]) -> None:
        """Have the count of steps be where the optimizer keeps it for a parameter on the device, and the states of a parameter
        without dimensions, which are numbers as well, where that is."""
        group = self._optimizer.param_groups[record.group]
        step = entries.get("step")
        if isinstance(step, Tensor) and (group.get("fused") or group.get("capturable")):
            entries["step"] = step.to(record.parameter.device)
        if record.parameter.dim() == 0:
            numbers = {name: value for name, value in entries.items() if isinstance(value, Tensor) and not value.dim()}
            entries.update({name: value.to(record.parameter.device) for name, value in numbers.items() if name != "step"})

    def give_back(self, pieces: Iterable[Piece]) -> None:
        """Have all states be tensors of their own again, where the parameters are. Where there is no room for some, these are
        tensors in host memory then, and a warning says so."""
        fit = True
        for piece in pieces:
            rows: Iterable[dict[str, Tensor]] = piece.layout.host if piece.layout is not None else [{} for _ in piece.records]
            for record, host in zip(piece.records, rows, strict=True):
                entries = self._optimizer.state.get(record.parameter)
                if piece.plan.update is Update.HOST and entries and record.group >= 0:
                    self._bring_numbers(record, entries)
                for name, tensor in host.items():
                    if entries is None or entries.get(name) is not tensor:
                        continue
                    try:
                        entries[name] = _own_copy(tensor, record.parameter.device)
                    except torch.OutOfMemoryError:
                        fit = False
                        entries[name] = _own_copy(tensor, _HOST)
        if not fit:
            warn_user(
                "StateOffload: the device has no room for all states. Those without room are in host memory now: move them, or "
                "save them, before the optimizer steps by itself"
            )


def lacks_master(record: StateRecord, entries: Mapping[Any, Any] | None) -> bool:
    """Tell whether a parameter has states, and no float32 copy yet."""
    if not entries or MASTER in entries:
        return False
    size = record.parameter.size()
    return any(may_leave(value) or (isinstance(value, Tensor) and value.size() == size) for value in entries.values())


def _is_elsewhere(value: object) -> bool:
    """Tell whether a state is a number that is not in host memory."""
    return isinstance(value, Tensor) and not value.dim() and value.device.type != "cpu"


def _own_copy(tensor: Tensor, torch_device: torch.device) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return moved_state(tensor, torch_device)


class Loading:
    """One `load_state_dict`: torch loads the groups, the states are put where they belong without a way over the device.

    Args:
        state_dict: what is loaded.
    """

    def __init__(self, state_dict: Mapping[str, Any]) -> None:
        self._state = dict(state_dict["state"])
        self._numbers = [group["params"] for group in state_dict["param_groups"]]

    @staticmethod
    def without_states(state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return what torch is to load."""
        return {**state_dict, "state": {}}

    def finish(self, optimizer: torch.optim.Optimizer, kept: Mapping[int, list[KeptState]], masters: set[int]) -> None:
        """Put states into `optimizer.state`, each of its own precision, as copies in host memory where they may leave.

        Args:
            optimizer: what has loaded the groups.
            kept: what it keeps for a parameter, by the parameter's id.
            masters: ids of parameters that have a float32 copy.
        """
        members = [(group, parameter) for group in optimizer.param_groups for parameter in group["params"]]
        found = dict(zip(chain.from_iterable(self._numbers), members, strict=True))
        state = optimizer.state
        for key, entries in self._state.items():
            if key not in found:
                state[key] = entries
                continue
            group, parameter = found[key]
            dtypes = {item.name: item.dtype for item in kept.get(id(parameter), ())}
            keeps = id(parameter) in masters
            state[parameter] = {
                name: self._placed(name, value, group, parameter, None if keeps else dtypes.get(name))
                for name, value in entries.items()
            }
        optimizer.__setstate__({"state": state, "param_groups": optimizer.param_groups})

    @staticmethod
    def _placed(name: object, value: Any, group: Mapping[str, Any], parameter: Tensor, dtype: torch.dtype | None) -> Any:
        if not isinstance(value, Tensor):
            return value
        if name == "step":
            on_device = group.get("fused") or group.get("capturable")
            return value.to(torch.float32).to(parameter.device, copy=True) if on_device else value.clone()
        if may_leave(value) and dtype in (None, value.dtype):
            return value.detach()  # it is copied as it is adopted
        if may_leave(value):
            return value.detach().to(dtype=dtype or value.dtype, device="cpu", copy=value.device.type != "cpu")
        return value.detach().to(parameter.device, copy=True)


def with_host_copies(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Have what is saved be in host memory, also what stays on the device: other code counts on one place for all."""
    state = {
        key: {
            name: value.cpu() if isinstance(value, Tensor) and value.dim() and value.device.type != "cpu" else value
            for name, value in entries.items()
        }
        if isinstance(entries, dict)
        else entries
        for key, entries in state_dict["state"].items()
    }
    return {**state_dict, "state": state}
