"""A training that torchrun starts, in which one rank fails: run by test_failures."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta

import torch.distributed as dist

import memkit
from tests.distributed.cases import make, optimizer_of, step


def main() -> None:
    how = sys.argv[1]
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    rank = dist.get_rank()
    if how == "before" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    model = memkit.shard(make())
    optimizer = optimizer_of(model)
    for number in range(4):
        if number == 2 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        step(model, rank, number)
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {rank} has made step {number}", flush=True)


if __name__ == "__main__":
    main()
