"""Weights from safetensors files, for a model on the meta device."""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memkit.core.tensors import Geometry, storage_key
from memkit.weights.chunks import copy_into

_OF_TORCH = frozenset(vars(nn.Module()))
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_MOST_HEADER_BYTES = 100_000_000
_PART_BYTES = 16 * 2**20
_NUM_THREADS = 4
FilePath = str | os.PathLike[str]
_MOST_NAMED = 5


def remade(model: nn.Module, stored: Set[int]) -> list[tuple[Tensor, Tensor]]:
    """Return tensors without data that no `state_dict` has, each with that of a module made anew, twice, from attributes."""
    found: dict[int, tuple[Tensor, Tensor]] = {}
    lost: dict[str, str] = {}
    for prefix, module in model.named_modules():
        needed = {
            name: tensor
            for name, tensor in (*module.named_buffers(recurse=False), *vars(module).items())
            if isinstance(tensor, Tensor) and tensor.is_meta and id(tensor) not in stored
        }
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
        raise ValueError(
            f'LayerOffload: {_some([*lost])} in no checkpoint (not persistent), and without data (device "meta"). '
            f'"{name}" cannot be made anew: {reason}. Set them on the CPU before, or build their modules there: '
            'with torch.device("cpu")'
        )
    return list(found.values())


class _CannotMakeError(Exception):
    """Says why."""


def _made_anew(module: nn.Module, needed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    arguments, default = _arguments_of(module), torch.get_default_dtype()
    found = _tensors_of(module, arguments, needed)
    again = _tensors_of(module, arguments, needed, seed=1)
    if not all(_is_same(found[name], again[name]) for name in needed):
        raise _CannotMakeError("it is made of random numbers")
    for name, dtype in ((name, tensor.dtype) for name, tensor in needed.items() if found[name].dtype != tensor.dtype):
        found[name] = found[name].to(dtype)  # it was cast since, or made while this was the default
        if dtype.is_floating_point:
            torch.set_default_dtype(dtype)
            try:
                made = _tensors_of(module, arguments, needed)[name]
            finally:
                torch.set_default_dtype(default)
            if made.dtype == dtype and not _is_same(made, found[name]):
                raise _CannotMakeError(f"it is of {dtype}, and depends on whether it was made in that or cast to it")
    return found


def _arguments_of(module: nn.Module) -> dict[str, Any]:
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


def _tensors_of(module: nn.Module, given: Mapping[str, Any], needed: Mapping[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    kind = type(module)
    try:
        with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(seed)
            made = kind(**given)
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
    except Exception:  # a foreign `__eq__` may raise anything
        return False


_DTYPES: Mapping[str, torch.dtype] = {
    **{f"F{bits}": getattr(torch, f"float{bits}") for bits in (16, 32, 64)},
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"U{bits}": getattr(torch, f"uint{bits}") for bits in (8, 16, 32, 64)},
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}  # by safetensors' names; source: https://github.com/huggingface/safetensors#format.


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    file: Path
    start: int
    dtype: torch.dtype
    size: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize


class Checkpoint:
    """The tensors of a safetensors file, or of a directory with an index or one such file, by name, read when asked for."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"weights is a safetensors file or a directory with such files; found {path!r}")
        self.path = Path(path)
        self.tensors: dict[str, StoredTensor] = {}
        index = _index_in(self.path)
        for file in _files_in(self.path) if index is None else sorted({self.path / name for name in index.values()}):
            self.tensors.update(_read_header(file))
        lost = [] if index is None else [name for name in index if name not in self.tensors]
        if lost:
            raise ValueError(f"weights: '{self.path / _INDEX}' names \"{lost[0]}\", which is in none of its files")

    def read(self, name: str, into: Tensor) -> None:
        """Read a tensor into one of its size in host memory, directly if that is contiguous and of its dtype."""
        stored = self.tensors[name]
        is_direct = into.device.type == "cpu" and into.is_contiguous() and into.dtype == stored.dtype
        target = into if is_direct else torch.empty(stored.size, dtype=stored.dtype, device="cpu")
        memory = target.reshape(-1).view(torch.uint8).numpy().data if stored.num_bytes else memoryview(b"")
        parts = range(0, stored.num_bytes, _PART_BYTES)
        handle = os.open(stored.file, os.O_RDONLY)
        try:
            read = partial(_read_part, handle, stored, memory)
            if len(parts) < 2:
                list(map(read, parts))
            else:
                with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="memkit-read") as threads:
                    list(threads.map(read, parts))
        finally:
            os.close(handle)
        if not is_direct:
            into.copy_(target)


def _read_part(handle: int, stored: StoredTensor, memory: memoryview, at: int) -> None:
    end = min(at + _PART_BYTES, len(memory))
    while at < end:
        num_bytes = os.preadv(handle, [memory[at:end]], stored.start + at)
        if not num_bytes:
            raise ValueError(f"weights: '{stored.file}' has become shorter than it was")
        at += num_bytes


def _index_in(path: Path) -> dict[str, str] | None:
    file = path / _INDEX
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        index = {str(name): str(found[name]) for name in found}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"weights: '{file}' is no index of safetensors files ({error!r})") from error
    outside = next((name for name in index.values() if Path(name).name != name), None)
    if outside is not None:
        raise ValueError(f"weights: '{file}' names '{outside}', which is not a file beside it")
    return index


def _files_in(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"weights is a safetensors file or a directory with such files; found none at '{path}'")
    found = [path / _SINGLE] if (path / _SINGLE).is_file() else sorted(path.glob("*.safetensors"))
    if len(found) != 1:
        names = ", ".join(file.name for file in found[:3])
        what = f"several ({names}, ...)" if found else "no safetensors file"
        raise ValueError(f"weights: '{path}' needs {_INDEX} or {_SINGLE}; found {what}. Name the file itself")
    return found


def _read_header(file: Path) -> dict[str, StoredTensor]:
    """Read a file's header: eight bytes with its length, JSON, then the tensors' bytes."""
    try:
        file_bytes = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 2 <= length <= min(_MOST_HEADER_BYTES, file_bytes - 8):
                raise ValueError("its header has no length that could be")
            header: dict[str, Any] = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        return {name: _stored(file, 8 + length, file_bytes, name, header[name]) for name in header}
    except FileNotFoundError as error:
        raise ValueError(f"weights: there is no file '{file}'") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"weights: '{file}' is not a whole safetensors file: {error}") from error


def _stored(file: Path, begin: int, file_bytes: int, name: str, entry: Mapping[str, Any]) -> StoredTensor:
    kind, (start, end) = entry["dtype"], entry["data_offsets"]
    if kind not in _DTYPES:
        raise ValueError(f'"{name}" is of dtype {kind}, which torch has not')
    stored = StoredTensor(file=file, start=begin + start, dtype=_DTYPES[kind], size=tuple(map(int, entry["shape"])))
    if end - start != stored.num_bytes or start < 0 or begin + end > file_bytes:
        raise ValueError(f'"{name}" is not whole')
    return stored


class FileWeights:
    """Weights of a model in safetensors files (if given) for tensors on the "meta" device: they stay the same objects."""

    def __init__(self, model: nn.Module, path: FilePath | None) -> None:
        self._opened: list[tuple[Tensor, Tensor]] = []
        self._names: dict[int, str] = {}  # by tensor id, in the files; of several the last, as in `load_state_dict`
        self._meta: list[Tensor] = []
        self._remade: list[tuple[Tensor, Tensor]] = []
        if path is not None:
            self._find(model, Checkpoint(path))

    def _find(self, model: nn.Module, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        state = model.state_dict(keep_vars=True)
        tensors = {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
        self._names = {id(tensor): name for name, tensor in tensors.items() if name in checkpoint.tensors}
        self._refuse_others(model, tensors)
        self._meta = list({id(tensor): tensor for tensor in tensors.values() if tensor.is_meta}.values())
        read = {name: tensor for name, tensor in tensors.items() if tensor.is_meta or id(tensor) in self._names}
        wrapped = next((name for name, tensor in read.items() if type(tensor) not in (Tensor, nn.Parameter)), None)
        if wrapped is not None:
            kind = type(read[wrapped]).__name__
            raise ValueError(f'LayerOffload: "{wrapped}" is a {kind}, which weights= cannot read. Load the weights first')
        self._remade = remade(model, {id(tensor) for tensor in tensors.values()})

    def _refuse_others(self, model: nn.Module, tensors: dict[str, Tensor]) -> None:
        stored = self._checkpoint.tensors
        missing = [name for name, tensor in tensors.items() if id(tensor) not in self._names and tensor.is_meta]
        missing += [name for name, item in model.named_parameters() if item.is_meta and name not in tensors]
        missing += [name for name in model.state_dict(keep_vars=True) if name not in tensors]  # no tensors, so in no such file
        unexpected = [name for name in stored if name not in tensors]
        wrong = [
            f'"{name}" is {list(stored[name].size)} there and {list(tensor.size())} in the model'
            for name, tensor in tensors.items()
            if name in stored and stored[name].size != tuple(tensor.size())
        ]
        found = [f"{_some(missing)} missing"] if missing else []
        found += [f"{_some(unexpected)} not in the model"] if unexpected else []
        found += wrong[:_MOST_NAMED] + ([f"{len(wrong) - _MOST_NAMED} more of other sizes"] if len(wrong) > _MOST_NAMED else [])
        if found:
            raise ValueError(
                f"LayerOffload: the weights in '{self._checkpoint.path}' must be those of the {type(model).__name__}; found "
                f"{'; '.join(found)}.{_hint(tensors, stored)}"
            )

    def open(self) -> None:
        """Give tensors without data memory on the CPU, with undefined bytes."""
        storages: dict[int, torch.UntypedStorage] = {}
        with torch.inference_mode(False), torch.no_grad():
            for tensor in self._meta:
                former = tensor.untyped_storage()
                # Not by `torch.empty`, which fills memory where algorithms have to be deterministic.
                storage = storages.setdefault(storage_key(former), torch.UntypedStorage(former.nbytes(), device="cpu"))
                self._swap(tensor, Geometry.of(tensor).over(storage))
            for tensor, made in self._remade:
                self._swap(tensor, made.detach())

    def _swap(self, tensor: Tensor, to: Tensor) -> None:
        other = nn.Parameter(to, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else to
        vars(other).update(vars(tensor))
        self._opened.append((tensor, other))
        torch.utils.swap_tensors(tensor, other)

    def read(self, tensor: Tensor, into: Tensor) -> None:
        name = self._names.get(id(tensor))
        if name is None:
            copy_into(tensor, into)
        else:
            self._checkpoint.read(name, into)

    def fill(self, tensors: Iterable[Tensor]) -> None:
        with torch.no_grad():
            for tensor in tensors:
                if id(tensor) in self._names:
                    self._checkpoint.read(self._names[id(tensor)], tensor.detach())

    def undo(self) -> None:
        while self._opened:
            tensor, other = self._opened[-1]
            if not tensor.is_meta:  # an interrupt may have come ahead of the change
                with contextlib.suppress(RuntimeError):  # torch does not allow it while somebody has a weak reference
                    torch.utils.swap_tensors(tensor, other)
            self._opened.pop()


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(f'"{name}"' for name in names[:_MOST_NAMED]) + more + (" is" if len(names) == 1 else " are")


def _hint(tensors: Iterable[str], stored: Iterable[str]) -> str:
    """Return a sentence for an error where all names differ by their first part."""
    here, there = set(tensors), set(stored)
    for longer, shorter, whose in ((there, here, "the files"), (here, there, "the model")):
        prefixes = {name.removesuffix(some) for some in sorted(shorter)[:1] for name in longer if name.endswith(f".{some}")}
        for prefix in prefixes:
            if {f"{prefix}{name}" for name in shorter} <= longer:
                return f' All names in {whose} begin with "{prefix}": these are of a model around this one, or inside of it.'
    return ""
