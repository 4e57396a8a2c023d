"""Small computations, each hard for a saved-tensor feature in one way, and the check against the plain run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

Computation = Callable[..., Tensor]


class SavesTwice(torch.autograd.Function):
    """Saves its input and its output, and reads `ctx.saved_tensors` twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.sigmoid()
        ctx.save_for_backward(x, y)
        ctx.factor = 2.0
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x, _), (_, y) = ctx.saved_tensors, ctx.saved_tensors
        return ctx.factor / 2 * grad * y * (1 - y) + 0 * x


def mlp(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(4):
        x = functional.gelu(functional.linear(x, w))
    return x


def convolution(x: Tensor, w: Tensor) -> Tensor:
    image = functional.linear(x, w).view(8, 2, 4, 4)
    for _ in range(3):
        image = functional.relu(
            functional.batch_norm(functional.conv2d(image, w[:2, :18].view(2, 2, 3, 3), padding=1), None, None, training=True)
        )
    return image.sigmoid()


def channels_last(x: Tensor, w: Tensor) -> Tensor:
    image = functional.linear(x, w).view(8, 2, 4, 4).to(memory_format=torch.channels_last)
    return functional.conv2d(functional.silu(image), w[:2, :18].view(2, 2, 3, 3), padding=1).tanh()


def attention(x: Tensor, w: Tensor) -> Tensor:
    heads = functional.linear(x, w).view(1, 8, 4, 8).transpose(1, 2)
    return functional.scaled_dot_product_attention(heads, heads.sin(), heads.cos(), is_causal=True)


def views_of_one_storage(x: Tensor, w: Tensor) -> Tensor:
    q, k, v, rest = functional.linear(x, w).exp().chunk(4, dim=-1)
    return (q.sin() * k.cos() * v).t().contiguous() * rest.tanh().t() + q.narrow(1, 3, 5).exp().sum()


def saved_many_times(x: Tensor, w: Tensor) -> Tensor:
    y = functional.linear(x, w)
    return y.sin() + y.cos() * y.exp() + (y * y).tanh() + y[:, ::2].sigmoid().sum() + y.t().sin().sum()


def outputs_as_saved(x: Tensor, w: Tensor) -> Tensor:
    return functional.softmax(functional.linear(x, w).exp().sqrt().tanh(), -1).reciprocal().log()


def broadcast(x: Tensor, w: Tensor) -> Tensor:
    row = functional.linear(x, w).mean(0, keepdim=True).expand(64, 32)
    return row.sin() * row.t().t().exp()


def in_place(x: Tensor, w: Tensor) -> Tensor:
    y = functional.linear(x, w)
    y = functional.relu(y, inplace=True)
    return functional.dropout(functional.linear(y, w).add_(1).relu_().sin(), 0.5, inplace=True)


def complex_views(x: Tensor, w: Tensor) -> Tensor:
    z = torch.view_as_complex(functional.linear(x, w).view(8, 16, 2))
    return torch.view_as_real((z.conj() * z.exp()).conj().sin()) * z.imag.neg().unsqueeze(-1).cos()


def masks(x: Tensor, w: Tensor) -> Tensor:
    y = functional.linear(x, w)
    y = torch.where(y > 0, y.sin(), y.cos()).masked_fill(y < -1, 0.0)
    return y.gather(1, y.argsort(1)).cumsum(1).clamp(-3, 3)


def scalars_and_empties(x: Tensor, w: Tensor) -> Tensor:
    y = functional.linear(x, w)
    return y * y.sum().sin() + y[:0].exp().sum() + y.norm()


def layer_norm(x: Tensor, w: Tensor) -> Tensor:
    y = functional.layer_norm(functional.linear(x, w), (32,), w[0], w[1])
    return functional.group_norm(y.view(8, 4, 8), 2).view(8, 32).softmax(-1)


def cross_entropy(x: Tensor, w: Tensor) -> Tensor:
    table = functional.linear(x, w).exp()
    looked_up = functional.embedding(torch.arange(8, device=x.device) % 3, table)
    return functional.cross_entropy(looked_up, torch.arange(8, device=x.device))


def dropout(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(3):
        x = functional.dropout(functional.linear(x, w), 0.5).sin()
    return x


def randomized_relu(x: Tensor, w: Tensor) -> Tensor:
    """Autograd saves its noise before drawing it, and the draw leaves the version counter unchanged."""
    for _ in range(3):
        x = functional.rrelu(functional.linear(x, w) - 0.5, training=True).sin() * x
    return x


def custom_function(x: Tensor, w: Tensor) -> Tensor:
    return SavesTwice.apply(SavesTwice.apply(functional.linear(x, w)) * 3)


def checkpointed(x: Tensor, w: Tensor, use_reentrant: bool = False) -> Tensor:
    def block(x: Tensor) -> Tensor:
        return functional.dropout(functional.linear(x, w).sin().exp().tanh(), 0.2)

    for _ in range(3):
        x = checkpoint(block, functional.linear(x, w), use_reentrant=use_reentrant)
    return x.cos()


def checkpointed_reentrant(x: Tensor, w: Tensor) -> Tensor:
    return checkpointed(x, w, use_reentrant=True)


def bfloat16(x: Tensor, w: Tensor) -> Tensor:
    return functional.linear(x.bfloat16(), w.bfloat16()).sin().float().exp().to(torch.float64).cos().float()


def autocast(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        for _ in range(3):
            x = functional.gelu(functional.linear(x, w))
    return x.float()


def lstm(x: Tensor, w: Tensor) -> Tensor:
    hidden = cell = torch.zeros(8, 8, device=x.device)
    for step in functional.linear(x, w).chunk(4, dim=1):
        gates = functional.linear(step, w[:, :8]) + functional.linear(hidden, w[:, 8:16])
        i, f, g, o = gates.chunk(4, 1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        hidden = o.sigmoid() * cell.tanh()
    return hidden


def skips(x: Tensor, w: Tensor) -> Tensor:
    """A U-Net's order: the first save is needed last, and once more in between."""
    kept = []
    for _ in range(3):
        x = functional.linear(x, w).sin()
        kept.append(x)
    for skip in reversed(kept):
        x = functional.linear(x * skip, w).tanh() + skip.exp()
    return x


COMPUTATIONS: dict[str, Computation] = {
    made.__name__: made
    for made in (
        *(mlp, convolution, channels_last, attention, views_of_one_storage, saved_many_times, outputs_as_saved, broadcast),
        *(in_place, complex_views, masks, scalars_and_empties, layer_norm, cross_entropy, dropout, randomized_relu),
        *(custom_function, checkpointed, checkpointed_reentrant, bfloat16, autocast, lstm, skips),
    )
}


def inputs_on(torch_device: torch.device) -> list[Tensor]:
    """Return an input [8, 32] and a weight [32, 32], both leaves that require grad."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((8, 32), (32, 32))
    return [torch.randn(shape, generator=generator).to(torch_device).requires_grad_() for shape in shapes]


def gradients(
    computation: Computation, torch_device: torch.device, context: Callable[[], AbstractContextManager[object]]
) -> list[Tensor]:
    """Return the loss and the gradients of a computation whose forward runs in a context, twice accumulated."""
    inputs = inputs_on(torch_device)
    losses = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with context():
            loss = computation(*inputs).square().mean()
        loss.backward()
        losses.append(loss.detach())
    return [*losses, *[x.grad for x in inputs]]


class Seeing(TorchDispatchMode):
    """Notes the ops that run in it, and leaves them as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[object] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def assert_same_bits(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.contiguous().flatten().view(torch.uint8), other.contiguous().flatten().view(torch.uint8))
