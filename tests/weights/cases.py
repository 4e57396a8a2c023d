"""Models and steps for the tests of streamed weights: each is run plainly, and with its layers streamed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memkit
from memkit.device import Device
from memkit.weights.chunks import LayerChunk
from memkit.weights.fused import SteppedGradient
from memkit.weights.gradients import HostGradients
from memkit.weights.streaming import Streamer

WIDTH = 16


class Block(nn.Module):
    """A layer of several parameters; `LoRA` in it is what is trained."""

    def __init__(self, width: int = WIDTH, inner: int = 24, rank: int = 2) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width, bias=False)
        self.lora_a = nn.Linear(width, rank, bias=False)
        self.lora_b = nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Take and return [batch, width]."""
        y = self.norm(x)
        return x + self.down(torch.nn.functional.gelu(self.up(y))) + self.lora_b(self.lora_a(y))


class Stack(nn.Module):
    """Blocks between an embedding and a head. `run` says how they are called."""

    def __init__(
        self,
        num_layers: int = 6,
        run: Callable[[nn.ModuleList, Tensor], Tensor] | None = None,
        block: Callable[[], nn.Module] = Block,
    ) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, 4)
        self._run = run or in_order

    def forward(self, x: Tensor) -> Tensor:
        """Take [batch, width], return [batch, 4]."""
        return self.head(self._run(self.layers, self.stem(x)))


def in_order(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def reversed_order(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in reversed(layers):
        x = layer(x)
    return x


def reused(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in (*layers, layers[0], layers[2], layers[0]):
        x = layer(x)
    return x


def skipping(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers[::2]:
        x = layer(x)
    return x


def branching(layers: nn.ModuleList, x: Tensor) -> Tensor:
    half = len(layers) // 2
    y = x
    for one, other in zip(layers[:half], layers[half:], strict=True):
        x, y = one(x), other(y)
    return x * y


def checkpointed(use_reentrant: bool) -> Callable[[nn.ModuleList, Tensor], Tensor]:
    def run(layers: nn.ModuleList, x: Tensor) -> Tensor:
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=use_reentrant)
        return x

    return run


def in_segments(use_reentrant: bool) -> Callable[[nn.ModuleList, Tensor], Tensor]:
    """Checkpoints that hold more layers than there are slots."""

    def run(layers: nn.ModuleList, x: Tensor) -> Tensor:
        half = len(layers) // 2
        for part in (layers[:half], layers[half:]):
            x = checkpoint(in_order, part, x, use_reentrant=use_reentrant)
        return x

    return run


RUNS: dict[str, Callable[[nn.ModuleList, Tensor], Tensor]] = {
    "in order": in_order,
    "reversed": reversed_order,
    "reused": reused,
    "skipping": skipping,
    "branching": branching,
    "checkpoint": checkpointed(False),
    "reentrant checkpoint": checkpointed(True),
    "segments": in_segments(False),
    "reentrant segments": in_segments(True),
}


TRAIN: dict[str, dict[str, Any]] = {
    "frozen": {"train": "frozen"},
    "host": {"train": "host"},
    "fused": {"train": "fused", "optimizer": partial(torch.optim.SGD, lr=0.1)},
}
"""The ways of training, each with its options."""


def stack(train: str = "frozen", num_layers: int = 4, **given: Any) -> Stack:
    """Return a model to be trained in one of the ways: layers that are frozen have LoRA."""
    model = Stack(num_layers, **given)
    return only_lora(model) if train == "frozen" else model


def only_lora(model: Any) -> Any:
    """Return the model with nothing but LoRA, stem and head to train."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name or "layers" not in name)
    return model


def inputs(device: Device, num_batches: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, WIDTH, generator=generator).to(device.torch_device) for _ in range(num_batches)]


Result = dict[str, Tensor]


def results(model: nn.Module, outputs: list[Tensor]) -> Result:
    """Return outputs, gradients and buffers, by name."""
    found = {f"output {number}": output.detach().cpu().clone() for number, output in enumerate(outputs)}
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    is_there = {name: grad for name, grad in grads.items() if grad is not None and not isinstance(grad, SteppedGradient)}
    found |= {f"grad {name}, {grad.layout}": grad.cpu().clone().to_dense() for name, grad in is_there.items()}
    return found | {f"buffer {name}": buffer.cpu().clone() for name, buffer in model.named_buffers()}


def run_step(model: nn.Module, batches: list[Tensor]) -> Result:
    """One forward and backward per batch; gradients accumulate."""
    outputs = []
    for batch in batches:
        output = model(batch)
        output.square().mean().backward()
        outputs.append(output)
    return results(model, outputs)


def assert_same(found: Result, expected: Result) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, error: BaseException) -> Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        raise type(ctx.error)(*ctx.error.args)  # a new one: it holds the frames, and so the graph


@contextmanager
def new_nodes() -> Iterator[None]:
    """Have parameters have other nodes once they have left a slot, as where that is on another device than the host."""
    leave, make = Streamer.leave, HostGradients.__init__

    def leave_anew(streamer: Streamer, chunk: LayerChunk, **options: Any) -> None:
        leave(streamer, chunk, **options)
        if not chunk.uses:
            for tensor in chunk.binding.tensors:
                data = tensor.data
                tensor.data = data.double()
                tensor.data = data

    def make_for_these(gradients: HostGradients, *given: Any, **options: Any) -> None:
        make(gradients, *given, **options)
        gradients._has_new_nodes = True

    with patch.object(Streamer, "leave", leave_anew), patch.object(HostGradients, "__init__", make_for_these):
        yield


@contextmanager
def streamed(model: nn.Module, device: Device, **options: Any) -> Iterator[tuple[Any, Any, list[Tensor], memkit.LayerOffload]]:
    """Return a context in which all layers of a model stream: the model, a plain one, batches for both, and the offload."""
    plain = copy.deepcopy(model.to(device.torch_device))
    with memkit.LayerOffload(model, device=device, **{"offload_ratio": 1.0, **options}) as offload:
        yield model, plain, inputs(device), offload


def compare(
    model: nn.Module,
    device: Device,
    *,
    step: Callable[[nn.Module, list[Tensor]], Result] = run_step,
    num_steps: int = 2,
    **options: Any,
) -> memkit.weights.LayerStats:
    """See that a model does the same plainly and with streamed layers, in several steps; return the stats. With an `optimizer`
    each batch is a step of its own."""
    batches, make = inputs(device), options.get("optimizer")
    plain = copy.deepcopy(model.to(device.torch_device))
    optimizer = None if make is None else make(parameter for parameter in plain.parameters() if parameter.requires_grad)
    with memkit.LayerOffload(model, device=device, **{"offload_ratio": 1.0, **options}) as offload:
        for given in [batches] * num_steps if optimizer is None else [[batch] for batch in batches] * num_steps:
            found, expected = step(model, given), step(plain, given)
            if optimizer is not None:
                assert any(isinstance(parameter.grad, SteppedGradient) for parameter in model.parameters())
                expected = {name: tensor for name, tensor in expected.items() if not name.startswith("grad")}
                optimizer.step()
                optimizer.zero_grad()
                for name, tensor in plain.state_dict().items():
                    assert torch.equal(model.state_dict()[name].cpu(), tensor.cpu()), name
            assert_same(found, expected)
        stats = offload.stats()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    return stats
