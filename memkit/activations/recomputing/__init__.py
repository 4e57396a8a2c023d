"""Record ops, drop saved tensors, and recompute them.

Single ops:

- `recording_stage`: records a forward and decides about each saved tensor
- `recorded_forward`: saved values, on the device or recomputed
- `decider`, `budget`: the base class of deciders; the decider of `Rematerialize`
- `sources`: values that dropped ones can be recomputed from
- `compiled_calls`: compiled modules in a recorded forward

Regions: calls of modules that are recomputed as a whole, without recording:

- `settling`: when a step need not be recorded any more
- `unrecorded`: stages of steps that are not recorded
- `region_plan`: which calls become regions
- `regions`: the context in which they are regions, and why a module cannot be one
- `region_calls`: one call, of which autograd keeps no saved tensors, and its recompute
- `module_state`: parameters, buffers, generators and autocast for a recompute
"""
