"""A recording remembers values and roots, each op's reads and writes, and nothing that holds memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

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
        recording = context._entry.recording._forward.recording
        yield recording
        recording.sync()


def _leaf() -> Tensor:
    return torch.randn(4, 8, requires_grad=True)


def test_ops_read_and_make_values() -> None:
    x = _leaf()
    with recorded() as recording:
        y = x.sin()
        z = y * x
        values = [recording.value_of(tensor) for tensor in (x, y, z)]

    assert values == [0, 1, 2]
    assert recording.lineage.ins == [(0,), (1, 0)]
    assert recording.lineage.outs == [(1,), (2,)]
    assert recording.lineage.maker == [-1, 0, 1]
    assert recording.lineage.num_bytes == [128] * 3
    assert list(recording.roots) == [0]


def test_views_make_no_value() -> None:
    x = _leaf()
    with recorded() as recording:
        y = x.sin()
        for view in (y.t(), y[1:], y.view(2, 16), y.unsqueeze(0).expand(3, 4, 8), y.detach(), *y.chunk(2), y.reshape(-1)):
            assert recording.value_of(view) == recording.value_of(y)

    assert len(recording.calls) == 1
    assert recording.num_values == 2


def test_write_makes_the_next_value() -> None:
    x = _leaf()
    with recorded() as recording:
        y = x.sin()
        before = recording.value_of(y)
        y[0].mul_(2)
        after = recording.value_of(y)

    assert (before, after) == (1, 2)
    assert recording.lineage.taken == {1: ((1, 2),)}
    assert recording.lineage.ins[1] == (1,)


def test_copy_over_all_needs_nothing_of_what_was_there() -> None:
    x = _leaf()
    with recorded() as recording:
        whole, part = torch.empty(4, 8), torch.empty(4, 8)
        whole.copy_(x.sin())
        part[:2].copy_(x[:2])
        made, unmade = recording.value_of(whole), recording.value_of(part)

    assert recording.lineage.maker[made] == len(recording.calls) - 1
    assert recording.lineage.taken == {}
    assert unmade in recording.roots
    assert recording.roots[unmade].is_inside


def test_leaf_that_is_written_to_is_a_root_again() -> None:
    x, buffer = _leaf(), torch.zeros(4, 8)
    with recorded() as recording:
        first = recording.value_of(buffer)
        buffer.add_(x.detach())
        second = recording.value_of(buffer)

    assert first != second
    assert {first, second} <= recording.roots.keys()
    assert recording.roots[first].is_lost
    assert not recording.roots[second].is_inside


def test_batch_norm_statistics_are_not_read_again() -> None:
    x, norm = _leaf(), nn.BatchNorm1d(8)
    with recorded() as recording:
        y = norm(x.sin())
        statistics = recording.find(norm.running_mean.untyped_storage())
        made = recording.value_of(y)

    call = recording.calls[recording.lineage.maker[made]]
    assert statistics in recording.hidden  # a reader now must not see a later update
    assert statistics not in [source[1] for source in call.sources]
    assert [source[0] for source in call.sources] == [0, 1, 2]
    assert call.args[3:5] == [None, None]


def test_random_op_remembers_its_generator_and_state() -> None:
    x, generator = _leaf(), torch.Generator().manual_seed(4)
    with recorded() as recording:
        torch.manual_seed(1)
        state = torch.get_rng_state()
        functional.dropout(x, 0.5)
        own = generator.get_state()
        torch.rand(3, generator=generator)

    notes = [call for call in recording.calls if call.generator is not None]
    assert [note.generator.initial_seed() for note in notes] == [1, 4]
    assert torch.equal(notes[0].state, state)
    assert torch.equal(notes[1].state, own)


@pytest.mark.parametrize("num_results", [1, 2])
def test_several_results_are_several_values(num_results: int) -> None:
    x = _leaf()
    with recorded() as recording:
        results = [x.topk(3).values, *x.topk(3)][-num_results:]
        values = [recording.value_of(tensor) for tensor in results]

    assert len(recording.lineage.outs[-1]) == 2
    assert set(values) <= set(recording.lineage.outs[-1])


def test_copies_are_made_again_unless_they_cross_devices() -> None:
    x = torch.ones(2)

    with recorded() as recording:
        for dtype in (torch.float64, torch.float16):  # the second takes the short path
            here = x.to(dtype)
            there = x.to("meta", dtype)
            assert recording.value_of(here) not in recording.roots
            assert recording.value_of(there) in recording.roots


def test_backward_is_not_recorded() -> None:
    x = _leaf()
    with recorded() as recording:
        loss = x.sin().sum()
        grad = torch.ones(())
        num_ops = len(recording.funcs)
        loss.backward(grad)

        assert len(recording.funcs) == num_ops


def test_tape_holds_no_tensors_while_nothing_is_dropped() -> None:
    import weakref

    x = _leaf()
    with recorded() as recording, torch.no_grad():
        y = x.sin()
        gone = weakref.ref(y.untyped_storage())
        z = y.cos()
        del y

        assert gone() is None
        assert recording.find(z.untyped_storage()) == 2


@pytest.mark.parametrize(
    ("func", "op_class"),
    [
        (aten.sin.default, OpClass.REPLAYED),
        (aten.relu_.default, OpClass.REPLAYED),
        (aten.view.default, OpClass.VIEW),
        (aten.detach.default, OpClass.VIEW),
        (aten.split.Tensor, OpClass.VIEW),
        (aten._unsafe_view.default, OpClass.VIEW),
        (aten.empty.memory_format, OpClass.OPAQUE),
        (aten.zeros_like.default, OpClass.OPAQUE),
        (aten.nonzero.default, OpClass.OPAQUE),
        (aten._local_scalar_dense.default, OpClass.OPAQUE),
        (aten.masked_select.default, OpClass.OPAQUE),
        (aten._cudnn_rnn.default, OpClass.OPAQUE),
        (aten.mkldnn_rnn_layer.default, OpClass.OPAQUE),
        (torch.ops.higher_order.cond, OpClass.UNKNOWN),
        (torch.ops._c10d_functional.all_reduce.default, OpClass.UNKNOWN),
        (torch.ops._c10d_functional.wait_tensor.default, OpClass.UNKNOWN),
    ],
)
def test_kinds(func: object, op_class: OpClass) -> None:
    assert op_kinds().of(func).op_class is op_class


@pytest.mark.parametrize(
    "func",
    [
        aten.native_dropout.default,
        aten.bernoulli_.float,
        aten.rand_like.default,
        aten.randperm.default,
        aten.multinomial.default,
        aten.normal_.default,
        aten.uniform_.default,
        aten.random_.default,
        aten._sample_dirichlet.default,
        aten.rrelu_with_noise.default,
        aten._fused_dropout.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    ],
)
def test_ops_that_draw(func: object) -> None:
    assert op_kinds().of(func).is_random


@pytest.mark.parametrize(
    "func", [aten.native_batch_norm.default, aten.cudnn_batch_norm.default, aten._native_batch_norm_legit.default]
)
def test_hidden_writers(func: object) -> None:
    kind = op_kinds().of(func)

    assert kind.statistics == (3, 4)
    assert not kind.is_plain
