"""`StateOffload` over shards, in one process: the same bits as the plain optimizer, and what is refused.

On two ranks see test_two_ranks.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from memkit.errors import StateOffloadError
from memkit.states import packing
from memkit.states.packing import moved_state
from tests.distributed.cases import assert_same
from tests.distributed.offloading import Scaled, adamw, check_same, found_in, in_windows, offload, sharded, train
from tests.states.cases import OPTIMIZERS, EightBit, Odd
from tests.weights.wrapped import Int8

MIXING = ("Adafactor loop", "Adafactor foreach", "Muon")
pytestmark = pytest.mark.usefixtures("one")

NOT_OVER_SHARDS = ("Rprop loop", "Rprop foreach", "SGD fused")
"""What steps no shards in PyTorch, for want of an op."""
OFTEN = ("AdamW fused", "RMSprop foreach", "schedule free", "rebinding")
CASES = [
    pytest.param(case, id=case.name, marks=() if case.name in OFTEN else pytest.mark.slow)
    for case in OPTIMIZERS
    if case.name not in (*MIXING, *NOT_OVER_SHARDS) and not case.name.endswith(" loop")
]


def _shard(values: Tensor, *placements: Any) -> nn.Parameter:
    mesh = init_device_mesh("cpu", (1,))
    return nn.Parameter(distribute_tensor(values, mesh, placements or (Shard(0),)))


def _step(optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            grad = torch.randn(parameter.size(), generator=generator, dtype=torch.float32).to(parameter.dtype)
            parameter.grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements)
    optimizer.step()


class Drawing(torch.optim.SGD):
    """Adds noise."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.grad.add_(torch.randn(parameter.shape))
        return super().step(closure)


class Failing(torch.optim.AdamW):
    """Raises behind some of its steps of parts."""

    fails_at: tuple[int, ...] = ()
    num_calls = [0]  # noqa: RUF012  # shared by shells

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        if self.param_groups and self.param_groups[0]["params"]:
            self.num_calls[0] += 1
            if self.num_calls[0] in type(self).fails_at:
                raise ValueError("no luck")
        return found


@pytest.fixture
def failing() -> Iterator[Callable[..., None]]:
    def at(*numbers: int) -> None:
        Failing.num_calls[0], Failing.fails_at = 0, numbers

    yield at
    at()


# The same bits


@pytest.mark.filterwarnings("ignore:StateOffload.* without its fused kernel")
@pytest.mark.parametrize("update", ["device", pytest.param("host", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_steps_as_the_plain_optimizer(case: Any, update: str) -> None:
    check_same(case.make, update=update)


@pytest.mark.parametrize("case", [case for case in OPTIMIZERS if case.name in NOT_OVER_SHARDS], ids=str)
def test_steps_what_steps_no_shards_by_itself(case: Any) -> None:
    whole, split = Scaled(), sharded()
    plain, optimizer = case.make(whole.parameters()), case.make(split.parameters())
    train(whole, plain, range(4))
    with offload(optimizer):
        train(split, optimizer, range(4))

        assert_same(found_in(split, optimizer), found_in(whole, plain))


@pytest.mark.slow
@pytest.mark.parametrize("update", ["device", pytest.param("host", marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_cut", [pytest.param(False, marks=pytest.mark.slow), True])
def test_steps_float32_copies_as_of_a_whole_model(update: str, is_cut: bool) -> None:
    whole, split = Scaled(torch.bfloat16), sharded(torch.bfloat16)
    optimizers = [adamw(model.parameters()) for model in (whole, split)]
    with in_windows() if is_cut else nullcontext():
        for model, optimizer in zip((whole, split), optimizers, strict=True):
            with offload(optimizer, master=torch.float32, update=update) as states:
                train(model, optimizer, range(4))
                model.scale.data.mul_(1.5)  # the copy follows
                train(model, optimizer, range(4, 6))
                optimizer.load_state_dict(optimizer.state_dict())
                train(model, optimizer, range(6, 8))
            assert any(piece.windows for piece in states.plan.pieces) == is_cut

    assert_same(found_in(split, optimizers[1]), found_in(whole, optimizers[0]))
    for entries in optimizers[1].state.values():
        assert isinstance(entries["master"], DTensor)
        assert entries["master"].dtype == torch.float32


def test_states_change_places_and_begin_anew() -> None:
    """The class puts another tensor into the data of parameters as well."""
    values = torch.randn(6, 4)
    parameters = [nn.Parameter(values.clone()), _shard(values.clone())]
    plain, optimizer = (Odd([parameter]) for parameter in parameters)
    with offload(optimizer) as states:
        for seed in range(9):
            parameters[0].grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
            plain.step()
            _step(optimizer, seed)
            found = {name: packing.local_of(torch.as_tensor(value)) for name, value in optimizer.state[parameters[1]].items()}
            assert states.stats().num_resident == 0
            assert found.keys() == plain.state[parameters[0]].keys()
            for name, value in plain.state[parameters[0]].items():
                assert torch.equal(found[name], torch.as_tensor(value)), name

            assert torch.equal(packing.local_of(parameters[1]), parameters[0])


def test_states_between_steps_are_shards_in_host_memory_of_their_own() -> None:
    parameter = _shard(torch.randn(6, 4))
    optimizer = adamw([parameter])
    with offload(optimizer):
        _step(optimizer)
        mean = optimizer.state[parameter]["exp_avg"]
        saved = optimizer.state_dict()["state"][0]

        assert isinstance(mean, DTensor)
        assert saved["exp_avg"] is mean
        assert mean.to_local().untyped_storage().nbytes() == mean.to_local().nbytes
        assert copy.deepcopy(saved)["exp_avg"].full_tensor().equal(mean.full_tensor())


@pytest.mark.parametrize("options", [{}, {"update": "host"}, {"device_budget": "1KiB"}], ids=str)
def test_a_step_counts_as_a_write_to_the_parameter(options: dict[str, Any]) -> None:
    parameters = [_shard(torch.randn(rows, 4)) for rows in (6, 60)]
    optimizer = adamw(parameters)
    with offload(optimizer, **options):
        before = [parameter._version for parameter in parameters]
        _step(optimizer)

        assert all(parameter._version > version for parameter, version in zip(parameters, before, strict=True))


def test_a_rank_without_any_elements_steps() -> None:
    for update in ("device", "host"):
        parameter = _shard(torch.randn(0, 4))
        optimizer = torch.optim.AdamW([parameter], fused=True)
        with offload(optimizer, update=update):
            _step(optimizer)
            assert optimizer.state[parameter]["step"] == 1
            assert isinstance(optimizer.state[parameter]["exp_avg"], DTensor)


# Steps that fail


@pytest.mark.parametrize(
    ("options", "fails_at"), [({}, 1), ({}, 3), ({"update": "host"}, 3), ({"device_budget": "1KiB"}, 1)], ids=str
)
def test_a_step_that_fails_is_made_again(failing: Callable[..., None], options: dict[str, Any], fails_at: int) -> None:
    made = [[_shard(torch.randn(8, 4, generator=torch.Generator().manual_seed(0))) for _ in range(4)] for _ in range(2)]
    plain, optimizer = (Failing(row, lr=1e-2, fused=True) for row in made)
    num_before = 0 if "update" in options else 2  # a step on the host that fails loses states
    with offload(optimizer, **options) as states:
        assert any(piece.is_resident for piece in states.plan.pieces) == ("device_budget" in options)
        assert len(states.plan.pieces) > 2
        for number in range(num_before):
            _step(optimizer, number)
        failing(fails_at)
        with pytest.raises(ValueError, match="no luck"):
            _step(optimizer, num_before)
        failing()
        optimizer.step()
        for number in range(num_before + 1):
            _step(plain, number)

        for one, other in zip(*made, strict=True):
            assert torch.equal(one.to_local(), other.to_local())


def test_a_shard_that_was_stepped_in_part_is_not_gone_on_with(failing: Callable[..., None]) -> None:
    """Whatever its gradient is by then."""
    parameter = _shard(torch.randn(40, 26))
    optimizer = Failing([parameter], lr=1e-2)
    with in_windows(), offload(optimizer) as states:
        assert states.plan.pieces[0].windows
        _step(optimizer)
        failing(2, 3)
        with pytest.raises((ValueError, StateOffloadError)):
            _step(optimizer)
        failing()
        parameter.grad.mul_(2)  # moves the version of the shard, not that of its local tensor

        with pytest.raises(StateOffloadError, match=r"the step was broken off within parameter 0\.0: a part of the parameter"):
            optimizer.step()
        with pytest.warns(UserWarning, match="a part of the parameter"):
            states.close()


# Refusals


@pytest.mark.parametrize("options", [{"when": "backward"}, {"overlap_forward": True}])
def test_stepping_beside_what_gathers_shards_is_refused(options: dict[str, Any]) -> None:
    message = r'StateOffload steps shards \(DTensor\) with when="step" and without overlap_forward'
    with pytest.raises(ValueError, match=message):
        offload(adamw([_shard(torch.randn(6, 4))]), **options)

    parameter = nn.Parameter(torch.randn(6, 4))
    optimizer = adamw([parameter])
    with offload(optimizer, **options):
        optimizer.add_param_group({"params": [_shard(torch.randn(6, 4))]})
        with pytest.raises(ValueError, match=message):
            optimizer.step()
        del optimizer.param_groups[1]


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (torch.optim.Adafactor, (6, 4)),
        (torch.optim.Adafactor, (6,)),
        (torch.optim.Muon, (6, 4)),
        (EightBit, (6, 4)),
        (functools.partial(Drawing, lr=0.1), (6, 4)),
    ],
)
def test_optimizers_that_mix_elements_are_refused(make: Any, size: tuple[int, ...]) -> None:
    optimizer = make([_shard(torch.randn(size))])
    before = torch.get_rng_state()

    with pytest.raises(ValueError, match=r"each element has to be stepped by itself; found (Adafactor|Muon|EightBit|Drawing)"):
        offload(optimizer)

    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: _shard(torch.tensor(1.0), Replicate()), "without dimensions"),
        (lambda: nn.Parameter(DTensor.from_local(torch.ones(4), init_device_mesh("cpu", (1,)), [Partial()])), "a summand"),
        (lambda: _shard_of_wrapped(), "of a Int8"),
    ],
)
def test_shards_whose_local_tensors_cannot_be_stepped_are_refused(make: Callable[[], Tensor], found: str) -> None:
    optimizer = torch.optim.SGD([make()], lr=0.1)

    with pytest.raises(ValueError, match=rf"StateOffload steps shards \(DTensor\) whose local tensors are plain; .*{found}"):
        offload(optimizer)


def _shard_of_wrapped() -> Tensor:
    whole = torch.randn(4, 4)
    return packing.shard_over(Int8.quantized(whole), _shard(whole))


def test_a_gradient_that_is_split_otherwise_is_refused() -> None:
    parameter = _shard(torch.randn(6, 4))
    optimizer = adamw([parameter])
    with offload(optimizer):
        parameter.grad = DTensor.from_local(torch.ones(6, 4), parameter.device_mesh, [Partial()])
        message = r"steps parameter 0.0, a shard, .* placements \(Shard\(dim=0\),\); found a DTensor with placements \(Partial"
        with pytest.raises(StateOffloadError, match=message):
            optimizer.step()
        assert not optimizer.state
        parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        optimizer.step()
        assert optimizer.state


def test_states_that_are_not_split_are_refused() -> None:
    parameter = _shard(torch.randn(6, 4))
    optimizer = adamw([parameter])
    with offload(optimizer):
        _step(optimizer)
        saved = optimizer.state_dict()
        whole = copy.deepcopy(saved)
        whole["state"][0]["exp_avg"] = torch.ones(6, 4)
        optimizer.load_state_dict(whole)
        with pytest.raises(StateOffloadError, match=r'found "exp_avg", a Tensor\. Load states by .*set_optimizer_state_dict'):
            _step(optimizer)
        optimizer.load_state_dict(saved)
        _step(optimizer)


def test_a_state_of_another_size_is_refused() -> None:
    """The steps at the beginning have shown none: it is made later."""

    class Late(torch.optim.SGD):
        is_late = False

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if self.is_late:
                        self.state[parameter]["rows"] = torch.ones(2)
            return super().step(closure)

    parameter = _shard(torch.randn(6, 4))
    optimizer = Late([parameter], lr=0.1, momentum=0.9)
    with offload(optimizer):
        Late.is_late = True
        before = parameter.to_local().clone()
        with pytest.raises(
            StateOffloadError, match=r'has made "rows" of size \[2\] for parameter 0.0, a shard with \[6, 4\] here'
        ):
            _step(optimizer)

        assert torch.equal(parameter.to_local(), before)


# What they are made of


def test_a_shard_is_made_over_memory_of_any_precision() -> None:
    parameter = _shard(torch.randn(6, 4).bfloat16())
    local = torch.randn(6, 4)
    made = packing.shard_over(local, parameter)

    assert isinstance(made, DTensor)
    assert (made.dtype, made.placements, made.requires_grad) == (torch.float32, parameter.placements, False)
    assert packing.local_of(made).data_ptr() == local.data_ptr()
    assert packing.lie_alike(made, parameter)
    assert not packing.lie_alike(made, local)
    assert not packing.lie_alike(_shard(torch.randn(6, 4), Replicate()), parameter)


def test_a_shard_in_host_memory_may_be_of_ranks_with_gpus() -> None:
    """Ops that leave each rank by itself, copies, pickling and `torch.distributed.checkpoint` take it as it is."""
    mesh = DeviceMesh("cuda", [0], _init_backend=False)
    like = DTensor.from_local(torch.empty(6, 4, device="meta"), mesh, [Shard(0)], run_check=False)
    local = torch.randn(6, 4)
    made = packing.shard_over(local, like)
    moved = moved_state(made, torch.device("cpu"))

    assert made.device.type == "cpu"
    for other in (moved, copy.deepcopy(made), made.detach(), made.clone(), made.cpu(), made.clone().copy_(made)):
        assert other.device_mesh == mesh
        assert torch.equal(packing.local_of(other), local)
    assert find_state_dict_object({"mean": made}, _create_write_items("mean", made)[0].index).data_ptr() == local.data_ptr()
