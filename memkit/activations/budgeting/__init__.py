"""Keep, offload and recompute under one budget of the device: what `MemoryBudget` does.

A forward:

- `opening`: begins each forward, in the way that was chosen
- `stage`: what is done with each saved tensor while the step is still measured
- `decider`: the action for each save: by the plan, or by the score
- `schedule`: `Schedule`: what a plan does at each save and request
- `planned_forward`: a recorded forward that follows a schedule
- `steady`: saves that are known ahead, and need no record
- `steady_stage`: what is done with each saved tensor in such a step
- `moves`: a plan without recomputes, as a schedule of `offloading/`
- `ways`: times which is fastest: a plan of single ops, or regions, with copies or without
- `inside`: `activation_memory_budget` of compiled blocks

Learning:

- `state`: what a tag remembers
- `limits`: the budget, and how much of it a step may allocate
- `states`: bytes of optimizer states that have yet to be made
- `peaks`: the peak of one step, whoever else resets the counter
- `meter`: measures a step: the allocator's peak at each op, and seconds
- `metered`: a recorder that calls the meter at each op
- `observed`: turns a measured step into the trace that is planned from
- `foresight`: predicts the bytes of steps that have no plan yet
- `link`: how fast copies are
- `learned`: measurements and plans of one kind of step
- `learning`: those of all kinds, and how well plans predict
- `searching`: looks for a plan, and says why there is none
"""
