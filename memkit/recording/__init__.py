"""Recordings of the ops that a forward has run, so that any of them can be run again with exactly the same result.

- `recorder`: the dispatch mode that records each op; Dynamo does not trace it
- `recording`: `Recording`: ops with their inputs and outputs, and the roots that they start from; as a step for `plan/`
- `recorded`: one op, without its tensors
- `ops`: what an op does to its arguments: writes, aliases, random numbers, hidden state
- `borders`: marks ends of sharded layers: nothing after one is recomputed from values before it
- `expected`: ops that are known ahead, and that nothing will be recomputed from
- `functions`: torch's functions (`F.linear`) during which the recorder is off, since what they do is known
- `module_calls`: in which module an op ran; calls of modules, and whether each could be run again as a whole
- `replay`: runs recorded ops again, under the settings of the forward (TF32, deterministic algorithms)
- `cost`: seconds of each op, measured or guessed, and of recording
"""
