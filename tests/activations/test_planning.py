"""Storages leave by the plan: with a report from the first step on, without from the second, separately for each shape."""

from __future__ import annotations

import functools
import itertools
import random
import warnings
from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.device import Device
from memkit.plan import Plan, plan_ratio
from tests.activations.cases import assert_same_bits
from tests.activations.chains import UNIT_BYTES, Context, chain, leaf_on, step
from tests.activations.conftest import Offload

UNITS = (3, 1, 2, 5, 1, 1, 4, 2, 3, 1)


class Tower(nn.Module):
    """Linear layers and sines without a bias: each layer saves its input, each sine too."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(*pair, bias=False) for pair in itertools.pairwise(widths)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).sin()
        return x


WIDTHS = (16, 64, 32, 128, 8, 64)


def _tower_plan(widths: Sequence[int], batch: int, ratio: float, window_bytes: int) -> Plan:
    """Each width is saved twice, before the sine and behind it; the caller holds the input, nobody the output."""
    numels = [batch * widths[0]]
    for width in widths[1:]:
        numels += [batch * width] * 2
    return plan_ratio([4 * numel for numel in numels[:-1]], ratio, window_bytes=window_bytes, held=frozenset({0}))


def _train(model: nn.Module, x: Tensor, context: Context = nullcontext) -> list[Tensor]:
    model.zero_grad()
    with context():
        y = model(x)
    y.sum().backward()
    return [y.detach(), *[param.grad for param in model.parameters()]]


def _moved(tag: str) -> int:
    return memkit.stats(tag).moved_out_bytes


@pytest.mark.parametrize("window_units", [0, 4])
@pytest.mark.parametrize("ratio", [0.1, 0.3, 0.5, 1.0])
def test_second_step_follows_the_plan(ratio: float, window_units: int, device: Device, offloading: Offload) -> None:
    x = leaf_on(device.torch_device)
    plan = plan_ratio([units * UNIT_BYTES for units in UNITS], ratio, window_bytes=window_units * UNIT_BYTES)
    context = functools.partial(offloading, ratio, "plan", window_bytes=window_units * UNIT_BYTES)
    step(x, UNITS, context)
    for _ in range(3):
        step(x, UNITS, context)

        stats = memkit.stats("plan")
        assert stats.moved_out_bytes == plan.offload_bytes
        assert stats.kept_bytes == plan.kept_bytes
        assert stats.num_copies_out == sum(action.value == "offload" for action in plan.actions)


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.3, 0.5, 0.9, 1.0])
def test_first_step_without_a_report_keeps_the_ratio_as_it_goes(ratio: float, device: Device, offloading: Offload) -> None:
    for units in ([1] * 20, UNITS):
        with offloading(ratio, "first", window_bytes=0):
            chain(leaf_on(device.torch_device), units)
        stats = memkit.stats("first")
        memkit.reset("first")

        assert stats.unique_bytes == sum(units) * UNIT_BYTES
        assert ratio * stats.unique_bytes <= stats.moved_out_bytes + 1e-6
        assert stats.moved_out_bytes < ratio * stats.unique_bytes + max(units) * UNIT_BYTES
        assert stats.kept_bytes == stats.unique_bytes - stats.moved_out_bytes


def test_shapes_that_begin_alike_move_no_less_than_their_plan(device: Device, offloading: Offload) -> None:
    """The shape shows late: later moves then make up for bytes kept too long."""
    x, sizes = leaf_on(device.torch_device), [UNITS, (*UNITS, 7, 7), (*UNITS[:4], 9, *UNITS), UNITS[:5]]
    plain = [step(x, units) for units in sizes]
    plans = [plan_ratio([units * UNIT_BYTES for units in shape], 0.5, window_bytes=0) for shape in sizes]
    for count, number in enumerate([0, 1, 2, 3, *random.Random(0).choices(range(4), k=30)]):
        found = step(x, sizes[number], lambda: offloading(0.5, "alike", window_bytes=0))

        assert_same_bits(found, plain[number])
        if count >= 4:
            most_bytes = max(plan.offload_bytes for plan in plans) + 9 * UNIT_BYTES
            assert plans[number].offload_bytes <= _moved("alike") <= most_bytes


@pytest.mark.parametrize("ratio", [0.25, 0.6])
def test_steps_that_take_another_path_each_time(ratio: float, device: Device, offloading: Offload) -> None:
    """A supernet: each step draws its layers anew. Exact, and about the ratio all the same."""
    x, generator = leaf_on(device.torch_device), random.Random(0)
    for _ in range(12):
        units = [generator.choice([1, 2, 4]) for _ in range(generator.randint(12, 24))]
        found = step(x, units, lambda: offloading(ratio, "supernet", window_bytes=0))

        assert_same_bits(found, step(x, units))
        stats = memkit.stats("supernet")
        assert stats.unique_bytes == sum(units) * UNIT_BYTES
        assert abs(stats.moved_out_bytes - ratio * stats.unique_bytes) <= 4 * UNIT_BYTES
    assert stats.live_records == 0


@pytest.mark.parametrize("ratio", [0.3, 0.5, 1.0])
@pytest.mark.parametrize("widths", [WIDTHS, (32,) * 6])  # the second: all saves look the same, also the weights
@pytest.mark.parametrize("has_grad", [False, True])
def test_first_step_follows_a_report(
    has_grad: bool, widths: tuple[int, ...], ratio: float, device: Device, offloading: Offload
) -> None:
    model, x = Tower(widths).to(device.torch_device), torch.randn(32, widths[0], device=device.torch_device)
    x.requires_grad_(has_grad)
    report = memkit.profile_memory(model, x, backward=True, tag="report", print_table=False)
    passed = {"tag": "passed in", "profile": report} if has_grad else {"tag": "report"}
    context, plan = functools.partial(offloading, ratio, window_bytes=512, **passed), _tower_plan(widths, 32, ratio, 512)
    for _ in range(3):
        found = _train(model, x, context)

        stats = memkit.stats(passed["tag"])
        assert (stats.moved_out_bytes, stats.kept_bytes) == (plan.offload_bytes, plan.kept_bytes)
        assert stats.wasted_bytes == 0
        assert_same_bits(found, _train(model, x))


def test_first_step_with_a_report_finds_its_host_memory_pinned(device: Device, offloading: Offload) -> None:
    model, x = Tower(WIDTHS).to(device.torch_device), torch.randn(6, WIDTHS[0], device=device.torch_device)
    memkit.profile_memory(model, x, backward=True, tag="pinned", print_table=False)
    with offloading(1.0, "pinned", window_bytes=0):
        stats = memkit.stats("pinned")
        assert stats.host_held_bytes >= _tower_plan(WIDTHS, 6, 1.0, 0).offload_bytes
        model(x)

    assert memkit.stats("pinned").num_pins == stats.num_pins > 0


@pytest.mark.parametrize("is_of_model", [False, True])
def test_report_of_another_model_or_batch_warns_and_plans_anew(is_of_model: bool, device: Device, offloading: Offload) -> None:
    model, x = Tower(WIDTHS).to(device.torch_device), torch.randn(6, WIDTHS[0], device=device.torch_device)
    profiled = model if is_of_model else Tower((16, 32, 32)).to(device.torch_device)
    memkit.profile_memory(profiled, x, backward=True, tag="other", print_table=False)
    context = functools.partial(offloading, 0.5, "other", window_bytes=0)

    with pytest.warns(UserWarning, match=r"tag \"other\" is of another model, or of other shapes.*Profile again"):
        found = _train(model, x[:4], context)
    assert_same_bits(found, _train(model, x[:4]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):  # in the first it turns out whose the input is
            assert_same_bits(_train(model, x[:4], context), _train(model, x[:4]))
    assert _moved("other") == _tower_plan(WIDTHS, 4, 0.5, 0).offload_bytes


@pytest.mark.parametrize("min_bytes", [2**20, None], ids=["a mebibyte", "the default"])
def test_small_storages_stay_and_are_not_counted(min_bytes: int | None, device: Device) -> None:
    x = torch.randn(2**18, device=device.torch_device, requires_grad=True)
    given = {} if min_bytes is None else {"min_bytes": min_bytes}
    for _ in range(2):
        with memkit.CPUOffload(1.0, "small", window_bytes=0, device=device, **given):
            y = x.clone().sin()
            y = y[: 2**18 - 1].clone().sin()
        stats = memkit.stats("small")

        assert (stats.unique_bytes, stats.seen_bytes) == (2**20, 2**21 - 4)
        assert (stats.moved_out_bytes, stats.num_copies_out) == (2**20, 1)
        y.sum().backward()


def test_one_storage_saved_by_many_is_moved_once(device: Device, offloading: Offload) -> None:
    x = leaf_on(device.torch_device)

    def run(context: Context) -> list[Tensor]:
        x.grad = None
        with context():
            y = x.clone()
            y = y.sin() + y.cos() + y[:100].exp().sum() + y.view(16, 16).t().sinh().sum()
        y.sum().backward()
        return [y.detach(), x.grad]

    found = run(lambda: offloading(1.0, "many", window_bytes=0))

    stats = memkit.stats("many")
    exp_bytes = 400  # exp saves its result
    assert stats.moved_out_bytes == stats.unique_bytes == UNIT_BYTES + exp_bytes
    assert stats.seen_bytes == 3 * UNIT_BYTES + exp_bytes
    assert stats.num_copies_out == 2
    assert_same_bits(found, run(nullcontext))


def test_versions_of_one_storage_are_moved_apart(device: Device, offloading: Offload) -> None:
    def run(context: Context) -> list[Tensor]:
        x = leaf_on(device.torch_device)
        with context():
            y = x.clone()
            y.sin()  # saves it, and is dropped
            y.mul_(2)
            z = y.cos()
            del y
        z.sum().backward()
        return [z.detach(), x.grad]

    for _ in range(2):
        found = run(lambda: offloading(1.0, "versions", window_bytes=0))

        stats = memkit.stats("versions")
        assert (stats.unique_bytes, stats.moved_out_bytes, stats.moved_in_bytes) == (2 * UNIT_BYTES, 2 * UNIT_BYTES, UNIT_BYTES)
        assert_same_bits(found, run(nullcontext))
