"""Searches a plan within the bytes that a step may take, and explains why if there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memkit.errors import BudgetInfeasible
from memkit.sizes import format_bytes
from memkit.transfer.device_memory import device_memory_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from memkit.device import Device
    from memkit.plan import JointPlanner, MemoryPlan


def search(
    planner: JointPlanner,
    allowed_bytes: int,
    headroom_bytes: int,
    budget_bytes: int,
    device: Device,
    warn: Callable[[str], None] | None,
    reserved_bytes: int,
) -> MemoryPlan:
    """Return a plan; without the headroom if there is none with it.

    Args:
        planner: the planner for the step.
        allowed_bytes: the most bytes the step may take, without the headroom.
        headroom_bytes: bytes to leave free if possible.
        budget_bytes: the user's budget for the whole device.
        device: the device of the step.
        warn: called with a message if there is no plan; then the plan with the fewest bytes is returned. None to raise.
        reserved_bytes: how many of the bytes that are left free are for the states of an optimizer that is not known.

    Raises:
        BudgetInfeasible: there is no plan, and `warn` is None.
    """
    try:
        is_roomy = planner.least().peak_bytes <= allowed_bytes
        return planner.plan(allowed_bytes if is_roomy else allowed_bytes + headroom_bytes)
    except BudgetInfeasible as error:
        free_bytes = budget_bytes - allowed_bytes - headroom_bytes
        told, held = str(error), device_memory_of(device).describe()
        if free_bytes:
            asked = f"of a budget of {format_bytes(budget_bytes)}, {format_bytes(free_bytes)}"
            told = f"{asked} are left free, or are there beside the step: {error}"
        if reserved_bytes:
            told = f"{format_bytes(reserved_bytes)} are reserved for optimizer states; pass optimizer= if it keeps less: {told}"
        if held:
            told = f"{told}. Of what is there, {held}"
        if warn is None:
            raise BudgetInfeasible(told, error.smallest_bytes + free_bytes) from None
        warn(f"{told}. It is exceeded by as little as can be.")
        return planner.plan(planner.least().peak_bytes)
