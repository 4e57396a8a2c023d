"""What `memkit bench` runs: training steps, timed beside plain PyTorch and others. Peers are imported only when asked for."""

from memkit.bench.measure import Measurement, Workload, measure, sum_of_outputs
from memkit.bench.offload import OffloadBench, OffloadRow, bench_offload, predict_offload

__all__ = [
    "Measurement",
    "OffloadBench",
    "OffloadRow",
    "Workload",
    "bench_offload",
    "measure",
    "predict_offload",
    "sum_of_outputs",
]
