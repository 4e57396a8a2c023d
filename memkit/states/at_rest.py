"""States between steps: adopting states that others have put there, giving states back, saving and loading."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from memkit.core.tensors import parts_of
from memkit.core.torch_state import local_of
from memkit.device.base import Device
from memkit.errors import DiskError, StateOffloadError, warn_user
from memkit.plan.states import Update
from memkit.states.memory import DiskStates, HostStates
from memkit.states.packing import MASTER, OnDisk, copy_state, may_leave, moved_state, pack
from memkit.states.pieces import Piece, Rows, StateRecord
from memkit.transfer.host_memory import refusal_of

if TYPE_CHECKING:
    from memkit.states.state_offload import Members

_HOST = torch.device("cpu")


class StatesAtRest:
    def __init__(self, optimizer: Optimizer, device: Device, host: HostStates, disk: DiskStates) -> None:
        self._optimizer, self._device, self._host, self._disk = optimizer, device, host, disk
        self._has_warned = False

    def is_at_home(self, piece: Piece) -> bool:
        """Tell whether `optimizer.state` has memkit's tensors alone, and a piece on a disk is cut there as it moves."""
        has_own = self._has_own(piece)
        if not has_own or not piece.plan.is_on_disk:
            return has_own
        return piece.lies_as_it_goes(self._optimizer.state.get(piece.records[0].parameter) or {})

    def _has_own(self, piece: Piece) -> bool:
        state, layout = self._optimizer.state, piece.layout
        if any(record.has_master and lacks_master(record, state.get(record.parameter)) for record in piece.records):
            return False
        if piece.plan.is_resident:
            return True
        is_on_host = piece.plan.update is Update.HOST
        for index, record in enumerate(piece.records):
            entries = state.get(record.parameter)
            if layout is None:
                if entries and any(map(_could_leave, entries.values())):
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
                elif name in host or _could_leave(value) or (is_on_host and _is_elsewhere(value)):
                    return False
            if num_known != len(host) or not layout.is_in_place(index):
                return False
        return True

    def adopt_due(self, due: Iterable[Piece], pieces: Iterable[Piece]) -> None:
        away = [piece for piece in due if not self.is_at_home(piece)]
        if away:
            self.separate(pieces)
        for piece in away:
            self.adopt(piece, warns=True)

    def separate(self, pieces: Iterable[Piece]) -> None:
        """Copy each state that lies in another one's place (two parameters exchanged theirs): `adopt` would overwrite it."""
        pieces = list(pieces)
        kept: dict[int, tuple[int, str]] = {}  # which state of which record begins at an address
        for layout, records in [(piece.layout, piece.records) for piece in pieces]:
            if layout is None or layout.span is None or layout.span.whole is None:
                continue
            address = layout.span.whole.data_ptr()
            for record, row in zip(records, layout.tensors, strict=True):
                for tensor in row:
                    kept.update({address + offset: (id(record), tensor.name) for offset in tensor.offsets()})
        strange: list[tuple[dict[Any, Any], Any, Tensor]] = []
        for record in [record for piece in pieces for record in piece.records]:
            entries = self._optimizer.state.get(record.parameter) or {}
            for name, value in entries.items():
                parts = parts_of(value) if may_leave(value) else []
                if {kept.get(part.untyped_storage().data_ptr()) for part in parts} - {None, (id(record), name)}:
                    strange.append((entries, name, value))
        if strange:
            self._device.synchronize()  # copies to it may be under way
        for entries, name, value in strange:
            entries[name] = _own_copy(value, _HOST)

    def adopt(self, piece: Piece, *, warns: bool = False) -> None:
        if self.is_at_home(piece):
            return
        if piece.plan.is_resident:
            self._make_masters(piece)
            return
        standing = self._standing_in(piece)
        if warns and not self._has_warned and not self._has_own(piece):
            self._has_warned = True
            warn_user(
                f"StateOffload: states of {piece.names} were put elsewhere than where it keeps them, perhaps by a library that "
                "moves states to the device. They are taken back. Make the StateOffload after that"
            )
        if piece.left is not None:
            self._device.synchronize(piece.left)
        if standing:
            for _, found in self._disk.read([piece]):
                for number, entries, name in standing:
                    entries[name] = found[number][name]
        known = [dict(host) for host in piece.layout.host] if piece.layout is not None else [{} for _ in piece.records]
        self._make_masters(piece)
        rows: list[dict[str, Tensor]] = []
        for record in piece.records:
            entries = self._optimizer.state.get(record.parameter) or {}
            if piece.plan.update is Update.HOST:
                entries.update({name: value.cpu() for name, value in entries.items() if _is_elsewhere(value)})
            rows.append({name: value for name, value in entries.items() if may_leave(value)})
        tensors, num_bytes = pack(rows)
        with torch.inference_mode(False), torch.no_grad():
            if piece.plan.is_on_disk and num_bytes:
                entries = self._optimizer.state.get(piece.records[0].parameter) or {}
                self._disk.put(piece, tensors, num_bytes, rows, entries)
            elif piece.plan.is_on_disk:
                copies, piece.layout = piece.copies, None
                self._disk.forget(copies, piece)
            elif (now := piece.layout) is not None and tensors == now.tensors and all(map(now.is_in_place, range(len(rows)))):
                for row, mine in zip(rows, now.host, strict=True):
                    for name, value in row.items():
                        if value is not mine[name]:
                            copy_state(mine[name], value)
            elif not num_bytes:
                piece.layout = None
            else:
                own = [
                    {name: moved_state(value, _HOST) if value is before.get(name) else value for name, value in row.items()}
                    for row, before in zip(rows, known, strict=True)
                ]
                layout = self._host.layout_of(piece, tensors, num_bytes)
                for mine, values in zip(layout.host, own, strict=True):
                    for name, tensor in mine.items():
                        copy_state(tensor, values[name])
                piece.layout = layout
        if piece.layout is not None:
            for record, mine in zip(piece.records, piece.layout.host, strict=True):
                if mine:
                    self._optimizer.state[record.parameter].update(mine)

    def _standing_in(self, piece: Piece) -> list[tuple[int, dict[Any, Any], str]]:
        standing = [
            (number, entries, name)
            for number, record in enumerate(piece.records)
            for entries in [self._optimizer.state.get(record.parameter) or {}]
            for name, value in entries.items()
            if isinstance(value, OnDisk)
        ]
        for number, entries, name in standing:
            known = {} if piece.layout is None else piece.layout.host[number]
            if not entries[name].is_of(piece.records[number], name) or name not in known:
                raise StateOffloadError(
                    f'optimizer.state has {entries[name]} as "{name}" of {piece.records[number].name}, where it stands for '
                    "nothing. States on the disk can't be passed on: take them from optimizer.state_dict()"
                )
        return standing

    def read(self, pieces: Iterable[Piece]) -> dict[OnDisk, Tensor]:
        stored = [piece for piece in pieces if piece.plan.is_on_disk and piece.layout is not None]
        if not stored:
            return {}
        if refusal := refusal_of(sum(piece.plan.state_bytes for piece in stored), 0):
            raise refusal
        found: dict[OnDisk, Tensor] = {}
        for piece, rows in self._disk.read(stored):
            assert piece.layout is not None
            for host, values in zip(piece.layout.host, rows, strict=True):
                found.update({host[name]: value for name, value in values.items()})
        return found

    def bring(self, piece: Piece) -> None:
        self._make_masters(piece)
        for record in piece.records:
            entries = self._optimizer.state.get(record.parameter) or {}
            for name, value in entries.items():
                if may_leave(value):
                    entries[name] = moved_state(value, self._device.torch_device)

    def _make_masters(self, piece: Piece) -> None:
        """Give parameters float32 copies, and make their states of the same precision float32."""
        for record in piece.records:
            parameter, entries = record.parameter, self._optimizer.state.get(record.parameter)
            if not record.has_master or not entries:
                continue
            if lacks_master(record, entries):
                entries[MASTER] = parameter.detach().to(torch.float32)
            for name, value in entries.items():
                if isinstance(value, Tensor) and value.dtype == parameter.dtype:
                    entries[name] = value.to(torch.float32)

    def _bring_numbers(self, record: StateRecord, entries: dict[Any, Any]) -> None:
        """Bring counts of steps, and states of parameters without dimensions or elements, to where the optimizer needs them."""
        group = self._optimizer.param_groups[record.group]
        step = entries.get("step")
        if isinstance(step, Tensor) and (group.get("fused") or group.get("capturable")):
            entries["step"] = step.to(record.parameter.device)
        if local_of(record.parameter).dim() == 0 or not local_of(record.parameter).numel():
            numbers = {name: value for name, value in entries.items() if isinstance(value, Tensor) and not may_leave(value)}
            entries.update({name: value.to(record.parameter.device) for name, value in numbers.items() if name != "step"})

    def give_back(self, pieces: Iterable[Piece]) -> None:
        """Make all states tensors of their own again, on the parameters' device, or in host memory where that has no room."""
        fit = True
        for piece in pieces:
            rows = piece.layout.host if piece.layout is not None else [{} for _ in piece.records]
            found = self._found_in(piece, rows)
            for record, host, values in zip(piece.records, rows, found, strict=True):
                entries = self._optimizer.state.get(record.parameter)
                if piece.plan.update is Update.HOST and entries and record.group >= 0:
                    self._bring_numbers(record, entries)
                for name, known in host.items():
                    if entries is None or entries.get(name) is not known:
                        continue
                    try:
                        entries[name] = _own_copy(values[name], record.parameter.device)
                    except torch.OutOfMemoryError:
                        fit = False
                        entries[name] = _own_copy(values[name], _HOST)
        if not fit:
            warn_user(
                "StateOffload: the device has no room for all states. Those without room are in host memory now: move them, or "
                "save them, before the optimizer steps by itself"
            )

    def _found_in(self, piece: Piece, rows: Sequence[Mapping[str, Any]]) -> Rows:
        if not piece.plan.is_on_disk or piece.layout is None:
            return rows
        for is_again in (False, True):  # of the first time the error may be another's
            try:
                ((_, found),) = self._disk.read([piece])
            except DiskError as error:
                if is_again:
                    warn_user(
                        f"StateOffload: the states of {piece.names} can't be read from the disk any more, and are lost: "
                        f"{error} The optimizer begins anew for them; load a checkpoint to go on as before"
                    )
                    for record in piece.records:
                        self._optimizer.state.pop(record.parameter, None)
            else:
                return found
        return rows


def lacks_master(record: StateRecord, entries: Mapping[Any, Any] | None) -> bool:
    if not entries or MASTER in entries:
        return False
    size = record.parameter.size()
    return any(may_leave(value) or (isinstance(value, Tensor) and value.size() == size) for value in entries.values())


def _could_leave(value: object) -> bool:
    return may_leave(value) or isinstance(value, OnDisk)


def _is_elsewhere(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu" and (not value.dim() or not local_of(value).numel())


def _own_copy(tensor: Tensor, torch_device: torch.device) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return moved_state(tensor, torch_device)


def put_states(loaded: Mapping[str, Any], optimizer: Optimizer, members: Members, torch_device: torch.device) -> None:
    """Put loaded states where they belong, each in its own precision and not by way of the device."""
    owned = [(group, parameter) for group in optimizer.param_groups for parameter in group["params"]]
    found = dict(zip(chain.from_iterable(group["params"] for group in loaded["param_groups"]), owned, strict=True))
    state = optimizer.state
    masters = {id(record.parameter) for piece in members.pieces for record in piece.records if record.has_master}
    for key, given in dict(loaded["state"]).items():
        if key not in found:
            state[key] = given
            continue
        group, parameter = found[key]
        dtypes = {} if id(parameter) in masters else {item.name: item.dtype for item in members.kept.get(id(parameter), ())}
        state[parameter] = {name: _placed(name, value, group, torch_device, dtypes.get(name)) for name, value in given.items()}
    optimizer.__setstate__({"state": state, "param_groups": optimizer.param_groups})


def _placed(name: object, value: Any, group: Mapping[str, Any], torch_device: torch.device, dtype: torch.dtype | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    if name == "step":
        on_device = group.get("fused") or group.get("capturable")
        return value.to(torch.float32).to(torch_device, copy=True) if on_device else value.clone()
    if may_leave(value) and dtype in (None, value.dtype):
        return value.detach()  # it is copied as it is adopted
    if may_leave(value):
        return value.detach().to(dtype=dtype, device="cpu", copy=value.device.type != "cpu")
    return value.detach().to(torch_device, copy=True)


def with_host_copies(state_dict: dict[str, Any], on_disk: Mapping[OnDisk, Tensor]) -> dict[str, Any]:
    """Return a state dict with all tensors in host memory, in the order of the parameters, in which ranks gather shards."""

    def saved(value: Any) -> Any:
        if isinstance(value, OnDisk):
            return on_disk[value]
        return value.cpu() if isinstance(value, Tensor) and value.dim() and value.device.type != "cpu" else value

    state = {
        key: {name: saved(value) for name, value in entries.items()} if isinstance(entries, dict) else entries
        for key, entries in sorted(state_dict["state"].items(), key=_place_of)
    }
    return {**state_dict, "state": state}


def _place_of(item: tuple[Any, Any]) -> float:
    return item[0] if isinstance(item[0], int) else math.inf
