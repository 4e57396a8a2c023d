"""What the commands do, once their arguments are read: builds models, measures, prints."""

from __future__ import annotations

import argparse
import importlib.util
import logging
from pathlib import Path

import torch
from torch import Tensor, nn

from memkit import bench
from memkit.bench import LayerBench, OffloadBench, RematBench, Workload, freeze_layers, predict_offload, sum_of_outputs
from memkit.bench.engines import checkpointing, torch_baselines
from memkit.bench.machine import measure_machine, spec_text
from memkit.device import Device, ReferenceDevice, cuda_is_available, open_device
from memkit.fronts import command
from memkit.profile import MemoryReport, profile_memory
from memkit.profile.step import NEEDS_NONE, USE_META, is_out_of_memory
from memkit.specs import UsageError, autocast, build_model, make_input
from memkit.transfer import Link

_DTYPE = "float32"
"""Of inputs for which none is named."""

_logger = logging.getLogger("memkit.cli")


def profile(options: argparse.Namespace) -> None:
    """Measure a model, print the table, write the files."""
    if options.json is not None and options.json == options.csv:
        raise UsageError(f"--json and --csv name the same file, {options.json}")
    if options.target is not None and options.device not in (None, "meta"):
        raise UsageError("--target is for --device meta; a run on a device runs that device's kernels")
    for path in (options.json, options.csv):
        if path is not None:
            _check_writable(path)
    _check_html(options)
    device = torch.device(options.device or ("cuda" if cuda_is_available() else "meta"))
    if device.type != "meta":
        device = open_device(device, advice=USE_META).torch_device
    _logger.info("building %s", options.spec)
    try:
        model = build_model(options.spec, device).train()
        if options.dtype is not None:
            model = model.to(getattr(torch, options.dtype))
        inputs = [make_input(shape, name or options.dtype or _DTYPE, device) for shape, name in options.inputs]
    except Exception as error:
        if is_out_of_memory(error):
            raise UsageError(f"out of memory while building model and inputs; {NEEDS_NONE}") from error
        raise
    with autocast(options.autocast, device):
        report = profile_memory(
            model,
            *inputs,
            backward=options.backward or options.html is not None,
            device="meta" if device.type == "meta" else None,
            target=options.target or "cuda",
            tag=options.spec,
            print_table=False,
        )
    if options.json is not None:
        options.json.write_text(report.to_json(), encoding="utf-8")
    if options.csv is not None:
        options.csv.write_text(report.to_csv(), encoding="utf-8")
    if options.html is not None:
        report.to_html(options.html)
    _print_view(report, options)


def show(options: argparse.Namespace) -> None:
    """Print a report that was written to a file."""
    _print_view(MemoryReport.from_json(options.report), options)


def plan(options: argparse.Namespace) -> None:
    """Predict a step under memory budgets."""
    _check_output(options)
    _check_html(options)
    command.plan(options)


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
    inputs = [make_input(shape, name or _DTYPE, device.torch_device) for shape, name in options.inputs]

    def arguments() -> list[Tensor]:
        # Where layers are frozen, there may be no parameters in front of them that a backward would go to.
        return [item.detach().requires_grad_() if is_frozen and _may_have_grad(item) else item for item in inputs]

    def step_of(model: nn.Module) -> Workload:
        return Workload(
            name=options.spec,
            model=model,
            forward=lambda: model(*arguments()),
            loss=sum_of_outputs,
            backward=options.backward,
        )

    result = bench.bench_layers(step_of, model, options.ratios, device, train=options.train, num_steps=options.iters)
    _write_bench(result, options)


def bench_machine(options: argparse.Namespace) -> None:
    """Measure this machine's GPU and the link to it."""
    if options.save is not None:
        _check_writable(options.save)
    device = ReferenceDevice() if options.device == "cpu" else open_device(options.device, advice=_REHEARSE)
    _logger.info("measuring %s", device.name)
    spec = measure_machine(device)
    print(spec_text(spec))
    if options.save is not None:
        options.save.write_text(spec.to_json() + "\n", encoding="utf-8")


_REHEARSE = "Run on a machine with a GPU; --device cpu rehearses without one"


def _may_have_grad(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _check_output(options: argparse.Namespace) -> None:
    for path in (options.json, options.plot):
        if path is not None:
            _check_writable(path)
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib; install it with pip install matplotlib")


def _check_html(options: argparse.Namespace) -> None:
    if options.html is None:
        return
    _check_writable(options.html)
    if importlib.util.find_spec("plotly") is None:
        raise UsageError('--html needs plotly; install it with pip install "torch-memkit[page]"')


def _check_cuda(without_one: str) -> None:
    if not cuda_is_available():
        raise UsageError(f"nothing was measured: there is no CUDA device here, and without one {without_one}")


def _write_bench(result: OffloadBench | RematBench | LayerBench, options: argparse.Namespace) -> None:
    print(result.to_text())
    if options.json is not None:
        options.json.write_text(result.to_json() + "\n", encoding="utf-8")
    if options.plot is not None:
        result.plot(options.plot)


def _predicted(options: argparse.Namespace) -> OffloadBench:
    if options.link_gbps is None:
        raise UsageError("--predict needs --link-gbps, the speed of the link in GB/s (about 25 for PCIe 4 x16, 55 for PCIe 5)")
    if options.inputs or options.peers:
        raise UsageError("--predict runs no model: leave out --input and --peers")
    bytes_per_s = options.link_gbps * 1e9
    report = MemoryReport.from_json(Path(options.spec))
    return predict_offload(report, options.ratios, Link(d2h_bytes_per_s=bytes_per_s, h2d_bytes_per_s=bytes_per_s))


def _measured(options: argparse.Namespace) -> OffloadBench:
    if options.link_gbps is not None:
        raise UsageError("--link-gbps is for --predict; without it the link is measured")
    if not options.inputs:
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
    inputs = [make_input(shape, name or _DTYPE, device.torch_device) for shape, name in options.inputs]
    return Workload(name=options.spec, model=model, forward=lambda: model(*inputs), loss=sum_of_outputs), device


def _print_view(report: MemoryReport, options: argparse.Namespace) -> None:
    print(report.to_text(depth=options.depth, sort_by=options.sort, top=options.top, full=options.full))


def _check_writable(path: Path) -> None:
    there = path.exists()
    with path.open("a", encoding="utf-8"):
        pass
    if not there:
        path.unlink()
