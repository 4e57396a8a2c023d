"""Saved tensors that are no range of bytes, or have their own class: every context gives them back unchanged."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.func import jvp, vmap
from torch.nn import functional

import memkit
from memkit.core.tensors import byte_view, storages_of
from memkit.core.torch_state import has_own_dispatch
from memkit.device import ReferenceDevice
from tests.activations.cases import Computation, assert_same_bits, gradients, inputs_on
from tests.activations.remat.conftest import NO_PLAN_FITS
from tests.contracts.contexts import KINDS, MORE_KINDS

Context = Callable[[], AbstractContextManager[object]]

pytestmark = [
    pytest.mark.filterwarnings(NO_PLAN_FITS),
    pytest.mark.filterwarnings("ignore:.*a dual level was opened within"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:Sparse (CSR|invariant checks)|torch.quantize_per_tensor"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),  # torch 2.10's own forward mode
]


@pytest.fixture(params=["offload all", "remat dtr of nothing", "remat dtr, verified", "budget", "offload around remat"])
def context(request: pytest.FixtureRequest) -> Iterator[Context]:
    """Return contexts on the device of the host: only there do ops on most of these tensors exist."""
    device = ReferenceDevice()
    yield functools.partial((KINDS | MORE_KINDS)[request.param].make, device, "odd")
    device.synchronize()


class Named(Tensor):
    """Only has a name of its own."""


class Refusing(Tensor):
    """Knows no op."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"Refusing does not know {func}")


class Wrapper(Tensor):
    """Wraps another tensor, which every op sees instead."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made = Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), dtype=inner.dtype, device=inner.device, requires_grad=inner.requires_grad
        )
        made.inner = inner
        return made

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unwrapped = torch.utils._pytree.tree_map_only(Wrapper, lambda wrapper: wrapper.inner, (args, kwargs or {}))
        results = func(*unwrapped[0], **unwrapped[1])
        if func is torch.ops.aten.mul_.Tensor:
            return args[0]
        return torch.utils._pytree.tree_map_only(Tensor, cls, results)


class Flat(Wrapper):
    """A wrapper that also names its inner tensors."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Flat:
        return Flat(inner["inner"])


_of_jagged = torch.nested.nested_tensor_from_jagged

SAVED: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda y: y,
    "strided nested": lambda y: torch.nested.as_nested_tensor([y[:3].detach(), y[3:].detach()]),
    "jagged": lambda y: _of_jagged(y, torch.tensor([0, 3, 8])),
    "jagged and transposed": lambda y: _of_jagged(y.view(8, 4, 8), torch.tensor([0, 3, 8])).transpose(1, 2),
    "jagged with gaps": lambda y: _of_jagged(y, torch.tensor([0, 4, 8]), torch.tensor([2, 3])),
    "jagged with known lengths": lambda y: _of_jagged(y, torch.tensor([0, 3, 8]), min_seqlen=3, max_seqlen=5),
    "zeros without bytes": lambda y: torch._efficientzerotensor(y.shape),
    "view of zeros without bytes": lambda y: torch._efficientzerotensor(y.shape)[1:].t(),
    "COO": lambda y: y.to_sparse(),
    "COO, not coalesced": lambda y: torch.sparse_coo_tensor(torch.tensor([[0, 0, 2]]), y[:3], (8, 32)),
    "CSR": lambda y: y.to_sparse_csr(),
    "CSC": lambda y: y.to_sparse_csc(),
    "BSR": lambda y: y.to_sparse_bsr((2, 2)),
    "BSC": lambda y: y.to_sparse_bsc((2, 2)),
    "values of a sparse one": lambda y: y.to_sparse()._values(),
    "oneDNN": lambda y: y.to_mkldnn(),
    "quantized": lambda y: torch.quantize_per_tensor(y, 0.1, 10, torch.quint8),
    "quantized by channel": lambda y: torch.quantize_per_channel(y, torch.rand(8) + 1, torch.zeros(8).int(), 0, torch.qint8),
    "float8": lambda y: y.to(torch.float8_e4m3fn),
    "booleans": lambda y: y > 0,
    "meta": lambda y: torch.empty_like(y, device="meta"),
    "fake": lambda y: FakeTensorMode().from_tensor(y.detach()),
    "conjugated": lambda y: torch.view_as_complex(y.view(8, 16, 2)).conj(),
    "negated": lambda y: torch.view_as_complex(y.view(8, 16, 2)).conj().imag,
    "without elements": lambda y: y[:0],
    "without elements, strided": lambda y: torch.empty_strided((0, 3), (7, 2)),
    "one number": lambda y: y.sum(),
    "expanded": lambda y: y[:1].expand(64, 32),
    "of no stride at all": lambda y: y.sum().expand(4, 4),
    "overlapping": lambda y: y.as_strided((6, 32), (8, 1), 16),
    "a class of its own": lambda y: y.as_subclass(Named),
    "a part of a class of its own": lambda y: y.as_subclass(Named)[2:],
    "a class that refuses": lambda y: y.as_subclass(Refusing),
    "parameter": lambda y: nn.Parameter(y.detach()),
    "buffer": lambda y: nn.Buffer(y.detach()),
    "wrapper": Wrapper,
    "wrapper that flattens": Flat,
    "wrapper in a wrapper": lambda y: Flat(Flat(y)),
    "storage without bytes": lambda y: [made := y.clone(), made.untyped_storage().resize_(0)][0],
}


def _describe(tensor: Tensor) -> list[object]:
    """Return everything that a backward may see of a tensor."""
    if isinstance(tensor, Wrapper):
        return [type(tensor), *_describe(tensor.inner)]
    with torch._C.DisableTorchFunctionSubclass():
        kind = type(tensor) if has_own_dispatch(tensor) else Tensor  # torch gives back a plain one under any hooks
        found = [kind, tensor.dtype, tensor.device, tensor.layout, tensor.is_nested, tensor._is_zerotensor()]
        if tensor.layout is torch._mkldnn:
            return [*found, tensor.to_dense().tolist()]
        if tensor.is_quantized:
            return [*found, tensor.int_repr().tolist(), tensor.qscheme(), str(tensor)]
        if tensor.layout is torch.strided and not tensor.is_nested:
            found += [tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.is_conj(), tensor.is_neg()]
        elif tensor.layout is torch.jagged:
            found += [tensor.shape, tensor.stride(), tensor._ragged_idx]
        if tensor.is_meta or isinstance(tensor, FakeTensor) or tensor._is_zerotensor():
            return found
        return [*found, *(bytes(byte_view(storage).tolist()) for storage in storages_of(tensor))]


class Keeps(torch.autograd.Function):
    """Saves a tensor, and notes in the backward the tensor it got and the one it had saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, make: Callable[[], Tensor], seen: list[object]) -> Tensor:
        saved = make()  # no argument: torch does not take each kind for one
        ctx.save_for_backward(saved)
        ctx.seen, ctx.wanted = seen, _describe(saved)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (saved,) = ctx.saved_tensors
        ctx.seen.append((_describe(saved), ctx.wanted))
        return grad, None, None


@pytest.mark.core(1)
@pytest.mark.parametrize("kind", SAVED)
def test_is_given_back_as_it_was(kind: str, context: Context) -> None:
    x, w = inputs_on(torch.device("cpu"))
    seen: list[tuple[object, object]] = []
    for _ in range(2):
        with context():
            y = functional.linear(x, w).sin()
            loss = Keeps.apply(y, functools.partial(SAVED[kind], y), seen).exp().sum()
            del y
        loss.backward(retain_graph=True)
        loss.backward()

    assert len(seen) == 4
    for found, wanted in seen:
        assert found == wanted


# Computations


def nested_and_padded(x: Tensor, w: Tensor) -> Tensor:
    rows = torch.nested.as_nested_tensor([x[:2].sin(), x[2:3], x[3:]])
    return torch.nested.to_padded_tensor(functional.linear(rows, w), 0.0).sin()


def nested_softmax(x: Tensor, w: Tensor) -> Tensor:
    rows = torch.nested.as_nested_tensor([functional.linear(x[:2], w), functional.linear(x[2:], w)])
    return torch.nested.to_padded_tensor(torch.softmax(torch.nn.functional.relu(rows) * 2, -1), 0.5).exp()


def jagged_attention(x: Tensor, w: Tensor) -> Tensor:
    heads = functional.linear(x, w).sin().view(8, 4, 8)
    rows = torch.nested.nested_tensor_from_jagged(heads, torch.tensor([0, 3, 4, 8])).transpose(1, 2)
    attended = functional.scaled_dot_product_attention(rows, rows.sin(), rows.cos())
    return attended.transpose(1, 2).contiguous().values().exp()


def jagged_elementwise(x: Tensor, w: Tensor) -> Tensor:
    rows = torch.nested.nested_tensor_from_jagged(functional.linear(x, w), torch.tensor([0, 3, 4, 8]))
    first, second = rows.sin().exp(), rows.cos()
    return functional.layer_norm(first * second + functional.linear(first, w), (32,)).tanh().values()


def forward_mode(x: Tensor, w: Tensor) -> Tensor:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        y = functional.linear(torch.tanh(functional.linear(dual, w, w[0])), w, w[1]).exp()
        y = (y + 1.5 - w[2] + y.relu() * 2 + 3 / y) @ w
        primal, tangent = forward_ad.unpack_dual(y)
        return primal + tangent.square().sin()


def zeros_without_bytes(x: Tensor, w: Tensor) -> Tensor:
    zeros = torch._efficientzerotensor((8, 32))
    y = functional.linear(x, w).sin()
    first = (y.atan2(zeros) + y * zeros).exp() + (zeros + y).sin().exp() + (zeros * 2 * y.exp()).exp()
    y = (y * (zeros + 0.1)).exp() * y.atan2(3 - zeros) * (y + (zeros + 2)).sin() * (y * (zeros - True)).exp()
    second = y.clone() * zeros.t().clone().t()  # the one op that is given such zeros, and makes bytes of them
    return first * (second + y.sin()).exp() * torch.cat([zeros[:, :16], y[:, 16:]], 1).exp()


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    INTEGERS = [torch.quantize_per_tensor(torch.rand(8, 32), scale, 10, torch.quint8) for scale in (0.1, 0.2)]


def from_integers(x: Tensor, w: Tensor) -> Tensor:
    y = functional.linear(x, w).sin()
    for integers in INTEGERS:
        y = (integers.dequantize() + y).exp().sin()
    return y


def of_each_sample(x: Tensor, w: Tensor) -> Tensor:
    return vmap(lambda row: functional.linear(row, w).sin().exp() / row.norm())(x).tanh()


def jacobian_product(x: Tensor, w: Tensor) -> Tensor:
    primal, tangent = jvp(lambda y: functional.linear(y, w).sin().exp(), (x,), (x.detach().cos(),))
    return primal + tangent.tanh()


def jacobian_product_of_each(x: Tensor, w: Tensor) -> Tensor:
    def product(row: Tensor) -> Tensor:
        return jvp(lambda y: functional.linear(y, w).sin().exp(), (row,), (torch.ones(32),))[1]

    return vmap(product)(x).tanh()


def sparse_products(x: Tensor, w: Tensor) -> Tensor:
    y = functional.linear(x, w).sin()
    coo, csr = functional.relu(w.detach()).to_sparse(), functional.relu(w.detach()).to_sparse_csr()
    return torch.sparse.mm(coo, y.t()).t().exp() * (csr @ y.t().exp()).t().sin()


def without_data_beside(x: Tensor, w: Tensor) -> Tensor:
    y = functional.linear(x, w).sin()
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(8, 32)).requires_grad_()
        (fake.sin() * fake.exp()).sum().backward()
    meta = torch.empty(8, 32, device="meta", requires_grad=True)
    (meta.sin() * meta.exp()).sum().backward()
    return y.exp() * y.cos()


def class_of_its_own(x: Tensor, w: Tensor) -> Tensor:
    y = functional.linear(x.as_subclass(Named), w).sin()
    return functional.linear(y.exp() * y, w).cos().as_subclass(Tensor)


def wrapped(x: Tensor, w: Tensor) -> Tensor:
    y = Flat(functional.linear(x, w).detach()).requires_grad_()
    z = (y.sin() * y.exp()).cos() * 2
    (grad,) = torch.autograd.grad(z, y, Flat(x.detach()))
    return functional.linear(x, w) * grad.inner


COMPUTATIONS: dict[str, Computation] = {
    made.__name__: made
    for made in (
        *(nested_and_padded, nested_softmax, jagged_attention, jagged_elementwise, forward_mode, zeros_without_bytes),
        *(from_integers, of_each_sample, jacobian_product, jacobian_product_of_each, sparse_products, without_data_beside),
        *(class_of_its_own, wrapped),
    )
}


@pytest.mark.core(1)
@pytest.mark.parametrize("computation", COMPUTATIONS.values(), ids=COMPUTATIONS)
def test_gradients_are_those_of_the_plain_run(computation: Computation, context: Context) -> None:
    plain = gradients(computation, torch.device("cpu"), nullcontext)

    assert_same_bits(gradients(computation, torch.device("cpu"), context), plain)


def test_values_of_a_jagged_tensor_leave() -> None:
    x, w = inputs_on(torch.device("cpu"))
    device = ReferenceDevice()
    with memkit.CPUOffload(1.0, "jagged", device=device, min_bytes=0, window_bytes=0):
        y = torch.nested.nested_tensor_from_jagged(functional.linear(x, w), torch.tensor([0, 3, 8])).sin().exp()
        loss = y.values().sum()
        storage = weakref.ref(y.values().untyped_storage())
        del y
    stats = memkit.stats("jagged")

    assert stats.moved_out_bytes == 2 * 8 * 32 * 4  # the sine's input and the exponential's result
    assert storage() is None
    loss.backward()
    memkit.reset("jagged")


@pytest.mark.parametrize("kind", ["plain", "strided nested", "jagged", "COO", "CSR", "wrapper", "wrapper that flattens"])
def test_write_after_the_save_is_noticed(kind: str, context: Context) -> None:
    x, w = inputs_on(torch.device("cpu"))
    made: list[Tensor] = []

    def make() -> Tensor:
        made.append(SAVED[kind](functional.linear(x, w).detach().sin()))
        return made[0]

    with context():
        loss = Keeps.apply(functional.linear(x, w), make, []).sum()
    with torch.no_grad():
        made[0].mul_(2)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
