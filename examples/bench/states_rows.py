"""`StateOffload` on one Llama: each place where states are stepped, beside the plain step, and what the machine allows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from setting import Setting, say
from shared import Line
from states_steps import (
    BYTES_PER_ELEMENT,
    LR,
    Loop,
    memkit_line,
    plain_line,
    states_offloaded,
    timed,
    told,
    trained_llama,
)

import memkit
from memkit.cli.machine import REHEARSAL, WHOLE, HostUpdates
from memkit.transfer import measure_link
from memkit.transfer.lanes import measure_both_ways

ROWS: dict[str, dict] = {
    "device": {"update": "device", "clips": True},
    "device, within the backward": {"update": "device", "when": "backward", "clips": False},
    "device, beside the next forward": {"update": "device", "overlap_forward": True, "clips": True},
    "device, half stays": {"update": "device", "clips": True, "share": 0.5},
    "device, three quarters stay": {"update": "device", "clips": True, "share": 0.75},
    "host": {"update": "host", "clips": True},
}
NUM_MICRO = 8
NUM_MICRO_STEPS = 2


def rates(setting: Setting) -> Line:
    """Return what this machine's link and host can do, as `memkit bench machine` measures it."""
    device = setting.device
    num_bytes = 2**20 if setting.tiny else 2**28
    link, both = measure_link(device, num_bytes=num_bytes), measure_both_ways(device, num_bytes=num_bytes)
    updates = HostUpdates(REHEARSAL if setting.tiny else WHOLE)
    alone, casts = updates.measure(casts=False), updates.measure(casts=True)
    shared_updates, shared_bytes = updates.measure_beside_copies(device, both)
    found = {
        "d2h_bytes_per_s": link.d2h_bytes_per_s,
        "h2d_bytes_per_s": link.h2d_bytes_per_s,
        "both_bytes_per_s": both,
        "host_updates_per_s": alone,
        "host_cast_updates_per_s": casts,
        "shared_updates_per_s": shared_updates,
        "shared_bytes_per_s": shared_bytes,
    }
    say(f"rates: {found}")
    return found


def states(setting: Setting) -> Iterator[Line]:
    """All states out, some of them, on the device, on the host and on both."""
    machine = rates(setting)
    yield {"bench": "states_machine", **machine}
    trained = trained_llama(setting)
    about = {"bench": "states", "model": trained.workload.name, "numel": trained.numel}
    for clips in (True, False):
        name = "plain" if clips else "plain, without clipping"
        yield {**about, "row": name, **told(name, setting.attempt(partial(plain_line, trained, setting, clips=clips)))}
    state_bytes = BYTES_PER_ELEMENT * trained.numel
    for name, options in ROWS.items():
        asked = dict(options)
        share = asked.pop("share", 0.0)
        if share:
            asked["device_budget"] = int(share * state_bytes)
        yield {**about, "row": name, **told(name, setting.attempt(partial(memkit_line, trained, setting, **asked)))}


def micro(setting: Setting) -> Iterator[Line]:
    """Eight micro-batches for each step, with clipping."""
    trained = trained_llama(setting, num_micro=2 if setting.tiny else NUM_MICRO)
    about = {"bench": "states_micro", "model": trained.workload.name, "numel": trained.numel, "num_micro": trained.num_micro}
    steps = {"clips": True, "num_steps": NUM_MICRO_STEPS}
    yield {**about, "row": "plain", **told("plain", setting.attempt(partial(plain_line, trained, setting, **steps)))}
    name, options = "device, beside the next forward", {"update": "device", "overlap_forward": True}
    yield {**about, "row": name, **told(name, setting.attempt(partial(memkit_line, trained, setting, **steps, **options)))}


def nothing(setting: Setting) -> Iterator[Line]:
    """A budget that all states fit in: the optimizer steps by itself."""
    trained = trained_llama(setting, num_layers=8)
    about = {"bench": "states_nothing", "model": trained.workload.name, "numel": trained.numel}

    def plain() -> Line:
        optimizer = torch.optim.AdamW(trained.parameters, lr=LR, fused=True)
        return timed(trained, Loop(update=optimizer.step), setting, num_steps=20)

    def offloaded() -> Line:
        optimizer = torch.optim.AdamW(trained.parameters, lr=LR, fused=True)
        with memkit.StateOffload(optimizer, device_budget="100GiB", device=setting.device):
            return timed(trained, Loop(update=optimizer.step), setting, num_steps=20)

    for name, run in (("plain", plain), ("all stays", offloaded), ("plain again", plain)):
        yield {**about, "row": name, **told(name, setting.attempt(run))}
        trained.clear()


def on_disk(setting: Setting) -> Iterator[Line]:
    """20 GB of states on a disk, three steps, beside what the disk reads and writes."""
    import os
    import tempfile

    from memkit.cli.machine import measure_disk

    folder = os.environ.get("MEMKIT_BENCH_DISK") or tempfile.gettempdir()
    disk = memkit.Disk(folder)
    trained = trained_llama(setting, num_layers=13)
    about = {"bench": "states_disk", "numel": trained.numel, "state_bytes": BYTES_PER_ELEMENT * trained.numel}
    read, written = measure_disk(disk, setting.device, REHEARSAL if setting.tiny else WHOLE)
    plain = setting.attempt(partial(plain_line, trained, setting, clips=True))
    yield {**about, "row": "plain", "read_bytes_per_s": read, "written_bytes_per_s": written, **told("plain", plain)}

    def offloaded() -> Line:
        before = setting.memory()["host_rss_bytes"]
        with states_offloaded(trained, setting, disk=disk) as states:
            loop = Loop(update=states.optimizer.step, clip=trained.clip)
            found = timed(trained, loop, setting, num_steps=3, num_warm=1)
        return {**found, "host_rss_before_bytes": before}

    yield {**about, "row": "disk", **told("disk", setting.attempt(offloaded))}
