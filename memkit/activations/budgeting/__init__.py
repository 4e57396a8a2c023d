"""Keep, offload and recompute under one budget of the device: what `MemoryBudget` does.

A forward:

- `opening`: begins each forward, in the way that was chosen
- `budget_stage`: what is done with each saved tensor
- `steady_step`: saves that are known ahead, and need no record
- `planned_forward`: a recorded forward that follows a plan
- `ways`: times which is fastest: a plan of single ops, or regions, with copies or without
- `inside`: `activation_memory_budget` of compiled blocks

Learning:

- `state`: what a tag remembers
- `limits`: the budget, and how much of it a step may allocate
- `meter`: measures a step: the allocator's peak at each op, and seconds; turns it into the trace that is planned from, and
  predicts steps that have no plan yet
- `learning`: measurements and plans of each kind of step, how fast copies are, and how well plans predict
"""
