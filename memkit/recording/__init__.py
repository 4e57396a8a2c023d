"""Record the ops of a forward, so that any of them can be run again with exactly the same result.

- `recorder`: the dispatch mode that records each op
- `recording`: ops with their inputs and outputs, and the roots that they start from; as a step for `plan/`
- `recorded`: one op, without its tensors
- `ops`: writes, aliases, random numbers and hidden state of each op
- `borders`: ends of sharded layers: nothing after one is recomputed from values before it
- `expected`: ops that are known ahead and need not be recorded
- `module_calls`: the module of each op, and which calls could run again as a whole
- `replay`: runs recorded ops again
- `cost`: seconds of each op, and of recording
"""
