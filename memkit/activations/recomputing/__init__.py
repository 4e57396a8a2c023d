"""Record ops, drop saved tensors, and recompute them: the recording stage.

Single ops:

- `stage`: what is done with each saved tensor
- `opening`: begins to record a forward
- `recorded_forward`: what of a forward is on the device, and what can be recomputed
- `decider`: base class of deciders
- `budget`: the decider of `Rematerialize`: a plan, or the score as the forward goes
- `sources`: tensors that dropped ones can be recomputed from
- `anchors`: tensors that autograd did not save, held so that others can be recomputed
- `compiled_calls`: compiled modules in a recorded forward
- `figures`: figures for `memkit.stats`

Regions: calls of modules that are recomputed as a whole, nothing recorded:

- `settling`: when a step need not be recorded any more
- `steady`: what is done in a step that is not recorded
- `layers`: all layers of a model, where steps never repeat
- `region_plan`: which calls become regions
- `regions`: hooks on their modules
- `region_calls`: one call, of which autograd keeps no saved tensors
- `region_inputs`: the inputs of a call, held until its recompute
- `recompute`: one recompute of a call
- `module_state`: parameters, buffers and training mode, which must be as they were
- `surroundings`: random number generators, autocast, grad mode, which must be as they were
- `read_only`: what is remembered of modules whose forward only reads their buffers
- `region_reasons`: why a module cannot be one
- `stacks`: looks at the stacks of frames and of saved-tensor hooks
"""
