"""Under data parallelism and sharding: gradients are those of the same parallel run without the offload, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import memkit
from memkit.device import Device
from tests.activations.cases import assert_same_bits
from tests.activations.chains import Context
from tests.activations.conftest import Offload
from tests.activations.remat.conftest import NO_PLAN_FITS


def _model(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 32)) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Dropout(0.1), nn.Linear(32, 8)).to(device)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train_in_micro_batches(model: nn.Module, x: Tensor, context: Context = nullcontext) -> list[Tensor]:
    """Return the losses of three steps with two micro-batches each, and the parameters after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for number in range(3):
        for micro in range(2):
            torch.manual_seed(2 * number + micro)
            with context():
                loss = model(x + micro).square().mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [_whole(tensor).clone() for tensor in (*losses, *[param.detach() for param in model.parameters()])]


# One process that takes itself for one of several


@pytest.fixture
def fake_group(device: Device) -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh(device.torch_device.type, (2,))
    dist.destroy_process_group()


@pytest.fixture
def fake_group_of_one(device: Device) -> Iterator[DeviceMesh]:
    """Return the mesh of a group in which no shard is missing: older versions leave the others' shards undefined."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield init_device_mesh(device.torch_device.type, (1,))
    dist.destroy_process_group()


def _sharded(device: Device, mesh: DeviceMesh, *, reshard: bool, low: bool) -> nn.Module:
    model = _model(device.torch_device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if low else MixedPrecisionPolicy()
    for block in model:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy) if list(block.parameters()) else None
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)


@pytest.mark.covering(2)
@pytest.mark.core(1)
@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("window_bytes", [0, None])
def test_fully_shard(
    window_bytes: int | None, low: bool, reshard: bool, device: Device, offloading: Offload, request: pytest.FixtureRequest
) -> None:
    is_new = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)
    mesh = request.getfixturevalue("fake_group" if is_new else "fake_group_of_one")
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)).to(device.torch_device)
    plain = train_in_micro_batches(_sharded(device, mesh, reshard=reshard, low=low), x)
    found = train_in_micro_batches(
        _sharded(device, mesh, reshard=reshard, low=low), x, lambda: offloading(1.0, "fsdp", window_bytes=window_bytes)
    )

    assert_same_bits(found, plain)
    stats = memkit.stats("fsdp")
    assert stats.moved_out_bytes > 0
    assert stats.live_records == 0


def _tensor_parallel(x: Tensor, w: Tensor, context: Context) -> list[Tensor]:
    x.grad = w.grad = None
    with context():
        y = x
        for _ in range(3):
            y = torch.nn.functional.linear(y, w).sin()
    y.sum().backward()
    return [part.to_local() for part in (y.detach(), x.grad, w.grad)]


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)])
def test_distributed_tensors(placement: object, device: Device, offloading: Offload, fake_group: DeviceMesh) -> None:
    x = distribute_tensor(torch.randn(16, 32, device=device.torch_device), fake_group, [placement]).requires_grad_()
    w = distribute_tensor(torch.randn(32, 32, device=device.torch_device), fake_group, [Replicate()]).requires_grad_()
    plain = _tensor_parallel(x, w, nullcontext)
    for _ in range(3):
        found = _tensor_parallel(x, w, lambda: offloading(1.0, "dtensor", window_bytes=0))

        assert_same_bits(found, plain)
    stats = memkit.stats("dtensor")
    hidden_bytes = 4 * 16 * 32 // (2 if isinstance(placement, Shard) else 1)
    assert stats.moved_out_bytes == stats.moved_in_bytes == 5 * hidden_bytes  # before each sine, and between the layers
    assert stats.live_records == 0


Write = Callable[[Tensor], None]


@pytest.fixture
def _one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _gather(table: Tensor) -> None:
    dist.all_gather([table], table * 0.5)


def _later(table: Tensor) -> None:
    dist.all_gather([table], table * 0.5, async_op=True).wait()


def _receive(table: Tensor) -> None:
    outputs = [table]
    dist.scatter(outputs[0], [table * 0.5], src=0)


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
@pytest.mark.filterwarnings(NO_PLAN_FITS)
@pytest.mark.usefixtures("_one_process")
@pytest.mark.parametrize("write", [_gather, _later, _receive], ids=lambda write: write.__name__)
def test_what_is_made_from_a_buffer_is_so_from_what_it_was(write: Write, device: Device) -> None:
    weight = torch.linspace(1, 2, 2**17, device=device.torch_device).requires_grad_()

    def train(context: object) -> list[Tensor]:
        table = torch.linspace(0, 1, 2**17, device=device.torch_device)
        with context:  # type: ignore[attr-defined]  # either is a context
            loss = (weight * (table + 1).sin()).square().sum()
            write(table)
        loss.backward()
        grad, weight.grad = weight.grad, None
        assert grad is not None
        return [loss.detach(), grad, table]

    plain, dropped = train(nullcontext()), 0
    for _ in range(4):
        assert_same_bits(train(memkit.Rematerialize("1B", "collectives", device=device, policy="ops", min_bytes=1)), plain)
        dropped += memkit.stats("collectives").num_dropped
    assert dropped
