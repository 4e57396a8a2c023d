"""Runs a step on the meta device, without data, as a target would run it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from memkit.errors import DataDependentError, ProfileError
from memkit.owners import StreamedWeights, owners_set_aside
from memkit.profile.calls import CallStack
from memkit.profile.gauges import NoGauge
from memkit.profile.restore import preserved
from memkit.profile.simulate import META
from memkit.profile.simulate.dtypes import MixedDtypesError
from memkit.profile.simulate.kernels import TargetKernels
from memkit.profile.simulate.target import TargetMode
from memkit.profile.simulate.twins import MetaTwins, MixedDevices
from memkit.profile.step import Step, say_where
from memkit.profile.tree import ModuleTree


def run_without_data(step: Step, target: str, context: AbstractContextManager[Any]) -> None:
    """Run a step on the meta device as `target` would, its forward in a context, and leave the model as it was.

    Raises:
        ProfileError, DataDependentError: as `profile_memory` with `device="meta"`.
    """
    step.check_surroundings()
    tree = ModuleTree(step.model)
    with preserved(step.modules(), META, contents=False), as_on_target(tree, target, lambda: None) as mode:
        stack = CallStack(tree, NoGauge())
        without_data(step).run(stack, packing=context, at_node=mode.resume, explain=say_why_not)


@contextmanager
def as_on_target(tree: ModuleTree, target: str, note_backend_dependent: Callable[[], None]) -> Iterator[TargetMode]:
    """A context in which ops on the meta device save and allocate what they would on a target.

    Args:
        note_backend_dependent: called whenever an operation runs of which only the backend knows what it saves.
    """
    # Compiled code has no operations to watch, and nothing to run on without data: it runs as it was written.
    eager = torch.compiler.set_stance("force_eager") if tree.has_compiled else nullcontext()
    with (
        eager,
        owners_set_aside(),
        closing(TargetMode(target, backend_dependent=note_backend_dependent)) as mode,
        mode,
        MixedDevices(target),
        TargetKernels(target),
        warnings.catch_warnings(),
    ):
        # Autocast for CUDA turns itself off, with no more than a warning, on a machine without.
        warnings.filterwarnings("error", message=".*Disabling autocast")
        yield mode


def without_data(step: Step) -> Step:
    """Return the step with meta copies of its tensors, which the model has from now on, until `restore.preserved`, around this,
    restores its own."""
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


def refuse_scripted(step: Step) -> None:
    """Raise if part of a step can't run on the meta device.

    Raises:
        ProfileError: part of it is TorchScript.
    """
    if any(isinstance(part, torch.jit.ScriptModule) for module in step.modules() for part in module.modules()):
        raise ProfileError("TorchScript cannot run on the meta device; profile this model with data")


# How torch says that something cannot be done, or known, without data.
_NO_DATA = (
    *("meta tensor", "meta device type tensor", "register_meta function", "with Meta tensors", "from the 'Meta' backend"),
    *("expected device meta but got", "but got meta"),  # of gradients: a tensor that the forward made on the CPU was written to
)
_NO_AUTOCAST = ("Disabling autocast", "unsupported autocast device_type 'meta'", "device type 'meta'")


def say_why_not(error: Exception, where: str) -> None:
    """Explain an exception that a model has raised on the meta device; may raise another.

    Raises:
        ProfileError: the model cannot run on the target, or needs CUDA here.
        DataDependentError: it cannot run without data.
    """
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
