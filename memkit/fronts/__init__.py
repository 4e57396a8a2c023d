"""What `memkit plan` shows: time against peak memory of a step, planned for a GPU that need not be there.

- `command`: what `memkit plan` does
- `front`: `Front`: step time against peak, as one value
- `rows`: makes it: a plan for each budget
- `checkpoints`: activation checkpointing of some blocks, to compare with
- `batches`: the largest batch that fits
- `ranks`: what one rank takes of a split model
- `table`: a front as text
- `picture`: a front as a picture
"""

from memkit.fronts.front import CheckpointedBlocks, Front, FrontRow, LargestBatch

__all__ = ["CheckpointedBlocks", "Front", "FrontRow", "LargestBatch"]
