"""Storages that several streams use, or that have several version counters."""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor

import memkit
from memkit.activations.saved.state import offload_states
from memkit.device import Device
from tests.activations.cases import assert_same_bits
from tests.activations.conftest import Offload


@pytest.mark.parametrize("window_bytes", [0, None])
def test_slices_of_one_storage_with_counters_of_their_own(
    window_bytes: int | None, device: Device, offloading: Offload
) -> None:
    def run(context: AbstractContextManager[object]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        first, second, weight = (torch.randn(64, generator=generator).to(device.torch_device) for _ in range(3))
        weight.requires_grad_()
        storage = torch.zeros(128, device=device.torch_device)
        with context:
            one = storage.data[:64]
            one.copy_(first)
            product = weight * one
            other = storage.data[64:]
            other.copy_(second)
            product = product + 2 * (weight * other)
            del one, other, storage
            product = product.exp()
        product.sum().backward()
        return [product.detach(), weight.grad]

    assert_same_bits(run(offloading(1.0, "counters", window_bytes=window_bytes)), run(nullcontext()))


def test_a_storage_saved_on_two_streams_is_let_go_when_both_are_done(device: Device, offloading: Offload) -> None:
    compute, other = device.current_stream(), device.new_stream("other")
    x, w = (torch.randn(64, 64, device=device.torch_device).requires_grad_() for _ in range(2))
    with offloading(1.0, "streams", window_bytes=0):
        device.wait_event(other, device.record_event(compute))
        with device.on_stream(other):
            hidden = (x * 2).exp()
        device.wait_event(compute, device.record_event(other))
        product = hidden * w
        device.note_read(hidden.untyped_storage())
        del hidden
        product = product.exp()

    device.wait_event(other, device.record_event(compute))  # as autograd does where a graph has several streams
    product.sum().backward()
    device.synchronize()  # raises if something was freed while a stream may still use it


def test_reset_while_copies_are_under_way_gives_host_memory_back_once_they_are_done(
    device: Device, offloading: Offload
) -> None:
    x = torch.randn(64, 64, device=device.torch_device).requires_grad_()
    with offloading(1.0, "back", window_bytes=2**20):
        y = (x * 2).exp().exp()
    arena = offload_states["back"].windows()[0].arena

    del y
    memkit.reset("back")
    gc.collect()
    device.synchronize()
    memkit.reset("another")

    assert arena.held_bytes == 0
