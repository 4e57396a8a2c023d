"""What a page is drawn from: the parts of a `memkit.profile.MemoryReport` that it looks at.

The report has a method that makes a page of it, so pages are below profiles and know these by their shape alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from memkit.plan import StepTrace

PHASES = {"forward": "forward", "loss": "loss", "backward": "backward", "optimizer step": "optimizer"}
"""What a picture calls each part of a step, by the values of `memkit.profile.alive.Phase`."""

CATEGORIES = {
    "param": "parameters",
    "optimizer state": "optimizer states",
    "buffer": "buffers",
    "input": "inputs",
    "param cast": "parameter casts",
    "grad": "gradients",
    "activation": "activations",
    "temp": "temporaries",
}
"""What a picture calls each category of bytes, from the bottom of the stack to its top: what stays longest is lowest."""

MEANINGS = {
    "param": "the weights of the model",
    "optimizer state": "what the optimizer keeps for each weight, such as Adam's two moments",
    "buffer": "state of modules that is not trained, such as running means",
    "input": "what you pass to the model",
    "param cast": "copies of weights in another dtype, as autocast makes",
    "grad": "gradients of the weights",
    "activation": "made in the forward and kept for the backward",
    "temp": "everything else: what passes from one operation to the next",
}

OUTSIDE_NAME = "(outside modules)"


class Moment(Protocol):
    """A `memkit.profile.alive.Moment`."""

    @property
    def phase(self) -> str:
        """Its part of the step."""

    @property
    def op(self) -> str:
        """What runs."""

    @property
    def module(self) -> str:
        """Where."""


class Storage(Protocol):
    """A `memkit.profile.alive.AliveStorage`."""

    @property
    def category(self) -> str:
        """What its bytes are for."""

    @property
    def module(self) -> str:
        """Whose it is."""

    @property
    def what(self) -> str:
        """Its name within the module."""

    @property
    def num_bytes(self) -> int:
        """How large it is."""

    @property
    def begin(self) -> int:
        """The first moment at which it is there."""

    @property
    def end(self) -> int:
        """The first moment behind it."""


class Memory(Protocol):
    """A `memkit.profile.alive.StepMemory`."""

    @property
    def moments(self) -> Sequence[Moment]:
        """The ops of the step."""

    @property
    def storages(self) -> Sequence[Storage]:
        """All that is there at any moment."""

    @property
    def levels(self) -> Mapping[Any, Sequence[int]]:  # Any: keys of a mapping are no wider than they are
        """For each category its bytes at each moment."""

    @property
    def total_bytes(self) -> Sequence[int]:
        """The bytes of all of them."""

    @property
    def peak(self) -> int:
        """The moment at which most is there."""


class Row(Protocol):
    """A `memkit.profile.ModuleRecord`."""

    @property
    def fqn(self) -> str:
        """Its name in the model."""

    @property
    def type_name(self) -> str:
        """Its class."""

    @property
    def parent(self) -> int | None:
        """The row above it in the tree."""

    @property
    def num_calls(self) -> int:
        """How often it is called."""

    @property
    def param_bytes(self) -> int:
        """Its parameters, with those of modules under it."""

    @property
    def activation_bytes(self) -> int:
        """What it keeps for the backward, with those."""

    @property
    def self_bytes(self) -> int:
        """What it keeps for itself alone."""

    @property
    def peak_bytes(self) -> int | None:
        """The most that its calls take beside what was there."""

    @property
    def forward_s(self) -> float | None:
        """Seconds of its calls."""

    @property
    def backward_s(self) -> float | None:
        """Seconds of its backward."""

    @property
    def input_shapes(self) -> Sequence[Sequence[int]]:
        """Of its first call."""

    @property
    def output_shapes(self) -> Sequence[Sequence[int]]:
        """Of its first call."""

    @property
    def marks(self) -> Sequence[str]:
        """What to know about it."""


class Run(Protocol):
    """A `memkit.profile.RunInfo`."""

    @property
    def model(self) -> str:
        """The class of the model."""

    @property
    def device(self) -> str:
        """Where it ran."""

    @property
    def device_name(self) -> str:
        """What that is called."""

    @property
    def target(self) -> str:
        """Whose kernels were imitated."""

    @property
    def training(self) -> bool:
        """Whether in train mode."""

    @property
    def autocast(self) -> str:
        """The dtype of autocast."""

    @property
    def backward(self) -> bool:
        """Whether the backward ran."""

    @property
    def torch_version(self) -> str:
        """By which torch."""


class Optimizer(Protocol):
    """A `memkit.profile.alive.OptimizerMemory`."""

    @property
    def name(self) -> str:
        """Its class."""

    @property
    def state_bytes(self) -> int:
        """Bytes of its states."""


class Report(Protocol):
    """A `memkit.profile.MemoryReport`."""

    @property
    def tag(self) -> str:
        """Its name."""

    @property
    def run(self) -> Run:
        """How it was taken."""

    @property
    def modules(self) -> Sequence[Row]:
        """The modules, in tree order, and what is outside of them."""

    @property
    def param_bytes(self) -> int:
        """Bytes of parameters."""

    @property
    def activation_bytes(self) -> int:
        """Bytes that the backward needs."""

    @property
    def buffer_bytes(self) -> int:
        """Bytes of buffers."""

    @property
    def grad_bytes(self) -> int | None:
        """Bytes of gradients."""

    @property
    def optimizer(self) -> Optimizer | None:
        """What the optimizer keeps."""

    @property
    def step_peak_bytes(self) -> int | None:
        """The most bytes in the step."""

    @property
    def step_memory(self) -> Memory | None:
        """What is on the device at each moment."""

    @property
    def forward_peak_bytes(self) -> int | None:
        """The most bytes in the forward."""

    @property
    def backward_peak_bytes(self) -> int | None:
        """The most bytes in the backward."""

    @property
    def reserved_peak_bytes(self) -> int | None:
        """The most bytes that the allocator held."""

    @property
    def forward_s(self) -> float | None:
        """Seconds of the forward."""

    @property
    def backward_s(self) -> float | None:
        """Seconds of the backward."""

    @property
    def trace(self) -> StepTrace | None:
        """The step, op by op."""


def memory_of(report: Report) -> Memory | None:
    """Return what is on the device at each moment of the step, if the report knows."""
    memory = report.step_memory
    return memory if memory is not None and memory.moments else None


def peak_bytes_of(report: Report) -> int | None:
    """Return the most bytes at once, as far as the report knows."""
    return report.step_peak_bytes if report.step_peak_bytes is not None else report.forward_peak_bytes


def op_name(op: str) -> str:
    """Return an op as people call it.

    Example:
        >>> op_name("aten.native_batch_norm.default")
        'native_batch_norm'
    """
    return op.removeprefix("aten.").partition(".")[0] if op.startswith("aten.") else op
