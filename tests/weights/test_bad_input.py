"""What `LayerOffload` is given that it cannot use, and what it says to that."""

from __future__ import annotations

import copy
import warnings
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
from memkit.plan import LayerCosts, plan_streamed_ratio
from memkit.weights import layer_offload
from tests.weights.cases import TRAIN, WIDTH, Block, Stack, assert_same, inputs, only_lora, run_step, streamed

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning", "ignore:`torch.jit:DeprecationWarning")

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


@pytest.mark.parametrize("train", ["host", "fused"])
@pytest.mark.usefixtures("process_group")
def test_replicated_model(train: str) -> None:
    with pytest.raises(ValueError, match=rf'train="{train}" takes gradients away that DistributedDataParallel would reduce'):
        memkit.LayerOffload(DistributedDataParallel(Stack()), device=ReferenceDevice(), **HALF, **TRAIN[train])


@pytest.mark.parametrize("is_around", [True, False])
@pytest.mark.parametrize("train", ["host", "fused"])
@pytest.mark.usefixtures("process_group")
def test_model_that_is_replicated_later(train: str, is_around: bool) -> None:
    device = ReferenceDevice()
    model = Stack(4)
    plain, batches = copy.deepcopy(model), inputs(device, 1)
    replicated = None if is_around else DistributedDataParallel(model)
    with memkit.LayerOffload(model, offload_ratio=1.0, device=device, **TRAIN[train]):
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


def _trace(module: nn.Module) -> nn.Module:
    return torch.jit.trace(module, torch.randn(2, 16))


def _with_scripted_layers(compiled: Callable[[nn.Module], nn.Module]) -> nn.Module:
    model = Stack(3, block=lambda: nn.Linear(16, 16))
    model.layers = nn.ModuleList(compiled(layer) for layer in model.layers)
    return model


def _with_scripted_part() -> nn.Module:
    model = Stack(3)
    model.layers[1].up = torch.jit.script(model.layers[1].up)
    return model


class _Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


CASES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "scripted": (lambda: _with_scripted_layers(torch.jit.script), r'jit.trace has compiled "layers.0"\.'),
    "traced": (lambda: _with_scripted_layers(_trace), r'jit.trace has compiled "layers.0"\.'),
    "a part": (_with_scripted_part, r'jit.trace has compiled "layers.1.up", which is in "layers.1"\.'),
    "the model": (lambda: torch.jit.script(_Listed()), r'jit.trace has compiled the model, with "layers.0" in it\.'),
    "around": (lambda: nn.Sequential(torch.jit.script(_Listed())), r'jit.trace has compiled "0", with "0.layers.0" in it\.'),
}


@pytest.mark.parametrize("case", CASES)
def test_layers_that_torchscript_has_compiled_are_refused_by_name(case: str) -> None:
    make, message = CASES[case]
    model, (batch,) = make(), inputs(ReferenceDevice(), 1)
    expected, storages = model(batch), [parameter.untyped_storage()._cdata for parameter in model.parameters()]

    def is_layer(name: str, _: nn.Module) -> bool:
        return name.rsplit(".", 1)[-1].isdigit() and "layers" in name

    with pytest.raises(ValueError, match=message + r".*name other layers by layers="):
        memkit.LayerOffload(model, layers=is_layer, offload_ratio=1.0, train="host", device=ReferenceDevice())

    assert [parameter.untyped_storage()._cdata for parameter in model.parameters()] == storages
    assert torch.equal(model(batch), expected)


@pytest.mark.parametrize("train", ["host", "frozen"])
def test_module_that_torchscript_has_compiled_runs_beside_layers_that_stream(train: str) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        model = Stack(3)
        model.layers.requires_grad_(train == "host")
        model.stem = torch.jit.script(model.stem)
        return model

    device, model, plain = ReferenceDevice(), make(), make()
    batches = inputs(device)
    expected = [run_step(plain, batches) for _ in range(2)]

    with memkit.LayerOffload(model, offload_ratio=1.0, train=train, device=device):
        for want in expected:
            assert_same(run_step(model, batches), want)


def test_trained_module_that_torchscript_has_compiled_is_not_stepped_within_the_backward() -> None:
    model = Stack(3)
    model.stem = torch.jit.script(model.stem)
    make = partial(torch.optim.SGD, lr=0.1)

    with pytest.raises(ValueError, match=r'has compiled "stem", which is trained\. .*use train="host"'):
        memkit.LayerOffload(model, offload_ratio=1.0, optimizer=make, device=ReferenceDevice())


NOT_FOUND: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "the model": (lambda: torch.jit.script(nn.Sequential(*_linears(1, 1))), "the model compiled by torch.jit.script"),
    "an element": (lambda: nn.Sequential(torch.jit.script(nn.Linear(4, 4)), *_linears(1, 1)), '"0" compiled by'),
}


@pytest.mark.parametrize("case", NOT_FOUND)
def test_layers_that_are_not_found_because_of_torchscript_say_so(case: str) -> None:
    make, message = NOT_FOUND[case]

    with pytest.raises(ValueError, match=f"found none, and {message}.*name other layers by layers="):
        memkit.LayerOffload(make(), offload_ratio=1.0, device=ReferenceDevice())


KIB = 1024


def _linears(*widths: int) -> nn.Module:
    """Return layers without bias, of `width` KiB and a half each."""
    model = nn.ModuleList(nn.Linear(16, 16 * width, bias=False) for width in widths)
    return model.requires_grad_(False)


def _open(model: nn.Module, **options: Any) -> None:
    memkit.LayerOffload(model, **{"device": ReferenceDevice(), **options}).close()


@pytest.fixture
def refusing_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize(
    ("model", "options", "found", "advice"),
    [
        (
            partial(_linears, 4, 4, 4),
            {"offload_ratio": 1.0},
            r"3 layers stream \(13.50 KiB\), and the slots on the device take 13.50 KiB, up to 3 for layers of about one size",
            r"Take fewer slots \(num_slots=2 frees 4.50 KiB\)\.",
        ),
        (
            partial(_linears, 4, 4),
            {"num_resident": 0},
            r"2 layers stream \(9.00 KiB\), and the slots on the device take 9.00 KiB",
            r"Take fewer slots \(num_slots=1 frees 4.50 KiB\)\.",
        ),
        (
            partial(_linears, *[4] * 8),
            {"offload_ratio": 0.1},
            r"1 layer streams \(4.50 KiB\), and the slots on the device take 4.50 KiB",
            r"Let more stream \(offload_ratio=1.0 frees 22.50 KiB\)\.",
        ),
        (
            partial(_linears, *[4] * 3),
            {"num_resident": 1},
            r"2 layers stream \(9.00 KiB\), and the slots on the device take 9.00 KiB",
            r"Let more stream \(offload_ratio=1.0, num_slots=2 frees 4.50 KiB\)\.",
        ),
        (
            partial(_linears, 1, 2, 4, 8),
            {"offload_ratio": "auto"},
            r"4 layers stream \(17.00 KiB\), and the slots on the device take 17.00 KiB",
            r"Leave LayerOffload out, or name modules that are smaller and of about one size \(layers=\)\.",
        ),
    ],
)
def test_nothing_is_freed(model: Callable[[], nn.Module], options: dict[str, Any], found: str, advice: str) -> None:
    with pytest.warns(UserWarning, match=rf"LayerOffload frees no memory on the device: {found}.*{advice}") as caught:
        _open(model(), **options)

    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.usefixtures("refusing_warnings")
@pytest.mark.parametrize(
    "options",
    [
        {"offload_ratio": 0.0},
        {"num_resident": 8},
        {"budget": "1MiB"},
        {"offload_ratio": 1.0},
        {"offload_ratio": 0.5},
        {"offload_ratio": "auto"},
        {"budget": 6 * 4 * KIB},
    ],
)
def test_what_frees_something_or_is_to_stream_nothing_does_not_warn(options: dict[str, Any]) -> None:
    _open(_linears(*[4] * 8), **options)


@pytest.mark.usefixtures("refusing_warnings")
def test_gradients_that_go_to_the_host_count_as_freed() -> None:
    _open(Stack(3), offload_ratio=1.0, train="host")


def test_gradients_that_are_stepped_on_the_device_do_not_count_as_freed() -> None:
    with pytest.warns(UserWarning, match="frees no memory on the device"):
        _open(Stack(3), offload_ratio=1.0, optimizer=partial(torch.optim.SGD, lr=0.1))


def test_plan_says_what_it_frees() -> None:
    costs = [LayerCosts(name=str(index), num_bytes=num_bytes) for index, num_bytes in enumerate([64, 64, 64, 64, 16])]

    assert plan_streamed_ratio(costs, 1.0, num_slots=3).freed_bytes == 64
    assert plan_streamed_ratio(costs, 0.5, num_slots=3).freed_bytes <= 0
    assert plan_streamed_ratio(costs, 0.0, num_slots=3).freed_bytes == 0


def test_without_a_gpu_it_says_how_to_try_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_offload, "cuda_is_available", lambda: False)
    with pytest.warns(
        UserWarning,
        match=r"LayerOffload: the CPU has no memory apart from the host's, so moving bytes to the host frees nothing\. .* "
        r"pass device=memkit\.device\.ReferenceDevice\(\) to try it out",
    ) as caught:
        _open(_linears(*[4] * 8), offload_ratio=1.0, device=None)

    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), CpuDevice()])
def test_cpu_that_is_asked_for_is_no_device_to_stream_to(device: str | torch.device | Device) -> None:
    with pytest.warns(UserWarning, match="LayerOffload: the CPU has no memory apart from the host's") as caught:
        _open(_linears(*[4] * 8), offload_ratio=1.0, device=device)

    assert [warning.filename for warning in caught] == [__file__]
