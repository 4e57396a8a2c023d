"""Which calls are regions, against all choices that there are."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import pytest

from memkit.plan import GrowingLineage, HostCosts, ModuleCall, RegionChoice, RegionPlanner, Step
from memkit.plan import regions as planning

ON_HOST = HostCosts(op_s=1.0, recorded_s=1.0, saved_s=1.0, replayed_s=2.0, region_s=3.0)
ON_DEVICE = HostCosts(op_s=0.0, recorded_s=0.0, saved_s=0.0, replayed_s=0.0, region_s=0.0)


class Build:
    """A step, as it is recorded: ops in a row, each saving some values, within calls."""

    def __init__(self) -> None:
        self.lineage, self.saves, self.calls = GrowingLineage(), [], []
        self._open: list[dict[str, object]] = []

    def root(self, num_bytes: int) -> int:
        return self.lineage.add_root(num_bytes)

    def op(self, ins: Sequence[int], num_bytes: int, *, seconds: float = 1.0, saves: Sequence[int] = (), own: bool) -> int:
        self.saves += saves
        (made,) = self.lineage.add_op(ins, [num_bytes], seconds)
        self.saves += [made] * own
        return made

    def begin(self, name: str, inputs: Sequence[int]) -> None:
        parent = self._open[-1]["index"] if self._open else -1
        call = {"name": name, "parent": parent, "index": len(self.calls), "inputs": tuple(inputs)}
        call |= {"save": len(self.saves), "op": len(self.lineage.ins)}
        self.calls.append(call)
        self._open.append(call)

    def end(self, why_not: str = "") -> None:
        call = self._open.pop()
        ops = (call["op"], len(self.lineage.ins))
        self.calls[call["index"]] = ModuleCall(
            name=call["name"],
            number=0,
            parent=call["parent"],
            saves=(call["save"], len(self.saves)),
            ops=ops,
            num_ops=ops[1] - ops[0],
            inputs=call["inputs"],
            why_not=why_not,
        )

    def planner(self, costs: HostCosts) -> RegionPlanner:
        step = Step(lineage=self.lineage, saves=tuple(self.saves), uses=tuple(reversed(self.saves)))
        return RegionPlanner(step, self.calls, costs, num_ops=len(self.lineage.ins))


def random_tree(seed: int) -> Build:
    """Return a chain of up to three blocks with calls in them, of random sizes."""
    draw, build = random.Random(seed), Build()
    x = build.root(0)
    for block in range(draw.randint(1, 3)):
        build.begin(f"{block}", [x])
        entry = x
        for part in range(draw.randint(1, 3)):
            inside = draw.random() < 0.7
            if inside:
                build.begin(f"{block}.{part}", [x])
            for _ in range(draw.randint(1, 3)):
                x = build.op(
                    [x], draw.randint(1, 9), seconds=draw.random(), saves=[x] * (draw.random() < 0.7), own=draw.random() < 0.4
                )
            if inside:
                build.end("it writes" if draw.random() < 0.15 else "")
        x = build.op([x, entry], draw.randint(1, 9), saves=[], own=False)
        build.end()
    return build


def layers(count: int, *, parts: int = 2, ops: int = 3, uneven: bool = False) -> Build:
    """Return a row of layers with parts in them."""
    draw, build = random.Random(0), Build()
    x = build.root(0)
    build.begin("model", [x])
    for layer in range(count):
        scale = draw.randint(1, 4) if uneven else 1
        build.begin(f"layers.{layer}", [x])
        for part in range(parts):
            build.begin(f"layers.{layer}.part{part}", [x])
            for _ in range(ops):
                x = build.op([x], 10 * scale, seconds=scale, saves=[x], own=False)
            build.end()
        build.end()
    build.end()
    return build


def brute_force(planner: RegionPlanner) -> list[RegionChoice]:
    """Return all choices of calls that may be regions and of which none is in another."""
    calls, found = planner.calls, []
    free = [index for index, call in enumerate(calls) if not call.why_not]

    def is_in(index: int, other: int) -> bool:
        while index >= 0 and index != other:
            index = calls[index].parent
        return index == other

    for size in range(len(free) + 1):
        for chosen in combinations(free, size):
            if not any(is_in(one, other) or is_in(other, one) for one, other in combinations(chosen, 2)):
                found.append(planner.simulate(chosen))
    return found


def evenly_spaced(planner: RegionPlanner, prefix: str) -> list[RegionChoice]:
    """Return what it takes to make some layers regions, from none of them to all."""
    group = [index for index, call in enumerate(planner.calls) if call.name.startswith(prefix) and call.name.count(".") == 1]
    size = len(group)
    return [planner.simulate([group[place * size // count] for place in range(count)]) for count in range(1, size + 1)]


@pytest.mark.parametrize("costs", [ON_HOST, ON_DEVICE])
@pytest.mark.parametrize("seed", range(40))
def test_few_calls_are_chosen_as_well_as_can_be(seed: int, costs: HostCosts) -> None:
    planner = random_tree(seed).planner(costs)
    everything = brute_force(random_tree(seed).planner(costs))

    for budget in range(0, planner.simulate(()).peak_bytes + 1, 3):
        fitting = [planner.seconds(choice) for choice in everything if choice.peak_bytes <= budget]
        found = planner.best(budget)
        assert (found is None) == (not fitting)
        if found is not None:
            assert found.peak_bytes <= budget
            assert planner.seconds(found) == pytest.approx(min(fitting))


@pytest.mark.parametrize("costs", [ON_HOST, ON_DEVICE])
@pytest.mark.parametrize("seed", range(12))
def test_search_is_nearly_as_good_where_it_may_not_look_at_everything(
    seed: int, costs: HostCosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "_MOST_LISTED", -1)
    planner = random_tree(seed).planner(costs)
    everything = brute_force(random_tree(seed).planner(costs))

    for budget in range(min(choice.peak_bytes for choice in everything), planner.simulate(()).peak_bytes + 1, 3):
        quickest_s = min(planner.seconds(choice) for choice in everything if choice.peak_bytes <= budget)
        found = planner.best(budget)
        assert found is not None
        assert planner.seconds(found) <= 1.06 * quickest_s


def test_peak_of_a_region_is_what_it_makes_on_top_of_what_was_held_before() -> None:
    planner = layers(4, parts=1).planner(ON_HOST)
    blocks = [index for index, call in enumerate(planner.calls) if call.name.count(".") == 1]

    assert planner.simulate(()).peak_bytes == 11 * 10  # the first save is of the root, which takes nothing
    assert planner.simulate(blocks).peak_bytes == (3 + 3) * 10  # the inputs of three, and all of the last
    assert planner.simulate(blocks[:1]).peak_bytes == 9 * 10
    assert planner.dropped(planner.simulate(blocks[:1])) == {1, 2}


def test_what_only_a_region_reads_is_held_by_it() -> None:
    build = Build()
    x = build.root(0)
    y = build.op([x], 5, own=False)  # which nobody saves
    build.begin("0", [y])
    z = build.op([y], 7, own=True)
    z = build.op([z], 7, own=True)
    build.end()
    build.op([z], 1, own=False)
    planner = build.planner(ON_HOST)

    assert planner.simulate((0,)).peak_bytes == 5 + 14
    assert planner.best(14) == planner.simulate(())


@pytest.mark.parametrize("costs", [ON_HOST, ON_DEVICE])
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("count", [5, 12, pytest.param(24, marks=pytest.mark.full)])
def test_never_slower_than_evenly_spaced_layers(count: int, uneven: bool, costs: HostCosts) -> None:
    planner = layers(count, uneven=uneven).planner(costs)
    for choice in evenly_spaced(planner, "layers"):
        found = planner.best(choice.peak_bytes)
        assert found is not None
        assert planner.seconds(found) <= planner.seconds(choice)


@pytest.mark.covering(2)
@pytest.mark.parametrize("count", [8, pytest.param(24, marks=pytest.mark.full)])
@pytest.mark.parametrize("costs", [ON_HOST, pytest.param(ON_DEVICE, marks=pytest.mark.full)])
@pytest.mark.parametrize("uneven", [False, pytest.param(True, marks=pytest.mark.full)])
def test_more_budget_never_takes_longer(uneven: bool, costs: HostCosts, count: int) -> None:
    whole = layers(count, uneven=uneven).planner(costs)
    budgets = range(whole.least().peak_bytes, whole.simulate(()).peak_bytes + 1, 5 * count + 1)  # about as many for any count
    seconds_s = []
    for budget in budgets:
        planner = layers(count, uneven=uneven).planner(costs)  # a new one for each: what was asked before plays no part
        found = planner.best(budget)
        assert found is not None
        seconds_s.append(planner.seconds(found))

    assert seconds_s == sorted(seconds_s, reverse=True)
    assert whole.best(whole.simulate(()).peak_bytes) == whole.simulate(())


def test_what_may_be_no_region_is_none() -> None:
    build = Build()
    x = build.root(0)
    for block in range(12):
        build.begin(f"{block}", [x])
        for _ in range(3):
            x = build.op([x], 10, own=True)
        build.end("it prints" if block % 2 else "")
    planner = build.planner(ON_HOST)

    assert all(index % 2 == 0 for index in planner.least().chosen)


@pytest.mark.full
def test_thousands_of_calls_take_seconds() -> None:
    build = layers(2000, parts=4, ops=2)
    start_s = time.process_time()
    planner = build.planner(ON_HOST)
    found = planner.best(planner.simulate(()).peak_bytes // 2)

    assert found is not None
    assert time.process_time() - start_s < 30


def compiled_blocks(*seconds: float) -> list[ModuleCall]:
    """Return the calls of a model of blocks that run compiled, each for so long, of which the second is in another module."""
    whole = ModuleCall(name="model", number=0, parent=-1, saves=(0, 6), ops=(0, 0), num_ops=3, inputs=(), why_not="it writes")
    calls, parent = [whole], 0
    for block, device_s in enumerate(seconds):
        if block == 1:
            parent = len(calls)
            calls.append(replace(whole, name="outer", parent=0, saves=(2, 4), num_ops=1, inputs=(2,), why_not=""))
        calls.append(
            ModuleCall(
                name=str(block),
                number=0,
                parent=parent,
                saves=(2 * block, 2 * block + 2),
                ops=(0, 0),
                num_ops=1,
                inputs=(2 * block,),
                device_s=device_s,
            )
        )
        parent = 0
    return calls


def planner_of_compiled(*seconds: float) -> RegionPlanner:
    lineage = GrowingLineage()
    saves = [lineage.add_root(num_bytes) for _ in seconds for num_bytes in (1, 10)]
    step = Step(lineage=lineage, saves=tuple(saves), uses=tuple(reversed(saves)), retained_bytes=dict.fromkeys(saves, 1))
    return RegionPlanner(step, compiled_blocks(*seconds), ON_DEVICE, num_ops=3)


def test_compiled_calls_count_where_they_are_run_again_and_once_in_the_step() -> None:
    planner = planner_of_compiled(1.0, 2.0, 4.0)

    assert planner.plain_device_s == 3 * 7
    assert [planner.simulate([index]).device_s for index in range(5)] == [7, 1, 2, 2, 4]


@pytest.mark.parametrize(
    ("seconds", "cheapest"), [((1.0, 2.0, 4.0), {"0"}), ((4.0, 2.0, 1.0), {"1", "outer"}), ((4.0, 1.0, 2.0), {"1", "outer"})]
)
def test_cheapest_compiled_call_is_run_again(seconds: tuple[float, ...], cheapest: set[str]) -> None:
    planner = planner_of_compiled(*seconds)
    choice = planner.best(33)
    assert choice is not None
    assert choice.chosen == ()
    choice = planner.best(32)  # to run the last one again would take as much

    assert choice is not None
    assert {planner.calls[index].name for index in choice.chosen} <= cheapest
    assert len(choice.chosen) == 1


def test_compiled_call_behind_the_last_save_of_a_region_is_not_run_again() -> None:
    calls = compiled_blocks(1.0, 2.0)
    calls = [calls[0], replace(calls[1], saves=(0, 2)), calls[2], replace(calls[3], parent=1, saves=(2, 2))]
    lineage = GrowingLineage()
    saves = [lineage.add_root(10) for _ in range(4)]
    step = Step(lineage=lineage, saves=tuple(saves), uses=tuple(reversed(saves)))

    assert RegionPlanner(step, calls, ON_DEVICE, num_ops=3).simulate([1]).device_s == 1
