"""What `memkit bench` runs: training steps, timed beside plain PyTorch and its own means."""

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
