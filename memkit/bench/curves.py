"""What the benches' tables, JSON lines and pictures of time against peak have in common."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from memkit._version import __version__
from memkit.bench.measure import Measurement
from memkit.device import Device
from memkit.extras import library
from memkit.sizes import format_mib

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GIB = 2**30


def where_of(device: Device) -> str:
    """Return where something was measured: the device, and the torch that ran on it."""
    return f"{device.name}, torch {torch.__version__}"


def ms(seconds: float | None) -> str:
    """Return milliseconds for a table, "-" where there are none."""
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"


def mib(num_bytes: int | None) -> str:
    """Return MiB for a table, "-" where the device does not count."""
    return "-" if num_bytes is None else format_mib(num_bytes).removesuffix(" MiB")


def headline(name: str, where: str, plain: Measurement) -> str:
    """Return how a bench's text begins: what was run, where, and what its plain step takes."""
    parts = f"forward {ms(plain.forward_s)}, backward {ms(plain.backward_s)}"
    return f"{name} on {where}: step {ms(plain.step_s)} ms ({parts})"


def to_json_line(bench: str, name: str, where: str, figures: Mapping[str, Any]) -> str:
    """Return the figures of a bench as one line of JSON, with the versions that were used."""
    versions = {"memkit": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return json.dumps({"bench": bench, "name": name, "where": where, **versions, **figures})


@contextmanager
def picture(path: Path, title: str) -> Iterator[Axes]:
    """Give axes for seconds against peak bytes (see `draw_curve`), and write what was drawn when it is done.

    Args:
        path: where to; the kind of picture follows from the file's name.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    figure = library("matplotlib.figure", "a picture").Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    yield axes
    axes.set(xlabel="peak allocated (GiB)", ylabel="step (ms)", title=title)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    figure.savefig(path)


@contextmanager
def pictures_by_ratio(path: Path, title: str) -> Iterator[tuple[Axes, Axes]]:
    """Give axes for milliseconds and, below them, for GiB, against an offload ratio; and write what was drawn when it is done.

    Args:
        path: where to; the kind of picture follows from the file's name.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    figure = library("matplotlib.figure", "a picture").Figure(figsize=(7, 7), layout="constrained")
    times, peaks = figure.subplots(2, 1, sharex=True)
    yield times, peaks
    times.set(ylabel="step (ms)", title=title)
    peaks.set(xlabel="offload ratio", ylabel="peak allocated (GiB)")
    for axes in (times, peaks):
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)
    figure.savefig(path)


def draw_curve(axes: Axes, style: str, label: str, points: Iterable[tuple[int | None, float]], **options: Any) -> None:
    """Draw steps, each by its peak in bytes and its seconds. Those whose peak was not counted are left out."""
    counted = [(peak_bytes / _GIB, seconds * 1e3) for peak_bytes, seconds in points if peak_bytes is not None]
    axes.plot([peak for peak, _ in counted], [time for _, time in counted], style, label=label, **options)


def draw_names(axes: Axes, points: Iterable[tuple[int | None, float, str]]) -> None:
    """Write a text beside each of some points."""
    for peak_bytes, seconds, text in points:
        if peak_bytes is not None:
            place = peak_bytes / _GIB, seconds * 1e3
            axes.annotate(text, place, textcoords="offset points", xytext=(4, 6), fontsize=8)


def draw_others(axes: Axes, others: Mapping[str, Measurement]) -> None:
    """Draw what is compared, one point each, by name."""
    for name, found in others.items():
        if found.peak_allocated_bytes is not None:
            draw_curve(axes, "D", name, [(found.peak_allocated_bytes, found.step_s)])
