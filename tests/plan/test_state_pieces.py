"""Which states make a piece, which stay, and where they are stepped: from numbers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memkit.errors import BudgetInfeasible
from memkit.plan import WINDOW_NUMEL, ParameterCosts, Update, aligned, plan_states
from memkit.plan.states import PIECE_BYTES


def _costs(sizes: list[int]) -> list[ParameterCosts]:
    return [
        ParameterCosts(name=str(index), numel=size * 128, parameter_bytes=size * 512, state_bytes=size * 1024)
        for index, size in enumerate(sizes)
    ]


SIZES = st.lists(st.integers(0, 5000), min_size=1, max_size=40)


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


@given(SIZES, st.integers(1, 10**7))
def test_more_budget_never_leaves_more_on_the_host(sizes: list[int], budget: int) -> None:
    costs = _costs(sizes)
    found = []
    for bytes_ in (0, budget * 1024, 2 * budget * 1024):
        try:
            found.append(plan_states(costs, device_budget_bytes=bytes_).host_bytes)
        except BudgetInfeasible:
            found.append(found[-1])

    assert found[0] >= found[1]
    assert found[0] >= found[2]


def test_room_is_for_three_pieces_beside_a_large_parameter() -> None:
    million = 2**20
    costs = [
        ParameterCosts(name="embedding", numel=98 * million, parameter_bytes=196 * million, state_bytes=1176 * million),
        *(
            ParameterCosts(name=f"{i}", numel=5 * million, parameter_bytes=10 * million, state_bytes=60 * million)
            for i in range(40)
        ),
    ]
    plan = plan_states(costs)

    assert plan.slot_bytes == (1176 * million, *[60 * million] * 3)
    assert all(piece.state_bytes <= PIECE_BYTES for piece in plan.pieces[1:])


def _copied(num_pieces: int, *, numel: int = 100, has_master: bool = True) -> list[ParameterCosts]:
    """Return parameters of two bytes with twelve of states, each a piece."""
    sizes = {"numel": numel, "parameter_bytes": 2 * numel, "state_bytes": 12 * numel, "has_master": has_master}
    return [ParameterCosts(name=str(number), **sizes) for number in range(num_pieces)]


@pytest.mark.parametrize(("has_master", "runs_ahead", "sent"), [(True, False, 4), (True, True, 6), (False, False, 4)])
def test_what_goes_to_the_host(has_master: bool, runs_ahead: bool, sent: int) -> None:
    costs = _copied(4, numel=2**20, has_master=has_master)
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


def test_explains_itself() -> None:
    text = plan_states(_costs([100] * 4), device_budget_bytes=2**17).explain()

    assert "400.00 KiB of states in 4 pieces: 300.00 KiB in host memory, 100.00 KiB stay on the device." in text


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

    for piece in plan.pieces:
        cost = costs[piece.parameters[0]]
        most = max(PIECE_BYTES, min(sum(cost.state_bytes for cost in costs) // 128, 224 * 2**20))
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
    if all(cost.is_elementwise for cost in costs):
        assert plan.room_bytes + plan.undo_bytes <= 2**30


def test_the_room_for_a_large_embedding() -> None:
    """Of 3.2e9 parameters, bfloat16 with float32 copies."""
    sizes = [128256 * 3072, *[3072 * 3072, 8192 * 3072] * 60, 128256 * 3072]
    costs = [
        ParameterCosts(name=str(i), numel=n, parameter_bytes=2 * n, state_bytes=12 * n, has_master=True, is_elementwise=True)
        for i, n in enumerate(sizes)
    ]
    plan = plan_states(costs)

    assert "Of 62 large parameters parts move by themselves" in plan.explain()
    assert len([part for piece in plan.pieces for part in piece.parts]) < 250
    assert plan.room_bytes + plan.undo_bytes < 700 * 2**20


def test_what_stays_is_evenly_spread() -> None:
    costs = [ParameterCosts(name=str(i), numel=2**20, parameter_bytes=2**22, state_bytes=2**26) for i in range(40)]
    for share in (0.25, 0.5, 0.75):
        plan = plan_states(costs, device_budget_bytes=int(share * 40 * 2**26))
        stays = [piece.is_resident for piece in plan.pieces]
        assert sum(stays) == share * 40
        assert all(abs(sum(stays[:count]) - share * count) <= 1 for count in range(1, 41))
