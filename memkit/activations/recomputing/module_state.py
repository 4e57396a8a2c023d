"""The state for a recompute of a region. `ModuleState`: parameters, buffers and training mode. `Surroundings`: random number
generators, autocast and grad mode. `LearnedReads`: modules whose forward only reads their buffers."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from memkit.core import torch_private
from memkit.core.sequentials import SequentialSpan
from memkit.core.torch_state import has_gathered
from memkit.device import default_generator
from memkit.recording.recording import Setting, change_settings, setting_getters


class NoRegion(Exception):  # noqa: N818  # it is no error
    pass


_MOST_CLONED_BYTES = 2**16
"""Up to this size, a recompute reads a clone of a buffer, and is exact even if the forward does write to it."""


class LearnedReads:
    last: ReadOnly | None = None
    """The state in which its forward only read its buffers; None if it wrote to one."""


@dataclass(frozen=True, slots=True)
class ReadOnly:
    """The state of a module whose forward wrote to no buffer. In the same state it is expected to write to none either, though
    it may depend on something else, such as a global or its inputs."""

    facts: tuple[tuple[Any, ...], ...]
    attributes: tuple[Any, ...]
    objects: tuple[weakref.ref[Any] | None, ...]
    small: frozenset[int]
    """Indices of buffers with at most `_MOST_CLONED_BYTES`."""


Surroundings = tuple[Any, ...]
"""A thread's autocast state, followed by the process-wide settings."""

_AUTOCAST: tuple[Setting, ...] = (
    (partial(torch.is_autocast_enabled, "cpu"), partial(torch.set_autocast_enabled, "cpu")),
    (partial(torch.get_autocast_dtype, "cpu"), partial(torch.set_autocast_dtype, "cpu")),
    (partial(torch.is_autocast_enabled, "cuda"), partial(torch.set_autocast_enabled, "cuda")),
    (partial(torch.get_autocast_dtype, "cuda"), partial(torch.set_autocast_dtype, "cuda")),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
)
_NESTING = partial(torch.autocast_increment_nesting), partial(torch.autocast_decrement_nesting)


@functools.cache
def _getters() -> tuple[partial[Any], ...]:
    return (*(partial(get) for get, _ in _AUTOCAST), *setting_getters())


def current_surroundings() -> Surroundings:
    return tuple(map(partial.__call__, _getters()))


def set_surroundings(wanted: Surroundings) -> None:
    found, num_autocast = current_surroundings(), len(_AUTOCAST)
    change_settings(found, wanted, _AUTOCAST)
    if found[:num_autocast] != wanted[:num_autocast] and list(map(partial.__call__, _NESTING))[-1] == 0:
        torch.clear_autocast_cache()  # as `torch.autocast` does when the outermost one is left


GeneratorState = tuple[torch.Generator, Any]
"""A generator with its state: for the CPU the state tensor, for a CUDA device the seed and the offset."""


_of_device: dict[torch.device, torch.Generator] = {}


def states_on(devices: Sequence[torch.device]) -> tuple[GeneratorState, ...]:
    states: list[GeneratorState] = []
    for device in devices:
        generator = _of_device.get(device)
        if generator is None:
            generator = _of_device[device] = default_generator(device)
        states.append((generator, (generator.initial_seed(), generator.get_offset())))
    return tuple(states)


def drawn_from(before: tuple[GeneratorState, ...]) -> tuple[GeneratorState, ...]:
    """Return the given states, the CPU's first, whose generator has moved on since."""
    cpu, state = before[0]
    if torch_private.num_dispatch_modes():
        with torch_private.without_python_dispatch():  # a comparison is no part of the forward
            is_same = torch.equal(state, cpu.get_state())
    else:
        is_same = torch.equal(state, cpu.get_state())
    drawn = () if is_same else before[:1]
    for one in before[1:]:
        if one[1] != (one[0].initial_seed(), one[0].get_offset()):
            drawn += (one,)
    return drawn


def set_generators(states: tuple[GeneratorState, ...]) -> None:
    for generator, state in states:
        if isinstance(state, Tensor):
            generator.set_state(state)
            continue
        seed, offset = state
        if generator.initial_seed() != seed:
            generator.manual_seed(seed)
        generator.set_offset(offset)


def states_of(generators: Sequence[GeneratorState]) -> tuple[GeneratorState, ...]:
    return tuple(
        (generator, generator.get_state() if isinstance(state, Tensor) else (generator.initial_seed(), generator.get_offset()))
        for generator, state in generators
    )


UPDATED_UNREAD = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""Modules that update their buffers in training mode without reading them for the output."""

NORMS = (*UPDATED_UNREAD, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)

training_flag = attrgetter("training")
_name_in = itemgetter(1)
_Parameter = nn.Parameter


PLAIN = frozenset({int, float, bool, str, type(None)})
NOT_PLAIN = object()
_OF_ALL = frozenset(vars(nn.Module()))


Statistics = list[tuple[dict[str, Tensor | None], str, Tensor, int, Tensor]]


class Noted:
    attributes: tuple[Any, ...]
    """The plain attributes of the submodules; `NOT_PLAIN` for one that has another type by now."""
    flags: tuple[bool, ...]
    parameters: tuple[int, ...]
    storages: tuple[torch.UntypedStorage, ...]
    """Held so that no other storage gets their addresses."""
    statistics: Statistics | tuple[()]
    buffers: tuple[Tensor | None, ...]
    versions: tuple[int, ...]
    clones: dict[int, Tensor]
    is_known: bool
    small: frozenset[int]
    """Small buffers that the forward is expected only to read, cloned in case it writes to them."""
    written: frozenset[int]
    lost: int
    """A buffer that the forward has written to and that was not cloned; -1 if there is none."""


class ModuleState:
    """Parameters that FSDP2 gathers are not there yet: see `look_again`."""

    def __init__(self, module: nn.Module, learned: LearnedReads) -> None:
        self.parts = parts_of(module)
        self.of_parts = tuple(map(torch_private.parameters_of, self.parts))
        self.is_gathered = has_gathered(self.parts)
        """FSDP2 gathers its parameters for each forward and backward: the same parameter objects, with other storages."""
        self._note_parameters(() if self.is_gathered else self.of_parts)
        self._owned = tuple(map(torch_private.buffers_of, self.parts))
        norms = [(index, part) for index, part in enumerate(self.parts) if isinstance(part, NORMS)]
        tracking = [index for index, part in norms if part.running_mean is not None]
        unread = [index for index in tracking if type(self.parts[index]) in UPDATED_UNREAD]
        self._updated = tuple([(index, self._owned[index]) for index in unread])
        self._unseen = tuple([index for index in tracking if index not in unread])
        """Other submodules that update statistics, which they read in evaluation mode."""
        self.has_statistics = bool(tracking)
        updated = {id(buffers) for _, buffers in self._updated}
        owned = [own for own in self._owned if own and id(own) not in updated] if any(self._owned) else ()
        self.places = tuple([(buffers, name) for buffers in owned for name in buffers])
        self._norms = tuple(
            [
                (index, frozenset([place for place, (buffers, _) in enumerate(self.places) if buffers is self._owned[index]]))
                for index, _ in norms
                if index not in unread
            ]
        )
        self.attributes: list[tuple[dict[str, Any], str]] = []
        self.attribute_dicts: list[dict[str, Any]] = []
        self.attribute_getters: list[itemgetter[Any]] = []
        for own in map(vars, self.parts):
            names = [name for name, value in own.items() if type(value) in PLAIN and name not in _OF_ALL]
            if names:
                names *= 1 + (len(names) == 1)  # with one name, a getter returns no tuple
                self.attributes += [(own, name) for name in names]
                self.attribute_dicts.append(own)
                self.attribute_getters.append(itemgetter(*names))
        self.has_others = bool(self._updated or self.places)
        self._scratch: dict[tuple[int, str], Tensor] = {}
        """Buffers that take the updates of a recompute."""
        self._written: dict[tuple[bool, ...], frozenset[int]] = {}
        self._learned = learned

    def look_again(self) -> None:
        self._note_parameters(self.of_parts)

    def _note_parameters(self, of_parts: Iterable[dict[str, nn.Parameter | None]]) -> None:
        all_parameters = tuple(chain.from_iterable(map(dict.values, of_parts)))
        self.ids = tuple(map(id, all_parameters))
        """Callers on the hot path compare the parameters' identities inline, to save a Python call."""
        by_id = dict(zip(self.ids, all_parameters, strict=True))
        self.parameters = tuple([own for own in by_id.values() if own is not None])
        strided = [] if self.is_gathered else [own for own in self.parameters if own.layout is torch.strided]
        self.with_data = tuple([own for own in strided if type(own) is _Parameter or not hasattr(own, "__tensor_flatten__")])
        self.parameter_facts: tuple[partial[Any], ...] = (
            partial(map, torch_private.version_of, self.parameters),
            partial(map, Tensor.data_ptr, self.with_data),
            partial(map, attrgetter("requires_grad"), self.parameters),
        )

    def is_current(self) -> bool:
        return tuple(map(id, chain.from_iterable(map(dict.values, self.of_parts)))) == self.ids

    @property
    def tensors(self) -> list[Tensor]:
        buffers = chain.from_iterable(map(dict.values, self._owned)) if any(self._owned) else ()
        return [*self.parameters, *[buffer for buffer in buffers if buffer is not None]]

    def have_hooks(self, first: int = 0) -> bool:
        hooks = [name for name in torch_private.MODULE_HOOKS for own in map(vars, self.parts[first:]) if own.get(name)]
        return bool(hooks)

    # Around the forward

    def statistics(self, flags: tuple[bool, ...]) -> Statistics:
        """Updates of statistics raise no version counter. Raises `NoRegion` for unsupported kinds."""
        found: Statistics = []
        for index in self._unseen:
            if not flags[index]:
                raise NoRegion(f"it reads the statistics of a {type(self.parts[index]).__name__}, which may be updated unseen")
        with torch.no_grad(), torch_private.without_python_dispatch():
            for index, buffers in self._updated:
                for name, buffer in () if flags[index] else buffers.items():
                    if buffer is not None:
                        found.append((buffers, name, buffer, torch_private.version_of(buffer), buffer.clone()))
        return found

    def note_buffers(self, noted: Noted) -> None:
        noted.buffers = tuple([buffers.get(name) for buffers, name in self.places])
        noted.versions, noted.written, noted.lost = _versions_of(noted.buffers), frozenset(), -1
        noted.is_known = noted.flags in self._written or self._is_as_learned(noted)
        last = self._learned.last
        may_write = self._may_write(noted.flags)
        noted.small = last.small - may_write if noted.is_known and last is not None else frozenset()
        places = may_write | noted.small if noted.is_known else range(len(self.places))
        noted.clones = {}
        if places:
            with torch.no_grad(), torch_private.without_python_dispatch():
                found = ((place, noted.buffers[place]) for place in places)
                noted.clones = {place: buffer.clone() for place, buffer in found if buffer is not None}

    def _facts(self, noted: Noted) -> tuple[tuple[Any, ...], ...]:
        return noted.flags, noted.versions, tuple(map(_name_in, self.attributes)), tuple(map(len, map(vars, self.parts)))

    def _is_as_learned(self, noted: Noted) -> bool:
        known, objects = self._learned.last, (*self.parts, *noted.buffers)
        return (
            known is not None
            and known.facts == self._facts(noted)
            and all(map(is_, known.attributes, noted.attributes))
            and len(known.objects) == len(objects)
            and all(map(is_, [reference and reference() for reference in known.objects], objects))
        )

    def _learn(self, noted: Noted) -> ReadOnly:
        objects = [None if found is None else weakref.ref(found) for found in (*self.parts, *noted.buffers)]
        sizes_bytes = {place: clone.untyped_storage().nbytes() for place, clone in noted.clones.items()}
        small = frozenset(place for place, num_bytes in sizes_bytes.items() if num_bytes <= _MOST_CLONED_BYTES)
        return ReadOnly(self._facts(noted), noted.attributes, tuple(objects), small)

    def _may_write(self, flags: tuple[bool, ...]) -> frozenset[int]:
        return self._written.get(flags, frozenset()).union(*[places for part, places in self._norms if flags[part]])

    def note_written(self, noted: Noted) -> None:
        now, found = tuple([buffers.get(name) for buffers, name in self.places]), _versions_of(noted.buffers)
        is_read = noted.is_known and noted.small.issuperset(noted.clones)
        if is_read and found == noted.versions and all(map(is_, now, noted.buffers)):
            return
        written = {
            place
            for place, (before, after) in enumerate(zip(noted.versions, found, strict=True))
            if before != after or now[place] is not noted.buffers[place]
        }
        if not noted.is_known:  # some ops write without raising the version counter
            with torch_private.without_python_dispatch():
                written |= {place for place, clone in noted.clones.items() if not _are_same(clone, noted.buffers[place])}
            self._learned.last = None if written else self._learn(noted)
        else:
            self._learned.last = None
        written |= self._may_write(noted.flags)
        noted.lost = next(
            (place for place in written if found[place] != noted.versions[place] and place not in noted.clones), -1
        )
        noted.clones = {place: clone for place, clone in noted.clones.items() if place in written or place in noted.small}
        noted.versions = _versions_of(now)
        noted.written = self._written[noted.flags] = frozenset(written)

    # Around a recompute

    def what_parameter_has_changed(self, noted: Noted) -> str:
        now, num = tuple(chain.from_iterable(map(partial.__call__, self.parameter_facts))), len(self.parameters)
        if now[:num] != noted.parameters[:num]:
            return "a parameter that was written to"
        if now[num:-num] != noted.parameters[num:-num]:
            return "a parameter that was given other data"
        if now != noted.parameters:
            return "a parameter of which requires_grad was set"
        return "a parameter that was replaced by another"

    def what_has_changed(self, noted: Noted) -> str:
        """Return the buffer that differs from the forward's, so that a recompute can't be exact; empty if none."""
        if noted.lost >= 0:
            return f'the buffer "{self.places[noted.lost][1]}", which it writes to and did not before'
        for place, ((buffers, name), buffer, version) in enumerate(
            zip(self.places, noted.buffers, noted.versions, strict=True)
        ):
            is_same = buffers.get(name) is buffer and (buffer is None or torch_private.version_of(buffer) == version)
            if not is_same and place not in noted.written:
                return f'the buffer "{name}", that was written to'
        return ""

    def others(self, noted: Noted) -> list[tuple[dict[str, Tensor | None], str, Tensor | None, Tensor | None]]:
        """Return the buffers to replace for a recompute: the dict that each is in, its name, the buffer, and the tensor to put
        there. Those of `Noted.statistics` come first."""
        found: list[tuple[dict[str, Tensor | None], str, Tensor | None, Tensor | None]] = []
        copies = noted.statistics or (self.places and (noted.written or noted.clones))
        with torch.no_grad() if copies else nullcontext():
            for buffers, name, _, _, clone in noted.statistics:
                found.append((buffers, name, buffers.get(name), clone.clone()))
            for index, buffers in self._updated:
                if noted.flags[index]:
                    found += [(buffers, name, own, self._scratch_for(buffers, name, own)) for name, own in buffers.items()]
            if self.places:
                for place in noted.written | noted.clones.keys():
                    buffers, name = self.places[place]
                    copy = noted.clones.get(place)
                    before = noted.buffers[place] if copy is None else copy.clone()
                    found.append((buffers, name, buffers.get(name), before))
        return found

    @staticmethod
    def originals(noted: Noted, others: Sequence[tuple[Any, str, Any, Tensor | None]]) -> Originals:
        """Return the buffers that statistics of a recompute stand for: a backward reads these, updated or not."""
        return {
            torch_private.storage_address(other.untyped_storage()): (buffer, version)
            for (_, _, _, other), (_, _, buffer, version, _) in zip(others, noted.statistics, strict=False)
            if other is not None
        }

    def _scratch_for(self, buffers: dict[str, Tensor | None], name: str, buffer: Tensor | None) -> Tensor | None:
        if buffer is None:
            return None
        key = id(buffers), name
        scratch = self._scratch.get(key)
        if scratch is None or scratch.device != buffer.device or scratch.dtype is not buffer.dtype:
            scratch = self._scratch[key] = buffer.detach().clone()
        return scratch

    def set_attributes(self, wanted: tuple[Any, ...]) -> None:
        for (own, name), value in zip(self.attributes, wanted, strict=True):
            if value is not NOT_PLAIN:
                own[name] = value

    def set_flags(self, flags: tuple[bool, ...]) -> None:
        for part, flag in zip(self.parts, flags, strict=True):
            part.training = flag


Originals = dict[int, tuple[Tensor, int]]


def parts_of(module: nn.Module) -> tuple[nn.Module, ...]:
    """Return a module and its submodules, each once, in the order of `modules()`, which makes two Python calls for each and
    more. A span is left out: it has nothing of its own, and is a new object in each step."""
    found: dict[nn.Module, None] = {}
    waiting: list[nn.Module | None] = [module]
    while waiting:
        part = waiting.pop()
        if part is not None and part not in found:
            if type(part) is not SequentialSpan:
                found[part] = None
            waiting += reversed(torch_private.children_of(part).values())
    return tuple(found)


def _versions_of(tensors: tuple[Tensor | None, ...]) -> tuple[int, ...]:
    return tuple([-1 if tensor is None else torch_private.version_of(tensor) for tensor in tensors])


def _are_same(clone: Tensor, buffer: Any) -> bool:
    return clone.shape == buffer.shape and torch.equal(
        clone.contiguous().flatten().view(torch.uint8), buffer.contiguous().flatten().view(torch.uint8)
    )
