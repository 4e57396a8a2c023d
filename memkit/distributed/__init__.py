"""Several devices: `shard` splits a model between the processes of a group. The engine is FSDP2's.

- `sharding`: `shard`: its refusals, the modules that FSDP2 wraps, and their prefetch order
- `host_shards`: shards in host memory: each layer's is copied to a device buffer one layer ahead of its gather
"""

from memkit.distributed.sharding import shard

__all__ = ["shard"]
