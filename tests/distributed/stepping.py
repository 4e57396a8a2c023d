"""Optimizers over shards in host memory, stepped beside the backward by a `StateOffload`, and behind it by themselves."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import memkit
from memkit.errors import StateOffloadError
from memkit.states.pieces import ConsumedGradient
from tests.distributed.cases import Context, Model, assert_same, load, local, make, save, step
from tests.distributed.composing import LOW
from tests.distributed.groups import Work
from tests.distributed.hosting import SEEDS, on_host

Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "fused AdamW": lambda it: torch.optim.AdamW(it, lr=1e-2, weight_decay=0.1, fused=True),
    "foreach AdamW": lambda it: torch.optim.AdamW(it, lr=1e-2, foreach=True),
    "AdamW": lambda it: torch.optim.AdamW(it, lr=torch.tensor(1e-2), amsgrad=True),
    "SGD": lambda it: torch.optim.SGD(it, lr=1e-2, momentum=0.9),
    "counts": lambda it: Counting(it, lr=1e-2, momentum=0.9),
}


class Counting(torch.optim.SGD):
    """Counts its steps, in an attribute and in each group."""

    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


CASES: dict[str, dict[str, Any]] = {
    **{name: {"kind": name} for name in OPTIMIZERS},
    "LoRA": {"lora": True},
    "tied": {"tied": True},
    "low": {"mp_policy": LOW},
    "none ahead": {"prefetch": 0},
    "whole": {"reshard_after_forward": False},
    "micro-batches": {"micro": 2},
    "Rematerialize": {"context": lambda: memkit.Rematerialize(0.5, min_bytes=0)},
    "checkpoint": {"checkpoints": True},
    "scheduler": {"kind": "foreach AdamW", "is_scheduled": True},
}


def _make(*, checkpoints: bool, **options: bool) -> Model:
    model = make(**options)
    for block in model.blocks if checkpoints else ():
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return model


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [item for item in model.parameters() if item.requires_grad]


def groups_by_decay(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups, of which the first also has what isn't trained."""
    parameters = list(model.parameters())
    return [{"params": parameters[::2], "weight_decay": 0.2}, {"params": parameters[1::2], "lr": 3e-3}]


def outcome(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return copies of parameters and states, as this rank has them."""
    states = [value for item in trained(model) for value in optimizer.state[item].values() if isinstance(value, Tensor)]
    return [local(item.detach()).clone() for item in (*model.parameters(), *states)]


def train(
    model: Model,
    optimizer: torch.optim.Optimizer,
    *,
    states: memkit.StateOffload | None = None,
    numbers: Iterable[int] = range(3),
    micro: int = 1,
    is_scheduled: bool = False,
    context: Context = nullcontext,
) -> list[Tensor]:
    """Return losses, and parameters and states after all."""
    found, rank = [], dist.get_rank()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) if is_scheduled else None
    for number in numbers:
        for part in range(micro):
            is_last = part == micro - 1
            with nullcontext() if states is None or is_last else states.accumulate():
                found.append(step(model, rank, 10 * number + part, context))
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return [*found, *outcome(model, optimizer)]


class Landing:
    """Stands for the event behind a gradient's copy to the host, which lands when it is waited for."""

    def __init__(self, gradient: Tensor) -> None:
        self._gradient, self._value, self._lock = gradient, gradient.clone(), threading.Lock()
        gradient.fill_(torch.nan)

    def synchronize(self) -> None:
        with self._lock, torch.no_grad():
            if self._value is not None:
                self._gradient.copy_(self._value)
                self._value = None


@contextmanager
def late_gradients() -> Iterator[None]:
    """Have gradients of models that are sharded inside come to the host as late as they may on a GPU."""
    reduce = FSDPParamGroup.post_backward

    def late(group: Any, *args: Any) -> None:
        before = {item: item.sharded_param.grad for item in group.fsdp_params}
        reduce(group, *args)
        for item, grad in before.items():
            new = item.sharded_param.grad
            if grad is None and isinstance(new, DTensor):
                item.grad_offload_event = Landing(new._local_tensor)

    with mock.patch.object(FSDPParamGroup, "post_backward", late):
        yield


def check_same(case: str, _: str = "") -> None:
    """The bits of losses, parameters and states are those of the optimizer by itself, and so are its groups."""
    options = dict(CASES[case])
    make_optimizer, micro = OPTIMIZERS[options.pop("kind", "fused AdamW")], options.pop("micro", 1)
    given = {name: options.pop(name, False) for name in ("lora", "tied", "checkpoints")}
    build = functools.partial(_make, **given)
    kept = {"micro": micro, **{name: options.pop(name) for name in ("is_scheduled", "context") if name in options}}
    model = on_host(build(), **options)
    plain = make_optimizer(groups_by_decay(model))
    expected = train(model, plain, **kept)
    for seed in SEEDS[: 3 if case == "LoRA" else 1]:
        with late_gradients() if micro == 1 else nullcontext():
            model = on_host(build(), seed=seed, **options)
        optimizer = make_optimizer(groups_by_decay(model))
        with memkit.StateOffload(optimizer, when="backward") as states:
            found = train(model, optimizer, states=states, **kept)
            assert states.stats().num_steps == 3
            assert states.stats().host_step_s > 0
        assert_same(found, expected)
        assert repr(optimizer.state_dict()["param_groups"]) == repr(plain.state_dict()["param_groups"])
        assert list(optimizer.state_dict()["state"]) == list(plain.state_dict()["state"])
        assert getattr(optimizer, "num_steps", 0) == getattr(plain, "num_steps", 0)


class Spied(torch.optim.SGD):
    """Calls something ahead of each step, with what it steps, and something behind it."""

    before: Callable[[list[Tensor]], object] | None = None
    after: Callable[[list[Tensor]], object] | None = None

    def step(self, closure: Any = None) -> Any:
        stepped = [item for group in self.param_groups for item in group["params"] if item.grad is not None]
        if self.before is not None and stepped:
            self.before(stepped)
        found = super().step(closure)
        if self.after is not None and stepped:
            self.after(stepped)
        return found


def spied(model: nn.Module) -> Spied:
    return Spied(trained(model), lr=1e-2, momentum=0.9)


def raise_for(size: int) -> Callable[[list[Tensor]], None]:
    """Raise for the first layer with a parameter of so many rows here."""
    is_over = False

    def check(stepped: list[Tensor]) -> None:
        nonlocal is_over
        if not is_over and any(item.numel() == size for item in stepped):
            is_over = True
            raise ArithmeticError("on purpose")

    return check


class Checkpointed(Model):
    """Has each block run again by a backward inside of the backward."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x)


def checkpointed() -> Model:
    torch.manual_seed(0)
    return Checkpointed()


def check_failing_rank(_: str = "", *, build: Callable[[], Model] = make) -> None:
    """One rank's step fails in its thread: it raises at the end of its backward, and all go on."""
    rank, results = dist.get_rank(), []
    for fails in (False, True):
        model = on_host(build())
        optimizer = spied(model)
        memkit.StateOffload(optimizer, when="backward")
        for number in range(3):
            is_failing = fails and rank == 0 and number == 1
            optimizer.before = raise_for(local(model.blocks[2].up.weight).numel()) if is_failing else None
            with pytest.raises(StateOffloadError, match="on purpose") if is_failing else nullcontext():
                step(model, rank, number)
            optimizer.step()
            optimizer.zero_grad()
        results.append(outcome(model, optimizer))

    assert_same(results[1], results[0])


def check_checkpoint(folder: str) -> None:
    """What `torch.distributed.checkpoint` saves goes on with a `StateOffload`, and without."""
    path, make_optimizer = Path(folder) / "beside the backward", OPTIMIZERS["fused AdamW"]
    model = on_host(make())
    optimizer = make_optimizer(trained(model))
    with memkit.StateOffload(optimizer, when="backward") as states:
        train(model, optimizer, states=states)
        save(path, model, optimizer)
        expected = train(model, optimizer, states=states, numbers=[7, 8])
    for is_plain in (False, True):
        model = on_host(make())
        optimizer = make_optimizer(trained(model))
        with nullcontext() if is_plain else memkit.StateOffload(optimizer, when="backward"):
            load(path, model, optimizer)
            assert_same(train(model, optimizer, numbers=[7, 8]), expected)


def check_consumed(_: str = "") -> None:
    """Once the backward is over, nothing has a gradient that may be used."""
    model = on_host(make())
    optimizer = OPTIMIZERS["fused AdamW"](trained(model))
    memkit.StateOffload(optimizer, when="backward")
    step(model, dist.get_rank(), 0)

    assert {type(item.grad) for item in model.parameters()} == {ConsumedGradient}
    with pytest.raises(StateOffloadError, match='With when="backward" gradients cannot be clipped'):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)


WORKS: dict[str, Work] = {
    **{f"beside the backward: {name}": functools.partial(check_same, name) for name in CASES},
    "beside the backward, a rank that fails": check_failing_rank,
    "beside the backward, a rank that fails in a checkpoint": functools.partial(check_failing_rank, build=checkpointed),
    "beside the backward, checkpoint": check_checkpoint,
    "beside the backward, gradients": check_consumed,
}
OFTEN = "beside the backward: fused AdamW", "beside the backward: counts", "beside the backward, gradients"
"""What is done in one process in any run of the tests."""
