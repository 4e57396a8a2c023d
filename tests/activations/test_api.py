"""Contexts in every combination: schedules, regions without offload, resets, nesting; their texts, figures and arguments."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit import schedules
from memkit.activations.saved.state import offload_states
from memkit.device import Device, ReferenceDevice
from tests.activations.cases import assert_same_bits
from tests.activations.chains import UNIT_BYTES, chain, leaf_on, step
from tests.activations.conftest import Offload


def _moved(tag: str) -> int:
    return memkit.stats(tag).moved_out_bytes // UNIT_BYTES


# Schedules


def test_schedule_is_asked_at_each_entry_for_the_iteration_and_the_last_peak(device: Device, offloading: Offload) -> None:
    x, asked, moved = leaf_on(device.torch_device), [], []

    def alone(iteration: int) -> float:
        return [0.0, 0.5, 1.0, 0.25][iteration]

    def schedule(iteration: int, last_peak_bytes: int | None) -> float:
        asked.append((iteration, last_peak_bytes))
        return alone(iteration)

    for kind in (schedule, alone):
        for _ in range(4):  # a new object each iteration
            step(x, [1] * 8, lambda: offloading(kind, kind.__name__, window_bytes=0))  # noqa: B023
            moved.append(_moved(kind.__name__))

    assert moved == [0, 4, 8, 2] * 2
    assert memkit.stats("alone").ratios == (0.0, 0.5, 1.0, 0.25)
    assert [iteration for iteration, _ in asked] == [0, 1, 2, 3]
    assert asked[0][1] is None
    if isinstance(device, ReferenceDevice):  # which counts only saved bytes
        assert [peak // UNIT_BYTES for _, peak in asked[1:]] == [8, 5, 1]
    assert asked[1][1] > asked[3][1]


def test_fit_memory_finds_the_ratio(offloading: Offload, device: Device) -> None:
    if not isinstance(device, ReferenceDevice):
        pytest.skip("the allocator of a GPU counts more than what is saved")
    x, schedule = leaf_on(device.torch_device), schedules.fit_memory(12 * UNIT_BYTES)
    for _ in range(40):
        found = step(x, [1] * 20, lambda: offloading(schedule, "fit", window_bytes=0))

    stats = memkit.stats("fit")
    assert stats.ratios[0] == 1.0
    assert len(set(stats.ratios[-10:])) == 1
    assert 0.4 <= stats.ratio <= 0.6
    assert stats.peak_allocated_bytes <= 12 * UNIT_BYTES
    assert_same_bits(found, step(x, [1] * 20))


def test_no_offload_still_checks_for_writes(device: Device, offloading: Offload) -> None:
    x = leaf_on(device.torch_device)
    with offloading(1.0, "written"), memkit.no_offload():
        y = x.clone()
        z = y.sin()
    y.detach().mul_(2)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


@pytest.mark.parametrize("inner", ["inner", "same"])
def test_innermost_context_decides(inner: str, device: Device, offloading: Offload) -> None:
    def run(make: Callable[..., AbstractContextManager[object]]) -> list[Tensor]:
        x = leaf_on(device.torch_device)
        with make(1.0, "same", window_bytes=0):
            y = chain(x, [1] * 3)
            with make(0.5, inner, window_bytes=0):
                y = chain(y, [1] * 4)
            y = chain(y, [1] * 5)
        y.sum().backward()
        return [y.detach(), x.grad]

    for _ in range(3):
        assert_same_bits(run(offloading), run(lambda *_, **__: nullcontext()))
        assert inner == "same" or (_moved("same"), _moved("inner")) == (8, 2)
    assert memkit.stats("same").ratios == ((1.0, 0.5) * 3 if inner == "same" else (1.0,) * 3)


def test_reset_forgets_plans_counts_and_host_memory(device: Device, offloading: Offload) -> None:
    x = leaf_on(device.torch_device)
    step(x, [1] * 4, lambda: offloading(0.5, "reset", window_bytes=0))
    device.synchronize()
    (window,) = offload_states["reset"].windows()
    assert window.arena.held_bytes > 0

    memkit.reset("never used")
    memkit.reset("reset")

    assert window.arena.held_bytes == 0
    with pytest.raises(ValueError, match="needs a tag under which a context was entered"):
        memkit.stats("reset")
    step(x, [1] * 4, lambda: offloading(0.5, "reset", window_bytes=0))
    assert memkit.stats("reset").num_iterations == 1


# CPU tensors


@pytest.mark.gpu
def test_cpu_tensors_beside_those_on_the_device_are_left_alone() -> None:
    on_cpu, on_gpu = leaf_on(torch.device("cpu")), leaf_on(torch.device("cuda"))
    with memkit.CPUOffload(1.0, "both", min_bytes=0, window_bytes=0):
        loss = chain(on_cpu, [1] * 3).sum() + chain(on_gpu, [1] * 3).sum().cpu()
    loss.backward()

    assert _moved("both") == 3


DOES: dict[str, tuple[Callable[[], object], str]] = {
    "offload": (
        lambda: memkit.CPUOffload(0.3, "resnet"),
        '<CPUOffload(tag="resnet"): 30% of the saved bytes move to host memory; storages under 1.00 MiB stay>',
    ),
    "offload nothing": (
        lambda: memkit.CPUOffload(0, min_bytes="2KiB"),
        '<CPUOffload(tag="default"): nothing moves to host memory; storages under 2.00 KiB stay>',
    ),
    "offload by a schedule": (
        lambda: memkit.CPUOffload(memkit.schedules.linear(0, 1, num_iterations=9)),
        '<CPUOffload(tag="default"): a share set by a schedule moves to host memory; storages under 1.00 MiB stay>',
    ),
    "offload what hides": (
        lambda: memkit.CPUOffload("auto"),
        '<CPUOffload(tag="default"): what hides behind the computation moves to host memory; storages under 1.00 MiB stay>',
    ),
    "offload all sizes": (
        lambda: memkit.CPUOffload(0.5, min_bytes=0),
        '<CPUOffload(tag="default"): 50% of the saved bytes move to host memory>',
    ),
    "recompute to a share": (
        lambda: memkit.Rematerialize(0.3, "resnet"),
        '<Rematerialize(tag="resnet"): at most 30% of the saved bytes stay; the others are recomputed>',
    ),
    "recompute to bytes": (
        lambda: memkit.Rematerialize("512MiB"),
        '<Rematerialize(tag="default"): at most 512.00 MiB of saved tensors stay; the others are recomputed>',
    ),
    "budget of bytes": (
        lambda: memkit.MemoryBudget("12GiB", "shown"),
        '<MemoryBudget(tag="shown"): at most 12288.00 MiB of the device; what does not fit leaves or is recomputed>',
    ),
    "budget of a share": (
        lambda: memkit.MemoryBudget(0.5),
        '<MemoryBudget(tag="default"): at most 50% of the plain step\'s peak of the device; what does not fit leaves or is '
        "recomputed>",
    ),
    "no offload": (memkit.no_offload, "<no_offload: nothing that is saved here moves>"),
}


@pytest.mark.parametrize("name", DOES)
def test_text_says_what_it_does(name: str) -> None:
    make, text = DOES[name]

    assert repr(make()) == text


@pytest.mark.parametrize(("num_slots", "slots"), [(1, "1 slot"), (2, "2 slots")])
def test_text_of_streamed_layers(num_slots: int, slots: str) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8))).requires_grad_(False)
    with memkit.LayerOffload(model, offload_ratio=0.5, num_slots=num_slots, device=ReferenceDevice()) as offload:
        text = repr(offload)

    assert text == f'<LayerOffload of Sequential: 4 of 8 layers (6.00 KiB) stream through {slots} on cpu, train="frozen">'
    assert repr(offload) == "<LayerOffload of Sequential: closed>"


def test_streamed_layers_are_attached_by_themselves() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8))).requires_grad_(False)
    with (
        memkit.LayerOffload(model, offload_ratio=0.5, num_slots=2, device=ReferenceDevice()) as offload,
        pytest.raises(TypeError, match="A LayerOffload works from when it is made on"),
    ):
        memkit.attach(model, offload)  # type: ignore[arg-type]  # that is the test


def test_sizes_are_bytes_or_text() -> None:
    options = memkit.CPUOffload(0.5, min_bytes="4KiB", window_bytes="1GiB", host_limit_bytes="8 GiB")._options

    assert (options.min_bytes, options.window_bytes, options.host_limit_bytes) == (2**12, 2**30, 2**33)
