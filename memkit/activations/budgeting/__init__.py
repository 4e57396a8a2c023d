"""Keep, offload and recompute under one budget of the device, for `MemoryBudget`.

- `opening`: begins each forward, in the chosen way
- `budget_stage`: decides about each saved tensor
- `steady_step`: saves that are known ahead and need no record
- `planned_forward`: a recorded forward that follows a plan
- `ways`: times plans of single ops, and regions with copies or without
- `inside`: `activation_memory_budget` of compiled blocks
- `state`: the state of a tag, from one iteration to the next
- `limits`: the budget, and the bytes of it that a step may allocate
- `meter`: measures a step, makes the trace for plans from it, and predicts steps without a plan
- `learning`: measurements and plans of each kind of step, how fast copies are, and how well plans predict
"""
