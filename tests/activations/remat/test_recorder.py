"""A recording distinguishes ops that can run again from others, and holds no memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import memkit
from memkit.device import CpuDevice
from memkit.recording.ops import OpClass, op_kinds
from memkit.recording.recording import Recording

aten = torch.ops.aten


@contextmanager
def recorded() -> Iterator[Recording]:
    context = memkit.Rematerialize("1GiB", "recorded", min_bytes=0, device=CpuDevice())
    with context:
        assert context._entry is not None
        yield context._entry.recording._forward.recording


def _leaf() -> Tensor:
    return torch.randn(4, 8, requires_grad=True)


def test_copies_are_made_again_unless_they_cross_devices() -> None:
    x = torch.ones(2)

    with recorded() as recording:
        for dtype in (torch.float64, torch.float16):  # the second takes the short path
            here = x.to(dtype)
            there = x.to("meta", dtype)
            assert recording.value_of(here) not in recording.roots
            assert recording.value_of(there) in recording.roots


def test_backward_is_not_recorded() -> None:
    with recorded() as recording:
        loss = _leaf().sin().sum()
        grad = torch.ones(())
        num_ops = len(recording.funcs)
        loss.backward(grad)

        assert len(recording.funcs) == num_ops


def test_no_tensor_is_held_while_nothing_is_dropped() -> None:
    with recorded() as recording, torch.no_grad():
        y = _leaf().sin()
        gone = weakref.ref(y.untyped_storage())
        z = y.cos()
        del y

        assert gone() is None
        assert recording.find(z.untyped_storage()) == 2


KINDS = {
    OpClass.REPLAYED: (aten.sin.default, aten.relu_.default),
    OpClass.VIEW: (aten.view.default, aten.detach.default, aten.split.Tensor, aten._unsafe_view.default),
    OpClass.OPAQUE: (
        *(aten.empty.memory_format, aten.zeros_like.default, aten.nonzero.default, aten._local_scalar_dense.default),
        *(aten.masked_select.default, aten._cudnn_rnn.default, aten.mkldnn_rnn_layer.default),
    ),
    OpClass.UNKNOWN: (
        torch.ops.higher_order.cond,
        torch.ops._c10d_functional.all_reduce.default,
        torch.ops._c10d_functional.wait_tensor.default,
    ),
}
DRAWING = (
    *(aten.native_dropout.default, aten.bernoulli_.float, aten.rand_like.default, aten.randperm.default),
    *(aten.multinomial.default, aten.normal_.default, aten.uniform_.default, aten.random_.default),
    *(aten._sample_dirichlet.default, aten.rrelu_with_noise.default, aten._fused_dropout.default),
    *(aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_cudnn_attention.default),
)
WRITING_STATISTICS = (aten.native_batch_norm.default, aten.cudnn_batch_norm.default, aten._native_batch_norm_legit.default)


@pytest.mark.parametrize("op_class", KINDS)
def test_kinds(op_class: OpClass) -> None:
    assert {op_kinds().of(func).op_class for func in KINDS[op_class]} == {op_class}


def test_ops_that_draw_and_ops_that_write_statistics() -> None:
    assert all(op_kinds().of(func).is_random for func in DRAWING)
    assert {op_kinds().of(func).statistics for func in WRITING_STATISTICS} == {(3, 4)}
    assert not any(op_kinds().of(func).is_plain for func in (*DRAWING, *WRITING_STATISTICS))
