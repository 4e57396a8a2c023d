"""The common base of contexts for saved tensors: entries, forwards, records, and the ledger of their bytes.

- `entry`: `Entry`: one `with` block, its pack hook, and the stages that a tensor goes through
- `records`: `Record`: one saved storage; `Handle`: held by autograd; `Ledger`: every change; `Forward`: the saves of one
- `state`: memory under a tag
- `counts`: counters of one iteration
- `traces`: recognizes a forward that goes like an earlier one
- `settled`: steps that are not recorded any more, and which of two ways is faster
"""
