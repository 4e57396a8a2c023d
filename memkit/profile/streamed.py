"""Which parameters of a step are in host memory, and the slots on the device through which they stream."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from memkit.owners import StreamedWeights, owner_of, owners
from memkit.storages import storage_key

NOTHING_STREAMED = StreamedWeights()


def find_streamed(modules: Iterable[nn.Module]) -> StreamedWeights:
    """Return what of some modules' parameters streams, and the slots of whoever streams it."""
    parameters = {id(parameter) for module in modules for parameter in module.parameters()}
    everywhere = [owner.streamed() for owner in owners()]
    here = [found for found in everywhere if any(id(parameter) in parameters for parameter in found.parameters)]
    return StreamedWeights(
        layers=tuple(layer for found in here for layer in found.layers),
        parameters=tuple(parameter for found in here for parameter in found.parameters if id(parameter) in parameters),
        slots=tuple(slot for found in here for slot in found.slots),
    )


class ModelStorages:
    """The storages of parameters and buffers, wherever they are: also a slot that a parameter lies in while its layer runs.

    Args:
        keys: of the storages that they have at rest.
    """

    def __init__(self, keys: Iterable[int]) -> None:
        self._keys = frozenset(keys)

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        return storage_key(storage) in self._keys or owner_of(storage) is not None
