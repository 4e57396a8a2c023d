"""Models, steps and sharding by hand for the tests of `shard`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

WIDTH, INNER, NUM_TOKENS, NUM_LAYERS = 13, 22, 17, 4
"""No two of them have a divisor in common, nor has the number of tokens one with any number of ranks: shards are padded."""

Context = Callable[[], AbstractContextManager[object]]


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adaptor, in one module."""

    def __init__(self, linear: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.weight = linear.weight.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, linear.in_features) / 8)
        self.lora_b = nn.Parameter(torch.randn(linear.out_features, rank) / 8)

    def forward(self, x: Tensor) -> Tensor:
        """Take and return [..., features]."""
        x = x.to(self.lora_a.dtype)
        return functional.linear(x, self.weight.to(x.dtype)) + functional.linear(functional.linear(x, self.lora_a), self.lora_b)


class Block(nn.Module):
    """A norm, a feed-forward network and dropout, beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Take and return [batch, WIDTH]."""
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm(x.to(self.norm.weight.dtype))))))


class Model(nn.Module):
    """Blocks between an embedding and a head, which may be tied."""

    def __init__(self, *, tied: bool = False, num_layers: int = NUM_LAYERS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, NUM_TOKENS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Take [batch], return [batch, NUM_TOKENS]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x.to(self.head.weight.dtype))


def make(
    *, lora: bool = False, tied: bool = False, frozen_dtype: torch.dtype | None = None, num_layers: int = NUM_LAYERS
) -> Model:
    """Return the same model each time; with LoRA only the adaptors are trained."""
    torch.manual_seed(0)
    model = Model(tied=tied, num_layers=num_layers)
    if lora:
        model.requires_grad_(False)
        for block in model.blocks:
            assert isinstance(block, Block)
            block.up, block.down = Adapted(block.up), Adapted(block.down)  # type: ignore[assignment]
    if frozen_dtype is not None:
        for parameter in model.parameters():
            parameter.data = parameter.data if parameter.requires_grad else parameter.data.to(frozen_dtype)
    return model


def by_hand(model: Model, mesh: DeviceMesh) -> Model:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tokens_of(rank: int, step: int) -> Tensor:
    """Return [batch] tokens, others on each rank and in each step."""
    return torch.randint(0, NUM_TOKENS, (32,), generator=torch.Generator().manual_seed(100 * rank + step))


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW([item for item in model.parameters() if item.requires_grad], lr=1e-2, weight_decay=0.1)


def step(model: nn.Module, rank: int, number: int, context: Context = nullcontext, micro: int = 1) -> Tensor:
    """Run forwards and backwards of one step, and return the losses, stacked."""
    losses = []
    for part in range(micro):
        torch.manual_seed(1000 * rank + 10 * number + part)
        tokens = tokens_of(rank, 10 * number + part)
        with context():
            loss = functional.cross_entropy(model(tokens), tokens.roll(1)).float()
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses)


def steps(
    model: nn.Module,
    context: Context = nullcontext,
    *,
    num_steps: int = 6,
    forwards: int = 1,
    optimizer: torch.optim.Optimizer | None = None,
    given: Callable[[int], Tensor] | None = None,
) -> list[Tensor]:
    """Run steps of so many forwards in one context each. Return losses and gradients, as this rank has them."""
    rank, found = dist.get_rank(), []
    for number in range(num_steps):
        torch.manual_seed(10 * rank + number)
        with context():
            places = range(forwards * number, forwards * number + forwards)
            loss = sum(model(given(at) if given else tokens_of(rank, at)).square().mean() for at in places)
        loss.backward()
        found += [loss.detach(), *(local(item.grad).clone() for item in model.parameters() if item.grad is not None)]
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()
    return found


def train(
    model: nn.Module,
    rank: int,
    *,
    numbers: Iterable[int] = range(3),
    optimizer: torch.optim.Optimizer | None = None,
    context: Context = nullcontext,
    micro: int = 1,
) -> list[Tensor]:
    """Return losses, norms and gradients of each step, and the parameters after all, as this rank has them."""
    optimizer = optimizer or optimizer_of(model)
    found = []
    for number in numbers:
        found.append(step(model, rank, number, context, micro))
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        found.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        found += [local(item.grad) for item in model.parameters() if item.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return [item.detach().clone() for item in (*found, *map(local, model.parameters()))]


def assert_same(found: list[Tensor], plain: list[Tensor]) -> None:
    assert len(found) == len(plain)
    for number, (one, other) in enumerate(zip(found, plain, strict=True)):
        assert torch.equal(one, other), f"tensor {number} of {len(found)}, shape {list(one.shape)}"


class Collectives(TorchDispatchMode):
    """The bytes of the large end of every all-gather and reduce-scatter, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered_bytes: list[int] = []
        self.reduced_bytes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.name()
        tensors = [item for arg in args for item in (arg if isinstance(arg, list) else [arg]) if isinstance(item, Tensor)]
        if name.startswith("c10d::_allgather_base_"):
            self.gathered_bytes.append(max(item.nbytes for item in tensors))
        if name.startswith("c10d::_reduce_scatter_base_"):
            self.reduced_bytes.append(max(item.nbytes for item in tensors))
        return func(*args, **(kwargs or {}))


def padded_bytes(parameters: Iterable[nn.Parameter], num_ranks: int) -> int:
    """Return what all ranks together have of parameters that are split by rows, with the rows that fill up the last ones."""
    return sum(-(-item.shape[0] // num_ranks) * num_ranks * item[0].numel() * item.element_size() for item in parameters)


def groups_of(model: Model) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters of each layer, and then what is in none."""
    inside = {id(item) for block in model.blocks for item in block.parameters()}
    for block in model.blocks:
        yield list(block.parameters())
    yield [item for item in model.parameters() if id(item) not in inside]


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    states, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": states, "optimizer": of_optimizer}, checkpoint_id=path)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    states, of_optimizer = get_state_dict(model, optimizer)
    dcp.load({"model": states, "optimizer": of_optimizer}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=states, optim_state_dict=of_optimizer)
