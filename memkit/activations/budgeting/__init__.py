"""Keep, offload and recompute under one budget of the device: what `MemoryBudget` does."""
