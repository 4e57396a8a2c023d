"""`Replay`: runs recorded ops again, exactly.

It runs in the backward, on its stream and device, below grad mode, modes, hooks, autocast and function transforms (such as the
`vmap` of batched gradients), where ops were recorded. Random ops draw from their generator's state in the forward, and leave
its current state unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any

import torch

from memkit.core import torch_private
from memkit.core.tensors import byte_view
from memkit.core.torch_state import label
from memkit.errors import ReplayMismatchError
from memkit.plan import NO_OP
from memkit.recording.recorded import OpCall, tensor_of, tensors_in
from memkit.recording.recording import Recording, current_settings, with_settings

StorageOf = Callable[[int], torch.UntypedStorage]


@functools.cache
def _vmap_mode() -> Any:
    """Return the functorch layer of batched gradients: it refuses every random op."""
    return torch_private.DispatchKeySet(torch_private.key_named("VmapMode"))


class Replay:
    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.made: dict[int, torch.UntypedStorage] = {}
        self._has_other_settings = False

    def compare_settings(self) -> None:
        """Called once for each backward: find out whether process-wide settings must be changed for replays."""
        self._has_other_settings = current_settings() != self.recording.settings

    def below_all(self, work: Callable[[int], None], value: int) -> None:
        """Call `work(value)` where ops were recorded: below autograd, autocast, transforms, modes and hooks."""
        settings = with_settings(self.recording.settings) if self._has_other_settings else nullcontext()
        with (
            torch_private.without_functions(),
            torch_private.without_dispatch_modes(),
            torch.no_grad(),
            torch_private.without_autocast(),
            torch_private.without_functorch(),
            torch_private.excluding_keys(_vmap_mode()),
            torch_private.without_autograd(),
            settings,
            label("replay"),
        ):
            work(value)

    def run(self, op: int, in_place: Collection[int], storage_of: StorageOf) -> None:
        """Run an op; it may write over the made values `in_place`."""
        call = self.recording.calls[op]
        over = self._to_be_written(call, in_place, storage_of) if call.written else {}
        args = [_copied(argument) for argument in call.args]
        kwargs = {name: _copied(argument) for name, argument in (call.kwargs or {}).items()}
        for source in call.sources:
            key, value = source[0], source[1]
            storage = over.get(value)
            tensor = tensor_of(source, storage_of(value) if storage is None else storage)
            group: Any = args if isinstance(key, int) else kwargs
            if isinstance(key, tuple):
                name, key = key
                group = (args if isinstance(name, int) else kwargs)[name]
            group[key] = tensor
        results = call.func(*args, **kwargs) if call.generator is None else _draw(call, args, kwargs)
        made, outs = self.made, self.recording.lineage.outs[op]
        tensors = (results,) if type(results) is torch.Tensor else tensors_in(results)
        for value, place in zip(outs, call.places, strict=False):
            self._note_made(call, value, tensors[place].untyped_storage())
        for value, written in zip(outs[len(call.places) :], call.written, strict=True):
            if written in in_place:
                made.pop(written, None)
            made[value] = over[written]
        if self.recording.originals is not None:
            self._verify(op)

    def _note_made(self, call: OpCall, value: int, storage: torch.UntypedStorage) -> None:
        if storage.nbytes() != call.outs_bytes[value - call.first]:
            raise ReplayMismatchError(
                f"{self.name_of(value)} has made {call.outs_bytes[value - call.first]} bytes in the forward, and "
                f"{storage.nbytes()} when it was run again. Has a setting of torch changed meanwhile?"
            )
        self.made[value] = storage

    def _to_be_written(self, call: OpCall, in_place: Collection[int], storage_of: StorageOf) -> dict[int, torch.UntypedStorage]:
        """Return the storages that a call writes to: existing ones that may be overwritten, copies, or new ones."""
        over: dict[int, torch.UntypedStorage] = {}
        sizes = call.outs_bytes[len(call.places) :]
        for value, num_bytes in zip(call.written, sizes, strict=True):
            if call.is_whole:
                over[value] = self.recording.device.allocate(num_bytes)
            elif value in in_place:
                over[value] = self.made[value]
            else:
                over[value] = byte_view(storage_of(value)).clone().untyped_storage()
        return over

    def _verify(self, op: int) -> None:
        originals = self.recording.originals
        assert originals is not None
        for value in self.recording.lineage.outs[op]:
            if value in originals and not torch.equal(byte_view(self.made[value]).cpu(), originals[value]):
                raise ReplayMismatchError(
                    f"{self.name_of(value)} gave another result than in the forward when it ran again (value {value} of the "
                    "step). Is it deterministic, and is everything that writes to its inputs a torch op? If not, mark its "
                    "output with memkit.keep."
                )

    def name_of(self, value: int) -> str:
        maker = self.recording.lineage.maker[value]
        if maker == NO_OP:
            return "a root"
        module = self.recording.modules.get(maker)
        op = str(self.recording.calls[maker].func)
        return f"{op} in {module}" if module else op


def _copied(argument: Any) -> Any:
    return list(argument) if type(argument) is list else argument


def _draw(call: OpCall, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Run a random op with its generator's state in the forward, and restore the current state."""
    generator, state = call.generator, call.state
    assert generator is not None
    assert state is not None
    now, is_as_before = generator.get_state(), False
    try:
        try:
            generator.set_state(state)
            return call.func(*args, **kwargs)
        finally:
            generator.set_state(now)
            is_as_before = True
    finally:
        if not is_as_before:  # an interrupt came in between
            generator.set_state(now)
