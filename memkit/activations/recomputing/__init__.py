"""Record ops, drop saved tensors, and recompute them: the recording stage.

Single ops:

- `recording_stage`: begins to record a forward, and what is done with each saved tensor
- `recorded_forward`: what of a forward is on the device, and what can be recomputed
- `budget`: deciders: a plan, or the score as the forward goes
- `sources`: tensors that dropped ones can be recomputed from
- `compiled_calls`: compiled modules in a recorded forward

Regions: calls of modules that are recomputed as a whole, nothing recorded:

- `unrecorded`: what is done in a step that is not recorded
- `region_plan`: which calls become regions, and when steps need not be recorded any more
- `layers`: all layers as regions where no plan holds, as many as the budget asks for at each step's size
- `regions`: the context in which they are regions, and why a module cannot be one
- `region_calls`: a module with hooks, one call, of which autograd keeps no saved tensors, and its recompute
- `module_state`: what must be as it was: parameters, buffers, generators, autocast
"""
