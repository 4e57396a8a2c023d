"""Looks up private names of torch, and reports missing ones. The names are in `torch_private`."""

from __future__ import annotations

import functools
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch

from memkit.errors import MissingTorchNameError


class Feature(Enum):
    """What doesn't work without a name. The first three look up all of their names before they begin: see `require`."""

    OFFLOAD = "CPUOffload"
    REMAT = "Rematerialize"
    LAYERS = "LayerOffload"
    PURE_OPS = "Rematerialize(pure_ops=...)"
    REPLICAS = "LayerOffload within DistributedDataParallel"
    SHARDED = "Rematerialize of what FSDP2 has sharded"
    SCALER = "a GradScaler with LayerOffload"
    PROFILE = "profile_memory"
    META = 'profile_memory(device="meta")'
    SPARSE = "what memkit does with sparse tensors"


class Kind(Enum):
    """What a name of this module is."""

    VALUE = "what torch has under that name"
    FIELD = "reads the attribute of what it is called with: whether there is one is asked of the class, once"
    SETTER = "sets it"
    INSTANCE_FIELD = "reads an attribute that the class does not show: whether there is one is asked each time"


@dataclass(frozen=True, slots=True)
class PrivateName:
    """One private name of torch."""

    symbol: str
    """Its qualified name in torch."""
    purpose: str
    features: tuple[Feature, ...]
    """What doesn't work without it; empty if it is only used through `known`."""
    kind: Kind = Kind.VALUE
    sample: str = ""
    """For an attribute that only instances have: the same attribute of some instance."""

    def find(self) -> Any:
        """Look it up.

        Raises:
            MissingTorchNameError: torch doesn't have it.
        """
        if self.kind is Kind.INSTANCE_FIELD:
            return self._read
        try:
            found = look_up(self.sample or self.symbol)
        except AttributeError:
            raise self.missing() from None
        if self.kind is Kind.SETTER:
            return functools.partial(setattr, look_up(self.symbol.rpartition(".")[0]), self._attribute)
        return attrgetter(self._attribute) if self.kind is Kind.FIELD else found

    def missing(self) -> MissingTorchNameError:
        """Return the error to raise if torch doesn't have it."""
        needing = ", ".join(feature.value for feature in self.features) or "memkit"
        return MissingTorchNameError(
            f"{needing} {'need' if len(self.features) > 1 else 'needs'} {self.symbol} ({self.purpose}); found torch "
            f"{torch.__version__}, which does not have it. Install an older torch, or a newer memkit",
            symbol=self.symbol,
        )

    @property
    def _attribute(self) -> str:
        return self.symbol.rpartition(".")[2]

    def _read(self, instance: object) -> Any:
        try:
            return getattr(instance, self._attribute)
        except AttributeError:
            raise self.missing() from None


def look_up(symbol: str) -> Any:
    """Return the object with a qualified name in torch, importing its module if needed.

    Raises:
        AttributeError: there is none.
    """
    parts = symbol.split(".")
    found: Any = torch
    for number, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            if isinstance(found, type) and part in getattr(found, "__annotations__", ()):
                return None  # a field that is set when an instance is made
            if isinstance(found, ModuleType):
                with suppress(ImportError):
                    import_module(".".join(parts[:number]))
        found = getattr(found, part)
    return found
