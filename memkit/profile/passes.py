"""The runs that a profile is made of: one unwatched, one for memory, one for time, and one without data.

Memory and time are never taken in the same run: watching what is saved costs time, and would count as the model's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from memkit.device import Device
from memkit.errors import DataDependentError, ProfileError, note_on
from memkit.hooks import HookSet, saved_tensor_hooks
from memkit.profile.calls import BackwardGraph, CallStack, NoGauge, PeakGauge, Signatures, TimeGauge
from memkit.profile.restore import grads_set_aside
from memkit.profile.rows import Found
from memkit.profile.saves import SavedStorages
from memkit.profile.simulate import MetaTwins, MixedDevices, TargetKernels, TargetMode
from memkit.profile.tree import ROOT, ModuleTree
from memkit.profile.watch import CUDA_ROUNDING_BYTES, HiddenRegions, LiveStorages, OpObserver, OpWatch, ParamCasts, Writes
from memkit.sizes import unique_storages


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What is run: the model on its inputs, then the loss, then the backward."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_fn: Callable[[Any], Tensor] | None
    backward: bool

    def input_tensors(self) -> list[Tensor]:
        """Return the tensors in the model's arguments."""
        return [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    def modules(self) -> list[nn.Module]:
        """Return the model, and the loss where it is a module or a method of one."""
        loss = getattr(self.loss_fn, "__self__", self.loss_fn)
        return [self.model, *([loss] if isinstance(loss, nn.Module) else [])]

    def resident_tensors(self) -> list[Tensor]:
        """Return parameters and buffers: what is there with or without a backward."""
        return [tensor for module in self.modules() for tensor in (*module.parameters(), *module.buffers())]

    def once(self) -> Step:
        """Return the step for one run: lists and dicts among the inputs are new, and inputs that were computed are leaves, so
        that the backward ends there, and not in a graph of the caller's."""
        args, kwargs = pytree.tree_map(_as_leaf, (self.args, self.kwargs))
        return replace(self, args=args, kwargs=kwargs)

    def names_of_storages(self) -> dict[int, str]:
        """Return what to call the storages that a profile cannot put back: those of parameters and inputs."""
        names = dict.fromkeys(unique_storages(self.input_tensors()), "an input")
        for module in self.modules():
            for name, param in module.named_parameters():
                names |= dict.fromkeys(unique_storages([param]), f"parameter {name}")
        return names

    def storages(self) -> list[torch.UntypedStorage]:
        """Return the storages of parameters, buffers and inputs."""
        return list(unique_storages([*self.resident_tensors(), *self.input_tensors()]).values())


def _as_leaf(value: Any) -> Any:
    if isinstance(value, Tensor) and not value.is_leaf:
        return value.detach().requires_grad_(value.requires_grad)
    return value


def plain_pass(step: Step, tree: ModuleTree) -> None:
    """Run the step unwatched: libraries start up, the allocator fills its cache, kernels are chosen."""
    with HookSet() as hooks:
        _run(step.once(), CallStack(tree, NoGauge()), hooks)


def time_pass(step: Step, tree: ModuleTree, device: Device, *, num_calls: int) -> tuple[dict[int, float], dict[int, float]]:
    """Run the step with events around each call; return seconds per module, forward (inclusive) and backward (its own).

    `num_calls` is how many calls there will be.
    """
    gauge = TimeGauge(device)
    device.make_events(2 * num_calls)
    device.synchronize()
    with HookSet() as hooks:
        _run(step.once(), CallStack(tree, gauge), hooks)
    return gauge.read()


def memory_pass(step: Step, tree: ModuleTree, device: Device) -> Found:
    """Run the step on a device and watch what it allocates and saves."""
    counter = device.memory_counter()
    observers: list[OpObserver] = []
    if counter is None and not tree.has_compiled:  # the operations of compiled code cannot be watched
        counter = live = LiveStorages(step.storages())
        observers.append(live)
    device.synchronize()
    gauge = NoGauge() if counter is None else PeakGauge(counter)
    found = _watched_run(step, tree, gauge, observers, device=device)
    device.synchronize()
    return found


def simulated_pass(step: Step, tree: ModuleTree, target: str) -> Found:
    """Run the step on the meta device, as `target` would, and watch what it would allocate and save.

    The model's tensors are replaced by twins without data; `restore.preserved`, around this, puts them back.
    """
    if any(isinstance(part, torch.jit.ScriptModule) for module in step.modules() for part in module.modules()):
        raise ProfileError("TorchScript cannot run on the meta device; profile this model with data")
    twins = MetaTwins(keep_integers=True)
    for module in step.modules():
        twins.stand_in(module)
    args, kwargs = twins.of_tree((step.args, step.kwargs))
    step = replace(step, args=args, kwargs=kwargs)
    live = LiveStorages(step.storages(), rounding_bytes=CUDA_ROUNDING_BYTES if target == "cuda" else 1)
    with MixedDevices(), TargetKernels(target), warnings.catch_warnings():
        # Autocast for CUDA turns itself off, with no more than a warning, on a machine without.
        warnings.filterwarnings("error", message=".*Disabling autocast")
        return _watched_run(step, tree, PeakGauge(live), [live], target=target)


def _nothing() -> None:
    pass


def _watched_run(
    step: Step,
    tree: ModuleTree,
    gauge: PeakGauge | NoGauge,
    observers: Sequence[OpObserver],
    *,
    device: Device | None = None,
    target: str | None = None,
) -> Found:
    step = step.once()
    stack = CallStack(tree, gauge)
    signatures = Signatures()
    resident = set(unique_storages(step.resident_tensors()))
    casts = ParamCasts(resident)
    writes = Writes(step.names_of_storages())
    saves = SavedStorages(
        resident=resident,
        inputs=set(unique_storages(step.input_tensors())),
        is_param_cast=casts.__contains__,
        stack=stack,
        device=device,
    )
    hidden = HiddenRegions(saves.pack, stack)
    backend_dependent: set[int] = set()
    forward_peak_bytes: int | None = None
    at_node: Callable[[], None] | None = None

    def forward_done() -> None:
        nonlocal forward_peak_bytes
        forward_peak_bytes = gauge.take_highest()
        saves.start_backward()

    with ExitStack() as contexts:
        hooks = contexts.enter_context(HookSet())
        signatures.hook(tree, hooks)
        if target is not None:
            mode = TargetMode(target, backend_dependent=lambda: backend_dependent.add(stack.current))
            contexts.callback(mode.close)
            contexts.enter_context(mode)
            at_node = mode.resume
        if target is not None and tree.has_compiled:
            # Compiled code has no operations to watch, and nothing to run on without data: it runs as it was written.
            contexts.enter_context(torch.compiler.set_stance("force_eager"))
        if target is not None or not tree.has_compiled:
            contexts.enter_context(OpWatch(*observers, casts, hidden, writes))
        packing = saved_tensor_hooks(saves.pack, saves.unpack)
        if tree.has_compiled and target is None:  # or Dynamo would try to compile the hooks that compiled code calls
            packing = saved_tensor_hooks(torch.compiler.disable(saves.pack), torch.compiler.disable(saves.unpack))
        _run(step, stack, hooks, signatures, packing=packing, forward_done=forward_done, at_node=at_node)
        backward_peak_bytes = gauge.take_highest() if step.backward else None
    return Found(
        saves=saves,
        signatures=signatures,
        num_calls=stack.num_calls,
        checkpointed=hidden.checkpointed,
        covered=hidden.covered,
        backend_dependent=backend_dependent,
        written=tuple(writes.written),
        before_bytes=gauge.before_bytes,
        forward_peak_bytes=forward_peak_bytes,
        backward_peak_bytes=backward_peak_bytes,
        reserved_peak_bytes=gauge.highest_reserved_bytes,
        forward_peaks=gauge.forward_peaks,
        backward_peaks=gauge.backward_peaks,
        forward_s={},
        backward_s={},
    )


def _run(
    step: Step,
    stack: CallStack,
    hooks: HookSet,
    signatures: Signatures | None = None,
    *,
    packing: AbstractContextManager[Any] | None = None,
    forward_done: Callable[[], None] = _nothing,
    at_node: Callable[[], None] | None = None,
) -> None:
    """Run the step once; what it makes is gone when this returns. `at_node` is called ahead of each autograd node."""
    stack.hook(hooks)
    with packing or nullcontext(), _blaming(stack):
        result = stack.call(ROOT, step.model, *step.args, **step.kwargs)
        if signatures is not None and not signatures.num_kinds(ROOT):  # its hooks would have noted the call
            signatures.note(ROOT, (step.args, step.kwargs), result)
        if step.loss_fn is not None:
            result = stack.call(stack.outside, step.loss_fn, result)
    forward_done()
    if step.backward:
        roots = _backward_roots(step, result)
        graph = BackwardGraph(roots)
        _check_graph(graph, stack, simulated=at_node is not None)
        if at_node is not None:
            for node in graph.nodes:
                hooks.before_backward(node, at_node)
        leaves = [*step.resident_tensors(), *step.input_tensors(), *graph.leaves]
        ones = [_gradient_of_sum(root) for root in roots]
        with grads_set_aside(leaves), _blaming(stack):
            stack.backward(hooks, graph, lambda: torch.autograd.backward(roots, ones))


def _backward_roots(step: Step, result: Any) -> list[Tensor]:
    if step.loss_fn is not None and not (isinstance(result, Tensor) and result.numel() == 1):
        found = f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        raise ValueError(f"with backward=True, loss_fn must return a tensor with one element; found {found}")
    roots = [
        leaf
        for leaf in pytree.tree_leaves(result)
        if isinstance(leaf, Tensor) and leaf.requires_grad and (leaf.is_floating_point() or leaf.is_complex())
    ]
    if not roots:
        source = "in what loss_fn returned" if step.loss_fn is not None else "among the model's outputs"
        raise ProfileError(
            f"backward=True needs a tensor to start from; {source} (found {type(result).__name__}; tuples, lists and dicts are "
            "looked into) nothing requires grad. Pass a loss_fn that returns a number, or unfreeze something"
        )
    return roots


def _check_graph(graph: BackwardGraph, stack: CallStack, *, simulated: bool) -> None:
    """Raise before a backward that would run into a graph of the caller's, or into tensors that have data on meta."""
    if any(node._sequence_nr() < stack.first_number for node in graph.nodes):
        raise ProfileError(
            "the backward would run on into a graph that was there before (of a tensor that the model or the loss holds), and "
            "free it; detach that tensor"
        )
    strangers = [leaf for leaf in graph.leaves if simulated and not leaf.is_meta]
    if strangers:
        raise ProfileError(
            f"on the meta device, the backward reaches a tensor of shape {tuple(strangers[0].shape)} with data, which is no "
            "parameter of the model or of a loss_fn that is a module; make it one, or let it not require grad"
        )


def _gradient_of_sum(root: Tensor) -> Tensor:
    if type(root) is Tensor and not root.is_nested:  # one number, expanded, so that it takes no memory of its own
        return torch.ones((), dtype=root.dtype, device=root.device).expand_as(root)
    return torch.ones_like(root)


@contextmanager
def _blaming(stack: CallStack) -> Iterator[None]:
    """Add the module that was running to an exception of the model."""
    try:
        yield
    except Exception as error:
        where = stack.where(error)
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            note_on(error, f'memkit: out of memory in {where}; profile_memory(..., device="meta") needs no memory')
        elif _is_any(error, "Disabling autocast", "unsupported autocast device_type 'meta'", "device type 'meta'"):
            raise ProfileError(
                f"{where} asks for autocast on a device type that this run does not have ({_first_line(error)}). Without data, "
                'and without CUDA, write torch.autocast("cpu", dtype=...): it is treated as the target\'s'
            ) from error
        elif _is_any(error, "meta tensor", "meta device type tensor", "register_meta function", "with Meta tensors", "'Meta'"):
            raise DataDependentError(
                f"{where} cannot run without data: it reads the value of a tensor, or does something that torch cannot do on "
                f"the meta device ({_first_line(error)}). Profile this model with data: device=None, and a batch as small as "
                "you like"
            ) from error
        else:
            note_on(error, f"memkit: raised in {where}")
        raise


def _is_any(error: Exception, *signs: str) -> bool:
    return isinstance(error, (RuntimeError, TypeError, ValueError, UserWarning)) and any(sign in str(error) for sign in signs)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
