"""Measure: run a model, watch what it saves and allocates, and return a frozen report. Nothing is moved or decided here.

- `tracker`: `profile_memory`, and the arguments and models that it refuses
- `passes`: its runs, and the rows of a report
- `step`: one run (forward, loss, backward), which restores what it changes
- `simulate/`: a run on the meta device, as a target's kernels would run it
- `tree`: the model's modules, the shapes of their inputs and outputs
- `calls`: which module is running; memory and time at the ends of its calls
- `watch`: saves, storages, casts and checkpoints, as seen by hooks and a dispatch mode
- `sharded`: models that FSDP2 has split
- `optimizer_states`: an optimizer's states for each parameter
- `trace`: the step op by op (`trace=True`)
- `partitions`: the values that a compiled block would save and recompute
- `alive`: `StepMemory`: the storages on the device at each op
- `report`: `MemoryReport`, to JSON and back
- `table`: the report as text; two reports side by side
- `fit`: whether the step would fit in some memory, with which feature
- `registry`: reports by tag
"""

from memkit.profile.alive import AliveItem, AliveStorage, MemoryCategory, Moment, OptimizerMemory, Phase, StepMemory
from memkit.profile.fit import FeatureFit, Fit
from memkit.profile.registry import find_report
from memkit.profile.report import MemoryReport, ModuleRecord, RunInfo, SavedCategory, SavedTensorRecord, timed_saves
from memkit.profile.sharded import ShardInfo
from memkit.profile.table import ComparedFigure, Comparison
from memkit.profile.tracker import profile_memory

__all__ = ["ComparedFigure", "Comparison", "FeatureFit", "Fit", "find_report", "profile_memory", "timed_saves"]
__all__ += ["MemoryReport", "ModuleRecord", "RunInfo", "SavedCategory", "SavedTensorRecord", "ShardInfo"]
__all__ += ["AliveItem", "AliveStorage", "MemoryCategory", "Moment", "OptimizerMemory", "Phase", "StepMemory"]
