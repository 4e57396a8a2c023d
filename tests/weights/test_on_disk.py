"""Frozen layers on a disk: the same bits as without, however late it is; a read that fails is told; `close` restores all."""

from __future__ import annotations

import copy
import errno
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.device import Device, ReferenceDevice
from memkit.errors import DiskError, HostMemoryError
from memkit.transfer import ReferenceDisk
from tests.threads import num_own_threads
from tests.weights.cases import RUNS, WIDTH, Stack, only_lora

pytestmark = pytest.mark.slow


def _model(run: str = "in order", num_layers: int = 12) -> nn.Module:
    torch.manual_seed(1)
    return only_lora(Stack(num_layers, RUNS[run]))


def _results(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return what a step comes to: the output and all gradients."""
    model.zero_grad()
    output = model(x)
    output.square().mean().backward()
    grads = [parameter.grad.detach().cpu().clone() for parameter in model.parameters() if parameter.grad is not None]
    return [output.detach().cpu(), *grads]


def _assert_same(one: list[Tensor], other: list[Tensor], where: str = "") -> None:
    assert len(one) == len(other), where
    assert all(map(torch.equal, one, other)), where


def _offload(model: nn.Module, device: Device, disk: memkit.Disk, **options: Any) -> memkit.LayerOffload:
    return memkit.LayerOffload(model, device=device, disk=disk, **{"offload_ratio": 1.0, "train": "frozen", **options})


class _Quiet(memkit.Disk):
    """A disk whose scratch file may go through the system's cache, as on tmpfs, without a warning."""

    def _make_file(self, num_bytes: int) -> Any:
        file = super()._make_file(num_bytes)
        file.refusal = None
        return file


def test_on_a_real_disk(tmp_path: Path) -> None:
    device = ReferenceDevice()
    plain, model = _model(), _model()
    x, threads = torch.randn(3, WIDTH), num_own_threads()
    with _offload(model, device, _Quiet(tmp_path)):
        for _ in range(3):
            _assert_same(_results(plain, x), _results(model, x))
        for net in (plain, model):  # the caller writes to what is on the disk
            with torch.no_grad():
                net.layers[3].up.weight.mul_(0.5)
                net.layers[0].down.weight.data.add_(0.25)  # read last, so it is in a buffer
        _assert_same(_results(plain, x), _results(model, x))
        model.load_state_dict(_model().state_dict())
        plain.load_state_dict(_model().state_dict())
        _assert_same(_results(plain, x), _results(model, x))
        held = model.state_dict()
    assert all(map(torch.equal, plain.state_dict().values(), held.values()))
    del held
    _assert_same(_results(plain, x), _results(model, x))
    assert num_own_threads() == threads
    assert list(tmp_path.iterdir()) == []
    gc.collect()
    maps = Path("/proc/self/maps")
    assert not maps.exists() or str(tmp_path) not in maps.read_text()


@pytest.mark.parametrize("seed", [None, 5])
def test_writes_within_a_pass_to_what_was_read_ahead(seed: int | None) -> None:
    device, nets = ReferenceDevice(), [_model(), _model()]
    x = torch.ones(3, WIDTH)

    @torch.no_grad()
    def write(layer: nn.Module) -> None:
        layer.up.weight.mul_(0.5)

    for net in nets:
        for layer, later in zip(net.layers, net.layers[4:], strict=False):
            layer.register_forward_pre_hook(lambda *_, later=later: write(later))
    plain, model = nets
    with _offload(model, device, ReferenceDisk(seed=seed)), torch.no_grad():
        for _ in range(3):
            assert torch.equal(plain(x), model(x))


def test_host_memory_is_a_few_buffers() -> None:
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(24)]).requires_grad_(False)
    x = torch.randn(2, 512)
    expected = model(x)
    with _offload(model, ReferenceDevice(), ReferenceDisk(), host_limit_bytes="16MiB") as offload:
        for _ in range(2):
            assert torch.equal(model(x), expected)
        assert offload.stats().host_bytes <= 16 * 2**20 < offload.stats().disk_bytes
    assert torch.equal(model(x), expected)


def test_weights_from_files(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    device, plain = ReferenceDevice(), _model()
    safetensors.save_file(
        {name: tensor.contiguous() for name, tensor in plain.state_dict().items()}, tmp_path / "model.safetensors"
    )
    with torch.device("meta"):
        model = _model()
    x = torch.randn(3, WIDTH)

    with _offload(model, device, ReferenceDisk(), weights=tmp_path):
        _assert_same(_results(plain, x), _results(model, x))
    _assert_same(_results(plain, x), _results(model, x))


class _Faults:
    def __init__(self) -> None:
        self.fails_at: set[int] = set()
        self.num_calls = 0

    def __call__(self, what: str, offset: int, num_bytes: int) -> int:
        if what == "reserve":
            return 0
        self.num_calls += 1
        if self.num_calls in self.fails_at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return num_bytes


@pytest.mark.parametrize("seed", [1, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_late", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_read_that_fails_at_every_place(seed: int | None, is_late: bool) -> None:
    device, faults = ReferenceDevice(), _Faults()
    plain, model = _model(), _model()
    x = torch.randn(3, WIDTH)
    expected = _results(plain, x)
    num_failed = 0
    with _offload(model, device, ReferenceDisk(fault=faults, seed=seed, is_late=is_late)):
        _assert_same(expected, _results(model, x))
        for at in range(1, 60, 3):
            faults.num_calls, faults.fails_at = 0, {at, at + 2}
            try:
                _assert_same(expected, _results(model, x), str(at))
            except DiskError as error:
                assert error.errno == errno.EIO  # noqa: PT017
                num_failed += 1
            faults.fails_at = set()
            for _ in range(2):
                try:
                    found = _results(model, x)
                except DiskError:  # of a layer that was read ahead as the one before failed
                    continue
                _assert_same(expected, found, str(at))
                break
            else:
                pytest.fail("a disk that works again still fails")
        assert num_failed > 5
    _assert_same(expected, _results(model, x))
    device.synchronize()
    assert not device.races


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"train": "host"}, ValueError, 'disk= is for frozen layers, train="frozen"'),
        ({"train": "fused", "optimizer": torch.optim.SGD}, ValueError, 'found train="fused"'),
        ({"offload_ratio": "auto"}, ValueError, "disk= needs a number as offload_ratio"),
        ({"disk": "/tmp"}, TypeError, "disk is a memkit.Disk"),
        ({"disk": ReferenceDisk(limit="4KiB")}, DiskError, "found limit=4.00 KiB"),
        ({"host_limit_bytes": 0}, HostMemoryError, "more of host memory is needed"),
    ],
)
def test_what_does_not_go(options: dict[str, Any], error: type[Exception], text: str) -> None:
    model = _model()
    before, threads = copy.deepcopy(model.state_dict()), num_own_threads()

    with pytest.raises(error) as caught:
        _offload(model, ReferenceDevice(), **{"disk": ReferenceDisk(), **options})

    assert text in str(caught.value)
    assert all(map(torch.equal, before.values(), model.state_dict().values()))
    assert num_own_threads() == threads
