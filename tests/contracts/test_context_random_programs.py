"""Random programs of several forwards, writes by code without gradients, and backwards in any order, against plain autograd."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear, normalize

import memkit
from memkit.device import ReferenceDevice
from tests.activations.cases import assert_same_bits
from tests.activations.remat.conftest import NO_PLAN_FITS
from tests.contracts.contexts import KINDS, MORE_KINDS, Kind

pytestmark = pytest.mark.filterwarnings(NO_PLAN_FITS, "ignore:.*saved tensors for a backward, and none came")

N = 8
NUM_STEPS = 6
PROGRAM_KINDS = KINDS | MORE_KINDS
NUM_OPS, NUM_WRITES = 16, 8
PER_FORWARD, ALL = "one for each forward", "one around all"
Make = Callable[[str], AbstractContextManager[object]]


class World:
    """All that a program reads and writes: weights, buffers of several shapes, norms, and two optimizers."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.weights = [nn.Parameter(torch.randn(N, N) / 3) for _ in range(4)]
        self.bias = nn.Parameter(torch.randn(N), requires_grad=False)
        self.vector = torch.ones(N)
        self.matrix = torch.randn(N, N)
        self.ema = [weight.detach().clone() for weight in self.weights]
        self.norm = nn.BatchNorm1d(N, affine=False)
        self.block = nn.Sequential(nn.Linear(N, N), nn.Tanh(), nn.Linear(N, N), nn.GELU())
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
                lambda: self.matrix.copy_(torch.rand(N, N)),
            ][which]()

    def apply(self, op: int, which: int, h: Tensor) -> Tensor:
        """Apply an op of a forward."""
        weight = self.weights[which]
        return [
            lambda: linear(h, weight),
            lambda: h.tanh(),
            lambda: h.relu() * 1.2,
            lambda: h * self.vector.clone(),
            lambda: h * self.matrix.tanh(),
            lambda: linear(h, self.ema[which].sin()) + h,
            lambda: self.norm.eval()(h),
            lambda: self.norm.train()(h),
            lambda: h.exp().clamp(max=2) * (h * self.bias).sin(),
            lambda: dropout(h, 0.2) + self.matrix.clone(),
            lambda: (h * 0.7).relu_().mul_(0.9),
            lambda: linear(h, self._spectral(weight)),
            lambda: self.block(h),
            lambda: torch.addcmul(h, h, self.matrix.t() * self.vector),
            lambda: h.softmax(1) * linear(self.matrix, weight).sigmoid(),
            lambda: (h + self.matrix).sin() * h,
        ][op]()

    def _spectral(self, weight: Tensor) -> Tensor:
        with torch.no_grad():
            self.vector.copy_(normalize(weight @ self.vector, dim=0))
        v = self.vector.clone()
        return weight / (1 + torch.dot(v, weight @ v).square())

    @property
    def state(self) -> list[Tensor]:
        """All that a program has written."""
        others = (self.vector, self.matrix, self.bias, self.norm.running_mean, self.norm.running_var)
        return [tensor.detach().clone() for tensor in (*self.weights, *self.ema, *others)] + [torch.get_rng_state()]


@dataclass
class Program:
    """One step: what happens, in order. An action is a name and what it is about."""

    actions: list[tuple[str, int]] = field(default_factory=list)
    ops: list[list[tuple[int, int]]] = field(default_factory=list)
    """For each forward its ops, or, with a first number below zero, writes in between."""
    inputs: list[int] = field(default_factory=list)
    """For each forward, the one whose detached output it gets; -1 for a batch."""
    contexts: str = PER_FORWARD
    tags: list[str] = field(default_factory=list)


def program_of(seed: int) -> Program:
    """Return a random program."""
    draw = random.Random(seed)
    program, num_forwards = Program(contexts=draw.choice([PER_FORWARD, PER_FORWARD, ALL])), draw.randint(1, 3)
    writes = draw.sample(range(NUM_WRITES), draw.randint(1, 3))
    for number in range(num_forwards):
        ops = [(draw.randrange(NUM_OPS), draw.randrange(4)) for _ in range(draw.randint(2, 7))]
        for _ in range(draw.choice([0, 0, 1])):
            ops.insert(draw.randrange(len(ops) + 1), (-1, draw.choice(writes)))
        program.ops.append([(0, draw.randrange(4)), *ops])
        program.inputs.append(draw.randrange(number) if number and draw.random() < 0.3 else -1)
        program.tags.append(draw.choice(["", "", "other"]))
    if draw.random() < 0.3:
        program.ops[-1] = list(program.ops[0])
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


def _forward(program: Program, number: int, world: World, batch: Tensor) -> None:
    given = program.inputs[number]
    h = batch * (number + 1) if given < 0 else world.made[given].detach()
    for op, which in program.ops[number]:
        if op < 0:
            world.write(which)
        else:
            h = world.apply(op, which, h)
    world.made[number] = h


def _act(program: Program, world: World, make: Make) -> list[list[Tensor]]:
    """Run one step; return the gradients after each backward. It ends with the first error, which adds an empty list."""
    batch, found = torch.randn(N, N), list[list[Tensor]]()
    world.made.clear()
    for weight in (*world.weights, *world.block.parameters()):
        weight.grad = None
    num_left = sum(action == "forward" for action, _ in program.actions)
    with ExitStack() as around:
        if program.contexts == ALL:
            around.enter_context(make("programs"))
        for action, number in program.actions:
            if action == "forward":
                with make("programs" + program.tags[number]) if program.contexts == PER_FORWARD else nullcontext():
                    _forward(program, number, world, batch)
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
                leaves = (*world.weights, *world.block.parameters())
                found.append([leaf.grad.clone() for leaf in leaves if leaf.grad is not None])
    world.made.clear()
    return found


def _run(program: Program, make: Make) -> list[list[Tensor]]:
    world, found = World(), list[list[Tensor]]()
    for _ in range(NUM_STEPS):
        found += [*_act(program, world, make), world.state]
    return found


def plainly(program: Program) -> list[list[Tensor]]:
    """Run a program without memkit."""
    return _run(program, lambda _: nullcontext())


def compare(program: Program, kind: Kind, wanted: list[list[Tensor]]) -> int:
    """Compare a program to its plain run: where that raises, so must this.

    Return where a backward refused what plain autograd does not, since something dropped is made from what was written to
    meanwhile; -1 if none did.
    """
    device = ReferenceDevice()
    try:
        found = _run(program, lambda tag: kind.make(device, tag))
    finally:
        for tag in ("programs", "programsother"):
            memkit.reset(tag)
    device.synchronize()
    for place, (one, other) in enumerate(zip(wanted, found, strict=False)):
        if one and not other:
            return place
        assert len(one) == len(other), place
        assert_same_bits(other, one)
    assert len(found) == len(wanted)
    return -1


SOME = [
    *[(124, "budget"), (166, "budget half"), (182, "budget"), (14, "offload half"), (1, "remat dtr"), (2, "remat plan")],
    *[(37, "offload around remat"), (4, "budget 0.8"), (5, "offload all"), (6, "budget of nothing")],
]
"""Among them the first ones in which gradients were once wrong. No backward of them is refused, with memkit or without."""


@pytest.mark.usefixtures("quick_plans")
@pytest.mark.parametrize(("seed", "name"), SOME)
def test_random_programs(seed: int, name: str) -> None:
    program = program_of(seed)
    wanted = plainly(program)
    assert all(wanted)  # gradients after each backward, and none that raised
    assert len(wanted) >= 2 * NUM_STEPS

    assert compare(program, PROGRAM_KINDS[name], wanted) == -1


@pytest.mark.slow
@pytest.mark.usefixtures("quick_plans")
@pytest.mark.parametrize("name", sorted(PROGRAM_KINDS))
@pytest.mark.parametrize("seed", range(8))
def test_many_random_programs(seed: int, name: str) -> None:
    program = program_of(seed)

    refused_at = compare(program, PROGRAM_KINDS[name], plainly(program))

    assert refused_at == -1 or not name.startswith("offload ") or "remat" in name
