"""Streamed weights on systems that pin less host memory than is asked for: slower, and the same to the bit."""

from __future__ import annotations

import copy
import gc
import re
import threading
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import memkit
from memkit.core.sizes import HOST_PAGE_BYTES
from memkit.device import Device, Stream
from memkit.transfer import host_memory
from tests.gpus import ON_GPU
from tests.refusing import PinLimit
from tests.weights.cases import TRAIN, Stack, assert_same, inputs, only_lora, run_step, stack, streamed

pytestmark = pytest.mark.slow

PAGE = HOST_PAGE_BYTES
LIMITS = {"staged": 4 * PAGE, "pageable": 0}
"""How many bytes the system pins: four buffers of a page, fewer than six layers; or nothing."""
WARNS = pytest.mark.filterwarnings("ignore:LayerOffload. the system did not pin")


@pytest.fixture(params=LIMITS)
def limit(request: pytest.FixtureRequest, device: Device, monkeypatch: pytest.MonkeyPatch) -> PinLimit:
    monkeypatch.setattr(host_memory, "CHUNK_BYTES", 1024)  # a layer has five of them
    return PinLimit(device, monkeypatch, LIMITS[request.param])


def _staging_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "memkit-staging" in thread.name]


# The same to the bit


# One warning


@pytest.mark.parametrize("train", ["frozen", "host"])
def test_warns_once_when_it_is_made(train: str, limit: PinLimit, device: Device) -> None:
    model = stack(train, 6).to(device.torch_device)
    way = "go straight from and to it" if limit.limit_bytes == 0 else r"go through 4 buffers of 1.00 KiB"

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with memkit.LayerOffload(model, num_resident=0, device=device, train=train) as offload:
            for _ in range(2):
                run_step(model, inputs(device))
            assert offload.stats().host_bytes >= 6 * PAGE

    assert len(caught) == 1
    assert re.match(
        rf"LayerOffload: the system did not pin \d+.\d\d KiB of host memory .* {way}.* Raise the limit on locked memory",
        str(caught[0].message),
    )
    assert caught[0].filename == __file__


def test_warns_once_when_memory_is_needed_later(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = PinLimit(device, monkeypatch, 100 * PAGE)
    with streamed(Stack(), device, train="host") as (model, plain, batches, _):
        expected = run_step(plain, batches)
        limit.limit_bytes = sum(limit.pinned.values())
        kept = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(4):
                assert_same(run_step(model, batches), expected)
                kept.append([parameter.grad for parameter in model.parameters()])  # so that the next take other memory
                model.zero_grad()
        kept.clear()
    assert ["the system did not pin" in str(warning.message) for warning in caught] == [True]
    assert not limit.pinned


# Closing


@pytest.mark.slow
@WARNS
@pytest.mark.parametrize("device", ["late", *ON_GPU], indirect=True)
@pytest.mark.parametrize("train", TRAIN)
def test_nothing_is_left_by_opening_and_closing(train: str, limit: PinLimit, device: Device) -> None:
    model = stack(train, 6).to(device.torch_device)
    optimizer = partial(torch.optim.SGD, lr=0.0) if train == "fused" else None
    counter, batch = device.memory_counter(), inputs(device)[0]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    allocated_bytes = []
    for _ in range(20):
        with memkit.LayerOffload(model, offload_ratio=1.0, device=device, train=train, optimizer=optimizer):
            model(batch).sum().backward()
        model.zero_grad()
        gc.collect()
        allocated_bytes.append(counter.allocated_bytes())

    assert allocated_bytes[1:] == allocated_bytes[1:2] * 19
    assert not _staging_threads()
    assert not limit.pinned
    for name, tensor in model.state_dict().items():
        assert tensor.device.type == device.torch_device.type
        assert torch.equal(tensor, before[name]), name


@WARNS
def test_close_behind_a_forward_with_copies_on_their_way(
    limit: PinLimit, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = only_lora(Stack()).to(device.torch_device)
    plain, batches = copy.deepcopy(model), inputs(device)
    offload = memkit.LayerOffload(model, offload_ratio=1.0, device=device)
    with monkeypatch.context() as patch:
        opened = threading.Event()
        for name in ("copy", "copy_pageable"):
            patch.setattr(device, name, _gated(getattr(device, name), opened))
        offload._streams.begin_pass()
        threading.Timer(0.02, opened.set).start()
        offload.close()

    assert_same(run_step(model, batches), run_step(plain, batches))
    assert not _staging_threads()
    assert not limit.pinned


def _gated(copy: Callable[[Tensor, Tensor, Stream], None], opened: threading.Event) -> Callable[..., None]:
    def gated(destination: Tensor, source: Tensor, stream: Stream) -> None:
        assert opened.wait(300)
        copy(destination, source, stream)

    return gated


# Failures


class Failing:
    """Copies of a device that fail in one direction, from one on."""

    def __init__(self, device: Device, patch: pytest.MonkeyPatch, *, is_out: bool, num_left: int) -> None:
        self.is_out, self.num_left = is_out, num_left
        self._device = device
        for name in ("copy", "copy_pageable"):
            patch.setattr(device, name, partial(self._copy, getattr(device, name)))

    def _copy(self, copy: Callable[..., None], destination: Tensor, source: Tensor, stream: Stream) -> None:
        threads = threading.current_thread().name
        if "memkit-staging" in threads and self._is_out(destination) == self.is_out:
            self.num_left -= 1
            if self.num_left < 0:
                raise RuntimeError("the link is down")
        copy(destination, source, stream)

    def _is_out(self, destination: Tensor) -> bool:
        return destination.untyped_storage().nbytes() > 2**30  # the arena's addresses


@WARNS
@pytest.mark.parametrize("num_left", [0, 7])
def test_copy_to_the_device_fails(num_left: int, limit: PinLimit, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    num_left = num_left if limit.limit_bytes else num_left // 5
    with streamed(only_lora(Stack()), device) as (model, plain, batches, offload):
        with monkeypatch.context() as patch:
            Failing(device, patch, is_out=False, num_left=num_left)
            with pytest.raises(RuntimeError, match="the link is down"):
                run_step(model, batches)
        model.zero_grad()

        for _ in range(2):
            assert_same(run_step(model, batches), run_step(plain, batches))
        assert offload.stats().num_overflows == 0


@WARNS
@pytest.mark.parametrize("is_accumulated", [False, True])
@pytest.mark.parametrize("num_left", [0, 7])
def test_gradient_does_not_come_to_the_host(
    num_left: int, is_accumulated: bool, limit: PinLimit, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    with streamed(Stack(), device, train="host") as (model, plain, batches, _):
        if is_accumulated:
            model(batches[0]).sum().backward()
        with monkeypatch.context() as patch:
            Failing(device, patch, is_out=True, num_left=num_left)
            with pytest.raises(RuntimeError, match="the link is down"):
                model(batches[0]).sum().backward()
        model.zero_grad()

        for _ in range(2):
            assert_same(run_step(model, batches), run_step(plain, batches))
    assert not limit.pinned


@WARNS
@pytest.mark.usefixtures("limit")
def test_weights_that_were_not_written_back_are_not_read(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    down = pytest.raises(RuntimeError, match="the link is down")
    with streamed(Stack(), device, **TRAIN["fused"]) as (model, _, (batch, _), _):
        with monkeypatch.context() as patch:
            Failing(device, patch, is_out=True, num_left=0)
            with down:
                model(batch).sum().backward()

        with down:
            model(batch)
