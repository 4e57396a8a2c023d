"""The `memkit` command. Parses arguments without importing torch; every failure is one line.

Exit status: 0; 2 if the command can't do what was asked; 1 if the user's model fails, or memkit; 130 for Ctrl-C.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from memkit._torch_floor import require_torch, torch_version
from memkit._version import __version__
from memkit.cli import arguments
from memkit.cli.progress import progress
from memkit.errors import MemkitError, ProfileError
from memkit.removed import removed, removed_command

_TARGETS = ("cuda", "cpu")
_SORT_KEYS = ("activation", "self", "params", "calls", "peak", "forward", "backward", "name")
_logger = logging.getLogger("memkit.cli.main")
_OF_MODEL = ("memkit: raised ", "memkit: out of memory ")  # prefixes of the notes on exceptions that a model has raised


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the `memkit` command and return its exit status, after one line on standard error if it isn't 0."""
    words = sys.argv[1:] if arguments is None else arguments
    if answer := removed_command(words):
        return _fail(answer)
    options = _parser().parse_args(words)
    _check_model(options)
    try:
        with progress():
            _logger.info("importing torch")
            require_torch()
            from memkit.cli import commands  # takes seconds, and none of the above needs it

            getattr(commands, options.command)(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` for one, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return _fail("interrupted", status=130)
    except Exception as error:
        if options.debug:
            traceback.print_exception(error)
        notes = [str(note) for note in getattr(error, "__notes__", ())]
        is_told = isinstance(error, (MemkitError, OSError, ImportError))  # else memkit, or a model, has failed
        is_of_model = isinstance(error, ProfileError) or any(note.startswith(_OF_MODEL) for note in notes)
        text = str(error) if is_told else f"{type(error).__name__}: {error}"
        message = " ".join(" | ".join([text.strip(), *notes]).split())
        return _fail(message, status=2 if is_told and not is_of_model else 1)
    return 0


def _fail(message: str, *, status: int = 2) -> int:
    print(f"memkit: error: {message}", file=sys.stderr)
    return status


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        sys.exit(_fail(f"{message} (see `{self.prog} --help`)"))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="memkit", description="See where GPU memory goes in PyTorch training.")
    parser.add_argument("--version", action="version", version=f"memkit {__version__}, torch {torch_version() or 'is missing'}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    profile = commands.add_parser(
        "profile",
        help="show, module by module, what a training step keeps in memory",
        description="Show, module by module, what a training step of a model keeps in memory.",
        epilog="example: memkit profile torchvision:resnet50 --input 256x3x224x224 --device meta",
    )
    _add_model(
        profile,
        spec="torchvision:NAME (video.r3d_18, ...), timm:NAME, hf:CONFIG.json (of transformers) or package.module:factory",
        inputs="one of the model's inputs, such as 256x3x224x224 or 8x2048:int64, or by keyword, such as input_ids=8x2048; "
        "repeat for more, at least one",
    )
    told = "where to run; default: cuda if there is one, else meta"
    profile.add_argument("--device", choices=("meta", "cpu", "cuda"), help=told)
    profile.add_argument("--target", choices=_TARGETS, help="with --device meta: whose kernels to imitate; default: cuda")
    _add_dtypes(profile, of_autocast="with --device meta as the target's autocast would")
    profile.add_argument("--backward", action="store_true", help="run the backward as well, from the sum of the outputs")
    _add_answers(profile)
    told = "count the gradients, and the states of this optimizer, such as adamw"
    profile.add_argument("--optimizer", metavar="NAME", help=told)
    _add_file(profile, "--html", "run the backward as well, and draw the step and its modules on a page for any browser")
    _add_view(profile)
    profile.set_defaults(command="profile")

    show = commands.add_parser(
        "show",
        help="print, compare or convert reports that `memkit profile --json` wrote",
        description="Print a report that `memkit profile --json` wrote, convert it, or say of two whether the second is less.",
        epilog="example: memkit show before.json after.json",
    )
    show.add_argument("report", type=Path, metavar="FILE", help="the JSON file")
    show.add_argument("after", type=Path, nargs="?", metavar="AFTER", help="another, after a change: did it help?")
    _add_answers(show)
    _add_file(show, "--html", "draw the report on a page for any browser")
    _add_view(show)
    show.set_defaults(command="show")

    _add_plan(commands)

    bench = commands.add_parser("bench", help="measure this machine, for `memkit plan`")
    benches = bench.add_subparsers(title="benches", required=True, metavar="BENCH")
    machine = benches.add_parser(
        "machine",
        help="measure this machine's GPU, link and host, for `memkit plan --gpu FILE`",
        description="Measure what this machine can do: the GPU's memory, matrix products, copies from and to it, optimizer "
        "updates on the host's cores, reads and writes of a disk.",
        epilog="example: memkit bench machine --save my_gpu.json",
    )
    _add_file(machine, "--save", "write what was measured to FILE")
    told = 'which; default: cuda. "cpu" rehearses on memkit\'s reference device'
    machine.add_argument("--device", default="cuda", metavar="DEVICE", help=told)
    told = "measure the disk of this directory, too; takes 2.2 GiB there"
    machine.add_argument("--disk", type=Path, metavar="DIR", help=told)
    machine.set_defaults(command="bench_machine")
    for command in (*(it for it in commands.choices.values() if it is not bench), *benches.choices.values()):
        command.add_argument("--debug", action="store_true", help="show the traceback of a failure")
    return parser


def _add_file(parser: argparse.ArgumentParser, option: str, what: str) -> None:
    parser.add_argument(option, type=Path, metavar="FILE", help=what)


def _add_model(parser: argparse.ArgumentParser, spec: str, inputs: str) -> None:
    parser.add_argument("spec", metavar="SPEC", help=spec)
    form = "[NAME=]SHAPE[:DTYPE]"
    parser.add_argument("--input", dest="inputs", action="append", type=arguments.input_of, metavar=form, help=inputs)
    parser.set_defaults(refuse=parser.error, inputs=[])


def _check_model(options: argparse.Namespace) -> None:
    """Raise if no model or no input was given: argparse would say so before it names a misspelled option."""
    if not hasattr(options, "spec"):
        return
    if not options.inputs:
        options.refuse("the following arguments are required: --input")
    if getattr(options, "needs_gpu", False) and options.gpu is None:
        options.refuse("the following arguments are required: --gpu")
    if not all(options.spec.partition(":")):
        hint = f"; did you mean {arguments.nearest_spec(options.spec.strip(':'))}?"
        options.refuse(f"SPEC must be {arguments.SPEC_FORMS}; found {options.spec!r}{hint}")


def _add_dtypes(parser: argparse.ArgumentParser, *, of_autocast: str) -> None:
    known, told = ("float16", "bfloat16"), f"run under torch.autocast with this dtype (bf16, fp16); {of_autocast}"
    cast = "cast the model to this dtype (bf16, fp16, fp64, ...), and inputs that name none"
    every = partial(arguments.dtype, names=("float32", "float64", *known))
    parser.add_argument("--dtype", type=every, metavar="DTYPE", help=cast)
    parser.add_argument("--autocast", type=partial(arguments.dtype, names=known), metavar="DTYPE", help=told)


def _add_plan(commands: Any) -> None:  # argparse's subparsers, whose class is private
    parser = commands.add_parser(
        "plan",
        help="predict, without a GPU, how fast a training step is under memory budgets",
        description="Predict, without a GPU, how long a training step of a model takes on a GPU under memory budgets: with the "
        "best mix of keeping, offloading and recomputing what autograd saves, and with each of them alone.",
        epilog="example: memkit plan torchvision:resnet50 --input 256x3x224x224 --gpu H200 --budget 16GiB,12GiB,8GiB",
    )
    _add_model(parser, "as for `memkit profile`", "as for `memkit profile`")
    told = "H200, H100, A100-80, A100-40, L40S, RTX 4090, RTX 3090, RTX 3060, GH200, or a file of `memkit bench machine`"
    parser.add_argument("--gpu", metavar="NAME|FILE", help=told)
    budgets = parser.add_mutually_exclusive_group()
    told = "bytes on the GPU in all, such as 12GiB, or shares of the plain peak"
    budgets.add_argument("--budget", dest="budgets", type=arguments.budgets, metavar="B,B,...", help=told)
    number = partial(arguments.whole, least=1)
    told = "so many budgets, from the plain peak (or the GPU's memory) down to the least; default: 8"
    budgets.add_argument("--steps", type=number, metavar="N", help=told)
    told = "count this optimizer's states as well, such as adamw; default: none, as before its first step"
    parser.add_argument("--optimizer", metavar="NAME", help=told)
    told = "plan for one of N GPUs between which memkit.shard splits the model; --input is what each of them is given"
    parser.add_argument("--ranks", type=number, metavar="N", help=told)
    told = "with --ranks: parameters, gradients and states are in the hosts' memory (offload_policy=)"
    parser.add_argument("--offload-params", action="store_true", help=told)
    told = "find the largest batch, the first size of all inputs, that fits the largest --budget, or the GPU's memory"
    parser.add_argument("--batch-search", action="store_true", help=told)
    _add_dtypes(parser, of_autocast="as CUDA's autocast would")
    _add_file(parser, "--json", "write rows and plans to FILE; - is standard output")
    _add_file(parser, "--plot", "draw time against peak into FILE (.png, .svg)")
    _add_file(parser, "--html", "draw the step, and each plan before and after, on a page for any browser")
    parser.set_defaults(command="plan", needs_gpu=True)


def _add_answers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peak", action="store_true", help="list what is alive at the peak of the step, instead of the table")
    told = "does the step fit in this, such as 12GiB, and with which feature?"
    parser.add_argument("--fit", type=arguments.size, metavar="SIZE", help=told)
    parser.add_argument("--gpu", metavar="NAME|FILE", help="the GPU that --fit predicts for, or whose memory it is to fit in")
    _add_file(parser, "--json", "write the whole report to FILE; - is standard output")
    parser.add_argument("--csv", nargs="?", action=_RefusedCsv, help=argparse.SUPPRESS)


class _RefusedCsv(argparse.Action):
    def __call__(self, *_: Any) -> NoReturn:
        raise argparse.ArgumentError(self, removed("it", 'use --json, whose "modules" are the rows'))


def _add_view(parser: argparse.ArgumentParser) -> None:
    number = partial(arguments.whole, least=0)
    parser.add_argument("--depth", type=number, metavar="N", help="fold modules below this depth (the model is at 0)")
    parser.add_argument("--sort", choices=_SORT_KEYS, help="order of the rows; default: the order of the model")
    parser.add_argument("--top", type=number, metavar="N", help="show only the first N rows")
    parser.add_argument("--full", action="store_true", help="show all columns, and identical siblings one by one")


if __name__ == "__main__":
    sys.exit(main())
