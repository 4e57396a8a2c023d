"""What `shard` is given that it cannot use, and what it says to that. In one process; on several see test_two_ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import memkit
from memkit.device import ReferenceDevice
from tests.distributed.cases import make
from tests.distributed.groups import fake_group


def test_needs_a_process_group() -> None:
    with pytest.raises(ValueError, match=r"shard needs a process group; found none.*torchrun.*init_process_group"):
        memkit.shard(make())


def _sharded_in_part() -> nn.Module:
    model = make()
    fully_shard(model.blocks[1], mesh=init_device_mesh("cpu", (1,)))
    return model


def _tied(one: str, other: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = make()
        model.get_submodule(one).weight = model.get_submodule(other).weight
        return model

    return build


def _views() -> nn.Module:
    model = make()
    model.head.weight = nn.Parameter(model.embedding.weight.detach())
    return model


def _two_dtypes() -> nn.Module:
    model = make()
    model.blocks[2].norm.bfloat16()
    return model


def _with(name: str, value: Tensor | nn.Module) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = make()
        setattr(model, name, nn.Parameter(value) if isinstance(value, Tensor) else value)
        return model

    return build


class _FullyShardedDataParallel(nn.Module):
    pass


_FullyShardedDataParallel.__name__ = FullyShardedDataParallel.__name__  # a real one needs an accelerator

BAD: dict[str, tuple[Callable[[], Any], dict[str, Any], type[Exception], str]] = {
    "no module": (lambda: 3, {}, TypeError, r"shard needs a torch\.nn\.Module; found int"),
    "mesh": (make, {"mesh": 8}, TypeError, "mesh is a torch.distributed.device_mesh.DeviceMesh; found int"),
    "policy": (
        make,
        {"mp_policy": torch.bfloat16},
        TypeError,
        "mp_policy is a torch.distributed.fsdp.MixedPrecisionPolicy; found",
    ),
    "offload": (
        make,
        {"offload_policy": "cpu"},
        TypeError,
        "offload_policy is a .*CPUOffloadPolicy or OffloadPolicy; found str",
    ),
    "dtype": (make, {"frozen_dtype": "bfloat16"}, TypeError, "frozen_dtype is a torch.dtype; found 'bfloat16'"),
    "integers": (make, {"frozen_dtype": torch.int8}, ValueError, r"frozen_dtype is a floating-point type; found torch\.int8"),
    "reshard": (make, {"reshard_after_forward": None}, TypeError, "reshard_after_forward is True or False; found None"),
    "prefetch": (make, {"prefetch": 1.0}, TypeError, r"prefetch is a number of layers; found 1\.0"),
    "prefetch yes": (make, {"prefetch": True}, TypeError, "prefetch is a number of layers; found True"),
    "backwards": (make, {"prefetch": -1}, ValueError, "prefetch is a number of layers, 0 or more; found -1"),
    "again": (lambda: memkit.shard(make()), {}, ValueError, r"found the model sharded already \(FSDPModel\)"),
    "in part": (_sharded_in_part, {}, ValueError, r'found "blocks.1" sharded already \(FSDPBlock\)'),
    "replicated": (lambda: DistributedDataParallel(make()), {}, ValueError, "the model is wrapped by DistributedDataParallel"),
    "FSDP1": (_with("wrapped", _FullyShardedDataParallel()), {}, ValueError, r'found "wrapped" sharded already'),
    "scripted": (
        lambda: _with("extra", torch.jit.script(nn.Linear(2, 2)))(),
        {},
        ValueError,
        '"extra" is compiled by torch.jit',
    ),
    "lazy": (_with("extra", nn.LazyLinear(3)), {}, ValueError, r'"extra\.weight" has no data: its module is lazy'),
    "scalar": (_with("scale", torch.ones(())), {}, ValueError, r'"scale" is a scalar.*Make it a tensor of shape \[1\]'),
    "transposed": (_with("extra", nn.Parameter(torch.ones(3, 2).mT)), {}, ValueError, '"extra" is not contiguous'),
    "empty": (_with("extra", nn.Parameter(torch.ones(0, 2))), {}, ValueError, '"extra" has no elements'),
    "ranks": (make, {"reshard_after_forward": 2}, TypeError, "True or False; found 2. torch.distributed.fsdp.fully_shard"),
    "views": (_views, {}, ValueError, r'"embedding.weight" and "head.weight" are parameters over the same bytes'),
    "tied layers": (_tied("blocks.0.up", "blocks.2.up"), {}, ValueError, r'"blocks.0.up.weight", "blocks.2.up.weight" are one'),
    "tied to the rest": (
        *(_tied("head", "embedding"), {"layers": ["blocks.0", "head"]}, ValueError),
        r'"embedding.weight", "head.weight" are one tensor, in several layers or in one and outside',
    ),
    "overlap": (make, {"layers": ["blocks.0", "blocks.0.up"]}, ValueError, r'"blocks.0.up" is inside of another layer'),
    "no layers": (lambda: nn.Linear(2, 2), {}, ValueError, r"Linear has no layers.*Name them: shard\(model, layers="),
    "unknown": (make, {"layers": ["blocks.9"]}, ValueError, 'the model has no module "blocks.9"'),
    "a list": (make, {"layers": ["blocks"]}, ValueError, '"blocks" is a ModuleList, which is never called'),
    "itself": (make, {"layers": [""]}, ValueError, "the model itself is no layer of it"),
    "two dtypes": (
        *(_two_dtypes, {}, ValueError),
        r'one dtype for what is trained in "blocks.2".*"blocks.2.norm.weight" is bfloat16, "blocks.2.up.weight" is float32',
    ),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.filterwarnings("ignore:Lazy modules", "ignore:.*torch.jit.script")
def test_bad_input_is_refused_by_name(one: None, name: str) -> None:
    build, options, kind, message = BAD[name]
    model = build()
    before = [type(module) for module in model.modules()] if isinstance(model, nn.Module) else []

    with pytest.raises(kind, match=message):
        memkit.shard(model, **options)

    assert before == ([type(module) for module in model.modules()] if isinstance(model, nn.Module) else [])


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((4,), "a mesh of all 8 ranks of the process group; found one of 4"),
        ((2, 4), "found 2 without names"),
        ((2, 2, 2), "found 3"),
    ],
)
def test_mesh_of_another_shape_is_refused(shape: tuple[int, ...], message: str) -> None:
    with fake_group(8), pytest.raises(ValueError, match=message):
        memkit.shard(make(), mesh=init_device_mesh("cpu", shape))


def test_mesh_of_another_device_is_refused(one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = init_device_mesh("cpu", (1,))
    monkeypatch.setattr(nn.Parameter, "device", torch.device("cuda:1"), raising=False)

    with pytest.raises(
        ValueError, match=r'the mesh is of cpu, and "embedding.weight" is on cuda:1. Leave the model on the CPU'
    ):
        memkit.shard(make(), mesh=mesh)


def test_streamed_model_is_refused(one: None) -> None:
    model = make()
    with (
        memkit.LayerOffload(model, num_resident=0, num_slots=1, device=ReferenceDevice()),
        pytest.raises(
            ValueError, match=r'"blocks.0.norm.weight" is streamed by LayerOffload. Close that first .*CPUOffloadPolicy'
        ),
    ):
        memkit.shard(model)

    memkit.shard(model)


def test_sharded_model_is_not_streamed(one: None) -> None:
    model = memkit.shard(make())

    with pytest.raises(ValueError, match=r'"FSDPModel" is wrapped by FSDP .*moves its parameters itself'):
        memkit.LayerOffload(model, offload_ratio=0.5, device=ReferenceDevice())
