"""`shard` on two ranks over gloo. All processes are started once, and do everything; each test looks at one part."""

from __future__ import annotations

import functools
import itertools
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import memkit
from memkit.errors import ShardError
from tests.compiling import FORMS
from tests.distributed import compiled_layers, hosting, offloading, profiling, stepping
from tests.distributed.cases import (
    Collectives,
    assert_same,
    by_hand,
    groups_of,
    load,
    make,
    optimizer_of,
    padded_bytes,
    save,
    step,
    train,
)
from tests.distributed.composing import (
    BY_HAND,
    CASES,
    CONTEXTS,
    LAYER_CASES,
    check_by_hand,
    check_regions,
    check_same,
    check_whole_layers,
)
from tests.distributed.groups import Failed, Found, Work, group_of_one, run_ranks
from tests.thinning import Case, covering

pytestmark = pytest.mark.slow  # two processes take both cores of a small machine for a quarter of a minute

# What each rank does


def _same_as_by_hand(_: str, *, lora: bool = False, frozen_dtype: torch.dtype | None = None, micro: int = 1) -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    plain = train(by_hand(make(lora=lora, frozen_dtype=frozen_dtype), mesh), rank, micro=micro)
    for prefetch in (1, 2):
        model = memkit.shard(make(lora=lora), frozen_dtype=frozen_dtype, prefetch=prefetch)
        assert_same(train(model, rank, micro=micro), plain)


def _same_on_all_ranks(_: str) -> list[torch.Tensor]:
    model = memkit.shard(make())
    train(model, dist.get_rank())
    return [item.full_tensor().detach() for item in model.parameters() if isinstance(item, DTensor)]


def _reductions(_: str) -> None:
    whole = make(lora=True)
    trained = [padded_bytes([item for item in group if item.requires_grad], 2) for group in groups_of(whole)]
    model = memkit.shard(make(lora=True))
    with Collectives() as seen:
        step(model, dist.get_rank(), 0)

    assert seen.reduced_bytes == [num for num in reversed(trained) if num]
    assert [item.grad is None for item in model.parameters()] == [not item.requires_grad for item in model.parameters()]


def _raised_on_one(_: str) -> None:
    """Rank 1 is given what can't be sharded: rank 0 hears of it, and nothing hangs."""
    bad = ["blocks.0", "nowhere"]
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match='the model has no module "nowhere"') as own:
            memkit.shard(make(), layers=bad)
        assert any("raised on rank 1 of 2" in note for note in own.value.__notes__)
    else:
        model = make()
        with pytest.raises(ShardError, match=r'looking at the model, rank 1 raised ValueError: .*no module "nowhere"') as error:
            memkit.shard(model)
        assert error.value.rank == 1
        assert type(model) is type(make())  # nothing was begun


def _raised_on_both(_: str) -> None:
    with pytest.raises(ValueError, match='no module "nowhere"'):
        memkit.shard(make(), layers=["nowhere"])


def _raised_while_sharding(_: str) -> None:
    """Rank 0 has no room in the middle of it."""
    model = make()
    if dist.get_rank() == 0:
        model.blocks[2].register_forward_pre_hook = _no_room  # type: ignore[method-assign]
        with pytest.raises(MemoryError, match="no room"):
            memkit.shard(model)
    else:
        with pytest.raises(ShardError, match="sharding it, which is done in part now, rank 0 raised MemoryError: no room"):
            memkit.shard(model)


def _no_room(*_: object, **__: object) -> None:
    raise MemoryError("no room")


def _other_model(_: str) -> None:
    model = make()
    if dist.get_rank() == 1:
        model.head = nn.Linear(13, 18, bias=False)
    with pytest.raises(ShardError, match="the same model on every rank; found that ranks differ in names, shapes") as error:
        memkit.shard(model)
    assert error.value.rank is None


def _other_arguments(_: str) -> None:
    with pytest.raises(ShardError, match="or in arguments"):
        memkit.shard(make(), prefetch=1 + dist.get_rank())


def _save(folder: str) -> list[torch.Tensor]:
    """Train, save, and go on: what is loaded elsewhere goes on like this."""
    model = memkit.shard(make())
    optimizer = optimizer_of(model)
    train(model, dist.get_rank(), optimizer=optimizer)
    save(Path(folder) / "of two", model, optimizer)
    return train(model, dist.get_rank(), numbers=[7, 8], optimizer=optimizer)


def _load_own(folder: str) -> list[torch.Tensor]:
    model, optimizer = _read(Path(folder) / "of two")
    return train(model, dist.get_rank(), numbers=[7, 8], optimizer=optimizer)


def _composed(name: str, case: str, _: str) -> None:
    """Ranks need not do the same with what they save: their budgets differ by what they find."""
    warnings.simplefilter("ignore")
    assert check_same(name, attached=dist.get_rank() == 1 and name != "both", **CASES[case]) > 0


def _sharded_by_hand(how: str, context: str, reshards: str, _: str) -> None:
    warnings.simplefilter("ignore")
    assert check_by_hand(how, context, reshards=reshards, attached=dist.get_rank() == 1 and context != "both") > 0


def _load_of_one(folder: str) -> list[torch.Tensor]:
    """Return what one process has saved, as two have read it: whole parameters and states."""
    return _whole(*_read(Path(folder) / "of one"))


COMPOSED: dict[str, tuple[Work, Case]] = {
    f"{name}, {case}": (functools.partial(_composed, name, case), {"context": name, "case": case})
    for name, case in itertools.product(CONTEXTS, ("plain", "LoRA"))
}
COMPILED: dict[str, Work] = {  # a form each
    compiled_layers.name_of(*run): functools.partial(compiled_layers.check_same, *run)
    for run in zip(FORMS, ("before", "after"), ("on the device", "on the host"), ("both", "MemoryBudget, least"), strict=False)
}
OF_THOSE_BY_HAND: dict[str, tuple[Work, Case]] = {
    f"by hand: {how}, {context}, {reshards}": (
        functools.partial(_sharded_by_hand, how, context, reshards),
        {"how": how, "context": context, "reshards": reshards},
    )
    for how, context, reshards in itertools.product(BY_HAND, ("CPUOffload(1.0)", "both", "MemoryBudget, half"), ("", "always"))
}
"""By name, what is done, and what of all it is of."""


def _thinned(works: dict[str, tuple[Work, Case]], num_together: int) -> dict[str, Work]:
    """Return those that have values together that are not so in another one: one process does all of what these are."""
    needed = covering([case for _, case in works.values()], num_together)
    return {name: work for index, (name, (work, _)) in enumerate(works.items()) if index in needed}


WORKS: dict[str, Work] = {
    "by hand": _same_as_by_hand,
    "LoRA": functools.partial(_same_as_by_hand, lora=True),
    "reductions": _reductions,
    "raised on one": _raised_on_one,
    "raised on both": _raised_on_both,
    "raised while sharding": _raised_while_sharding,
    "another model": _other_model,
    "other arguments": _other_arguments,
    "all ranks": _same_on_all_ranks,
    "saved": _save,
    "loaded": _load_own,
    "loaded of one": _load_of_one,
    "regions": check_regions,
    "whole layers": functools.partial(check_whole_layers, forwards=2),
    **{f"StateOffload, {name}": work for name, work in offloading.OFTEN.items()},
    **profiling.PROFILES,
    "ends as layers": hosting.check_ends,
    "frozen in bfloat16": functools.partial(_same_as_by_hand, lora=True, frozen_dtype=torch.bfloat16),
    "micro-batches": functools.partial(_same_as_by_hand, micro=3),
    **{f"whole layers, {case}": functools.partial(check_whole_layers, case=case) for case in [*LAYER_CASES][1:3]},
    **_thinned(COMPOSED, 1),
    **{f"StateOffload, {name}": work for name, work in offloading.FULL.items()},
    **{name: hosting.WORKS[name] for name in hosting.OFTEN},
    "on the host, MemoryBudget": hosting.MORE["on the host, MemoryBudget, half"],
    **{name: work for name, work in stepping.WORKS.items() if name in stepping.OFTEN or "beside the backward, " in name},
    **COMPILED,
    **_thinned(OF_THOSE_BY_HAND, 1),
}

# Checkpoints


def _read(path: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = memkit.shard(make())
    with torch.no_grad():
        for item in model.parameters():
            item.zero_()
    optimizer = optimizer_of(model)
    load(path, model, optimizer)
    return model, optimizer


def _whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [value for state in optimizer.state.values() for value in state.values()]
    found = [item.full_tensor() if isinstance(item, DTensor) else item for item in (*model.parameters(), *states)]
    return [item.detach() for item in found]


# What is looked at


@pytest.fixture(scope="module")
def of_one(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[torch.Tensor]]:
    """Return the folder, with a checkpoint of one process in it, and what that has."""
    folder = tmp_path_factory.mktemp("ranks")
    with group_of_one():
        model = memkit.shard(make())
        optimizer = optimizer_of(model)
        train(model, 0, optimizer=optimizer)
        save(folder / "of one", model, optimizer)
        return str(folder), _whole(model, optimizer)


@pytest.fixture(scope="module")
def found(of_one: tuple[str, list[torch.Tensor]]) -> Found:
    return run_ranks(2, of_one[0], WORKS)


@pytest.mark.parametrize("name", WORKS)
def test_on_every_rank(found: Found, name: str) -> None:
    failed = [(rank, outcome) for rank, outcome in enumerate(found[name]) if isinstance(outcome, Failed)]

    assert not failed, "\n".join(f"rank {rank}: {error}" for rank, error in failed)


def test_parameters_are_the_same_on_all_ranks(found: Found) -> None:
    one, other = found["all ranks"]

    assert_same(one, other)


def test_shards_of_all_ranks_are_the_whole(found: Found) -> None:
    for name, lora in (("profile", False), ("profile of LoRA", True)):
        whole = make(lora=lora)
        trained = [item for item in whole.parameters() if item.requires_grad]
        padded, alone, grads, states = map(sum, zip(*found[name], strict=True))

        assert padded == padded_bytes(whole.parameters(), 2)
        assert alone == sum(item.nbytes for item in whole.parameters())
        assert grads == padded_bytes(trained, 2)
        assert states == 2 * sum(item.nbytes for item in trained)


def test_training_goes_on_from_a_checkpoint_of_two_ranks(found: Found) -> None:
    for saved, loaded in zip(found["saved"], found["loaded"], strict=True):
        assert_same(loaded, saved)


def test_two_ranks_load_what_one_has_saved(found: Found, of_one: tuple[str, list[torch.Tensor]]) -> None:
    for loaded in found["loaded of one"]:
        assert_same(loaded, of_one[1])


def test_one_rank_loads_what_two_have_saved(found: Found, of_one: tuple[str, list[torch.Tensor]]) -> None:
    """After the steps before the checkpoint the parameters are those that all ranks had then."""
    with group_of_one():
        model, optimizer = _read(Path(of_one[0]) / "of two")
        whole = _whole(model, optimizer)

    assert_same(whole[: len(list(model.parameters()))], found["all ranks"][0])
