"""`Recompute`: one recompute of a region's call: the forward runs again, in the surroundings of the first run."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memkit import torch_private
from memkit.activations.recomputing.stacks import take_off
from memkit.activations.recomputing.surroundings import current_surroundings, set_generators, set_surroundings, states_of
from memkit.storages import Geometry, is_range_of_bytes
from memkit.torch_state import leave_untraced

if TYPE_CHECKING:
    from memkit.activations.recomputing.module_state import Originals
    from memkit.activations.recomputing.region_calls import Placeholder, RegionCall

AS_IT_WAS = "what it reads to be in the backward as it was in the forward"
CHANGE_LATER = "Change it after the backward"
ADVICE = "Is it deterministic, and is what it reads the same in the backward?"
_NO_NODE = -1
_training_flag = attrgetter("training")


class _Stop(Exception):  # noqa: N818  # no error: a recompute has made all that is needed
    """Raised at the save of the last tensor that a backward needs, or at the next save."""


class Recompute:
    """One recompute of a call. It is itself the pack hook of the recompute, and remembers what to restore after it."""

    __slots__ = (
        "_attributes",
        "_before",
        "_buffers",
        "_call",
        "_drawn",
        "_flags",
        "_grad",
        "_last",
        "_nesting",
        "_originals",
        "_places",
        "_unwritten",
        "num_saved",
    )

    def __init__(self, call: RegionCall) -> None:
        state = call.region.state
        self._call = call
        self._places: list[Placeholder | None] = list(map(weakref.ref.__call__, call.places))
        last = len(self._places) - 1
        while self._places[last] is None:
            last -= 1
        self._last = last
        self._unwritten = _NO_NODE
        """The last node that saved a tensor without grad. Its op may not have written the tensor yet, and must run to its end
        (see [Note: saved before it is written] in `memkit.activations.offloading.window`)."""
        self.num_saved = 0
        self._grad = torch.is_grad_enabled()
        self._before = current_surroundings()
        self._drawn = states_of(call.drawn) if call.drawn else ()
        self._buffers = state.others(call.noted) if state.has_others else ()
        self._originals = state.originals(call.noted, self._buffers) if call.noted.statistics else None
        self._flags = tuple(map(_training_flag, state.parts))
        try:
            self._attributes = tuple(
                chain.from_iterable(map(itemgetter.__call__, state.attribute_getters, state.attribute_dicts))
            )
        except KeyError as error:
            raise call.region.error(AS_IT_WAS, f"that its attribute {error} was deleted", CHANGE_LATER) from None
        self._nesting = call.region.nesting(call) if call.inner else None

    def __call__(self, tensor: Tensor) -> Tensor:
        number = self.num_saved
        if number > self._last:
            if self._unwritten not in (_NO_NODE, torch_private.node_number()) and torch_private.backward_task() == -1:
                raise _Stop
            return tensor.detach()  # of a backward in the forward
        self.num_saved = number + 1
        place = self._places[number]
        if tensor.requires_grad:
            tensor = tensor.detach()
        else:
            self._unwritten = torch_private.node_number()
        if place is not None:
            if tensor.shape != place.shape or tensor.dtype is not place.dtype:
                raise self._call.region.error(
                    f"its forward to save {_described(place.shape, place.dtype)} as number {number} whenever it is run",
                    _described(tensor.shape, tensor.dtype),
                    ADVICE,
                )
            place.tensor, place.version = tensor, torch_private.version_of(tensor)
            if self._originals:
                place.tensor, place.version = _original(tensor, self._originals)
        if number == self._last and self._unwritten != torch_private.node_number():
            raise _Stop
        return tensor

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Run the forward in the surroundings of the first run; return whether everything needed was made."""
        call, is_back = self._call, False
        try:
            try:
                if self._nesting is not None:
                    self._nesting.begin()
                torch_private.push_saved_tensor_hooks(self, unpack_recomputed)
                if not self._grad:
                    torch.set_grad_enabled(True)
                if self._before != call.surroundings:
                    set_surroundings(call.surroundings)
                if call.drawn:
                    set_generators(call.drawn)
                for buffers, name, _, other in self._buffers:
                    buffers[name] = other
                if not all(map(is_, self._attributes, call.noted.attributes)):
                    call.region.state.set_attributes(call.noted.attributes)
                if self._flags != call.noted.flags:
                    call.region.state.set_flags(call.noted.flags)
                if call.device is None and not torch_private.num_function_modes():
                    (call.region.code or call.region.module.forward)(*args, **kwargs)
                else:
                    with call.device or torch.device("cpu"):
                        (call.region.code or call.region.module.forward)(*args, **kwargs)
            except _Stop:
                if self.num_saved <= self._last:
                    raise  # it is another's
            finally:
                self._put_back()
                is_back = True
        finally:
            if not is_back:  # an interrupt came in between
                self._put_back()
        return self.num_saved > self._last

    def _put_back(self) -> None:
        """Restore what was set before; may be called again."""
        if self._nesting is not None:
            self._nesting.end()
        top = torch_private.top_saved_tensor_hooks(True)
        if top is not None and top[0] is self:
            torch_private.pop_saved_tensor_hooks()
        else:
            take_off(self)
        if not self._grad:
            torch.set_grad_enabled(False)
        if self._before != self._call.surroundings:
            set_surroundings(self._before)
        if self._drawn:
            set_generators(self._drawn)
        for buffers, name, buffer, _ in self._buffers:
            buffers[name] = buffer
        if self._attributes:
            self._call.region.state.set_attributes(self._attributes)
        if self._flags != self._call.noted.flags:
            self._call.region.state.set_flags(self._flags)

    def forget(self) -> None:
        """Free what was made, so that the rest counts as missing."""
        for place in self._places:
            if place is not None:
                place.tensor = None


def _described(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{list(shape)} of {dtype}"


def _original(tensor: Tensor, originals: Originals) -> tuple[Tensor, int]:
    """Return the tensor that a backward is to have for one that a recompute has saved, and its version."""
    storage = tensor.untyped_storage() if is_range_of_bytes(tensor) else None
    found = None if storage is None else originals.get(torch_private.storage_address(storage))
    if found is None:
        return tensor, torch_private.version_of(tensor)
    if tensor.shape == found[0].shape:
        return found
    view = Geometry.of(tensor).over(found[0].untyped_storage())
    return view, torch_private.version_of(view)


def unpack_recomputed(tensor: Tensor) -> Tensor:
    """The unpack hook for tensors saved in a recompute, whose forward may itself run a backward."""
    return tensor


for _hook in (Recompute.__call__, unpack_recomputed):
    leave_untraced(_hook)
