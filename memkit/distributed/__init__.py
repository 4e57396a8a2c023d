"""Several devices: `shard` splits a model between the processes of a group. The engine is FSDP2's.

- `sharding`: `shard`: its refusals, the modules that FSDP2 wraps, their prefetch order; shards in host memory, one layer ahead
"""

from memkit.distributed.sharding import shard

__all__ = ["shard"]
