"""Runs a step on the meta device, as a target would run it, with tensors without data in the place of real ones."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from memkit.core import torch_private
from memkit.core.modes import Mode
from memkit.core.owners import StreamedWeights, owners_set_aside
from memkit.core.tensors import storage_key, unique_storages
from memkit.errors import DataDependentError, ProfileError
from memkit.profile.calls import CallStack, Gauge
from memkit.profile.simulate import META
from memkit.profile.simulate.target import MixedDtypesError, TargetMode, run_as_on
from memkit.profile.step import ProfiledStep, preserved, say_where
from memkit.profile.tree import ModuleTree

if TYPE_CHECKING:
    from memkit.core.torch_private import OpOverload

_MOVES = torch_private.known("to_copy")
_NO_AUTOCAST = ("Disabling autocast", "unsupported autocast device_type 'meta'", "device type 'meta'")


class MetaTwins:
    """Makes the one meta twin of each tensor; twins of views share a storage. Small integers may keep data, on the CPU."""

    def __init__(self, *, keep_integers: bool = False) -> None:
        self._keep_integers = keep_integers
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._twins: dict[int, tuple[Tensor, Tensor]] = {}  # the original is kept, so that its id stays its own

    def of(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return tensor
        if id(tensor) not in self._twins:
            self._twins[id(tensor)] = (tensor, self._make(tensor))
        return self._twins[id(tensor)][1]

    def of_tree(self, tree: Any) -> Any:
        leaves, spec = torch_private.tree_flatten(tree)
        twins = [self.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if all(twin is leaf for twin, leaf in zip(twins, leaves, strict=True)):
            return tree
        return torch_private.tree_unflatten(twins, spec)

    def stand_in(self, model: nn.Module) -> None:
        """Put twins in the place of all parameters, buffers and tensor attributes; `preserved` puts the originals back."""
        for module in model.modules():
            members: tuple[dict[str, Any], ...] = (torch_private.parameters_of(module), torch_private.buffers_of(module))
            for tensors in members:
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = self.of(tensor)
            for name, value in module.__dict__.items():
                if isinstance(value, (Tensor, list, tuple, dict)) and name not in torch_private.MODULE_STATE:
                    module.__dict__[name] = self.of_tree(value)

    def _make(self, tensor: Tensor) -> Tensor:
        if torch_private.is_wrapper(tensor) or tensor.layout != torch.strided:
            twin = tensor.detach().to(META)
        else:
            storage = self._storage_of(tensor)
            twin = torch.empty(0, dtype=tensor.dtype, device=storage.device).set_(
                storage, tensor.storage_offset(), tensor.shape, tensor.stride()
            )
        if type(tensor) is not Tensor and not torch_private.is_wrapper(tensor):
            twin = torch_private.make_subclass(type(tensor), twin)
        twin.requires_grad_(tensor.requires_grad)
        twin.__dict__.update(tensor.__dict__)
        return twin

    def _storage_of(self, tensor: Tensor) -> torch.UntypedStorage:
        storage = tensor.untyped_storage()
        if storage_key(storage) not in self._storages:
            if self._keep_integers and _is_small_integer(tensor):
                twin = storage.cpu() if storage.device.type != "cpu" else storage.clone()
            else:
                twin = torch.UntypedStorage(storage.nbytes(), device=META)
            self._storages[storage_key(storage)] = (storage, twin)
        return self._storages[storage_key(storage)][1]


def _is_small_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() <= 2**20


class TargetOps(Mode):
    """Runs operations as a target would; beside tensors without data, those with data (constants, labels) become their twins.

    A tensor with data stands for one on the target, where moving it there moves nothing, unless the forward made it on the CPU.
    """

    def __init__(self, target: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._target = target
        self._unknown: dict[int, torch.UntypedStorage] = {}
        self._on_host: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, op: OpOverload, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        return run_as_on(self._target, op, args, kwargs or {}, partial(self._run, op))

    def _run(self, op: OpOverload, kernel: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        tensors = [leaf for leaf in torch_private.arg_tree_leaves(*args, **kwargs) if isinstance(leaf, Tensor)]
        with_data = [tensor for tensor in tensors if not tensor.is_meta]
        if len(with_data) == len(tensors):
            return self._with_data(op, args, kwargs, with_data)
        if with_data:
            if torch_private.schema_of(op).is_mutable:
                self._unknown.update(unique_storages(with_data))
            args, kwargs = MetaTwins().of_tree((args, kwargs))
        return kernel(*args, **kwargs)

    def _with_data(self, op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], inputs: list[Tensor]) -> Any:
        """Run an operation none of whose inputs is on the meta device; keep a constant that it would put there on the CPU."""
        unknown = any(storage_key(storage) in self._unknown for storage in unique_storages(inputs).values())
        if unknown and op in _READS:
            raise RuntimeError("the value depends on a meta tensor")
        on_host = self._target == "cuda" and (op is torch.ops.aten.lift_fresh.default or all(map(self._is_on_host, inputs)))
        asks_for_target = kwargs.get("device") is not None and torch.device(kwargs["device"]) == META
        if op in _MOVES and asks_for_target and not on_host and not unknown and torch_private.backward_task() == -1:
            output = _moved(op, inputs[0], kwargs)
        else:
            output = op(*args, **kwargs)
            if asks_for_target and isinstance(output, Tensor) and output.is_meta and _is_small_integer(output):
                output = op(*args, **{**kwargs, "device": torch.device("cpu")})
            elif on_host:
                made = unique_storages(_tensors_of(output))
                self._on_host.update((key, weakref.ref(storage)) for key, storage in made.items())
        if unknown:
            self._unknown.update(unique_storages(_tensors_of(output)))
        return output

    def _is_on_host(self, tensor: Tensor) -> bool:
        return all(key in self._on_host and self._on_host[key]() is own for key, own in unique_storages([tensor]).items())


def _tensors_of(nested: Any) -> list[Tensor]:
    return [leaf for leaf in torch_private.tree_leaves(nested) if isinstance(leaf, Tensor)]


def _moved(op: OpOverload, tensor: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Move a tensor with data that is on the target already: only what else is asked for is done."""
    changes = {name: kwargs.get(name) not in (None, was) for name, was in (("dtype", tensor.dtype), ("layout", tensor.layout))}
    as_it_was = kwargs.get("memory_format") in (None, torch.preserve_format)
    is_same = not any(changes.values()) and as_it_was and not tensor.requires_grad
    output: Tensor = torch.ops.aten.alias.default(tensor) if is_same else op(tensor, **{**kwargs, "device": tensor.device})
    return output


# Operations whose result, or its shape, is known to Python.
_READS = frozenset(
    {
        *torch_private.known("local_scalar", "unique2"),
        torch.ops.aten.equal.default,
        torch.ops.aten.nonzero.default,
        torch.ops.aten.masked_select.default,
        torch.ops.aten.unique_consecutive.default,
    }
)


def run_without_data(step: ProfiledStep, target: str, context: AbstractContextManager[Any]) -> None:
    """Run a step on the meta device as `target` would, its forward in a context, and leave the model as it was."""
    step.check_surroundings()
    tree = ModuleTree(step.model)
    with preserved(step.modules(), META, contents=False), as_on_target(tree, target, lambda: None) as mode:
        stack = CallStack(tree, Gauge())
        without_data(step).run(stack, packing=context, at_node=mode.resume, explain=say_why_not)


@contextmanager
def as_on_target(tree: ModuleTree, target: str, note_backend_dependent: Callable[[], None]) -> Iterator[TargetMode]:
    # Compiled code has no operations to watch, and nothing to run on without data: it runs as it was written.
    eager = torch.compiler.set_stance("force_eager") if tree.has_compiled else nullcontext()
    with (
        eager,
        owners_set_aside(),
        closing(TargetMode(target, backend_dependent=note_backend_dependent)) as mode,
        mode,
        closing(TargetOps(target)) as ops,
        ops,
        warnings.catch_warnings(),
    ):
        # Autocast for CUDA turns itself off, with no more than a warning, on a machine without.
        warnings.filterwarnings("error", message=".*Disabling autocast")
        yield mode


def without_data(step: ProfiledStep) -> ProfiledStep:
    """Return the step with meta copies of its tensors, which the model has until `preserved`, around this, restores its own."""
    twins = MetaTwins(keep_integers=True)
    for module in step.modules():
        twins.stand_in(module)
    args, kwargs = twins.of_tree((step.args, step.kwargs))
    streamed = StreamedWeights(
        layers=step.streamed.layers,
        parameters=tuple(twins.of(parameter) for parameter in step.streamed.parameters),
        slots=tuple(torch.UntypedStorage(slot.nbytes(), device=META) for slot in step.streamed.slots),
    )
    return replace(step, args=args, kwargs=kwargs, streamed=streamed)


def refuse_scripted(step: ProfiledStep) -> None:
    if any(isinstance(part, torch.jit.ScriptModule) for module in step.modules() for part in module.modules()):
        raise ProfileError("TorchScript cannot run on the meta device; profile this model with data")


# How torch says that something cannot be done, or known, without data.
_NO_DATA = (
    *("meta tensor", "meta device type tensor", "register_meta function", "with Meta tensors", "from the 'Meta' backend"),
    *("expected device meta but got", "but got meta"),  # of gradients: a tensor that the forward made on the CPU was written to
)


def say_why_not(error: Exception, where: str) -> None:
    text = str(error)
    if isinstance(error, MixedDtypesError):
        raise ProfileError(f"{where} cannot run: {text}. {error.advice}") from error
    first_line = (text.splitlines() or [""])[0]
    if any(sign in text for sign in _NO_AUTOCAST):
        raise ProfileError(
            f"{where} asks for autocast on a device type that this run does not have ({first_line}). Without data, and without "
            'CUDA, write torch.autocast("cpu", dtype=...): it is treated as the target\'s'
        ) from error
    if isinstance(error, (RuntimeError, TypeError, ValueError)) and any(sign in text for sign in _NO_DATA):
        raise DataDependentError(
            f"{where} cannot run without data: it reads the value of a tensor, or does something that torch cannot do on the "
            f"meta device ({first_line}). Profile this model with data, on a device where it can run; a small batch will do"
        ) from error
    say_where(error, where)
