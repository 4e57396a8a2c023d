"""The base of contexts for saved tensors. `attach` can put one around each forward of a module."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from memkit.activations.stats import SavedTensorStats, stats
from memkit.core import torch_private
from memkit.core.hooks import end_left, in_checkpoint
from memkit.core.interrupts import Block, Exclusive
from memkit.core.torch_state import leave_untraced
from memkit.device import is_capturing
from memkit.recording.borders import mark_sharded, num_unmarked

Shapes = tuple[tuple[int, ...], ...]
_Context = TypeVar("_Context", bound="ForwardContext")
_Recorded = TypeVar("_Recorded", bound="RecordedContext")


def shapes_of(args: Any, kwargs: Any) -> Shapes:
    """Return the shapes of all tensors that a call is given, each tensor once, also in mappings and dataclasses."""
    shapes, leaves = dict[int, torch.Size](), torch_private.tree_leaves((args, kwargs))
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if not leaf.is_nested:
                shapes[id(leaf)] = leaf.shape
        elif isinstance(leaf, Mapping):
            leaves += leaf.values()
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            leaves += vars(leaf).values() if hasattr(leaf, "__dict__") else ()
    return tuple(shapes.values())


class ForwardContext(Exclusive):
    """A context around forwards. One object is entered once at a time; `again` makes another that does the same."""

    tag = ""
    goes_outside = False
    """Of several contexts attached to a module, it is entered first."""
    asks_what_is_resident = False
    """`enter_with` gets the storages that others hold."""
    asks_for_shapes = False
    shapes: Shapes | None = None
    _entry: Any = None

    def __enter__(self: _Context) -> _Context:
        return self.enter_with({})

    @abstractmethod
    def _begin(self, resident: Mapping[int, weakref.ref[torch.UntypedStorage]], block: Block) -> None:
        """Take the saved tensors from now on: see `enter_with`."""

    @property
    def plan(self) -> Any:
        """The plan under its tag; None before there is one, and for a context that plans nothing."""
        return None

    def stats(self) -> SavedTensorStats:
        """Return the figures under its tag: see `memkit.stats`.

        Raises:
            ValueError: it has no tag, or nothing was done under it.
        """
        if not self.tag:
            raise ValueError(f"stats needs a context with a tag; found {self!r}. Ask the CPUOffload that it is in")
        return stats(self.tag)

    def end_block(self, *, has_failed: bool) -> None:
        try:
            if self._entry is not None:
                self._entry.end(has_failed=has_failed)
        finally:
            self._entry = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_entry": None, "_looked_up": None, "_block": None, "is_entered": False}

    def again(self: _Context) -> _Context:
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__, _entry=None, _looked_up=None, _block=None, is_entered=False)
        return made

    def attached_to(self, model: nn.Module) -> ForwardContext:
        return self

    def enter_with(self: _Context, resident: Mapping[int, weakref.ref[torch.UntypedStorage]]) -> _Context:
        """Enter; others hold the storages in `resident` in any case, by key (`core.tensors.storage_key`)."""
        end_left()
        block = self.claim(f"this {self._title} is already entered; make a second one for a nested context")
        try:
            self.is_entered = True
            self._begin(resident, block)
            return self
        except BaseException:
            self.leave(has_failed=True)
            raise

    @property
    def _title(self) -> str:
        return f'{type(self).__name__} (tag "{self.tag}")'


class RecordedContext(ForwardContext):
    _model: weakref.ref[nn.Module] | None = None

    def attached_to(self: _Recorded, model: nn.Module) -> _Recorded:
        mark_sharded()  # before the hook that enters it: the model itself may be sharded
        made = self.again()
        made._model = weakref.ref(model)
        return made

    def end_block(self, *, has_failed: bool) -> None:
        was_on = self._entry is not None
        super().end_block(has_failed=has_failed)
        if was_on and not has_failed and (number := num_unmarked()):
            raise ValueError(
                f"FSDP2 has sharded {number} modules within {self._title}, which was recording and can't recompute what they "
                "save. Shard before it is entered"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_model": None}

    def _refuse_in_capture(self) -> None:
        if is_capturing():
            raise RuntimeError(
                f"{self._title} was entered while a CUDA graph is being captured: what is recorded is run "
                "again by the host, which a graph does not do. Leave the context out of what is captured"
            )

    def _refuse_in_checkpoint(self, why: str = "") -> None:
        if in_checkpoint():
            raise ValueError(
                f"{self._title} was entered inside a checkpointed function, which would undo the "
                f"checkpoint. Put the context around the checkpoint, or leave out the checkpoint{why}"
            )


# A context may be entered in a function that is compiled, or that Dynamo gave up compiling.
for _door in (ForwardContext.__enter__, ForwardContext.enter_with, Exclusive.exit, vars(Exclusive)["__exit__"].__get__):
    leave_untraced(_door)
