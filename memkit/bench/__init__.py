"""What `memkit bench` runs: training steps, timed beside plain PyTorch and its own means.

- `offload`: `memkit bench offload`
- `remat`: `memkit bench remat`
- `layers`: `memkit bench layers`
- `layer_rows`: its results
- `machine`: `memkit bench machine`: GPU, link, host and disk
- `host`: optimizer steps and disk speed of the host
- `measure`: seconds and peak of a step: the median of several runs
- `engines`: plain PyTorch and its own offload, to compare with
- `curves`: what the tables and pictures share
"""

from memkit.bench.layer_rows import LayerBench, LayerRow
from memkit.bench.layers import bench_layers, freeze_layers, measure_ratio
from memkit.bench.measure import Measurement, Workload, measure, sum_of_outputs
from memkit.bench.offload import OffloadBench, OffloadRow, bench_offload, predict_offload
from memkit.bench.remat import RematBench, RematRow, bench_remat

__all__ = [
    "LayerBench",
    "LayerRow",
    "Measurement",
    "OffloadBench",
    "OffloadRow",
    "RematBench",
    "RematRow",
    "Workload",
    "bench_layers",
    "bench_offload",
    "bench_remat",
    "freeze_layers",
    "measure",
    "measure_ratio",
    "predict_offload",
    "sum_of_outputs",
]
