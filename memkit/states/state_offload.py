"""`StateOffload`: an optimizer's states in host memory, and its step made piece by piece."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

from memkit.core.features import EnteredOnce, NotCopied
from memkit.core.forks import forked
from memkit.core.hooks import HookSet, put_last
from memkit.core.sizes import check_budget_bytes, format_bytes
from memkit.core.torch_state import local_of
from memkit.device import Device
from memkit.errors import HostMemoryError, StateOffloadError, warn_user
from memkit.optimizers import KeptState, needs_master
from memkit.optimizers.shells import hollow_shell
from memkit.optimizers.steppers import stepper_of
from memkit.plan import ParameterCosts, StatePlan, plan_states
from memkit.plan.states import Update, aligned, is_large
from memkit.states import asked
from memkit.states.at_rest import StatesAtRest, put_states, with_host_copies
from memkit.states.device_steps import DeviceSteps
from memkit.states.host_steps import HostSteps
from memkit.states.in_backward import BackwardSteps, LayeredSteps
from memkit.states.memory import DiskStates, HostStates, StateSlots
from memkit.states.one_step import OneStep, run_closure
from memkit.states.packing import MASTER, bytes_of, may_leave
from memkit.states.pieces import CutPiece, Piece, StateRecord
from memkit.states.shard_steps import ShardSteps
from memkit.states.stepping import ForwardOverlap, Stepping
from memkit.states.trial import find_elementwise, refuse_by_kind, refuse_mixed_shards, try_out
from memkit.transfer.disk import Disk
from memkit.transfer.lanes import lanes_of

HALF_LOADED = "optimizer.load_state_dict() was interrupted: some parameters have loaded states, others none"


class Members:
    def __init__(self, optimizer: torch.optim.Optimizer, *, master: torch.dtype | None, torch_device: torch.device) -> None:
        self._optimizer, self._master, self._torch_device = optimizer, master, torch_device
        self._process = os.getpid()
        self._replaced: Any = None
        self.kept: dict[int, list[KeptState]] = {}
        self.draws = False  # whether steps draw random numbers, so that parameters must be stepped in the order of the groups
        self._known: list[list[int]] = []
        self.pieces: list[Piece] = []

    def try_out(self) -> None:
        self.kept, self.draws = try_out(self._optimizer, torch_device=self._torch_device, master=self._master)
        refuse_mixed_shards(self._optimizer, torch_device=self._torch_device, master=self._master)

    def costs(self) -> list[ParameterCosts]:
        costs = {record: self._cost(record) for record in self.records()}
        large = defaultdict[int, list[StateRecord]](list)
        for record, cost in costs.items():
            if is_large(cost) and local_of(record.parameter).is_contiguous():
                large[record.group].append(record)
        groups = [
            {**self._optimizer.param_groups[number], "params": [record.parameter for record in records]}
            for number, records in large.items()
        ]
        found = find_elementwise(self._optimizer, groups, torch_device=self._torch_device, master=self._master)
        for records, is_elementwise in zip(large.values(), found, strict=True):
            costs.update({record: replace(costs[record], is_elementwise=is_elementwise) for record in records})
        return list(costs.values())

    def _cost(self, record: StateRecord) -> ParameterCosts:
        parameter = local_of(record.parameter)
        entries = self._optimizer.state.get(record.parameter) or {}
        sizes = [bytes_of(value) for value in entries.values() if may_leave(value)]
        if not sizes:
            sizes = [state.num_bytes for state in self.kept[id(record.parameter)] if not state.is_number]
        if record.has_master and MASTER not in entries:
            sizes.append(4 * parameter.numel())
        return ParameterCosts(
            name=record.name,
            numel=parameter.numel(),
            parameter_bytes=aligned(parameter.nbytes),
            state_bytes=sum(map(aligned, sizes)),
            has_master=record.has_master,
        )

    def records(self) -> Iterator[StateRecord]:
        master = self._master
        for number, group in enumerate(self._optimizer.param_groups):
            names = group.get("param_names") or []
            if len(names) != len(group["params"]):
                names = [f"parameter {number}.{index}" for index in range(len(group["params"]))]
            for position, (name, parameter) in enumerate(zip(names, group["params"], strict=True)):
                record = StateRecord(name, parameter, has_master=master is not None and needs_master(parameter, master))
                record.group, record.position = number, position
                yield record

    def add(self, plan: StatePlan, records: list[StateRecord]) -> list[Piece]:
        added = []
        for planned in plan.pieces:
            kind = CutPiece if len(planned.parts) > 1 else Piece
            added.append(kind(planned, [records[index] for index in planned.parameters]))
        self.pieces = [*self.pieces, *added]
        return added

    def refuse_fork(self) -> None:
        if os.getpid() != self._process:
            raise forked("StateOffload")

    def refuse_use(self) -> None:
        self.refuse_fork()
        if self.is_half_loaded:
            raise StateOffloadError(f"{HALF_LOADED}. Load the optimizer and the model again")
        self._replaced = None

    @property
    def is_half_loaded(self) -> bool:
        return self._replaced is not None and self._replaced is not self._optimizer.state

    def begin_loading(self) -> None:
        """Until `end_loading`, the states are not the old ones once torch has put others in their place."""
        if not self.is_half_loaded:
            self._replaced = self._optimizer.state

    def end_loading(self) -> None:
        self._replaced = None

    def have_changed(self) -> bool:
        if os.getpid() != self._process or self._replaced is not None:
            self.refuse_use()
        return [[*map(id, group["params"])] for group in self._optimizer.param_groups] != self._known

    def are_as_many(self) -> bool:
        return list(map(len, self._known)) == [len(group["params"]) for group in self._optimizer.param_groups]

    def place(self) -> None:
        groups = self._optimizer.param_groups
        places = {id(each): (number, at) for number, group in enumerate(groups) for at, each in enumerate(group["params"])}
        for piece in self.pieces:
            for record in piece.records:
                record.group, record.position = places.get(id(record.parameter), (-1, -1))
        self._known = [[*map(id, group["params"])] for group in groups]

    def find_due(self, *, leaves_done: bool) -> list[Piece]:
        found = []
        for piece in self.pieces:
            piece.due = [record for record in piece.records if record.is_due() and not (leaves_done and record.is_done())]
            if piece.due:
                found.append(piece)
        return found


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateStats:
    """The bytes that a `StateOffload` has moved since it was made, and its present memory."""

    num_pieces: int
    """Pieces that the states are in."""
    num_resident: int
    """Pieces whose states stay on the device."""
    num_on_host: int
    """Pieces that are stepped on the host."""
    num_steps: int
    """Steps of the optimizer."""
    host_bytes: int
    """Host memory that is held, pinned where the system does that."""
    room_bytes: int
    """Bytes of the device for pieces on their way, and for the parameters of one piece as they were before its step."""
    resident_bytes: int
    """Bytes of states that stay on the device, as planned."""
    h2d_bytes: int
    """Bytes that were copied to the device."""
    d2h_bytes: int
    """Bytes that were copied to the host."""
    host_step_s: float = 0.0
    """Seconds of steps on the host, without their waits for gradients."""
    disk_bytes: int = 0
    """Bytes of states that lie on the disk, as planned."""
    disk_read_bytes: int = 0
    """Bytes that were read from there."""
    disk_written_bytes: int = 0
    """Bytes that were written there."""

    def __str__(self) -> str:
        rows = [
            ("pieces", f"{self.num_pieces}, {self.num_resident} of them stay, {self.num_on_host} are stepped on the host"),
            ("steps", str(self.num_steps)),
            ("host memory", format_bytes(self.host_bytes)),
            ("room on the device", format_bytes(self.room_bytes)),
            ("states that stay there", format_bytes(self.resident_bytes)),
            ("moved to the device", format_bytes(self.h2d_bytes)),
            ("moved to the host", format_bytes(self.d2h_bytes)),
        ]
        if self.num_on_host:
            rows.append(("stepped on the host", f"{self.host_step_s:.3g} s"))
        if self.disk_bytes:
            rows += [
                ("states on the disk", format_bytes(self.disk_bytes)),
                ("read from there", format_bytes(self.disk_read_bytes)),
                ("written there", format_bytes(self.disk_written_bytes)),
            ]
        return tabulate(rows, tablefmt="plain", disable_numparse=True)


class StateOffload(NotCopied, EnteredOnce):
    """Keep an optimizer's states in host memory, and step it piece by piece, bit for bit as it would step by itself.

    The optimizer stays the user's own: of any class whose parameters are stepped each by its own gradient. So do the loop, the
    schedulers, the groups, clipping, accumulation and `torch.amp.GradScaler`. `optimizer.step()` brings the states of some
    parameters to the device, has the class step these, takes the states back, and goes on with the next, whose states are on
    their way by then.

    Between steps `optimizer.state` has tensors in host memory; `state_dict()` returns those, and `load_state_dict()` loads
    them without a way over the device, each of its own precision. It goes on until `close()`, or the end of a `with`.

    Args:
        optimizer: over parameters that are on the device; of shards (`DTensor`) each rank steps its own part.
        device_budget: how many bytes of states may stay on the device, such as "4GiB"; the room for pieces on their way is
            needed beside.
        host_budget: the most host memory to use.
        update: where states are stepped. "device": there, as without memkit. "host": on the host, bit for bit as the class
            steps CPU copies, apart from those that stay on the device. "auto" is "device", the fastest that doesn't change the
            result.
        master: `torch.float32` has float32 copies of parameters of lower precision stepped in their place, with the gradient
            as float32; the parameter is the copy, rounded. The copies are in `optimizer.state[parameter]["master"]`.
        when: "step": all parameters are stepped by `optimizer.step()`. "backward": each is stepped once its gradient is
            complete, and the gradient is then let go; `optimizer.step()` steps the rest, and ends the step. Gradients can't be
            clipped or scaled, and are accumulated within `accumulate()`. The optimizer of a `LayerOffload(train="fused")` needs
            it: then weights, gradients and states all stream, and each backward is a step. Shards in host memory, by
            `memkit.shard(offload_policy=CPUOffloadPolicy())`, are stepped there beside the backward, and nothing moves.
        overlap_forward: whether `optimizer.step()` returns before the parameters are stepped. The forward of each module waits
            for its own, so the next forward runs beside the rest of the step. The step lets gradients go. Any other reader or
            writer of parameters (an average of weights, `model.state_dict()`, `model.load_state_dict()`) needs `wait()` first.
        disk: holds the states that don't stay on the device, or with `host_budget` those that host memory has no room for; they
            pass through a few buffers in host memory. Only with `update="device"`, and without `overlap_forward`.
        device: where the parameters are; by default their own device.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: an argument is out of range, or the optimizer can't be stepped piece by piece.
        BudgetInfeasible: `device_budget` is above 0, and smaller than one piece.
        HostMemoryError: there is not enough host memory; nothing was moved.
        DiskError: the disk has not enough room; nothing was moved.

    Example:
        >>> import torch, memkit
        >>> model = torch.nn.Linear(64, 64)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with memkit.StateOffload(optimizer, device=memkit.device.ReferenceDevice()) as states:
        ...     model(torch.randn(2, 64)).sum().backward()
        ...     optimizer.step()
        >>> states.stats().d2h_bytes
        33792
    """

    _copied = (
        StateOffloadError,
        "a StateOffload was copied, or pickled, perhaps within an object that has it as an attribute. It belongs to one "
        "optimizer: copy the optimizer, or save optimizer.state_dict(), and make another StateOffload for that one",
    )

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        device_budget: int | str = 0,
        host_budget: int | str | None = None,
        update: str = "auto",
        master: torch.dtype | None = None,
        when: str = "step",
        overlap_forward: bool = False,
        disk: Disk | None = None,
        device: str | torch.device | Device | None = None,
    ) -> None:
        refuse_by_kind(optimizer)
        asked.refuse_beside_layers(optimizer, update=update, when=when, overlap_forward=overlap_forward)
        asked.check_options(update=update, master=master, when=when, overlap_forward=overlap_forward, disk=disk)
        budget_bytes = check_budget_bytes("device_budget", device_budget, may_be_zero=True)
        limit_bytes = None if host_budget is None else check_budget_bytes("host_budget", host_budget, may_be_zero=True)
        self.optimizer, self._master = optimizer, master
        self._is_beside = when == "backward" or overlap_forward
        given = {"device_budget": budget_bytes, "host_budget": limit_bytes, "master": master, "disk": disk, "device": device}
        gathers = asked.device_of_host_layers(optimizer, update=update, **given) if when == "backward" else None
        if gathers is None:
            asked.check_parameters(optimizer, is_beside=self._is_beside)
        self.device = gathers or asked.device_of(optimizer, device)
        asked.check_master(master, parameters_of(optimizer))
        self.update = update if update != "auto" else "device" if gathers is None else "host"
        if self.update != "device":
            asked.warn_if_unfused(optimizer)
        self.when = when
        place = self.device.torch_device if gathers is None else torch.device("cpu")
        self._members = Members(optimizer, master=master, torch_device=place)
        self._members.try_out()
        self._limits: dict[str, Any] = {"device_budget_bytes": budget_bytes, "host_budget_bytes": limit_bytes}
        self._limits |= {"has_disk": disk is not None, "runs_ahead": self._is_beside}
        self._hooks = HookSet()
        self._hollow: torch.optim.Optimizer | None = None
        self._loaded: dict[str, Any] | None = None
        self._in_backward: BackwardSteps | None = None
        self._on_shards = None if gathers is None else ShardSteps(optimizer, self._members, gathers)
        self._overlap = ForwardOverlap(optimizer, self.device, in_order=self._members.draws) if overlap_forward else None
        self._host = HostStates(self.device, limit_bytes=limit_bytes)
        self._disk = DiskStates(disk, self.device, self._host)
        self._slots: StateSlots | None = None
        self._is_open = False  # whether states may have moved
        asked.claim(optimizer, self)
        try:
            self._plan()
            self._hooks.before_any_step(asked.weakly(self._before_any_step))
            self._hooks.add(optimizer.register_step_post_hook(self._after_step))
        except BaseException:
            self.close()
            raise

    def _plan(self) -> None:
        """Plan which states leave, and begin, unless the optimizer may as well step by itself."""
        apart, costs = self.when == "backward", self._members.costs()
        self.plan = plan_states(costs, update=self.update, apart=apart, **self._limits)
        if self._on_shards is not None:  # nothing moves
            self._on_shards.begin()
            self._watch()
        elif self.plan.is_empty and self._master is None and self._overlap is None and not apart:
            self._members.place()
        else:
            self._begin()

    def _begin(self) -> None:
        optimizer, device, lanes = self.optimizer, self.device, lanes_of(self.device)
        pieces = self._members.add(self.plan, list(self._members.records()))
        slots = self._slots = StateSlots(device, lanes, self.plan)
        self._on_device = DeviceSteps(optimizer, device, slots, self._host, self._disk, undo_bytes=self.plan.undo_bytes)
        self._on_host = HostSteps(optimizer, device, lanes, slots, self._host, runs_ahead=self._limits["runs_ahead"])
        self._stepping = Stepping(optimizer, device, self._on_device, self._on_host)
        self._rest = StatesAtRest(optimizer, device, self._host, self._disk)
        if self.when == "backward":
            kind = BackwardSteps if stepper_of(optimizer) is None else LayeredSteps
            given = self._on_device, self._on_host, self._rest, asked.weakly(self._follow_groups)
            self._in_backward = kind(optimizer, device, self._stepping, *given)
        self._is_open = True
        self._open(pieces)
        self._members.place()
        if self._overlap is not None:
            self._overlap.stepping = self._stepping
            self._hooks.ahead_of_all_forwards(asked.weakly(self._overlap.before_forward, when_gone=self._hooks.remove))
        self._watch()
        self._hooks.add(optimizer.register_state_dict_post_hook(self._after_state_dict, prepend=True))

    def _watch(self) -> None:
        optimizer = self.optimizer
        self._before = optimizer.register_step_pre_hook(self._before_step)
        self._hooks.add(self._before)
        self._hooks.add(optimizer.register_state_dict_pre_hook(self._before_state_dict, prepend=True))
        self._hooks.add(optimizer.register_load_state_dict_pre_hook(self._before_load))
        self._hooks.add(optimizer.register_load_state_dict_post_hook(self._after_load, prepend=True))

    def _before_any_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Run this step's hook behind other hooks, such as clipping. If nothing has left the device so far, plan again."""
        if optimizer is not self.optimizer:
            return
        if not self._is_open and self._on_shards is None and not self._members.are_as_many():
            self._check_groups()
            try:
                self._plan()
            except HostMemoryError:
                self.close()  # the optimizer has its states
                raise
        if self._is_open or self._on_shards is not None:
            put_last(self._before)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Step all pieces. The class's own step that follows has no parameters."""
        if optimizer is not self.optimizer:
            return None  # a shell, by a class that calls the step of the one that it is derived from
        asked.refuse_captured(self.device)
        args, kwargs = run_closure(args, kwargs)
        self._step() if self._on_shards is None else self._on_shards.step()
        self._hollow = hollow_shell(optimizer)
        return (self._hollow, *args[1:]), kwargs

    def _step(self) -> None:
        if self._in_backward is not None:
            self._in_backward.check_options()
        self._settle()
        self._follow_groups()
        stepping, members = self._stepping, self._members
        is_rest = stepping.unfinished is not None and any(record.is_done() for it in members.pieces for record in it.records)
        if self._in_backward is not None and self._in_backward.end():
            is_rest = True
        run = (stepping.unfinished if is_rest else None) or OneStep(self.optimizer, copies=self._overlap is not None)
        self._disk.tidy(members.pieces)
        due = members.find_due(leaves_done=is_rest)
        asked.refuse_gradients([record for piece in due for record in piece.due])
        self._rest.adopt_due(due, members.pieces)
        if self._overlap is not None:
            self._overlap.run(due, run)
        else:
            stepping.run(due, run, in_order=members.draws)
            self._wait()
        stepping.num_steps += self._in_backward is None or not self._in_backward.is_whole_step

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        side = self._on_shards or (self._stepping if self._is_open else None)
        if side is None:
            return  # by this hook, the optimizer keeps the object
        run, hollow = side.unfinished, self._hollow
        if optimizer is self.optimizer and run is not None and hollow is not None:
            run.write_of_others(hollow)
            if self._in_backward is not None:
                self._in_backward.forget_done()
            side.unfinished = None

    def _settle(self, *, is_loading: bool = False) -> None:
        """Put right a step that was broken off, or not waited for. Nothing is on its way then."""
        try:
            self._join()
        except StateOffloadError as error:
            if not is_loading:
                raise
            warn_user(f"StateOffload: {error}")
        if self._overlap is not None:
            self._overlap.refuse_foreign_writes()
        told = [piece for piece in self._members.pieces if piece.lost is not None] if is_loading else []
        if self._stepping.is_broken:
            (self._in_backward or self._stepping).mend(self._members.pieces)
        for piece in self._members.pieces:
            if piece.lost is not None and not is_loading:
                raise StateOffloadError(piece.lost)
            if piece.lost is not None and piece not in told:
                warn_user(f"StateOffload: {piece.lost}")
        if self._in_backward is not None:
            self._in_backward.drop_ahead()

    def wait(self) -> None:
        """Wait for the last step, with `overlap_forward=True`, or for a backward that has failed, with `when="backward"`: the
        caller then reads new parameters and states. Raises StateOffloadError if the step itself has failed, or if somebody else
        has written to a parameter meanwhile."""
        if not self._is_closed:
            self._wait()
            if self._overlap is not None:
                self._overlap.refuse_foreign_writes()

    def _wait(self) -> None:
        """Wait until stepped states are in host memory, for readers there."""
        self._join()
        if self._slots is not None:
            self._slots.wait()

    def _join(self) -> None:
        """Let the current stream wait for steps beside it, and the host for steps on the host."""
        for beside in (self._overlap, self._in_backward, self._on_shards):
            if beside is not None:
                beside.join()

    def _follow_groups(self) -> None:
        members = self._members
        if not members.have_changed():
            return
        self._check_groups()
        known = {id(record.parameter) for piece in members.pieces for record in piece.records}
        new = [record for record in members.records() if id(record.parameter) not in known]
        if new:
            costs = {id(key): cost for key, cost in zip(parameters_of(self.optimizer), members.costs(), strict=True)}
            self._add(new, [costs[id(record.parameter)] for record in new])
        members.place()

    def _check_groups(self) -> None:
        asked.check_groups(self.optimizer, self.device, is_beside=self._is_beside)
        self._members.try_out()

    def _add(self, records: list[StateRecord], costs: list[ParameterCosts]) -> None:
        assert self._slots is not None
        members, before = self._members, self._members.pieces
        kept = {name: self._limits[name] for name in ("has_disk", "runs_ahead")}
        plan = self._slots.add(plan_states(costs, update=self.update, apart=self.when == "backward", **kept))
        try:
            self._open(members.add(plan, records))
        except BaseException:
            members.pieces = before  # the next step tries again
            raise
        self.plan = replace(self.plan, pieces=(*self.plan.pieces, *plan.pieces), slot_bytes=self._slots.sizes)

    def _open(self, pieces: list[Piece]) -> None:
        """Set host memory aside for pieces, and move existing states there."""
        self._disk.reserve([piece.plan for piece in pieces])
        self._host.reserve([piece for piece in pieces if not piece.plan.is_resident and not piece.plan.is_on_disk])
        self._on_host.reserve([piece for piece in pieces if piece.plan.update is Update.HOST])
        for piece in pieces:
            self._rest.adopt(piece)
        if self._in_backward is not None:
            self._in_backward.watch(pieces, self._hooks)

    def accumulate(self) -> AbstractContextManager[None]:
        """Return a context whose backwards add to gradients and step nothing, with `when="backward"`.

        Example:
            >>> import torch, memkit
            >>> model = torch.nn.Linear(64, 64)
            >>> optimizer = torch.optim.AdamW(model.parameters())
            >>> device = memkit.device.ReferenceDevice()
            >>> with memkit.StateOffload(optimizer, when="backward", device=device) as states:
            ...     with states.accumulate():
            ...         model(torch.randn(2, 64)).sum().backward()
            ...     model(torch.randn(2, 64)).sum().backward()
            ...     optimizer.step()
        """
        steps = self._in_backward or self._on_shards
        return nullcontext() if steps is None else steps.accumulate()

    def _before_state_dict(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer is not self.optimizer:
            return  # a shell, whose own step asks
        if self._on_shards is not None:
            self._on_shards.join()
            return
        self._members.refuse_use()
        self._settle()
        self._wait()

    def _after_state_dict(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        return with_host_copies(state_dict, self._rest.read(self._members.pieces))

    def _before_load(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        if self._on_shards is not None:
            self._on_shards.begin_loading()
            return None
        members = self._members
        members.refuse_fork()
        self._settle(is_loading=True)
        self._wait()
        if self._in_backward is not None:
            self._in_backward.end()
        if not members.is_half_loaded:
            self._follow_groups()
        members.begin_loading()
        self._loaded = state_dict
        return {**state_dict, "state": {}}

    def _after_load(self, optimizer: torch.optim.Optimizer) -> None:
        if self._on_shards is not None:
            self._on_shards.end_loading()
            return
        loaded, self._loaded = self._loaded, None
        assert loaded is not None
        put_states(loaded, optimizer, self._members, self.device.torch_device)
        self._stepping.unfinished = self._stepping.untold = None
        for piece in self._members.pieces:
            piece.forget_loss()
        self._rest.separate(self._members.pieces)
        for piece in self._members.pieces:
            (self._rest.bring if piece.plan.is_resident else self._rest.adopt)(piece)
        self._members.end_loading()

    def stats(self) -> StateStats:
        """Return the bytes moved so far, and the present memory."""
        plan, slots, shards, store = self.plan, self._slots, self._on_shards, self._disk.opened
        num_steps, host_step_s = self._stepping.num_steps if self._is_open else 0, 0.0 if slots is None else slots.host_step_s
        if shards is not None:
            num_steps, host_step_s = shards.num_steps, shards.host_step_s
        return StateStats(
            num_pieces=len(plan.pieces),
            num_resident=sum(piece.is_resident for piece in plan.pieces),
            num_on_host=sum(piece.update is Update.HOST for piece in plan.pieces),
            num_steps=num_steps,
            host_bytes=self._host.arena.held_bytes,
            room_bytes=slots.num_bytes + plan.undo_bytes if slots is not None and slots.slots else 0,
            resident_bytes=plan.resident_bytes,
            h2d_bytes=0 if slots is None else slots.h2d_bytes,
            d2h_bytes=0 if slots is None else slots.d2h_bytes,
            host_step_s=host_step_s,
            disk_bytes=plan.disk_bytes,
            disk_read_bytes=0 if store is None else store.read_bytes,
            disk_written_bytes=0 if store is None else store.written_bytes,
        )

    def __repr__(self) -> str:
        on_disk = f"{format_bytes(self.plan.disk_bytes)} on the disk, " if self.plan.disk_bytes else ""
        said = (
            f"{format_bytes(self.plan.host_bytes)} of states in host memory, {on_disk}{format_bytes(self.plan.resident_bytes)} "
            f'on {self.device.torch_device}, update="{self.update}"'
        )
        return f"<StateOffload of {type(self.optimizer).__name__}: {'closed' if self._is_closed else said}>"

    def close(self) -> None:
        """Have the states be tensors of their own again, where the parameters are. The optimizer steps by itself from then on.

        With `master`, states are of the precision of the float32 copies, which stay in the state; to go on without, load the
        state dict into an optimizer of float32 parameters, or make another `StateOffload`. Where the device has no room for all
        states, the others stay in host memory, and a warning says so. Calling it again does nothing.
        """
        if self._is_closed:
            return
        self._members.refuse_fork()
        if self._members.is_half_loaded:
            warn_user(f"StateOffload: {HALF_LOADED}")
        self._hooks.remove()
        if self._on_shards is not None:
            self._on_shards.close()
        if self._is_open:
            try:
                self._settle()
            except StateOffloadError as error:
                warn_user(f"StateOffload: {error}")
                self._settle(is_loading=True)
            if self._in_backward is not None:
                self._in_backward.close()
            self._wait()
            self.device.synchronize()
            self._rest.give_back(self._members.pieces)
            self._on_host.close()
            self._on_device.close(self._members.pieces)
        self._is_closed = True
        asked.release(self.optimizer, self)
        self._disk.close()
        self._host.close(self._members.pieces)
        if self._slots is not None:
            self._slots.close()
        self._members.pieces = []
