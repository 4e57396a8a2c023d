"""The `memkit` command. Reads arguments, builds models, prints; every failure is one line and exit status 2."""

from __future__ import annotations

import argparse
import importlib
import inspect
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from memkit._version import __version__
from memkit.device import cuda_is_available, open_device
from memkit.errors import MemkitError
from memkit.profile import MemoryReport, profile_memory
from memkit.profile.report import SORT_KEYS
from memkit.profile.simulate import TARGETS
from memkit.profile.step import NEEDS_NONE, is_out_of_memory

DTYPES = {
    **dict.fromkeys(("float32", "fp32", "f32", "float"), torch.float32),
    **dict.fromkeys(("float64", "fp64", "f64", "double"), torch.float64),
    **dict.fromkeys(("float16", "fp16", "f16", "half"), torch.float16),
    **dict.fromkeys(("bfloat16", "bf16"), torch.bfloat16),
    **dict.fromkeys(("int64", "i64", "long"), torch.int64),
    **dict.fromkeys(("int32", "i32", "int"), torch.int32),
    **dict.fromkeys(("int16", "i16", "short"), torch.int16),
    **dict.fromkeys(("int8", "i8"), torch.int8),
    **dict.fromkeys(("uint8", "u8"), torch.uint8),
    "bool": torch.bool,
    **dict.fromkeys(("complex64", "c64"), torch.complex64),
}

_logger = logging.getLogger("memkit.cli")


class UsageError(MemkitError):
    """Raised when the command line asks for something that is not there."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the `memkit` command and return its exit status: 0, or 2 after one line on standard error."""
    options = _parser().parse_args(arguments)
    try:
        with _progress():
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
    profile.add_argument("spec", metavar="SPEC", help="torchvision:NAME (video.r3d_18, ...) or package.module:factory")
    profile.add_argument(
        "--input",
        dest="inputs",
        action="append",
        required=True,
        type=_input_shape,
        metavar="SHAPE[:DTYPE]",
        help="one of the model's inputs, such as 256x3x224x224 or 8x2048:int64; repeat for more",
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
    return parser


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
        inputs = [_make_input(shape, dtype, device) for shape, dtype in options.inputs]
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


def _print_view(report: MemoryReport, options: argparse.Namespace) -> None:
    print(report.to_text(depth=options.depth, sort_by=options.sort, top=options.top, full=options.full))


def _check_writable(path: Path) -> None:
    there = path.exists()
    with path.open("a", encoding="utf-8"):
        pass
    if not there:
        path.unlink()


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"needs a whole number, 0 or more; found {text!r}")
    return int(text)


def _input_shape(text: str) -> tuple[tuple[int, ...], torch.dtype]:
    shape_text, colon, dtype_text = text.partition(":")
    sizes = shape_text.split("x")
    if not all(size.isdecimal() for size in sizes):
        raise argparse.ArgumentTypeError(f"needs sizes of 0 or more joined by x, such as 256x3x224x224; found {shape_text!r}")
    if colon and dtype_text not in DTYPES:
        raise argparse.ArgumentTypeError(f"knows no dtype {dtype_text!r}; it knows {', '.join(DTYPES)}")
    return tuple(map(int, sizes)), DTYPES[dtype_text] if colon else torch.float32


def _make_input(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype, device=device)
    # 0 is a valid index into anything that has elements; a mask of ones hides nothing.
    return torch.full(shape, dtype == torch.bool, dtype=dtype, device=device)


def build_model(spec: str, device: torch.device) -> nn.Module:
    """Return the model that SPEC names, with random weights, on `device`.

    Args:
        spec: "torchvision:NAME", or "package.module:factory" for something that returns a module when called without
            arguments, or that is a module. The current folder is searched, too.

    Raises:
        UsageError: there is no such package, module or attribute, or it gives no `nn.Module`.
    """
    place, colon, name = spec.partition(":")
    if not colon or not place or not name:
        raise UsageError(f"SPEC must be torchvision:NAME or package.module:factory; found {spec!r}")
    factory = _torchvision_factory(name) if place == "torchvision" else _factory(place, name)
    if device.type == "meta" and not isinstance(factory, nn.Module):
        try:
            with torch.device(device):
                return _built(factory, spec)
        except UsageError:
            raise
        except Exception as error:  # it reads values while it builds; with data it can
            _logger.debug("%s cannot be built on meta: %s", spec, error)
    return _built(factory, spec).to(device) if device.type != "meta" else _built(factory, spec)


def _built(factory: Any, spec: str) -> nn.Module:
    model = factory if isinstance(factory, nn.Module) else factory()
    if not isinstance(model, nn.Module):
        raise UsageError(f"{spec} gives {type(model).__name__}, not a torch.nn.Module")
    return model


def _factory(place: str, name: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    found = _import(place)
    for part in name.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{place} has no {name!r}")
        found = getattr(found, part)
    if not isinstance(found, nn.Module) and not callable(found):
        raise UsageError(f"{place}:{name} is {type(found).__name__}; it must be a function, a class or a torch.nn.Module")
    return found


def _torchvision_factory(name: str) -> Callable[[], Any]:
    _import("torchvision", hint='; install it with pip install "memkit[vision]"')
    *packages, builder_name = name.split(".")
    where = ".".join(["torchvision.models", *packages])
    builder = getattr(_import(where), builder_name, None)
    if not inspect.isfunction(builder):
        raise UsageError(f"{where} has no model {builder_name!r}")
    parameters = inspect.signature(builder).parameters
    # Without these the builder would download weights, or spend minutes on an initialization that is not looked at.
    options = {"weights": None, "weights_backbone": None, "init_weights": False}
    return lambda: builder(**{option: value for option, value in options.items() if option in parameters})


def _import(name: str, *, hint: str = "") -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise
        raise UsageError(f"there is no module {error.name!r}{hint}") from error


@contextmanager
def _progress() -> Iterator[None]:
    """Show on standard error what takes longer than a second: the last line that memkit logged, and for how long."""
    progress = _Progress()
    logger = logging.getLogger("memkit")
    level = logger.level
    logger.setLevel(min(level or logging.INFO, logging.INFO))
    logger.addHandler(progress)
    try:
        with warnings.catch_warnings(), progress:
            warnings.simplefilter("ignore" if not sys.warnoptions else "default")
            yield
    finally:
        logger.removeHandler(progress)
        logger.setLevel(level)


class _Progress(logging.Handler):
    """A log handler with a thread that looks once in a while whether the last line is old."""

    PATIENCE_S = 1.0

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._done = threading.Event()
        self._phase = ""
        self._since_s = time.monotonic()
        self._shown = ""
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def emit(self, record: logging.LogRecord) -> None:
        self._phase, self._since_s = record.getMessage(), time.monotonic()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._done.set()
        self._thread.join()
        if self._shown and sys.stderr.isatty():
            print(file=sys.stderr)

    def _watch(self) -> None:
        while not self._done.wait(0.1):
            seconds = time.monotonic() - self._since_s
            if not self._phase or seconds < self.PATIENCE_S:
                continue
            if sys.stderr.isatty():
                print(f"\r\033[Kmemkit: {self._phase} ({seconds:.0f} s)", end="", file=sys.stderr, flush=True)
                self._shown = self._phase
            elif self._shown != self._phase:
                print(f"memkit: {self._phase} ...", file=sys.stderr, flush=True)
                self._shown = self._phase


if __name__ == "__main__":
    sys.exit(main())
