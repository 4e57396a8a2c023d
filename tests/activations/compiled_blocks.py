"""Blocks to compile, models of them, and how they are trained."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from memkit.device import Device
from tests.compiling import Backend, in_form

WIDTH = 32
OF_DYNAMO = "ignore:.*script_method:DeprecationWarning", "ignore:The .grad attribute of a Tensor that is not a leaf"
"""Dynamo imports code that warns, and reads attributes that warn."""


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear(x).relu()) + x


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x.transpose(1, 2))).relu().transpose(1, 2)


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).sigmoid()
        torch._dynamo.graph_break()
        return self.last(x).tanh()


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, scale: float) -> dict[str, Any]:
        return {"sum": (self.linear(x) * scale, [x.sin()]), "name": "several"}


class Writer(nn.Module):
    """Writes to its input, which the module before it has made."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        return self.linear(x)


class WithSeveral(nn.Module):
    def __init__(self, several: nn.Module) -> None:
        super().__init__()
        self.several = several

    def forward(self, x: Tensor) -> Tensor:
        found = self.several(x, scale=0.5)["sum"]
        return found[0] + found[1][0]


class Shift(nn.Module):
    """Not compiled, and droppable."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.sin() * 1.5).exp().tanh() + x


KINDS: tuple[Callable[[], nn.Module], ...] = (MLP, Attention, Dropped, Convolved, Broken, Several, Writer)
Context = Callable[[], AbstractContextManager[Any]]


def model_of(
    seed: int, form: str, device: Device, backend: Backend, *, kinds: Sequence[Callable[[], nn.Module]] = KINDS
) -> nn.Sequential:
    """Return a model of compiled blocks in a random order, with ops that are not compiled between them."""
    torch._dynamo.reset()
    torch.manual_seed(seed)
    generator = random.Random(seed)
    parts: list[nn.Module] = []
    for _ in range(5):
        block = in_form(form, generator.choice(kinds)().to(device.torch_device), backend)
        inner = getattr(block, "_orig_mod", block)
        parts += [Shift(), WithSeveral(block) if isinstance(inner, Several) else block]
        if generator.random() < 0.4:
            parts.append(nn.Dropout(0.2))
    return nn.Sequential(*parts).to(device.torch_device)


def train(model: nn.Module, device: Device, context: Context, *, num_steps: int = 5, amp: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.01), list[Tensor]()
    torch.manual_seed(2)
    for _ in range(num_steps):
        x = torch.randn(4, 8, WIDTH, generator=generator).to(device.torch_device)
        optimizer.zero_grad()
        autocast = torch.autocast(device.torch_device.type, torch.bfloat16) if amp else nullcontext()
        with context(), autocast:
            loss = model(x).float().square().mean()
        loss.backward()
        found += [loss.detach(), *[param.grad.clone() for param in model.parameters() if param.grad is not None]]
        optimizer.step()
    return [*found, *[buffer.clone() for buffer in model.buffers()], torch.get_rng_state()]
