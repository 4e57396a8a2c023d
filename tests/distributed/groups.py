"""Groups of processes for tests: real ones over gloo, and one process that takes itself for one of several."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.testing._internal.distributed.fake_pg import FakeStore

Work = Callable[[str], object]
"""Is given a folder that all ranks share; raises where something is wrong, and may return what can be pickled."""
TIMEOUT = timedelta(seconds=20)


@contextmanager
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_group(num_ranks: int, rank: int = 0) -> Iterator[None]:
    """What others would send is undefined: only sizes can be looked at."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _one(rank: int, num_ranks: int, folder: str, works: Mapping[str, Work], results: mp.SimpleQueue) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=num_ranks, timeout=TIMEOUT)
    for name, work in works.items():
        try:
            results.put((name, rank, None, work(folder)))
        except BaseException:
            results.put((name, rank, traceback.format_exc(), None))
    dist.destroy_process_group()


def run_ranks(num_ranks: int, folder: str, works: Mapping[str, Work]) -> dict[str, dict[int, tuple[str | None, object]]]:
    """Run functions one after the other on every rank, in one start of all processes.

    Returns:
        By name and rank: the traceback of what was raised, and what was returned.
    """
    results = mp.get_context("spawn").SimpleQueue()
    context = mp.spawn(_one, (num_ranks, folder, works, results), nprocs=num_ranks, join=False)
    found: dict[str, dict[int, tuple[str | None, object]]] = {name: {} for name in works}
    for _ in range(num_ranks * len(works)):
        name, rank, error, value = results.get()
        found[name][rank] = (error, value)
    context.join()
    return found
