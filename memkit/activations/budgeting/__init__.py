"""Keep, offload and recompute under one budget of the device: what `MemoryBudget` does.

A forward:

- `opening`: begins each forward in the way that is in use
- `stage`: what is done with each saved tensor while the step is learned
- `decider`: the action for each save: by the plan, or by the score
- `schedule`: `Schedule`: a plan as what is due at each save and request
- `planned_forward`: a recorded forward that follows one
- `steady`: what of such a forward is known ahead, and need not be noted
- `steady_stage`: what is done with each saved tensor then
- `moves`: a plan without recomputes, as a schedule of `offloading/`
- `ways`: which is fastest, measured: a plan of single ops, or regions, with copies or without
- `inside`: `activation_memory_budget` of compiled blocks

Learning:

- `state`: what a tag remembers
- `limits`: the budget, and what of it is left for a step
- `states`: bytes of optimizer states that are still to be made
- `meter`: measures a step: the allocator's peak at each op, and seconds
- `metered`: a recorder that calls the meter at each op
- `observed`: from a measured step to the trace that is planned from
- `foresight`: what a step takes that was not measured yet
- `learned`: what is known of one kind of step
- `learning`: what is known of all kinds, and how plans have gone
- `searching`: looks for a plan, and says why there is none
"""
