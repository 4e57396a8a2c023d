"""The commands, after their arguments are parsed: build models, measure, print."""

from __future__ import annotations

import argparse
import importlib.util
import logging
from dataclasses import replace
from pathlib import Path

import torch

from memkit.cli import plan_command
from memkit.cli.machine import measure_machine, spec_text
from memkit.cli.specs import UsageError, model_of, profiled, said_as
from memkit.core.extras import how_to_install
from memkit.core.terminal import STDOUT, check_writable, terminal_width, wrapped, write_text
from memkit.device import ReferenceDevice, cuda_is_available, open_device
from memkit.plan.gpu import find_gpu
from memkit.profile import MemoryReport
from memkit.profile.fit import check_fit
from memkit.profile.optimizer_states import check_optimizer
from memkit.profile.step import USE_META
from memkit.transfer import Disk

_logger = logging.getLogger("memkit.cli.main")


def profile(options: argparse.Namespace) -> None:
    _check_files(options.json, plotly=options.html)
    said_as("--optimizer", lambda: check_optimizer(options.optimizer))
    gpu = None if options.gpu is None else said_as("--gpu", lambda: find_gpu(options.gpu))
    said_as("--fit", lambda: check_fit(options.fit, gpu))
    if options.target is not None and options.device not in (None, "meta"):
        raise UsageError("--target is for --device meta; a run on a device runs that device's kernels")
    device = torch.device(options.device or ("cuda" if cuda_is_available() else "meta"))
    if device.type != "meta":
        device = open_device(device, advice=USE_META).torch_device
    backward, target = options.backward or options.peak or options.html is not None, options.target or "cuda"
    how = {"backward": backward, "target": target, "fit": options.fit, "gpu": gpu}
    _write(profiled(options, model_of(options, device), options.inputs, device, **how), options)


def show(options: argparse.Namespace) -> None:
    _check_files(options.json, plotly=options.html)
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


def _write(report: MemoryReport, options: argparse.Namespace) -> None:
    if options.json is not None:
        write_text(options.json, report.to_json())
    if options.html is not None:
        report.to_html(options.html)
    width = terminal_width()
    if options.json != STDOUT and options.peak:
        top = 20 if options.top is None else options.top
        print(report.peak_to_text(depth=options.depth, top=None if options.full else top, full=options.full, width=width))
        print("", wrapped(report.in_words(), width), sep="\n")
    elif options.json != STDOUT:
        print(report.to_text(depth=options.depth, sort_by=options.sort, top=options.top, full=options.full, width=width))


def plan(options: argparse.Namespace) -> None:
    if options.ranks is not None and options.html is not None:
        raise UsageError("--html draws the step of the whole model: leave out --html or --ranks")
    if options.offload_params and options.ranks is None:
        raise UsageError("--offload-params says where the shards of --ranks N are: add that, or leave it out")
    _check_files(options.json, matplotlib=options.plot, plotly=options.html)
    said_as("--optimizer", lambda: check_optimizer(options.optimizer))
    plan_command.plan(options)


def bench_machine(options: argparse.Namespace) -> None:
    if options.save is not None:
        check_writable(options.save)
    device = said_as(
        "--device",
        lambda: (
            ReferenceDevice()
            if options.device == "cpu"
            else open_device(options.device, advice="Run on a machine with a GPU; --device cpu rehearses without one")
        ),
    )
    disk = None if options.disk is None else said_as("--disk", lambda: Disk(options.disk))
    _logger.info("measuring %s", device.name)
    spec = measure_machine(device, disk=disk)
    print(spec_text(spec, min(terminal_width() or 80, 80)))
    if options.save is not None:
        options.save.write_text(spec.to_json() + "\n", encoding="utf-8")


def _check_files(json: Path | None, **pictures: Path | None) -> None:
    for path in (json, *pictures.values()):
        check_writable(path)
    for library, path in pictures.items():
        if path is not None and importlib.util.find_spec(library) is None:
            option = "--html" if library == "plotly" else "--plot"
            raise UsageError(f"{option} needs {library}; install it with {how_to_install(library)}")
