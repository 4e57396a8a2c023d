"""The rows of a report before anything runs: a model's modules in tree order, and the shapes of their inputs and outputs."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from memkit.core import torch_private
from memkit.core.compiled import is_compiled
from memkit.core.hooks import HookSet
from memkit.core.owners import NOTHING_STREAMED, StreamedWeights
from memkit.core.tensors import storage_key, storages_of, unique_storages
from memkit.core.torch_state import fsdp_modules

Shapes = tuple[tuple[int, ...], ...]
ROOT = 0
ROOT_NAME = "(model)"
OUTSIDE_NAME = "(outside modules)"


class Mark(Enum):
    """A remark on a row beyond its figures; `value` is its text."""

    STREAMED = "streamed"
    SHARDED = "sharded"
    CHECKPOINTED = "checkpointed"
    COMPILED = "compiled"
    OTHER_HOOKS = "other hooks"
    BACKEND_DEPENDENT = "backend-dependent"


MEANINGS = {
    Mark.STREAMED: "weights in host memory, brought to slots on the device around each use",
    Mark.SHARDED: "parameters are this rank's shards, which are gathered around each use",
    Mark.CHECKPOINTED: "of these regions only the inputs can be seen; what a policy keeps of them is unaccounted",
    Mark.COMPILED: "what runs inside is in this row, or in its parent's",
    Mark.OTHER_HOOKS: "saved-tensor hooks set inside the model hide what these rows save",
    Mark.BACKEND_DEPENDENT: "what these rows save is decided by the backend's library",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleNode:
    fqn: str
    module: nn.Module
    parent: int | None
    depth: int
    self_param_bytes: int
    self_host_param_bytes: int
    marks: tuple[str, ...]
    compiled: bool


class ModuleTree:
    """The modules in `model`, each once, parents before children; `outside` is the row for work outside of any module."""

    def __init__(self, model: nn.Module, streamed: StreamedWeights = NOTHING_STREAMED) -> None:
        on_host, layers = unique_storages(streamed.parameters), {id(layer) for layer in streamed.layers}
        sharded = {id(module) for module in fsdp_modules([model])}
        num_names = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
        index_of: dict[str, int] = {}
        owned: set[int] = set()
        nodes = self.nodes = list[ModuleNode]()
        for fqn, module in model.named_modules():
            parent = index_of[fqn.rpartition(".")[0]] if fqn else None
            self_param_bytes = self_host_param_bytes = 0
            for param in module.parameters(recurse=False):
                for storage in storages_of(param):
                    if storage_key(storage) not in owned:
                        owned.add(storage_key(storage))
                        self_param_bytes += storage.nbytes()
                        self_host_param_bytes += storage.nbytes() if storage_key(storage) in on_host else 0
            num_aliases = num_names[id(module)] - 1
            inside_compiled = parent is not None and nodes[parent].compiled
            compiled = inside_compiled or _hides_calls(module)
            marks = [f"+{num_aliases} alias" + "es" * (num_aliases > 1)] if num_aliases else []
            if id(module) in layers:
                marks.append(Mark.STREAMED.value)
            if id(module) in sharded:
                marks.append(Mark.SHARDED.value)
            if compiled and not inside_compiled:
                marks.append(Mark.COMPILED.value)
            index_of[fqn] = len(nodes)
            nodes.append(
                ModuleNode(
                    fqn=fqn,
                    module=module,
                    parent=parent,
                    depth=0 if parent is None else nodes[parent].depth + 1,
                    self_param_bytes=self_param_bytes,
                    self_host_param_bytes=self_host_param_bytes,
                    marks=tuple(marks),
                    compiled=compiled,
                )
            )
        self.outside = len(self.nodes)
        self._fqns = [node.fqn or ROOT_NAME for node in self.nodes] + [OUTSIDE_NAME]

    def fqn(self, index: int) -> str:
        return self._fqns[index]

    def hookable(self) -> Iterator[tuple[int, ModuleNode]]:
        """Yield the modules whose calls forward hooks can see, with their indices: compiled code and TorchScript take none."""
        for index, node in enumerate(self.nodes):
            inside_compiled = node.parent is not None and self.nodes[node.parent].compiled
            scripted = isinstance(node.module, torch.jit.ScriptModule)
            if not inside_compiled and not scripted and torch_private.code_when_compiled(node.module) is None:
                yield index, node

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for node in self.nodes:
            params = [(name, param.dtype, tuple(param.shape)) for name, param in node.module.named_parameters(recurse=False)]
            digest.update(repr((node.fqn, type(node.module).__qualname__, params)).encode())
        return digest.hexdigest()[:16]

    @property
    def has_compiled(self) -> bool:
        return any(node.compiled for node in self.nodes)


def _hides_calls(module: nn.Module) -> bool:
    """Tell whether calling a module runs code that hooks cannot look into: compiled code, or TorchScript."""
    return (
        isinstance(module, torch.jit.ScriptModule)
        or is_compiled(module)
        or any(
            hasattr(value, torch_private.COMPILED_FUNCTION_MARK)
            for place in (module, *type(module).__mro__)
            for value in vars(place).values()
        )
    )


def children_of(parents: Sequence[int | None]) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in parents]
    for index, parent in enumerate(parents):
        if parent is not None:
            children[parent].append(index)
    return children


class Signatures:
    def __init__(self) -> None:
        self._kinds: dict[int, dict[tuple[Shapes, Shapes], str]] = {}

    def hook(self, tree: ModuleTree, hooks: HookSet) -> None:
        for index, node in tree.hookable():
            hooks.after_forward(node.module, partial(self._note, index))

    def of(self, index: int) -> tuple[Shapes, Shapes, str, int]:
        """Return shapes of inputs and outputs, dtype of the first call, and the number of signatures."""
        kinds = self._kinds.get(index, {((), ()): ""})
        (inputs, outputs), dtype = next(iter(kinds.items()))
        return inputs, outputs, dtype, len(self._kinds.get(index, {}))

    def _note(self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        dtypes = (dtype_name(leaf.dtype) for leaf in torch_private.tree_leaves(output) if isinstance(leaf, Tensor))
        kind = (shapes_of((args, kwargs)), shapes_of(output))
        self._kinds.setdefault(index, {}).setdefault(kind, next(dtypes, ""))


def shapes_of(nested: Any) -> Shapes:
    """Return the shapes of the tensors in a nested structure; -1 for sizes that vary within a tensor."""
    return tuple(
        (-1,) * leaf.dim()
        if leaf.is_nested and leaf.layout == torch.strided
        else tuple(size if type(size) is int else -1 for size in leaf.shape)
        for leaf in torch_private.tree_leaves(nested)
        if isinstance(leaf, Tensor)
    )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
