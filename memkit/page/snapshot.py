"""A step as a memory snapshot of CUDA's allocator, for PyTorch's memory viewer.

Source: `torch.cuda.memory._snapshot`, whose docstring lists the fields; `torch.cuda._memory_viz`.
"""

from __future__ import annotations

import os
import pickle
from bisect import bisect_left
from collections.abc import Sequence
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from memkit.core.sizes import ALIGNMENT_BYTES, rounded
from memkit.page.document import CATEGORIES, Memory, Report, Storage, memory_of

_BEGIN = 2**36
_PER_MOMENT_US = 1000


def write_snapshot(report: Report, path: str | os.PathLike[str]) -> None:
    Path(path).write_bytes(pickle.dumps(snapshot_of(report), protocol=4))  # the viewer reads no newer protocol


def snapshot_of(report: Report) -> dict[str, Any]:
    """Return the step of a report in the format of `torch.cuda.memory._snapshot` (hence Any), with op and module as frames."""
    memory = memory_of(report)
    if memory is None:
        raise ValueError(
            "a snapshot needs a report that knows the step moment by moment; found one without. Profile with "
            'profile_memory(model, ..., device="meta", backward=True)'
        )
    storages = [storage for storage in memory.storages if storage.num_bytes > 0 and storage.begin < storage.end]
    addresses, total_bytes = _placed(storages)
    segment = {
        "device": 0,
        "address": _BEGIN,
        "total_size": total_bytes,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": True,
        "frames": [],
    }
    blocks = _blocks(storages, addresses, len(memory.moments), total_bytes)
    active = [block for block in blocks if block["state"] == "active_allocated"]
    size = sum(block["size"] for block in active)
    sizes = {"allocated_size": size, "active_size": size, "requested_size": sum(block["requested_size"] for block in active)}
    return {
        "segments": [{**segment, **sizes, "blocks": blocks}],
        "device_traces": [_events(memory, storages, addresses, segment)],
        "allocator_settings": {"expandable_segments": True},
        "external_annotations": [],
    }


def _rounded(storage: Storage) -> int:
    return rounded(storage.num_bytes, ALIGNMENT_BYTES)


def _frames(storage: Storage) -> list[dict[str, Any]]:
    category = storage.category.value
    return [
        {"name": storage.what, "filename": CATEGORIES.get(category, (category,))[0], "line": 0},
        {"name": storage.module or "(model)", "filename": "module", "line": 0},
    ]


def _placed(storages: Sequence[Storage]) -> tuple[list[int], int]:
    """Return an address for each storage, so that none overlap at any time, and the size of the address range."""
    addresses, end = [0] * len(storages), _BEGIN
    gaps, ending = list[tuple[int, int]](), list[tuple[int, int]]()
    for index in sorted(range(len(storages)), key=lambda index: storages[index].begin):
        while ending and ending[0][0] <= storages[index].begin:
            _, gone = heappop(ending)
            _free(gaps, addresses[gone], addresses[gone] + _rounded(storages[gone]))
        size = _rounded(storages[index])
        room, address, stop = min(((stop - at, at, stop) for at, stop in gaps if stop - at >= size), default=(0, end, end))
        if room:
            place = bisect_left(gaps, (address, stop))
            gaps[place : place + 1] = [(address + size, stop)] if room > size else []
        else:
            end += size
        addresses[index] = address
        heappush(ending, (storages[index].end, index))
    return addresses, end - _BEGIN


def _free(gaps: list[tuple[int, int]], begin: int, stop: int) -> None:
    """Add a gap to those known, which are in order, and join it with its neighbors."""
    first = last = bisect_left(gaps, (begin, stop))
    if last < len(gaps) and gaps[last][0] == stop:
        stop, last = gaps[last][1], last + 1
    if first and gaps[first - 1][1] == begin:
        begin, first = gaps[first - 1][0], first - 1
    gaps[first:last] = [(begin, stop)]


def _blocks(storages: Sequence[Storage], addresses: Sequence[int], num_moments: int, total_bytes: int) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    reached = _BEGIN
    for address, storage in sorted(zip(addresses, storages, strict=True), key=lambda pair: pair[0]):
        if storage.end < num_moments:
            continue
        if address > reached:
            blocks.append(_block(reached, address - reached))
        known = {"state": "active_allocated", "requested_size": storage.num_bytes, "frames": _frames(storage)}
        blocks.append(_block(address, _rounded(storage), **known))
        reached = address + _rounded(storage)
    if reached < _BEGIN + total_bytes:
        blocks.append(_block(reached, _BEGIN + total_bytes - reached))
    return blocks


def _block(address: int, size: int, **known: Any) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": 0, "state": "inactive", "frames": [], **known}


def _events(
    memory: Memory, storages: Sequence[Storage], addresses: Sequence[int], segment: dict[str, Any]
) -> list[dict[str, Any]]:
    opened = {
        "action": "segment_alloc",
        "addr": _BEGIN,
        "size": segment["total_size"],
        "stream": 0,
        "time_us": 0,
        "frames": [],
        "category": "unknown",  # the viewer needs this category if there are any
    }
    timed: list[tuple[int, int, int]] = []
    for index, storage in enumerate(storages):
        timed.append((storage.begin, 1, index))
        if storage.end < len(memory.moments):
            timed.append((storage.end, 0, index))
    events = [opened]
    for moment, is_begin, index in sorted(timed):
        storage = storages[index]
        told = {
            "addr": addresses[index],
            "size": _rounded(storage),
            "stream": 0,
            "time_us": (moment + 1) * _PER_MOMENT_US,
            "frames": _frames(storage),
        }
        category = storage.category.value
        names = ("alloc",) if is_begin else ("free_requested", "free_completed")
        events += [{"action": name, **told, "category": category} for name in names]
    return events
