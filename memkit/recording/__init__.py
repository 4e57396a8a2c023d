"""Recordings of the ops that a forward has run, so that any of them can be run again with exactly the same result.

Recording:

- `recorder`: the dispatch mode that records each op
- `recording`: `Recording`: ops with their inputs and outputs, and the roots that they start from
- `recorded`: one op, without its tensors
- `ops`: what an op does to its arguments: writes, aliases, random numbers, hidden state
- `effects`: records ops that write to tensors, and unknown ones
- `roots`: tensors that a replay starts from
- `borders`: marks ends of sharded layers: nothing after one is recomputed from values before it
- `settings`: process-wide settings that change what an op computes (TF32, deterministic algorithms)
- `dispatch`: base of the recorder: a dispatch mode that Dynamo does not trace

Recording less:

- `expected`: ops that are known ahead, and that nothing will be recomputed from
- `functions`: torch's functions (`F.linear`) during which the recorder is off, since what they do is known
- `function_notes`: notes what each of them does

Modules:

- `trail`: in which module an op ran
- `module_calls`: calls of modules, and whether each could be run again as a whole
- `span_calls`: the same for neighboring children of a `Sequential`
- `aftermath`: reads and writes after a module call that may forbid running it again

Using a recording:

- `replay`: runs recorded ops again
- `steps`: turns a recording into the numbers that `plan/` works on
- `costs`: seconds of each op, measured or guessed
- `cost`: seconds that recording itself takes the host
"""
