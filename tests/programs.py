"""Random programs that autograd takes, and their outcome without memkit: ops, views, writes in place, random numbers and marks;
buffers, statistics and weights that code around a step writes to; several forwards, and backwards in any order."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import dropout, linear, normalize

import memkit

Op = tuple[str, int, int, int]
"""What is done: a name, the numbers of the two tensors that it is done with, a row or a weight."""
Make = Callable[[str], AbstractContextManager[object]]
"""Makes a context under a tag."""


class World:
    """All that a program reads and writes: weights, buffers of several shapes, norms, and two optimizers.

    Args:
        size: of each dimension.
    """

    def __init__(self, size: int) -> None:
        torch.manual_seed(0)
        self.size = size
        self.weights = [nn.Parameter(torch.randn(size, size) / 3) for _ in range(4)]
        self.bias = nn.Parameter(torch.randn(size), requires_grad=False)
        self.vector = torch.ones(size)
        self.matrix = torch.randn(size, size)
        self.ema = [weight.detach().clone() for weight in self.weights]
        self.norm = nn.BatchNorm1d(size, affine=False)
        self.block = nn.Sequential(nn.Linear(size, size), nn.Tanh(), nn.Linear(size, size), nn.GELU())
        self.optimizers = [torch.optim.SGD(self.weights[:2], 0.01), torch.optim.Adam(self.weights[2:], 0.01)]
        self.made: dict[int, Tensor] = {}
        """The output of each forward of this step."""

    def write(self, which: int) -> None:
        """Write something, as code around a step does."""
        with torch.no_grad():
            [
                lambda: self.vector.mul_(1.1).sub_(0.05),
                lambda: self.matrix.mul_(0.9).add_(0.1),
                lambda: [ema.lerp_(weight, 0.3) for ema, weight in zip(self.ema, self.weights, strict=True)],
                lambda: self.norm.train()(self.matrix),
                lambda: self.bias.add_(0.1),
                lambda: self.matrix[2].fill_(0.3),
                lambda: self.vector.copy_(normalize(self.weights[0] @ self.vector, dim=0)),
                lambda: self.matrix.copy_(torch.rand(self.size, self.size)),
            ][which]()

    def spectral(self, weight: Tensor) -> Tensor:
        with torch.no_grad():
            self.vector.copy_(normalize(weight @ self.vector, dim=0))
        v = self.vector.clone()
        return weight / (1 + torch.dot(v, weight @ v).square())

    @property
    def leaves(self) -> list[Tensor]:
        """All that has a gradient."""
        return [*self.weights, *self.block.parameters()]

    @property
    def state(self) -> list[Tensor]:
        """All that a program has written."""
        others = (self.vector, self.matrix, self.bias, self.norm.running_mean, self.norm.running_var)
        return [tensor.detach().clone() for tensor in (*self.weights, *self.ema, *others)] + [torch.get_rng_state()]


@torch.no_grad()
def _without_grad(a: Tensor, b: Tensor) -> Tensor:
    return a.sin() * b.exp().clamp(-2, 2)


OF_WORLD: dict[str, Callable[[World, Tensor, int], Tensor]] = {
    "linear": lambda world, h, at: linear(h, world.weights[at]),
    "tanh": lambda world, h, at: h.tanh(),
    "relu": lambda world, h, at: h.relu() * 1.2,
    "vector": lambda world, h, at: h * world.vector.clone(),
    "matrix": lambda world, h, at: h * world.matrix.tanh(),
    "average": lambda world, h, at: linear(h, world.ema[at].sin()) + h,
    "norm in evaluation": lambda world, h, at: world.norm.eval()(h),
    "norm in training": lambda world, h, at: world.norm.train()(h),
    "bias": lambda world, h, at: h.exp().clamp(max=2) * (h * world.bias).sin(),
    "dropout of it": lambda world, h, at: dropout(h, 0.2) + world.matrix.clone(),
    "in place": lambda world, h, at: (h * 0.7).relu_().mul_(0.9),
    "spectral": lambda world, h, at: linear(h, world.spectral(world.weights[at])),
    "block": lambda world, h, at: world.block(h),
    "views": lambda world, h, at: torch.addcmul(h, h, world.matrix.t() * world.vector),
    "softmax": lambda world, h, at: h.softmax(1) * linear(world.matrix, world.weights[at]).sigmoid(),
    "sum": lambda world, h, at: (h + world.matrix).sin() * h,
}
"""Ops of forwards, with what belongs to a world."""

MAKING: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "sin": lambda a, b, at: a.sin(),
    "exp": lambda a, b, at: a.exp().clamp(-2, 2),
    "mul": lambda a, b, at: a * b,
    "matmul": lambda a, b, at: (a @ b).tanh(),
    "t": lambda a, b, at: a.t(),
    "row": lambda a, b, at: a[at].unsqueeze(0).expand(4, 4),
    "expand": lambda a, b, at: a.sum(0, keepdim=True).expand(4, 4),
    "chunk": lambda a, b, at: torch.cat([part.sin() for part in a.chunk(2, dim=1)], dim=1),
    "conj": lambda a, b, at: torch.complex(a, b).conj().imag * a,
    "detach": lambda a, b, at: a * b.detach().sin(),
    "twice": lambda a, b, at: a.sin() * a.cos() * a,
    "dropout": lambda a, b, at: dropout(a, 0.4) * 0.5,
    "noise": lambda a, b, at: a + torch.rand(4, 4).sin() * b,
    "norm": lambda a, b, at: functional.layer_norm(a, (4,)),
    "top": lambda a, b, at: a.topk(2, 1).values.repeat(1, 2) * b,
    "sort": lambda a, b, at: a.sort(at % 2).values,
    "buffer": lambda a, b, at: torch.zeros(4, 4).index_add(0, torch.tensor([at, 1]), a[:2]).sin(),
    "fill": lambda a, b, at: torch.empty(4, 4).copy_(a).tanh(),
    "sum_into": lambda a, b, at: torch.zeros(4, 4).index_add_(0, torch.tensor([at, 2]), b[:2]).exp().clamp(-2, 2),
    "no_grad": lambda a, b, at: _without_grad(a, b),
    "data_scale": lambda a, b, at: a.detach().mul(0.5).add_(b.detach()),
}
WRITING: dict[str, Callable[[Tensor, Tensor, int], object]] = {
    "add_": lambda a, b, at: a.add_(b.detach()),
    "mul_": lambda a, b, at: a.mul_(0.5),
    "relu_": lambda a, b, at: a.relu_(),
    "row_add_": lambda a, b, at: a[at].add_(b[0]),
    "copy_": lambda a, b, at: a.copy_(b),
    "zero_": lambda a, b, at: a[:, at].zero_(),
    "dropout_": lambda a, b, at: dropout(a, 0.3, inplace=True),
    "swap_": lambda a, b, at: a.t_(),
}
MARKING = {"keep": memkit.keep, "offload": memkit.offload, "recompute": memkit.recompute}


def apply(op: Op, tensors: list[Tensor], world: World | None = None) -> None:
    """Do an op with some of the tensors, and add what it makes."""
    name, first, second, at = op
    a, b = tensors[first % len(tensors)], tensors[second % len(tensors)]
    if name in MAKING:
        tensors.append(MAKING[name](a, b, at))
    elif name in OF_WORLD:
        tensors.append(OF_WORLD[name](world, a, at))
    elif name == "write":
        world.write(at)
    elif not (a.is_leaf and a.requires_grad):
        MARKING[name](a) if name in MARKING else WRITING[name](a, b, at)


# Graphs: one forward over a few tensors

graphs = st.lists(
    st.tuples(st.sampled_from([*MAKING, *WRITING, *MARKING]), st.integers(0, 99), st.integers(0, 99), st.integers(0, 3)),
    min_size=1,
    max_size=16,
)


def _kind(error: RuntimeError) -> str:
    """Return the error's beginning; for writes in place what they have in common, as autograd words them in several ways."""
    return "modified in place" if "inplace" in str(error) else str(error)[:60]


def outcome(graph: list[Op], parts: list[int], context: AbstractContextManager[object]) -> tuple[list[Tensor], list[str]]:
    """Return the gradients after each of several backwards of a graph, and the kinds of errors in their places.

    Args:
        parts: the numbers of the tensors that backwards begin at.
        context: what the forward runs in.
    """
    torch.manual_seed(0)
    leaves = [torch.randn(4, 4).requires_grad_() for _ in range(2)]
    tensors, errors, results = list(leaves), [], []
    with context:
        for op in graph:
            try:
                apply(op, tensors)
            except RuntimeError as error:
                errors.append(_kind(error))
    chosen = [tensors[part % len(tensors)] for part in parts]
    del tensors
    for number, tensor in enumerate(chosen):
        if tensor.requires_grad:
            try:
                tensor.square().sum().backward(retain_graph=number + 1 < len(parts))
            except RuntimeError as error:
                errors.append(_kind(error))
        results += [torch.zeros(4, 4) if leaf.grad is None else leaf.grad.clone() for leaf in leaves]
    return [*results, torch.get_rng_state()], errors


# Steps: several forwards, writes between them, and backwards in any order

NUM_STEPS = 6
PER_FORWARD, ALL = "one for each forward", "one around all"


@dataclass
class Program:
    """One step: what happens, in order. An action is a name and what it is about."""

    actions: list[tuple[str, int]] = field(default_factory=list)
    forwards: list[list[Op]] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    """For each forward, the one whose detached output it gets; -1 for a batch."""
    contexts: str = PER_FORWARD
    tags: list[str] = field(default_factory=list)


def program_of(seed: int) -> Program:
    """Return a random program."""
    draw, names = random.Random(seed), [*OF_WORLD]
    program, num_forwards = Program(contexts=draw.choice([PER_FORWARD, PER_FORWARD, ALL])), draw.randint(1, 3)
    writes = draw.sample(range(8), draw.randint(1, 3))
    for number in range(num_forwards):
        ops = [(names[draw.randrange(len(names))], -1, -1, draw.randrange(4)) for _ in range(draw.randint(2, 7))]
        for _ in range(draw.choice([0, 0, 1])):
            ops.insert(draw.randrange(len(ops) + 1), ("write", -1, -1, draw.choice(writes)))
        program.forwards.append([("linear", -1, -1, draw.randrange(4)), *ops])
        program.inputs.append(draw.randrange(number) if number and draw.random() < 0.3 else -1)
        program.tags.append(draw.choice(["", "", "other"]))
    if draw.random() < 0.3:
        program.forwards[-1] = list(program.forwards[0])
    times = [["last"], ["last"], ["retain", "last"]]
    backwards = [(kind, number) for number in range(num_forwards) for kind in draw.choice(times)]
    if draw.random() < 0.75:  # all forwards come first
        program.actions = [("forward", number) for number in range(num_forwards)]
        order = list(range(num_forwards))
        draw.shuffle(order)
        program.actions += [action for number in order for action in backwards if action[1] == number]
    else:
        for number in range(num_forwards):
            program.actions.append(("forward", number))
            program.actions += [action for action in backwards if action[1] == number]
    for _ in range(draw.randint(1, 3)):
        program.actions.insert(draw.randrange(len(program.actions) + 1), ("write", draw.choice(writes)))
    for number in range(2):
        place = draw.randrange(len(program.actions) + 1) if draw.random() < 0.25 else len(program.actions)
        program.actions.insert(place, ("step", number))
    return program


def _step(program: Program, world: World, make: Make) -> list[list[Tensor]]:
    """Run one step; return the gradients after each backward. It ends with the first error, which adds an empty list."""
    batch, found = torch.randn(world.size, world.size), list[list[Tensor]]()
    world.made.clear()
    for leaf in world.leaves:
        leaf.grad = None
    num_left = len(program.forwards)
    with ExitStack() as around:
        if program.contexts == ALL:
            around.enter_context(make("programs"))
        for action, number in program.actions:
            if action == "forward":
                given = program.inputs[number]
                tensors = [batch * (number + 1) if given < 0 else world.made[given].detach()]
                with make("programs" + program.tags[number]) if program.contexts == PER_FORWARD else nullcontext():
                    for op in program.forwards[number]:
                        apply(op, tensors, world)
                        del tensors[:-1]  # nobody holds what came before
                    world.made[number] = tensors.pop()
                num_left -= 1
                if not num_left and number % 2:
                    around.close()
            elif action == "write":
                world.write(number)
            elif action == "step":
                world.optimizers[number].step()
            else:
                try:
                    world.made[number].square().mean().backward(retain_graph=action == "retain")
                except RuntimeError as error:
                    if "inplace operation" not in str(error):
                        raise
                    found.append([])
                    break
                found.append([leaf.grad.clone() for leaf in world.leaves if leaf.grad is not None])
    world.made.clear()
    return found


def run(program: Program, make: Make = lambda _: nullcontext()) -> list[list[Tensor]]:
    """Run some steps; return the gradients after each backward, and after each step all that was written."""
    world, found = World(8), list[list[Tensor]]()
    for _ in range(NUM_STEPS):
        found += [*_step(program, world, make), world.state]
    return found
