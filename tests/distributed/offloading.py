"""Optimizers over shards, stepped with a `StateOffload` and without one: what each rank does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import memkit
from memkit.device import ReferenceDevice
from memkit.plan import StatePlan
from memkit.plan import states as state_pieces
from memkit.states import StateStats, trial
from tests.distributed.cases import Model, assert_same, by_hand, load, local, make, save, step
from tests.distributed.groups import Work

Optimizer = torch.optim.Optimizer
Make = Callable[[Iterable[nn.Parameter]], Optimizer]


class Scaled(nn.Module):
    """A model with a parameter of one row, of which no rank but the first has any, and with a large one."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.inner: Model = make().to(dtype)
        self.scale = nn.Parameter(torch.full((1, 1), 1.5, dtype=dtype))
        self.large = nn.Parameter(torch.linspace(-1, 1, 61 * 26).reshape(61, 26).to(dtype))

    def forward(self, tokens: Tensor) -> Tensor:
        """Take [batch], return [batch, tokens]."""
        return self.inner(tokens) * self.scale + self.large.sin().square().mean()


def sharded(dtype: torch.dtype = torch.float32) -> nn.Module:
    return memkit.shard(Scaled(dtype))


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, fused=True)


def offload(optimizer: Optimizer, **options: Any) -> memkit.StateOffload:
    return memkit.StateOffload(optimizer, device=ReferenceDevice(), **options)


def train(model: nn.Module, optimizer: Optimizer, numbers: Iterable[int]) -> None:
    """Train with accumulation, clipping and a scheduler."""
    rate = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    for number in numbers:
        step(model, dist.get_rank(), number, micro=2)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        rate.step()
        optimizer.zero_grad()


def found_in(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """Return what this rank has of parameters and states; each state is split as its parameter is."""
    found = [local(parameter) for parameter in model.parameters()]
    for parameter in model.parameters():
        for name, value in sorted(optimizer.state.get(parameter, {}).items()):
            value = torch.as_tensor(value)
            if value.dim() and isinstance(parameter, DTensor):
                assert isinstance(value, DTensor), name
                assert value.placements == parameter.placements
                assert value.device_mesh == parameter.device_mesh
                assert (value.size(), value.stride()) == (parameter.size(), parameter.stride())
            found.append(local(value))
    return [item.detach().clone() for item in found]


def check_same(make_optimizer: Make, build: Callable[[], nn.Module] = sharded, **options: Any) -> tuple[StateStats, StatePlan]:
    """Compare steps with and without, what is in the state meanwhile, what is saved, and what goes on behind `close()`.

    Return what was moved, and how it was planned.
    """
    one, other = build(), build()
    plain, optimizer = make_optimizer(one.parameters()), make_optimizer(other.parameters())
    train(one, plain, range(5))
    with offload(optimizer, **options) as states:
        train(other, optimizer, range(5))
        if "disk" not in options:
            assert_same(found_in(other, optimizer), found_in(one, plain))
        optimizer.load_state_dict(optimizer.state_dict())
        stats = states.stats()
    assert_same(found_in(other, optimizer), found_in(one, plain))
    for model, own in ((one, plain), (other, optimizer)):
        train(model, own, range(5, 7))
    assert_same(found_in(other, optimizer), found_in(one, plain))
    return stats, states.plan


@contextmanager
def in_windows() -> Iterator[None]:
    """Have the large parameter be stepped in windows."""
    with mock.patch.multiple(state_pieces, PIECE_BYTES=1200, WINDOW_NUMEL=256), mock.patch.object(trial, "WINDOW_NUMEL", 256):
        yield


def on_two(make_optimizer: Make, _: str, *, least_bytes: int = 1, is_cut: bool = False, **options: Any) -> None:
    with in_windows() if is_cut else nullcontext():
        stats, plan = check_same(make_optimizer, **options)
    assert stats.d2h_bytes >= least_bytes
    assert any(piece.windows for piece in plan.pieces) == is_cut


def on_disk(folder: str) -> None:
    directory = Path(folder) / f"disk of {dist.get_rank()}"
    directory.mkdir()
    stats, _ = check_same(adamw, disk=memkit.Disk(directory))
    assert stats.disk_written_bytes > 0


def on_two_axes(_: str) -> None:
    """Parameters are copied along one axis of the mesh, and split along the other."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards"))
    check_same(adamw, lambda: by_hand(make(), mesh))


# Checkpoints


def checkpoints(folder: str) -> None:
    """What is saved with one loads into the plain optimizer, and the other way round; training goes on with the same bits."""
    one, other, new = sharded(), sharded(), sharded()
    plain, optimizer, loaded = (adamw(model.parameters()) for model in (one, other, new))
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    train(one, plain, range(3))
    with offload(optimizer):
        train(other, optimizer, range(3))
        save(Path(folder) / "offloaded", other, optimizer)
        gathered = [get_optimizer_state_dict(*each, options=whole) for each in ((other, optimizer), (one, plain))]
        assert_all_same(*gathered)
        of_host = get_optimizer_state_dict(other, optimizer, options=StateDictOptions(cpu_offload=True))
        assert of_host["state"].keys() == {name for name, _ in other.named_parameters()}
    load(Path(folder) / "offloaded", new, loaded)
    assert_same(found_in(new, loaded), found_in(one, plain))
    train(one, plain, range(3, 5))
    train(new, loaded, range(3, 5))
    assert_same(found_in(new, loaded), found_in(one, plain))

    save(Path(folder) / "plain", one, plain)
    saved = get_optimizer_state_dict(one, plain, options=whole)
    train(one, plain, range(5, 7))
    with offload(optimizer, update="host"):
        load(Path(folder) / "plain", other, optimizer)
        train(other, optimizer, range(5, 7))
        assert_same(found_in(other, optimizer), found_in(one, plain))
        whole.broadcast_from_rank0 = True
        set_optimizer_state_dict(other, optimizer, saved, options=whole)
        whole.broadcast_from_rank0 = False
        assert_all_same(get_optimizer_state_dict(other, optimizer, options=whole), saved)


def assert_all_same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Compare whole states, which only the first rank has."""
    assert found.keys() == expected.keys()
    assert found.get("state", {}).keys() == expected.get("state", {}).keys()
    for name, entries in expected.get("state", {}).items():
        for key, value in entries.items():
            assert torch.equal(found["state"][name][key], value), f"{name}.{key}"


OFTEN: dict[str, Work] = {
    "AdamW, device": functools.partial(on_two, adamw),
    "AdamW, host": functools.partial(on_two, adamw, update="host"),
    "states are saved and loaded": checkpoints,
}
FULL: dict[str, Work] = {
    "AdamW, host, windows": functools.partial(on_two, adamw, is_cut=True, update="host"),
    "on a disk": on_disk,
    "on two axes": on_two_axes,
}
