"""The modules of a model that are layers, and may stream."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import type_before_parametrizations

from memkit.core import torch_private
from memkit.core.tensors import parts_of
from memkit.core.torch_state import is_dtensor, is_sharded_by_fsdp
from memkit.errors import LayerOffloadError
from memkit.plan import slot_sizes
from memkit.weights.chunks import LayerChunk

_Module = TypeVar("_Module", bound=nn.Module)

LayerChoice = Iterable[str | nn.Module] | Callable[[str, nn.Module], bool] | None
"""Names or modules, or a predicate of name and module; None for the lists of equal modules that matter."""

_SHARE_OF_LONGEST = 0.5
"""Lists with at least this share of the longest one's elements count as well: a model may have two kinds of layers."""
_MAX_SLOTS = 3
"""The default of `LayerOffload`. The layers found do not depend on the number it is given."""
_MOST, _CLEARLY, _FAR = 1 / 2, 1 / 10, 2
"""Blocks replace their stages if they are most of these by bytes, free so much of all more, and so many times as much."""


def find_layers(model: nn.Module, choice: LayerChoice, *, feature: str = "LayerOffload") -> dict[str, nn.Module]:
    modules = dict(model.named_modules(remove_duplicate=False))
    is_one = isinstance(choice, str | nn.Module)
    if is_one or not (choice is None or callable(choice) or isinstance(choice, Iterable)):
        what = f"one {type(choice).__name__}" if is_one else repr(choice)
        raise TypeError(f"layers is a list of names or modules, or a predicate; found {what}")
    if choice is None:
        found = _elements_of_lists(modules)
        scripted = next((name for name, module in modules.items() if isinstance(module, torch.jit.ScriptModule)), None)
        if not found and scripted is not None:
            raise ValueError(
                f"{feature} needs layers that hooks can be set on; found none, and {quoted(scripted)} compiled by "
                "torch.jit.script or torch.jit.trace. Leave it as it is (torch.compile works), or name other layers by layers="
            )
        if not found:
            raise ValueError(
                f"{type(model).__name__} has no layers that could be found: no ModuleList (or Sequential) of at least two "
                f"modules of one class. Name them: {feature}(model, layers=[...])"
            )
    elif callable(choice):
        found = {name: module for name, module in modules.items() if module is not model and choice(name, module)}
        found = _outermost(found)
        if not found:
            raise ValueError("layers: the predicate is true for none of the modules")
    else:
        found = _named(modules, choice)
    outermost = _outermost(found)
    if nested := [name for name in found if name not in outermost]:
        raise ValueError(f'layers: "{nested[0]}" is inside of another layer. Layers must not contain each other')
    names = dict[int, str]()
    for name in modules:
        if name in found:
            names.setdefault(id(found[name]), name)
    return {name: found[name] for name in names.values()}


def _named(modules: dict[str, nn.Module], choice: Iterable[str | nn.Module]) -> dict[str, nn.Module]:
    names = {id(module): name for name, module in reversed(modules.items())}  # the first name of each
    found: dict[str, nn.Module] = {}
    for item in choice:
        if isinstance(item, nn.Module):
            name = names.get(id(item))
            if name is None:
                raise ValueError(f"layers: a {type(item).__name__} is not a module of the model")
        elif isinstance(item, str):
            name = item
            if name not in modules:
                raise ValueError(f'layers: the model has no module "{name}"')
        else:
            raise TypeError(f"layers holds names or modules; found {type(item).__name__}")
        found[name] = modules[name]
    if not found:
        raise ValueError("layers is empty: name at least one, or leave it out to have them found")
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _List:
    is_module_list: bool
    layers: Mapping[str, nn.Module]

    @property
    def role(self) -> Hashable:
        """Equal for lists that belong together: their layers are of one class that is not torch's."""
        kinds = frozenset(map(type_before_parametrizations, self.layers.values()))
        return id(self) if any(kind.__module__.startswith("torch.nn") for kind in kinds) else kinds


def _elements_of_lists(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the elements of the lists of one class that free the most device memory, or of stages the blocks in them."""
    lists = [
        _List(isinstance(module, nn.ModuleList), _resolved(name, module))
        for name, module in _lists_in(modules, at_least=2).items()
    ]
    groups = defaultdict[Hashable, list[_List]](list)
    for found in lists:
        groups[found.role].append(found)
    if not groups:
        return {}
    main = max(groups.values(), key=lambda group: (_freed_bytes(_joined(group)), _num_bytes(_joined(group))))
    chosen, longest = _joined(main), max(len(found.layers) for found in main)

    def counts(found: _List) -> bool:
        is_long = found.is_module_list == main[0].is_module_list and len(found.layers) >= _SHARE_OF_LONGEST * longest
        return found in main or (is_long and _freed_bytes({**chosen, **found.layers}) > _freed_bytes(chosen))

    return _joined(found for found in lists if counts(found))


def _joined(lists: Iterable[_List]) -> dict[str, nn.Module]:
    return {name: module for found in lists for name, module in found.layers.items()}


def _lists_in(modules: Mapping[str, nn.Module], *, at_least: int) -> dict[str, nn.ModuleList | nn.Sequential]:
    lists = {name: module for name, module in modules.items() if isinstance(module, nn.ModuleList | nn.Sequential)}
    found = {name: module for name, module in lists.items() if len({*map(type_before_parametrizations, module)}) == 1}
    return _outermost(
        {
            name: module
            for name, module in found.items()
            if len(module) >= at_least and any(True for _ in module[0].parameters())
        }
    )


def _resolved(name: str, module: nn.ModuleList | nn.Sequential) -> dict[str, nn.Module]:
    """Return the elements of a list, or the blocks in them if they make up most of them and free far more."""
    elements = {f"{name}.{key}" if name else key: item for key, item in module.named_children()}
    if all(isinstance(item, nn.ModuleList) for item in elements.values()):  # no forward calls these
        lists = {prefix: item for prefix, item in elements.items() if isinstance(item, nn.ModuleList)}
        return {key: block for prefix, item in lists.items() for key, block in _resolved(prefix, item).items()}
    blocks = {key: block for prefix, item in elements.items() for key, block in _blocks_of(prefix, item).items()}
    all_bytes = _num_bytes(elements)
    is_most = _num_bytes(blocks) >= _MOST * all_bytes
    is_more = _freed_bytes(blocks) >= _freed_bytes(elements) + _CLEARLY * all_bytes
    is_far_more = _freed_bytes(blocks, [_MAX_SLOTS]) >= _FAR * _freed_bytes(elements, [_MAX_SLOTS])
    return blocks if is_most and is_more and is_far_more else elements


def _blocks_of(name: str, stage: nn.Module) -> dict[str, nn.Module]:
    lists = _lists_in(dict(stage.named_modules(prefix=name, remove_duplicate=False)), at_least=1)
    blocks = {f"{path}.{key}": block for path, found in lists.items() for key, block in found.named_children()}
    have_modules = all(any(name != "parametrizations" for name, _ in block.named_children()) for block in blocks.values())
    return blocks if blocks and have_modules else {name: stage}


def _num_bytes(layers: Mapping[str, nn.Module]) -> int:
    return sum(_sizes_bytes(layers))


def _sizes_bytes(layers: Mapping[str, nn.Module]) -> list[int]:
    distinct = {id(layer): layer for layer in layers.values()}
    return [sum(parameter.nbytes for parameter in layer.parameters()) for layer in distinct.values()]


def _freed_bytes(layers: Mapping[str, nn.Module], nums_slots: Sequence[int] = range(1, _MAX_SLOTS + 1)) -> float:
    sizes_bytes = _sizes_bytes(layers)
    slots_bytes = sum(sum(slot_sizes(sizes_bytes, num_slots)) for num_slots in nums_slots)
    return sum(sizes_bytes) - slots_bytes / len(nums_slots)


def _outermost(found: Mapping[str, _Module]) -> dict[str, _Module]:
    inside = {id(inner) for module in found.values() for inner in module.modules() if inner is not module}
    return {name: module for name, module in found.items() if id(module) not in inside}


def refuse_unmovable(model: nn.Module, *, reads_weights: bool) -> None:
    """Raise if a tensor has no data (without `reads_weights`), can't be given other data, or another library moves it."""
    for name, module in model.named_modules():
        if is_sharded_by_fsdp(module):
            kind = type(module).__name__
            raise ValueError(
                f'LayerOffload: "{name or kind}" is wrapped by FSDP ({kind}), which moves its parameters itself. Use one of '
                "the two: FSDP2 has torch.distributed.fsdp.CPUOffloadPolicy"
            )
    for name, parameter in model.named_parameters():
        if is_dtensor(parameter.data):
            raise ValueError(f'LayerOffload: "{name}" is a DTensor, whose shards another library moves. Use one of the two')
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(f'LayerOffload: "{name}" has no data: its module is lazy. Run the model once first')
        if tensor.is_meta and not reads_weights:
            raise ValueError(
                f'LayerOffload: "{name}" has no data (device "meta"). Name the files that have it by weights=, or load the '
                "weights first, on the CPU"
            )
        if any(part.is_inference() for part in parts_of(tensor)):
            raise ValueError(f'LayerOffload: "{name}" was made in inference mode, so that it cannot be moved. Make it outside')


def refuse_scripted(model: nn.Module, layers: Mapping[str, nn.Module], *, steps_all: bool) -> None:
    """Raise if TorchScript, which allows no hooks, has compiled a layer, or with `steps_all` any trained module."""
    advice = "Leave it as it is (torch.compile works)"
    scripted = {name: module for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)}
    within = {id(inner): name for name, module in reversed(scripted.items()) for inner in module.modules()}
    for layer, module in layers.items():
        for inner in module.modules():
            if id(inner) in within:
                name = within[id(inner)]
                where = f', which is in "{layer}"' if inner is not module else f', with "{layer}" in it'
                raise ValueError(
                    "LayerOffload needs layers that hooks can be set on; found that torch.jit.script or torch.jit.trace has "
                    f"compiled {quoted(name)}{'' if name == layer else where}. {advice}, or name other layers by layers="
                )
    for name, module in scripted.items():
        if steps_all and any(parameter.requires_grad for parameter in module.parameters()):
            raise ValueError(
                f'LayerOffload: train="fused" needs modules that hooks can be set on; found that torch.jit.script or '
                f'torch.jit.trace has compiled "{name}", which is trained. {advice}, or use train="host"'
            )


def quoted(name: str) -> str:
    return f'"{name}"' if name else "the model"


def refuse_replicas(model: nn.Module, train: str) -> None:
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise ValueError(
                f'LayerOffload: train="{train}" takes gradients away that {type(module).__name__} would reduce. Use FSDP2 to '
                'train on several devices, or train="frozen" (LoRA)'
            )


def refuse_replicated(chunks: Iterable[LayerChunk]) -> None:
    """Raise if the present forward is one within DistributedDataParallel."""
    # Source: torch.nn.parallel.DistributedDataParallel._inside_ddp_forward.
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return  # without a group of processes there is no such module
    active = torch_private.active_replica(nn.parallel.DistributedDataParallel)
    if active is None:
        return
    reduced = {id(parameter) for parameter in torch_private.parameters_of_replica(active)}
    for streamed in (item for chunk in chunks for item in chunk.parameters):
        if id(streamed.parameter) in reduced and streamed.parameter.requires_grad:
            raise LayerOffloadError(
                f'"{streamed.name}" streams and is trained, and the model runs within DistributedDataParallel, which would '
                "reduce gradients that are taken away before. Train the plain model on one device; on several use FSDP2, or "
                'train="frozen" (LoRA)'
            )
