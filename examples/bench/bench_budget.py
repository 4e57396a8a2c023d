"""What `MemoryBudget` makes of a budget of the device: each part in a process of its own. Prints lines of JSON.

    python examples/bench/bench_budget.py                      # all on this machine's GPU, at most 6.5 minutes: not all fits
    python examples/bench/bench_budget.py --only resnet50 llama
    python examples/bench/bench_budget.py --except others

Seconds that each part is expected to take on an H200, in the order of the run; 1570 in all, and 20 until all are ready:

    resnet50            68    at 12981, 10509, 8748 and 6396 MiB, beside `Rematerialize`; all blocks checkpointed
    llama              124    batch 8 at 14323, 8594 and 6164 MiB, batch 4 at 7616 and 4570; all layers checkpointed
    gpt2                74    at 75, 50 and 42 % of the plain peak, beside the fewest evenly spaced checkpointed layers
    whisper             79
    fits                54    a budget that keeps all, and one within the free link, over plain
    cap                130    the allocator capped at 1.10 of the budget, AdamW, attached: 30 steps from the first on
    others             180    predicted beside actual: eight models at .8 .5 .3 of their peak
    compiled_llama     150    the Llama with compiled blocks at 73, 48, 39 and 26 % of its eager peak, beside mixes by hand
    compiled_resnet50  200    the same of ResNet-50, at 70, 50 and 35 %
    front_resnet50     120    what else lowers the peak, and budgets at the peaks of the best of it; compiled as a whole
    front_llama        150
    front_gpt2          90
    front_whisper       90
    changes             60    another process takes half of the link; sequences become longer

How parts run, and what becomes of one that fails: see `parts.py`. In every part the allocator has expandable segments.
"""

from __future__ import annotations

import sys
from functools import partial

from budget_cap import cap
from budget_changes import changes
from budget_compiled import compiled
from budget_fronts import fronts
from budget_parts import beside_spaced, fits, llama, others, resnet50
from parts import Part, Script

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
PARTS = {
    "resnet50": Part(run=resnet50, limit_s=150, environment=EXPANDABLE),
    "llama": Part(run=llama, limit_s=200, environment=EXPANDABLE),
    "gpt2": Part(run=partial(beside_spaced, "gpt2"), limit_s=120, environment=EXPANDABLE),
    "whisper": Part(run=partial(beside_spaced, "whisper"), limit_s=120, environment=EXPANDABLE),
    "fits": Part(run=fits, limit_s=90, environment=EXPANDABLE),
    "cap": Part(run=cap, limit_s=200, environment=EXPANDABLE),
    "others": Part(run=others, limit_s=240, environment=EXPANDABLE),
    "compiled_llama": Part(run=partial(compiled, "llama"), limit_s=300, environment=EXPANDABLE),
    "compiled_resnet50": Part(run=partial(compiled, "resnet50"), limit_s=300, environment=EXPANDABLE),
    "front_resnet50": Part(run=partial(fronts, "resnet50"), limit_s=200, environment=EXPANDABLE),
    "front_llama": Part(run=partial(fronts, "llama"), limit_s=240, environment=EXPANDABLE),
    "front_gpt2": Part(run=partial(fronts, "gpt2"), limit_s=150, environment=EXPANDABLE),
    "front_whisper": Part(run=partial(fronts, "whisper"), limit_s=150, environment=EXPANDABLE),
    "changes": Part(run=changes, limit_s=120, environment=EXPANDABLE),
}
SCRIPT = Script(path=__file__, parts=PARTS, about=__doc__, minutes=6.5)


if __name__ == "__main__":
    sys.exit(SCRIPT.main())
