"""Wrong arguments and wrong use raise at once, say what was found and what to do, and leave nothing behind."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import nn

import memkit
from memkit.core.hooks import innermost_pack
from memkit.device import Device
from tests.activations.cases import assert_same_bits
from tests.activations.chains import leaf_on, step
from tests.activations.conftest import Offload


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"offload_ratio": -0.1}, ValueError, "offload_ratio must be from 0 .* to 1 .*; found -0.1"),
        ({"offload_ratio": 1.5}, ValueError, "offload_ratio must be from 0 .*; found 1.5"),
        ({"offload_ratio": math.nan}, ValueError, "offload_ratio must be .*; found nan"),
        ({"offload_ratio": math.inf}, ValueError, "offload_ratio must be .*; found inf"),
        ({"offload_ratio": "fast"}, ValueError, 'a number from 0 to 1, a schedule, or "auto"; found "fast"'),
        ({"offload_ratio": True}, TypeError, r"a number from 0 to 1; found True \(bool\)"),
        ({"offload_ratio": None}, TypeError, r"a number from 0 to 1; found None \(NoneType\)"),
        ({"offload_ratio": [0.5]}, TypeError, r"found \[0.5\] \(list\)"),
        ({"offload_ratio": 0.5j}, TypeError, r"found 0.5j \(complex\)"),
        ({"tag": 3}, TypeError, "tag is a string; found int"),
        ({"tag": None}, TypeError, "tag is a string; found NoneType"),
        ({"min_bytes": -1}, ValueError, "min_bytes is a number of bytes, 0 or more; found -1"),
        ({"min_bytes": 1.5}, TypeError, r"min_bytes is a number of bytes, or text such as \"8GiB\"; found 1.5"),
        ({"min_bytes": None}, TypeError, "min_bytes is .*; found None"),
        ({"window_bytes": -2}, ValueError, "window_bytes is a number of bytes, 0 or more; found -2"),
        ({"window_bytes": True}, TypeError, "window_bytes is .*; found True"),
        ({"host_limit_bytes": -3}, ValueError, "host_limit_bytes is .*; found -3"),
        ({"host_limit_bytes": "8 G"}, ValueError, 'host_limit_bytes is .*; found "8 G"'),
        ({"host_limit_bytes": 8}, ValueError, 'host_limit_bytes=8 reads as 8 bytes or as 8 GiB. Write "8B" or "8GiB"'),
        ({"profile": {"saved": []}}, TypeError, "profile is a MemoryReport, as profile_memory returns; found dict"),
        ({"device": 0}, TypeError, 'device is a name such as "cuda:1", a torch.device or a memkit.device.Device; found int'),
        ({"device": "gpu"}, ValueError, "device must be the name of a torch.device, such as \"cuda:1\"; found 'gpu'"),
        ({"device": torch.device("xpu")}, ValueError, 'memkit runs on "cpu" and "cuda"; found "xpu"'),
    ],
)
def test_argument(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        memkit.CPUOffload(**{"offload_ratio": 0.5, **options})
    with pytest.raises(error, match=message):
        memkit.attach(nn.Linear(2, 2), memkit.CPUOffload(**{"offload_ratio": 0.5, **options}))


def test_any_real_number_is_a_ratio() -> None:
    assert [memkit.CPUOffload(ratio).offload_ratio for ratio in (0, 1, Fraction(1, 2), 0.25)] == [0.0, 1.0, 0.5, 0.25]


def test_attach_that_raises_leaves_no_hook() -> None:
    model = nn.Linear(2, 2)

    with pytest.raises(TypeError, match=r"attach needs a torch.nn.Module; found function"):
        memkit.attach(step, memkit.CPUOffload(0.5))
    with pytest.raises(TypeError, match=r"attach needs a context such as memkit.CPUOffload\(0.3\); found"):
        memkit.attach(model, 0.3)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_stats_of_an_unknown_tag(device: Device, offloading: Offload) -> None:
    with pytest.raises(ValueError, match="Run a forward in a context with tag="):
        memkit.stats()
    step(leaf_on(device.torch_device), [1], lambda: offloading(0.5, "known"))

    with pytest.raises(ValueError, match=r"found none under \"unknown\"\. Pass one of 'known', or run a forward in"):
        memkit.stats("unknown")


@pytest.mark.parametrize("wrong", [math.nan, 2, -1e-3, None, "half", True])
def test_schedule_that_gives_no_ratio(wrong: object, device: Device, offloading: Offload) -> None:
    x = leaf_on(device.torch_device)
    ratios: list[object] = [0.5, wrong, 1.0]
    context = offloading(lambda iteration: ratios[iteration], "schedule", window_bytes=0)
    step(x, [1] * 4, lambda: context)

    with (
        pytest.raises((ValueError, TypeError), match=r"the ratio that the schedule gives for iteration 1 must be .*; found "),
        context,
    ):
        pytest.fail("entered with a wrong ratio")
    assert innermost_pack() is None
    assert memkit.stats("schedule").num_iterations == 1

    ratios[1] = 0.25
    found = step(x, [1] * 4, lambda: context)
    assert_same_bits(found, step(x, [1] * 4))
    assert memkit.stats("schedule").ratios == (0.5, 0.25)


def test_schedule_that_raises_keeps_its_error(device: Device, offloading: Offload) -> None:
    def schedule(iteration: int) -> float:
        raise KeyError("mine")

    context = offloading(schedule, "raises")
    with pytest.raises(KeyError, match="mine"), context:
        pytest.fail("entered without a ratio")

    assert innermost_pack() is None
    context.offload_ratio = 1.0
    with context:
        pass


@pytest.mark.parametrize("report_on", ["", "cpu", "meta"])
def test_auto_without_times(report_on: str, device: Device, offloading: Offload) -> None:
    if report_on:  # one forward alone, or a step without data
        model, x = nn.Linear(4, 4, device=report_on), torch.randn(2, 4, device=report_on)
        memkit.profile_memory(model, x, backward=report_on == "meta", tag="auto", print_table=False)

    with (
        pytest.raises(ValueError, match=r'"auto" needs a report with times: call memkit.profile_memory\(.*tag="auto"\)'),
        offloading("auto", "auto"),
    ):
        pytest.fail("entered without a ratio")
    assert innermost_pack() is None


def test_new_window_or_min_bytes_is_a_new_question_to_auto(
    device: Device, offloading: Offload, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int | None] = []

    def answer(*_: object, window_bytes: int | None, **__: object) -> float:
        asked.append(window_bytes)
        return 0.5

    model = nn.Linear(4, 4)
    report = memkit.profile_memory(model, torch.randn(2, 4), backward=True, tag="asked", print_table=False)
    monkeypatch.setattr(memkit.activations.cpu_offload, "auto_ratio", answer)
    monkeypatch.setattr(memkit.activations.cpu_offload, "measure_link", lambda _: None)
    for window_bytes in (64, 64, 128):
        with offloading("auto", "asked", profile=report, window_bytes=window_bytes):
            model(torch.randn(2, 4))
    assert asked == [64, 128]
