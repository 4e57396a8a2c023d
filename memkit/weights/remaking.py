"""Tensors that no checkpoint has, of a model that was built without data: buffers that are not persistent are made anew."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn

_OF_TORCH = frozenset(vars(nn.Module()))
"""What every module has."""


def remade(model: nn.Module, stored: Set[int]) -> list[tuple[Tensor, Tensor]]:
    """Return the buffers without data that are not persistent, and other such tensors that modules hold, each with what it is
    to be.

    A module is made anew on the CPU, from its attributes that are named like its constructor's arguments. That counts only if
    each argument is an attribute, all its attributes come out equal, and twice the same tensors.

    Args:
        model: built without data, or in part.
        stored: ids of the tensors in its `state_dict`, which come from elsewhere.

    Raises:
        ValueError: some cannot be made anew; all of these are named.
    """
    found: dict[int, tuple[Tensor, Tensor]] = {}
    lost: dict[str, str] = {}
    for prefix, module in model.named_modules():
        needed = dict(_without_data(module, stored))
        if not needed:
            continue
        try:
            made = _made_anew(module, needed)
        except _CannotMakeError as error:
            lost |= {f"{prefix}.{name}" if prefix else name: str(error) for name in needed}
        else:
            found |= {id(needed[name]): (needed[name], tensor) for name, tensor in made.items()}
    if lost:
        name, reason = next(iter(lost.items()))
        names = ", ".join(f'"{name}"' for name in list(lost)[:5]) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")
        raise ValueError(
            f'LayerOffload: no checkpoint has {names}: they are not persistent, and have no data (device "meta"). "{name}" '
            f"cannot be made anew: {reason}. Set them on the CPU before, or build their modules there: "
            'with torch.device("cpu")'
        )
    return list(found.values())


class _CannotMakeError(Exception):
    """Says why."""


def _without_data(module: nn.Module, stored: Set[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a module itself that have no data, and that are in no `state_dict`."""
    for name, tensor in (*module.named_buffers(recurse=False), *vars(module).items()):
        if isinstance(tensor, Tensor) and tensor.is_meta and id(tensor) not in stored:
            yield name, tensor


def _made_anew(module: nn.Module, needed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    arguments = _arguments_of(module)
    found = _tensors_of(module, arguments, needed)
    again = _tensors_of(module, arguments, needed, seed=1)
    if not all(_is_same(found[name], again[name]) for name in needed):
        raise _CannotMakeError("it is made of random numbers")
    for name, tensor in needed.items():
        if found[name].dtype != tensor.dtype:
            found[name] = _cast(module, arguments, needed, name, found[name])
    return found


def _cast(module: nn.Module, arguments: Mapping[str, Any], needed: Mapping[str, Tensor], name: str, found: Tensor) -> Tensor:
    """Return a tensor in the dtype that it has in the model: cast since, or made while that was the default."""
    dtype, default = needed[name].dtype, torch.get_default_dtype()
    cast = found.to(dtype)
    if dtype.is_floating_point:
        torch.set_default_dtype(dtype)
        try:
            made = _tensors_of(module, arguments, needed)[name]
        finally:
            torch.set_default_dtype(default)
        if made.dtype == dtype and not _is_same(made, cast):
            raise _CannotMakeError(f"it is of {dtype}, and depends on whether it was made in that or cast to it")
    return cast


def _arguments_of(module: nn.Module) -> dict[str, Any]:
    """Return what to call the constructor with."""
    kind = type(module)
    arguments: dict[str, Any] = {}
    for name, parameter in list(inspect.signature(kind.__init__).parameters.items())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise _CannotMakeError(f"{kind.__name__} takes any arguments")
        if name == "device":
            arguments[name] = torch.device("cpu")
        elif name in vars(module) and not isinstance(vars(module)[name], Tensor):
            arguments[name] = vars(module)[name]
        else:
            raise _CannotMakeError(f'{kind.__name__} takes "{name}", which is not an attribute of it')
    return arguments


def _tensors_of(
    module: nn.Module, arguments: Mapping[str, Any], needed: Mapping[str, Tensor], *, seed: int = 0
) -> dict[str, Tensor]:
    """Make the module anew, and return the tensors that are needed."""
    kind = type(module)
    try:
        with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(seed)
            made = kind(**arguments)
    except Exception as error:
        raise _CannotMakeError(f"{kind.__name__} raises {error!r}") from error
    before, after = _attributes_of(module), _attributes_of(made)
    if before.keys() != after.keys():
        other = min(before.keys() ^ after.keys())
        raise _CannotMakeError(f'{kind.__name__} made anew does not agree on the attribute "{other}"')
    for name, value in before.items():
        if name not in needed and not _is_same(value, after[name]):
            raise _CannotMakeError(f'{kind.__name__} made anew has another "{name}"')
    found = {**dict(made.named_buffers(recurse=False)), **{name: value for name, value in after.items() if name in needed}}
    for name, tensor in needed.items():
        if name not in found or found[name].size() != tensor.size():
            raise _CannotMakeError(f"{kind.__name__} made anew has it in another size")
    return {name: found[name] for name in needed}


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _OF_TORCH}


def _is_same(one: object, other: object) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        is_like = one.size() == other.size() and one.dtype == other.dtype
        return is_like and not one.is_meta and torch.equal(one, other)
    function = getattr(one, "__func__", None)
    if function is not None:
        return function is getattr(other, "__func__", None)
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:  # what it is compared by is anyone's
        return False
