"""Small steps of an optimizer's class, whole and apart, which tell whether parameters and windows can be stepped apart."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memkit.core import torch_private
from memkit.core.torch_state import is_dtensor, local_of
from memkit.device import default_generator
from memkit.optimizers import KeptState, kept_states, needs_master, shells
from memkit.optimizers.shells import Changes, Group
from memkit.plan.states import WINDOW_NUMEL

_MOST_GROUPS = 8
_NUM_STEPS = 4
_LARGEST_SIDE = 24
_MOST_CUT_GROUPS = 16
_NUM_CUT_STEPS = 6
_NUM_WINDOWS = 3


def generators_of(torch_device: torch.device) -> list[torch.Generator]:
    return [torch.default_generator, default_generator(torch_device)]


def states_of(generators: Sequence[torch.Generator]) -> list[Tensor]:
    return [generator.get_state() for generator in generators]


@contextmanager
def _seeding(torch_device: torch.device) -> Iterator[Callable[[int], bool]]:
    generators = generators_of(torch_device)
    before, seeded = states_of(generators), list[Tensor]()

    def seed(number: int) -> bool:
        has_drawn = bool(seeded) and not are_in_states(generators, seeded)
        for generator in generators:
            generator.manual_seed(number)
        seeded[:] = states_of(generators)
        return has_drawn

    try:
        yield seed
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


def are_in_states(generators: Sequence[torch.Generator], states: Sequence[Tensor]) -> bool:
    return all(torch.equal(one.get_state(), state) for one, state in zip(generators, states, strict=True))


def has_generators(optimizer: Optimizer) -> bool:
    own = [value for entries in (vars(optimizer), *optimizer.param_groups) for value in entries.values()]
    return any(isinstance(value, torch.Generator | random.Random) or _is_numpys(value) for value in own)


def _is_numpys(value: object) -> bool:
    kind = type(value)
    return kind.__module__.startswith("numpy.random") and kind.__name__ in ("Generator", "RandomState")


def refuse_by_kind(optimizer: object) -> None:
    if not isinstance(optimizer, Optimizer):
        inner = getattr(optimizer, "optimizer", None)
        hint = f". Pass what it wraps: .optimizer, a {type(inner).__name__}" if inner is not None else ""
        raise TypeError(f"StateOffload needs a torch.optim.Optimizer; found {type(optimizer).__name__}{hint}")
    name = type(optimizer).__name__
    if shells.needs_closure(optimizer):
        raise ValueError(
            f"StateOffload steps parameters in pieces, and {name} needs a closure, which it evaluates several times within a "
            "step. Use an optimizer whose step works without one"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError(
            f"StateOffload streams dense states, and {name} steps the rows of sparse gradients alone. Use sparse=False and Adam"
        )
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            raise ValueError("StateOffload needs a step that autograd does not follow; found differentiable=True. Leave it out")


def try_out(
    optimizer: Optimizer, *, torch_device: torch.device, master: torch.dtype | None
) -> tuple[dict[int, list[KeptState]], bool]:
    groups = groups_to_try(optimizer)
    if not groups:
        return {}, False
    name = type(optimizer).__name__
    draws, other, kept = has_generators(optimizer), None, None
    try:
        with _seeding(torch_device) as seed, torch.inference_mode(False), torch.no_grad():
            is_lazy = makes_states_in_steps(optimizer, groups, torch_device, master)
            whole, apart = (Trial(optimizer, groups, torch_device, master, has_states=not is_lazy) for _ in range(2))
            for step in range(_NUM_STEPS):
                is_last = step == _NUM_STEPS - 1
                seed(step)
                try:
                    whole.step_all(leaves_out=is_last)
                except Exception:
                    if is_last:  # it needs all gradients, also without memkit
                        break
                    raise
                draws = seed(step) or draws
                other = apart.step_each(leaves_out=is_last) or whole.differs_from(apart)
                if other is not None:
                    break
            if other is None:
                whole.step_none()
        if other is None:
            kept = kept_states(optimizer, master=master)
    except Exception as error:
        raise ValueError(
            f"StateOffload tried a step of {name} with two small tensors per group, to see what it keeps. It failed: "
            f"{type(error).__name__}: {error}"
        ) from error
    if kept is None and is_last:
        raise ValueError(
            f"StateOffload steps parameters that have a gradient, and {name} does something with those that have none: they "
            f"gave another {other}. Use an optimizer that leaves these out"
        )
    if kept is None:
        raise ValueError(
            f"StateOffload steps parameters in pieces, and {name} is not separable: stepped one by one, small tensors gave "
            f"another {other} than stepped together. Use an optimizer that steps each parameter by its own gradient"
        )
    return kept.of, draws or kept.draws


def makes_states_in_steps(
    optimizer: Optimizer, groups: list[Group], torch_device: torch.device, master: torch.dtype | None
) -> bool:
    """Tell whether the first step of a parameter makes its states. Adagrad of torch 2.11 makes them with the optimizer."""
    if not any(optimizer.state.get(parameter) for group in groups for parameter in group["params"]):
        return True
    try:
        Trial(optimizer, groups, torch_device, master).step_all(leaves_out=False)
    except KeyError:
        return False
    return True


def groups_to_try(optimizer: Optimizer) -> list[Group]:
    seen = set[torch.dtype]()
    new: list[Group] = []
    others: list[Group] = []
    for group in optimizer.param_groups:
        dtypes = {parameter.dtype for parameter in group["params"]}
        (others if dtypes <= seen else new).append(group)
        seen |= dtypes
    chosen = {id(group) for group in [*new, *[group for group in others if group["params"]][: max(0, _MOST_GROUPS - len(new))]]}
    return [group for group in optimizer.param_groups if id(group) in chosen]


class Trial:
    def __init__(
        self,
        optimizer: Optimizer,
        groups: list[Group],
        torch_device: torch.device,
        master: torch.dtype | None,
        *,
        has_states: bool = False,
    ) -> None:
        self._optimizer = optimizer
        self.state: dict[Any, Any] = defaultdict(dict)
        generator = torch.Generator().manual_seed(0)
        self._kinds = [_dtypes_in(group) for group in groups]
        self.groups: list[Group] = []
        for group in groups:
            small = []
            for kind in _dtypes_in(group):
                first = max((each for each in group["params"] if each.dtype == kind), key=lambda each: local_of(each).numel())
                dtype = master if master is not None and needs_master(first, master) else kind
                entries = (optimizer.state.get(first) or {}) if has_states else {}
                entries = {name: local_of(value) if isinstance(value, Tensor) else value for name, value in entries.items()}
                start = 0
                for values in self._tensors_like(first, dtype, generator):
                    small.append(nn.Parameter(values.to(torch_device), requires_grad=dtype.is_floating_point))
                    if entries:
                        self.state[small[-1]] = {
                            name: _part(value, local_of(first), small[-1], start) for name, value in entries.items()
                        }
                    start += values.numel()
            trial = {
                name: shells.told_apart(value, len(group["params"]))
                for name, value in shells.own_group(optimizer, group).items()
            }
            if "param_names" in group:
                trial["param_names"] = [f"parameter {index}" for index in range(len(small))]
            if torch_device.type == "cpu" and trial.get("capturable"):
                trial["capturable"] = False
            self.groups.append({**trial, "params": small})
        self.parameters = [parameter for group in self.groups for parameter in group["params"]]
        self.generator = generator
        self.attributes = shells.own_attributes(optimizer)
        shell = self._shell(self.groups, self.state)
        shells.put_in_train_mode(shell)
        self.attributes.update(shells.changes_of_shell(vars(optimizer), shell))

    def _tensors_like(self, parameter: Tensor, dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
        size = [min(length, _LARGEST_SIDE) for length in parameter.size()]
        return [values_of(size, dtype, generator) for _ in range(2)]

    def _give_gradients(self, *, leaves_out: bool) -> None:
        for parameter in self.parameters:
            parameter.grad = values_of(list(parameter.size()), parameter.dtype, self.generator).to(parameter.device)
        if leaves_out:
            for group in self.groups:
                group["params"][0].grad = None

    def _shell(self, groups: list[Group], state: dict[Any, Any]) -> Optimizer:
        shell = shells.shell_of(self._optimizer, groups, state)
        vars(shell).update(self.attributes)
        return shell

    def step_none(self) -> None:
        shells.step_of(self._optimizer)(self._shell([shells.emptied(group) for group in self.groups], defaultdict(dict)))

    def step_all(self, *, leaves_out: bool) -> None:
        self._give_gradients(leaves_out=leaves_out)
        shell = self._shell(self.groups, self.state)
        shells.step_of(self._optimizer)(shell)
        self.attributes.update(shells.changes_of_shell(vars(self._optimizer), shell))

    def step_each(self, *, leaves_out: bool) -> str | None:
        self._give_gradients(leaves_out=leaves_out)
        found: dict[int, Changes] = {}
        of_optimizer: Changes | None = None
        for number, group in enumerate(self.groups):
            versions = shells.versions_in(group)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                cut = {**group, "params": [parameter]}
                state: dict[Any, Any] = defaultdict(dict)
                if parameter in self.state:
                    state[parameter] = self.state[parameter]
                shell = self._shell([cut], state)
                before = {**vars(shell)}
                shells.step_of(self._optimizer)(shell)
                others = [key for key in state if key is not parameter]
                if others:
                    return f"state ({others[0]!r}, which is of no parameter)"
                self.state[parameter] = state[parameter]
                changes = shells.changes_of_group(group, cut)
                name = shells.differing(found.setdefault(number, changes), changes)
                own = shells.changes_of_shell(before, shell)
                of_optimizer = own if of_optimizer is None else of_optimizer
                name = name or shells.differing(of_optimizer, own)
                if name is not None:
                    return f'"{name}"'
            if shells.versions_in(group) != versions:
                return "entry of its groups, a tensor that is written to in place,"
        for number, changes in found.items():
            self.groups[number].update(changes)
        self.attributes.update(of_optimizer or {})
        return None

    def differs_from(self, other: Trial) -> str | None:
        for mine, others in zip(self.parameters, other.parameters, strict=True):
            if not have_same_bits(mine, others):
                return "parameter"
            for name, value in self.state.get(mine, {}).items():
                if isinstance(value, Tensor) and not have_same_bits(value, other.state[others].get(name)):
                    return f'state ("{name}")'
        return self.differs_in_groups(other)

    def differs_in_groups(self, other: Trial) -> str | None:
        for group, others_group in zip(self.groups, other.groups, strict=True):
            for name in shells.changes_of_group(group, others_group):
                return f'entry of its groups ("{name}")'
        known = vars(self._optimizer)
        for name, value in {**known, **self.attributes}.items():
            if shells.may_be_written(name, value) and not shells.are_alike(value, other.attributes.get(name, known.get(name))):
                return f'attribute ("{name}")'
        return None


def _dtypes_in(group: Group) -> list[torch.dtype]:
    return list(dict.fromkeys(parameter.dtype for parameter in group["params"]))


def _part(value: Any, parameter: Tensor, small: Tensor, start: int) -> Any:
    if not isinstance(value, Tensor) or value.size() != parameter.size():
        return value.clone() if isinstance(value, Tensor) else value
    if not value.numel():  # of a shard that is empty here
        return torch.zeros_like(small, dtype=small.dtype if value.dtype == parameter.dtype else value.dtype)
    elements = torch.arange(start, start + small.numel(), device=value.device) % value.numel()
    dtype = small.dtype if value.dtype == parameter.dtype else value.dtype
    return value.reshape(-1)[elements].reshape(small.size()).to(small.device, dtype)


def values_of(size: list[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(size, generator=generator).to(dtype)


def have_same_bits(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or torch_private.is_wrapper(one):
        return isinstance(one, Tensor) and isinstance(other, Tensor)
    if one.dtype != other.dtype or one.size() != other.size():
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))


def find_elementwise(
    optimizer: Optimizer, groups: list[Group], *, torch_device: torch.device, master: torch.dtype | None
) -> list[bool]:
    """Tell for each group whether its parameters can be stepped in windows, bit for bit. Of many groups some are tried."""
    found = [_is_elementwise(optimizer, group, torch_device, master) for group in groups[:_MOST_CUT_GROUPS]]
    return found + [all(found)] * (len(groups) - len(found))


def refuse_mixed_shards(optimizer: Optimizer, *, torch_device: torch.device, master: torch.dtype | None) -> None:
    """Raise if an optimizer has shards, and steps an element by others of its parameter: these may be on other ranks."""
    by_dim = defaultdict[int, list[Group]](list)
    for group in optimizer.param_groups:
        shards = [parameter for parameter in group["params"] if is_dtensor(parameter)]
        for dim in sorted({shard.dim() for shard in shards}):
            by_dim[dim].append({**group, "params": [shard for shard in shards if shard.dim() == dim]})
    for dim, groups in by_dim.items():
        if not all(find_elementwise(optimizer, groups, torch_device=torch_device, master=master)):
            raise ValueError(
                f"StateOffload steps shards (DTensor) on each rank by itself, for which each element has to be stepped by "
                f"itself; found {type(optimizer).__name__}, which steps those of {dim} dimensions otherwise. Use an optimizer "
                "such as AdamW for them, or leave them to one without a StateOffload"
            )


def _is_elementwise(optimizer: Optimizer, group: Group, torch_device: torch.device, master: torch.dtype | None) -> bool:
    try:
        with _seeding(torch_device) as seed, torch.inference_mode(False), torch.no_grad():
            has_states = not makes_states_in_steps(optimizer, [group], torch_device, master)
            whole = _WholeTrial(optimizer, [group], torch_device, master, has_states=has_states)
            cut = _CutTrial(optimizer, [group], torch_device, master, has_states=has_states)
            for step in range(_NUM_CUT_STEPS):
                seed(step)
                whole.step_all(leaves_out=False)
                if seed(step):
                    return False  # windows draw other random numbers than the whole
                if cut.step_each(leaves_out=False) is not None or not cut.is_like(whole):
                    return False
    except Exception:  # such as of a class that steps matrices alone
        return False
    return True


class _WholeTrial(Trial):
    """Has a tensor of each precision, some windows large, of as many dimensions as the parameters have."""

    def _tensors_like(self, parameter: Tensor, dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
        return [values_of(_size_like(parameter), dtype, generator)]


class _CutTrial(Trial):
    def _tensors_like(self, parameter: Tensor, dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
        return _windows_of(values_of(_size_like(parameter), dtype, generator))

    def _give_gradients(self, *, leaves_out: bool) -> None:
        rest = iter(self.parameters)
        for parameter in rest:
            windows = [parameter, *(next(rest) for _ in range(_NUM_WINDOWS - 1))]
            flat = values_of([sum(map(Tensor.numel, windows))], parameter.dtype, self.generator).to(parameter.device)
            for window, grad in zip(windows, _windows_of(flat), strict=True):
                window.grad = grad

    def is_like(self, whole: Trial) -> bool:
        for number, parameter in enumerate(whole.parameters):
            windows = self.parameters[number * _NUM_WINDOWS : (number + 1) * _NUM_WINDOWS]
            if not self._are_like(parameter, windows, whole):
                return False
        return self.differs_in_groups(whole) is None

    def _are_like(self, parameter: nn.Parameter, windows: list[nn.Parameter], whole: Trial) -> bool:
        if not _is_made_of(parameter, windows, parameter):
            return False
        entries = whole.state.get(parameter, {})
        rows = [self.state.get(window, {}) for window in windows]
        if any(row.keys() != entries.keys() for row in rows):
            return False
        for name, value in entries.items():
            parts = [row[name] for row in rows]
            if isinstance(value, Tensor) and value.dim():
                if not _is_made_of(value, parts, parameter):
                    return False
            elif not all(shells.are_alike(value, part) for part in parts):
                return False
        return True


def _windows_of(values: Tensor) -> list[Tensor]:
    return list(values.reshape(-1).split(WINDOW_NUMEL))


def _size_like(parameter: Tensor) -> list[int]:
    size = [7, *[1] * (parameter.dim() - 2)] if parameter.dim() > 1 else []
    rows = (2 * WINDOW_NUMEL + WINDOW_NUMEL // 3) // math.prod(size)
    return [rows + 1 - rows % 2, *size]


def _is_made_of(value: Tensor, parts: Sequence[Tensor], parameter: Tensor) -> bool:
    """Tell whether a state has an element for each of the parameter's, in order, and the windows' states are the same."""
    if torch_private.is_wrapper(value) or value.size() != parameter.size() or not value.is_contiguous():
        return False
    if not all(isinstance(part, Tensor) and part.dim() == 1 for part in parts):
        return False
    return have_same_bits(value.view(-1), torch.cat(list(parts)))
