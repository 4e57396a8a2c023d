"""What an optimizer saves and loads while its states stream."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from memkit.hooks import HookSet
from memkit.optimizers import KeptState
from memkit.states.packing import OnDisk, may_leave

if TYPE_CHECKING:
    from memkit.states.at_rest import StatesAtRest
    from memkit.states.members import Members


class _Settle(Protocol):
    def __call__(self, *, is_loading: bool) -> None: ...


class Saving:
    """The hooks by which state dicts are those of plain torch.

    Args:
        optimizer: whose states they are.
        members: its parameters.
        rest: what `optimizer.state` has of them.
        settle: has nothing be under way.
        follow_groups: takes note of parameters that came.
        forget_step: has nothing be left to be done of a step that was broken off: all was loaded.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        members: Members,
        rest: StatesAtRest,
        settle: _Settle,
        follow_groups: Callable[[], None],
        forget_step: Callable[[], None],
    ) -> None:
        self._optimizer, self._members, self._rest = optimizer, members, rest
        self._settle, self._follow_groups, self._forget_step = settle, follow_groups, forget_step
        self._loading: Loading | None = None

    def watch(self, hooks: HookSet) -> None:
        optimizer = self._optimizer
        hooks.add(optimizer.register_state_dict_pre_hook(self._before_state_dict, prepend=True))
        hooks.add(optimizer.register_state_dict_post_hook(self._after_state_dict, prepend=True))
        hooks.add(optimizer.register_load_state_dict_pre_hook(self._before_load))
        hooks.add(optimizer.register_load_state_dict_post_hook(self._after_load, prepend=True))

    def _before_state_dict(self, _: torch.optim.Optimizer) -> None:
        self._members.refuse_use()
        self._settle(is_loading=False)

    def _after_state_dict(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        return with_host_copies(state_dict, self._rest.read(self._members.pieces))

    def _before_load(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        self._members.refuse_fork()
        self._settle(is_loading=True)
        if not self._members.is_half_loaded:
            self._follow_groups()
        self._members.begin_loading()
        self._loading = Loading(state_dict)
        return Loading.without_states(state_dict)

    def _after_load(self, optimizer: torch.optim.Optimizer) -> None:
        loading, self._loading = self._loading, None
        assert loading is not None
        loading.finish(optimizer, self._members.kept, self._members.masters(), self._rest.torch_device)
        self._forget_step()
        self._rest.separate(self._members.pieces)
        for piece in self._members.pieces:
            (self._rest.bring if piece.plan.is_resident else self._rest.adopt)(piece)
        self._members.end_loading()


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

    def finish(
        self,
        optimizer: torch.optim.Optimizer,
        kept: Mapping[int, list[KeptState]],
        masters: set[int],
        torch_device: torch.device,
    ) -> None:
        """Put states into `optimizer.state`, each of its own precision, as copies in host memory where they may leave.

        Args:
            optimizer: what has loaded the groups.
            kept: what it keeps for a parameter, by the parameter's id.
            masters: ids of parameters that have a float32 copy.
            torch_device: where parameters are stepped.
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
                name: self._placed(name, value, group, torch_device, None if keeps else dtypes.get(name))
                for name, value in entries.items()
            }
        optimizer.__setstate__({"state": state, "param_groups": optimizer.param_groups})

    @staticmethod
    def _placed(
        name: object, value: Any, group: Mapping[str, Any], torch_device: torch.device, dtype: torch.dtype | None
    ) -> Any:
        if not isinstance(value, Tensor):
            return value
        if name == "step":
            on_device = group.get("fused") or group.get("capturable")
            return value.to(torch.float32).to(torch_device, copy=True) if on_device else value.clone()
        if may_leave(value) and dtype in (None, value.dtype):
            return value.detach()  # it is copied as it is adopted
        if may_leave(value):
            return value.detach().to(dtype=dtype or value.dtype, device="cpu", copy=value.device.type != "cpu")
        return value.detach().to(torch_device, copy=True)


def with_host_copies(state_dict: dict[str, Any], on_disk: Mapping[OnDisk, Tensor]) -> dict[str, Any]:
    """Have what is saved be tensors in host memory, also what stays on the device, and what is on a disk: other code counts on
    one place for all. It comes in the order of the parameters, whatever was stepped first: ranks gather shards in this order.

    Args:
        state_dict: what torch has made of `optimizer.state`.
        on_disk: what was read from the disk, by what stands for it.
    """

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
    """Return where a key of a state dict comes: the numbers of parameters, then what is of none."""
    return item[0] if isinstance(item[0], int) else math.inf
