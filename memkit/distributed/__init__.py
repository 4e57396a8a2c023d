"""Several devices: `shard` splits a model between the processes of a group. The engine is FSDP2's.

- `sharding`: `shard`: which modules FSDP2 wraps, and their prefetch order
- `checks`: what `shard` refuses before it changes anything
- `host_shards`: shards in host memory: each layer's is copied to the device one layer ahead of its gather
- `host_layers`: where one layer's shard lies in host memory, and the device buffers
"""

from memkit.distributed.sharding import shard

__all__ = ["shard"]
