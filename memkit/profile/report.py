"""The result of a profile, as one frozen value: rows, saved storages, totals; to JSON and back. `table.py` makes its text."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from typing import Any, NoReturn, TypeVar

from memkit.core.schemas import read_json
from memkit.errors import ReportFormatError
from memkit.plan import GpuSpec, MemoryPlan, StepTrace
from memkit.plan.asked import trace_of
from memkit.plan.ratio import TimedSave
from memkit.plan.step import trace_from_plain, trace_to_plain
from memkit.profile import table
from memkit.profile.alive import MemoryCategory, OptimizerMemory, StepMemory
from memkit.profile.fit import FeatureFit, Fit, fit_step
from memkit.profile.sharded import ShardInfo
from memkit.profile.table import Comparison, compare, peak_text, peak_words
from memkit.profile.tree import OUTSIDE_NAME, Shapes
from memkit.removed import removed

SCHEMA = "memkit.MemoryReport"
SCHEMA_VERSION = 2


class SavedCategory(str, Enum):
    """The kind of a saved storage. Parameters and buffers are not listed: they exist with or without a backward."""

    ACTIVATION = "activation"
    """Made during the forward and kept for the backward."""
    INPUT = "input"
    """Passed to the model by the caller, who may hold it as well. Counted as an activation."""
    PARAM_CAST = "param cast"
    """A copy of a parameter or buffer in another dtype, as made by autocast. Not counted as an activation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensorRecord:
    """One version of one storage that autograd saved for backward.

    Two records with the same `storage` are the same bytes, written to in between; the bytes are counted at the first.
    Times are None on the meta device, and `needed_*` without a backward or where the backward never asked.
    """

    storage: int
    """Which storage, numbered in the order of first saves."""
    version: int
    """How often it had been written to in place since its first save (by `Tensor._version`)."""
    storage_bytes: int
    """Bytes of the whole storage."""
    category: SavedCategory
    module: str
    """The innermost module whose forward ran at the first save; "(outside modules)" if none did."""
    dtype: str
    """Dtype of the tensor at the first save."""
    save_ordinals: tuple[int, ...]
    """For each save, its ordinal among all saves that are listed, so without those of parameters and buffers."""
    shapes: Shapes
    """For each save, the shape of the tensor."""
    saved_at_s: float | None
    """Seconds from the start of the forward to the first save, on the device's clock."""
    needed_position: int | None
    """Number of its first use among all uses, in the backward, of what is listed."""
    needed_at_s: float | None
    """Seconds from the start of the backward to its first use, on the device's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRecord:
    """One row: the bytes that a module keeps, and the time and peaks of its calls.

    Bytes of a row are inclusive: the module's own plus those of the modules registered under it, so `self_bytes` of all rows
    add up to the total exactly. Times and peaks are of the module's calls, including all that these call; None if not measured.
    """

    fqn: str
    """The module's qualified name in the model; "(model)" and "(outside modules)" for these two rows."""
    type_name: str
    """The class of the module."""
    parent: int | None
    """Index of the parent's row, None for the model and for "(outside modules)"."""
    depth: int
    """0 for the model, 1 for its children, and so on."""
    num_calls: int
    """How often its forward was called."""
    param_bytes: int
    """Bytes of the distinct storages of its parameters; tied ones count where they are registered first."""
    host_param_bytes: int = 0
    """Of these, bytes in host memory: of weights that a `LayerOffload` streams."""
    activation_bytes: int
    """Bytes of the distinct storages that autograd saved in the module and those under it."""
    self_bytes: int
    """Bytes of the storages first saved while this module was the innermost one running."""
    num_storages: int
    """How many storages `self_bytes` counts."""
    num_saves: int
    """How many times those storages were saved."""
    input_shapes: Shapes
    """Shapes of the tensors that its first call was given."""
    output_shapes: Shapes
    """Shapes of the tensors that its first call returned."""
    num_signatures: int
    """How many different pairs of input and output shapes it was called with; the shapes shown are the first."""
    dtype: str
    """Dtype of its first output."""
    peak_bytes: int | None
    """Highest allocation during a call, minus what was allocated before the call; the maximum over calls."""
    forward_s: float | None
    """Seconds of all calls together."""
    backward_s: float | None
    """Seconds in which the backward ran this module's operations, or those of modules under it."""
    backward_peak_bytes: int | None
    """Highest allocation while it did, minus what was allocated before the step."""
    marks: tuple[str, ...]
    """Remarks on the row: "streamed", "checkpointed", "compiled", "other hooks", "backend-dependent", "+1 alias"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Where and how a profile was taken."""

    model: str
    """Type of the model."""
    num_modules: int
    """Modules of the model, itself included."""
    fingerprint: str
    """Digest of the names, types and parameter shapes of the modules: equal for models that are built alike."""
    device: str
    """The device that the run was on, such as "cuda:0" or "meta"."""
    device_name: str
    """The name of the hardware, such as "NVIDIA H200"."""
    target: str
    """Whose kernels a run on the meta device imitated; the device itself otherwise."""
    training: bool
    """Whether the model was in train mode."""
    autocast: str
    """Dtype of autocast around the call ("bfloat16"), "" if it was off."""
    backward: bool
    """Whether a backward was run."""
    torch_version: str
    python_version: str
    allocator_config: str
    """`PYTORCH_ALLOC_CONF`, or `PYTORCH_CUDA_ALLOC_CONF`; "" if neither is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Where the memory of one training step goes. Made by `profile_memory`; nothing in it changes.

    Example:
        >>> import torch, memkit
        >>> with torch.device("meta"):
        ...     model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU())
        >>> report = memkit.profile_memory(model, torch.empty(512, 256, device="meta"), print_table=False)
        >>> report.activation_bytes == 4 * (512 * 256 + 512 * 1024)  # the input and what the ReLU saves
        True
    """

    tag: str
    """The name that it is filed under."""
    run: RunInfo
    """Where and how it was taken."""
    modules: tuple[ModuleRecord, ...]
    """Rows in tree order: the model first, "(outside modules)" last."""
    saved: tuple[SavedTensorRecord, ...]
    """What autograd saved, in the order of first saves."""
    buffer_bytes: int
    """Bytes of the distinct storages of buffers."""
    slot_bytes: int = 0
    """Bytes of the device that streamed weights share in turn: the slots of a `LayerOffload`, before the forward."""
    before_bytes: int | None
    """Allocated before the forward (parameters on the device, slots of streamed ones, buffers, inputs and anything else). None
    where compiled code ran on a device without an allocator's counter. On a device without one, only the model and its inputs
    count."""
    forward_peak_bytes: int | None
    """Most bytes allocated at once during the forward and the loss, with those before."""
    backward_peak_bytes: int | None
    """The same for the backward; None if there was none."""
    reserved_peak_bytes: int | None
    """Most bytes that CUDA's caching allocator held from the device during the step."""
    fit: Fit | None = None
    """Whether the step fits in the requested memory."""
    trace: StepTrace | None = None
    """The step op by op, if requested: plans are made from it, without running anything."""
    optimizer: OptimizerMemory | None = None
    """The memory of the requested optimizer. Its bytes are in `step_memory`, but not in the peaks above, unless they existed
    during the profile."""
    sharding: ShardInfo | None = None
    """This rank's part of the model, if FSDP2 has split it: then `param_bytes` are its shards, and `grad_bytes` and the states
    of an optimizer belong to its shards."""
    step_memory: StepMemory | None = field(default=None, repr=False)
    """The storages on the device at each moment of the step. None without a backward, and where `torch.compile` runs a part:
    the inside of compiled code cannot be seen."""

    @property
    def param_bytes(self) -> int:
        """Bytes of all distinct parameter storages, wherever they are."""
        return self.modules[0].param_bytes

    @property
    def host_param_bytes(self) -> int:
        """Of `param_bytes`, the bytes of streamed weights, which are in host memory."""
        return self.modules[0].host_param_bytes

    @property
    def device_param_bytes(self) -> int:
        """Of `param_bytes`, the bytes of parameters that are on the device all the time, without slots."""
        return self.param_bytes - self.host_param_bytes

    @property
    def activation_bytes(self) -> int:
        """Bytes of the distinct storages saved for backward: without parameters, buffers and casts of these; with inputs."""
        return self._bytes_of(SavedCategory.ACTIVATION) + self.input_bytes

    @property
    def input_bytes(self) -> int:
        """Of `activation_bytes`, the bytes of model inputs."""
        return self._bytes_of(SavedCategory.INPUT)

    @property
    def param_cast_bytes(self) -> int:
        """Bytes of saved parameters in another dtype. Not in `activation_bytes`."""
        return self._bytes_of(SavedCategory.PARAM_CAST)

    @property
    def grad_bytes(self) -> int | None:
        """Bytes of the gradients at the end of the backward, on the device; None where that could not be seen."""
        return None if self.step_memory is None else max(self.step_memory.levels[MemoryCategory.GRAD], default=0)

    @property
    def step_peak_bytes(self) -> int | None:
        """Most bytes allocated at once during the whole step, with the states of the requested optimizer.

        Measured, where an allocator counts; else the sum over all storages. None without a backward.
        """
        if self.backward_peak_bytes is None or self.forward_peak_bytes is None:
            return None
        measured_bytes = max(self.forward_peak_bytes, self.backward_peak_bytes)
        if self.optimizer is not None:
            measured_bytes += self.optimizer.state_bytes - self.optimizer.there_bytes
        seen_bytes = 0 if self.step_memory is None else self.step_memory.peak_bytes
        return max(measured_bytes, seen_bytes)

    @property
    def forward_s(self) -> float | None:
        """Seconds of the model's forward, without the loss."""
        return self.modules[0].forward_s

    @property
    def backward_s(self) -> float | None:
        """Seconds of the whole backward, the loss's included."""
        seconds = [row.backward_s for row in self.modules if row.parent is None and row.backward_s is not None]
        return sum(seconds) if seconds else None

    @property
    def unaccounted_bytes(self) -> int | None:
        """Bytes at the forward's peak that neither existed before nor are saved: temporaries, workspaces, rounding.

        Negative where more was saved than was alive at the peak.
        """
        if self.forward_peak_bytes is None or self.before_bytes is None:
            return None
        kept_bytes = self.activation_bytes - self.input_bytes + self.param_cast_bytes
        return self.forward_peak_bytes - self.before_bytes - kept_bytes

    def marked(self, mark: str) -> tuple[str, ...]:
        """Return the names of the rows that carry a mark."""
        return tuple(row.fqn for row in self.modules if mark in row.marks)

    def __str__(self) -> str:
        return self.to_text()

    def to_text(
        self,
        *,
        depth: int | None = None,
        sort_by: str | None = None,
        top: int | None = None,
        full: bool = False,
        width: int | None = None,
    ) -> str:
        """Return the table as text, one row per module, totals in the last three lines.

        Of a profile with a backward, one sentence above the totals says what is there at the peak of the step.

        Args:
            depth: fold modules below this depth into their parents (the model is at depth 0).
            sort_by: "activation", "self", "params", "calls", "peak", "forward", "backward" or "name"; None keeps tree order.
            top: show only so many rows, the first ones after sorting.
            full: all columns, and every row: otherwise runs of identical siblings are one row with their sum.
            width: in characters, such as 80: no line is longer. Empty columns go, headings are broken, then shapes go, then
                types, and long names lose their middles. None: as wide as it gets.

        Raises:
            ValueError: `depth` or `top` is negative, or `sort_by` is none of the above.
        """
        return table.to_text(self, depth=depth, sort_by=sort_by, top=top, full=full, width=width)

    def in_words(self) -> str:
        """Return in a sentence or two what fills the peak of the step, and whether it fits, if requested; "" for a profile
        without a backward."""
        return " ".join(said for said in (peak_words(self), None if self.fit is None else str(self.fit)) if said is not None)

    def peak_to_text(
        self, *, depth: int | None = None, top: int | None = 20, full: bool = False, width: int | None = None
    ) -> str:
        """Return what is alive at the peak of the step as text: by category and module, largest first. As values, and for every
        other moment, `step_memory` has it.

        Args:
            depth: what modules below this depth hold counts to those above.
            top: show only so many lines, and the sum of the others; None shows all.
            full: tell modules apart whose names differ in numbers alone; otherwise "layers.[0-27].mlp (x28)" is one line.
            width: see `to_text`.

        Raises:
            ValueError: `depth` or `top` is negative.
        """
        table.check_view(depth=depth, sort_by=None, top=top)
        return peak_text(self, depth=depth, top=top, full=full, width=width)

    def fit_in(self, budget: int | float | str | None, *, gpu: str | os.PathLike[str] | GpuSpec | None = None) -> Fit:
        """Return whether the step fits in some memory, with which feature of memkit it would, and what that costs.

        Args:
            budget: the most bytes on the device at once, with the states of the optimizer that was asked for, as for
                `memkit.plan_memory`: text such as "12GiB", bytes, or a share of the plain step's peak. None: the GPU's memory.
            gpu: whose speed to predict with: a name, a file of `memkit bench machine`, or a `memkit.plan.GpuSpec`. None: an
                H200, as large as need be.

        Raises:
            ValueError: the report has no trace, as one of a model that is sharded, `budget` or `gpu` is none of the above, or
                the GPU has less.
            TypeError, OSError, ReportFormatError: as `memkit.plan_memory`.

        Example:
            >>> import torch, memkit
            >>> with torch.device("meta"):
            ...     model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)])
            ...     x = torch.empty(4096, 512)
            >>> report = memkit.profile_memory(model, x, backward=True, trace=True, print_table=False)
            >>> print(report.fit_in("1GiB"))
            This fits in 1 GiB as it is, with 934.0 MiB to spare.
        """
        return fit_step(trace_of(self), budget, gpu, optimizer=self.optimizer)

    def compare(self, after: Any) -> Comparison:  # Any: the class of stats is in a room above
        """Return this step beside another, which answers "did it help?".

        Args:
            after: the report of the same step after a change (a checkpoint, another dtype, a smaller batch), or what
                `memkit.stats` says of the step under a `MemoryBudget`, whose context cannot be profiled.

        Example:
            >>> import torch, memkit
            >>> model, x = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()), torch.empty(1024, 64)
            >>> before = memkit.profile_memory(model, x, device="meta", backward=True, print_table=False)
            >>> after = memkit.profile_memory(model, x[:256], device="meta", backward=True, print_table=False)
            >>> print(str(before.compare(after)).splitlines()[0])
            It helped: the peak of the step went from 801.50 to 417.50 KiB, 48 % less.
        """
        return compare(self, after)

    def to_csv(self) -> NoReturn:
        raise AttributeError(removed("MemoryReport.to_csv", "use to_json, or the fields of MemoryReport.modules"))

    def to_html(self, path: str | os.PathLike[str], *, plans: Iterable[MemoryPlan] = ()) -> None:
        """Write an interactive page: the step's timeline, its modules as boxes and as a table, and plans, before and after.

        It is one file of about 5 MiB that needs no network. plotly draws it: `pip install "plotly>=5"`.

        Args:
            path: the file to write.
            plans: plans of `plan_memory` for this report, each for another budget; the report needs a trace for them.

        Raises:
            ModuleNotFoundError: plotly is not installed.
            ValueError: a plan is for another step, or the report has no trace.
            OSError: the file cannot be written.

        Example:
            >>> import tempfile, torch, memkit
            >>> with torch.device("meta"):
            ...     model, x = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU()), torch.empty(512, 256)
            >>> report = memkit.profile_memory(model, x, device="meta", backward=True, print_table=False)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     report.to_html(f"{folder}/step.html")
        """
        from memkit.page import write_page  # only on request

        write_page(self, path, plans=plans)

    def to_snapshot(self, path: str | os.PathLike[str]) -> None:
        """Write the step as a memory snapshot of CUDA's allocator, a pickle that PyTorch's memory viewer reads.

        Drop it on https://pytorch.org/memory_viz. Each allocation tells the module and the op that it belongs to. Addresses are
        made up: they lie closer together than an allocator's.

        Args:
            path: the file to write.

        Raises:
            ValueError: the report does not know the step moment by moment.
            OSError: the file cannot be written.

        Source: `torch.cuda.memory._snapshot`.
        """
        from memkit.page import write_snapshot

        write_snapshot(self, path)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.to_text())}</pre>"

    def to_json(self) -> str:
        """Return the whole report as JSON, for `from_json`. Bytes and seconds are plain numbers. The trace is one long line,
        and the step's memory at each moment another."""
        content = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, **asdict(replace(self, trace=None, step_memory=None))}
        long = {
            "trace": None if self.trace is None else trace_to_plain(self.trace),
            "step_memory": None if self.step_memory is None else self.step_memory.to_plain(),
        }
        text = json.dumps({name: value for name, value in content.items() if name not in long}, indent=1).removesuffix("\n}")
        lines = (f' "{name}": {json.dumps(value, separators=(",", ":"))}' for name, value in long.items())
        return ",\n".join([text, *lines]) + "\n}"

    @classmethod
    def from_json(cls, source: str | os.PathLike[str]) -> MemoryReport:
        """Read a report that `to_json` wrote: its text, or (as a `pathlib.Path`) the file that holds it.

        Raises:
            ReportFormatError: it is no memory report, or it was written by a newer memkit.
            OSError: the file cannot be read.
        """
        found, where = read_json(source, schema=SCHEMA, version=SCHEMA_VERSION, what="a memkit report", error=ReportFormatError)
        try:
            return _report_from(found)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ReportFormatError(f"{where} is not a whole memkit report: {type(error).__name__}: {error}") from error

    def _bytes_of(self, category: SavedCategory) -> int:
        sizes = {record.storage: record.storage_bytes for record in self.saved if record.category is category}
        return sum(sizes.values())


_Record = TypeVar("_Record", SavedTensorRecord, ModuleRecord, RunInfo)


def _record_from(kind: type[_Record], values: Mapping[str, Any], **made: Any) -> _Record:
    names = {field.name for field in fields(kind)}
    return kind(**{name: _frozen(value) for name, value in values.items() if name in names and name not in made}, **made)


def _report_from(content: Mapping[str, Any]) -> MemoryReport:
    def part(name: str, read: Callable[[Any], Any]) -> Any:
        return None if content.get(name) is None else read(content[name])

    names = ("tag", "buffer_bytes", "before_bytes", "forward_peak_bytes", "backward_peak_bytes", "reserved_peak_bytes")
    report = MemoryReport(
        **{name: content[name] for name in names},
        run=_record_from(RunInfo, content["run"]),
        modules=tuple(_record_from(ModuleRecord, row) for row in content["modules"]),
        saved=tuple(
            _record_from(SavedTensorRecord, record, category=SavedCategory(record["category"])) for record in content["saved"]
        ),
        slot_bytes=content.get("slot_bytes", 0),
        trace=part("trace", trace_from_plain),
        fit=part("fit", lambda it: Fit(**{**it, "features": tuple(FeatureFit(**each) for each in it["features"])})),
        optimizer=part("optimizer", lambda it: OptimizerMemory(**it)),
        sharding=part("sharding", lambda it: ShardInfo(**it)),
        step_memory=part("step_memory", StepMemory.from_plain),
    )
    if len(report.modules) < 2 or report.modules[-1].fqn != OUTSIDE_NAME:
        raise ValueError(f'the rows do not end with "{OUTSIDE_NAME}"')
    return report


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def timed_saves(report: MemoryReport, min_bytes: int) -> list[TimedSave]:
    saves = []
    for record in report.saved:
        if record.storage_bytes < min_bytes or record.category is SavedCategory.PARAM_CAST:
            continue
        if record.saved_at_s is None:
            raise ValueError(
                "the report has no times: profile on a GPU, with backward=True, to know how long the step takes there"
            )
        needed_at_s = report.backward_s if record.needed_at_s is None else record.needed_at_s
        if needed_at_s is None:
            raise ValueError("the report has no backward: profile with backward=True")
        is_held = record.category is SavedCategory.INPUT
        saves.append(
            TimedSave(num_bytes=record.storage_bytes, saved_at_s=record.saved_at_s, needed_at_s=needed_at_s, is_held=is_held)
        )
    return saves
