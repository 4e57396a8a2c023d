"""Record ops, drop saved tensors, and recompute them: the recording stage.

Single ops:

- `stage`: what is done with each saved tensor
- `opening`: begins to record a forward
- `recorded_forward`: what of a forward is on the device, and what can be recomputed
- `decider`: what all deciders have in common
- `budget`: the decider of `Rematerialize`: a plan, or the score as the forward goes
- `sources`: tensors that dropped ones can be recomputed from
- `anchors`: tensors that autograd did not save, held so that others can be recomputed
- `compiled_calls`: compiled modules in a recorded forward
- `figures`: figures for `memkit.stats`

Regions: calls of modules that are recomputed as a whole, nothing recorded:

- `settling`: when a step need not be recorded any more
- `steady`: what is done in such a step
- `region_plan`: which calls become regions
- `regions`: hooks on their modules
- `region_calls`: one call: autograd keeps nothing of it
- `region_inputs`: its inputs, held until then
- `recompute`: running it again
- `module_state`: parameters, buffers and training mode, which must be as they were
- `surroundings`: random number generators, autocast, grad mode, which must be as they were
- `read_only`: from step to step: modules whose forward only reads their buffers
- `region_reasons`: why a module cannot be one
- `stacks`: what is on the stacks of frames and of saved-tensor hooks
"""
