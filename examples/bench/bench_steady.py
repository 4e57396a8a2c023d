"""What a steady step costs: all figures in one run, each part in a process of its own. Prints lines of JSON.

    python examples/bench/bench_steady.py                      # all on this machine's GPU, at most 9 minutes
    python examples/bench/bench_steady.py --only remat_gpt2 offload_gpt2
    python examples/bench/bench_steady.py --except flat

Seconds that each part is expected to take on an H200, in the order of the run; 510 in all, and 25 until all are ready:

    chain                6    797 storages of 256 KiB and of 1 MiB, all moved
    region               3    a region of two small ops, beside torch.utils.checkpoint
    remat_gpt2          36    budgets against the fewest evenly spaced checkpointed layers, and a budget of 1 over plain
    remat_whisper       32
    offload_gpt2        38    ratios over plain, and over what the link allows
    offload_whisper     26
    remat_llama         58
    remat_resnet50      33
    offload_resnet50    46
    offload_llama       60
    compiled            70    a Llama with compiled blocks, offloaded and recomputed, beside checkpointing by hand
    reserved            12    reserved over allocated where all moves, with expandable segments
    host                40    what the host takes on tiny inputs, four models
    flat                50    from a hundred storages to ten thousand; 250 with a hundred thousand, where there is time

How parts run, and what becomes of one that fails: see `parts.py`.
"""

from __future__ import annotations

import sys
from functools import partial

from bench_compiled import compiled_both
from bench_host import hosts
from host_chains import chain, flat
from host_region import region
from offload_ratios import offload_ratios, offload_reserved
from parts import Part, Script
from remat_spaced import remat_spaced

PARTS = {
    "chain": Part(run=chain, limit_s=40),
    "region": Part(run=region, limit_s=30),
    "remat_gpt2": Part(run=partial(remat_spaced, "gpt2"), limit_s=90),
    "remat_whisper": Part(run=partial(remat_spaced, "whisper"), limit_s=90),
    "offload_gpt2": Part(run=partial(offload_ratios, "gpt2"), limit_s=70),
    "offload_whisper": Part(run=partial(offload_ratios, "whisper"), limit_s=70),
    "remat_llama": Part(run=partial(remat_spaced, "llama"), limit_s=110),
    "remat_resnet50": Part(run=partial(remat_spaced, "resnet50"), limit_s=90),
    "offload_resnet50": Part(run=partial(offload_ratios, "resnet50"), limit_s=90),
    "offload_llama": Part(run=partial(offload_ratios, "llama"), limit_s=110),
    "compiled": Part(run=compiled_both, limit_s=150),
    "reserved": Part(run=offload_reserved, limit_s=50, environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    "host": Part(run=hosts, limit_s=120),
    "flat": Part(run=flat, limit_s=330),
}
SCRIPT = Script(path=__file__, parts=PARTS, about=__doc__, minutes=8.9)


if __name__ == "__main__":
    sys.exit(SCRIPT.main())
