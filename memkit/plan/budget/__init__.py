"""One budget for the device: which values of a step stay, leave for host memory, or are recomputed.

- `problem`: `Problem`: a traced step, and what may be done with each value
- `simulate`: seconds and bytes of a step under one action for each value
- `search`: finds plans, and makes them better by single changes
- `bound`: a linear program: no plan is faster
- `planning`: `JointPlanner`: a budget in, a plan or an error out
"""

from memkit.plan.budget.bound import Bound, find_bound, why_no_bound
from memkit.plan.budget.planning import JointPlanner, least_budget, plan_budget_jointly, unsure
from memkit.plan.budget.problem import HeldValue, Problem, make_problem
from memkit.plan.budget.search import floor_bytes
from memkit.plan.budget.simulate import Move, Simulated, SimulatedReplay, simulate
from memkit.plan.plans import MemoryPlan, PlannedReplay, PlannedStep, PlannedValue
from memkit.plan.regions import Moving, fit_copies, fit_regions, peak_with_regions

__all__ = [
    "Bound",
    "HeldValue",
    "JointPlanner",
    "MemoryPlan",
    "Move",
    "Moving",
    "PlannedReplay",
    "PlannedStep",
    "PlannedValue",
    "Problem",
    "Simulated",
    "SimulatedReplay",
    "find_bound",
    "fit_copies",
    "fit_regions",
    "floor_bytes",
    "least_budget",
    "make_problem",
    "peak_with_regions",
    "plan_budget_jointly",
    "simulate",
    "unsure",
    "why_no_bound",
]
