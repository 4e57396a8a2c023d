"""Optimizer states: which make a piece, which stay, where they are stepped, and what lies on a disk."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memkit.device import ReferenceDevice
from memkit.errors import BudgetInfeasible, HostMemoryError
from memkit.plan import ParameterCosts, StatePlan, plan_states
from memkit.plan.states import (
    BLOCK_BYTES,
    HOST_PAGE_BYTES,
    NUM_BUFFERS,
    PIECE_BYTES,
    WINDOW_NUMEL,
    Update,
    aligned,
    disk_bytes,
    disk_step_s,
    held_bytes,
    interleaved,
    side_by_side,
    terabytes_written,
)
from memkit.transfer import Arena, ReferenceDisk

MIB = 2**20
SIZES = st.lists(st.integers(0, 5000), min_size=1, max_size=40)


def _cost(name: object, numel: int, parameter_bytes: int, state_bytes: int, **others: bool) -> ParameterCosts:
    return ParameterCosts(name=str(name), numel=numel, parameter_bytes=parameter_bytes, state_bytes=state_bytes, **others)


def _costs(sizes: list[int], *, is_elementwise: bool = False) -> list[ParameterCosts]:
    return [_cost(n, 128 * size, 512 * size, 1024 * size, is_elementwise=is_elementwise) for n, size in enumerate(sizes)]


@given(SIZES, st.integers(0, 10**7), st.sampled_from(["device", "host"]))
def test_pieces_cover_all_and_keep_the_budget(sizes: list[int], budget: int, update: str) -> None:
    costs = _costs(sizes)
    least = min((piece.state_bytes for piece in plan_states(costs).pieces if piece.state_bytes), default=0)
    if 0 < budget < least:
        with pytest.raises(BudgetInfeasible) as caught:
            plan_states(costs, device_budget_bytes=budget, update=update)
        assert caught.value.smallest_bytes == least
        budget = least
    plan = plan_states(costs, device_budget_bytes=budget, update=update)

    assert [index for piece in plan.pieces for index in piece.parameters] == list(range(len(sizes)))
    assert plan.resident_bytes <= budget
    assert plan.resident_bytes + plan.host_bytes == sum(cost.state_bytes for cost in costs)
    for piece in plan.pieces:
        if not piece.is_resident:
            assert plan.slot_bytes[piece.slot] >= (
                piece.state_bytes if piece.update is Update.DEVICE else piece.parameter_bytes + piece.gradient_bytes
            )
    sides = {piece.slot: piece.update for piece in plan.pieces if piece.slot >= 0}
    assert all(piece.slot < 0 or sides[piece.slot] is piece.update for piece in plan.pieces)


@pytest.mark.parametrize(("has_master", "runs_ahead", "sent"), [(True, False, 4), (True, True, 6), (False, False, 4)])
def test_what_goes_to_the_host(has_master: bool, runs_ahead: bool, sent: int) -> None:
    costs = [_cost(number, 2**20, 2 * 2**20, 12 * 2**20, has_master=has_master) for number in range(4)]
    plan = plan_states(costs, update="host", runs_ahead=runs_ahead)

    assert sum(piece.sent_bytes for piece in plan.pieces) == sent * 4 * 2**20
    assert "For the host it copies " in plan.explain()


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"update": "device"}, 2**26),
        ({"update": "host"}, 2**27),
        ({"update": "host", "runs_ahead": True}, 2**27),
        ({"update": "host", "has_disk": True}, 2**26),
    ],
)
def test_pieces_are_larger_where_the_host_steps_and_only_gradients_move(options: dict[str, Any], most: int) -> None:
    plan = plan_states(_costs([2**14] * 256), **options)  # 4 GiB, in parameters of 16 MiB of states

    assert max(piece.state_bytes for piece in plan.pieces) == most
    assert plan.room_bytes < 2**30


SHAPES = st.tuples(st.integers(1, 400 * 2**20), st.booleans(), st.sampled_from([2, 4]), st.integers(0, 4))


@given(st.lists(SHAPES, min_size=1, max_size=12), st.sampled_from(["device", "host"]), st.booleans())
def test_windows_cover_their_parameter_and_fit_the_room(
    shapes: list[tuple[int, bool, int, int]], update: str, apart: bool
) -> None:
    costs = [
        ParameterCosts(
            name=str(index),
            numel=numel,
            parameter_bytes=aligned(numel * itemsize),
            state_bytes=num_states * aligned(4 * numel),
            has_master=itemsize == 2 and num_states > 2,
            is_elementwise=is_elementwise,
        )
        for index, (numel, is_elementwise, itemsize, num_states) in enumerate(shapes)
    ]
    plan = plan_states(costs, update=update, apart=apart)

    usual = PIECE_BYTES if update == "device" or apart else 2 * PIECE_BYTES
    whole = sum(cost.state_bytes for cost in costs)
    most = max(PIECE_BYTES, min(max(usual, whole // 128), 168 * 2**20, whole // 16))
    for piece in plan.pieces:
        cost = costs[piece.parameters[0]]
        is_large = cost.state_bytes > most
        assert bool(piece.windows) == (is_large and cost.is_elementwise)
        if piece.windows:
            assert piece.parameters == piece.windows[0].parameters
            for name in ("numel", "parameter_bytes", "gradient_bytes", "sent_bytes", "state_bytes"):
                assert sum(getattr(window, name) for window in piece.windows) == getattr(piece, name)
            assert all(window.numel % WINDOW_NUMEL == 0 for window in piece.windows[:-1])
            assert all(0 < window.state_bytes <= most + 16 * WINDOW_NUMEL for window in piece.windows)
        for part in () if piece.is_resident else piece.parts:
            assert part.update is piece.update
            needed = part.state_bytes if part.update is Update.DEVICE else part.parameter_bytes + part.gradient_bytes
            assert plan.slot_bytes[part.slot] >= needed
    if all(cost.is_elementwise and cost.state_bytes for cost in costs):  # one without states is whole, also where it is undone
        assert plan.room_bytes + plan.undo_bytes <= 2**30


def test_the_room_for_a_large_embedding() -> None:
    """Of 3.2e9 parameters, bfloat16 with float32 copies."""
    sizes = [128256 * 3072, *[3072 * 3072, 8192 * 3072] * 60, 128256 * 3072]
    plan = plan_states([_cost(i, n, 2 * n, 12 * n, has_master=True, is_elementwise=True) for i, n in enumerate(sizes)])

    assert "Of 62 large parameters parts move by themselves" in plan.explain()
    assert len([part for piece in plan.pieces for part in piece.parts]) < 250
    assert plan.room_bytes + plan.undo_bytes < 700 * 2**20


def test_what_stays_is_evenly_spread() -> None:
    for share in (0.25, 0.5, 0.75):
        plan = plan_states([_cost(i, 2**20, 2**22, 2**26) for i in range(40)], device_budget_bytes=int(share * 40 * 2**26))
        stays = [piece.is_resident for piece in plan.pieces]
        assert sum(stays) == share * 40
        assert all(abs(sum(stays[:count]) - share * count) <= 1 for count in range(1, 41))


def _host_bytes_of(plan: StatePlan) -> int:
    """Return the host memory that a plan takes."""
    in_host = [piece.state_bytes for piece in plan.pieces if not piece.is_resident and not piece.is_on_disk]
    return held_bytes(in_host) + sum(held_bytes([num_bytes]) for num_bytes in plan.ring_bytes)


@given(SIZES, st.one_of(st.none(), st.integers(0, 60 * MIB)), st.booleans())
def test_all_is_somewhere_and_the_budget_is_kept(sizes: list[int], budget: int | None, is_elementwise: bool) -> None:
    costs = _costs(sizes, is_elementwise=is_elementwise)
    whole = plan_states(costs, has_disk=True)
    buffers_bytes = sum(held_bytes([num_bytes]) for num_bytes in whole.ring_bytes)
    if budget is not None and budget < min(buffers_bytes, _host_bytes_of(plan_states(costs))):
        with pytest.raises(HostMemoryError, match="needs a host_budget of at least"):
            plan_states(costs, has_disk=True, host_budget_bytes=budget)
        return
    plan = plan_states(costs, has_disk=True, host_budget_bytes=budget)

    assert plan.host_bytes + plan.disk_bytes == sum(cost.state_bytes for cost in costs)
    if budget is None:
        assert plan.host_bytes == 0
    else:
        assert _host_bytes_of(plan) <= budget
    parts = [part for piece in plan.pieces if piece.is_on_disk for part in piece.parts]
    assert all(part.is_on_disk and part.state_bytes <= size for part in parts for size in plan.ring_bytes)
    assert len(plan.ring_bytes) == min(NUM_BUFFERS, len(parts))


@pytest.mark.parametrize("of_device", [False, True])
@given(SIZES, st.integers(0, 60 * MIB), st.integers(0, 60 * MIB))
def test_more_budget_never_leaves_more_elsewhere(of_device: bool, sizes: list[int], one: int, other: int) -> None:
    found = []
    for budget in sorted((one, other)):
        options: dict[str, Any] = {"device_budget_bytes" if of_device else "host_budget_bytes": budget}
        try:
            plan = plan_states(_costs(sizes), has_disk=not of_device, **options)
            found.append(plan.host_bytes if of_device else plan.disk_bytes)
        except (BudgetInfeasible, HostMemoryError):
            found.append(sum(sizes) * 1024)

    assert found[1] <= found[0]


def test_windows_of_a_large_parameter_pass_one_by_one() -> None:
    costs = [_cost(0, 2**26, 2**27, 2**29, is_elementwise=is_elementwise) for is_elementwise in (True, False)]

    windows, whole = (plan_states([cost], has_disk=True).ring_bytes for cost in costs)

    assert windows == (64 * MIB,) * NUM_BUFFERS
    assert whole == (512 * MIB,)


@given(st.lists(st.integers(1, 2 * BLOCK_BYTES), max_size=20))
def test_blocks_have_all_sizes_in_order(sizes: list[int]) -> None:
    blocks = side_by_side(sizes)

    assert [size for block in blocks for size in block] == sizes
    assert all(sum(block) <= BLOCK_BYTES or len(block) == 1 for block in blocks)
    assert sum(sizes) <= held_bytes(sizes) <= sum(sizes) + HOST_PAGE_BYTES * len(blocks)


def test_what_is_explained() -> None:
    text = plan_states(_costs([1024] * 16), has_disk=True, host_budget_bytes=12 * MIB).explain()

    assert text.splitlines()[0] == (
        "16.00 MiB of states in 16 pieces: 4.00 MiB in host memory, 12.00 MiB on the disk, 0 bytes stay on the device."
    )
    assert "It reads 12.00 MiB from the disk and writes as many: 1,000 steps write 0.0126 TB." in text
    assert "pass through 4 buffers in host memory, 4.00 MiB in all" in text
    with pytest.raises(HostMemoryError, match=r"at least 8\.00 MiB, for the buffers .*; found 1\.00 MiB"):
        plan_states(_costs([1024] * 16), has_disk=True, host_budget_bytes=MIB)


@given(SIZES, st.integers(0, 10**7))
def test_what_stays_comes_evenly_between_what_moves(sizes: list[int], budget: int) -> None:
    costs = _costs(sizes)
    pieces = plan_states(costs, device_budget_bytes=max(budget, 1024 * max(sizes))).pieces
    order = interleaved(pieces)
    moving, staying = ([n for n, piece in enumerate(pieces) if piece.is_resident is stays] for stays in (False, True))

    assert [n for n in order if n in set(moving)] == moving
    assert [n for n in order if n in set(staying)] == staying
    if not moving or not staying:
        return
    moving_numel, staying_numel = (sum(pieces[n].numel for n in those) for those in (moving, staying))
    done = {False: 0, True: 0}
    for n in order:
        if not pieces[n].is_resident:  # what stays is ahead of its share, or behind it, by no more than half a piece
            before = max((pieces[m].numel for m in staying), default=0)
            assert abs(done[True] * moving_numel - done[False] * staying_numel) <= before * moving_numel / 2
        done[pieces[n].is_resident] += pieces[n].numel


def test_what_is_stepped_in_windows_is_the_last_to_stay() -> None:
    """It is stepped at once where it stays. Who waits for parameters in their order takes it as readily as others."""
    costs = [_cost(i, n, 4 * n, 8 * n, is_elementwise=True) for i, n in enumerate([2**26, *[2**22] * 48])]
    for budget, stays_large, runs_ahead in ((2, False, False), (2, True, True), (4, True, False)):
        plan = plan_states(costs, device_budget_bytes=budget * 2**29, runs_ahead=runs_ahead)

        assert plan.pieces[0].windows
        assert plan.pieces[0].is_resident is stays_large
        assert plan.resident_bytes >= budget * 2**29 * 0.98


@settings(max_examples=15)
@given(sizes=st.lists(st.integers(1, 20_000), min_size=1, max_size=8), num_at_once=st.integers(1, 4))
def test_planned_room_is_enough_and_no_page_too_much(sizes: list[int], num_at_once: int) -> None:
    """So many chunks are written at once in every step, the largest ones among them."""
    room = disk_bytes(sizes, num_written_at_once=num_at_once)
    arena = Arena(ReferenceDevice())
    store = ReferenceDisk().open(room, ReferenceDevice())
    copies = [store.add(str(number), size) for number, size in enumerate(sorted(sizes, reverse=True))]
    for _ in range(3):
        for first in range(0, len(copies), num_at_once):
            group = copies[first : first + num_at_once]
            for copy in group:
                store.write(copy, arena.take(copy.num_bytes))
            for copy in group:
                store.wait(copy)

    assert store.in_use_bytes == room - min(num_at_once, len(sizes)) * -(-max(sizes) // 4096) * 4096
    store.close()
    arena.give_all()
    arena.close()


def test_terabytes_of_a_training() -> None:
    states = 12 * 6_740_000_000

    assert terabytes_written(states) == pytest.approx(80.88)
    assert terabytes_written(states, num_steps=10_000) == pytest.approx(808.8)
    assert terabytes_written(states, kept_bytes=states // 4) == pytest.approx(60.66)
    assert terabytes_written(100, kept_bytes=200) == terabytes_written(0) == terabytes_written(states, num_steps=0) == 0.0


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: disk_bytes([1], num_written_at_once=0), ValueError, "num_written_at_once must be 1 or more; found 0"),
        (lambda: disk_bytes([-1]), ValueError, "chunk_bytes is a number of bytes, 0 or more; found -1"),
        (lambda: terabytes_written(1, num_steps=-1), ValueError, "num_steps must be 0 or more; found -1"),
        (lambda: terabytes_written(1.5), TypeError, "disk_bytes is a number of bytes"),  # type: ignore[arg-type]
        (lambda: disk_step_s(1, read_bytes_per_s=0, write_bytes_per_s=1), ValueError, "read_bytes_per_s must be above 0"),
        (lambda: disk_step_s(1, read_bytes_per_s=1, write_bytes_per_s=math.nan), ValueError, "write_bytes_per_s must be above"),
    ],
)
def test_bad_input(call: Callable[[], object], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        call()
