"""What `memkit plan` shows: time against peak memory of a step, planned for a GPU that need not be there."""

from memkit.fronts.front import CheckpointedBlocks, Front, FrontRow, LargestBatch

__all__ = ["CheckpointedBlocks", "Front", "FrontRow", "LargestBatch"]
