"""The commands, after their arguments are parsed: build models, measure, print."""

from __future__ import annotations

import argparse
import importlib.util
import logging
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from memkit import bench, plan_command
from memkit.bench import LayerBench, OffloadBench, RematBench, Workload, freeze_layers, predict_offload, sum_of_outputs
from memkit.bench.engines import checkpointing, torch_baselines
from memkit.bench.machine import measure_machine, spec_text
from memkit.device import Device, ReferenceDevice, cuda_is_available, open_device
from memkit.errors import ProfileError
from memkit.extras import how_to_install
from memkit.plan.gpu import find_gpu
from memkit.profile import MemoryReport, profile_memory
from memkit.profile.fit import check_fit
from memkit.profile.optimizer_states import check_optimizer
from memkit.profile.step import NEEDS_NONE, USE_META, is_out_of_memory
from memkit.specs import UsageError, autocast, build_model, loss_of, make_inputs, said_as
from memkit.terminal import STDOUT, check_writable, terminal_width, wrapped, write_text
from memkit.transfer import Disk, Link

_DTYPE = "float32"
"""The default dtype of inputs."""

_logger = logging.getLogger("memkit.cli")


def profile(options: argparse.Namespace) -> None:
    """Measure a model, print the table, write the files."""
    _check_files(options)
    optimizer = said_as("--optimizer", lambda: check_optimizer(options.optimizer))
    gpu = None if options.gpu is None else said_as("--gpu", lambda: find_gpu(options.gpu))
    said_as("--fit", lambda: check_fit(options.fit, gpu))
    if options.target is not None and options.device not in (None, "meta"):
        raise UsageError("--target is for --device meta; a run on a device runs that device's kernels")
    device = torch.device(options.device or ("cuda" if cuda_is_available() else "meta"))
    if device.type != "meta":
        device = open_device(device, advice=USE_META).torch_device
    _logger.info("building %s", options.spec)
    try:
        model = build_model(options.spec, device).train()
        if options.dtype is not None:
            model = model.to(getattr(torch, options.dtype))
        inputs, named = make_inputs(
            model, options.inputs, options.named_inputs, dtype_name=options.dtype or _DTYPE, device=device
        )
    except Exception as error:
        if is_out_of_memory(error):
            raise ProfileError(f"out of memory while building model and inputs; {NEEDS_NONE}") from error
        raise
    with autocast(options.autocast, device):
        report = profile_memory(
            model,
            *inputs,
            kwargs=named,
            loss_fn=loss_of(model, named),
            backward=options.backward or options.peak or options.html is not None,
            optimizer=optimizer,
            fit=options.fit,
            gpu=gpu,
            device="meta" if device.type == "meta" else None,
            target=options.target or "cuda",
            tag=options.spec,
            print_table=False,
        )
    _write(report, options)


def show(options: argparse.Namespace) -> None:
    """Print a report that was written to a file, convert it, or compare it with another."""
    _check_files(options)
    report = MemoryReport.from_json(options.report)
    if options.after is not None:
        if any((options.json, options.html, options.peak, options.fit, options.gpu)):
            raise UsageError("two reports are compared: leave out --json, --html, --peak, --fit and --gpu")
        print(report.compare(MemoryReport.from_json(options.after)).to_text(width=terminal_width()))
        return
    if options.fit is not None or options.gpu is not None:
        fit = said_as("--gpu" if options.fit is None else "--fit", lambda: report.fit_in(options.fit, gpu=options.gpu))
        report = replace(report, fit=fit)
    _write(report, options)


def _check_files(options: argparse.Namespace) -> None:
    check_writable(options.json)
    _check_html(options)


def _write(report: MemoryReport, options: argparse.Namespace) -> None:
    """Print a report as requested, unless standard output has its JSON, and write the files."""
    if options.json is not None:
        write_text(options.json, report.to_json())
    if options.html is not None:
        report.to_html(options.html)
    if options.json != STDOUT:
        _print_view(report, options)


def plan(options: argparse.Namespace) -> None:
    """Predict a step under memory budgets."""
    if options.ranks is not None and options.html is not None:
        raise UsageError("--html draws the step of the whole model: leave out --html or --ranks")
    if options.offload_params and options.ranks is None:
        raise UsageError("--offload-params says where the shards of --ranks N are: add that, or leave it out")
    _check_output(options)
    _check_html(options)
    said_as("--optimizer", lambda: check_optimizer(options.optimizer))
    plan_command.plan(options)


def bench_offload(options: argparse.Namespace) -> None:
    """Time steps at several offload ratios, or compute them from a report."""
    _check_output(options)
    _write_bench(_predicted(options) if options.predict else _measured(options), options)


def bench_remat(options: argparse.Namespace) -> None:
    """Time steps at several budgets of `Rematerialize`."""
    _check_output(options)
    _check_cuda("there is no peak to lower. `memkit profile --device meta` shows what a model saves")
    workload, device = _workload(options)
    peers = checkpointing(workload.model) if options.peers else {}
    _write_bench(bench.bench_remat(workload, options.budgets, device, num_steps=options.iters, peers=peers), options)


def bench_layers(options: argparse.Namespace) -> None:
    """Time steps with several shares of the layers streamed."""
    if not options.backward and options.train != "frozen":
        raise UsageError(f"--train {options.train} needs a backward; found --no-backward. Leave one of the two out")
    _check_output(options)
    _check_cuda("there is nothing to stream to")
    device = open_device(torch.device("cuda"))
    model = build_model(options.spec, torch.device("cpu")).train(options.backward)
    is_frozen = options.train == "frozen"
    if is_frozen:
        freeze_layers(model)
    inputs, named = make_inputs(model, options.inputs, options.named_inputs, dtype_name=_DTYPE, device=device.torch_device)

    def asking(item: Tensor) -> Tensor:
        # Where layers are frozen, there may be no parameters in front of them that a backward would go to.
        return item.detach().requires_grad_() if is_frozen and _may_have_grad(item) else item

    def step_of(model: nn.Module) -> Workload:
        return Workload(
            name=options.spec,
            model=model,
            forward=lambda: model(*map(asking, inputs), **{name: asking(item) for name, item in named.items()}),
            loss=sum_of_outputs,
            backward=options.backward,
        )

    result = bench.bench_layers(step_of, model, options.ratios, device, train=options.train, num_steps=options.iters)
    _write_bench(result, options)


def bench_machine(options: argparse.Namespace) -> None:
    """Measure this machine's GPU, the link to it, and its host."""
    if options.save is not None:
        check_writable(options.save)
    device = said_as(
        "--device",
        lambda: ReferenceDevice() if options.device == "cpu" else open_device(options.device, advice=_REHEARSE),
    )
    disk = None if options.disk is None else said_as("--disk", lambda: Disk(options.disk))
    _logger.info("measuring %s", device.name)
    spec = measure_machine(device, disk=disk)
    print(spec_text(spec, min(terminal_width() or 80, 80)))
    if options.save is not None:
        options.save.write_text(spec.to_json() + "\n", encoding="utf-8")


_REHEARSE = "Run on a machine with a GPU; --device cpu rehearses without one"


def _may_have_grad(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _check_output(options: argparse.Namespace) -> None:
    for path in (options.json, options.plot):
        check_writable(path)
    if options.plot is not None:
        _check_library("matplotlib", "--plot")


def _check_html(options: argparse.Namespace) -> None:
    if options.html is None:
        return
    check_writable(options.html)
    _check_library("plotly", "--html")


def _check_library(name: str, option: str) -> None:
    if importlib.util.find_spec(name) is None:
        raise UsageError(f"{option} needs {name}; install it with {how_to_install(name)}")


def _check_cuda(without_one: str) -> None:
    if not cuda_is_available():
        raise UsageError(f"nothing was measured: there is no CUDA device here, and without one {without_one}")


def _write_bench(result: OffloadBench | RematBench | LayerBench, options: argparse.Namespace) -> None:
    if options.json != STDOUT:
        print(result.to_text(width=terminal_width()))
    if options.json is not None:
        write_text(options.json, result.to_json() + "\n")
    if options.plot is not None:
        result.plot(options.plot)


def _predicted(options: argparse.Namespace) -> OffloadBench:
    if options.link_gbps is None:
        raise UsageError("--predict needs --link-gbps, the speed of the link in GB/s (about 25 for PCIe 4 x16, 55 for PCIe 5)")
    if options.inputs or options.named_inputs or options.peers:
        raise UsageError("--predict runs no model: leave out --input and --peers")
    bytes_per_s = options.link_gbps * 1e9
    report = MemoryReport.from_json(Path(options.spec))
    return predict_offload(report, options.ratios, Link(d2h_bytes_per_s=bytes_per_s, h2d_bytes_per_s=bytes_per_s))


def _measured(options: argparse.Namespace) -> OffloadBench:
    if options.link_gbps is not None:
        raise UsageError("--link-gbps is for --predict; without it the link is measured")
    if not options.inputs and not options.named_inputs:
        raise UsageError("--input is needed, such as --input 256x3x224x224")
    _check_cuda(
        "there is nothing to offload from. "
        "With a report from `memkit profile --backward --json FILE` on a GPU, --predict --link-gbps N computes the table"
    )
    workload, device = _workload(options)
    peers = torch_baselines(workload.model) if options.peers else {}
    return bench.bench_offload(workload, options.ratios, device, num_steps=options.iters, peers=peers)


def _workload(options: argparse.Namespace) -> tuple[Workload, Device]:
    device = open_device(torch.device("cuda"))
    model = build_model(options.spec, device.torch_device).train()
    inputs, named = make_inputs(model, options.inputs, options.named_inputs, dtype_name=_DTYPE, device=device.torch_device)
    return Workload(name=options.spec, model=model, forward=lambda: model(*inputs, **named), loss=sum_of_outputs), device


def _print_view(report: MemoryReport, options: argparse.Namespace) -> None:
    width = terminal_width()
    if options.peak:
        top = _MOST_AT_PEAK if options.top is None else options.top
        print(report.peak_to_text(depth=options.depth, top=None if options.full else top, full=options.full, width=width))
        print("", wrapped(report.in_words(), width), sep="\n")
    else:
        print(report.to_text(depth=options.depth, sort_by=options.sort, top=options.top, full=options.full, width=width))


_MOST_AT_PEAK = 20
