"""Decide: pure functions from sizes and times to plans. No tensor is touched here."""

from memkit.plan.actions import Action, Plan, PlannedSave, infeasible, limit_of, tell_kept
from memkit.plan.asked import budget_or_share, plan_memory
from memkit.plan.budget import JointPlanner, MemoryPlan, Moving, Problem, fit_copies, fit_regions, make_problem
from memkit.plan.copies import CopySchedule, schedule_copies
from memkit.plan.costs import StepTime, TimedSave, auto_ratio, roofline_s, simulate_lanes
from memkit.plan.disk import disk_bytes, disk_step_s, terabytes_written
from memkit.plan.drop_order import drop_order
from memkit.plan.eviction import DTRScore, ValueStore, Walk
from memkit.plan.forecast import Forecast
from memkit.plan.gpu import GpuSpec
from memkit.plan.gpus import find_gpu
from memkit.plan.lineage import NO_OP, GrowingLineage, Lineage, Step, ends_of
from memkit.plan.planner import RematPlanner
from memkit.plan.ratio import RatioSoFar, check_ratio, plan_ratio
from memkit.plan.region_step import HostCosts, ModuleCall, RegionBytes, RegionChoice, RegionNeeds
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
    spread,
)
from memkit.plan.schedules import call_schedule, takes_peak
from memkit.plan.shards import ShardedParameter, ShardPlan, plan_shards
from memkit.plan.simulation import Outcome, simulate
from memkit.plan.spans import find_spans
from memkit.plan.state_costs import ParameterCosts, StatePiece, StateRates, Update, aligned
from memkit.plan.state_pieces import WINDOW_NUMEL, StatePlan, in_slots, is_large, plan_states
from memkit.plan.state_places import interleaved
from memkit.plan.step_trace import Lifetime, ModuleOps, OpKind, OpWork, StepTrace
from memkit.plan.streaming import LayerCosts, StepPrediction, predict_step, slot_size_of, slot_sizes
from memkit.plan.timeline import Lane, Levels, Timeline
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
    "Lane",
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
    "Outcome",
    "ParameterCosts",
    "Plan",
    "PlannedLayer",
    "PlannedSave",
    "Problem",
    "RatioSoFar",
    "RegionBytes",
    "RegionChoice",
    "RegionNeeds",
    "RegionPlanner",
    "RematPlanner",
    "ResidencyPlan",
    "ShardPlan",
    "ShardedParameter",
    "StatePiece",
    "StatePlan",
    "StateRates",
    "Step",
    "StepPrediction",
    "StepTime",
    "StepTrace",
    "TimedSave",
    "Timeline",
    "Update",
    "ValueStore",
    "Walk",
    "aligned",
    "auto_ratio",
    "budget_or_share",
    "call_schedule",
    "check_ratio",
    "disk_bytes",
    "disk_step_s",
    "drop_order",
    "ends_of",
    "find_gpu",
    "find_spans",
    "fit_copies",
    "fit_regions",
    "in_slots",
    "infeasible",
    "interleaved",
    "is_large",
    "limit_of",
    "make_problem",
    "plan_again",
    "plan_auto",
    "plan_budget",
    "plan_memory",
    "plan_ratio",
    "plan_resident",
    "plan_shards",
    "plan_states",
    "plan_streamed_ratio",
    "predict_step",
    "roofline_s",
    "schedule_copies",
    "simulate",
    "simulate_lanes",
    "slot_size_of",
    "slot_sizes",
    "spread",
    "takes_peak",
    "tell_kept",
    "terabytes_written",
    "trace_from_plain",
    "trace_to_plain",
]
