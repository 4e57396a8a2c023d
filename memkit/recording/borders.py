"""Borders in a forward: behind one, nothing is recomputed by what ran before it.

A module that FSDP2 shards lets go of its parameters when its forward is over, and gathers them again for its own backward. What
it has returned is asked for before that, by the backward of what comes next; all else that it has made, within its own. So what
it returns is a root, and needs no gathering of which the other ranks don't know. Where it is not gathered for its backward
(`set_unshard_in_backward(False)`), nothing in it can be recomputed: the recorder looks away until its forward is over.

`mark_sharded` finds these modules by themselves, so that it doesn't matter who has sharded them, or when.
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from memkit import torch_private
from memkit.hooks import HookSet
from memkit.recording.recorded import tensors_in
from memkit.torch_state import fsdp_groups, is_there_in_backward

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memkit.recording.recorder import Recorder

BORDER = "memkit::border"
"""An op that does nothing, so that it is among those that are seen in every forward, and shifts no numbers."""


@functools.cache
def _op() -> tuple[Any, torch.library.Library]:
    """Return the op, and what has to be held for it to be there."""
    library = torch.library.Library("memkit", "FRAGMENT")
    library.define("border(Tensor[] tensors, bool? gathers=None) -> ()")
    library.impl("border", lambda tensors, gathers=None: None, "CompositeExplicitAutograd")
    return torch.ops.memkit.border.default, library


FSDP = "torch.distributed.fsdp"
"""The library. What it has not been imported for, it has not sharded."""
_marked = weakref.WeakSet[nn.Module]()
"""What FSDP2 has sharded, as far as `mark_sharded` has seen it."""


def num_unmarked() -> int:
    """Return how many modules FSDP2 has sharded in this process since `mark_sharded`. Where it was never imported, that is one
    look into a dict.

    Raises:
        MissingTorchNameError: torch doesn't say which it has sharded.
    """
    if FSDP not in sys.modules:
        return 0
    return len(torch_private.sharded_modules) - len(_marked)


def mark_sharded() -> None:
    """Set hooks on the modules that FSDP2 has sharded in this process and that have none yet. They stay, and do nothing but in
    a forward that is recorded.

    Raises:
        MissingTorchNameError: torch doesn't say which it has sharded.
    """
    if not num_unmarked():
        return
    for module in list(torch_private.sharded_modules):
        if module in _marked:
            continue
        if isinstance(module, sys.modules[FSDP].FSDPModule):  # else sharding it has failed
            hooks = HookSet()
            hooks.around_hooks_of(FSDP, module, _mark_gather)
            hooks.after_forward(module, _mark_border)
        _marked.add(module)  # last: hooks that an interrupt has let be set twice do the same


def shards_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return parameters as their owner has them: of one that FSDP2 has gathered for a forward the shard, which is stepped."""
    shards = dict[int, Tensor]()
    for module in list(_marked):
        if not hasattr(module, torch_private.FSDP_GROUP[0]):
            continue  # sharding it has failed
        for group in fsdp_groups(module):
            for item in group.fsdp_params:
                shards[id(getattr(item, torch_private.FSDP_GATHERED, None))] = item.sharded_param
    return [shards.get(id(parameter), parameter) for parameter in parameters]


def _mark_border(module: nn.Module, _: tuple[Any, ...], __: dict[str, Any], output: Any) -> None:
    """A hook behind the forward of a module: a border runs through what it has returned."""
    if torch_private.num_dispatch_modes() and torch_private.backward_task() == -1:
        tensors = tensors_in(torch_private.tree_leaves(output))
        with torch.no_grad():
            if not is_there_in_backward(module):
                _op()[0](tensors, False)
            elif tensors:
                _op()[0](tensors)


def _mark_gather(begins: bool, module: nn.Module, *_: Any) -> None:
    """Ahead of what FSDP2 does before a forward, and behind it: the recorder looks away meanwhile, and until the forward is
    over if nothing of that can run again.

    What is gathered is the caller's, as a parameter that was there all the time, and the same value as when it was there last:
    to write it back is no write.
    """
    if torch_private.num_dispatch_modes() and torch_private.backward_task() == -1:
        _op()[0]([], begins or not is_there_in_backward(module))


def run_border(recorder: Recorder, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
    """What there is of a value that was made here is a root from now on."""
    recording, was_unseen = recorder.recording, len(args) > 1
    if was_unseen:
        recording.is_gathering = args[1]
    for tensor in tensors_in(args[:1]):
        storage = tensor.untyped_storage()
        value = recording.find(storage)
        if was_unseen if value is None else value not in recording.roots:
            recording.add_root(tensor, storage, is_inside=True)
