"""What every test runs under."""

from __future__ import annotations

import functools
import gc
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

import memkit
from memkit.activations.budgeting import learning
from memkit.activations.budgeting.state import budget_states
from memkit.activations.saved import state
from memkit.activations.saved.state import offload_states, remat_states
from memkit.core import hooks
from memkit.device import CpuDevice, Device, ReferenceDevice, ceilings
from memkit.device.ceilings import Ceilings
from memkit.profile import registry
from memkit.recording import cost
from memkit.transfer import Link, measure_link
from tests import planned, thinning
from tests.clock import set_clock

# the same examples each time, and none is too slow; `--hypothesis-profile search` looks for others
_NEVER_TOO_SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("search", _NEVER_TOO_SLOW)
settings.register_profile("same", _NEVER_TOO_SLOW, derandomize=True, database=None, max_examples=12)
settings.load_profile("same")

torch.set_num_threads(1)  # tests run side by side, and on small tensors several threads only get in each other's way
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the same in processes that tests start


_WITH_FEW_LAYERS = ("weights", "bench", "profile")
"""Where tests stream so few layers that all of them fit the slots. What `LayerOffload` says to that is tested in
tests/weights/test_bad_input.py."""


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.path.parent.name in _WITH_FEW_LAYERS:
        item.add_marker(pytest.mark.filterwarnings("ignore:LayerOffload frees no memory on the device"))


_MANY = 5000
"""From so many tests on, those that need a GPU are left out where there is none: to skip thousands takes a while. Of fewer,
each is told as skipped."""


@pytest.hookimpl(tryfirst=True)  # before what -m leaves out is
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    has_gpu = torch.cuda.is_available()
    items[:] = thinning.thin(items)
    for item in items:
        # for tests alone, and below what they say themselves: warnings of plugins at their start or end are no errors
        item.add_marker(pytest.mark.filterwarnings("error"), append=False)
        if "gpu" in item.keywords and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if not has_gpu and "gpu" not in config.option.markexpr and len(items) > _MANY:
        config.hook.pytest_deselected(items=[item for item in items if "gpu" in item.keywords])
        items[:] = [item for item in items if "gpu" not in item.keywords]


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or what is frozen shows as leaked
    # what a failed backward has left in torch's queue goes with the next one; after Python has gone, its hooks would crash
    torch.ones(1, requires_grad=True).sum().backward()


@pytest.fixture(autouse=True, scope="module")
def _small_heap() -> None:
    """Take what is alive by now, torch above all, out of what each collection of a test looks through."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _no_hook_of_all_is_left(request: pytest.FixtureRequest, _small_heap: None) -> Iterator[None]:
    """Have a file leave no hook on all steps or forwards: what the next ones count would come out different, as it would for
    who drops a model without `close()`."""
    num_failed = request.session.testsfailed
    yield
    if request.session.testsfailed > num_failed:
        return  # what has failed is still alive
    torch.nn.Identity()(torch.ones(1))  # some hooks go with the next forward
    gc.collect()
    hooks._remove_left()  # what was collected within a step goes with the next that is set
    assert not torch_optimizer._global_optimizer_pre_hooks
    assert not torch_optimizer._global_optimizer_post_hooks
    assert not torch_module._global_forward_pre_hooks
    assert not torch_module._global_forward_hooks


@pytest.fixture(autouse=True, scope="module")
def _looks_at_a_plan_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have plans of the same step be simulated once in a file, but in tests that are about plans."""
    with pytest.MonkeyPatch.context() as patch:
        if not planned.is_about_plans(request.path):
            planned.look_once(patch)
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_seeds_for_missing_devices() -> Iterator[None]:
    """Have `torch.manual_seed` leave out devices that are not here: for each it would format the stack, to seed them later."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (torch.cuda, torch.xpu, torch.mtia):
            if not module.is_available():
                patch.setattr(module, "manual_seed_all", lambda _: None)
        yield


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    torch.manual_seed(0)
    num_modes = torch._C._len_torch_dispatch_stack()  # CUDA's stream sanitizer is one
    python = torch._C.DispatchKey.Python
    yield
    is_left = num_modes == 0 and torch._C._dispatch_tls_is_dispatch_key_included(python)
    if is_left:  # each later test would fail at its first factory function
        torch._C._dispatch_tls_set_dispatch_key_included(python, False)
    assert not is_left
    for tag in list(registry._reports):
        registry.forget_report(tag)
    for tag in {*offload_states, *remat_states, *budget_states}:
        memkit.reset(tag)
    state._retired.clear()
    assert torch.is_grad_enabled()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert torch._C._len_torch_dispatch_stack() == num_modes
    assert torch._C._len_torch_function_stack() == 0
    hooks = torch.nn.modules.module
    assert not any((hooks._global_forward_pre_hooks, hooks._global_forward_hooks, hooks._global_forward_hooks_with_kwargs))


@pytest.fixture
def no_compiled_code_is_left() -> Iterator[None]:
    """Have Dynamo forget behind a test what it has compiled in it."""
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _even_times(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what is planned from be the same on every machine, however busy: on devices of this machine each reading of the
    clock is one tick behind the last, and links, memory and recording are as fast as is written here. Tests of clocks ask for
    `own_clock`.
    """
    if "own_clock" in request.fixturenames:
        return
    set_clock(monkeypatch, tick_s=1e-5)
    monkeypatch.setattr(learning, "measure_link", lambda device, **sizes: _on_this_machine(device, _LINK, measure_link, sizes))
    monkeypatch.setattr(ceilings, "_measure", lambda device: _on_this_machine(device, _CEILINGS, _measure_ceilings, {}))
    monkeypatch.setattr(cost, "recording_cost_s", functools.wraps(_measure_recording)(lambda: 5e-6))


@pytest.fixture
def own_clock() -> None:
    """Let devices read the clock of this machine."""


@pytest.fixture(autouse=True)
def one_plan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have steps under a `MemoryBudget` follow the plan that was made for them, whatever they take by the clock. Tests that are
    about that ask for `any_times`.
    """
    if "any_times" not in request.fixturenames:
        for name in ("_OTHER_LINK", "_QUITE_OTHER_LINK", "_AS_PREDICTED"):
            monkeypatch.setattr(learning, name, math.inf)
        monkeypatch.setattr(learning, "_LESS", 0.0)
        monkeypatch.setattr(learning, "_has_own_clock", lambda _: False)  # on a GPU other ways are tried


@pytest.fixture
def any_times() -> None:
    """Let what steps and copies take count."""


_LINK = Link(d2h_bytes_per_s=2e9, h2d_bytes_per_s=2e9, latency_s=1e-5)
_CEILINGS = Ceilings(bytes_per_s=1e10, flops_per_s=1e11)
_measure_ceilings, _measure_recording = ceilings._measure, cost.recording_cost_s.__wrapped__


def _on_this_machine(device: Device, told: Any, measure: Callable[..., Any], sizes: dict[str, int]) -> Any:
    return told if isinstance(device, (CpuDevice, ReferenceDevice)) else measure(device, **sizes)
