"""The modules of a model that are layers, the share of them that streams (by arguments or a measured step), and their mode."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import type_before_parametrizations

from memkit.core import backwards, torch_private
from memkit.core.sizes import check_budget_bytes, format_bytes
from memkit.core.tensors import has_plain_parts, is_plain, parts_of, unique_storages
from memkit.core.torch_state import is_dtensor, is_sharded_by_fsdp
from memkit.device import Device, why_nothing_is_freed
from memkit.device.base import Event
from memkit.errors import LayerOffloadError, warn_user
from memkit.plan import (
    LayerCosts,
    ResidencyPlan,
    plan_again,
    plan_auto,
    plan_budget,
    plan_resident,
    plan_streamed_ratio,
    slot_sizes,
)
from memkit.transfer.disk import Disk
from memkit.transfer.lanes import Transfer
from memkit.weights.chunks import LayerChunk
from memkit.weights.fused import MakeOptimizer
from memkit.weights.host_copies import shared_between

if TYPE_CHECKING:
    from memkit.weights.streaming import Streamer

_Module = TypeVar("_Module", bound=nn.Module)
LayerChoice = Iterable[str | nn.Module] | Callable[[str, nn.Module], bool] | None  # None: the lists that matter
_SHARE_OF_LONGEST = 0.5  # of the longest list's elements: such lists count as well, as of a second kind of layers
_MAX_SLOTS = 3  # The default of `LayerOffload`. The layers found do not depend on the number it is given.
_MOST, _CLEARLY, _FAR = 1 / 2, 1 / 10, 2  # blocks stream if they are most of the bytes, and free so much more than stages
_MOST_WITHOUT_BACKWARD = 3  # after this many forwards in grad mode without a backward none is expected
_MOST_SAMPLES = 32
_TRAIN = ("auto", "frozen", "host", "fused")
_MOSTLY = 0.5  # layers are trained if more than this share of their bytes requires grad
_USABLE = 0.95  # of the bytes that the process may allocate: the rest is lost between blocks
_BYTES_PER_TRAINED_BYTE = 4  # a weight, its gradient, and two values of the optimizer


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
    found_in = _lists_in(modules, at_least=2).items()
    lists = [_List(isinstance(module, nn.ModuleList), _resolved(name, module)) for name, module in found_in]
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
    long = {name: module for name, module in found.items() if len(module) >= at_least}
    return _outermost({name: module for name, module in long.items() if any(True for _ in module[0].parameters())})


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    forward_s: Mapping[str, float]
    backward_s: Mapping[str, float]
    taken_s: float
    h2d_bytes_per_s: float | None
    peak_bytes: int | None


@dataclass(slots=True)
class _Point:
    name: str | None
    is_backward: bool
    before: Event
    after: Event


class StepTiming:
    """Times the second pass of its kind: the first chooses kernels. If `is_trained`, samples ahead of it don't count."""

    def __init__(self, streamer: Streamer, *, is_trained: bool, resets_peak: bool) -> None:
        self._device, self._streamer = streamer.device, streamer
        self._resets_peak = resets_peak
        self._num_unfit_left = {True: _MOST_WITHOUT_BACKWARD, False: _MOST_SAMPLES if is_trained else 0}
        self._points: list[_Point] = []
        self._transfers: list[Transfer] = []
        self._seen = set[bool]()
        self._has_grad = self._is_timing = self._is_timed = False
        self._backward = -1

    def begin_pass(self) -> bool:
        if self._is_timed:
            return True
        is_timed = any(not point.is_backward and point.name for point in self._points)
        if is_timed and not any(point.is_backward for point in self._points):
            self._num_unfit_left[self._has_grad] -= 1
            is_timed = self._num_unfit_left[self._has_grad] < 0
        if is_timed:
            self.end_layer()
            self._is_timed, self._streamer.transfers = True, None
            return True
        self._has_grad = torch.is_grad_enabled()
        self._is_timing = self._has_grad in self._seen
        self._seen.add(self._has_grad)
        self._points.clear()
        self._transfers = []
        self._streamer.transfers = self._transfers if self._is_timing else None
        if self._is_timing and self._resets_peak:
            counter = self._device.memory_counter()
            if counter is not None:
                counter.reset_peak()
        return False

    def begin_layer(self, name: str) -> None:
        if not self._is_timing or self._is_timed:
            return
        task = torch_private.backward_task()
        is_backward = task != -1
        last = self._points[-1] if self._points else None
        if last is not None and (last.name, last.is_backward) == (name, is_backward):
            return
        self._add(name, is_backward)
        if is_backward and task != self._backward:
            backwards.on_end(lambda has_failed: self.fail() if has_failed else self.end_layer())
            self._backward = task

    def _add(self, name: str | None, is_backward: bool) -> None:
        now = self._device.record_event()
        self._points.append(_Point(name, is_backward, now, now))

    def note_ready(self) -> None:
        if self._points and self._points[-1].after is self._points[-1].before:
            self._points[-1].after = self._device.record_event()

    def end_layer(self) -> None:
        if self._points and self._points[-1].name is not None and not self._is_timed:
            self._add(None, self._points[-1].is_backward)

    def fail(self) -> None:
        if not self._is_timed:
            self._points.clear()

    def result(self) -> StepTimes:
        self._device.synchronize(self._points[-1].before)
        forward_s, backward_s = Counter[str](), Counter[str]()
        taken_s = 0.0
        for point, following in pairwise(self._points):
            if point.name is not None:
                seconds: Any = backward_s if point.is_backward else forward_s
                seconds[point.name] += max(point.after.elapsed_s(following.before), 0.0)
                taken_s += point.before.elapsed_s(following.before)
        copied = [transfer for transfer in self._transfers if transfer.done.is_reached()]
        copied_s = sum(transfer.started.elapsed_s(transfer.done) for transfer in copied)
        counter = self._device.memory_counter()
        return StepTimes(
            forward_s=forward_s,
            backward_s=backward_s,
            taken_s=taken_s,
            h2d_bytes_per_s=sum(transfer.num_bytes for transfer in copied) / copied_s if copied_s > 0 else None,
            peak_bytes=None if counter is None else counter.peak_bytes(),
        )


def choose_mode(train: str, layers: Mapping[str, nn.Module], optimizer: MakeOptimizer | None) -> str:
    if train not in _TRAIN:
        raise ValueError(
            f"LayerOffload needs train= one of {', '.join(map(repr, _TRAIN))}; found {train!r}. Omit it to have the mode "
            "chosen by what requires grad"
        )
    if optimizer is not None and (train not in ("auto", "fused") or not callable(optimizer)):
        raise ValueError(f'optimizer makes the optimizer for train="fused"; found {optimizer!r} with train="{train}"')
    if train == "fused" and optimizer is None:
        raise ValueError('train="fused" needs an optimizer, such as functools.partial(torch.optim.AdamW, lr=1e-4); found None')
    if train == "auto" and optimizer is not None:
        return "fused"
    if train != "auto":
        return train
    parameters = [parameter for layer in layers.values() for parameter in layer.parameters()]
    trained_bytes = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    return "host" if trained_bytes > _MOSTLY * sum(parameter.nbytes for parameter in parameters) else "frozen"


def check_disk(disk: object, *, train: str, offload_ratio: float | str | None) -> None:
    if disk is None:
        return
    if not isinstance(disk, Disk):
        raise TypeError(f'disk is a memkit.Disk, such as memkit.Disk("/scratch"); found {disk!r}')
    if train != "frozen":
        raise ValueError(
            f'disk= is for frozen layers, train="frozen": others would be written to the disk in each step; found '
            f'train="{train}". Leave one of them out'
        )
    if isinstance(offload_ratio, str):
        raise ValueError(
            f"disk= needs a number as offload_ratio, or budget or num_resident: what is measured is the link, not the disk; "
            f'found offload_ratio="{offload_ratio}"'
        )


def chunks_of(model: nn.Module, layers: Mapping[str, nn.Module], *, is_trained: bool) -> dict[str, LayerChunk]:
    """Return each layer's parameters that may stream: not shared with others, and frozen unless `is_trained`."""
    tied, found = shared_between(model, layers), dict[str, LayerChunk]()
    seen = set[int]()
    for name, module in layers.items():
        chosen = []
        for parameter in module.parameters():
            must_be_frozen = not is_trained or not is_plain(parameter)
            if not has_plain_parts(parameter) or not parameter.numel() or (parameter.requires_grad and must_be_frozen):
                continue
            shared = [key for key in unique_storages([parameter]) if key in tied]
            for key in shared:
                if key not in seen:
                    seen.add(key)
                    warn_user(f"LayerOffload: {', '.join(tied[key])} share their bytes, so they stay on the device")
            if not shared:
                chosen.append(parameter)
        if chosen:
            found[name] = LayerChunk(name, module, chosen, len(found))
    return found


def plan_layers(
    layers: Mapping[str, LayerChunk | None],
    *,
    offload_ratio: float | str | None,
    budget: int | str | None,
    num_resident: int | None,
    num_slots: int,
    state_bytes: int,
) -> ResidencyPlan:
    """Return which layers stream: with "auto", all at first. Exactly one of the sizes is not None."""
    sizes = {"offload_ratio": offload_ratio, "budget": budget, "num_resident": num_resident}
    given = [name for name, size in sizes.items() if size is not None]
    if len(given) != 1:
        raise ValueError(
            f"LayerOffload takes exactly one of offload_ratio, budget and num_resident; found {' and '.join(given) or 'none'}"
        )
    if not any(layers.values()) and offload_ratio != 0 and num_resident != len(layers):
        raise ValueError(
            'LayerOffload: none of the layers has parameters that may stream. With train="frozen" those that require grad '
            "stay on the device, and tied ones do always"
        )
    costs = costs_of(layers)
    if isinstance(offload_ratio, str):
        if offload_ratio != "auto":
            raise ValueError(f'offload_ratio is a number from 0 to 1, or "auto"; found {offload_ratio!r}')
        return plan_streamed_ratio(costs, 1.0, num_slots=num_slots)
    if offload_ratio is not None:
        return plan_streamed_ratio(costs, offload_ratio, num_slots=num_slots)
    if num_resident is not None:
        return plan_resident(costs, num_resident, num_slots=num_slots)
    assert budget is not None
    budget_bytes = check_budget_bytes("budget", budget)
    return plan_budget(costs, budget_bytes, num_slots=num_slots, state_bytes=state_bytes)


def why_layers_free_nothing(
    layers: Mapping[str, LayerChunk | None], plan: ResidencyPlan, device: Device, *, train: str, num_slots: int
) -> str | None:
    """Return a message if streaming frees no byte of the device; with train="host", gradients count as well."""
    if why := why_nothing_is_freed(device):
        return f"LayerOffload: {why}"
    costs = costs_of(layers)
    grad_bytes = sum(layer.grad_bytes for layer in costs if layer.name in plan.streamed) if train == "host" else 0
    if not plan.streamed or plan.freed_bytes + grad_bytes > 0:
        return None
    found = "1 layer streams" if len(plan.streamed) == 1 else f"{len(plan.streamed)} layers stream"
    for count in range(num_slots, 0, -1):
        freed_bytes = plan_streamed_ratio(costs, 1.0, num_slots=count).freed_bytes
        if freed_bytes > 0:
            all_stream = all(layer.name in plan.streamed for layer in costs if layer.num_bytes)
            changes = [] if all_stream else ["offload_ratio=1.0"]
            changes += [] if count == num_slots else [f"num_slots={count}"]
            wanted = "Take fewer slots" if all_stream else "Let more stream"
            advice = f"{wanted} ({', '.join(changes)} frees {format_bytes(freed_bytes)})"
            break
    else:
        advice = "Leave LayerOffload out, or name modules that are smaller and of about one size (layers=)"
    return (
        f"LayerOffload frees no memory on the device: {found} ({format_bytes(plan.streamed_bytes)}), and the slots on the "
        f"device take {format_bytes(sum(plan.slot_bytes))}, up to {num_slots} for layers of about one size. {advice}."
    )


def plan_measured(
    costs: list[LayerCosts], times: StepTimes, plan: ResidencyPlan, *, train: str, num_slots: int, capacity_bytes: int | None
) -> ResidencyPlan:
    """Return the plan that streams the most that hides; if the device has no room for the rest then, the least that fits."""
    if times.h2d_bytes_per_s is None:
        return plan_again(plan, costs, None)
    budget_bytes = None
    if capacity_bytes is not None and times.peak_bytes is not None:
        room_bytes = int(_USABLE * capacity_bytes) - times.peak_bytes
        budget_bytes = plan.device_bytes + room_bytes // (_BYTES_PER_TRAINED_BYTE if train == "host" else 1)
    try:
        return plan_auto(costs, num_slots=num_slots, link_bytes_per_s=times.h2d_bytes_per_s, budget_bytes=budget_bytes)
    except ValueError:  # not even the least fits by these figures, and yet it has run
        return plan_again(plan, costs, times.h2d_bytes_per_s)


def costs_of(layers: Mapping[str, LayerChunk | None], times: StepTimes | None = None) -> list[LayerCosts]:
    return [
        LayerCosts(
            name=name,
            num_bytes=0 if chunk is None else chunk.num_bytes,
            forward_s=None if times is None else times.forward_s.get(name, 0.0),
            backward_s=None if times is None else times.backward_s.get(name, 0.0),
            grad_bytes=sum(item.parameter.nbytes for item in chunk.parameters if item.parameter.requires_grad) if chunk else 0,
        )
        for name, chunk in layers.items()
    ]
