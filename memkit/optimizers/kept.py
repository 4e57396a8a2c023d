"""The states that an optimizer keeps for its parameters, found by one step of a copy of it, on parameters without data, or else
on small ones with data, whose states are scaled: no list of classes knows them."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memkit.core import torch_private
from memkit.core.tensors import unique_storages
from memkit.core.torch_state import local_of
from memkit.optimizers.shells import needs_closure, own_attributes, own_group, put_in_train_mode, shell_of, step_of

_META, _CPU = torch.device("meta"), torch.device("cpu")
_LARGEST_SIDES = (None, 256, 24)  # to try in turn; None for the original sizes, without data


@dataclass(frozen=True, slots=True)
class KeptState:
    """One tensor that an optimizer keeps for a parameter; it has 0 bytes if it shares another one's."""

    name: str
    num_bytes: int
    dtype: torch.dtype | None
    is_number: bool
    is_there: bool


@dataclass(frozen=True, slots=True)
class Kept:
    """The result of one step: the states kept for each parameter, by its id, and whether it has drawn random numbers."""

    of: dict[int, list[KeptState]]
    draws: bool


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside of one that wraps it, as accelerate's does."""
    inside = getattr(optimizer, "optimizer", None)
    return unwrapped(inside) if isinstance(inside, torch.optim.Optimizer) else optimizer


def needs_master(parameter: Tensor, master: torch.dtype) -> bool:
    return parameter.is_floating_point() and parameter.dtype.itemsize < master.itemsize


def kept_states(optimizer: torch.optim.Optimizer, *, master: torch.dtype | None = None) -> Kept:
    """Return the states that a step keeps for each parameter, if all have gradients; of a shard, this rank's part."""
    optimizer, raised = unwrapped(optimizer), list[Exception]()
    places = {parameter.device for group in optimizer.param_groups for parameter in group["params"]}
    drawn_from = [place for place in places if place.type not in ("cpu", "meta")]
    with torch.random.fork_rng(drawn_from), torch.inference_mode(False), torch.no_grad(), _CPU, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for most in _LARGEST_SIDES:
            for has_states in (False, True):  # Adagrad makes its states with the optimizer
                try:
                    return _stepped(optimizer, most, master, has_states=has_states)
                except Exception as error:
                    raised.append(error)
    raise raised[0]


def _stepped(optimizer: torch.optim.Optimizer, most: int | None, master: torch.dtype | None, *, has_states: bool) -> Kept:
    """Return what one step of a copy keeps."""
    from memkit.optimizers.numbers import NumbersWithoutData  # its base is a private class of torch

    twins: dict[int, tuple[Tensor, nn.Parameter, bool]] = {}  # of each parameter, and whether its counts are on the device
    groups: list[dict[str, Any]] = []
    state: dict[Any, Any] = defaultdict(dict)
    shell = shell_of(optimizer, groups, state)
    memo: dict[int, Any] = {id(optimizer): shell, id(optimizer.param_groups): groups, id(optimizer.state): state}
    for group in optimizer.param_groups:
        found: dict[Any, nn.Parameter] = {}
        has_counts = any(bool(group.get(option)) for option in ("capturable", "fused"))
        for parameter in group["params"]:
            own = local_of(parameter)
            dtype = master if master is not None and needs_master(own, master) else own.dtype
            kind = id(parameter) if most is None else (own.size(), dtype)  # of small ones, one of each kind
            if kind not in found:
                found[kind] = _twin_of(own, dtype, most)
            memo[id(parameter)] = found[kind]
            twins[id(parameter)] = parameter, found[kind], has_counts
        memo[id(group)] = twin_group = {"params": list(found.values())}
        groups.append(twin_group)
        names = group.get("param_names")
        twin_group |= {} if names is None else {"param_names": names[: len(found)]}
    for group, twin_group in zip(optimizer.param_groups, groups, strict=True):
        twin_group |= {name: _as_plain(name, value) for name, value in own_group(optimizer, group, memo).items()}
    vars(shell).update(own_attributes(optimizer, memo))
    for parameter, twin, _ in twins.values() if has_states else ():
        entries = optimizer.state.get(parameter) or {}
        state[twin] = {name: _state_like(value, parameter, twin) for name, value in entries.items()}
    distinct = list(dict.fromkeys(twin for _, twin, _ in twins.values()))
    put_in_train_mode(shell)
    for twin in distinct:
        if twin.requires_grad and twin.numel():
            grad = torch.rand_like(twin)
            twin.grad = grad.to_sparse(1) if isinstance(shell, torch.optim.SparseAdam) else grad
    closure = [lambda: torch.zeros(())] if needs_closure(shell) else []
    with closing(NumbersWithoutData()) as numbers, numbers:  # type: ignore[no-untyped-call]  # torch does not annotate its base
        step_of(shell)(shell, *closure)
    seen = set(unique_storages(distinct))
    kept: dict[int, list[tuple[str, Tensor, int]]] = {id(twin): [] for twin in distinct}
    for key, entries in shell.state.items():
        of_key = kept.get(id(key), kept[id(distinct[0])])
        named = entries.items() if isinstance(entries, dict) else [("", entries)]
        for name, tensor in ((str(name), leaf) for name, value in named for leaf in torch_private.tree_leaves(value)):
            if isinstance(tensor, Tensor):
                new = {place: storage for place, storage in unique_storages([tensor]).items() if place not in seen}
                seen |= new.keys()
                of_key.append((name, tensor, sum(storage.nbytes() for storage in new.values())))
    if isinstance(shell, torch.optim.LBFGS):  # a first step makes no history of steps and changes of the gradient
        size = shell.param_groups[0]["history_size"]
        for twin in distinct:
            kept[id(twin)] += [(name, twin, size * twin.nbytes) for name in ("old_dirs", "old_stps")]
    of = {
        number: [_kept(*item, local_of(parameter), twin, has_counts=has_counts) for item in kept[id(twin)]]
        for number, (parameter, twin, has_counts) in twins.items()
    }
    return Kept(of, numbers.draws)


def _kept(name: str, tensor: Tensor, num_bytes: int, own: Tensor, twin: Tensor, *, has_counts: bool) -> KeptState:
    is_number, is_beside = not tensor.dim(), tensor.device == twin.device
    return KeptState(
        name=name,
        num_bytes=num_bytes if is_number or not twin.numel() else round(num_bytes * (own.numel() / twin.numel())),
        dtype=None if torch_private.is_wrapper(tensor) else tensor.dtype,
        is_number=is_number,
        is_there=has_counts or (is_beside and twin.is_meta) if is_number else is_beside,
    )


def _twin_of(own: Tensor, dtype: torch.dtype, most: int | None) -> nn.Parameter:
    takes_grad = dtype.is_floating_point or dtype.is_complex
    if most is None:
        return nn.Parameter(torch.empty_strided(own.size(), own.stride(), dtype=dtype, device=_META), requires_grad=takes_grad)
    size = [min(length, most if own.dim() > 1 else 16 * most) for length in own.size()]
    for index in range(len(size)):
        others = max(1, math.prod(size[:index] + size[index + 1 :]))
        size[index] = min(size[index], max(1, 2**16 // others))
    values = torch.rand(size).to(dtype=dtype, device=_CPU if own.is_meta else own.device)
    return nn.Parameter(values, requires_grad=takes_grad)


def _state_like(value: Any, parameter: Tensor, twin: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    own, value = local_of(parameter), local_of(value)
    size = twin.size() if value.size() == own.size() else value.size()
    dtype = twin.dtype if value.dtype == own.dtype else value.dtype
    return torch.zeros(size, dtype=dtype, device=twin.device if value.dim() else _CPU)


def _as_plain(name: str, value: Any) -> Any:
    """Return an option for the plainest step: its states are the same, but for the place of counts of steps."""
    if name in ("foreach", "fused", "capturable"):
        return False
    if isinstance(value, Tensor):
        return torch.ones(value.size(), dtype=value.dtype)
    return type(value)(_as_plain("", each) for each in value) if type(value) in (list, tuple) else value
