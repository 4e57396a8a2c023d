"""A supernet with a random path each step, alone and under DDP: what fits under the cap, and whether 200 steps grow.

Each phase tells at once what it has found. Larger batches are tried last, while time is left.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from measuring import Engine, Workload, plain
from remat_cap import Capped, set_cap
from setting import TAG, Setting
from shared import Line
from torch import nn
from workloads import Supernet, supernet

import memkit

FIRST_MULTIPLE = 2.5
"""Of the plain batch: what is to be shown."""
LOWER_MULTIPLES = (2.0, 1.5, 1.0)
"""What is tried if it does not run."""
LARGER_MULTIPLES = (3.0, 0.5)
"""Where larger batches begin, and their distance."""
LARGER_UNTIL_S = 130.0
"""How long after the start of a bench larger batches are tried."""
STEPS_SCALES = (0.93, 0.8)
"""Budgets of the many steps, as parts of one that is known to work for a few."""
EARLY_STEP = 20
SPARE_S = 10.0
"""What is left over for the lines that end a bench."""
GROWING = (
    "allocated_bytes",
    "reserved_bytes",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "host_rss_bytes",
    "host_rss_peak_bytes",
    "live_records",
)


def supernet_alone(setting: Setting) -> Iterator[Line]:
    """A supernet with a random path each step."""
    set_cap(setting)
    yield from _supernet(setting, lambda model: model, num_copies=2)


def supernet_ddp(setting: Setting) -> Iterator[Line]:
    """The same under DDP, one process."""
    import torch.distributed as dist

    set_cap(setting)
    is_cuda = setting.device.torch_device.type == "cuda"
    where: dict[str, Any] = {"device_id": setting.device.torch_device} if is_cuda else {}
    dist.init_process_group("nccl" if is_cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1, **where)
    try:
        yield from _supernet(
            setting, lambda model: nn.parallel.DistributedDataParallel(model, find_unused_parameters=True), num_copies=3
        )
    finally:
        dist.destroy_process_group()


def _supernet(setting: Setting, wrap: Callable[[nn.Module], nn.Module], *, num_copies: int) -> Iterator[Line]:
    start = time.perf_counter()
    num_blocks = (1, 1, 2, 1) if setting.tiny else (4, 4, 8, 4)
    name = f"supernet of {sum(num_blocks)} blocks{'' if num_copies == 2 else ', DDP'}"
    model = setting.make(partial(Supernet, num_blocks=num_blocks))

    def make(batch: int) -> Workload:  # wrapped anew, since DDP does not work on after a step that has failed
        return supernet(wrap(model), sum(num_blocks), batch, setting.size)

    def has_time() -> bool:
        return time.perf_counter() - start < LARGER_UNTIL_S and setting.time_left_s() > 3 * SPARE_S

    search = Capped(setting, make, model, num_copies=num_copies, steps=4 if setting.tiny else 12, warmup=2)
    for phase, found in _phases(search, has_time):
        yield {"bench": phase, "name": name, **found, "since_start_s": time.perf_counter() - start}


def _phases(search: Capped, has_time: Callable[[], bool]) -> Iterator[tuple[str, Line]]:
    """Yield the name of each phase, and what it has found."""
    of_plain = search.find_plain(unit=1 if search.setting.tiny else 8)
    yield "remat_supernet_plain", of_plain
    if "error" in of_plain:
        return
    of_plain_steps = _plain_steps(search)
    yield "remat_supernet_plain_steps", of_plain_steps
    search.learn(search.plain_batch)
    first = first_that_runs(lambda batch: search.run(batch, search.more_budgets(batch), search.steps), search.plain_batch)
    beside_bytes = search.beside_bytes
    yield "remat_supernet", {**of_plain, **_to_plain(search, first), "beside_bytes_per_image": beside_bytes, "runs": [first]}
    if "error" in first:
        return
    for scale in STEPS_SCALES:
        found = _many_steps(search, first["batch"], int(scale * first["tries"][-1]["budget_bytes"]))
        if "per_image_s" in found and "per_image_s" in of_plain_steps:
            found["plain_per_image_s"] = of_plain_steps["per_image_s"]
            found["per_image_to_plain"] = found["per_image_s"] / of_plain_steps["per_image_s"]
        yield "remat_supernet_steps", {"plain_batch": search.plain_batch, **found}
        if "error" not in found:
            break
    if first["batch"] < int(FIRST_MULTIPLE * search.plain_batch):
        return
    best, ended = first, "no time was left"
    run = partial(_run_fast, search)
    for found in larger_that_run(run, search.plain_batch, has_time=has_time):
        if "error" in found:
            ended = f"batch {found['batch']}: {found['error']}"
        else:
            best = found
            yield "remat_supernet_larger", {**_to_plain(search, found), **found}
    yield "remat_supernet_largest", {**_to_plain(search, best), "ended": ended}


def _run_fast(search: Capped, batch: int) -> Line:
    """Return what a batch takes, with the budgets that are the likeliest to fit."""
    return search.run(batch, search.budgets(batch)[:2], search.steps)


def _to_plain(search: Capped, found: Line) -> Line:
    """Return how large a batch is beside the plain one; 0 if it has not run."""
    batch = 0 if "error" in found else found["batch"]
    return {"plain_batch": search.plain_batch, "memkit_batch": batch, "batch_to_plain": batch / search.plain_batch}


def first_that_runs(run: Callable[[int], Line], plain_batch: int) -> Line:
    """Return what a batch takes that runs: of the multiple to be shown, or else of a lower one.

    Args:
        run: tells what a batch takes, or its error.
    """
    found: Line = {}
    for multiple in (FIRST_MULTIPLE, *LOWER_MULTIPLES):
        found = run(int(multiple * plain_batch))
        if "error" not in found:
            break
    return found


def larger_that_run(run: Callable[[int], Line], plain_batch: int, *, has_time: Callable[[], bool]) -> Iterator[Line]:
    """Yield what larger and larger batches take, up to the first that does not run, while there is time."""
    for multiple in itertools.count(*LARGER_MULTIPLES):
        if not has_time():
            return
        found = run(int(multiple * plain_batch))
        yield found
        if "error" in found:
            return


def _num_steps(setting: Setting) -> int:
    return 30 if setting.tiny else 60 if setting.fast else 200


def _plain_steps(search: Capped) -> Line:
    """Train without memkit, for half as long: with the plain batch, or a smaller one should a path come that does not fit."""
    setting = search.setting
    num_steps = max(_num_steps(setting) // 2, EARLY_STEP + 5)
    found: Line = {}
    for batch in (search.plain_batch, 7 * search.plain_batch // 8):
        found = {"batch": batch, **_train(search, batch, plain, num_steps, setting.memory)}
        if "error" not in found:
            break
    return found


def _many_steps(search: Capped, batch: int, budget: int) -> Line:
    """Train for 200 steps within a budget."""
    setting = search.setting

    def look() -> Line:
        stats = memkit.stats(TAG)
        return {
            **setting.memory(),
            "live_records": stats.live_records,
            "live_bytes": stats.live_bytes,
            "num_deviations": stats.num_deviations,
            "num_dropped": stats.num_dropped,
        }

    found = _train(search, batch, setting.remat(budget, policy="ops"), _num_steps(setting), look)
    return {"batch": batch, "budget_bytes": budget, **found}


def _train(search: Capped, batch: int, engine: Engine, num_steps: int, look: Callable[[], Line]) -> Line:
    """Train with another path each step; say what is held after 20 steps and at the end. It ends early where the process would
    be ended.

    Args:
        look: tells what is held between two steps.
    """
    setting = search.setting
    workload: Workload = setting.make(lambda: search.make(batch))
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=1e-3)
    looks: dict[int, Line] = {}
    times_s: dict[int, float] = {}
    done = 0

    def step() -> float | None:
        """Return the loss, after the early step and after the last."""
        with engine():
            result = workload.forward()
        loss = workload.loss(result)
        del result
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)  # those of another path are of other sizes
        return loss.item() if done + 1 in (EARLY_STEP, num_steps) else None

    def train() -> Line:
        nonlocal done
        while done < num_steps:
            loss = step()
            done += 1
            is_last = done == num_steps or (done > EARLY_STEP and setting.time_left_s() < SPARE_S)
            if done == EARLY_STEP or is_last:
                setting.device.synchronize()
                times_s[done] = time.perf_counter()
                looks[done] = {**look(), "loss": loss}
            if done == EARLY_STEP:
                setting.reset_peak()
            if is_last:
                break
        return {}

    setting.reset_peak()
    error = setting.attempt(train)
    workload.model.zero_grad(set_to_none=True)
    found: Line = {"steps_done": done, **{f"after_{count}": what for count, what in looks.items()}, **error}
    if len(looks) == 2:
        (early, first), (last, second) = looks.items()
        seconds = (times_s[last] - times_s[early]) / (last - early)
        found |= {
            "step_s": seconds,
            "per_image_s": seconds / batch,
            "growth": {name: second[name] - first[name] for name in GROWING if name in first and name in second},
        }
    return found
