"""`memkit.plan.residency`: the sizes of the slots, and how long a step takes, told again in the plainest way."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memkit.plan import LayerCosts, slot_size_of, slot_sizes
from memkit.plan.residency import predict_step

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


def moving_bytes(layers: Sequence[LayerCosts], streamed: Collection[int], slots: Sequence[int]) -> int:
    """Return the bytes that a step copies: all in the forward, and in the backward all but the last that the slots held."""
    total_bytes = 0
    for size in set(slots):
        sizes = [layers[index].num_bytes for index in sorted(streamed) if slot_size_of(layers[index].num_bytes, slots) == size]
        total_bytes += sum(sizes) + sum(sizes[: len(sizes) - slots.count(size)])
    return total_bytes


# Slots


def test_sizes_within_an_eighth_share_slots_of_the_largest() -> None:
    assert slot_sizes([80, 70, 69, 80, 61, 61], 2) == (80, 80, 69, 69)
    assert slot_sizes([80, 70, 69, 80, 61, 61], 3) == (80, 80, 80, 69, 69, 69)


def test_no_more_slots_than_layers_of_their_size() -> None:
    assert slot_sizes([10, 20, 10], 3) == (20, 10, 10)
    assert slot_sizes([], 3) == ()


@settings(max_examples=50)
@given(st.lists(st.integers(0, 1000), max_size=20), st.integers(1, 5))
def test_every_layer_fits_the_slots_of_its_class(sizes: list[int], num_slots: int) -> None:
    slots = slot_sizes(sizes, num_slots)

    assert list(slots) == sorted(slots, reverse=True)
    assert len(slots) <= len(sizes)
    for size in sizes:
        assert 7 * slot_size_of(size, slots) <= 8 * size or size == slot_size_of(size, slots)


def test_layer_uses_the_smallest_slot_that_holds_it() -> None:
    assert [slot_size_of(num_bytes, (80, 80, 40)) for num_bytes in (80, 41, 40, 1)] == [80, 80, 40, 40]


def test_layer_that_no_slot_holds_is_refused() -> None:
    with pytest.raises(ValueError) as error:
        slot_size_of(81, (80, 40))
    with pytest.raises(ValueError) as error_without_slots:
        slot_size_of(81, ())

    assert str(error.value) == "a layer of 81 bytes needs a slot that holds it; the largest found: 80 bytes"
    assert str(error_without_slots.value) == "a layer of 81 bytes needs a slot that holds it; the largest found: no slots"


# Prediction


def test_only_the_first_copy_stalls_where_a_copy_is_shorter_than_the_compute_before_it() -> None:
    layers = alike(8, num_bytes=10, forward_s=10.0, backward_s=20.0)

    prediction = predict_step(layers, range(8), [10, 10], 1.0)

    assert prediction.forward_stall_s == (10.0, *[0.0] * 7)
    assert prediction.backward_stall_s == (0.0,) * 8
    assert prediction.total_s == 240.0 + 10.0


def test_first_copy_hides_behind_the_resident_layers_before_it() -> None:
    layers = alike(4, num_bytes=5, forward_s=2.0, backward_s=4.0)

    stalls = [predict_step(layers, [first], [5], 1.0).forward_stall_s for first in range(4)]

    assert stalls == [(5.0, 0.0, 0.0, 0.0), (0.0, 3.0, 0.0, 0.0), (0.0, 0.0, 1.0, 0.0), (0.0, 0.0, 0.0, 0.0)]


def test_first_copies_fill_the_slots_one_after_the_other() -> None:
    layers = alike(4, num_bytes=5, forward_s=0.0, backward_s=0.0)

    prediction = predict_step(layers, [0, 1, 3], [5, 5, 5], 1.0)

    assert prediction.forward_stall_s == (5.0, 5.0, 0.0, 5.0)
    assert prediction.backward_stall_s == (0.0,) * 4


def test_with_one_slot_nothing_overlaps() -> None:
    layers = alike(4, num_bytes=5, forward_s=1.0, backward_s=2.0)

    prediction = predict_step(layers, range(4), [5], 1.0)

    assert prediction.forward_stall_s == (5.0, 5.0, 5.0, 5.0)
    assert prediction.backward_stall_s == (5.0, 5.0, 5.0, 0.0)
    assert prediction.total_s == 12.0 + 35.0


def test_one_slot_is_filled_while_resident_layers_compute() -> None:
    layers = alike(4, num_bytes=5, forward_s=3.0, backward_s=4.0)

    prediction = predict_step(layers, [1, 3], [5], 1.0)

    assert prediction.forward_stall_s == (0.0, 2.0, 0.0, 2.0)
    assert prediction.backward_stall_s == (0.0, 1.0, 0.0, 0.0)
    assert prediction.total_s == 28.0 + 5.0


def test_slow_link_takes_as_long_as_the_bytes_that_move() -> None:
    layers = alike(20, num_bytes=100, forward_s=1.0, backward_s=2.0)

    prediction = predict_step(layers, range(20), [100] * 3, 1.0)

    # 20 copies, the last layer's forward and backward, 17 copies as 3 are still there, the first layer's backward
    assert prediction.total_s == (20 + 17) * 100 + (1 + 2) + 2


def test_second_of_two_slots_hides_the_shorter_of_copy_and_compute() -> None:
    layers = alike(4, num_bytes=6, forward_s=4.0, backward_s=8.0)

    prediction = predict_step(layers, range(4), [6, 6], 1.0)

    # forward: 0 is there at 6 and 1 at 12, before which 0 ends; 2 takes its slot then and is there at 18, 3 at 24
    assert prediction.forward_stall_s == (6.0, 2.0, 2.0, 2.0)
    assert prediction.backward_stall_s == (0.0, 0.0, 0.0, 0.0)
    assert prediction.total_s == 48.0 + 12.0


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


@settings(max_examples=75)
@given(streaming_layers(), num_slots_of_plans, speeds)
def test_step_takes_at_least_its_compute_and_its_copies(
    case: tuple[list[LayerCosts], list[int]], num_slots: int, speed: float
) -> None:
    layers, streamed = case
    slots = slots_for(layers, streamed, num_slots)

    total_s = predict_step(layers, streamed, slots, speed).total_s

    assert total_s >= compute_s_of(layers)
    assert total_s >= moving_bytes(layers, streamed, slots) / speed


@settings(max_examples=75)
@given(streaming_layers(), num_slots_of_plans, speeds)
def test_step_without_compute_takes_exactly_its_copies(
    case: tuple[list[LayerCosts], list[int]], num_slots: int, speed: float
) -> None:
    layers, streamed = [replace(layer, forward_s=0.0, backward_s=0.0) for layer in case[0]], case[1]
    slots = slots_for(layers, streamed, num_slots)

    total_s = predict_step(layers, streamed, slots, speed).total_s

    assert total_s == moving_bytes(layers, streamed, slots) / speed


@settings(max_examples=75)
@given(streaming_layers(), num_slots_of_plans, num_slots_of_plans, speeds)
def test_more_slots_never_take_longer(case: tuple[list[LayerCosts], list[int]], first: int, second: int, speed: float) -> None:
    layers, streamed = case

    more, fewer = (
        predict_step(layers, streamed, slots_for(layers, streamed, num_slots), speed).total_s
        for num_slots in sorted((first, second), reverse=True)
    )

    assert more <= fewer


@settings(max_examples=75)
@given(streaming_layers(), num_slots_of_plans, speeds, speeds)
def test_faster_link_never_takes_longer(
    case: tuple[list[LayerCosts], list[int]], num_slots: int, first: float, second: float
) -> None:
    layers, streamed = case
    slots = slots_for(layers, streamed, num_slots)

    slower, faster = (predict_step(layers, streamed, slots, speed).total_s for speed in sorted((first, second)))

    assert faster <= slower


# Bad input


def test_costs_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError) as error_of_bytes:
        layer_of(0, -1)
    with pytest.raises(ValueError) as error_of_seconds:
        layer_of(0, 1, 1.0, math.nan)

    assert str(error_of_bytes.value) == "num_bytes of layers.0 is a number of bytes, 0 or more; found -1"
    assert str(error_of_seconds.value) == "backward_s of layers.0 is a number of seconds, 0 or more, or None; found nan"
