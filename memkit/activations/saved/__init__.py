"""What every context does with saved tensors: entries, forwards, records, and the ledger of their bytes.

- `entry`: `Entry`: one `with` block, its pack hook, and the stages that a tensor goes through
- `forward`: one forward and its backwards: what it saved, and the order of requests
- `records`: `Record`: one saved storage and its residency; `Handle`: what autograd holds
- `ledger`: `Ledger`: every change of residency, and the copies that go with it
- `mending`: the ledger after an interrupt
- `state`: what a tag remembers from step to step
- `counts`: counters of one iteration
- `traces`: recognizes a forward that goes like an earlier one
- `op_trace`: what is known of a forward's ops: costs, module calls, plans
- `capture`: notes all saves of a forward, so that a schedule can be made of it
- `seen`: what of a save is compared when a forward follows a schedule
- `settled`: steps that are not recorded any more
- `trial`: which of two ways to keep to a budget is faster, measured
- `unasked`: the warning where no backward asks for what is saved
- `small`: the warning where no saved tensor is large enough
"""
