"""`profile_memory`: checks its arguments, makes the runs, and builds the report."""

from __future__ import annotations

import logging
import os
import platform
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from memkit.core.hooks import may_step_in_backward
from memkit.core.owners import StreamedWeights, find_streamed
from memkit.core.sizes import check_bytes
from memkit.core.tensors import storage_bytes
from memkit.core.terminal import terminal_width
from memkit.core.torch_state import fsdp_modules
from memkit.device import Device, open_device
from memkit.errors import ProfileError
from memkit.optimizers.steppers import stepped_shards
from memkit.plan import GpuSpec, StepTrace, find_gpu
from memkit.plan.gpu import GPUS
from memkit.profile.alive import AliveStorage, OptimizerMemory
from memkit.profile.calls import CallStack, Gauge
from memkit.profile.fit import DEFAULT_GPU, check_fit, fit_step
from memkit.profile.optimizer_states import check_optimizer, optimizer_memory
from memkit.profile.registry import file_report
from memkit.profile.report import MemoryReport, RunInfo
from memkit.profile.sharded import INSTEAD, find_shards, with_others
from memkit.profile.simulate import META, TARGETS, rounding_bytes
from memkit.profile.step import USE_META, ProfiledStep, preserved
from memkit.profile.table import check_view
from memkit.profile.tree import ModuleTree

if TYPE_CHECKING:
    from memkit.profile.watch import Watch

_Value = TypeVar("_Value")
_logger = logging.getLogger("memkit.profile")


def profile_memory(
    model: nn.Module,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    loss_fn: Callable[[Any], Tensor] | None = None,
    backward: bool = False,
    optimizer: str | torch.optim.Optimizer | type[torch.optim.Optimizer] | None = None,
    device: str | torch.device | Device | None = None,
    target: str = "cuda",
    tag: str = "default",
    depth: int | None = None,
    sort_by: str | None = None,
    warmup: int = 1,
    print_table: bool = True,
    trace: bool = False,
    min_bytes: int | str = "1MiB",
    fit: int | float | str | None = None,
    gpu: str | os.PathLike[str] | GpuSpec | None = None,
) -> MemoryReport:
    """Show, module by module, what a training step of `model` keeps in memory: print the table and return the report.

    The model runs in its current mode (call `model.train()` first for training figures): `warmup` times unwatched, once for
    memory, and twice for time (of calls, and of saves). Afterwards hooks, modes, buffers, gradients and random states are as
    before. On CUDA the peak counter of the device is reset (`torch.cuda.max_memory_allocated` starts anew).

    If `memkit.shard` or FSDP2's `fully_shard` has split the model, each rank gets a report of its own part: its shards, their
    gradients and states, its saves, and the bytes gathered at once (`MemoryReport.sharding`). **Every rank of the process group
    has to call it**, with the same model and arguments, and a batch of its own, since each run communicates. An error on one
    rank is raised on all of them.

    Args:
        model: the module to run, on the CPU, on one CUDA device or on the meta device. A `LayerOffload` may stream its layers:
            they are marked, and their weights shown separately.
        *args: its positional arguments, on the same device; any shapes that it accepts.
        kwargs: its keyword arguments.
        loss_fn: called with the model's output; its saves are in the row "(outside modules)". With `backward` it must return
            one number.
        backward: also run the backward, from `loss_fn`, or from the sum of the floating-point outputs without one.
        optimizer: also count the states that it keeps for each parameter from its first step on, and run the backward, for the
            gradients: an optimizer made on the model's parameters, a class of one, or a name such as "adamw", "momentum" or
            "adafactor". It is not stepped: a copy of it steps once on parameters without data. Temporaries of a step, such as
            the lists that `foreach=True` works on, are not counted, and are least with `fused=True`.
        device: None, or the device that the model is on, runs it there. "meta" runs it without data, on any machine: nothing is
            copied or computed, and times are blank.
        target: for a run on meta, whose kernels to imitate, "cuda" or "cpu": they save different tensors in attention, dropout,
            RMS norm and under autocast.
        tag: the report is filed under this name, where `find_report` and contexts with the same tag find it.
        depth: fold the printed rows below this depth.
        sort_by: order of the printed rows; see `MemoryReport.to_text`.
        warmup: runs before the watched ones; none on meta.
        print_table: whether to print `report.to_text(depth=depth, sort_by=sort_by)`. Of several ranks only the first prints.
        trace: also follow the step op by op, and run the forward once more, for plans: see `MemoryReport.trace`. Needs
            `device="meta"` and `backward=True`.
        min_bytes: saved storages smaller than this are not told apart in the trace: bytes, or text such as "1MiB".
        fit: also tell whether the whole step fits in some memory, and with which feature of memkit it would: text such as
            "12GiB", bytes, or a share of the peak. Runs the backward, and a trace without data wherever the model is.
        gpu: the GPU that `fit` predicts for: a name such as "RTX 4090", a file of `memkit bench machine`, or a
            `memkit.plan.GpuSpec`. None: the GPU of the model, if memkit knows it by name, else "H200". Without `fit`: whether
            the step fits in that GPU's memory.

    Returns:
        The report, whose `str()` is the table. `MemoryReport` tells field by field what its figures mean, and do not mean.

    Raises:
        TypeError: `model` is no `nn.Module`, or `loss_fn` cannot be called.
        ValueError: an argument is none of the above, the optimizer was made on other parameters, model and inputs are on
            different devices, or a trace is requested for a run with data or without a backward.
        ProfileError: the profile would record nothing, or do damage: grad mode is off, parameters are not initialized, there is
            nothing to run a backward from, the model is on several devices, or steps an optimizer in the backward; it is called
            inside of `CPUOffload`, `Rematerialize` or other saved-tensor hooks, or the model itself enters such a context of
            memkit, as an attached one does; on meta, it has gradients that go to the host. For a trace, the forward runs a
            backward of its own, or does not run the same ops each time. A sharded model can't run without data (on meta, for a
            trace or `fit`), and can't in the middle of accumulating gradients, beside tensor parallelism, or on a part of the
            process group.
        ShardError: the model is sharded, and another rank raised an exception, was given a different model or arguments, or has
            not come.
        MissingTorchNameError: the model is sharded by a PyTorch that memkit does not know.
        DataDependentError: on meta, the model read the value of a tensor.
        DeviceUnavailableError: the CUDA device is not there.
        Exception: any exception of the model, with a note that names the module.

    Example:
        A whole step, with inputs by keyword, a loss and an optimizer:

        >>> import torch, memkit
        >>> model = torch.nn.Bilinear(8, 8, 8)
        >>> inputs = {"input1": torch.randn(4, 8), "input2": torch.randn(4, 8)}
        >>> report = memkit.profile_memory(
        ...     model, kwargs=inputs, loss_fn=lambda output: output.square().mean(), optimizer="adamw", print_table=False
        ... )
        >>> report.optimizer.state_bytes == 2 * report.param_bytes == 2 * report.grad_bytes
        True

        The forward alone:

        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
        >>> report = memkit.profile_memory(model, torch.randn(4, 8), print_table=False)
        >>> report.activation_bytes  # the input and the tanh's output: 4 * 8 floats each
        256

    Source: `torch.autograd.graph.saved_tensors_hooks`; the table follows hfai's memory profiler.
    """
    step = ProfiledStep(model=model, args=args, kwargs=dict(kwargs or {}), loss_fn=loss_fn, backward=backward)
    is_fitted = fit is not None or gpu is not None

    def prepare() -> _Prepared:
        spec = None if gpu is None else find_gpu(gpu)
        counted = check_optimizer(optimizer)
        if is_fitted:
            check_fit(fit, spec)
        own = replace(step, backward=step.backward or counted is not None or is_fitted)
        _check_arguments(own, target=target, tag=tag, warmup=warmup)
        check_view(depth=depth, sort_by=sort_by, top=None)
        if not torch.is_grad_enabled():
            raise ProfileError("grad mode is off, so autograd saves nothing; call profile_memory outside of torch.no_grad()")
        own.check_surroundings()
        if (trace is True or is_fitted or str(device).startswith("meta")) and fsdp_modules(own.modules()):
            raise ProfileError(
                "the model is sharded by fully_shard, and what ranks send each other needs data; found "
                f'device="meta", trace=True, fit= or gpu=. Leave that out, or profile the model before sharding: {INSTEAD}'
            )
        sharded = find_shards(own.modules())
        _check_model(own)
        streamed = StreamedWeights(parameters=sharded.on_host) if sharded else find_streamed(own.modules())
        own = replace(own, streamed=streamed, sharded=sharded)
        run_at = _run_device(own, device)
        num_bytes = check_bytes("min_bytes", min_bytes)
        if not isinstance(trace, bool):
            raise ValueError(f"trace is True or False; found {trace!r}")
        if trace and run_at != META:
            raise ValueError(
                f'trace=True needs device="meta", where no data is needed; found a run on {run_at}. Pass device="meta"'
            )
        if trace and not own.backward:
            raise ValueError("trace=True needs a whole step; found backward=False. Pass backward=True")
        tree = ModuleTree(own.model, own.streamed)
        memory, states = None, tuple[AliveStorage, ...]()
        if counted is not None:
            rounding = rounding_bytes(target if run_at == META else run_at.type)
            memory, states = optimizer_memory(own, tree, counted, device=run_at, rounding_bytes=rounding)
        return _Prepared(own, tree, run_at, target, num_bytes if trace or is_fitted else None, spec, memory, states)

    prepared = _together(prepare, step, warmup)
    report = _measure(prepared, tag=tag, warmup=warmup)
    if is_fitted and report.trace is not None:
        spec = prepared.gpu or _gpu_named(report.run.device_name)
        _logger.info("planning for the %s", DEFAULT_GPU if spec is None else spec.name)
        report = replace(report, fit=fit_step(report.trace, fit, spec, optimizer=prepared.optimizer))
    file_report(report)
    if print_table and (report.sharding is None or report.sharding.rank == 0):
        print(report.to_text(depth=depth, sort_by=sort_by, width=terminal_width()))
    return report


class _Prepared(NamedTuple):
    step: ProfiledStep
    tree: ModuleTree
    run_device: torch.device
    target: str
    min_bytes: int | None  # for the trace; None if there is none
    gpu: GpuSpec | None
    optimizer: OptimizerMemory | None
    states: tuple[AliveStorage, ...]


def _together(look: Callable[[], _Prepared], step: ProfiledStep, warmup: object) -> _Prepared:
    """Call `look`; if a part of the model is sharded, on all ranks, which must have the same arguments."""
    import torch.distributed as dist

    is_sharded = bool(fsdp_modules([module for module in step.modules() if isinstance(module, nn.Module)]))
    if not (is_sharded and dist.is_available() and dist.is_initialized()):
        return look()
    from memkit.core.agreement import together

    def describe(prepared: _Prepared) -> Iterator[object]:
        step = prepared.step
        yield step.backward, warmup, prepared.run_device.type, prepared.optimizer is None, step.model.training
        for name, item in step.model.named_parameters():
            yield name, tuple(item.shape), item.dtype, item.requires_grad

    return together(look, describe, doing="looking at the model", feature="profile_memory")


def _gpu_named(device_name: str) -> GpuSpec | None:
    """Return the known GPU with a driver's name, such as "NVIDIA H100 80GB HBM3"."""
    names = [name for name in GPUS if re.search(rf"\b{re.escape(name.partition('-')[0])}\b", device_name)]
    return GPUS[max(names, key=len)] if names else None


def _measure(prepared: _Prepared, *, tag: str, warmup: int) -> MemoryReport:
    # Only now: a private class of torch is the base of the op watch.
    from memkit.profile.passes import memory_pass, module_records, save_times_pass, simulated_pass, time_pass
    from memkit.profile.watch import StorageLog

    step, tree, run_device = prepared.step, prepared.tree, prepared.run_device
    device = None if run_device == META else open_device(run_device, advice=USE_META)

    def run(work: Callable[[], _Value], doing: str, *, is_timed: bool = False) -> _Value:
        _logger.info("forward%s%s", " and backward" * step.backward, doing)
        around = partial(preserved, step.modules(), run_device, contents=device is not None)
        return with_others(work, step.sharded, doing=f"running a step{doing}", around=around, checks=not is_timed)

    save_times, forward_s, backward_s = None, dict[int, float](), dict[int, float]()
    trace = None
    if prepared.min_bytes is not None and device is None:
        trace, watch = _traced(step, tree, prepared.target, prepared.min_bytes)
    elif device is None:
        watch, _ = run(lambda: simulated_pass(step, tree, prepared.target, StorageLog), " without data")
    else:
        if step.sharded:
            run(step.sharded.gather_once, ", gathering each layer")
        for number in range(warmup):
            run(lambda: step.run(CallStack(tree, Gauge())), f", warm-up {number + 1} of {warmup}")
        watch = run(lambda: memory_pass(step, tree, device), ", watching memory")
        num_calls = sum(watch.stack.num_calls.values())
        forward_s, backward_s = run(lambda: time_pass(step, tree, device, num_calls=num_calls), ", taking time", is_timed=True)
        save_times = run(lambda: save_times_pass(step, tree, device), ", timing saves", is_timed=True)
        if watch.written:
            names = list(watch.written)
            warnings.warn(
                f"the forward wrote to {', '.join(names[:3])}{', ...' * (len(names) > 3)}, and profile_memory does not put "
                'these back; profile a copy, or use device="meta"',
                stacklevel=3,
            )
    if prepared.min_bytes is not None and trace is None:
        trace, _ = _traced(step, tree, "cuda", prepared.min_bytes)
    log, optimizer = watch.log, prepared.optimizer
    steps = None if optimizer is None else optimizer.name
    saved = watch.saves.records(save_times)
    autocast = next((str(torch.get_autocast_dtype(kind)) for kind in TARGETS if torch.is_autocast_enabled(kind)), "")
    return MemoryReport(
        tag=tag,
        run=RunInfo(
            model=type(step.model).__name__,
            num_modules=len(tree.nodes),
            fingerprint=tree.fingerprint(),
            device=str(run_device),
            device_name="none" if device is None else device.name,
            target=prepared.target if device is None else run_device.type,
            training=step.model.training,
            autocast=autocast.removeprefix("torch."),
            backward=step.backward,
            torch_version=torch.__version__,
            python_version=platform.python_version(),
            allocator_config=os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")),
        ),
        modules=module_records(tree, watch, saved, forward_s, backward_s),
        saved=saved,
        buffer_bytes=storage_bytes(step.model.buffers()),
        slot_bytes=sum(slot.nbytes() for slot in step.streamed.slots),
        before_bytes=watch.gauge.before_bytes,
        forward_peak_bytes=watch.forward_peak_bytes,
        backward_peak_bytes=watch.backward_peak_bytes,
        reserved_peak_bytes=watch.gauge.highest_reserved_bytes,
        trace=trace,
        optimizer=optimizer,
        sharding=step.sharded.info(None if log is None else log.gathered_bytes()) if step.sharded else None,
        step_memory=log.finished(prepared.states, optimizer=steps) if log is not None and step.backward else None,
    )


def _traced(step: ProfiledStep, tree: ModuleTree, target: str, min_bytes: int) -> tuple[StepTrace, Watch]:
    from memkit.profile.trace import trace_step  # only now, like the imports of `_measure`

    _logger.info("forward and backward without data, op by op")
    return trace_step(step, tree, target, min_bytes)


def _check_arguments(step: ProfiledStep, *, target: str, tag: str, warmup: int) -> None:
    if not isinstance(step.model, nn.Module):
        raise TypeError(f"profile_memory needs a torch.nn.Module; found {type(step.model).__name__}")
    if step.loss_fn is not None and not callable(step.loss_fn):
        raise TypeError(f"loss_fn must be callable; found {type(step.loss_fn).__name__}")
    if target not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(map(repr, TARGETS))}; found {target!r}")
    if not isinstance(tag, str) or not tag:
        raise ValueError(f"tag must be a name; found {tag!r}")
    if not isinstance(warmup, int) or warmup < 0:
        raise ValueError(f"warmup must be a number of runs, 0 or more; found {warmup!r}")


def _check_model(step: ProfiledStep) -> None:
    """Raise ProfileError if the model can't run, or if running it would train something."""
    named = [pair for module in step.modules() for pair in (*module.named_parameters(), *module.named_buffers())]
    lazy = [name for name, tensor in named if is_lazy(tensor)]
    if lazy:
        raise ProfileError(f"{lazy[0]} has no shape yet; run the model once before profiling it")
    stepped = stepped_shards()
    stepping = [name for name, tensor in named if id(tensor) in stepped or may_step_in_backward(tensor)]
    if stepping and step.backward:
        raise ProfileError(
            f"{stepping[0]} has a hook that runs when its gradient is accumulated, such as an optimizer step in the backward: "
            "a profile would train the model. Remove it, or profile with backward=False"
        )


def _run_device(step: ProfiledStep, asked: str | torch.device | Device | None) -> torch.device:
    if asked is not None and str(asked) in ("meta", "meta:0"):
        if step.backward and any(parameter.requires_grad for parameter in step.streamed.parameters):
            raise ProfileError(
                'device="meta" cannot follow gradients that LayerOffload takes to host memory (train="host"): the peak of the '
                "backward would be wrong. Profile where the model is, or with backward=False, or before LayerOffload is made"
            )
        return META
    model_devices = {tensor.device for tensor in step.device_tensors()} | {slot.device for slot in step.streamed.slots}
    input_devices = {tensor.device for tensor in step.input_tensors() if tensor.dim() or tensor.device.type != "cpu"}
    if step.sharded:  # shards may be in host memory, and FSDP2 brings inputs from there
        model_devices.add(step.sharded.device)
        input_devices.discard(torch.device("cpu"))
    if len(model_devices) > 1:
        raise ProfileError(
            f"the model is spread over {_names(model_devices)}; profile_memory measures one device at a time. "
            'Use device="meta", or move it to one device'
        )
    if model_devices and input_devices - model_devices:
        raise ValueError(
            f"the model is on {_names(model_devices)} and its inputs are on {_names(input_devices)}; move the inputs to the "
            'model\'s device, or use device="meta", where data does not matter'
        )
    found = next(iter(model_devices or input_devices), torch.device("cpu"))
    if asked is not None:
        wanted = open_device(asked, advice=USE_META).torch_device
        if wanted.type != found.type or wanted.index not in (None, found.index):
            raise ValueError(
                f'device must be where the model is ({found}), or "meta"; found {str(wanted)!r}. To run on another device, '
                "move model and inputs there first"
            )
    return found


def _names(devices: set[torch.device]) -> str:
    return ", ".join(sorted(map(str, devices)))
