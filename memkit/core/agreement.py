"""Raises an error of one rank on every rank, so that no rank waits for one that has raised."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
import torch.distributed as dist

from memkit.errors import ShardError, note_on

_Value = TypeVar("_Value")
_FINE = torch.iinfo(torch.int64).max


def together(
    work: Callable[[], _Value], describe: Callable[[_Value], Iterable[object]], *, doing: str, feature: str = "shard"
) -> _Value:
    """Run `work` on every rank; raise its error, or ShardError if another rank raised or gives another result by `describe`."""
    value: _Value | None = None
    raised: Exception | None = None
    digest = 0
    try:
        value = work()
        text = "\n".join(map(repr, describe(value)))
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 2  # 62 bits fit int64 with either sign
    except ShardError:  # all ranks have agreed on it
        raise
    except Exception as error:
        raised = error
    agree(raised, digest, doing=doing, feature=feature)
    return value  # type: ignore[return-value]  # it was returned, or else this has raised


def agree(raised: Exception | None = None, digest: int = 0, *, doing: str, feature: str) -> None:
    """Wait for every rank. If one passes an exception or another digest, raise: its own there, a ShardError on the others."""
    rank = dist.get_rank()
    try:
        if dist.get_backend() == dist.Backend.GLOO:  # it can name a rank that didn't come within its timeout
            dist.monitored_barrier(wait_all_ranks=True)
        found = torch.tensor([_FINE if raised is None else rank, digest, -digest], device=_device())
        dist.all_reduce(found, op=dist.ReduceOp.MIN)
        first, least, greatest = found.tolist()
        sent = ["" if raised is None else f"{type(raised).__name__}: {raised}"]
        if first != _FINE:
            dist.broadcast_object_list(sent, first, device=_device())
    except (RuntimeError, ValueError) as error:
        if raised is not None:
            raise raised from None
        raise ShardError(
            f"{feature} needs every rank of the group to call it; rank {rank} waited for others while {doing}, and one did not "
            f"come or has ended: {error}. See what that rank says"
        ) from error
    if raised is not None:
        note_on(raised, f"memkit: raised on rank {rank} of {dist.get_world_size()} while {doing}")
        raise raised
    if first != _FINE:
        raise ShardError(f"{feature}: while {doing}, rank {first} raised {sent[0]}", rank=first)
    if least != -greatest:
        raise ShardError(
            f"{feature} needs the same model on every rank; found that ranks differ in names, shapes, dtypes or requires_grad "
            "of parameters, in layers, or in arguments. Build it in the same way on all"
        )


def _device() -> torch.device:
    backends = dict(pair.split(":") for pair in dist.get_backend_config().split(","))  # such as "cpu:gloo,cuda:nccl"
    if "cpu" in backends:
        return torch.device("cpu")
    kind = next(iter(backends))
    return torch.device(kind, torch.accelerator.current_device_index())
