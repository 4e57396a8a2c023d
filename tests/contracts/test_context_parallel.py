"""Under data parallelism: the gradients of the same parallel run without the context, bit for bit."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import memkit
from memkit.device import CpuDevice, Device, ReferenceDevice
from tests.activations.cases import assert_same_bits
from tests.activations.remat.conftest import NO_PLAN_FITS
from tests.activations.test_distributed import train_in_micro_batches
from tests.contracts.contexts import KINDS, Kind

pytestmark = pytest.mark.filterwarnings(NO_PLAN_FITS)


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
            if self.is_taken(number):
                x = x + block(x)
        return x

    def is_taken(self, number: int) -> bool:
        return number == 0 or (number + self.num_steps + dist.get_rank()) % 2 == 1


class Straight(Paths):
    def is_taken(self, number: int) -> bool:
        return True


RUNS: list[tuple[type[Paths], dict[str, Any]]] = [
    (Straight, {}),
    (Straight, {"static_graph": True}),
    (Straight, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.01}),
    (Paths, {"find_unused_parameters": True}),
]


def _device(kind: Kind, number: int) -> Device:
    """Return another one in each run."""
    devices = [ReferenceDevice(), ReferenceDevice(seed=0), *[CpuDevice()] * kind.on_cpu]
    return devices[number % len(devices)]


def _two_processes(rank: int, folder: str, failures: mp.SimpleQueue) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    try:
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(rank))
        for number, (build, options) in enumerate(RUNS):
            plain = train_in_micro_batches(DistributedDataParallel(build(), **options), x)
            for name, kind in [*KINDS.items()][number % 2 :: 2]:
                device = _device(kind, number)
                made = functools.partial(kind.make, device, name)
                found = train_in_micro_batches(DistributedDataParallel(build(), **options), x, made)
                device.synchronize()

                assert_same_bits(found, plain)
                assert kind.num_acts(name) > 0, name
                assert kind.num_live(name) == 0, name
                memkit.reset(name)
    except BaseException as error:
        failures.put(f"rank {rank}: {error!r}")
        raise
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_distributed_data_parallel_in_two_processes(tmp_path: Path) -> None:
    failures = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_two_processes, (str(tmp_path), failures), nprocs=2)

    assert failures.empty()
