"""`memkit.plan.residency`: slots, which layers stream, and the seconds of a step, told again in the plainest way."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memkit.plan import (
    LayerCosts,
    LayerResidency,
    ResidencyPlan,
    plan_auto,
    plan_budget,
    plan_resident,
    plan_streamed_ratio,
    slot_size_of,
    slot_sizes,
)
from memkit.plan.residency import predict_step, spread

MIB = 2**20

kinds = st.sampled_from([4, 16, 15, 64])  # three classes of sizes: 15 shares that of 16
num_slots_of_plans = st.integers(1, 4)
speeds = st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0])  # with whole seconds and bytes, floats are exact


def layer_of(
    index: int, num_bytes: int, forward_s: float | None = None, backward_s: float | None = None, grad_bytes: int = 0
) -> LayerCosts:
    return LayerCosts(
        name=f"layers.{index}", num_bytes=num_bytes, forward_s=forward_s, backward_s=backward_s, grad_bytes=grad_bytes
    )


def untimed(sizes: Sequence[int]) -> list[LayerCosts]:
    return [layer_of(index, size) for index, size in enumerate(sizes)]


def alike(num_layers: int, *, num_bytes: int, forward_s: float, backward_s: float, grad_bytes: int = 0) -> list[LayerCosts]:
    return [layer_of(index, num_bytes, forward_s, backward_s, grad_bytes) for index in range(num_layers)]


@st.composite
def timed_layers(draw: st.DrawFn) -> list[LayerCosts]:
    times = st.integers(0, 40)
    drawn = draw(st.lists(st.tuples(kinds, times, times), min_size=1, max_size=12))
    return [layer_of(index, size, forward, backward) for index, (size, forward, backward) in enumerate(drawn)]


@st.composite
def streaming_layers(draw: st.DrawFn) -> tuple[list[LayerCosts], list[int]]:
    layers = draw(timed_layers())
    return layers, sorted(draw(st.frozensets(st.integers(0, len(layers) - 1))))


def compute_s_of(layers: Sequence[LayerCosts]) -> float:
    return sum((layer.forward_s or 0.0) + (layer.backward_s or 0.0) for layer in layers)


def slots_for(layers: Sequence[LayerCosts], streamed: Collection[int], num_slots: int) -> tuple[int, ...]:
    return slot_sizes([layers[index].num_bytes for index in streamed], num_slots)


def expected_stalls(
    layers: Sequence[LayerCosts], streamed: Collection[int], slots: Sequence[int], speed: float
) -> list[Fraction]:
    """Run a step from empty slots; each copy goes into the slot needed again last, or else free first. Return the stalls."""
    order = [*range(len(layers)), *reversed(range(len(layers)))]
    contents = [-1] * len(slots)  # -1: nothing
    free_s = [Fraction(0)] * len(slots)
    now_s = copied_s = Fraction(0)
    stalls = []
    for position, index in enumerate(order):
        begin_s = now_s
        layer = layers[index]
        if index in streamed and index not in contents:
            size = min(size for size in slots if size >= layer.num_bytes)
            later = order[position:]
            slot = max(
                (slot for slot in range(len(slots)) if slots[slot] == size),
                key=lambda slot: (later.index(contents[slot]) if contents[slot] in later else math.inf, -free_s[slot]),
            )
            contents[slot] = index
            copied_s = max(copied_s, free_s[slot]) + Fraction(layer.num_bytes) / Fraction(speed)
            begin_s = max(now_s, copied_s)
        stalls.append(begin_s - now_s)
        seconds = layer.forward_s if position < len(layers) else layer.backward_s
        assert seconds is not None
        now_s = begin_s + Fraction(seconds)
        if index in streamed:
            free_s[contents.index(index)] = now_s
    return stalls


# Slots


@pytest.mark.parametrize(
    ("sizes", "num_slots", "slots"),
    [
        ([80, 70, 69, 80, 61, 61], 2, (80, 80, 69, 69)),  # an eighth smaller: it shares them
        ([80, 70, 69, 80, 61, 61], 3, (80, 80, 80, 69, 69, 69)),
        ([10, 20, 10], 3, (20, 10, 10)),  # no more than layers
        ([], 3, ()),
    ],
)
def test_slots_by_hand(sizes: list[int], num_slots: int, slots: tuple[int, ...]) -> None:
    assert slot_sizes(sizes, num_slots) == slots


@settings(max_examples=50)
@given(st.lists(st.integers(0, 1000), max_size=20), st.integers(1, 5))
def test_every_layer_fits_the_slots_of_its_class(sizes: list[int], num_slots: int) -> None:
    slots = slot_sizes(sizes, num_slots)

    assert list(slots) == sorted(slots, reverse=True)
    assert len(slots) <= len(sizes)
    for size in sizes:
        assert 7 * slot_size_of(size, slots) <= 8 * size or size == slot_size_of(size, slots)


@pytest.mark.parametrize(("slots", "found"), [((80, 40), "80 bytes"), ((), "no slots")])
def test_layer_that_no_slot_holds_is_refused(slots: tuple[int, ...], found: str) -> None:
    with pytest.raises(ValueError, match=f"^a layer of 81 bytes needs a slot that holds it; the largest found: {found}$"):
        slot_size_of(81, slots)


# Prediction


def test_gradients_that_go_out_bound_the_backward() -> None:
    layers = alike(4, num_bytes=1, forward_s=10.0, backward_s=10.0, grad_bytes=100)

    assert predict_step(layers, [1, 3], [1, 1], 1.0).total_s == 40.0 + 200.0
    assert predict_step(layers, [1, 3], [1, 1], 100.0).total_s == 80.0
    assert predict_step(layers, [], [], 1.0).total_s == 80.0


@settings(max_examples=75)
@given(streaming_layers(), num_slots_of_plans, speeds)
def test_prediction_is_what_a_step_from_empty_slots_comes_to(
    case: tuple[list[LayerCosts], list[int]], num_slots: int, speed: float
) -> None:
    layers, streamed = case
    slots = slots_for(layers, streamed, num_slots)

    prediction = predict_step(layers, streamed, slots, speed)

    stalls = [*prediction.forward_stall_s, *reversed(prediction.backward_stall_s)]
    assert stalls == expected_stalls(layers, streamed, slots, speed)
    assert prediction.total_s == compute_s_of(layers) + sum(stalls)


def streamed_of(plan: ResidencyPlan) -> list[int]:
    return [index for index, layer in enumerate(plan.layers) if layer.residency is LayerResidency.STREAMED]


# Which layers


@settings(max_examples=75)
@given(st.integers(1, 80), st.data())
def test_spread_begins_as_late_as_it_can(num_layers: int, data: st.DataObject) -> None:
    num_streamed = data.draw(st.integers(1, num_layers))
    assert spread(num_layers, 0) == ()

    chosen = spread(num_layers, num_streamed)

    gaps = [after - before for before, after in pairwise(chosen)]
    assert len(set(chosen)) == num_streamed
    assert max(gaps, default=0) - min(gaps, default=0) <= 1
    assert chosen[-1] == num_layers - 1
    assert chosen[0] == math.ceil(num_layers / num_streamed) - 1
    assert (chosen[0] == 0) == (num_streamed == num_layers)


@settings(max_examples=50)
@given(st.lists(kinds, min_size=1, max_size=24), st.floats(0, 1), num_slots_of_plans)
def test_ratio_streams_the_fewest_bytes_that_spread_evenly(sizes: list[int], ratio: float, num_slots: int) -> None:
    plan = plan_streamed_ratio(untimed(sizes), ratio, num_slots=num_slots)

    classes = [[index for index, size in enumerate(sizes) if size in alike] for alike in ([64], [15, 16], [4])]
    classes = [members for members in classes if members]
    lengths, streamed = [len(members) for members in classes], streamed_of(plan)
    counts = [len({*members} & {*streamed}) for members in classes]

    def spread_of(counts: Sequence[int]) -> list[int]:
        pairs = zip(classes, counts, strict=True)
        return sorted(members[place] for members, count in pairs for place in spread(len(members), count))

    assert streamed == spread_of(counts)
    assert is_even(counts, lengths)
    choices = product(*(range(length + 1) for length in lengths))
    totals = [sum(sizes[index] for index in spread_of(choice)) for choice in choices if is_even(choice, lengths)]
    assert plan.streamed_bytes == min(total for total in totals if total >= ratio * sum(sizes) * (1 - 1e-9))


def is_even(counts: Sequence[int], lengths: Sequence[int]) -> bool:
    """Whether some share of each class, rounded down or up, is its count."""
    least = max(Fraction(count - 1, length) for count, length in zip(counts, lengths, strict=True))
    most = min(Fraction(count + 1, length) for count, length in zip(counts, lengths, strict=True))
    return least < most


def test_of_choices_that_cost_the_same_the_first_layers_stay() -> None:
    layers = untimed([4 * MIB] + [2 * MIB] * 4)

    plan = plan_streamed_ratio(layers, 1 / 3, num_slots=2)

    assert streamed_of(plan) == [2, 4]  # not [0], as many bytes in as large slots


def test_layer_without_bytes_never_streams() -> None:
    layers = untimed([MIB, 0, MIB, 0])

    assert plan_streamed_ratio(layers, 1.0, num_slots=2).streamed == ("layers.0", "layers.2")
    assert plan_resident(layers, 0, num_slots=2).streamed == ("layers.0", "layers.2")
    assert plan_streamed_ratio(untimed([0, 0]), 1.0, num_slots=2).streamed == ()


# Resident layers and budgets


@settings(max_examples=25)
@given(st.lists(kinds, min_size=1, max_size=16), st.data(), num_slots_of_plans)
def test_plan_totals_are_those_of_its_layers(sizes: list[int], data: st.DataObject, num_slots: int) -> None:
    num_resident = data.draw(st.integers(0, len(sizes)))
    plan = plan_resident(untimed(sizes), num_resident, num_slots=num_slots)

    streamed = [sizes[index] for index in streamed_of(plan)]
    assert len(streamed) == len(sizes) - num_resident
    assert plan.streamed_bytes == plan.host_bytes == sum(streamed)
    assert plan.resident_bytes == sum(sizes) - sum(streamed)
    assert plan.slot_bytes == slot_sizes(streamed, num_slots)
    assert plan.device_bytes == plan.resident_bytes + sum(plan.slot_bytes)


@settings(max_examples=50)
@given(st.integers(1, 20), st.integers(1, 20), num_slots_of_plans)
def test_budget_of_layers_alike_streams_as_few_as_fit(num_layers: int, budget: int, num_slots: int) -> None:
    plan = plan_budget(untimed([MIB] * num_layers), budget * MIB, num_slots=num_slots)

    fewest = {
        slots: [count for count in range(num_layers + 1) if num_layers - count + min(count, slots) <= budget]
        for slots in range(1, num_slots + 1)
    }
    slots = max(slots for slots, counts in fewest.items() if counts)
    assert len(plan.streamed) == fewest[slots][0]
    assert len(plan.slot_bytes) == min(slots, len(plan.streamed))


@settings(max_examples=25)
@given(st.lists(st.integers(0, 64), min_size=1, max_size=16), st.integers(0, 800), num_slots_of_plans)
def test_plan_fits_its_budget_or_is_refused_with_one_that_it_fits(sizes: list[int], budget: int, num_slots: int) -> None:
    layers = untimed(sizes)
    try:
        plan = plan_budget(layers, budget, num_slots=num_slots)
    except ValueError as error:
        least = int(str(error).removeprefix("the layers' weights need at least ").split()[0])
        assert plan_budget(layers, least, num_slots=num_slots).device_bytes == least > budget
    else:
        assert plan.device_bytes <= budget


@pytest.mark.parametrize(
    ("sizes", "budget", "least", "why", "layer"),
    [
        ([1, 3, 1], 3, 4, "layers.1, 3.00 MiB, and one for each other size of layer", "layers.1"),
        ([3] * 4, 2, 3, "layers.0, 3.00 MiB", "layers.0"),
    ],
)
def test_budget_too_small_names_the_least_and_the_largest_layer(
    sizes: list[int], budget: int, least: int, why: str, layer: str
) -> None:
    with pytest.raises(ValueError) as error:
        plan_budget(untimed([size * MIB for size in sizes]), budget * MIB, num_slots=3)

    assert str(error.value) == (
        f"the layers' weights need at least {least}.00 MiB of budget (a slot that holds {why}); found {budget}.00 MiB. "
        f"Raise budget by 1048576 bytes or more, or split {layer}."
    )


# As much as hides


@settings(max_examples=25)
@given(timed_layers(), num_slots_of_plans, speeds)
def test_auto_hides_and_leaves_least_on_the_device_of_all_ratios(
    layers: list[LayerCosts], num_slots: int, speed: float
) -> None:
    plan = plan_auto(layers, num_slots=num_slots, link_bytes_per_s=speed)

    assert plan.predicted_s is not None
    assert plan.compute_s is not None
    assert plan.predicted_s <= 1.01 * plan.compute_s
    for percent in range(0, 101, 5):
        other = plan_streamed_ratio(layers, percent / 100, num_slots=num_slots, link_bytes_per_s=speed)
        assert other.predicted_s is not None
        assert other.predicted_s > 1.01 * plan.compute_s or other.device_bytes >= plan.device_bytes


@pytest.mark.parametrize(("speed", "num_streamed"), [(MIB / 10, 6), (MIB, None)])
def test_auto_keeps_to_a_budget(speed: float, num_streamed: int | None) -> None:
    """By streaming the least that fits, if it needs more than what hides."""
    layers = alike(12, num_bytes=MIB, forward_s=1.0, backward_s=2.0)
    without = plan_auto(layers, num_slots=3, link_bytes_per_s=speed)

    plan = plan_auto(layers, num_slots=3, link_bytes_per_s=speed, budget_bytes=9 * MIB)

    least = plan_budget(layers, 9 * MIB, num_slots=3, link_bytes_per_s=speed)
    assert plan == (without if num_streamed is None else least)
    assert num_streamed in (None, len(plan.streamed))


# What a plan says


def test_explain_lists_every_layer_and_the_totals() -> None:
    layers = [layer_of(index, size * MIB, 0.002, 0.004) for index, size in enumerate([8, 8, 8, 8, 2, 2])]
    layers[5] = replace(layers[5], forward_s=0.0105)

    plan = plan_streamed_ratio(layers, 0.75, num_slots=1, link_bytes_per_s=2048 * MIB)

    assert plan.explain() == (
        "layer     weights      MiB    compute (ms)    transfer (ms)    stall (ms)\n"
        "--------  ---------  -----  --------------  ---------------  ------------\n"
        "layers.0  resident    8.00   2.000 / 4.000                -         0.000\n"
        "layers.1  streamed    8.00   2.000 / 4.000            3.906         5.812\n"
        "layers.2  streamed    8.00   2.000 / 4.000            3.906         7.812\n"
        "layers.3  streamed    8.00   2.000 / 4.000            3.906         3.906\n"
        "layers.4  streamed    2.00   2.000 / 4.000            0.977         0.977\n"
        "layers.5  streamed    2.00  10.500 / 4.000            0.977         0.977\n"
        "streamed: 5 of 6 layers, 28.00 MiB\n"
        "slots: 1 of 8.00 MiB, 1 of 2.00 MiB\n"
        "device: 18.00 MiB, host: 28.00 MiB\n"
        "forward and backward: 63.984 ms, compute alone 44.500 ms"
    )


def test_explain_shows_what_is_not_known_as_a_dash() -> None:
    text = plan_streamed_ratio([layer_of(0, MIB, 0.001), layer_of(1, MIB)], 0.5, num_slots=3).explain()

    assert text.splitlines()[3].split() == ["layers.1", "streamed", "1.00", "-", "/", "-", "-", "-"]
    assert text.endswith("forward and backward: - ms, compute alone - ms")


# Bad input

_ONE, _NONE = untimed([MIB]), list[LayerCosts]()
_OF_SLOTS = "num_slots must be at least 1; found 0. Pass 1 to take the least memory, 2 or more to copy while a layer computes"
_EMPTY = "a plan needs at least one layer; found none"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: plan_streamed_ratio(_ONE, 1.1, num_slots=3), "offload_ratio must be from 0 (move nothing) to 1"),
        (lambda: plan_streamed_ratio(_ONE, 0.5, num_slots=0), _OF_SLOTS),
        (lambda: plan_budget(_ONE, MIB, num_slots=0), _OF_SLOTS),
        (lambda: slot_sizes([MIB], 0), _OF_SLOTS),
        (lambda: plan_resident(_ONE, -1, num_slots=3), "num_resident must be from 0 to the number of layers, 1; found -1"),
        (lambda: plan_resident(_ONE, 2, num_slots=3), "num_resident must be from 0 to the number of layers, 1; found 2"),
        (lambda: plan_streamed_ratio(_ONE, 0.5, num_slots=True), "num_slots must be an int; found True"),
        (lambda: plan_resident(_ONE, 0.5, num_slots=3), "num_resident must be an int; found 0.5"),  # type: ignore[arg-type]
        (lambda: plan_streamed_ratio(_NONE, 0.5, num_slots=3), _EMPTY),
        (lambda: plan_auto(_NONE, num_slots=3, link_bytes_per_s=1.0), _EMPTY),
    ],
)
def test_bad_arguments_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
        make()
