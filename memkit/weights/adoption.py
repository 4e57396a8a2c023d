"""Streamed parameters that were replaced from outside, or given other bytes: taken over, or refused."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import nn

from memkit import torch_private
from memkit.errors import LayerOffloadError
from memkit.torch_state import num_users
from memkit.weights.binding import StreamedParameter, distinct, without_modes
from memkit.weights.chunks import LayerChunk
from memkit.wrappers import wrappers_in

_ADVICE = "Call offload.close() first, change the model, and make a new LayerOffload."


def adopt(chunk: LayerChunk) -> list[StreamedParameter]:
    """Take over parameters that were put in the place of others (`load_state_dict(assign=True)`), and return them.

    Raises:
        LayerOffloadError: a parameter was moved, or is of another kind now.
    """
    if chunk.binding.is_unchanged():
        return []
    adopted = [streamed for streamed in chunk.parameters if _is_replaced(streamed)]
    for streamed in adopted:
        module, key = streamed.places[0]
        old, found = streamed.parameter, torch_private.parameters_of(module)[key]
        assert found is not None
        for inner, inner_key in streamed.places[1:]:
            if torch_private.parameters_of(inner).get(inner_key) is old:
                torch_private.parameters_of(inner)[inner_key] = found
        left = [weakref.ref(part.tensor) for part in streamed.parts if part.shares_host_copy(part.tensor)]
        streamed.replace(found)
        chunk.binding.renew()
        del old
        now = {id(part.tensor) for part in streamed.parts}
        for is_kept in left:
            kept = is_kept()
            if kept is not None and id(kept) not in now:  # who has it reads and writes there what it is, not its successor
                with without_modes():
                    kept.data = kept.data.clone()
    for streamed in adopted:
        chunk.num_changes += 1
        _take_over(streamed)
    chunk.binding.renew()  # also where there was nothing: an interrupt may have kept an earlier call from it
    return adopted


def refuse_tied(adopted: StreamedParameter, chunks: Iterable[LayerChunk]) -> None:
    """Raise where a parameter that was put in the place of another is that of a second place that streams.

    Raises:
        LayerOffloadError: that is so.
    """
    for other in (item for chunk in chunks for item in chunk.parameters):
        if other is not adopted and other.parameter is adopted.parameter:
            raise LayerOffloadError(
                f'"{adopted.name}" and "{other.name}" have become one parameter while they stream. Call '
                "offload.close() first, tie them, and make a new LayerOffload: what is tied then stays on the device"
            )


def adopt_data(chunk: LayerChunk) -> None:
    """Take over what parameters were given since (`parameter.data = other`), while a graph is alive that has used them.

    Those that were put in the place of others are left to the next forward: the graph is one of the others.

    Raises:
        LayerOffloadError: a parameter was moved, or is of another kind now.
    """
    if chunk.binding.is_unchanged():
        return
    for streamed in chunk.parameters:
        module, key = streamed.places[0]
        if _is_replaced(streamed) and torch_private.parameters_of(module)[key] is streamed.parameter:
            chunk.num_changes += 1
            _take_over(streamed)
    chunk.binding.renew()


def _is_replaced(streamed: StreamedParameter) -> bool:
    """Tell whether the caller has put another tensor in the place of a parameter; raise where it is of another kind."""
    module, key = streamed.places[0]
    found = torch_private.parameters_of(module).get(key)
    if found is None:
        raise LayerOffloadError(f'"{streamed.name}" is gone from its module while LayerOffload streams it. {_ADVICE}')
    if not isinstance(found, nn.Parameter):
        raise LayerOffloadError(
            f'"{streamed.name}" streams, and is now a {type(found).__name__}, not a parameter: was the model called by '
            "torch.func.functional_call? That cannot run with weights that stream"
        )
    if streamed.wrappers and found.requires_grad:
        raise LayerOffloadError(
            f'"{streamed.name}" now requires grad, and it streams. A {type(found).__name__} wraps tensors, and '
            "streams as a frozen one. Set this before LayerOffload is made: it then stays on the device"
        )
    if any(part.host_copy.data_ptr() != part.address for part in streamed.parts):
        raise LayerOffloadError(
            f'"{streamed.name}" streams, and its bytes were moved to other memory in place: by model.share_memory(), or by '
            f"sending its tensors to another process (torch.multiprocessing)? Send copies. {_ADVICE}"
        )
    if streamed.is_unchanged(found):
        return False
    if not streamed.is_of_kind(found):
        was, now = (
            f"{type(wrappers[0]).__name__}, " if wrappers else "" for wrappers in (streamed.wrappers, wrappers_in(found))
        )
        raise LayerOffloadError(
            f'"{streamed.name}" streams as {was}{streamed.dtype}, {list(streamed.size)}, and is {now}{found.dtype}, '
            f"{list(found.size())} on {found.device} now: was the model moved or cast (.to(), .cuda(), .half())? {_ADVICE}"
        )
    return True


def _take_over(streamed: StreamedParameter) -> None:
    """Write to the host copy what a parameter is now, and let it be that."""
    for part in streamed.parts:
        if part.is_host_copy(part.tensor):
            continue
        source = part.tensor.data
        if part.shares_host_copy(part.tensor):
            source = source.clone()
            part.tensor.data = source
        if num_users(part.host_copy.untyped_storage()) > 2:
            raise LayerOffloadError(
                f'"{streamed.name}" was given another tensor (`parameter.data = other`) while the one that it was '
                "is still held, which is where LayerOffload has its weights. Write to it instead: parameter.data.copy_(other)"
            )
        with without_modes():
            part.adopt_layout(source)
            distinct(part.host_copy).copy_(distinct(source))
            part.tensor.data = part.host_copy
    streamed.note_stride()
