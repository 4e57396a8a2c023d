"""Measuring: run a model, watch what it saves and allocates, and return a frozen report. Nothing is moved or decided here.

The call:

- `tracker`: `profile_memory`
- `checks`: the arguments and models that it refuses
- `passes`: the runs that it makes: for memory, for time, on the meta device
- `step`: one run: forward, loss, backward
- `without_data`: a run on the meta device
- `simulate/`: what a target's kernels would do, on the meta device
- `restore`: puts back what a run changes

What is watched:

- `tree`: the model's modules
- `calls`: which module is running
- `gauges`: memory and time at the ends of a module's call
- `misfits`: the shapes that modules of torch need
- `signatures`: shapes and dtypes of inputs and outputs
- `saves`: what autograd saves
- `watch`: storages, casts and checkpoints, seen below autograd
- `sharded`: models that FSDP2 has split
- `optimizer_states`: what an optimizer keeps for each parameter

`trace=True`: the step op by op:

- `trace`: the traced step
- `op_clock`: numbers the ops, and notes the bytes at each
- `op_work`: an op's kind, FLOPs and bytes
- `partitions`: what a compiled block would save and recompute
- `alive`: `StepMemory`: what is on the device at each op
- `storage_log`: makes the `StepMemory` during a run

The report:

- `report`: `MemoryReport`
- `records`: its rows
- `rows`: makes the rows from what the runs found
- `timed`: saved storages with times, for a plan of copies
- `table`: the report as text, CSV and HTML
- `words`: the sentences in it
- `fit`: would the step fit in some memory, with which feature
- `compare`: two reports side by side
- `registry`: reports by tag
"""

from memkit.profile.alive import AliveItem, AliveStorage, MemoryCategory, Moment, OptimizerMemory, Phase, StepMemory
from memkit.profile.compare import ComparedFigure, Comparison
from memkit.profile.fit import FeatureFit, Fit
from memkit.profile.records import ModuleRecord, RunInfo, SavedCategory, SavedTensorRecord, ShardInfo
from memkit.profile.registry import find_report
from memkit.profile.report import MemoryReport
from memkit.profile.timed import timed_saves
from memkit.profile.tracker import profile_memory

__all__ = [
    "AliveItem",
    "AliveStorage",
    "ComparedFigure",
    "Comparison",
    "FeatureFit",
    "Fit",
    "MemoryCategory",
    "MemoryReport",
    "ModuleRecord",
    "Moment",
    "OptimizerMemory",
    "Phase",
    "RunInfo",
    "SavedCategory",
    "SavedTensorRecord",
    "ShardInfo",
    "StepMemory",
    "find_report",
    "profile_memory",
    "timed_saves",
]
