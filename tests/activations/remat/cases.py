"""More computations: hard for recording and running ops again, beyond any saved-tensor feature."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.activations.cases import COMPUTATIONS as COMMON
from tests.activations.cases import Computation, SavesTwice, mlp

linear = functional.linear


# Writes in place


def relu_and_residuals(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(3):
        branch = functional.relu_(functional.layer_norm(linear(x, w), (32,)))
        branch = linear(branch, w)
        branch += x
        x = functional.relu_(branch)
    return x


def writes_to_views(x: Tensor, w: Tensor) -> Tensor:
    y = linear(x, w)
    y[:, :8].mul_(2)
    y[0] = y[1] * 3
    z = y.exp()
    y.t()[3:5].add_(1)
    y.sigmoid_()
    return z * y.clone()


def written_after_use(x: Tensor, w: Tensor) -> Tensor:
    """An input is written to after its use, and the backward needs the result."""
    y = linear(x, w)
    first = (y + 1).sin().exp()
    y.add_(1)
    second = (y + 1).sin().exp()
    y.zero_()
    return first * second + y


def copies_over(x: Tensor, w: Tensor) -> Tensor:
    target = torch.empty(8, 32, device=x.device)
    target.copy_(linear(x, w))
    half = torch.zeros(16, 32, device=x.device)
    half[:8] = target.sin()
    half[8:].copy_(target.cos())
    return (half.exp() * half.sin()).view(2, 8, 32).sum(0) + target.tanh()


def filled_by_factories(x: Tensor, w: Tensor) -> Tensor:
    y = linear(x, w).exp()
    counts = torch.zeros(4, 32, device=x.device).index_add(0, torch.arange(8, device=x.device) % 4, y)
    ramp = torch.linspace(0, 1, 32, device=x.device).sin().cos()
    return counts.sin().repeat(2, 1) * (ramp * y).exp().clamp(max=9) * torch.ones_like(y).exp()


def summed_into_zeros(x: Tensor, w: Tensor) -> Tensor:
    """As message passing does: a fresh buffer is added to in place, twice, and read in between."""
    where = torch.arange(8, device=x.device) % 4
    total = torch.zeros(4, 32, device=x.device)
    total.index_add_(0, where, linear(x, w))
    first = (total * 2).exp().sin()
    total.index_add_(0, where, linear(x, w).sin())
    return (total * 2).exp().sin().repeat(2, 1) * first.repeat(2, 1)


def index_put(x: Tensor, w: Tensor) -> Tensor:
    y = linear(x, w)
    y.index_put_((torch.tensor([1, 5], device=x.device),), x[:2].sin())
    y[torch.tensor([2, 2], device=x.device)] = x[3].exp()
    rows, column = torch.arange(8, device=x.device), torch.tensor([3], device=x.device)
    return y.sin().index_put((rows, column), w[0, :8]).exp().sigmoid()


def out_arguments(x: Tensor, w: Tensor) -> Tensor:
    y = linear(x, w)
    with torch.no_grad():
        scale = torch.empty(8, 32, device=x.device)
        torch.mul(y, 2, out=scale)
        torch.sigmoid(scale, out=scale)
        torch.add(scale, y, out=scale[:])
        low = torch.empty(8, device=x.device)
        torch.amax(scale, 1, out=low)
    return (y * scale).sin() * low.unsqueeze(1)


def foreach(x: Tensor, w: Tensor) -> Tensor:
    parts = [part.clone() for part in linear(x, w).chunk(4, 1)]
    parts = list(torch._foreach_mul(torch._foreach_exp(torch._foreach_mul(parts, 0.5)), 2.0))
    torch._foreach_mul_(parts, [1.0, 2.0, 3.0, 0.5])
    return torch.cat(torch._foreach_sin(torch._foreach_add(parts, parts[::-1])), 1).tanh()


class InPlace(torch.autograd.Function):
    """Writes over its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.sigmoid_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * y * (1 - y)


def parts_that_count_their_writes_apart(x: Tensor, w: Tensor) -> Tensor:
    """As recurrent networks cut their gates: a write to one part is none to the others."""
    y = linear(x, w)
    for _ in range(3):
        first, second = torch.unsafe_chunk(y, 2, 1)
        first = first.sigmoid_()
        kept = first.clone().sin() * second.clone().cos()
        second.mul_(first.detach()).tanh_()
        y = linear(torch.cat([kept, first * second], 1), w)
    return y.exp()


def custom_function_in_place(x: Tensor, w: Tensor) -> Tensor:
    return InPlace.apply(linear(InPlace.apply(linear(x, w)), w)).exp()


# Layers with a state


def batch_norm(x: Tensor, w: Tensor, training: bool = True) -> Tensor:
    norms = nn.ModuleList([nn.BatchNorm1d(32, device=x.device) for _ in range(2)])
    for norm in norms.train(training):
        x = functional.relu_(norm(linear(x, w)))
    return x


def batch_norm_in_evaluation(x: Tensor, w: Tensor) -> Tensor:
    return batch_norm(x, w, training=False)


def instance_norm(x: Tensor, w: Tensor) -> Tensor:
    norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True, device=x.device)
    return norm(norm(linear(x, w).view(8, 4, 8)).sin()).exp()


def long_short_term_memory(x: Tensor, w: Tensor) -> Tensor:
    torch.manual_seed(5)
    network = nn.LSTM(8, 8, num_layers=2, bidirectional=True, device=x.device)
    y, (hidden, cell) = network(linear(x, w).view(4, 8, 8).sin())
    return y.exp().sum((0, 2)).sum() * hidden.sin().sum() + cell.exp()


# Random numbers


def fused_dropout(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(3):
        x, mask = torch.native_dropout(linear(x, w), 0.4, True)
        x = x.sin() * mask.logical_not().float().add(0.5)
    return functional.feature_alpha_dropout(functional.alpha_dropout(x, 0.3), 0.2)


def random_numbers(x: Tensor, w: Tensor) -> Tensor:
    y = linear(x, w)
    noise = torch.rand_like(y) + torch.randn(8, 32, device=x.device) + torch.randint(0, 3, (8, 32), device=x.device)
    y = y * noise.sin() + torch.normal(noise, 2.0) * torch.empty_like(y).uniform_().exp()
    order = torch.randperm(8, device=x.device)
    picked = torch.multinomial(y.detach().softmax(1), 4)
    y = (y[order].exp() * torch.bernoulli(y.detach().sigmoid())).sin().gather(1, picked).repeat(1, 8)
    return y * functional.gumbel_softmax(y, hard=True)


def own_generators(x: Tensor, w: Tensor) -> Tensor:
    first, second = (torch.Generator(x.device).manual_seed(seed) for seed in (3, 4))
    for generator in (first, second, first):
        mask = torch.rand(8, 32, generator=generator, device=x.device) > 0.3
        x = (linear(x, w) * mask).sin()
        x = x * torch.empty(8, 32, device=x.device).normal_(generator=generator).exp()
    return x


def attention_with_dropout(x: Tensor, w: Tensor) -> Tensor:
    heads = linear(x, w).view(1, 8, 4, 8).transpose(1, 2)
    for _ in range(2):
        heads = functional.scaled_dot_product_attention(heads, heads.sin(), heads.cos(), dropout_p=0.3)
    return heads


# Functions and contexts


class SavesMore(torch.autograd.Function):
    """Saves a tensor that is neither input nor output, and keeps something beside that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        middle = (x * 2).sin()
        ctx.save_for_backward(middle, w, middle[0] + 1)
        ctx.kept = middle.cos()
        return middle * w, middle + w

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        middle, w, row = ctx.saved_tensors
        return (first * w + second) * ctx.kept * row, first * middle + second


def custom_function_saving_more(x: Tensor, w: Tensor) -> Tensor:
    y = linear(x, w).exp()
    first, second = SavesMore.apply(y, y.cos())
    return SavesTwice.apply(first.sin()) * second.tanh()


def saved_on_cpu(x: Tensor, w: Tensor) -> Tensor:
    y = linear(x, w).sin().exp()
    with torch.autograd.graph.save_on_cpu():
        y = mlp(y, w)
    return mlp(y, w)


def checkpointed_with_writes(x: Tensor, w: Tensor) -> Tensor:
    def block(x: Tensor) -> Tensor:
        return functional.dropout(functional.relu_(linear(x, w)).sin().add(1).exp(), 0.2)

    y = linear(x, w).sin()
    for use_reentrant in (True, False):
        y = checkpoint(block, linear(y.cos(), w), use_reentrant=use_reentrant).sin()
    return y.exp()


def gradient_in_the_forward(x: Tensor, w: Tensor) -> Tensor:
    y = linear(x, w).sin().exp()
    (slope,) = torch.autograd.grad(mlp(y, w).sum(), y, create_graph=True)
    return (y * slope.sin()).exp() * linear(slope, w).cos()


def in_inference_mode(x: Tensor, w: Tensor) -> Tensor:
    y = linear(x, w).sin()
    with torch.inference_mode():
        other = linear(x, w).cos()
        scale = other * 2
        other.add_(1)
    target = other.clone().exp() * scale
    return (y * target).sin() * y.exp()


@torch.library.custom_op("memkit_tests::halve", mutates_args=())
def _halve(x: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().cpu().numpy() / 2).to(x.device)


@torch.library.custom_op("memkit_tests::double_", mutates_args={"x"})
def _double(x: Tensor) -> None:
    x.mul_(2)


@torch.library.custom_op("memkit_tests::noise_like", mutates_args=())
def _noise_like(x: Tensor) -> Tensor:
    return torch.rand_like(x)


def ops_of_the_users_own(x: Tensor, w: Tensor) -> Tensor:
    y = linear(x, w).sin()
    with torch.no_grad():
        scale, noise = torch.ops.memkit_tests.halve(y), torch.ops.memkit_tests.noise_like(y)
        torch.ops.memkit_tests.double_(scale)
    return (y * noise).exp() * (scale * y).sin() * (noise.sin() * y).cos()


# Kinds of tensors


def embedding(x: Tensor, w: Tensor) -> Tensor:
    numbers = torch.arange(8, device=x.device) % 5
    found = functional.embedding(numbers, w.sin(), padding_idx=1, scale_grad_by_freq=True)
    bags = functional.embedding_bag(numbers.view(4, 2), w.cos(), mode="mean")
    return found.exp() + bags.repeat(2, 1).exp() * linear(x, w)


def complex_arithmetic(x: Tensor, w: Tensor) -> Tensor:
    y = linear(x, w)
    z = torch.complex(y, y.sin())
    z = torch.fft.ifft(torch.fft.fft(z).conj() * z.conj().exp())
    z.imag.mul_(2)
    return z.abs() * z.conj().mH.imag.t().neg() + z.real.sin()


def dtype_views(x: Tensor, w: Tensor) -> Tensor:
    y = linear(x, w).exp()
    low = y.detach().view(torch.int32).bitwise_and(-65536).view(torch.float32)
    pairs = y.detach().sin().view(torch.complex64).abs().repeat(1, 2)
    return (y * low.sin()).sin() * pairs.view(torch.int32).float().mul(1e-9).cos() * y.double().sin().float()


def many_results(x: Tensor, w: Tensor) -> Tensor:
    y = linear(x, w).exp()
    spread, mean = torch.std_mean(y, 1, keepdim=True)
    top, _ = y.topk(4, 1)
    ordered, _ = ((y - mean) / spread).sort(1)
    low, high = y.min(dim=1, keepdim=True).values, y.max(dim=1, keepdim=True).values
    parts = torch.split_with_sizes((y - low) / (high - low), [8, 24], 1)
    values, _ = y.cummax(1)
    return ordered.sin() * top.repeat(1, 8).exp() * torch.cat([part.sin() for part in parts], 1) + values.cos()


def pooled(x: Tensor, w: Tensor) -> Tensor:
    image = linear(x, w).view(1, 4, 8, 8).exp()
    image, where = functional.max_pool2d(image, 2, return_indices=True)
    if not image.is_cuda:  # where these have no deterministic kernels
        image = functional.max_unpool2d(image.sin(), where, 2)
        image = functional.fractional_max_pool2d(image.exp(), 2, output_size=4)
    image = functional.interpolate(image.exp(), scale_factor=2)
    return functional.avg_pool2d(functional.pad(image, (1, 1, 1, 1), mode="reflect").sin(), 2).cos()


def sparse(x: Tensor, w: Tensor) -> Tensor:
    y = linear(x, w).sin()
    numbers = torch.tensor([[0, 1, 2, 7], [1, 0, 3, 7]], device=x.device)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse invariant checks")  # torch 2.11 says so whatever is asked for
        matrix = torch.sparse_coo_tensor(numbers, y[0, :4].exp(), (8, 8), check_invariants=True).coalesce()
        return torch.sparse.mm(matrix, y.exp()).sin() * y


def of_no_size(x: Tensor, w: Tensor) -> Tensor:
    y = linear(x, w)
    empty, scalar = y[:, :0].exp(), y.sum().sin()
    return y * scalar.exp() * scalar.item() + empty.sin().sum() + y.new_zeros(()).exp()


def data_dependent(x: Tensor, w: Tensor) -> Tensor:
    y = linear(x, w).exp()
    picked = y[y > 1].sin()
    rows = (y.sum(1) > 0).nonzero().squeeze(1)
    values, _ = torch.unique((10 * y.detach()).int(), return_inverse=True)
    return picked.exp().sum() * y[rows].sin() + values.float().sin().sum() * y.repeat_interleave(rows % 2 + 1, 0).sum()


MORE: dict[str, Computation] = {
    made.__name__: made
    for made in (
        relu_and_residuals,
        writes_to_views,
        written_after_use,
        copies_over,
        filled_by_factories,
        summed_into_zeros,
        index_put,
        out_arguments,
        foreach,
        parts_that_count_their_writes_apart,
        custom_function_in_place,
        batch_norm,
        batch_norm_in_evaluation,
        instance_norm,
        long_short_term_memory,
        fused_dropout,
        random_numbers,
        own_generators,
        attention_with_dropout,
        custom_function_saving_more,
        saved_on_cpu,
        checkpointed_with_writes,
        gradient_in_the_forward,
        in_inference_mode,
        ops_of_the_users_own,
        embedding,
        complex_arithmetic,
        dtype_views,
        many_results,
        pooled,
        sparse,
        of_no_size,
        data_dependent,
    )
}

COMPUTATIONS: dict[str, Computation] = {**COMMON, **MORE}

_CORE = ("mlp", "in_place", "complex_views", "dropout", "custom_function", "checkpointed", "views_of_one_storage", "batch_norm")

NAMES = [name if name in _CORE else pytest.param(name, marks=pytest.mark.slow) for name in COMPUTATIONS]
"""All names: each of the core has something that the others lack."""
