"""What is on the device at each moment of a step: against the trace, the model and the table, and an allocator that counts."""

from __future__ import annotations

import functools
import json
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memkit
from memkit.core.tensors import storage_bytes
from memkit.device import CpuDevice
from memkit.profile import AliveStorage, MemoryCategory, MemoryReport, Moment, Phase, StepMemory, tracker
from tests.models import CASES
from tests.profile.cases import both
from tests.profile.traced import Weighted, profile

STEPS = ("resnet18", "transformer_encoder", "tied", "checkpoint_non_reentrant", "rnn_cell")


@functools.cache
def profiled(name: str, target: str) -> tuple[nn.Module, list[Tensor], MemoryReport]:
    """Return a model, its inputs and the profile of them, which several tests look at."""
    model, inputs = CASES[name].model(), CASES[name].inputs()
    return model, inputs, profile(model, *inputs, target=target)


def memory_of(report: MemoryReport) -> StepMemory:
    assert report.step_memory is not None
    return report.step_memory


@pytest.mark.parametrize(("name", "target"), [*((name, "cuda") for name in STEPS), ("transformer_encoder", "cpu")])
def test_categories_add_up_to_the_trace_at_each_moment(name: str, target: str) -> None:
    _, _, report = profiled(name, target)

    memory, trace = memory_of(report), report.trace
    assert [moment.op for moment in memory.moments] == [work.name for work in trace.ops]
    assert memory.total_bytes == tuple(trace.base_bytes + live for live in trace.live_bytes)
    sums = [sum(memory.category_bytes(place).values()) for place in range(len(memory.moments))]
    assert sums == list(memory.total_bytes)
    alive = [sum(item.num_bytes for item in memory.alive_at(place)) for place in range(0, len(memory.moments), 7)]
    assert alive == list(memory.total_bytes[::7])
    assert memory.peak_bytes == trace.peak_bytes == memory.total_bytes[memory.peak]


@pytest.mark.parametrize("name", STEPS)
def test_gradients_are_there_at_the_end_and_grow_from_the_backward(name: str) -> None:
    model, inputs, report = profiled(name, "cpu")

    memory = memory_of(report)

    grads = memory.levels[MemoryCategory.GRAD]
    begin = next(place for place, moment in enumerate(memory.moments) if moment.phase is Phase.BACKWARD)
    assert not any(grads[:begin])
    assert list(grads[begin:]) == sorted(grads[begin:])
    assert grads[-1] == storage_bytes(model.parameters())  # tied weights have one gradient
    assert memory.levels[MemoryCategory.PARAM] == (storage_bytes(model.parameters()),) * len(memory.moments)
    assert memory.levels[MemoryCategory.BUFFER][0] == storage_bytes(model.buffers())
    assert memory.levels[MemoryCategory.INPUT][0] == storage_bytes(inputs)


@pytest.mark.parametrize("name", STEPS)
def test_activations_at_the_end_of_the_forward_are_those_of_the_table(name: str) -> None:
    _, _, report = profiled(name, "cpu")

    memory = memory_of(report)
    last = max(place for place, moment in enumerate(memory.moments) if moment.phase is not Phase.BACKWARD)
    found, table = Counter[str](), Counter[str]()
    for item in memory.alive_at(last):
        found[item.module] += item.num_bytes * (item.category is MemoryCategory.ACTIVATION)
    first = [record for record in report.saved if record.category.value == "activation" and record.version == 0]
    for _, module, num_bytes in {(record.storage, record.module, record.storage_bytes) for record in first}:
        table[module] += num_bytes
    assert +found == table


def test_run_with_data_tells_the_same() -> None:
    real, meta = map(memory_of, both(CASES["tied"].model(), *CASES["tied"].inputs(), backward=True))

    assert real.peak_bytes == meta.peak_bytes
    assert real.category_bytes(real.peak) == meta.category_bytes(meta.peak)


def test_items_are_named() -> None:
    # x and w are 256 by 256 floats, 256 KiB each; sin saves the product.
    x, target = (torch.empty(256, 256, device="meta", requires_grad=grad) for grad in (True, False))
    model = Weighted(lambda x, w: (x * w).sin())
    model.weight = nn.Parameter(torch.empty_like(target))
    model.register_buffer("scale", torch.empty(256, device="meta"))

    memory = memory_of(profile(model, x, loss_fn=lambda y: functional.l1_loss(y, target)))

    named = [(item.category.value, item.module, item.what, item.num_bytes) for item in memory.alive_at(len(memory.moments) - 1)]
    size = 256 * 1024
    assert {
        ("param", "(model)", "weight", size),
        ("buffer", "(model)", "scale", 1024),
        ("input", "(model)", "input 0", size),
        ("grad", "(model)", "weight.grad", size),
        ("grad", "(model)", "input 0.grad", size),
    } <= set(named)
    assert ("activation", "mul") in {(item.category.value, item.what) for item in memory.alive_at(0)}
    assert [moment.phase for moment in memory.moments[:3]] == [Phase.FORWARD, Phase.FORWARD, Phase.LOSS]


def test_casts_of_parameters_are_told_apart() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to("meta"), torch.empty(4, 64, device="meta")

    with torch.autocast("cpu", dtype=torch.bfloat16):
        report = profile(model, x)

    memory = memory_of(report)
    assert report.param_cast_bytes == 2 * 64 * 64
    assert max(memory.levels[MemoryCategory.PARAM_CAST]) == 2 * 64 * 64


def test_resized_storage_counts_with_the_bytes_that_it_has() -> None:
    def resizing(x: Tensor, w: Tensor) -> Tensor:
        y = functional.relu(x @ w).detach()
        y.resize_(64, 64)
        return x @ w

    report = profile(Weighted(resizing).to("meta"), torch.empty(32, 32, device="meta"))

    memory, trace = memory_of(report), report.trace
    assert memory.total_bytes == tuple(trace.base_bytes + live for live in trace.live_bytes)


def storage(category: MemoryCategory, module: str, num_bytes: int, begin: int, end: int) -> AliveStorage:
    return AliveStorage(category=category, module=module, what="relu", num_bytes=num_bytes, begin=begin, end=end)


SMALL = StepMemory(
    moments=tuple(Moment(phase=Phase.FORWARD, op=f"aten.op{place}.default", module="a") for place in range(3)),
    storages=(
        storage(MemoryCategory.ACTIVATION, "a", 10, 0, 3),
        storage(MemoryCategory.ACTIVATION, "a", 20, 1, 2),
        storage(MemoryCategory.TEMP, "b", 25, 1, 3),
        storage(MemoryCategory.PARAM, "b", 1, 0, 3),
    ),
)


def test_groups_are_by_category_and_module_largest_first() -> None:
    found = [(item.category.value, item.module, item.num_bytes, item.num_storages) for item in SMALL.grouped_at(1)]
    empty = StepMemory(moments=(), storages=())

    assert (SMALL.peak, SMALL.total_bytes) == (1, (11, 56, 36))
    assert found == [("activation", "a", 30, 2), ("temp", "b", 25, 1), ("param", "b", 1, 1)]
    assert (empty.peak, empty.peak_bytes, empty.total_bytes) == (0, 0, ())


@pytest.mark.parametrize("moment", [-1, 3])
def test_moment_that_is_not_there_raises(moment: int) -> None:
    for ask in (SMALL.alive_at, SMALL.grouped_at, SMALL.category_bytes):
        with pytest.raises(IndexError, match=f"there are 3 moments, from 0; found {moment}"):
            ask(moment)


def test_plain_lists_and_back() -> None:
    _, _, report = profiled("tied", "cpu")
    plain = SMALL.to_plain()

    again = MemoryReport.from_json(report.to_json())

    assert again == report
    assert again.step_memory == report.step_memory
    assert StepMemory.from_plain(json.loads(json.dumps(plain))) == SMALL
    plain["storages"][0][5] = 9
    with pytest.raises(ValueError, match="from 0 to 9, of 3 moments"):
        StepMemory.from_plain(plain)


MIB = 2**20


class Counted(CpuDevice):
    """The CPU, with an allocator that has taken so much at the peak of each part of a step."""

    def memory_counter(self) -> Any:
        taken = {"allocated_bytes": 5 * MIB, "peak_bytes": 64 * MIB, "peak_reserved_bytes": 70 * MIB, "reset_peak": None}
        return SimpleNamespace(**{name: lambda taken=taken: taken for name, taken in taken.items()})


@pytest.fixture
def _counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker, "open_device", lambda *_, **__: Counted())


def step(*, stepped: bool = False) -> MemoryReport:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024)), torch.randn(1024, 1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if stepped:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    report: MemoryReport = memkit.profile_memory(model, x, optimizer=optimizer, print_table=False, warmup=0)
    return report


@pytest.mark.usefixtures("_counts")
def test_peak_is_the_allocators_with_states_that_are_still_to_come() -> None:
    report = step()

    assert report.step_peak_bytes == 64 * MIB + report.optimizer.state_bytes
    assert report.step_memory.levels[MemoryCategory.PARAM][0] == report.grad_bytes == report.param_bytes
    rest = report.step_peak_bytes - report.step_memory.peak_bytes  # no storage of the step
    assert f"other tensors, workspaces and rounding {rest / MIB:.1f}" in str(report)
    assert report.peak_to_text(top=None).endswith(f"beside these, other tensors, workspaces and rounding: {rest / MIB:.2f} MiB")
    assert step(stepped=True).step_peak_bytes == 64 * MIB  # states that are there are in what was measured


def test_compiled_models_say_what_cannot_be_told() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.ones(4, 8)
    model.forward = torch.compile(model.forward, backend="eager")  # type: ignore[method-assign]

    report = memkit.profile_memory(model, x, backward=True, print_table=False, warmup=0)

    assert report.step_memory is None
    assert "torch.compile runs a part of the model; profile it before that" in report.peak_to_text()
