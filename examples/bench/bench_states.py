"""What a step takes with optimizer states on the host or on a disk: all figures beside plain steps. Prints lines of JSON.

    python examples/bench/bench_states.py                      # all on this machine's GPU, at most 9 minutes
    python examples/bench/bench_states.py --only states micro
    python examples/bench/bench_states.py --wheels wheels --only peer_torchao peer_deepspeed

A Llama of 3.37 billion parameters with embedding and head, bfloat16, batch 4 x 2048, a checkpoint around each layer, stepped by
AdamW in float32. Parts:

    states          states out, all or some; on the device, within the backward, beside the forward, on the host, on both
    micro           eight micro-batches for each step
    nothing         all states stay
    streamed        every layer streams with all states, stepped within the backward; then stepped on the host
    capped          6.7 billion parameters, all of which stream so, under a cap of 24 GiB
    compared        four layers of these: the losses under the cap are those of plain steps
    disk            20 GB of states on a disk
    peer_*          by hand, torchao, FSDP2, DeepSpeed: see `states_peers.py`

How parts run, and what becomes of one that fails: see `parts.py`.
"""

from __future__ import annotations

import sys

from parts import Part, Script
from states_layers import capped, compared, streamed
from states_peers import by_hand, deepspeed, fsdp, torchao
from states_rows import micro, nothing, on_disk, states

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
PARTS = {
    "states": Part(run=states, limit_s=320, environment=EXPANDABLE),
    "micro": Part(run=micro, limit_s=150, environment=EXPANDABLE),
    "nothing": Part(run=nothing, limit_s=40, environment=EXPANDABLE),
    "streamed": Part(run=streamed, limit_s=150, environment=EXPANDABLE),
    "capped": Part(run=capped, limit_s=200, environment=EXPANDABLE),
    "compared": Part(run=compared, limit_s=90, environment={**EXPANDABLE, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}),
    "disk": Part(run=on_disk, limit_s=200, environment=EXPANDABLE),
    "peer_by_hand": Part(run=by_hand, limit_s=90),
    "peer_torchao": Part(run=torchao, limit_s=150),
    "peer_fsdp": Part(run=fsdp, limit_s=120),
    "peer_deepspeed": Part(run=deepspeed, limit_s=200),
}
SCRIPT = Script(path=__file__, parts=PARTS, about=__doc__, minutes=8.9)


if __name__ == "__main__":
    sys.exit(SCRIPT.main())
