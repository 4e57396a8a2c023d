"""Which parameters are streamed, and by whom: one `LayerOffload` at a time."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import Tensor, nn

from memkit.owners import with_offloaded_states

if TYPE_CHECKING:
    from memkit.weights.binding import StreamedParameter
    from memkit.weights.chunks import LayerChunk
    from memkit.weights.host_copies import HostCopies

_streaming_by: weakref.WeakValueDictionary[int, HostCopies] = weakref.WeakValueDictionary()
"""Where the bytes of a parameter are, by its id: who streams it keeps both alive."""


def claim(streamed: StreamedParameter, host: HostCopies) -> None:
    """Note that a parameter streams, with its host copy in these."""
    _streaming_by[id(streamed.parameter)] = host


def release(chunk: LayerChunk) -> None:
    """Note that the parameters of a layer stream no more."""
    for streamed in chunk.parameters:
        _streaming_by.pop(id(streamed.parameter), None)


def is_streamed(parameter: Tensor) -> bool:
    """Tell whether a parameter streams."""
    return id(parameter) in _streaming_by


def refuse_streamed(model: nn.Module) -> None:
    """Raise where another LayerOffload streams parameters of a model, or a StateOffload steps them.

    Raises:
        ValueError: that is so.
    """
    stepped = {id(own) for optimizer in with_offloaded_states for group in optimizer.param_groups for own in group["params"]}
    for name, parameter in model.named_parameters():
        if id(parameter) in stepped:
            raise ValueError(
                f'LayerOffload: "{name}" is stepped by an optimizer with a StateOffload. Make the LayerOffload first, and then '
                "an optimizer with a StateOffload for the parameters that don't stream"
            )
        other = _streaming_by.get(id(parameter))
        if other is not None and any(item.parameter is parameter for chunk in other.chunks for item in chunk.parameters):
            raise ValueError(
                f'LayerOffload: "{name}" is streamed by another LayerOffload already, over a {type(other.model).__name__}. '
                "Close that one first: call its close(), or memkit.detach(model) with the model that it was given"
            )
