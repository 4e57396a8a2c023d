"""What ops a forward has run, remembered so that any of them can be run again, exactly.

Recording:

- `recorder`: the dispatch mode that records each op
- `recording`: `Recording`: ops with their inputs and outputs, and the roots that they start from
- `recorded`: one op, without its tensors
- `ops`: what an op does to its arguments: writes, aliases, random numbers, hidden state
- `effects`: recording ops that write to tensors, or of which nothing is known
- `roots`: tensors that a replay starts from
- `borders`: ends of sharded layers: nothing behind one is recomputed from what was before it
- `settings`: process-wide settings that change what an op computes (TF32, deterministic algorithms)
- `dispatch`: base of the recorder: a dispatch mode that Dynamo does not trace

Recording less:

- `expected`: ops that are known ahead, and that nothing will be recomputed from
- `functions`: torch's functions (`F.linear`) in which the recorder is off, since what they do is known
- `function_notes`: what is known of each of them

Modules:

- `trail`: which module an op ran in
- `module_calls`: calls of modules, and whether each could be run again as a whole
- `span_calls`: the same for neighboring children of a `Sequential`
- `aftermath`: which op read or wrote each value last: after a call, that may forbid running it again

Using a recording:

- `replay`: runs recorded ops again
- `steps`: a recording as the numbers that `plan/` works on
- `costs`: seconds of each op, measured or guessed
- `cost`: seconds that recording itself takes the host
"""
