"""Keeps track of everything memkit has attached to models, for `detach`, and of threads that profile a model, which refuse
contexts that would hide saved tensors. It keeps nothing alive; hooks on the model do."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from torch import nn

from memkit.core.interrupts import Block, Blocks, Exclusive
from memkit.errors import LayerOffloadError, MemkitError, ProfileError

_Owner = TypeVar("_Owner")
_attached: weakref.WeakKeyDictionary[Any, tuple[Callable[..., bool], Callable[..., None]]] = weakref.WeakKeyDictionary()
"""The oldest first: whether each is on a module, and what takes it off."""


class NotCopied:
    _copied: tuple[type[MemkitError], str] = (
        LayerOffloadError,
        (
            "a model was copied, or pickled whole, while LayerOffload streams its weights. Copy it before, or after "
            "offload.close(); to save it, use model.state_dict()"
        ),
    )

    def __deepcopy__(self, _: dict[int, Any]) -> NoReturn:
        kind, said = self._copied
        raise kind(said)

    def __reduce_ex__(self, _: Any) -> NoReturn:
        self.__deepcopy__({})


def note_attached(owner: _Owner, *, is_on: Callable[[_Owner, nn.Module], bool], take_off: Callable[[_Owner], None]) -> None:
    _attached[owner] = is_on, take_off


def note_detached(owner: object) -> None:
    _attached.pop(owner, None)


def attached_to(module: nn.Module) -> list[object]:
    return [owner for owner, (is_on, _) in list(_attached.items()) if is_on(owner, module)]


def detach(model: nn.Module) -> None:
    """Remove whatever `attach` and `LayerOffload` have attached to a model or to modules in it, the newest first.

    It does what `remove()` of an `Attachment` and `close()` of a `LayerOffload` do, for when you don't have the object: in a
    notebook whose cell ran twice, or after `memkit.LayerOffload(model, ...)` that was not assigned to a name.

    Args:
        model: the argument of `attach` or `LayerOffload`, or a module that contains it.

    Raises:
        TypeError: `model` is not a module.
        ValueError: nothing is attached.
        LayerOffloadError: a forward or a backward is running.

    Example:
        >>> import torch, memkit
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())
        >>> offload = memkit.CPUOffload(0.5, "lost", device=memkit.device.ReferenceDevice())
        >>> _ = memkit.attach(model, offload)
        >>> memkit.detach(model)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"detach needs a torch.nn.Module; found {type(model).__name__}")
    modules = list(model.modules())
    every = list(_attached.items())
    found = [(owner, take_off) for owner, (is_on, take_off) in every if any(is_on(owner, module) for module in modules)]
    if not found:
        raise ValueError(
            f"detach needs a model with something attached; found none on this {type(model).__name__}, nor on a module in it. "
            "Pass the model that memkit.attach or memkit.LayerOffload was given, or leave the call out"
        )
    for owner, take_off in reversed(found):
        take_off(owner)


_Own = TypeVar("_Own", bound="EnteredOnce")


class EnteredOnce:
    _is_closed = _is_entered = False

    def __enter__(self: _Own) -> _Own:
        if self._is_closed:
            raise ValueError(f"this {type(self).__name__} is closed; make a new one")
        if self._is_entered:
            raise ValueError(f"this {type(self).__name__} is already entered: one `with` is enough")
        self._is_entered = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError


_profiled = Blocks()


class Profiled(Exclusive):
    def __enter__(self) -> Block:
        block = self.claim("this profile is going on already")
        self.is_entered = True
        _profiled.blocks.append(block)
        return block

    def end_block(self, *, has_failed: bool) -> None:
        _profiled.leave(self._block)


def refuse_in_profile(name: str) -> None:
    """Raise if this thread profiles a model: the context about to be entered would hide saved tensors from the profile."""
    if _profiled.are_any():
        raise ProfileError(
            f"a profile needs to see all that autograd saves; found {name}, which the model enters in its forward and which "
            "would take it. Profile the model before memkit.attach, or after its handle's remove(), and without a context in "
            "its own code"
        )
