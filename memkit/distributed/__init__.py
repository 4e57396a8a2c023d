"""Several devices: `shard` splits a model between the processes of a group. The engine is FSDP2's."""

from memkit.distributed.sharding import shard

__all__ = ["shard"]
