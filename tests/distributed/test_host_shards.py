"""`shard(offload_policy=CPUOffloadPolicy())` in one process: bits, the order of copies, what the host may do between. On two
ranks see test_two_ranks."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

import memkit
from memkit.core import torch_private
from memkit.device import ReferenceDevice, Stream
from memkit.distributed import sharding
from memkit.distributed.sharding import HostShards
from memkit.errors import HostMemoryError
from memkit.transfer.host_memory import Arena
from memkit.transfer.lanes import Lanes
from tests.distributed import hosting
from tests.distributed.cases import WIDTH, Model, assert_same, local, make, step, train
from tests.distributed.groups import fake_group, group_of_one
from tests.distributed.hosting import HOST, on_host, racing

OFTEN = {*hosting.OFTEN, "on the host, skipped"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in hosting.WORKS]
)
def test_one_rank(one: None, name: str, tmp_path: Path) -> None:
    hosting.WORKS[name](str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", hosting.MORE)
def test_contexts_on_one_rank(one: None, name: str) -> None:
    hosting.MORE[name]("")


class Log:
    """What `shard` does to a model of four layers, in order: "2 to device" or "gather 2"."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines: list[str] = []
        self.names: dict[int, str] = {}
        copy, read = Lanes.copy_back_by_turns, HostShards._read

        def note_copy(lanes: Lanes, pieces: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
            self.lines.append(f"{self.names[pieces[0].data_ptr()]} to device")
            return copy(lanes, pieces, *args, **kwargs)

        def note_read(shards: HostShards, layer: Any, *args: Any) -> None:
            self.lines.append(f"gather {self.names[layer.pieces[0].data_ptr()]}")
            read(shards, layer, *args)

        monkeypatch.setattr(Lanes, "copy_back_by_turns", note_copy)
        monkeypatch.setattr(HostShards, "_read", note_read)
        add = HostShards.add

        def note_layer(shards: HostShards, module: Any) -> None:
            add(shards, module)
            name = "rest" if isinstance(module, Model) else str(len(shards.layers) - 1)
            self.names[shards.layers[-1].pieces[0].data_ptr()] = name

        monkeypatch.setattr(HostShards, "add", note_layer)


@pytest.mark.parametrize("num_ranks", [1, 8])
def test_each_layer_is_on_its_way_before_the_one_ahead_of_it_is_gathered(num_ranks: int, monkeypatch: Any) -> None:
    log = Log(monkeypatch)
    with fake_group(num_ranks):
        step(on_host(make()), 0, 0)

    order = [line.split()[-1] for line in log.lines if line.startswith("gather")]
    assert order == ["rest", *"0123", *"3210"]
    copied = [line.split()[0] for line in log.lines if line.endswith("to device")]
    assert copied == order  # each once, and nothing that is not gathered
    for number, name in enumerate(order[:-1]):
        if (name, order[number + 1]) != ("3", "3"):  # the end of the forward
            gathers = [place for place, line in enumerate(log.lines) if line.startswith("gather")]
            copies = [place for place, line in enumerate(log.lines) if line.endswith("to device")]
            assert copies[number + 1] < gathers[number]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 8])
def test_chunks_come_in_parts_by_turns(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results are plain: what is gathered of a chunk waits for all its parts, and these for each other and for those of the
    chunk before."""
    lengths, done, copy = set[int](), [], Lanes.copy_back_by_turns
    follows, streams, put = list[bool](), set[Stream](), ReferenceDevice.copy

    def note_stream(device: ReferenceDevice, destination: Tensor, source: Tensor, stream: Stream) -> None:
        streams.add(stream)
        put(device, destination, source, stream)

    def note_copy(lanes: Lanes, pieces: Sequence[Tensor], *args: Any, after: Sequence[Any]) -> Any:
        lengths.add(len(pieces))
        follows.append(done[-1:] == [*after][1:])
        done.append(copy(lanes, pieces, *args, after=after))
        assert streams == {*lanes.back_by_turns}
        assert done[-1].stream == lanes.back  # so that a chunk of one part comes behind it
        return done[-1]

    with fake_group(num_ranks):
        wanted = train(on_host(make()), 0)
    monkeypatch.setattr(sharding, "TURN_BYTES", 96)
    monkeypatch.setattr(Lanes, "copy_back_by_turns", note_copy)
    monkeypatch.setattr(ReferenceDevice, "copy", note_stream)
    with fake_group(num_ranks):
        found = train(on_host(make()), 0)

    if num_ranks == 1:  # others' parts are not there
        assert_same(found, wanted)
    assert min(lengths) > 1
    assert follows.count(False) == 2  # where a backward's end has waited


def _chunk_bytes(module: nn.Module) -> int:
    return sum(-(-local(item).untyped_storage().nbytes() // 512) * 512 for item in module.parameters())


def test_two_chunks_at_most_are_on_the_device_and_none_while_the_loss_is_computed() -> None:
    """There is most in use then."""
    with fake_group(8), racing() as device:
        model, counter = memkit.shard(make(), offload_policy=HOST), device.memory_counter()
        found: list[int] = []
        model.head.register_forward_hook(lambda *_: found.append(counter.allocated_bytes()))
        for number in range(2):
            step(model, 0, number)
            assert counter.allocated_bytes() == 0
        chunk, rest = _chunk_bytes(model.blocks[0]), _chunk_bytes(model.embedding) + _chunk_bytes(model.head)

    assert counter.peak_bytes() <= max(2 * chunk, chunk + rest)
    assert found == [0, 0]


class _Apart:
    """What FSDP2 asks its device by, and a stream of its own for packing, as on a GPU."""

    def __init__(self, device: ReferenceDevice, packing: Stream, handle: Any) -> None:
        self._device, self._packing, self._handle = device, packing, handle

    def stream(self, _: object) -> Any:
        return self._device.on_stream(self._packing)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


@pytest.mark.parametrize("seed", hosting.SEEDS)
@pytest.mark.parametrize("num_ranks", [1, 8])
def test_memory_of_chunks_is_handed_on_in_the_order_of_the_stream_that_packs(num_ranks: int, seed: int | None) -> None:
    """With one rank, the current stream reads what belongs to that for packing."""
    with group_of_one() if num_ranks == 1 else fake_group(num_ranks), racing(seed) as device:
        model = memkit.shard(make(num_layers=7), offload_policy=HOST)
        packing = device.new_stream("packing")
        for module in (*model.blocks, model):
            group = module._get_fsdp_state()._fsdp_param_group
            group.device_handle = _Apart(device, packing, group.device_handle)
        for number in range(3):
            step(model, 0, number)
        assert device.memory_counter().allocated_bytes() == 0
        assert device.races == []


def test_model_without_data_is_filled_afterwards(one: None) -> None:
    with torch.device("meta"):
        model = Model()
    states = make().state_dict()
    on_host(model).to_empty(device="cpu")
    with torch.no_grad():
        for name, item in model.named_parameters():
            local(item).copy_(states[name])

    assert_same(train(model, 0), train(make(), 0))


@pytest.mark.parametrize("seed", hosting.SEEDS)
def test_cast_model_is_brought_as_it_is_then(one: None, seed: int | None) -> None:
    plain, model = memkit.shard(make()).double(), on_host(make(), seed=seed).double()

    assert_same(train(model, 0), train(plain, 0))


def test_casts_give_back_the_host_memory_that_they_leave(one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a tensor in it was kept, which stays what it was."""
    taken, take = dict[Arena, None](), Arena.take_pinned_as_one

    def note_taken(arena: Arena, sizes_bytes: Any) -> Any:
        taken[arena] = None
        return take(arena, sizes_bytes)

    def cast(dtype: torch.dtype) -> int:
        with torch.no_grad():
            model.to(dtype)(torch.arange(8))
        return sum(arena.held_bytes for arena in taken)

    monkeypatch.setattr(Arena, "take_pinned_as_one", note_taken)
    model = on_host(make())
    held_bytes = sum(arena.held_bytes for arena in taken)
    assert {cast(dtype) for _ in range(3) for dtype in (torch.float64, torch.float32)} == {held_bytes}
    kept = [local(item.detach()) for item in model.blocks[0].parameters()]
    was = [item.clone() for item in kept]
    num_bytes = [cast(dtype) for _ in range(2) for dtype in (torch.float64, torch.float32)]
    assert_same(kept, was)
    assert set(num_bytes) == {held_bytes + 2 * 2**20}  # the page of one layer
    del kept

    assert cast(torch.float64) == held_bytes


@pytest.mark.parametrize("seed", hosting.SEEDS)
def test_model_that_is_all_layers(one: None, seed: int | None) -> None:
    def run(build: Any) -> list[torch.Tensor]:
        model = build(nn.Sequential(*make().eval().blocks))
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0), requires_grad=True)
        model(x).square().sum().backward()
        return [*(local(item.grad) for item in model.parameters()), x.grad]

    assert_same(run(lambda model: on_host(model, seed=seed)), run(memkit.shard))


class _Failing(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.fails: type[BaseException] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails is not None:
            raise self.fails("on purpose")
        return self.block(x)


@pytest.mark.parametrize("seed", hosting.SEEDS)
@pytest.mark.parametrize("trains", [False, True])
def test_model_goes_on_after_an_exception(one: None, trains: bool, seed: int | None) -> None:
    """As far as FSDP2 does: a model that was sharded without an offload policy is compared."""

    def run(build: Any) -> list[torch.Tensor]:
        model = make()
        model.blocks = nn.ModuleList(map(_Failing, model.blocks))
        model = build(model)
        model.blocks[2].fails = ArithmeticError
        with pytest.raises(ArithmeticError, match="on purpose"), torch.set_grad_enabled(trains):
            model(torch.arange(8))
        model.blocks[2].fails = None
        with torch.no_grad():
            for item in model.parameters():
                item.mul_(0.5)
            found = [model(torch.arange(8))]
        return [*found, *train(model, 0)] if not trains else found

    assert_same(run(lambda model: on_host(model, seed=seed)), run(memkit.shard))


@pytest.mark.parametrize("seed", [None, 1])
def test_what_is_interrupted_between_parts_frees_nothing_that_is_being_copied_to(
    one: None, seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharding, "TURN_BYTES", 96)
    model, plain, copy, num_copies = make().eval(), make().eval(), ReferenceDevice.copy, itertools.count()

    def interrupt(*args: Any) -> None:
        if next(num_copies) == 2:
            raise KeyboardInterrupt
        copy(*args)

    with racing(seed) as device:
        memkit.shard(model, offload_policy=HOST)
        with monkeypatch.context() as patch:
            patch.setattr(ReferenceDevice, "copy", interrupt)
            with pytest.raises(KeyboardInterrupt), torch.no_grad():
                model(torch.arange(8))
        gc.collect()

        assert device.races == []
        with torch.no_grad():
            assert torch.equal(model(torch.arange(8)), plain(torch.arange(8)))


@pytest.mark.parametrize("then", ["backward", "load", "save"])
def test_host_waits_for_copies_before_it_may_write(one: None, then: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also ahead of states, where no backward has come."""
    with racing() as device:
        model = memkit.shard(make(), offload_policy=HOST)
        states, waits = model.state_dict(), list[object]()
        monkeypatch.setattr(device, "synchronize", waits.append)
        loss = model(torch.arange(8)).sum()
        assert waits == []  # a backward comes, and the host stays ahead
        {"backward": loss.backward, "load": lambda: model.load_state_dict(states), "save": model.state_dict}[then]()
        assert len(waits) == 1
        with torch.no_grad():
            model(torch.arange(8))
        assert len(waits) == 2


def test_failing_backward_leaves_nothing_on_its_way(one: None) -> None:
    with racing() as device:
        model = memkit.shard(make(), offload_policy=HOST)
        model.blocks[1].register_forward_hook(lambda _module, _args, output: output.register_hook(_raise) and None)
        with pytest.raises(ArithmeticError, match="on purpose"):
            step(model, 0, 0)

    assert device.memory_counter().allocated_bytes() == 0
    assert device.races == []


def _raise(_: torch.Tensor) -> None:
    raise ArithmeticError("on purpose")


# Which policy


@pytest.mark.parametrize("policy", [None, OffloadPolicy(), CPUOffloadPolicy(pin_memory=False)])
def test_other_policies_are_left_to_fsdp(one: None, policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostShards, "add", None)

    assert_same(train(memkit.shard(make(), offload_policy=policy), 0), train(make(), 0))


@pytest.mark.parametrize(
    "name",
    ["FSDP_GROUP", "FSDP_PARTS", "FSDP_GATHER", "FSDP_PHASE", "FSDP_REDUCE", "FSDP_SHARD", "FSDP_LANDED", "LOCAL_TENSOR"],
)
def test_without_a_name_of_torch_it_is_left_to_fsdp(one: None, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = getattr(torch_private, name)
    monkeypatch.setattr(torch_private, name, f"{known}_" if isinstance(known, str) else (*known[:-1], f"{known[-1]}_"))
    with pytest.warns(UserWarning, match=r"by FSDP2's own policy, in one copy each: found torch \S+ without \w+\.\w+"):
        model = on_host(make())

    assert_same(train(model, 0), train(make(), 0))


def test_says_where_host_memory_is_missing(one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise HostMemoryError("no room on purpose")

    monkeypatch.setattr("memkit.transfer.host_memory.Arena.take_pinned_as_one", refuse)
    with pytest.raises(HostMemoryError, match="no room on purpose") as error:
        on_host(make())
    assert any("raised on rank 0 of 1 while sharding it" in note for note in error.value.__notes__)
