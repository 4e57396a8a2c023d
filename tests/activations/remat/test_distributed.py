"""Under data parallelism: gradients are those of the same parallel run without the context, bit for bit."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import memkit
from memkit.device import CpuDevice
from tests.activations.cases import assert_same_bits
from tests.activations.test_distributed import _train


class Paths(nn.Module):
    """Blocks of which each rank takes another half in each step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Linear(64, 32))
            for _ in range(4)
        )
        self.num_steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_steps += 1
        for number, block in enumerate(self.blocks):
            if (number + self.num_steps + dist.get_rank()) % 2 or number == 0:
                x = x + block(x)
        return x


class Straight(Paths):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def _two_processes(rank: int, folder: str, failures: mp.SimpleQueue) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    try:
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(rank))
        for build, options in (
            (Straight, {}),
            (Straight, {"static_graph": True}),
            (Straight, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.01}),
            (Paths, {"find_unused_parameters": True}),
        ):
            plain = _train(DistributedDataParallel(build(), **options), x)
            for policy in ("plan", "dtr"):
                context = functools.partial(memkit.Rematerialize, 16000, "ddp", policy=policy, min_bytes=0, device=CpuDevice())
                found = _train(DistributedDataParallel(build(), **options), x, context)
                stats = memkit.stats("ddp")
                memkit.reset("ddp")

                assert_same_bits(found, plain)
                assert stats.num_replays > 0
                assert stats.live_records == 0
    except BaseException as error:
        failures.put(f"rank {rank}: {error!r}")
        raise
    finally:
        dist.destroy_process_group()


def test_distributed_data_parallel_in_two_processes(tmp_path: Path) -> None:
    failures = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_two_processes, (str(tmp_path), failures), nprocs=2)

    assert failures.empty()
