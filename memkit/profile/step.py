"""`ProfiledStep`: runs the model on its inputs, then the loss, then the backward, and restores what a run changes."""

from __future__ import annotations

import copy
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from memkit.core import torch_private
from memkit.core.features import Profiled
from memkit.core.hooks import HookSet, SavedTensorHooks, end_left, name_of_hooks_around
from memkit.core.owners import NOTHING_STREAMED, StreamedWeights
from memkit.core.tensors import byte_view, unique_storages
from memkit.errors import ProfileError, note_on
from memkit.profile.alive import MemoryCategory
from memkit.profile.calls import BackwardGraph, CallStack
from memkit.profile.sharded import NOTHING_SHARDED, Shards
from memkit.profile.tree import OUTSIDE_NAME, ROOT, ROOT_NAME, ModuleTree

_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)
USE_META = 'Use device "meta", which needs none'
NEEDS_NONE = 'the meta device needs none (device="meta", --device meta)'


@contextmanager
def preserved(modules: Iterable[nn.Module], torch_device: torch.device, *, contents: bool) -> Iterator[None]:
    """Run a block, then restore what `modules` have, but the bytes of parameters, and all random states."""
    distinct = list(dict.fromkeys(found for module in modules for found in module.modules()))
    devices = [torch_device] if torch_device.type == "cuda" else []
    with ExitStack() as after:  # each callback runs, even if others raise
        states = [_ModuleState(module) for module in distinct]
        if contents:
            tensors = [tensor for state in states for tensor in state.tensors]
            # The bytes will be the same, so graphs that the user holds stay valid.
            versioned = tuple(tensor for tensor in tensors if not tensor.is_inference())
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
        # a run must not find autocast's cached casts of the one before.
        torch.clear_autocast_cache()
        after.callback(torch.clear_autocast_cache)
        yield


@contextmanager
def grads_set_aside(tensors: Iterable[Tensor]) -> Iterator[None]:
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
    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._attributes = None if isinstance(module, torch.jit.ScriptModule) else dict(module.__dict__)
        values = list((self._attributes or {}).values())
        self._containers = [(value, copy.copy(value)) for value in values if type(value) in _CONTAINERS]
        self.tensors = [*module.buffers(recurse=False), *(value for value in values if isinstance(value, Tensor))]
        self._aliases = [(tensor, tensor.detach()) for tensor in (*self.tensors, *module.parameters(recurse=False))]
        self._generators = [(value, value.get_state()) for value in values if isinstance(value, torch.Generator)]

    def put_back(self) -> None:
        for generator, state in self._generators:
            generator.set_state(state)
        for tensor, alias in self._aliases:
            if not tensor.is_inference() and unique_storages([tensor]).keys() != unique_storages([alias]).keys():
                tensor.data = alias  # the forward gave it other bytes by `tensor.data = ...`
        for container, items in self._containers:
            container.clear()
            (container.extend if isinstance(container, (list, deque)) else container.update)(items)
        if self._attributes is not None:
            attributes = self._module.__dict__
            for name in attributes.keys() - self._attributes.keys():
                del attributes[name]
            attributes.update(self._attributes)


def nothing(*_: object) -> None:
    pass


def is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def say_where(error: Exception, where: str) -> None:
    """Add a note to an exception of the model: the module that raised it, and what helps if it is out of memory."""
    if is_out_of_memory(error):
        note_on(error, f"memkit: out of memory in {where}; {NEEDS_NONE}")
    else:
        note_on(error, f"memkit: raised in {where}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledStep:
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_fn: Callable[[Any], Tensor] | None
    backward: bool
    streamed: StreamedWeights = NOTHING_STREAMED
    sharded: Shards = NOTHING_SHARDED

    def input_tensors(self) -> list[Tensor]:
        return [leaf for leaf in torch_private.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    def modules(self) -> list[nn.Module]:
        loss = getattr(self.loss_fn, "__self__", self.loss_fn)
        return [self.model, *([loss] if isinstance(loss, nn.Module) else [])]

    def resident_tensors(self) -> list[Tensor]:
        return [tensor for module in self.modules() for tensor in (*module.parameters(), *module.buffers())]

    def device_tensors(self) -> list[Tensor]:
        streamed = {id(parameter) for parameter in self.streamed.parameters}
        return [tensor for tensor in self.resident_tensors() if id(tensor) not in streamed]

    def named_tensors(self, tree: ModuleTree) -> Iterator[tuple[Tensor, MemoryCategory, str, str]]:
        """Yield each tensor that exists before the step, with category, row, and name in the row; parameters come first."""
        owners = [(tree.fqn(index), node.module, False) for index, node in enumerate(tree.nodes)]
        owners += [(OUTSIDE_NAME, module, True) for module in self.modules()[1:]]
        for category, named in ((MemoryCategory.PARAM, "named_parameters"), (MemoryCategory.BUFFER, "named_buffers")):
            for row, module, recurse in owners:
                for name, tensor in getattr(module, named)(recurse=recurse):
                    yield tensor, category, row, name
        for number, tensor in enumerate(self.input_tensors()):
            yield tensor, MemoryCategory.INPUT, ROOT_NAME, f"input {number}"

    def names_of_storages(self) -> dict[int, str]:
        names = dict.fromkeys(unique_storages(self.input_tensors()), "an input")
        for module in self.modules():
            for name, param in module.named_parameters():
                names |= dict.fromkeys(unique_storages([param]), f"parameter {name}")
        return names

    def storages(self) -> list[torch.UntypedStorage]:
        return [*unique_storages([*self.device_tensors(), *self.input_tensors()]).values(), *self.streamed.slots]

    def check_surroundings(self) -> None:
        """Raise ProfileError if the caller runs under saved-tensor hooks, which would see, or hide, what autograd saves."""
        end_left()
        around = name_of_hooks_around()
        if around:
            raise ProfileError(
                f"a profile needs to see all that autograd saves; found {around} around it, which is to see that too. Profile "
                "the model outside of it"
            )

    def run(
        self,
        stack: CallStack,
        *,
        packing: AbstractContextManager[Any] | None = None,
        forward_done: Callable[[], None] = nothing,
        backward_done: Callable[[Sequence[Tensor]], None] = nothing,
        at_node: Callable[[], None] | None = None,
        explain: Callable[[Exception, str], None] = say_where,
    ) -> None:
        """Run the step once; everything that it makes is freed when this returns. `explain` may raise another exception."""
        # Lists and dicts among the inputs are made anew, and inputs that were computed become leaves, so that the backward ends
        # there and not in a graph of the caller's.
        args, kwargs = torch_private.tree_map(_as_leaf, (self.args, self.kwargs))
        step = replace(self, args=args, kwargs=kwargs)
        owned = step.resident_tensors()  # before FSDP2 replaces them
        with HookSet() as hooks, Profiled() as block:
            stack.hook(hooks)
            if isinstance(packing, SavedTensorHooks):
                packing.block = block
            with packing or nullcontext(), _explained(stack, explain):
                result = stack.call(ROOT, step.model, *step.args, **step.kwargs)
                if step.loss_fn is not None:
                    result = stack.call(stack.outside, step.loss_fn, result)
            forward_done()
            if not step.backward:
                return
            roots = _backward_roots(step, result)
            graph = BackwardGraph(roots)
            _check_graph(graph, stack)
            if at_node is not None:
                for node in graph.nodes:
                    hooks.before_backward(node, at_node)
            leaves = [*owned, *step.resident_tensors(), *step.input_tensors(), *graph.leaves]
            ones = [_gradient_of_sum(root) for root in roots]
            with grads_set_aside(leaves), _explained(stack, explain):
                stack.backward(hooks, graph, lambda: torch.autograd.backward(roots, ones))
                backward_done(leaves)


def _as_leaf(value: Any) -> Any:
    if isinstance(value, Tensor) and not value.is_leaf:
        return value.detach().requires_grad_(value.requires_grad)
    return value


def _backward_roots(step: ProfiledStep, result: Any) -> list[Tensor]:
    if step.loss_fn is not None and not (isinstance(result, Tensor) and result.numel() == 1):
        found = f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        raise ValueError(f"with backward=True, loss_fn must return a tensor with one element; found {found}")
    roots = [
        leaf
        for leaf in torch_private.tree_leaves(result)
        if isinstance(leaf, Tensor) and leaf.requires_grad and (leaf.is_floating_point() or leaf.is_complex())
    ]
    if not roots:
        source = "in what loss_fn returned" if step.loss_fn is not None else "among the model's outputs"
        raise ProfileError(
            f"backward=True needs a tensor to start from; {source} (found {type(result).__name__}; tuples, lists and dicts are "
            "looked into) nothing requires grad. Pass a loss_fn that returns a number, or unfreeze something"
        )
    return roots


def _check_graph(graph: BackwardGraph, stack: CallStack) -> None:
    if any(torch_private.node_number_of(node)() < stack.first_number for node in graph.nodes):
        raise ProfileError(
            "the backward would run on into a graph that was there before (of a tensor that the model or the loss holds), and "
            "free it; detach that tensor"
        )
    on_meta = any(leaf.is_meta for leaf in graph.leaves)
    strangers = [leaf for leaf in graph.leaves if on_meta and not leaf.is_meta]
    if strangers:
        raise ProfileError(
            f"on the meta device, the backward reaches a tensor of shape {tuple(strangers[0].shape)} with data, which is no "
            "parameter of the model or of a loss_fn that is a module; make it one, or let it not require grad"
        )


def _gradient_of_sum(root: Tensor) -> Tensor:
    if type(root) is Tensor and not root.is_nested:  # one expanded number, without memory of its own
        return torch.ones((), dtype=root.dtype, device=root.device).expand_as(root)
    return torch.ones_like(root)


@contextmanager
def _explained(stack: CallStack, explain: Callable[[Exception, str], None]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        where, misfit = stack.explain(error)
        explain(error, where)
        if misfit:
            note_on(error, f"memkit: {misfit}")
        raise
