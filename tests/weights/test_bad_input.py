"""What `LayerOffload` is given that it cannot use, and what it says to that."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import memkit
from memkit.device import CpuDevice, Device, ReferenceDevice
from tests.weights.cases import WIDTH, Block, Stack, assert_same, inputs, only_lora, run_step, streamed

HALF = {"offload_ratio": 0.5}


class FSDPStack(Stack):
    pass


def _wrapped_inside() -> nn.Module:
    model = Stack(2)
    model.layers[1].up = FullyShardedDataParallel()
    return model


class FullyShardedDataParallel(nn.Module):
    pass


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        return Stack()


def _head_on_meta() -> nn.Module:
    model = Stack()
    model.head.to("meta")
    return model


def _in_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return Stack()


def _lazy() -> nn.Module:
    return nn.ModuleList(nn.LazyLinear(4) for _ in range(3))


BAD_MODELS: dict[str, tuple[Any, type[Exception], str]] = {
    "no module": (lambda: [nn.Linear(1, 1)], TypeError, r"needs a torch.nn.Module; found list"),
    "no layers": (
        lambda: nn.Linear(2, 2),
        ValueError,
        r"Linear has no layers that could be found: no ModuleList .* LayerOffload\(model, layers=\[\.\.\.\]\)",
    ),
    "one layer": (lambda: Stack(1), ValueError, r"Stack has no layers that could be found"),
    "layers of several classes": (lambda: nn.ModuleList([nn.Linear(1, 1), Block()]), ValueError, "has no layers"),
    "fsdp": (FSDPStack, ValueError, r'"FSDPStack" is wrapped by FSDP .*CPUOffloadPolicy'),
    "fsdp inside": (_wrapped_inside, ValueError, r'"layers.1.up" is wrapped by FSDP \(FullyShardedDataParallel\)'),
    "meta": (_on_meta, ValueError, r'"stem.weight" has no data \(device "meta"\). Name the files .* weights='),
    "meta outside of the layers": (_head_on_meta, ValueError, r'"head.weight" has no data \(device "meta"\)'),
    "inference mode": (_in_inference_mode, ValueError, r'"stem.weight" was made in inference mode'),
    "lazy": (_lazy, ValueError, r'"0.weight" has no data: its module is lazy'),
}


@pytest.mark.parametrize("case", BAD_MODELS)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_model(case: str) -> None:
    build, kind, message = BAD_MODELS[case]
    model = build()
    with pytest.raises(kind, match=message):
        memkit.LayerOffload(model, device=ReferenceDevice(), **HALF)

    if isinstance(model, nn.Module):
        assert not [module for module in model.modules() if module._forward_hooks and case != "lazy"]


BAD_LAYERS: dict[str, tuple[Any, type[Exception], str]] = {
    "unknown name": (["layers.0", "layers.9"], ValueError, r'layers: the model has no module "layers.9"'),
    "unknown module": ([nn.Linear(1, 1)], ValueError, r"layers: a Linear is not a module of the model"),
    "empty": ([], ValueError, r"layers is empty"),
    "one name": ("layers.0", TypeError, r"layers is a list of names or modules, or a predicate; found one str"),
    "one module": (nn.Linear(1, 1), TypeError, r"found one Linear"),
    "number": ([1], TypeError, r"layers holds names or modules; found int"),
    "no list": (3, TypeError, r"layers is .* found"),
    "nested": (["layers.0", "layers.0.up"], ValueError, r'layers: "layers.0.up" is inside of another layer'),
    "predicate": (lambda name, module: False, ValueError, r"the predicate is true for none"),
}


@pytest.mark.parametrize("case", BAD_LAYERS)
def test_layers(case: str) -> None:
    layers, kind, message = BAD_LAYERS[case]

    with pytest.raises(kind, match=message):
        memkit.LayerOffload(only_lora(Stack()), layers, device=ReferenceDevice(), **HALF)


BAD_OPTIONS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no size": ({}, ValueError, r"exactly one of offload_ratio, budget and num_resident; found none"),
    "two sizes": (
        {"offload_ratio": 0.5, "num_resident": 2},
        ValueError,
        r"exactly one of offload_ratio, budget and num_resident; found offload_ratio and num_resident",
    ),
    "ratio above 1": ({"offload_ratio": 1.5}, ValueError, r"offload_ratio.* found 1.5"),
    "too many resident": ({"num_resident": 7}, ValueError, r"num_resident must be from 0 to the number of layers, 6; found 7"),
    "budget too small": (
        {"budget": "1000B"},
        ValueError,
        r"need at least 5.00 KiB of budget \(a slot that holds layers.0, 5.00 KiB\); found 1000 bytes. "
        r"Raise budget by 4120 bytes or more, or split layers.0",
    ),
    "budget of 0": ({"budget": 0}, ValueError, r"budget.* found 0"),
    "budget as a float": ({"budget": 1e9}, TypeError, r"budget.* found 1000000000.0"),
    "no slots": ({"offload_ratio": 0.5, "num_slots": 0}, ValueError, r"num_slots must be at least 1; found 0\. Pass 1 to"),
    "slots as text": ({"offload_ratio": 0.5, "num_slots": "3"}, TypeError, r"num_slots must be an int; found '3'"),
    "train": ({"offload_ratio": 0.5, "train": "all"}, ValueError, r"needs train= one of 'auto', .*; found 'all'\. Omit it"),
    "device": (
        {"offload_ratio": 0.5, "device": 0},
        TypeError,
        r'device is a name such as "cuda:1", a torch.device or a memkit.device.Device; found int',
    ),
    "limit without a unit": (
        {"offload_ratio": 0.5, "host_limit_bytes": 64},
        ValueError,
        r'host_limit_bytes=64 reads as 64 bytes or as 64 GiB. Write "64B" or "64GiB"',
    ),
    "negative limit": ({"offload_ratio": 0.5, "host_limit_bytes": -1}, ValueError, r"host_limit_bytes .* found -1"),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_options(case: str) -> None:
    options, kind, message = BAD_OPTIONS[case]
    model = only_lora(Stack())
    storages = [parameter.untyped_storage()._cdata for parameter in model.parameters()]

    with pytest.raises(kind, match=message):
        memkit.LayerOffload(model, **{"device": ReferenceDevice(), **options})

    assert [parameter.untyped_storage()._cdata for parameter in model.parameters()] == storages


@pytest.mark.parametrize("size", [{"offload_ratio": 0.5}, {"num_resident": 2}, {"budget": "1GiB"}])
def test_nothing_that_may_stream(size: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r'none of the layers .* may stream.* train="frozen"'):
        memkit.LayerOffload(Stack(), device=ReferenceDevice(), train="frozen", **size)


def test_parameters_are_managed_twice() -> None:
    model = only_lora(Stack())
    other = nn.ModuleList([nn.Linear(WIDTH, WIDTH), model.layers[5].up]).requires_grad_(False)

    with memkit.LayerOffload(model, device=ReferenceDevice(), **HALF):
        for again, name in ((model, "layers.1.norm.weight"), (other, "1.weight")):
            with pytest.raises(ValueError, match=rf'"{name}" is streamed by another LayerOffload already'):
                memkit.LayerOffload(again, device=ReferenceDevice(), **HALF)

    memkit.LayerOffload(other, device=ReferenceDevice(), **HALF).close()


def test_a_part_that_does_not_stream_may_be_managed_by_another() -> None:
    model = only_lora(Stack())
    model.others = nn.ModuleList(Block() for _ in range(2)).requires_grad_(False)

    with (
        memkit.LayerOffload(model, ["layers.0", "layers.1"], device=ReferenceDevice(), **HALF),
        memkit.LayerOffload(model.others, device=ReferenceDevice(), **HALF),
    ):
        pass
    assert not [module for module in model.modules() if module._forward_hooks]


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


TRAINED: dict[str, dict[str, Any]] = {
    "host": {"train": "host"},
    "fused": {"train": "fused", "optimizer": partial(torch.optim.SGD, lr=0.1)},
}


@pytest.mark.parametrize("train", TRAINED)
@pytest.mark.usefixtures("process_group")
def test_replicated_model(train: str) -> None:
    with pytest.raises(ValueError, match=rf'train="{train}" takes gradients away that DistributedDataParallel would reduce'):
        memkit.LayerOffload(DistributedDataParallel(Stack()), device=ReferenceDevice(), **HALF, **TRAINED[train])


@pytest.mark.parametrize("is_around", [True, False])
@pytest.mark.parametrize("train", TRAINED)
@pytest.mark.usefixtures("process_group")
def test_model_that_is_replicated_later(train: str, is_around: bool) -> None:
    device = ReferenceDevice()
    model = Stack(4)
    plain, batches = copy.deepcopy(model), inputs(device, 1)
    replicated = None if is_around else DistributedDataParallel(model)
    with memkit.LayerOffload(model, offload_ratio=1.0, device=device, **TRAINED[train]):
        with pytest.raises(
            memkit.errors.LayerOffloadError, match=r'"layers\.0\..*DistributedDataParallel.*Train the plain model.*FSDP2'
        ):
            (replicated or DistributedDataParallel(model))(batches[0])
        if train == "host":
            del replicated
            assert_same(run_step(model, batches), run_step(plain, batches))


@pytest.mark.usefixtures("process_group")
def test_frozen_layers_of_a_model_that_is_replicated_later() -> None:
    device = ReferenceDevice()
    model = only_lora(Stack(4))
    plain, batches = copy.deepcopy(model), inputs(device, 1)
    with memkit.LayerOffload(model, offload_ratio=1.0, device=device):
        found = run_step(DistributedDataParallel(model), batches)
        expected = run_step(DistributedDataParallel(plain), batches)

    assert_same(found, expected)


def test_entered_twice() -> None:
    offload = memkit.LayerOffload(only_lora(Stack()), device=ReferenceDevice(), **HALF)
    with offload, pytest.raises(ValueError, match="entered"), offload:
        pass


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "grad": lambda model, x: torch.func.grad(lambda y: model(y).square().sum())(x),
    "vjp": lambda model, x: torch.func.vjp(model, x),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (torch.ones_like(x),)),
    "jacrev": lambda model, x: torch.func.jacrev(model)(x),
    "jacfwd": lambda model, x: torch.func.jacfwd(model)(x),
    "grad of each sample": lambda model, x: torch.func.vmap(torch.func.grad(lambda y: model(y).square().sum()))(x),
}


@pytest.mark.parametrize("by_itself", [False, True])
@pytest.mark.parametrize("build", [CpuDevice, ReferenceDevice])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.filterwarnings("ignore:.torch.jit.script")
@pytest.mark.filterwarnings("ignore:.*no memory apart from")
def test_transform_that_differentiates(transform: str, build: Callable[[], Device], by_itself: bool) -> None:
    device = build()
    with streamed(only_lora(Stack(4)), device) as (model, plain, batches, _):
        for _ in range(2):
            with pytest.raises(
                memkit.errors.LayerOffloadError, match=r"a forward of Stack runs within torch\.func\.grad.*vmap works"
            ):
                TRANSFORMS[transform](model.layers[2] if by_itself else model, batches[0])
            assert_same(run_step(model, batches), run_step(plain, batches))


@pytest.mark.parametrize("build", [CpuDevice, ReferenceDevice])
@pytest.mark.filterwarnings("ignore:.*no memory apart from")
def test_transform_that_does_not_differentiate(build: Callable[[], Device]) -> None:
    device = build()
    with streamed(only_lora(Stack(4)), device) as (model, plain, batches, _):
        assert torch.equal(torch.func.vmap(model)(batches[0]), torch.func.vmap(plain)(batches[0]))
        assert_same(run_step(model, batches), run_step(plain, batches))


@pytest.mark.parametrize("by_itself", [False, True])
def test_capture_into_a_graph_is_refused(by_itself: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device = ReferenceDevice()
    with streamed(only_lora(Stack()), device) as (model, plain, batches, _):
        assert_same(run_step(model, batches), run_step(plain, batches))
        with monkeypatch.context() as patched:
            patched.setattr(device, "is_capturing", lambda: True)
            with pytest.raises(memkit.errors.LayerOffloadError, match=r'a forward of ("layers\.2"|Stack) is being captured'):
                model.layers[2](batches[0]) if by_itself else model(batches[0])
        assert_same(run_step(model, batches), run_step(plain, batches))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_capture_by_torch_is_refused() -> None:
    model = only_lora(Stack()).cuda().requires_grad_(False)
    x = torch.randn(2, WIDTH, device="cuda")
    with torch.no_grad(), memkit.LayerOffload(model, offload_ratio=1.0):
        expected = model(x)
        graph = torch.cuda.graph(torch.cuda.CUDAGraph())
        with pytest.raises(memkit.errors.LayerOffloadError, match="is being captured into a CUDA graph"), graph:
            model(x)
        assert torch.equal(model(x), expected)
