"""`LayerOffload(weights=...)`: a model built without data is the one that was saved, and no byte of it is anywhere twice."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.device import ReferenceDevice
from memkit.weights.from_files import Checkpoint
from tests.weights.cases import WIDTH, Block, Stack

safetensors = pytest.importorskip("safetensors.torch")


class Positions(nn.Module):
    """Has what no checkpoint has: a buffer that is not persistent, and a tensor that is no buffer."""

    inv_freq: Tensor

    def __init__(self, dim: int, base: float = 10000.0) -> None:
        super().__init__()
        self.dim, self.base = dim, base
        self.register_buffer("inv_freq", 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim), persistent=False)
        self.original = self.inv_freq

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.cat([self.inv_freq, self.original]).to(x.dtype)


class Whole(Stack):
    """Blocks with all that a model may have beside parameters."""

    def __init__(self, num_layers: int = 6, *, base: float = 500.0) -> None:
        super().__init__(num_layers)
        self.positions = Positions(WIDTH, base)
        self.register_buffer("scale", torch.full((WIDTH,), 1.5))
        self.register_buffer("count", torch.tensor(3))
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.stem.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.tied(self.positions(x) * self.scale))


def saved(model: nn.Module, directory: Path, num_files: int = 1) -> Path:
    """Write a model as `save_pretrained` does: tied parameters once, in one file or in several with an index."""
    state, seen = {}, set[int]()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            state[name] = tensor.detach().contiguous()
            seen.add(id(tensor))
    if num_files == 1:
        safetensors.save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    index = {}
    for number in range(num_files):
        part = dict(itertools.islice(state.items(), number, None, num_files))
        safetensors.save_file(part, directory / f"model-{number}.safetensors")
        index |= dict.fromkeys(part, f"model-{number}.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return directory


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def step(model: nn.Module, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return the loss and all gradients of one step."""
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float32).to(dtype)
    loss = model(x).float().square().sum()
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("train", ["host", "frozen"])
@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_bitwise_the_model_that_was_loaded_plainly(tmp_path: Path, num_files: int, train: str, ratio: float) -> None:
    plain = Whole()
    path = saved(plain, tmp_path, num_files)
    model = on_meta(Whole)
    if train == "frozen":
        for each in (plain, model):
            each.layers.requires_grad_(False)
    objects = list(model.parameters())

    with memkit.LayerOffload(model, offload_ratio=ratio, train=train, weights=path, device=ReferenceDevice()) as offload:
        assert len(offload.plan.streamed) == round(6 * ratio)
        assert all(one is other for one, other in zip(model.parameters(), objects, strict=True))
        assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        assert_same(step(model), step(plain))
        assert_same(list(model.state_dict().values()), list(plain.state_dict().values()))

    assert_same(list(model.state_dict().values()), list(plain.state_dict().values()))
    assert model.tied.weight is model.stem.weight
    assert model.positions.original is model.positions.inv_freq or torch.equal(
        model.positions.original, plain.positions.original
    )


def test_fused_steps_go_on_from_the_files(tmp_path: Path) -> None:
    plain = Whole()
    path, model = saved(plain, tmp_path), on_meta(Whole)
    make = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    optimizer = make(plain.parameters())

    with memkit.LayerOffload(model, offload_ratio=1.0, train="fused", optimizer=make, weights=path, device=ReferenceDevice()):
        for _ in range(2):
            step(model)
            step(plain)
            optimizer.step()
            optimizer.zero_grad()
            for parameter in model.parameters():
                parameter.grad = None

    assert_same(list(model.state_dict().values()), list(plain.state_dict().values()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_are_cast_as_load_state_dict_casts(tmp_path: Path, dtype: torch.dtype) -> None:
    path = saved(Stack(), tmp_path)
    plain, model = Stack().to(dtype), on_meta(Stack).to(dtype)
    plain.load_state_dict(safetensors.load_file(path / "model.safetensors"))

    with memkit.LayerOffload(model, offload_ratio=1.0, weights=path / "model.safetensors", device=ReferenceDevice()):
        assert_same(list(model.state_dict().values()), list(plain.state_dict().values()))


def test_model_with_data_is_loaded_as_well(tmp_path: Path) -> None:
    plain, model = Whole(), Whole()
    with memkit.LayerOffload(model, offload_ratio=0.5, weights=saved(plain, tmp_path), device=ReferenceDevice()):
        assert_same(step(model), step(plain))


def test_adapters_with_data_stay_as_they_are(tmp_path: Path) -> None:
    """Only what is on meta must be in the files."""
    plain, model = Stack(), on_meta(Stack)
    state = {name: tensor for name, tensor in plain.state_dict().items() if "lora" not in name}
    safetensors.save_file(state, tmp_path / "base.safetensors")
    for block, of_plain in zip(model.layers, plain.layers, strict=True):
        block.lora_a, block.lora_b = of_plain.lora_a, of_plain.lora_b
        for part in (block.norm, block.up, block.down):
            part.requires_grad_(False)

    with memkit.LayerOffload(model, offload_ratio=1.0, train="frozen", weights=tmp_path, device=ReferenceDevice()):
        assert_same(list(model.state_dict().values()), list(plain.state_dict().values()))


def test_strides_and_shared_storages_of_the_model_are_kept(tmp_path: Path) -> None:
    class Odd(Block):
        def __init__(self) -> None:
            super().__init__()
            self.up.weight = nn.Parameter(torch.randn(WIDTH, 24).t())

    plain = Stack(block=Odd)
    path, model = saved(plain, tmp_path), on_meta(lambda: Stack(block=Odd))

    with memkit.LayerOffload(model, offload_ratio=1.0, weights=path, device=ReferenceDevice()):
        assert model.layers[0].up.weight.stride() == plain.layers[0].up.weight.stride() == (1, 24)
        assert_same(step(model), step(plain))


# Buffers that no file has


class Masked(nn.Module):
    """Made of random numbers, of an argument that is nowhere, or of more than one."""

    def __init__(self, kind: str, size: int) -> None:
        super().__init__()
        self.kind = kind
        self.size = size * 2 if kind == "doubled" else size
        if kind == "hidden":
            del self.size
        mask = torch.rand(WIDTH) if kind == "random" else torch.arange(WIDTH) * float(size)
        self.register_buffer("mask", mask, persistent=False)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("random", "it is made of random numbers"),
        ("hidden", 'Masked takes "size", which is not an attribute of it'),
        ("doubled", 'Masked made anew has another "size"'),
    ],
)
def test_buffer_that_cannot_be_made_anew_is_named(tmp_path: Path, kind: str, reason: str) -> None:
    def make() -> Stack:
        model = Stack()
        model.extra = Masked(kind, 3)
        return model

    path, model = saved(make(), tmp_path), on_meta(make)

    with pytest.raises(ValueError, match=re.escape(f'"extra.mask" cannot be made anew: {reason}.')):
        memkit.LayerOffload(model, offload_ratio=1.0, weights=path, device=ReferenceDevice())

    assert all(parameter.is_meta for parameter in model.parameters())
    model.extra.mask = torch.arange(WIDTH) * 3.0
    with memkit.LayerOffload(model, offload_ratio=1.0, weights=path, device=ReferenceDevice()):
        assert torch.equal(model.extra.mask, torch.arange(WIDTH) * 3.0)


def test_random_numbers_are_left_as_they_were(tmp_path: Path) -> None:
    path, model = saved(Whole(), tmp_path), on_meta(Whole)
    before = torch.get_rng_state()

    with memkit.LayerOffload(model, offload_ratio=1.0, weights=path, device=ReferenceDevice()):
        pass

    assert torch.equal(torch.get_rng_state(), before)


# Files


class _Extra(Stack):
    def get_extra_state(self) -> dict[str, int]:
        return {"steps": 3}


def _renamed() -> dict[str, Tensor]:
    state = Stack().state_dict()
    state["extra.weight"] = state.pop("layers.3.up.bias")
    return {**state, "head.weight": torch.zeros(5, WIDTH)}


def _with_hidden() -> nn.Module:
    def hide(_module: nn.Module, state: dict[str, Tensor], prefix: str, _local: object) -> None:
        state.pop(f"{prefix}hidden")

    model = on_meta(Stack)
    model.head.register_parameter("hidden", nn.Parameter(torch.empty(3, device="meta")))
    model.head.register_state_dict_post_hook(hide)
    return model


def _with_special() -> nn.Module:
    class Special(nn.Parameter):
        pass

    model = on_meta(Stack)
    model.head.weight = Special(torch.empty(4, WIDTH, device="meta"))
    return model


OTHERS: list[tuple[Callable[[], dict[str, Tensor]], Callable[[], nn.Module], str]] = [
    (
        _renamed,
        lambda: on_meta(Stack),
        'must be those of the Stack; found "layers.3.up.bias" is missing; "extra.weight" is not in the model; '
        '"head.weight" is [5, 16] there and [4, 16] in the model.',
    ),
    (lambda: Stack().state_dict(), lambda: on_meta(_Extra), 'found "_extra_state" is missing'),
    (lambda: Stack().state_dict(), _with_hidden, 'found "head.hidden" is missing'),
    (lambda: Stack().state_dict(), _with_special, '"head.weight" is a Special, which weights= cannot read'),
    (
        lambda: nn.ModuleDict({"model": Stack()}).state_dict(),
        lambda: on_meta(Stack),
        'All names in the files begin with "model."',
    ),
]


@pytest.mark.parametrize(("states", "make", "message"), OTHERS, ids=range(len(OTHERS)))
def test_files_of_other_tensors_are_refused_by_name(
    tmp_path: Path, states: Callable[[], dict[str, Tensor]], make: Callable[[], nn.Module], message: str
) -> None:
    safetensors.save_file(states(), tmp_path / "model.safetensors")
    model = make()

    with pytest.raises(ValueError, match=re.escape(message)):
        memkit.LayerOffload(model, offload_ratio=1.0, weights=tmp_path, device=ReferenceDevice())

    assert all(parameter.is_meta for parameter in model.parameters())


def test_failure_leaves_the_model_without_data(tmp_path: Path) -> None:
    path, model = saved(Whole(), tmp_path), on_meta(Whole)
    file = path / "model.safetensors"
    checkpoint = Checkpoint.read

    def fails(self: Checkpoint, name: str, into: Tensor) -> None:
        if name == "layers.4.up.weight":
            raise OSError("the disk has failed")
        checkpoint(self, name, into)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "read", fails)
        with pytest.raises(OSError, match="the disk has failed"):
            memkit.LayerOffload(model, offload_ratio=1.0, weights=file, device=ReferenceDevice())

    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    with memkit.LayerOffload(model, offload_ratio=1.0, weights=file, device=ReferenceDevice()):
        step(model)


def _file(header: str) -> bytes:
    return len(header).to_bytes(8, "little") + header.encode()


def _entry(kind: str) -> bytes:
    return _file(json.dumps({"a": {"dtype": kind, "shape": [1], "data_offsets": [0, 4]}}))


def _index(file: str) -> bytes:
    return json.dumps({"weight_map": {"a": file}}).encode()


_INDEX = "model.safetensors.index.json"
BAD_FILES: list[tuple[str, bytes, str]] = [
    ("", b"", "needs model.safetensors.index.json or model.safetensors; found no safetensors file"),
    ("a.safetensors", b"short", "is not a whole safetensors file"),
    ("a.safetensors", b"\xff" * 40, "its header has no length that could be"),
    ("a.safetensors", _file('{"a": {"dtype": "F3"}}'), "is not a whole"),
    ("a.safetensors", _entry("F6"), '"a" is of dtype F6'),
    ("a.safetensors", _entry("F32"), '"a" is not whole'),
    (_INDEX, _index("../b.safetensors"), "which is not a file beside it"),
    (_INDEX, _index("b.safetensors"), "there is no file"),
    (_INDEX, b"[]", "is no index"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "content", "message"), BAD_FILES, ids=range(len(BAD_FILES)))
def test_bad_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    if name:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(message)):
        memkit.LayerOffload(on_meta(Stack), offload_ratio=1.0, weights=tmp_path, device=ReferenceDevice())


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        (3, TypeError, "weights is a safetensors file or a directory with such files; found 3"),
        ("/none", ValueError, "found none at"),
    ],
)
def test_what_is_no_file(given: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        memkit.LayerOffload(on_meta(Stack), offload_ratio=1.0, weights=given, device=ReferenceDevice())


def test_large_tensor_is_read_in_parts(tmp_path: Path) -> None:
    tensor = torch.arange(9 * 2**20, dtype=torch.int32)
    safetensors.save_file({"a": tensor, "b": torch.tensor(2.0), "c": torch.empty(0, 3)}, tmp_path / "one.safetensors")
    checkpoint = Checkpoint(tmp_path)
    into, scalar = torch.zeros_like(tensor), torch.tensor(0.0)

    checkpoint.read("a", into)
    checkpoint.read("b", scalar)
    checkpoint.read("c", torch.empty(0, 3))

    assert torch.equal(into, tensor)
    assert scalar == 2.0


# Host memory


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_host_peak_is_the_weights(tmp_path: Path, is_deterministic: bool) -> None:
    """In a process of its own: what it holds at most, beyond what it held before, is little more than the weights."""
    num_layers, width = 12, 1024
    bytes_of_weights = num_layers * width * width * 4 * 4
    state = {
        f"{number}.{part}.weight": torch.full((width, width), float(number))
        for number in range(num_layers)
        for part in range(4)
    }
    safetensors.save_file(state, tmp_path / "model.safetensors")
    code = f"""
import torch, memkit
from torch import nn
torch.use_deterministic_algorithms({is_deterministic})

def memory(of):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(of))

with torch.device("meta"):
    model = nn.ModuleList(
        nn.Sequential(*(nn.Linear({width}, {width}, bias=False) for _ in range(4))) for _ in range({num_layers})
    )
with open("/proc/self/clear_refs", "w") as peak:
    peak.write("5")  # begins anew
before = memory("VmRSS")
offload = memkit.LayerOffload(
    model.requires_grad_(False), list(model), offload_ratio=1.0, num_slots=1,
    weights={str(tmp_path)!r}, device=memkit.device.ReferenceDevice(),
)
assert all(bool((layer[3].weight == number).all()) for number, layer in enumerate(model))
print(memory("VmHWM") - before, offload.stats().host_bytes)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(memkit.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)

    peak_bytes, host_bytes = map(int, done.stdout.split())
    assert bytes_of_weights <= host_bytes <= bytes_of_weights + num_layers * 2 * 2**20
    slot_bytes = bytes_of_weights // num_layers  # the reference device is in host memory as well
    assert bytes_of_weights <= peak_bytes < host_bytes + slot_bytes + 40 * 2**20


def test_buffer_that_was_cast_is_made_anew_and_cast(tmp_path: Path) -> None:
    plain = Whole().to(torch.bfloat16)
    model = on_meta(Whole).to(torch.bfloat16)
    model.positions.original = model.positions.inv_freq
    path = saved(plain, tmp_path)

    with memkit.LayerOffload(model, offload_ratio=1.0, weights=path, device=ReferenceDevice()):
        assert torch.equal(model.positions.inv_freq, plain.positions.inv_freq)
