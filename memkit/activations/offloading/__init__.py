"""Move saved tensors to host memory and back.

- `moving_stage`: decides about each saved tensor under a ratio, and when a forward may follow a schedule
- `window`: save by save: when device memory is freed, and what is fetched ahead
- `scheduled`: `Schedule`: the actions due at each save and each request; a forward that follows one, and its backwards
"""
