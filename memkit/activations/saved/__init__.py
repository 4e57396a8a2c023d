"""The common base of contexts for saved tensors: entries, forwards, records, and the ledger of their bytes.

- `entry`: `Entry`: one `with` block, its pack hook, and the stages that a tensor goes through
- `forward`: one forward and its backwards: its saves, and the order of requests
- `records`: `Record`: one saved storage and its residency; `Handle`: held by autograd
- `ledger`: `Ledger`: every change of residency, and the copies that go with it
- `state`: memory under a tag
- `counts`: counters of one iteration
- `traces`: recognizes a forward that goes like an earlier one
- `settled`: steps that are not recorded any more, and which of two ways is faster
"""
