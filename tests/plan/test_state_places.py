"""Which states lie on a disk: as many stay in host memory as the budget has room for, buffers included."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memkit.errors import HostMemoryError
from memkit.plan import ParameterCosts, StatePlan, plan_states
from memkit.plan.states import BLOCK_BYTES, HOST_PAGE_BYTES, NUM_BUFFERS, held_bytes, interleaved, side_by_side

MIB = 2**20
SIZES = st.lists(st.integers(0, 3000), min_size=1, max_size=40)


def _costs(sizes: list[int], *, is_elementwise: bool = False) -> list[ParameterCosts]:
    return [
        ParameterCosts(
            name=str(index),
            numel=size * 128,
            parameter_bytes=size * 512,
            state_bytes=size * 1024,
            is_elementwise=is_elementwise,
        )
        for index, size in enumerate(sizes)
    ]


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


@given(SIZES, st.integers(0, 60 * MIB), st.integers(0, 60 * MIB))
def test_more_host_memory_never_leaves_more_on_the_disk(sizes: list[int], one: int, other: int) -> None:
    found = []
    for budget in sorted((one, other)):
        try:
            found.append(plan_states(_costs(sizes), has_disk=True, host_budget_bytes=budget).disk_bytes)
        except HostMemoryError:
            found.append(sum(sizes) * 1024)

    assert found[1] <= found[0]


def test_what_stays_on_the_device_is_on_no_disk() -> None:
    plan = plan_states(_costs([100] * 20), has_disk=True, device_budget_bytes=10 * 100 * 1024)

    assert plan.resident_bytes == 10 * 100 * 1024
    assert plan.disk_bytes == 10 * 100 * 1024
    assert not any(piece.is_resident and piece.is_on_disk for piece in plan.pieces)


def test_windows_of_a_large_parameter_pass_one_by_one() -> None:
    costs = [
        ParameterCosts(name="0", numel=2**26, parameter_bytes=2**27, state_bytes=2**29, is_elementwise=is_elementwise)
        for is_elementwise in (True, False)
    ]

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


def test_a_budget_without_room_for_the_buffers() -> None:
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
    sizes = [2**26, *[2**22] * 48]
    costs = [
        ParameterCosts(name=str(i), numel=n, parameter_bytes=4 * n, state_bytes=8 * n, is_elementwise=True)
        for i, n in enumerate(sizes)
    ]
    for budget, stays_large, runs_ahead in ((2, False, False), (2, True, True), (4, True, False)):
        plan = plan_states(costs, device_budget_bytes=budget * 2**29, runs_ahead=runs_ahead)

        assert plan.pieces[0].windows
        assert plan.pieces[0].is_resident is stays_large
        assert plan.resident_bytes >= budget * 2**29 * 0.98
