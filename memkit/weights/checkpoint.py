"""Weights in safetensors files: which there are, and reading one straight into memory that is given."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "U16": torch.uint16,
        "U32": torch.uint32,
        "U64": torch.uint64,
        "BOOL": torch.bool,
        "C64": torch.complex64,
    }
)
"""As safetensors calls them. Source: https://github.com/huggingface/safetensors#format."""
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_MOST_HEADER_BYTES = 100_000_000
_PART_BYTES = 16 * 2**20
_NUM_THREADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor in a file."""

    file: Path
    start: int
    """Where its bytes begin in the file."""
    dtype: torch.dtype
    size: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize


class Checkpoint:
    """The tensors of a safetensors file, or of all those that make up a model, by name. Their bytes are read when asked for.

    Args:
        path: a file, or a directory with `model.safetensors.index.json` and the files that it names, `model.safetensors`, or
            just one file of this kind.

    Raises:
        TypeError: it is no path.
        ValueError: there is no such file, or it is not whole.
    """

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
        """Read a tensor into one in host memory, of its size: with no copy between if that is contiguous and of its dtype.

        Raises:
            ValueError: the file has become shorter.
            OSError: it cannot be read.
        """
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
    """Return which file each tensor is in, as an index says; None if there is none."""
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
    """Return what is in one file: eight bytes with the header's length, the header as JSON, then the tensors' bytes."""
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
