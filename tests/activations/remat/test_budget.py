"""The budget is kept to, in the ledger and in fact: live bytes are counted bytes, and fall with the budget."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import memkit
from memkit.activations.offloading.window import OffloadWindow
from memkit.activations.recomputing.recording_stage import RecordingStage
from memkit.activations.saved.records import Handle
from memkit.device import CpuDevice, Device
from tests.activations.cases import assert_same_bits, inputs_on
from tests.activations.chains import UNIT_BYTES, Context, chain, leaf_on, step
from tests.activations.remat.conftest import NO_PLAN_FITS, Remat

UNITS = (3, 1, 2, 5, 1, 1, 4, 2, 1, 1, 3, 1)


class LargestResult(TorchDispatchMode):
    """Finds the most bytes that one op makes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: object, types: object, args: Sequence[object] = (), kwargs: object = None) -> object:
        results = func(*args, **(kwargs or {}))
        made = results if isinstance(results, tuple | list) else [results]
        self.num_bytes = max(self.num_bytes, sum(tensor.nbytes for tensor in made if isinstance(tensor, Tensor)))
        return results


def _network() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(inplace=True), nn.Linear(64, 32)) for _ in range(6)]
    return nn.Sequential(*blocks, nn.Dropout(0.2), nn.Linear(32, 32))


def _step(model: nn.Module, x: Tensor, context: AbstractContextManager[object]) -> None:
    torch.manual_seed(1)
    with context:
        loss = model(x).square().sum()
    loss.backward()


@pytest.mark.parametrize("policy", ["plan", "dtr"])
def test_ledger_keeps_to_the_budget(policy: str, device: Device, remat_on: Remat) -> None:
    model, x = _network().to(device.torch_device), torch.randn(16, 32, device=device.torch_device)
    with LargestResult() as largest:
        _step(model, x, nullcontext())
    _step(model, x, remat_on(1.0, "all"))
    saved_bytes = memkit.stats("all").saved_bytes

    peaks = []
    for share in (1, 0.8, 0.6, 0.5, 0.4, 0.3):
        budget_bytes = int(share * saved_bytes)
        for _ in range(4):
            _step(model, x, remat_on(budget_bytes, f"share {share}", policy=policy))
            stats = memkit.stats(f"share {share}")
            assert stats.ledger_peak_bytes <= budget_bytes + largest.num_bytes
            assert stats.budget_bytes == budget_bytes
            assert stats.live_bytes == 0
        assert stats.follows_plan == (policy == "plan")
        peaks.append(stats.ledger_peak_bytes)
    assert peaks[0] <= saved_bytes
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < 0.45 * peaks[0]


def test_plan_keeps_to_the_budget_with_nothing_over(device: Device, remat_on: Remat) -> None:
    """Replay temporaries are planned for."""
    x = leaf_on(device.torch_device)
    for budget_units in (25, 22, 20, 18):
        for _ in range(3):
            step(x, UNITS, lambda: remat_on(budget_units * UNIT_BYTES, "exact"))  # noqa: B023
        assert memkit.stats("exact").follows_plan
        assert memkit.stats("exact").ledger_peak_bytes <= budget_units * UNIT_BYTES
        memkit.reset("exact")


def _counted(run: Callable[[Context], None], make: Context, tag: str) -> list[tuple[int, int]]:
    """Return the live bytes by the ledger and in fact, at each request of a backward."""
    found: list[tuple[int, int]] = []
    unpack = OffloadWindow.unpack

    def watched(window: OffloadWindow, handle: Handle) -> Tensor:
        tensor = unpack(window, handle)
        if window.tag == tag:
            window.settle()
            ledger = window.ledger
            live = {}
            for record in records():
                for storage in (record.original(), ledger.fetched_copy(record)):
                    if storage is not None:
                        live[storage._cdata] = storage.nbytes()
            found.append((ledger.live_bytes, sum(live.values())))
        return tensor

    def records() -> list[object]:
        held = [handle.record for run in runs for handle in run._anchors._handles.values()]
        return [*held, *(record for run in runs for record in run.records())]

    runs: list[object] = []
    open_run = RecordingStage._open_forward

    def opened(entry: RecordingStage) -> object:
        runs.append(open_run(entry))
        return runs[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OffloadWindow, "unpack", watched)
        patch.setattr(RecordingStage, "_open_forward", opened)
        run(make)
    return found


@pytest.mark.parametrize("policy", ["plan", "dtr"])
@pytest.mark.parametrize("budget_units", [25, 12, 8])
@pytest.mark.filterwarnings(NO_PLAN_FITS)
def test_ledger_counts_what_is_live(budget_units: int, policy: str, device: Device, remat_on: Remat) -> None:
    x = leaf_on(device.torch_device)
    for _ in range(3):
        counted = _counted(
            lambda make: step(x, UNITS, make) and None,
            lambda: remat_on(budget_units * UNIT_BYTES, "live", policy=policy),
            "live",
        )

        assert len(counted) == len(UNITS)
        assert [ledger for ledger, _ in counted] == [live for _, live in counted]


def test_bytes_leave_the_device() -> None:
    """Storages are counted by weak reference, not by the reference device's counter, which only counts for copies."""
    import gc
    import weakref

    gc.collect()
    storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: object, types: object, args: object = (), kwargs: object = None) -> object:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                storage = result.untyped_storage()
                storages[storage._cdata] = weakref.ref(storage)
            return result

    def live_bytes(context: AbstractContextManager[object]) -> int:
        storages.clear()
        with Watch(), context:
            y = chain(leaf_on(torch.device("cpu")), UNITS)
        live = {id(found): found.nbytes() for reference in storages.values() if (found := reference()) is not None}
        del y
        return sum(live.values())

    plain = live_bytes(nullcontext())
    for _ in range(3):
        held = live_bytes(memkit.Rematerialize(18 * UNIT_BYTES, "leave", min_bytes=0, device=CpuDevice()))
        assert held <= plain - (sum(UNITS) - 18) * UNIT_BYTES


@pytest.mark.filterwarnings(NO_PLAN_FITS)
@pytest.mark.parametrize("max_replays", [1, 2, 5])
def test_replays_are_capped(max_replays: int, device: Device, remat_on: Remat) -> None:
    """A long chain whose end is asked for, with next to no room."""
    x, score = leaf_on(device.torch_device), memkit.plan.DTRScore(max_replays=max_replays)
    plain = step(leaf_on(device.torch_device), [1] * 24)
    for _ in range(2):
        assert_same_bits(step(x, [1] * 24, lambda: remat_on(2 * UNIT_BYTES, "cap", policy="dtr", score=score)), plain)
        stats = memkit.stats("cap")
        assert 0 < stats.num_replayed_ops <= 4 * 24 * (max_replays + 1)
        assert stats.num_replays <= 24


@pytest.mark.slow
def test_budget_that_cannot_be_kept_to_raises_or_warns_once(device: Device, remat_on: Remat) -> None:
    x = leaf_on(device.torch_device)
    step(x, UNITS, lambda: remat_on("1B", "least", strict=True))  # the first step is held to it as it goes
    with pytest.raises(memkit.errors.BudgetInfeasible, match=r"cannot be kept to: the smallest is \d+\.\d\d KiB") as caught:
        step(x, UNITS, lambda: remat_on("1B", "least", strict=True))
    smallest = caught.value.smallest_bytes
    with pytest.warns(UserWarning, match=r'Rematerialize \(tag "least"\): .* the smallest is .* as little as can be'):
        step(x, UNITS, lambda: remat_on("1B", "least"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(x, UNITS, lambda: remat_on("1B", "least"))
    assert memkit.stats("least").ledger_peak_bytes <= smallest
    with pytest.warns(UserWarning, match="a budget of 2 bytes cannot be kept to"):
        step(x, UNITS, lambda: remat_on("2B", "least"))

    step(x, UNITS, lambda: remat_on(smallest, "least", strict=True))
    assert memkit.stats("least").ledger_peak_bytes <= smallest


# Without a plan


def test_score_that_cannot_keep_to_the_budget_warns_once(device: Device, remat_on: Remat) -> None:
    x = leaf_on(device.torch_device)
    step(x, UNITS, lambda: remat_on("1B", "score", policy="dtr"))

    with pytest.warns(UserWarning, match=r'"score"\): a budget of 1 byte was exceeded: the last step took \d+\.\d\d KiB'):
        step(x, UNITS, lambda: remat_on("1B", "score", policy="dtr"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(x, UNITS, lambda: remat_on("1B", "score", policy="dtr"))


def test_tag_is_usable_after_the_score_has_raised(device: Device, remat_on: Remat) -> None:
    x, plain = leaf_on(device.torch_device), step(leaf_on(device.torch_device), UNITS)
    step(x, UNITS, lambda: remat_on("1B", "score", policy="dtr", strict=True))
    peak_bytes = memkit.stats("score").ledger_peak_bytes
    with pytest.raises(memkit.errors.BudgetInfeasible, match="the last step took") as caught:
        step(x, UNITS, lambda: remat_on("1B", "score", policy="dtr", strict=True))
    assert caught.value.smallest_bytes == peak_bytes

    for budget in ("1B", "1GiB", "1GiB"):  # each step is complained about once, and by its own budget
        assert_same_bits(step(x, UNITS, lambda: remat_on(budget, "score", policy="dtr", strict=True)), plain)  # noqa: B023


def test_score_that_exceeds_the_budget_by_one_op_is_fine(device: Device, remat_on: Remat) -> None:
    x = leaf_on(device.torch_device)
    for _ in range(3):
        step(x, UNITS, lambda: remat_on(14 * UNIT_BYTES, "one op", policy="dtr", strict=True))


def test_forward_that_left_its_plan_and_exceeded_the_budget_is_told(device: Device, remat_on: Remat) -> None:
    x = leaf_on(device.torch_device)
    for _ in range(3):
        step(x, [1] * 4, lambda: remat_on(4 * UNIT_BYTES, "left", strict=True))
    step(x, UNITS, lambda: remat_on(4 * UNIT_BYTES, "left", strict=True))

    with pytest.raises(memkit.errors.BudgetInfeasible, match="the last step took"):
        step(x, [1] * 4, lambda: remat_on(4 * UNIT_BYTES, "left", strict=True))
    step(x, [1] * 4, lambda: remat_on(4 * UNIT_BYTES, "left", strict=True))


@pytest.mark.parametrize("policy", ["plan", "dtr"])
def test_tag_is_usable_after_a_second_forward_has_raised(policy: str, device: Device, remat_on: Remat) -> None:
    x, plain = leaf_on(device.torch_device), step(leaf_on(device.torch_device), UNITS)
    with remat_on("1B", "turns", strict=True, policy=policy):
        chain(x, UNITS).sum().backward()
        for _ in range(2 if policy == "plan" else 1):  # the score is judged once
            with pytest.raises(memkit.errors.BudgetInfeasible):
                chain(x, UNITS)

    for _ in range(3):
        assert_same_bits(step(x, UNITS, lambda: remat_on(0.6, "turns", strict=True)), plain)
    assert memkit.stats("turns").live_records == 0
    assert torch._C._len_torch_dispatch_stack() == 0


def test_what_is_saved_often_counts_once(device: Device, remat_on: Remat) -> None:
    x, w = inputs_on(device.torch_device)
    with remat_on("1GiB", "often"):
        y = functional.linear(x, w)
        loss = y.sin().sum() + y.cos().sum() + y.t().tan().sum() + y[:, ::2].sin().sum() + (y * y).sum()
    stats = memkit.stats("often")
    loss.backward()

    assert (stats.num_saved, stats.saved_bytes) == (2, 2 * 1024)  # and the tangent


@pytest.mark.filterwarnings(NO_PLAN_FITS)
def test_small_storages_stay_and_do_not_count(device: Device, remat_on: Remat) -> None:
    x = leaf_on(device.torch_device)
    for _ in range(3):
        step(x, [1, 3, 1, 3, 1, 3, 1], lambda: remat_on(6 * UNIT_BYTES, "small", min_bytes=2 * UNIT_BYTES))
        stats = memkit.stats("small")

        assert (stats.num_saved, stats.saved_bytes) == (3, 9 * UNIT_BYTES)
        assert stats.num_dropped > 0
