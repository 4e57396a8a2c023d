"""Borders in a forward: nothing after a border is recomputed from values made before it.

A module that FSDP2 shards frees its gathered parameters after its forward, and gathers them again for its own backward. The
backward of the next module requests its output before that, so the output is a root: recomputing never gathers parameters,
which the other ranks would not take part in. With `set_unshard_in_backward(False)` nothing in the module can be recomputed, and
the recorder is paused during its forward.
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from memkit.core import torch_private
from memkit.core.hooks import HookSet
from memkit.core.torch_state import fsdp_groups, is_there_in_backward
from memkit.recording.recorded import tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memkit.recording.recorder import Recorder

BORDER = "memkit::border"  # an op that does nothing. Every forward runs it, so that numbers of ops stay the same


@functools.cache
def _op() -> tuple[Any, torch.library.Library]:
    """Return the op, and the library object whose lifetime keeps it registered."""
    library = torch.library.Library("memkit", "FRAGMENT")
    library.define("border(Tensor[] tensors, bool? gathers=None) -> ()")
    library.impl("border", lambda tensors, gathers=None: None, "CompositeExplicitAutograd")
    return torch.ops.memkit.border.default, library


FSDP = "torch.distributed.fsdp"
_marked = weakref.WeakSet[nn.Module]()


def num_unmarked() -> int:
    """Count sharded modules without hooks. Without FSDP2, this costs one dict lookup."""
    if FSDP not in sys.modules:
        return 0
    return len(torch_private.sharded_modules) - len(_marked)


def mark_sharded() -> None:
    """The hooks stay, and act only in recorded forwards."""
    if not num_unmarked():
        return
    for module in list(torch_private.sharded_modules):
        if module in _marked:
            continue
        if isinstance(module, sys.modules[FSDP].FSDPModule):  # else sharding it has failed
            hooks = HookSet()
            hooks.around_hooks_of(FSDP, module, _mark_gather)
            hooks.after_forward(module, _mark_border)
        _marked.add(module)  # last: after an interrupt, hooks may be set twice, which is harmless


def shards_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters as the optimizer has them: shards in place of parameters that FSDP2 has gathered."""
    shards = dict[int, Tensor]()
    for module in list(_marked):
        if not hasattr(module, torch_private.FSDP_GROUP[0]):
            continue  # sharding it has failed
        for group in fsdp_groups(module):
            for item in group.fsdp_params:
                shards[id(getattr(item, torch_private.FSDP_GATHERED, None))] = item.sharded_param
    return [shards.get(id(parameter), parameter) for parameter in parameters]


def _mark_border(module: nn.Module, _: tuple[Any, ...], __: dict[str, Any], output: Any) -> None:
    if torch_private.num_dispatch_modes() and torch_private.backward_task() == -1:
        tensors = tensors_in(torch_private.tree_leaves(output))
        with torch.no_grad():
            if not is_there_in_backward(module):
                _op()[0](tensors, False)
            elif tensors:
                _op()[0](tensors)


def _mark_gather(begins: bool, module: nn.Module, *_: Any) -> None:
    """Pause the recorder during FSDP2's own pre-hook, and until the end of a forward that can't run again. Gathered parameters
    count as the caller's, with the same value as when they were last gathered: writing the value back is not a write."""
    if torch_private.num_dispatch_modes() and torch_private.backward_task() == -1:
        _op()[0]([], begins or not is_there_in_backward(module))


def run_border(recorder: Recorder, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
    recording, was_unseen = recorder.recording, len(args) > 1
    if was_unseen:
        recording.is_gathering = args[1]
    for tensor in tensors_in(args[:1]):
        storage = tensor.untyped_storage()
        value = recording.find(storage)
        if was_unseen if value is None else value not in recording.roots:
            recording.add_root(tensor, storage, is_inside=True)
