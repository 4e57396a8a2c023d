"""A user's optimizer, stepped on other parameters than its own: neither it nor they are touched.

- `kept`: the states that a step keeps for each parameter, in bytes, before there are any
- `shells`: objects of the optimizer's class over some of its parameters, to run its `step`; copies of its attributes and groups
  for a trial
- `steppers`: the interfaces between features that know when a gradient is complete, and `StateOffload`, which steps with it
- `numbers`: `item()` of tensors without data
"""

from memkit.optimizers.kept import Kept, KeptState, kept_states, needs_master, unwrapped

__all__ = ["Kept", "KeptState", "kept_states", "needs_master", "unwrapped"]
