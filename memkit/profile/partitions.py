"""What a block would save and recompute if compiled with a given `activation_memory_budget`, found from its graphs alone."""

from __future__ import annotations

import functools
import importlib
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from memkit.core import torch_private
from memkit.device.ceilings import flops_of
from memkit.profile.step import preserved

if TYPE_CHECKING:
    from collections.abc import Sequence

_KINDS = ("cuda", "cpu")
_here = threading.local()


class Partition(NamedTuple):
    budget: float
    saved_bytes: int
    given_bytes: int  # bytes of its inputs, which are all that is saved if the whole block is recomputed
    forward_flops: float
    backward_flops: float


class _CutError(Exception):
    """Raised once the graphs are partitioned, to skip the rest of the compilation."""


def partitions(block: nn.Module, args: Any, kwargs: Any, budgets: Iterable[float]) -> list[Partition]:
    """Trace a block in a thread free of the caller's modes; return how the compiler would partition it for some budgets."""
    dynamo: Any = importlib.import_module(torch_private.DYNAMO_CONFIG)  # only now: a slow import
    device = torch.get_default_device()
    is_elsewhere = any(parameter.device.type not in ("cpu", "meta") for parameter in block.parameters())
    place = torch.accelerator.device_index(torch.accelerator.current_device_index()) if is_elsewhere else nullcontext()
    enabled = [(kind, torch.get_autocast_dtype(kind)) for kind in _KINDS if torch.is_autocast_enabled(kind)]

    def run() -> list[Partition]:
        _here.traces = True
        with ExitStack() as around:
            around.enter_context(device)
            around.enter_context(place)
            for kind, dtype in enabled:
                around.enter_context(torch.autocast(kind, dtype=dtype))
            around.enter_context(preserved([block], torch.device("cpu"), contents=False))
            around.enter_context(torch.compiler.set_stance("force_eager"))
            around.enter_context(dynamo.patch(error_on_nested_fx_trace=False))  # compiled code runs as it is
            return [_partition(block, args, kwargs, budget) for budget in budgets]

    if getattr(_here, "traces", False):
        raise RuntimeError(f"{type(block).__name__} cannot be traced: another block is, of which it is a part")
    tracing = _tracer(os.getpid()).submit(run)
    try:
        return tracing.result()
    except Exception as error:
        raise RuntimeError(f"{type(block).__name__} cannot be traced: {error!r}") from error
    finally:
        wait([tracing])  # after an interrupt as well: meanwhile no thread may compile


@functools.cache
def _tracer(_: int) -> ThreadPoolExecutor:
    """Return the one tracing thread: without CUDA, torch 2.11 crashes when a second one begins to trace."""
    return ThreadPoolExecutor(1, "memkit partitions")


def _partition(block: nn.Module, args: Any, kwargs: Any, budget: float) -> Partition:
    from functorch import compile as functorch  # type: ignore[import-untyped]  # only now: it loads much

    owned = {**dict(block.named_parameters()), **dict(block.named_buffers())}
    tensors = list(owned.values())
    given = [leaf for leaf in torch_private.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    cut: dict[str, Any] = {}

    def forward(*inputs: Tensor) -> Any:
        states = dict(zip(owned, inputs, strict=False))
        rest = iter(inputs[len(owned) :])
        called_with = torch_private.tree_map(lambda leaf: next(rest) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        return torch.func.functional_call(block, states, *called_with)

    def partition(joint: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> None:
        cut["forward"], cut["backward"] = functorch.min_cut_rematerialization_partition(joint, inputs, **options)
        raise _CutError

    traced: Callable[..., Any] = functorch.aot_function(forward, fw_compiler=functorch.nop, partition_fn=partition)
    inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in (*tensors, *given)]
    try:
        with functorch.config.patch(activation_memory_budget=budget):
            traced(*inputs)
    except _CutError:
        pass
    if not cut:
        raise RuntimeError("nothing that is computed requires grad")
    return Partition(
        budget=budget,
        saved_bytes=_saved_bytes(cut["forward"].graph, len(owned)),
        given_bytes=sum(tensor.nbytes for tensor in given if tensor.requires_grad),
        forward_flops=_flops(cut["forward"].graph),
        backward_flops=_flops(cut["backward"].graph),
    )


def _saved_bytes(graph: fx.Graph, num_owned: int) -> int:
    owned = set(islice(graph.find_nodes(op="placeholder"), num_owned))
    (output,) = graph.find_nodes(op="output")
    kept = {_base(node) for node in output.all_input_nodes} - owned
    return sum(value.numel() * value.itemsize for node in kept if isinstance(value := node.meta.get("val"), Tensor))


def _base(node: fx.Node) -> fx.Node:
    while isinstance(node.target, torch_private.OpOverload) and node.target.is_view:
        first = node.args[0]
        if not isinstance(first, fx.Node):
            break
        node = first
    return node


def _flops(graph: fx.Graph) -> float:
    found = 0.0
    for node in graph.nodes:
        if node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta.get("val"))
            found += flops_of(node.target, args, kwargs, node.meta.get("val"))
    return found
