"""The runs that a profile is made of: unwatched ones, one for memory, two for time, and one without data.

Memory and time are never taken in the same run: watching what is saved costs time, and would count as the model's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from memkit.device import Device
from memkit.errors import DataDependentError, ProfileError
from memkit.hooks import HookSet, SavedTensorHooks
from memkit.owners import ModelStorages, StreamedWeights, owners_set_aside
from memkit.profile.calls import CallStack
from memkit.profile.gauges import MemoryGauge, NoGauge, PeakGauge, TimeGauge
from memkit.profile.restore import preserved
from memkit.profile.rows import Found
from memkit.profile.saves import SavedStorages, SaveTimes
from memkit.profile.signatures import Signatures
from memkit.profile.simulate import META
from memkit.profile.simulate.dtypes import MixedDtypesError
from memkit.profile.simulate.kernels import TargetKernels
from memkit.profile.simulate.target import TargetMode
from memkit.profile.simulate.twins import MetaTwins, MixedDevices
from memkit.profile.step import Step, say_where
from memkit.profile.tree import ModuleTree
from memkit.profile.watch import (
    CUDA_ROUNDING_BYTES,
    HiddenRegions,
    LiveStorages,
    OpObserver,
    OpWatch,
    ParamCasts,
    Writes,
)
from memkit.storages import unique_storages


def plain_pass(step: Step, tree: ModuleTree) -> None:
    """Run the step unwatched: libraries start up, the allocator fills its cache, kernels are chosen."""
    step.run(CallStack(tree, NoGauge()))


def time_pass(step: Step, tree: ModuleTree, device: Device, *, num_calls: int) -> tuple[dict[int, float], dict[int, float]]:
    """Run the step with events around each call; return seconds per module, forward (inclusive) and backward (its own).

    `num_calls` is how many calls there will be.
    """
    gauge = TimeGauge(device)
    device.make_events(2 * num_calls)
    device.synchronize()
    step.run(CallStack(tree, gauge))
    return gauge.read()


def save_times_pass(step: Step, tree: ModuleTree, device: Device) -> SaveTimes:
    """Run the step with an event at each save and use of a saved tensor, and nothing else."""
    device.synchronize()
    times = SaveTimes(device)
    packing = SavedTensorHooks(times.pack, times.unpack)
    step.run(CallStack(tree, NoGauge()), packing=packing, forward_done=times.start_backward)
    device.synchronize()
    return times


def memory_pass(step: Step, tree: ModuleTree, device: Device) -> Found:
    """Run the step on a device and watch what it allocates and saves."""
    counter = device.memory_counter()
    live: list[LiveStorages] = []
    if counter is None and not tree.has_compiled:
        live = [LiveStorages(step.storages(), elsewhere=step.streamed.parameters)]
        counter = live[0]
    device.synchronize()
    watch = _Watch(step, tree, NoGauge() if counter is None else PeakGauge(counter))
    # The operations of compiled code cannot be watched: under a dispatch mode it would run eagerly.
    below = nullcontext() if tree.has_compiled else OpWatch(*live, *watch.observers)
    with below:
        found = watch.run(packing=SavedTensorHooks(watch.saves.pack, watch.saves.unpack))
    device.synchronize()
    return found


def simulated_pass(step: Step, tree: ModuleTree, target: str) -> Found:
    """Run the step on the meta device, as `target` would, and watch what it would allocate and save.

    The model's tensors are replaced by twins without data; `restore.preserved`, around this, puts them back.
    """
    if any(isinstance(part, torch.jit.ScriptModule) for module in step.modules() for part in module.modules()):
        raise ProfileError("TorchScript cannot run on the meta device; profile this model with data")
    step = _without_data(step)
    rounding_bytes = CUDA_ROUNDING_BYTES if target == "cuda" else 1
    live = LiveStorages(step.storages(), elsewhere=step.streamed.parameters, rounding_bytes=rounding_bytes)
    watch = _Watch(step, tree, PeakGauge(live))
    with _as_on_target(tree, target, watch.note_backend_dependent) as mode, OpWatch(live, *watch.observers):
        packing = SavedTensorHooks(watch.saves.pack, watch.saves.unpack)
        return watch.run(packing=packing, at_node=mode.resume, explain=_say_why_not_without_data)


def run_without_data(step: Step, target: str, context: AbstractContextManager[Any]) -> None:
    """Run a step on the meta device as `target` would, its forward in a context, and leave the model as it was.

    Raises:
        ProfileError, DataDependentError: as `profile_memory` with `device="meta"`.
    """
    step.check_surroundings()
    tree = ModuleTree(step.model)
    with preserved(step.modules(), META, contents=False), _as_on_target(tree, target, lambda: None) as mode:
        stack = CallStack(tree, NoGauge())
        _without_data(step).run(stack, packing=context, at_node=mode.resume, explain=_say_why_not_without_data)


@contextmanager
def _as_on_target(tree: ModuleTree, target: str, note_backend_dependent: Callable[[], None]) -> Iterator[TargetMode]:
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


class _Watch:
    """Everything that is noted in the run for memory."""

    def __init__(self, step: Step, tree: ModuleTree, gauge: MemoryGauge) -> None:
        self._step = step
        self._tree = tree
        self._gauge = gauge
        self._stack = CallStack(tree, gauge)
        self._signatures = Signatures()
        resident = ModelStorages(unique_storages(step.resident_tensors()))
        casts = ParamCasts(resident)
        self.saves = SavedStorages(
            resident=resident,
            inputs=set(unique_storages(step.input_tensors())),
            is_param_cast=casts.__contains__,
            stack=self._stack,
        )
        self._hidden = HiddenRegions(self.saves.pack, self._stack)
        self._writes = Writes(step.names_of_storages())
        self._backend_dependent: set[int] = set()
        self._forward_peak_bytes: int | None = None
        self.observers: tuple[OpObserver, ...] = (casts, self._hidden, self._writes)

    def note_backend_dependent(self) -> None:
        """Note that an operation runs of which only the backend knows what it saves."""
        self._backend_dependent.add(self._stack.current)

    def run(
        self,
        *,
        packing: AbstractContextManager[Any],
        at_node: Callable[[], None] | None = None,
        explain: Callable[[Exception, str], None] = say_where,
    ) -> Found:
        """Run the step and return what was noted. For the arguments see `Step.run`."""
        with HookSet() as hooks:
            self._signatures.hook(self._tree, hooks)
            self._step.run(self._stack, packing=packing, forward_done=self._forward_done, at_node=at_node, explain=explain)
        return Found(
            saves=self.saves,
            signatures=self._signatures,
            num_calls=self._stack.num_calls,
            checkpointed=self._hidden.checkpointed,
            under_other_hooks=self._hidden.under_other_hooks,
            backend_dependent=self._backend_dependent,
            written=tuple(self._writes.written),
            before_bytes=self._gauge.before_bytes,
            forward_peak_bytes=self._forward_peak_bytes,
            backward_peak_bytes=self._gauge.take_highest() if self._step.backward else None,
            reserved_peak_bytes=self._gauge.highest_reserved_bytes,
            forward_peaks=self._gauge.forward_peaks,
            backward_peaks=self._gauge.backward_peaks,
            forward_s={},
            backward_s={},
        )

    def _forward_done(self) -> None:
        self._forward_peak_bytes = self._gauge.take_highest()
        self.saves.start_backward()


def _without_data(step: Step) -> Step:
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


# How torch says that something cannot be done, or known, without data.
_NO_DATA = (
    *("meta tensor", "meta device type tensor", "register_meta function", "with Meta tensors", "from the 'Meta' backend"),
    *("expected device meta but got", "but got meta"),  # of gradients: a tensor that the forward made on the CPU was written to
)
_NO_AUTOCAST = ("Disabling autocast", "unsupported autocast device_type 'meta'", "device type 'meta'")


def _say_why_not_without_data(error: Exception, where: str) -> None:
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
