"""Decide: pure functions from sizes and times to plans. No tensor is touched here, and torch is not imported.

Saved tensors:
- `asked`: `plan_memory`, from a user's arguments to a plan
- `plans`: `Plan` and `MemoryPlan`: keep, offload or recompute for each value; as a table, as JSON
- `ratio`: from a ratio to actions; seconds of copies; bytes at each point of a backward; `offload_ratio="auto"`
- `schedules`: `memkit.schedules`: the ratio by iteration
- `timeline`: seconds and bytes of one step, which all simulations walk
- `copies`: when each copy of a known step is due
- `budget/`: one budget for the whole device, all three actions
- `front`: `memkit plan`: step time against peak memory

Recomputing:
- `saves`: from a budget for saved tensors alone to the values to drop, op by op
- `remat`: cuts, drop orders, and steps that a `Walk` keeps to a limit, where plans begin
- `eviction`: evicts and recomputes values, in the simulation and in the real step
- `regions`: calls of modules, and runs of neighbors, that are recomputed as a whole

The traced step and the machine:
- `step`: a step op by op, in numbers, and as JSON: which op makes which value
- `gpu`: `Link`, `GpuSpec`: the seconds of copies and ops; GPUs known by name
- `shards`: the bytes of one rank of a split model

Weights and optimizer states:
- `chunks`: offsets of tensors in a chunk; its residency
- `residency`: `ResidencyPlan`: which layers stream, the slots, and the seconds of such a step
- `states`: which states move together, where each piece is stepped, and where it is between steps
"""

from memkit.plan import schedules as schedules
from memkit.plan.asked import plan_memory
from memkit.plan.budget.planning import JointPlanner
from memkit.plan.eviction import DTRScore, Walk
from memkit.plan.gpu import GpuSpec, Link, find_gpu
from memkit.plan.plans import Action, MemoryPlan, Plan, PlannedValue, infeasible, tell_kept
from memkit.plan.ratio import plan_ratio
from memkit.plan.regions import HostCosts, ModuleCall, RegionChoice, RegionNeeds, RegionPlanner, find_spans
from memkit.plan.residency import (
    LayerCosts,
    LayerResidency,
    PlannedLayer,
    ResidencyPlan,
    plan_again,
    plan_auto,
    plan_budget,
    plan_resident,
    plan_streamed_ratio,
    slot_size_of,
    slot_sizes,
)
from memkit.plan.saves import RematPlanner
from memkit.plan.shards import ShardedParameter, ShardPlan, plan_shards
from memkit.plan.states import ParameterCosts, StatePiece, StatePlan, disk_bytes, disk_step_s, plan_states, terabytes_written
from memkit.plan.step import NO_OP, GrowingLineage, Lifetime, ModuleOps, OpKind, OpWork, Step, StepTrace, ends_of

__all__ = ["Action", "JointPlanner", "MemoryPlan", "Plan", "PlannedValue", "infeasible", "plan_memory", "plan_ratio"]
__all__ += ["DTRScore", "HostCosts", "ModuleCall", "RegionChoice", "RegionNeeds", "RegionPlanner", "RematPlanner", "Walk"]
__all__ += ["NO_OP", "GrowingLineage", "Lifetime", "ModuleOps", "OpKind", "OpWork", "Step", "StepTrace", "ends_of"]
__all__ += ["find_spans", "tell_kept"]
__all__ += ["GpuSpec", "Link", "ShardPlan", "ShardedParameter", "find_gpu", "plan_shards"]
__all__ += ["LayerCosts", "LayerResidency", "PlannedLayer", "ResidencyPlan", "plan_again", "plan_auto", "plan_budget"]
__all__ += ["plan_resident", "plan_streamed_ratio", "slot_size_of", "slot_sizes"]
__all__ += ["ParameterCosts", "StatePiece", "StatePlan", "disk_bytes", "disk_step_s", "plan_states", "terabytes_written"]
