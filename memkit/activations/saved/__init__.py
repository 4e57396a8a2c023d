"""What every context does with saved tensors: entries, forwards, records, and the ledger of their bytes.

- `entry`: `Entry`: one `with` block, its pack hook, and the stages that a tensor goes through
- `forward`: one forward and its backwards: what it saved, and the order of requests
- `records`: `Record`: one saved storage and its residency; `Handle`: what autograd holds
- `ledger`: `Ledger`: every change of residency, and the copies that go with it
- `state`: what a tag remembers from step to step
- `counts`: counters of one iteration
- `traces`: recognizes a forward that goes like an earlier one; what is known of its saves and ops
- `settled`: steps that are not recorded any more, and which of two ways is faster
"""
