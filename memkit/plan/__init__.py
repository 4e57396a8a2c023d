"""Decide: pure functions from sizes and times to plans. No tensor is touched here."""

from memkit.plan.actions import Action, Plan, limit_of
from memkit.plan.costs import StepTime, TimedSave, auto_ratio, roofline_s, simulate_lanes, timed_saves
from memkit.plan.ratio import check_ratio, plan_ratio
from memkit.plan.schedules import call_schedule, takes_peak

__all__ = [
    "Action",
    "Plan",
    "StepTime",
    "TimedSave",
    "auto_ratio",
    "call_schedule",
    "check_ratio",
    "limit_of",
    "plan_ratio",
    "roofline_s",
    "simulate_lanes",
    "takes_peak",
    "timed_saves",
]
