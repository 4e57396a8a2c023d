"""What one training step does, op by op, in pure numbers: bytes, FLOPs, births and deaths. No seconds: those depend on the GPU.

Made without data by `profile_memory(..., trace=True)`; `plan_memory` plans from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from memkit.plan.lineage import Step


class OpKind(str, Enum):
    """What limits an op, and by how much a GPU misses its ceilings."""

    MATMUL = "matmul"
    CONVOLUTION = "convolution"
    ATTENTION = "attention"
    NORM = "norm"
    POOL = "pool"
    POINTWISE = "pointwise"
    """All others: bound by the bytes that they read and write."""
    CONVOLUTION_OF_FEW = "convolution_of_few"
    """Of at most 3 channels, forward, as the first of most nets: far slower than others of its bytes and FLOPs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpWork:
    """What one op does, by its tensors alone."""

    name: str
    """As PyTorch calls it, such as "aten.mm.default"."""
    kind: OpKind
    """What limits it: see `OpKind`."""
    flops: float
    """Source: `torch.utils.flop_counter`; 0 where that knows none."""
    num_bytes: int
    """Bytes that it reads and writes."""
    dtype: str
    """That of what it computes in, such as "bfloat16"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetime:
    """While which ops of the step the bytes of a value are on the device: from `made_at` up to, and without, `freed_at`.

    One storage may hold several values, one after the other: where an op writes over one, that ends, and the next begins.
    """

    made_at: int
    """The op that makes it, by its place: its bytes are in `StepTrace.live_bytes` from there on."""
    released_at: int
    """The first op while which nobody but autograd holds it: what is dropped or has left is gone from here on, and not sooner.
    `freed_at` where somebody else holds it as long, or until the backward has begun."""
    freed_at: int
    """The first op while which it is gone in the plain step; the number of ops if it outlives that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleOps:
    """One call of a module in the forward: the ops of it lie side by side."""

    module: str
    """Its name in the model; "" is the model."""
    kind: str
    """Its class."""
    begin: int
    """The first op of the lineage in it."""
    end: int
    """The first one behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """One training step, forward, loss and backward, on a device that is not there.

    Places count the ops that have run when something happens, from 0 to `len(ops)`: what happens at place 3 comes after
    `ops[2]` and before `ops[3]`.
    """

    model: str
    """The class of the model."""
    inputs: str
    """Shapes and dtypes of the inputs, for people."""
    target: str
    """Whose kernels are imitated: "cuda" or "cpu"."""
    min_bytes: int
    """Smaller saved storages stay where they are: they are part of the working bytes."""
    ops: tuple[OpWork, ...]
    """All ops that compute or make anything, also those that make nothing that is saved: of the forward and the loss, then of
    the backward. What returns a view is none."""
    num_forward_ops: int
    """How many of `ops` belong to the forward and the loss."""
    step: Step
    """Which op made which value, what is saved, and when it is asked for. Its ops take no seconds."""
    op_places: tuple[int, ...]
    """For each op of the lineage, its place among `ops`."""
    save_places: tuple[int, ...]
    """For each of `step.saves`, how many ops have run. An op saves what it reads before it runs, what it makes just after."""
    use_places: tuple[int, ...]
    """For each of `step.uses`, how many ops have run."""
    lifetimes: Mapping[int, Lifetime]
    """Of each saved value, and of each other value of at least `min_bytes` that an op of the forward makes."""
    live_bytes: tuple[int, ...]
    """Bytes on the device beside `base_bytes` while each op runs: just after it has made its outputs."""
    base_bytes: int
    """What is there before: parameters, buffers, inputs."""
    trainable_numel: int
    """Elements of the parameters that require grad."""
    trainable_bytes: int
    """Their bytes."""
    names: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    """For values that an op makes, the op and the module."""
    modules: tuple[ModuleOps, ...] = ()
    """The calls of modules in the forward, in the order in which they begin."""

    backend_dependent: tuple[str, ...] = ()
    """The modules with ops of which only the backend knows what they run, save and reserve, as cuDNN's LSTM: their bytes and
    their work are those of the ops that PyTorch would run without it."""

    @property
    def peak_bytes(self) -> int:
        """The most bytes of the plain step at once."""
        return self.base_bytes + max(self.live_bytes, default=0)
