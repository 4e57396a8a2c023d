"""Decide: pure functions from sizes and times to plans. No tensor is touched here."""

from memkit.plan.actions import Action, Plan, PlannedSave, infeasible, limit_of, tell_kept
from memkit.plan.budget import (
    JointPlanner,
    MemoryPlan,
    Problem,
    least_budget,
    make_problem,
    plan_budget_jointly,
    plan_budgets,
)
from memkit.plan.copies import CopySchedule, schedule_copies
from memkit.plan.costs import StepTime, TimedSave, auto_ratio, roofline_s, simulate_lanes, timed_saves
from memkit.plan.drop_order import drop_order
from memkit.plan.eviction import DTRScore, ValueStore, Walk
from memkit.plan.forecast import Forecast
from memkit.plan.lineage import NO_OP, GrowingLineage, Lineage, Step, ends_of
from memkit.plan.planner import RematPlanner
from memkit.plan.ratio import RatioSoFar, check_ratio, plan_ratio
from memkit.plan.region_step import HostCosts, ModuleCall, RegionChoice
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
from memkit.plan.simulation import Outcome, simulate
from memkit.plan.spans import find_spans
from memkit.plan.streaming import LayerCosts, StepPrediction, predict_step, slot_size_of, slot_sizes
from memkit.plan.timeline import Lane, Levels, Timeline

__all__ = [
    "NO_OP",
    "Action",
    "CopySchedule",
    "DTRScore",
    "Forecast",
    "GrowingLineage",
    "HostCosts",
    "JointPlanner",
    "Lane",
    "LayerCosts",
    "LayerResidency",
    "Levels",
    "Lineage",
    "MemoryPlan",
    "ModuleCall",
    "Outcome",
    "Plan",
    "PlannedLayer",
    "PlannedSave",
    "Problem",
    "RatioSoFar",
    "RegionChoice",
    "RegionPlanner",
    "RematPlanner",
    "ResidencyPlan",
    "Step",
    "StepPrediction",
    "StepTime",
    "TimedSave",
    "Timeline",
    "ValueStore",
    "Walk",
    "auto_ratio",
    "call_schedule",
    "check_ratio",
    "drop_order",
    "ends_of",
    "find_spans",
    "infeasible",
    "least_budget",
    "limit_of",
    "make_problem",
    "plan_again",
    "plan_auto",
    "plan_budget",
    "plan_budget_jointly",
    "plan_budgets",
    "plan_ratio",
    "plan_resident",
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
    "timed_saves",
]
