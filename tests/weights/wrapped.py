"""Weights that are made of other tensors, and layers that have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from tests.weights.cases import WIDTH

aten = torch.ops.aten


class Wrapper(Tensor):
    """Wraps `names`. Ops on it compute with what it stands for, but for those that only move it."""

    names: tuple[str, ...]

    @classmethod
    def of(cls, *inner: Tensor) -> Wrapper:
        raise NotImplementedError

    def dequantize(self) -> Tensor:
        raise NotImplementedError

    def transposed(self) -> Any:
        return self.dequantize().t()

    @classmethod
    def wrap(cls, size: tuple[int, ...], *inner: Tensor) -> Any:
        made = Tensor._make_wrapper_subclass(cls, size, dtype=torch.float32, device=inner[0].device)
        for name, tensor in zip(cls.names, inner, strict=True):
            setattr(made, name, tensor)
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(self.names), None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Any:
        return cls.of(*(inner[name] for name in cls.names))

    def __repr__(self) -> str:
        return type(self).__name__

    @property
    def inner(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.names]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (aten.detach.default, aten.clone.default):
            return cls.of(*(func(inner) for inner in args[0].inner))
        if func is aten._to_copy.default and kwargs.get("dtype", torch.float32) is torch.float32:
            return cls.of(*(func(inner, device=kwargs.get("device")) for inner in args[0].inner))
        if func is aten.t.default:
            return args[0].transposed()
        if func is aten.copy_.default and isinstance(args[0], Wrapper):
            for target, source in zip(args[0].inner, args[1].inner, strict=True):
                target.copy_(source)
            return args[0]
        args, kwargs = tree_map_only(Wrapper, lambda tensor: tensor.dequantize(), (args, kwargs))
        return func(*args, **kwargs)


class Int8(Wrapper):
    """One byte per element, and a scale per row or column."""

    names = ("values", "scale")

    @classmethod
    def of(cls, *inner: Tensor) -> Int8:
        return cls.wrap(inner[0].size(), *inner)

    @classmethod
    def quantized(cls, tensor: Tensor) -> Int8:
        scale = tensor.abs().amax(1, keepdim=True) / 127
        return cls.of((tensor / scale).round().to(torch.int8), scale)

    def dequantize(self) -> Tensor:
        return self.values * self.scale

    def transposed(self) -> Int8:
        return Int8.of(self.values.t(), self.scale.t())


class Int4(Wrapper):
    """Two elements per byte, and scales of each row that are `Int8` themselves."""

    names = ("packed", "scales")

    @classmethod
    def of(cls, *inner: Tensor) -> Int4:
        return cls.wrap((inner[0].size(0), 2 * inner[0].size(1)), *inner)

    @classmethod
    def quantized(cls, tensor: Tensor) -> Int4:
        scales = Int8.quantized(tensor.abs().amax(1, keepdim=True).t() / 7)
        values = ((tensor / scales.dequantize().t()).round().clamp(-8, 7) + 8).to(torch.uint8)
        return cls.of(values[:, ::2] | (values[:, 1::2] << 4), scales)

    def dequantize(self) -> Tensor:
        values = torch.stack([self.packed & 15, self.packed >> 4], dim=2).flatten(1).float() - 8
        return values * self.scales.dequantize().t()


class KeepsWrapper(torch.autograd.Function):
    """As torchao's `linear_nf4`: saves the quantized weight itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Wrapper) -> Tensor:
        ctx.save_for_backward(weight)
        return x @ weight.dequantize().t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        assert isinstance(weight, Wrapper)
        assert {inner.device for inner in weight.inner} == {weight.device}
        return grad @ weight.dequantize(), None


class KeepsInner(torch.autograd.Function):
    """Saves the inner tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Int8) -> Tensor:
        ctx.save_for_backward(*weight.inner)
        return x @ weight.dequantize().t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        values, scale = ctx.saved_tensors
        return grad @ (values * scale), None


class Quantized(nn.Module):
    """A linear layer with a quantized weight; the bias is plain."""

    def __init__(self, kind: type[Wrapper], apply: Callable[[Tensor, Tensor], Tensor] = functional.linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(kind.quantized(torch.randn(WIDTH, WIDTH)), requires_grad=False)
        self.bias = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.apply_weight = apply

    def forward(self, x: Tensor) -> Tensor:
        return self.apply_weight(x, self.weight) + self.bias


class Block(nn.Module):
    """A quantized layer, and an adapter that is trained."""

    def __init__(self, kind: type[Wrapper] = Int8, apply: Callable[[Tensor, Tensor], Tensor] = functional.linear) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.base = Quantized(kind, apply)
        self.lora_a = nn.Linear(WIDTH, 2, bias=False)
        self.lora_b = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.base(y).tanh() + self.lora_b(self.lora_a(y))


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "int8": Block,
    "int4": lambda: Block(Int4),
    "int8, kept": lambda: Block(Int8, KeepsWrapper.apply),
    "int4, kept": lambda: Block(Int4, KeepsWrapper.apply),
    "inner kept": lambda: Block(Int8, KeepsInner.apply),
}


def devices_of(tensor: Tensor) -> set[torch.device]:
    inner = tensor.inner if isinstance(tensor, Wrapper) else []
    return {tensor.device, *(device for part in inner for device in devices_of(part))}
