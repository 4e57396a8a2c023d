"""Decide: pure functions from sizes and times to plans. No tensor is touched here.

Saved tensors:

- `asked`: `plan_memory`: from a user's arguments to a plan
- `actions`: `Plan`: keep, offload or recompute for each save
- `ratio`: from a ratio to actions
- `schedules`: `memkit.schedules`: the ratio by iteration
- `costs`: seconds of copies; `offload_ratio="auto"`
- `timeline`: seconds and bytes of one step, which all simulations walk
- `forecast`: bytes on the device at each point of a backward
- `copies`: when each copy of a known step is due
- `budget/`: one budget for the whole device, all three actions

Recomputing:

- `lineage`: which op made which value
- `planner`: from a budget to what is dropped, op by op
- `drop_order`: in which order values are dropped as the budget falls
- `segments`: where a forward may be cut, as checkpointing does between layers
- `eviction`: what is evicted and how it is recomputed: used by the simulation and by the real step
- `simulation`: what a step takes under a plan
- `regions`: which calls of modules are recomputed as a whole
- `region_step`: what a step takes then
- `spans`: which neighboring calls are tried as one

The traced step and the machine:

- `step_trace`: `StepTrace`: a step op by op, in numbers
- `trace_format`: the same as JSON
- `gpu`: `GpuSpec`: from an op's work to seconds
- `gpus`: GPUs that are known by name
- `shards`: what one rank takes of a split model

Weights and optimizer states:

- `chunks`: offsets of tensors in a chunk; where a chunk's bytes are
- `residency`: `ResidencyPlan`: which layers stream
- `streaming`: the slots' sizes, and seconds of a step that streams
- `state_costs`: bytes of states
- `state_pieces`: which states move together, and where each piece is stepped
- `state_places`: where states are between steps: device, host or disk
- `disk`: room, wear and seconds of chunks on a disk
"""

from memkit.plan.actions import Action, Plan, PlannedSave, infeasible, tell_kept
from memkit.plan.asked import budget_or_share, plan_memory
from memkit.plan.budget import (
    JointPlanner,
    MemoryPlan,
    Moving,
    Problem,
    fit_copies,
    fit_regions,
    make_problem,
    peak_with_regions,
)
from memkit.plan.copies import CopySchedule, schedule_copies
from memkit.plan.costs import TimedSave, auto_ratio, roofline_s, simulate_lanes
from memkit.plan.disk import disk_bytes, disk_step_s, terabytes_written
from memkit.plan.eviction import DTRScore, Walk
from memkit.plan.forecast import Forecast
from memkit.plan.gpu import GpuSpec
from memkit.plan.gpus import find_gpu
from memkit.plan.lineage import NO_OP, GrowingLineage, Lineage, Step, ends_of
from memkit.plan.planner import RematPlanner
from memkit.plan.ratio import RatioSoFar, check_ratio, plan_ratio
from memkit.plan.region_step import HostCosts, ModuleCall, RegionChoice, RegionNeeds
from memkit.plan.regions import RegionPlanner
from memkit.plan.residency import (
    LayerResidency,
    PlannedLayer,
    ResidencyPlan,
    plan_again,
    plan_auto,
    plan_budget,
    plan_resident,
    plan_streamed_ratio,
)
from memkit.plan.schedules import call_schedule, takes_peak
from memkit.plan.shards import ShardedParameter, ShardPlan, plan_shards
from memkit.plan.spans import find_spans
from memkit.plan.state_costs import ParameterCosts, StatePiece, Update, aligned
from memkit.plan.state_pieces import WINDOW_NUMEL, StatePlan, in_slots, is_large, plan_states
from memkit.plan.state_places import interleaved
from memkit.plan.step_trace import Lifetime, ModuleOps, OpKind, OpWork, StepTrace
from memkit.plan.streaming import LayerCosts, slot_size_of, slot_sizes
from memkit.plan.timeline import Levels
from memkit.plan.trace_format import trace_from_plain, trace_to_plain

__all__ = [
    "NO_OP",
    "WINDOW_NUMEL",
    "Action",
    "CopySchedule",
    "DTRScore",
    "Forecast",
    "GpuSpec",
    "GrowingLineage",
    "HostCosts",
    "JointPlanner",
    "LayerCosts",
    "LayerResidency",
    "Levels",
    "Lifetime",
    "Lineage",
    "MemoryPlan",
    "ModuleCall",
    "ModuleOps",
    "Moving",
    "OpKind",
    "OpWork",
    "ParameterCosts",
    "Plan",
    "PlannedLayer",
    "PlannedSave",
    "Problem",
    "RatioSoFar",
    "RegionChoice",
    "RegionNeeds",
    "RegionPlanner",
    "RematPlanner",
    "ResidencyPlan",
    "ShardPlan",
    "ShardedParameter",
    "StatePiece",
    "StatePlan",
    "Step",
    "StepTrace",
    "TimedSave",
    "Update",
    "Walk",
    "aligned",
    "auto_ratio",
    "budget_or_share",
    "call_schedule",
    "check_ratio",
    "disk_bytes",
    "disk_step_s",
    "ends_of",
    "find_gpu",
    "find_spans",
    "fit_copies",
    "fit_regions",
    "in_slots",
    "infeasible",
    "interleaved",
    "is_large",
    "make_problem",
    "peak_with_regions",
    "plan_again",
    "plan_auto",
    "plan_budget",
    "plan_memory",
    "plan_ratio",
    "plan_resident",
    "plan_shards",
    "plan_states",
    "plan_streamed_ratio",
    "roofline_s",
    "schedule_copies",
    "simulate_lanes",
    "slot_size_of",
    "slot_sizes",
    "takes_peak",
    "tell_kept",
    "terabytes_written",
    "trace_from_plain",
    "trace_to_plain",
]
