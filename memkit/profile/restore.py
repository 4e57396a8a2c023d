"""Saves everything that a run of a model changes, and restores it afterwards."""

from __future__ import annotations

import copy
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from memkit import torch_private
from memkit.storages import byte_view, unique_storages


@contextmanager
def preserved(modules: Iterable[nn.Module], torch_device: torch.device, *, contents: bool) -> Iterator[None]:
    """Run a block, then put back every attribute, parameter, buffer and mode of `modules`, and all random states.

    Attributes are put back as the objects they were; lists, dicts, sets and deques among them with the items they had. The
    bytes of buffers and of tensors that are plain attributes are put back as well, and their version counters. The bytes of
    parameters are not kept: copies of them would double the memory that is being measured.

    Args:
        modules: the modules and all under them.
        torch_device: its random state is kept, beside those of the CPU, of Python and of NumPy where it is loaded.
        contents: whether the bytes are kept (on the host), too. False where a run has no data to change.
    """
    distinct = list(dict.fromkeys(found for module in modules for found in module.modules()))
    devices = [torch_device] if torch_device.type == "cuda" else []
    with ExitStack() as after:  # each of these runs, whatever becomes of the others
        states = [_ModuleState(module) for module in distinct]
        if contents:
            tensors = [tensor for state in states for tensor in state.tensors()]
            versioned = tuple(tensor for tensor in tensors if not tensor.is_inference())
            # The bytes will be what they were, so that graphs which the user holds are as good as before.
            after.enter_context(torch_private.keeping_versions(versioned))
            for storage in unique_storages(tensors).values():
                after.callback(_put_back_bytes, storage, byte_view(storage).to("cpu", copy=True))
        for state in states:
            after.callback(state.put_back)
        numpy_random = sys.modules.get("numpy.random")
        if numpy_random is not None:
            after.callback(numpy_random.set_state, numpy_random.get_state())
        after.callback(random.setstate, random.getstate())
        after.enter_context(torch.random.fork_rng(devices, device_type="cuda"))
        # Casts that autocast keeps are part of what a run makes, and must not be found ready by the next.
        torch.clear_autocast_cache()
        after.callback(torch.clear_autocast_cache)
        yield


@contextmanager
def grads_set_aside(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Run a block in which `tensors` start without gradients; restore their gradients afterwards."""
    kept = [(tensor, tensor.grad) for tensor in {id(tensor): tensor for tensor in tensors if tensor.is_leaf}.values()]
    try:
        for tensor, _ in kept:
            tensor.grad = None
        yield
    finally:
        for tensor, grad in kept:
            tensor.grad = grad


def _put_back_bytes(storage: torch.UntypedStorage, kept: Tensor) -> None:
    if storage.nbytes() == kept.nbytes:
        byte_view(storage).copy_(kept)


class _ModuleState:
    """The attributes of one module, saved."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._scripted = isinstance(module, torch.jit.ScriptModule)
        self._attributes = {} if self._scripted else dict(module.__dict__)
        self._containers = [(value, copy.copy(value)) for value in self._attributes.values() if type(value) in _CONTAINERS]
        self._aliases = [(tensor, tensor.detach()) for tensor in (*self.tensors(), *module.parameters(recurse=False))]
        generators = (value for value in self._attributes.values() if isinstance(value, torch.Generator))
        self._generators = [(generator, generator.get_state()) for generator in generators]

    def tensors(self) -> list[Tensor]:
        """Return the buffers, and the tensors that are plain attributes."""
        plain = (value for value in self._attributes.values() if isinstance(value, Tensor))
        return [*self._module.buffers(recurse=False), *plain]

    def put_back(self) -> None:
        """Restore them, except for the contents of tensors."""
        for generator, state in self._generators:
            generator.set_state(state)
        for tensor, alias in self._aliases:
            if not tensor.is_inference() and unique_storages([tensor]).keys() != unique_storages([alias]).keys():
                tensor.data = alias  # the forward gave it other bytes by `tensor.data = ...`
        for container, items in self._containers:
            container.clear()
            if isinstance(container, (list, deque)):
                container.extend(items)
            else:
                container.update(items)
        if self._scripted:
            return
        attributes = self._module.__dict__
        for name in [name for name in attributes if name not in self._attributes]:
            del attributes[name]
        attributes.update(self._attributes)


_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)
