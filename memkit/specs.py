"""From what was written on a command line to a model and its inputs."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from memkit.errors import MemkitError

_logger = logging.getLogger("memkit.cli")


class UsageError(MemkitError):
    """Raised when the command line asks for something that is not there."""


def make_input(shape: tuple[int, ...], dtype_name: str, device: torch.device) -> Tensor:
    """Return an input of a shape, with random values, or indices that are valid anywhere; `dtype_name` is torch's."""
    dtype: torch.dtype = getattr(torch, dtype_name)
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype, device=device)
    # 0 is a valid index into anything that has elements; a mask of ones hides nothing.
    return torch.full(shape, dtype == torch.bool, dtype=dtype, device=device)


def autocast(name: str | None, device: torch.device) -> AbstractContextManager[object]:
    """Return `torch.autocast` with the dtype of a name, or nothing for None."""
    if name is None:
        return nullcontext()
    # On meta, autocast of any kind is taken for the target's, and that for the CPU is there on every machine.
    return torch.autocast("cpu" if device.type == "meta" else device.type, getattr(torch, name))


def build_model(spec: str, device: torch.device) -> nn.Module:
    """Return the model that SPEC names, with random weights, on `device`.

    Args:
        spec: "torchvision:NAME", or "package.module:factory" for something that returns a module when called without
            arguments, or that is a module. The current folder is searched, too.

    Raises:
        UsageError: there is no such package, module or attribute, or it gives no `nn.Module`.
    """
    place, _, name = spec.partition(":")
    factory = _torchvision_factory(name) if place == "torchvision" else _factory(place, name)
    if device.type == "meta" and not isinstance(factory, nn.Module):
        try:
            with torch.device(device):
                return _built(factory, spec)
        except UsageError:
            raise
        except Exception as error:  # it reads values while it builds; with data it can
            _logger.debug("%s cannot be built on meta: %s", spec, error)
    return _built(factory, spec).to(device) if device.type != "meta" else _built(factory, spec)


def _built(factory: Any, spec: str) -> nn.Module:
    model = factory if isinstance(factory, nn.Module) else factory()
    if not isinstance(model, nn.Module):
        raise UsageError(f"{spec} gives {type(model).__name__}, not a torch.nn.Module")
    return model


def _factory(place: str, name: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    found = _import(place)
    for part in name.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{place} has no {name!r}")
        found = getattr(found, part)
    if not isinstance(found, nn.Module) and not callable(found):
        raise UsageError(f"{place}:{name} is {type(found).__name__}; it must be a function, a class or a torch.nn.Module")
    return found


def _torchvision_factory(name: str) -> Callable[[], Any]:
    _import("torchvision", hint="; install it with pip install torchvision")
    *packages, builder_name = name.split(".")
    where = ".".join(["torchvision.models", *packages])
    builder = getattr(_import(where), builder_name, None)
    if not inspect.isfunction(builder):
        raise UsageError(f"{where} has no model {builder_name!r}")
    parameters = inspect.signature(builder).parameters
    # Without these the builder would download weights, or spend minutes on an initialization that is not looked at.
    options = {"weights": None, "weights_backbone": None, "init_weights": False}
    return lambda: builder(**{option: value for option, value in options.items() if option in parameters})


def _import(name: str, *, hint: str = "") -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise
        raise UsageError(f"there is no module {error.name!r}{hint}") from error
