"""Makes a model and its inputs from the arguments of a command, without network access."""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from memkit.cli.arguments import Input, nearest_spec
from memkit.core.extras import how_to_install
from memkit.errors import MemkitError, ProfileError, note_on
from memkit.profile import MemoryReport, profile_memory
from memkit.profile.step import NEEDS_NONE, is_out_of_memory

_T = TypeVar("_T")
_logger = logging.getLogger("memkit.cli.main")
_LANGUAGE = ("CausalLM", "Seq2SeqLM", "SpeechSeq2Seq", "ImageTextToText", "PreTraining")  # of such as GPT2LMHeadModel


class UsageError(MemkitError):
    """Raised when the command line names something that does not exist."""


def build_model(spec: str, device: torch.device) -> nn.Module:
    """Return the model that SPEC names, with random weights, on `device`; its own exceptions get a note that says so."""
    place, _, name = spec.partition(":")

    def built(factory: Any) -> nn.Module:
        model = factory if isinstance(factory, nn.Module) else factory()
        if not isinstance(model, nn.Module):
            raise UsageError(f"{spec} gives {type(model).__name__}, not a torch.nn.Module")
        return model

    try:
        factories = {"torchvision": _torchvision_factory, "timm": _timm_factory, "hf": _transformers_factory}
        factory = factories[place](name) if place in factories else _factory(place, name)
        if device.type != "meta":
            return built(factory).to(device)
        try:
            with torch.device(device):
                return built(factory)
        except UsageError:
            raise
        except Exception as error:  # the build reads values, which needs data
            _logger.debug("%s cannot be built on meta: %s", spec, error)
        return built(factory)
    except (UsageError, OSError):
        raise
    except Exception as error:
        note_on(error, f"memkit: raised while {spec} was built")
        raise


def _factory(place: str, name: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    found = _import(place)
    for part in name.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{place} has no {name!r}{_near(name, dir(found), place)}")
        found = getattr(found, part)
    if not isinstance(found, nn.Module) and not callable(found):
        raise UsageError(f"{place}:{name} is {type(found).__name__}; it must be a function, a class or a torch.nn.Module")
    return found


def _torchvision_factory(name: str) -> Callable[[], Any]:
    _import("torchvision", hint=f"; install it with {how_to_install('torchvision')}")
    *packages, builder_name = name.split(".")
    where = ".".join(["torchvision.models", *packages])
    builder = getattr(_import(where), builder_name, None)
    if not inspect.isfunction(builder):
        builders = [other for other, value in vars(_import(where)).items() if inspect.isfunction(value)]
        near = _near(builder_name, builders, "torchvision", ".".join([*packages, ""]))
        raise UsageError(f"{where} has no model {builder_name!r}{near}")
    parameters = inspect.signature(builder).parameters
    # Without these the builder would download weights, or spend minutes on an unused initialization.
    options = {"weights": None, "weights_backbone": None, "init_weights": False}
    return lambda: builder(**{option: value for option, value in options.items() if option in parameters})


def _timm_factory(name: str) -> Callable[[], Any]:
    timm = _import("timm", hint=f"; install it with {how_to_install('timm')}")
    if not timm.is_model(name):
        raise UsageError(f"timm has no model {name!r}{_near(name, timm.list_models(), 'timm')}")
    return lambda: timm.create_model(name, pretrained=False)


def _transformers_factory(name: str) -> Callable[[], Any]:
    path = Path(name).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise UsageError(
            f"hf: needs the config.json of a model, or the folder that it is in; found no file {str(path)!r}. For a model of "
            "the hub, `hf download MODEL config.json` says where it has put it"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise UsageError(f"{path} is no configuration of transformers: it has no model_type")
    transformers = _import("transformers", hint=f"; install it with {how_to_install('transformers')}")
    try:
        config = transformers.AutoConfig.for_model(**content)
    except ValueError as error:
        raise UsageError(
            f"{path}: transformers {transformers.__version__} knows no model_type {content['model_type']!r}"
        ) from error
    if hasattr(config, "use_cache"):
        config.use_cache = False  # for generating only: it would hold the keys and values of each layer
    asked = next(iter(content.get("architectures") or ()), "")
    return _class_named(transformers, config, asked)


def _class_named(transformers: Any, config: Any, asked: str) -> Callable[[], Any]:
    heads = [asked.partition("For")[2], *_LANGUAGE] if asked else []
    for head in dict.fromkeys(heads):
        auto = getattr(transformers, f"AutoModelFor{head}", None)
        with suppress(ValueError), torch.device("meta"):  # raised if there is no such model for the configuration
            if auto is not None and type(auto.from_config(config)).__name__ == asked:
                return lambda: auto.from_config(config)
    if asked and hasattr(transformers, asked):
        return lambda: getattr(transformers, asked)(config)
    if asked:
        raise UsageError(f"transformers {transformers.__version__} has no {asked}, which the configuration names")
    return lambda: transformers.AutoModel.from_config(config)


@contextmanager
def _needing_memory() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise ProfileError(f"out of memory while building model and inputs; {NEEDS_NONE}") from error
        raise


def model_of(options: argparse.Namespace, device: torch.device) -> nn.Module:
    _logger.info("building %s", options.spec)
    with _needing_memory():
        model = build_model(options.spec, device).train()
        return model if options.dtype is None else model.to(getattr(torch, options.dtype))


def profiled(
    options: argparse.Namespace, model: nn.Module, inputs: Iterable[Input], device: torch.device, **how: Any
) -> MemoryReport:
    with _needing_memory():
        given, named = make_inputs(model, inputs, dtype_name=options.dtype or "float32", device=device)
    is_meta, dtype = device.type == "meta", options.autocast
    kind = "cpu" if is_meta else device.type  # on meta any autocast counts as the target's, and the CPU's is always there
    how |= {"optimizer": options.optimizer, "tag": options.spec, "device": "meta" if is_meta else None}
    with nullcontext() if dtype is None else torch.autocast(kind, dtype=getattr(torch, dtype)):
        return profile_memory(model, *given, kwargs=named, loss_fn=loss_of(model, named), print_table=False, **how)


def make_inputs(
    model: nn.Module, inputs: Iterable[Input], *, dtype_name: str, device: torch.device
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return a model's inputs, by position and by keyword: random values, or indices that are valid in any table."""
    names, is_of_transformers = list(inspect.signature(model.forward).parameters), _is_of_transformers(model)
    if is_of_transformers and isinstance(getattr(model, "dtype", None), torch.dtype):
        dtype_name = str(model.dtype).removeprefix("torch.")

    def made(name: str, shape: tuple[int, ...], dtype_asked: str | None) -> Tensor:
        if name.endswith("input_ids") and is_of_transformers and len(shape) != 2:
            raise UsageError(f"--input: {name} needs (batch, length), such as 8x2048; found {'x'.join(map(str, shape))}")
        is_mask = name == "attention_mask" and is_of_transformers  # transformers reads it: hide nothing
        is_integer = is_mask or (is_of_transformers and (name.endswith("_ids") or name == "labels"))
        dtype: torch.dtype = getattr(torch, dtype_asked or ("int64" if is_integer else dtype_name))
        if device.type == "meta" and not is_mask:
            return torch.empty(shape, dtype=dtype, device=device)
        if not is_mask and (dtype.is_floating_point or dtype.is_complex):
            return torch.randn(shape, dtype=dtype, device=device)
        # 0 is a valid index into anything that has elements; a mask of ones hides nothing.
        place = "cpu" if device.type == "meta" else device
        return torch.full(shape, is_mask or dtype == torch.bool, dtype=dtype, device=place)

    positional, named = list[Tensor](), dict[str, Tensor]()
    for keyword, shape, dtype_asked in inputs:
        if keyword:
            named[keyword] = made(keyword, shape, dtype_asked)
        else:
            positional.append(made((*names[len(positional) :], "")[0], shape, dtype_asked))
    return positional, named


def loss_of(model: nn.Module, names: Iterable[str]) -> Callable[[Any], Tensor] | None:
    """Return a function that takes the loss from the output of a transformers model with labels; None for other models."""
    return (lambda output: output.loss) if _is_of_transformers(model) and "labels" in names else None


def _is_of_transformers(model: nn.Module) -> bool:
    return hasattr(model, "main_input_name") and hasattr(model, "config")


def said_as(option: str, read: Callable[[], _T]) -> _T:
    """Return the value of an option; a ValueError of `read` becomes a UsageError that names the option."""
    try:
        return read()
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from error


def _near(name: str, known: Iterable[str], place: str, prefix: str = "") -> str:
    of = {other.casefold(): other for other in known if not other.startswith("_")}  # one of the names that differ in case
    near = [of[found] for found in difflib.get_close_matches(name.casefold(), of, n=3, cutoff=0.6)]
    return f". Did you mean {' or '.join(f'{place}:{prefix}{other}' for other in near)}?" if near else ""


def _import(name: str, *, hint: str = "") -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise
        if not hint and name in ("huggingface", "transformers", "hub"):
            hint = ". For a model of transformers write hf:CONFIG.json"
        elif not hint and ("/" in name or name.endswith((".py", ".json"))):
            hint = f". Write {nearest_spec(name)}"
        hint = hint or ". It is looked for in the current folder and among what is installed"
        raise UsageError(f"there is no module {error.name!r}{hint}") from error
