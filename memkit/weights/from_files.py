"""The weights of a model that was built without data: from files straight to where they are kept."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from memkit.storages import Geometry, storage_key
from memkit.weights.binding import copy_into
from memkit.weights.checkpoint import Checkpoint
from memkit.weights.remaking import remade

Path = str | os.PathLike[str]
_MOST_NAMED = 5


class FileWeights:
    """Weights of a model in safetensors files. Nothing is changed before `open`.

    Tensors on torch's "meta" device become tensors of the CPU, and stay the same objects. Their memory is only addresses until
    they are read, each to where it is to be.

    Args:
        model: with all of its parameters and persistent buffers on "meta", some, or none.
        path: see `Checkpoint`; None to change nothing.

    Raises:
        TypeError: the path is none.
        ValueError: the files are not those of the model, which is told by name; or it has other tensors on "meta" that cannot
            be made anew.
    """

    def __init__(self, model: nn.Module, path: Path | None) -> None:
        self._opened: list[tuple[Tensor, Tensor]] = []
        """What was changed, each with one that has its former insides."""
        self._names: dict[int, str] = {}
        """Of what is in the files, by the tensor's id. Of several names of one tensor the last, as `load_state_dict` goes."""
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
        """Raise where names or sizes in the files are not those of the model."""
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
        """Let all tensors without data be such of the CPU, whose bytes mean nothing yet."""
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
        """Let a tensor be another one, and stay the object that it is."""
        other = nn.Parameter(to, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else to
        vars(other).update(vars(tensor))
        self._opened.append((tensor, other))
        torch.utils.swap_tensors(tensor, other)

    def read(self, tensor: Tensor, into: Tensor) -> None:
        """Read a tensor into a host copy; copy one that the files do not have."""
        name = self._names.get(id(tensor))
        if name is None:
            copy_into(tensor, into)
        else:
            self._checkpoint.read(name, into)

    def fill(self, tensors: Iterable[Tensor]) -> None:
        """Read tensors that are to be whole where they are."""
        with torch.no_grad():
            for tensor in tensors:
                if id(tensor) in self._names:
                    self._checkpoint.read(self._names[id(tensor)], tensor.detach())

    def undo(self) -> None:
        """Let what had no data have none again."""
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
    """Return what may be the matter where all names differ by what they begin with."""
    here, there = set(tensors), set(stored)
    for longer, shorter, whose in ((there, here, "the files"), (here, there, "the model")):
        prefixes = {name.removesuffix(some) for some in sorted(shorter)[:1] for name in longer if name.endswith(f".{some}")}
        for prefix in prefixes:
            if {f"{prefix}{name}" for name in shorter} <= longer:
                return f' All names in {whose} begin with "{prefix}": these are of a model around this one, or inside of it.'
    return ""
