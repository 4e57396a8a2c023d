"""Groups of processes for tests: real ones over gloo, and one process that takes itself for one of several."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests import planned

Work = Callable[[str], object]
"""Is given a folder that all ranks share; raises where something is wrong, and may return what torch saves."""
TIMEOUT = timedelta(seconds=120)
"""For one rank to wait for another, which may compile meanwhile, beside other tests on the same two cores."""


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


Found = dict[str, list[Any]]
"""By name, what each rank has returned, or the traceback of what it has raised as a `Failed`."""


class Failed(str):
    """A traceback."""


def _one(rank: int, num_ranks: int, folder: str, works: Mapping[str, Work]) -> None:
    torch.set_num_threads(1)
    path = Path(folder)
    store = f"file://{path / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks, timeout=TIMEOUT)
    outcomes = {}
    with pytest.MonkeyPatch.context() as patch:
        planned.look_once(patch)
        for name, work in works.items():
            try:
                outcomes[name] = (None, work(folder))
            except BaseException:
                outcomes[name] = (traceback.format_exc(), None)
    torch.save(outcomes, path / f"outcomes of {rank}")
    dist.destroy_process_group()


def run_ranks(num_ranks: int, folder: str, works: Mapping[str, Work]) -> Found:
    """Run functions one after the other on every rank, in one start of all processes."""
    mp.spawn(_one, (num_ranks, folder, works), nprocs=num_ranks)
    ranks = [torch.load(Path(folder) / f"outcomes of {rank}") for rank in range(num_ranks)]
    return {name: [Failed(rank[name][0]) if rank[name][0] else rank[name][1] for rank in ranks] for name in works}
