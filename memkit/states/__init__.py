"""Act on optimizer states: `StateOffload` keeps them in host memory, and steps the user's optimizer piece by piece."""

from memkit.states.state_offload import StateOffload
from memkit.states.stats import StateStats

__all__ = ["StateOffload", "StateStats"]
