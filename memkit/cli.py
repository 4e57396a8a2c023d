"""The `memkit` command. Reads arguments, builds models, prints; every failure is one line and exit status 2."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from memkit._version import __version__
from memkit.activations.remat import check_budget
from memkit.bench import (
    LayerBench,
    OffloadBench,
    RematBench,
    Workload,
    bench_layers,
    bench_offload,
    bench_remat,
    freeze_layers,
    predict_offload,
    sum_of_outputs,
)
from memkit.device import Device, cuda_is_available, open_device
from memkit.errors import MemkitError
from memkit.profile import MemoryReport, profile_memory
from memkit.profile.report import SORT_KEYS
from memkit.profile.simulate import TARGETS
from memkit.profile.step import NEEDS_NONE, is_out_of_memory
from memkit.progress import progress
from memkit.specs import UsageError, build_model, input_shape, make_input
from memkit.transfer import Link

_logger = logging.getLogger("memkit.cli")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the `memkit` command and return its exit status: 0, or 2 after one line on standard error."""
    options = _parser().parse_args(arguments)
    try:
        with progress():
            options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` for one, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return _fail("interrupted", status=130)
    except Exception as error:
        _logger.debug("", exc_info=True)
        return _fail(_one_line(error))
    return 0


def _fail(message: str, *, status: int = 2) -> int:
    print(f"memkit: error: {message}", file=sys.stderr)
    return status


def _one_line(error: BaseException) -> str:
    text = str(error) if isinstance(error, (MemkitError, OSError)) else f"{type(error).__name__}: {error}"
    notes: list[str] = getattr(error, "__notes__", [])
    return " ".join(" | ".join([text.strip(), *notes]).split())


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        sys.exit(_fail(f"{message} (see `{self.prog} --help`)"))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="memkit", description="See where GPU memory goes in PyTorch training.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"memkit {__version__}, torch {torch.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    profile = commands.add_parser(
        "profile",
        help="show, module by module, what a training step keeps in memory",
        description="Show, module by module, what a training step of a model keeps in memory.",
        epilog="example: memkit profile torchvision:resnet50 --input 256x3x224x224 --device meta",
        allow_abbrev=False,
    )
    _add_model(
        profile,
        spec="torchvision:NAME (video.r3d_18, ...) or package.module:factory",
        inputs="one of the model's inputs, such as 256x3x224x224 or 8x2048:int64; repeat for more",
    )
    profile.add_argument(
        "--device", choices=("meta", "cpu", "cuda"), help="where to run; default: cuda if there is one, else meta"
    )
    profile.add_argument("--target", choices=TARGETS, help="with --device meta: whose kernels to imitate; default: cuda")
    profile.add_argument("--backward", action="store_true", help="run the backward as well, from the sum of the outputs")
    profile.add_argument("--json", type=Path, metavar="FILE", help="write the whole report to FILE")
    profile.add_argument("--csv", type=Path, metavar="FILE", help="write the rows to FILE")
    _add_view(profile)
    profile.set_defaults(run=_profile)

    show = commands.add_parser(
        "show",
        help="print a report that `memkit profile --json` wrote",
        description="Print a report that `memkit profile --json` wrote.",
        allow_abbrev=False,
    )
    show.add_argument("report", type=Path, metavar="FILE", help="the JSON file")
    _add_view(show)
    show.set_defaults(run=_show)

    bench = commands.add_parser("bench", help="time a training step with and without memkit", allow_abbrev=False)
    benches = bench.add_subparsers(title="benches", required=True, metavar="BENCH")
    _add_bench_offload(benches.add_parser("offload", **_BENCH_OFFLOAD))
    _add_bench_remat(benches.add_parser("remat", **_BENCH_REMAT))
    _add_bench_layers(benches.add_parser("layers", **_BENCH_LAYERS))
    return parser


_AS_PROFILE = "as for `memkit profile`"


def _add_model(
    parser: argparse.ArgumentParser, *, spec: str = _AS_PROFILE, inputs: str = _AS_PROFILE, needs_input: bool = True
) -> None:
    """Add what says which model to build, and its inputs; `spec` and `inputs` are their help."""
    parser.add_argument("spec", metavar="SPEC", help=spec)
    parser.add_argument(
        "--input",
        dest="inputs",
        action="append",
        required=needs_input,
        type=input_shape,
        metavar="SHAPE[:DTYPE]",
        help=inputs,
    )


_BENCH_OFFLOAD: dict[str, Any] = {
    "help": "time and peak memory against the share that CPUOffload moves",
    "description": "Time a training step, and take its peak memory, at several offload ratios, beside plain PyTorch.",
    "epilog": "example: memkit bench offload torchvision:resnet50 --input 256x3x224x224 --ratios 0,0.1,0.3,0.5,1",
    "allow_abbrev": False,
}


def _add_bench_offload(parser: argparse.ArgumentParser) -> None:
    _add_model(parser, spec=f"{_AS_PROFILE}; with --predict, a report that it wrote", needs_input=False)
    parser.add_argument(
        "--ratios", type=_ratios, default=[0.0, 0.1, 0.3, 0.5, 1.0], metavar="R,R,...", help="default: 0,0.1,0.3,0.5,1"
    )
    parser.add_argument("--peers", action="store_true", help="time checkpointing, and TRL and torchtune if installed, as well")
    _add_bench_output(parser)
    parser.add_argument("--predict", action="store_true", help="measure nothing; compute from a report with times")
    parser.add_argument("--link-gbps", type=_speed, metavar="G", help="with --predict: speed of the link in GB/s each way")
    parser.set_defaults(run=_bench_offload)


_BENCH_REMAT: dict[str, Any] = {
    "help": "time and peak memory against the budget that Rematerialize holds saved tensors to",
    "description": "Time a training step, and take its peak memory, at several budgets, beside plain PyTorch.",
    "epilog": "example: memkit bench remat torchvision:resnet50 --input 256x3x224x224 --budgets 1,0.5,8GiB --peers",
    "allow_abbrev": False,
}


def _add_bench_remat(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument(
        "--budgets",
        type=_budgets,
        default=[1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2],
        metavar="B,B,...",
        help="shares of the saved bytes, or bytes such as 8GiB; default: 1,0.8,0.6,0.5,0.4,0.3,0.2",
    )
    parser.add_argument("--peers", action="store_true", help="time checkpointing as well: per block where the model has blocks")
    _add_bench_output(parser)
    parser.set_defaults(run=_bench_remat)


_BENCH_LAYERS: dict[str, Any] = {
    "help": "time and peak memory against the fraction of the layers that LayerOffload streams",
    "description": (
        "Time a step, and take its peak memory, with several fractions of the layers' weights streamed from host memory, "
        "beside plain PyTorch. The model is built on the CPU, so it may be larger than the device: plain is then left out."
    ),
    "epilog": "example: memkit bench layers torchvision:vit_l_16 --input 32x3x224x224 --fractions 0,0.5,1 --peers",
    "allow_abbrev": False,
}


def _add_bench_layers(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument(
        "--fractions",
        type=_ratios,
        default=[0.0, 0.25, 0.5, 0.75, 1.0],
        metavar="F,F,...",
        help="shares of the layers' bytes; default: 0,0.25,0.5,0.75,1",
    )
    parser.add_argument(
        "--train",
        choices=("frozen", "host", "fused"),
        default="frozen",
        help="what becomes of the layers' gradients. frozen: there are none; the layers' parameters are frozen, all others are "
        "trained, and inputs of floating point get gradients, so that the backward goes through all layers. host: they go to "
        "host memory. fused: plain SGD steps inside of the backward; plain PyTorch then steps after it. Default: frozen",
    )
    parser.add_argument(
        "--no-backward", dest="backward", action="store_false", help="forward only, in eval mode and without gradients"
    )
    parser.add_argument(
        "--peers",
        action="store_true",
        help="time FSDP2's CPUOffloadPolicy and, where layers are frozen, a block-swap loop as well; with --no-backward also "
        "diffusers' group offloading and accelerate's cpu_offload, if installed",
    )
    _add_bench_output(parser)
    parser.set_defaults(run=_bench_layers)


def _add_bench_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--iters", type=_positive, default=20, metavar="N", help="steps that count in each median; default: 20")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw time and peak memory into FILE (.png, .svg)")


def _add_view(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--depth", type=_count, metavar="N", help="fold modules below this depth (the model is at 0)")
    parser.add_argument("--sort", choices=tuple(SORT_KEYS), help="order of the rows; default: the order of the model")
    parser.add_argument("--top", type=_count, metavar="N", help="show only the first N rows")
    parser.add_argument("--full", action="store_true", help="show all columns, and identical siblings one by one")


def _profile(options: argparse.Namespace) -> None:
    if options.json is not None and options.json == options.csv:
        raise UsageError(f"--json and --csv name the same file, {options.json}")
    if options.target is not None and options.device not in (None, "meta"):
        raise UsageError("--target is for --device meta; a run on a device runs that device's kernels")
    for path in (options.json, options.csv):
        if path is not None:
            _check_writable(path)
    device = torch.device(options.device or ("cuda" if cuda_is_available() else "meta"))
    if device.type != "meta":
        device = open_device(device).torch_device
    _logger.info("building %s", options.spec)
    try:
        model = build_model(options.spec, device).train()
        inputs = [make_input(shape, dtype, device) for shape, dtype in options.inputs]
    except Exception as error:
        if is_out_of_memory(error):
            raise UsageError(f"out of memory while building model and inputs; {NEEDS_NONE}") from error
        raise
    report = profile_memory(
        model,
        *inputs,
        backward=options.backward,
        device="meta" if device.type == "meta" else None,
        target=options.target or "cuda",
        tag=options.spec,
        print_table=False,
    )
    if options.json is not None:
        options.json.write_text(report.to_json(), encoding="utf-8")
    if options.csv is not None:
        options.csv.write_text(report.to_csv(), encoding="utf-8")
    _print_view(report, options)


def _show(options: argparse.Namespace) -> None:
    _print_view(MemoryReport.from_json(options.report), options)


def _bench_offload(options: argparse.Namespace) -> None:
    _check_bench_output(options)
    _write_bench(_predicted(options) if options.predict else _measured(options), options)


def _bench_remat(options: argparse.Namespace) -> None:
    _check_bench_output(options)
    _check_cuda("there is no peak to lower. `memkit profile --device meta` shows what a model saves")
    workload, device = _workload(options)
    _write_bench(
        bench_remat(workload, options.budgets, device, num_steps=options.iters, with_peers=options.peers),
        options,
    )


def _bench_layers(options: argparse.Namespace) -> None:
    if not options.backward and options.train != "frozen":
        raise UsageError(f"--train {options.train} needs a backward; found --no-backward. Leave one of the two away")
    _check_bench_output(options)
    _check_cuda("there is nothing to stream to")
    device = open_device(torch.device("cuda"))
    model = build_model(options.spec, torch.device("cpu")).train(options.backward)
    is_frozen = options.train == "frozen"
    if is_frozen:
        freeze_layers(model)
    inputs = [make_input(shape, dtype, device.torch_device) for shape, dtype in options.inputs]

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

    result = bench_layers(
        step_of, model, options.fractions, device, train=options.train, num_steps=options.iters, with_peers=options.peers
    )
    _write_bench(result, options)


def _may_have_grad(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _check_bench_output(options: argparse.Namespace) -> None:
    for path in (options.json, options.plot):
        if path is not None:
            _check_writable(path)
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise UsageError('--plot needs matplotlib; install it with pip install "memkit[plot]"')


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
        raise UsageError("--predict runs no model: leave away --input and --peers")
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
    return bench_offload(workload, options.ratios, device, num_steps=options.iters, with_peers=options.peers)


def _workload(options: argparse.Namespace) -> tuple[Workload, Device]:
    device = open_device(torch.device("cuda"))
    model = build_model(options.spec, device.torch_device).train()
    inputs = [make_input(shape, dtype, device.torch_device) for shape, dtype in options.inputs]
    return Workload(name=options.spec, model=model, forward=lambda: model(*inputs), loss=sum_of_outputs), device


def _print_view(report: MemoryReport, options: argparse.Namespace) -> None:
    print(report.to_text(depth=options.depth, sort_by=options.sort, top=options.top, full=options.full))


def _check_writable(path: Path) -> None:
    there = path.exists()
    with path.open("a", encoding="utf-8"):
        pass
    if not there:
        path.unlink()


def _ratios(text: str) -> list[float]:
    try:
        ratios = [float(part) for part in text.split(",")]
    except ValueError:
        ratios = []
    if not ratios or not all(0 <= ratio <= 1 for ratio in ratios):
        raise argparse.ArgumentTypeError(f"needs numbers from 0 to 1 joined by commas, such as 0,0.5,1; found {text!r}")
    return ratios


def _budgets(text: str) -> list[float | str]:
    return [_budget(part.strip()) for part in text.split(",")]


def _budget(text: str) -> float | str:
    """Return a share where it is a number up to 1, and bytes where it is a whole number above, or has a unit."""
    try:
        share = float(text)
    except ValueError:
        share = math.inf
    budget = share if share <= 1 or (share < math.inf and not text.isdecimal()) else text
    try:
        check_budget(budget)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"needs shares above 0 and up to 1, or bytes, joined by commas, such as 1,0.5,8GiB; found {text!r}"
        ) from None
    return budget


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"needs a whole number, 1 or more; found {text!r}")
    return int(text)


def _speed(text: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 0 < speed < float("inf"):
        raise argparse.ArgumentTypeError(f"needs a positive number of GB/s; found {text!r}")
    return speed


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"needs a whole number, 0 or more; found {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
