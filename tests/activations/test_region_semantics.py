"""What regions do beyond one forward and one backward: the order of backwards, lifetimes, threads, errors."""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from memkit.activations.recomputing.regions import Regions, RegionSpec
from memkit.activations.saved.counts import Counts
from memkit.core.kept import KeptHandle
from memkit.errors import ReplayMismatchError
from tests.activations.cases import Seeing, assert_same_bits
from tests.activations.remat.conftest import without_collector as without_collector
from tests.threads import run_in_threads

ALL = RegionSpec()


class Run(nn.Module):
    """A computation as a module, which counts how often it runs."""

    def __init__(self, computation: Callable[..., Any]) -> None:
        super().__init__()
        self.computation = computation
        self._num_runs = [0]  # a plain attribute would be put back by a recompute

    @property
    def num_runs(self) -> int:
        return self._num_runs[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._num_runs[0] += 1
        return self.computation(*args, **kwargs)


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape or (4, 4), generator=torch.Generator().manual_seed(0)).requires_grad_()


def sines(x: Tensor) -> Tensor:
    return (x.sin() * x).exp().cos()


def assert_same_as_plain(region: nn.Module, gradients: Callable[[], Sequence[Tensor]]) -> None:
    wanted = gradients()
    with Regions({region: ALL}):
        found = gradients()

    assert_same_bits(found, wanted)


# How often the forward runs


@pytest.mark.usefixtures("without_collector")
def test_keeps_nothing_and_runs_again_once_for_each_backward() -> None:
    counts, made = Counts(), []

    def computation(x: Tensor) -> Tensor:
        y = x.sin()
        made.append(weakref.ref(y.untyped_storage()))
        return (y * x).exp()

    region, x = Run(computation), leaf()
    with Regions({region: ALL}, counts=counts):
        loss = (region(x) * 2).sum()

        assert made[0]() is None
        torch.autograd.grad(loss, x, retain_graph=True)
        assert [storage() for storage in made] == [None, None]
    assert (region.num_runs, counts.num_replays, counts.num_dropped) == (2, 1, 4)
    loss.backward()
    assert region.num_runs == 3


def test_stops_behind_the_last_tensor_that_is_needed() -> None:
    reached = []

    def computation(x: Tensor) -> Tensor:
        y = x.sin().exp()
        reached.append("saved")
        y = y + 1
        reached.append("end")
        return y

    region = Run(computation)
    with Regions({region: ALL}):
        loss = region(leaf()).sum()
    loss.backward()

    assert reached == ["saved", "end"]


@pytest.mark.parametrize("follows", [False, True])
def test_what_an_op_fills_after_it_was_saved_is_filled(follows: bool) -> None:
    """`rrelu` saves its noise, then draws it: the recompute may not stop at that save."""

    def computation(x: Tensor) -> Tensor:
        y = functional.rrelu(x, training=True)
        return y * 2 if follows else y  # which saves nothing

    module, found = Run(computation), []
    for context in (nullcontext(), Regions({module: ALL})):
        torch.manual_seed(3)
        x = leaf(64, 64)
        with context:
            y = module(x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        found.append([y.detach(), gradient, torch.get_rng_state()])

    assert_same_bits(*found)
    assert module.num_runs == 3


def test_stops_before_tensors_of_a_graph_that_is_gone() -> None:
    reached = []

    def computation(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        reached.append("first")
        return y, y.detach().exp().requires_grad_().cos().exp()

    region = Run(computation)
    with Regions({region: ALL}):
        first, second = region(leaf())
    del second
    first.sum().backward()

    assert reached == ["first"]


@pytest.mark.parametrize(("calls", "num_runs"), [(None, 6), (frozenset({1}), 4), (frozenset[int](), 3)])
def test_only_the_chosen_calls_are_recomputed(calls: frozenset[int] | None, num_runs: int) -> None:
    region, x = Run(sines), leaf()
    regions = Regions({region: RegionSpec(calls=calls)})
    for number in (1, 2):
        with regions:
            loss = region(region(region(x))).sum()
        loss.backward()

        assert region.num_runs == number * num_runs


def test_chosen_calls_within_a_region_are_the_same_when_it_is_recomputed() -> None:
    inner = Run(sines)
    outer = Run(lambda x: inner(inner(inner(x))).sin())
    region, x = Run(lambda x: outer(inner(x))), leaf()
    counts = Counts()
    with Regions({outer: ALL, inner: RegionSpec(calls=frozenset({2}))}, counts=counts):
        loss = region(x).sum()
    wanted = torch.autograd.grad(sines(sines(sines(sines(x)))).sin().sum(), x)

    assert_same_bits(torch.autograd.grad(loss, x), wanted)
    assert counts.num_replays == 2


def test_is_no_region_without_grad_or_in_another_thread_or_outside_of_the_context() -> None:
    region, x = Run(sines), leaf()
    regions = Regions({region: ALL})
    losses = []
    with regions:
        with torch.no_grad():
            region(x)
        run_in_threads(lambda: losses.append(region(x).sum()))
    losses.append(region(x).sum())
    for loss in losses:
        loss.backward()

    assert region.num_runs == 3


def test_leaves_no_hook() -> None:
    region = Run(sines)
    regions = Regions({region: ALL})
    with regions:
        assert region._forward_hooks
    with pytest.raises(ZeroDivisionError), regions:
        raise ZeroDivisionError

    assert not region._forward_hooks
    assert not region._forward_pre_hooks


def test_refuses_to_be_entered_twice() -> None:
    regions = Regions({Run(sines): ALL})
    with regions, pytest.raises(ValueError, match="make a Regions for each"):
        regions.__enter__()


# Backwards in any order


def test_second_backward_has_the_bits_of_the_first() -> None:
    region, x = Run(sines), leaf()
    with Regions({region: ALL}):
        loss = region(x).sum()
    first = torch.autograd.grad(loss, x, retain_graph=True)
    second = torch.autograd.grad(loss, x)

    assert_same_bits(second, first)
    assert_same_bits(first, torch.autograd.grad(sines(x).sum(), x))
    assert region.num_runs == 3


def test_double_backward_within_the_context() -> None:
    region, x = Run(sines), leaf()

    def gradients() -> list[Tensor]:
        (once,) = torch.autograd.grad(region(x).sum(), x, create_graph=True)
        return [once.detach(), *torch.autograd.grad(once.square().sum(), x)]

    assert_same_as_plain(region, gradients)


@pytest.mark.parametrize("kind", ["once", "retained", "double"])
def test_backward_in_the_forward(kind: str) -> None:
    def computation(x: Tensor) -> Tensor:
        y = x.sin()
        (grad,) = torch.autograd.grad(y.exp().sum(), x, retain_graph=kind != "once", create_graph=kind == "double")
        return x.cos() * grad.square() * (1 if kind == "once" else y.exp())

    region, x = Run(computation), leaf()
    assert_same_as_plain(region, lambda: torch.autograd.grad(region(x).sum(), x))


@pytest.mark.parametrize("has_thread", [False, True])
def test_backward_in_the_context_counts_calls_within_a_region_once(has_thread: bool) -> None:
    """The first call of the inner module is no region, in the forward as in the recompute, where it is watched twice."""
    module, x, found = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), leaf(), []
    chosen = {module: RegionSpec(calls=frozenset({0})), module[1]: RegionSpec(calls=frozenset({1}))}

    for context in (nullcontext(), Regions(chosen)):
        module.zero_grad()
        with context:
            outputs = [module(x), module(x * 2)]
            for output in outputs:  # a thread is as autograd's own is, for a GPU
                run_in_threads(output.sum().backward) if has_thread else output.sum().backward()
        found.append([parameter.grad for parameter in module.parameters()])

    assert_same_bits(*found)


def test_saved_tensors_are_read_outside_of_a_backward() -> None:
    region, x = Run(torch.sin), leaf()
    with Regions({region: ALL}):
        y = region(x)

    assert torch.equal(y.grad_fn._saved_self, x)
    assert torch.equal(y.grad_fn._saved_self, x)


def test_backwards_in_several_threads() -> None:
    region, x = Run(lambda x: sines(functional.dropout(x))), leaf(64, 64)
    torch.manual_seed(3)
    wanted = torch.autograd.grad(region(x).sum(), x)
    torch.manual_seed(3)
    found: list[Tensor] = []
    with Regions({region: ALL}):
        loss = region(x).sum()
    run_in_threads(*[lambda: found.extend(torch.autograd.grad(loss, x, retain_graph=True))] * 4)

    assert_same_bits(found, [*wanted] * 4)


def test_two_threads_with_regions_of_one_module() -> None:
    region, found = Run(sines), list[Tensor]()
    barrier = threading.Barrier(2)

    def train() -> None:
        for _ in range(20):
            x = leaf()
            with Regions({region: ALL}):
                barrier.wait()
                loss = region(x).sum()
                barrier.wait()
            found.extend(torch.autograd.grad(loss, x))

    run_in_threads(train, train)
    x = leaf()

    assert_same_bits(found, [*torch.autograd.grad(sines(x).sum(), x)] * 40)
    assert region.num_runs == 80


# Inputs


def test_arguments_of_all_kinds() -> None:
    def computation(x: Tensor, pair: tuple[Tensor, Tensor], *, scale: float, by: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        by["x"].append(x)  # a list of the caller's
        return {"y": (x.sin() * pair[0] * pair[1].exp() * scale).cos() * by["x"][0], "z": by["x"][-1].exp()}

    region = Run(computation)

    def gradients() -> list[Tensor]:
        x, y, z, plain = leaf(), leaf(), leaf(), torch.ones(4, 4)
        inputs = {"x": [y.exp()]}
        out = region(x * 2, (y * 2, plain), scale=2.0, by=inputs)
        assert len(inputs["x"]) == 2
        loss = (out["y"] + out["z"] * z).sum()
        return [loss.detach(), *torch.autograd.grad(loss, (x, y, z))]

    assert_same_as_plain(region, gradients)
    assert region.num_runs == 3


def test_tensor_that_is_passed_twice_is_one_in_the_recompute() -> None:
    attention, x = nn.MultiheadAttention(8, 2), leaf(3, 2, 8)  # which asks whether the query is the key
    wanted = torch.autograd.grad(attention(x, x, x)[0].sum(), x)
    with Regions({attention: ALL}):
        loss = attention(x, x, value=x)[0].sum()

    assert_same_bits(torch.autograd.grad(loss, x), wanted)


def test_call_with_what_the_forward_may_change_is_not_taken() -> None:
    class Cache:
        seen: ClassVar[list[Tensor]] = []

    def computation(x: Tensor, cache: Cache) -> Tensor:
        cache.seen.append(x.sin())
        return cache.seen[-1].exp()

    region, cache = Run(computation), Cache()
    regions = Regions({region: ALL})
    with regions:
        loss = region(leaf(), cache).sum()
    loss.backward()

    assert len(cache.seen) == 1
    assert regions.not_taken == {region: "it is called with a Cache, which its forward may change"}


def test_inputs_are_kept_by_what_is_asked_for() -> None:
    kept = []

    class Kept(KeptHandle):
        __slots__ = ()

        def __init__(self, tensor: Tensor) -> None:
            assert not torch.is_grad_enabled()
            super().__init__(tensor)
            kept.append(self)

    region, x = Run(sines), leaf()
    with Regions({region: ALL}, keep=Kept):
        loss = region(x * 2).sum()
    loss.backward()

    assert len(kept) == 1


def test_inputs_go_to_hooks_of_the_user_within_the_context() -> None:
    region, x = Run(sines), leaf()
    wanted = torch.autograd.grad(sines(x * 2).sum(), x)
    packed = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.clone())
        return packed[-1]

    with Regions({region: ALL}), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = region(x * 2).sum()

    assert_same_bits(torch.autograd.grad(loss, x), wanted)
    assert len(packed) == 1


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_within_a_checkpoint_a_call_is_no_region(use_reentrant: bool) -> None:
    region, x = Run(lambda x: sines(functional.dropout(x))), leaf()

    def gradients() -> list[Tensor]:
        torch.manual_seed(0)
        loss = checkpoint(lambda x: region(x.sin()), x, use_reentrant=use_reentrant).sum()
        return [*torch.autograd.grad(loss, x)] if not use_reentrant else [loss.detach()]

    wanted = gradients()
    counts = Counts()
    with Regions({region: ALL}, counts=counts):
        found = gradients()

    assert_same_bits(found, wanted)
    assert counts.num_replays == 0


def test_a_mode_sees_the_ops_of_the_forward_and_no_others() -> None:
    region, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)), leaf()
    with Seeing() as plain:
        region(x)
    with Regions({region: ALL, region[1]: ALL}), Seeing() as seeing:
        region(x)

    assert seeing.ops == plain.ops


# What the forward runs under


@pytest.mark.parametrize(("forward", "backward"), [(True, False), (True, True), (False, True)])
def test_autocast(forward: bool, backward: bool) -> None:
    linear = nn.Linear(8, 8)
    region = Run(lambda x: functional.gelu(linear(linear(x))))

    def gradients() -> list[Tensor]:
        x = leaf(4, 8)
        with torch.autocast("cpu", torch.bfloat16, enabled=forward):
            loss = region(x).float().sum()
            with torch.autocast("cpu", torch.bfloat16, enabled=backward):
                found = torch.autograd.grad(loss, (x, linear.weight))
                assert torch.is_autocast_enabled("cpu") == backward
        return [loss.detach(), *found]

    assert_same_as_plain(region, gradients)
    assert not torch.is_autocast_enabled("cpu")


def test_random_state_is_that_of_the_forward_and_then_of_the_backward() -> None:
    region, x = Run(lambda x: functional.dropout(x.sin()) * torch.rand(4, 4)), leaf()

    def gradients() -> list[Tensor]:
        torch.manual_seed(0)
        loss = region(x).sum()
        torch.rand(7)
        return [loss.detach(), *torch.autograd.grad(loss, x), torch.rand(3), torch.get_rng_state()]

    assert_same_as_plain(region, gradients)


def test_recompute_trains_as_the_forward_did() -> None:
    region = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4), nn.BatchNorm1d(4).eval(), nn.GELU())
    x = leaf()

    def gradients() -> list[Tensor]:
        torch.manual_seed(0)
        loss = region(x).sum()
        region.eval()
        found = [loss.detach(), *torch.autograd.grad(loss, x)]
        assert not any(part.training for part in region.modules())
        region.train()
        region[2].eval()
        return found

    assert_same_as_plain(region, gradients)


def test_settings_of_the_process_are_those_of_the_forward() -> None:
    region, x = Run(lambda x: x * torch.ones(4, 4).sin() + torch.rand(4, 4)), leaf()
    with Regions({region: ALL}):
        torch.set_default_dtype(torch.float64)
        try:
            y = region(x)
        finally:
            torch.set_default_dtype(torch.float32)
    y.sum().backward()

    assert torch.get_default_dtype() is torch.float32


def test_default_device_is_that_of_the_forward() -> None:
    region, x = Run(lambda x: x * torch.ones(4, 4).sin() * x), leaf()
    with Regions({region: ALL}), torch.device("cpu"):
        loss = region(x).sum()
    with torch.device("meta"):
        loss.backward()
        assert torch.ones(1).is_meta
    with Regions({region: ALL}):
        loss = region(x).sum()
    with torch.device("meta"):
        loss.backward()

    assert region.num_runs == 4


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("ending", ["backward", "dropped", "error"])
def test_nothing_is_left_without_the_garbage_collector(ending: str) -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4))
    regions = Regions({block: ALL, block[1]: ALL})
    x = leaf() * 2
    with suppress(RuntimeError), regions:
        y = block(x)
        seen = [weakref.ref(one) for one in (x.untyped_storage(), y.untyped_storage(), block, regions)]
        if ending == "error":
            block(torch.ones(4, 5))
    if ending == "backward":
        y.sum().backward(retain_graph=True)
    del x, y, block, regions

    assert [one() for one in seen] == [None] * 4


# Errors


def _give_data_twice(region: nn.Sequential) -> None:
    for _ in range(2):  # the second may be where the first was
        region[0].weight.data = region[0].weight.data * 0.5


CHANGES: dict[str, tuple[Callable[[nn.Sequential, Tensor], object], type[Exception], str]] = {
    "input": (
        lambda _, x: x.add_(1),
        RuntimeError,
        "modified by an inplace .*an input of a Sequential whose forward is run again",
    ),
    "statistics": (lambda it, _: it[2].running_mean.add_(1), RuntimeError, "modified by an inplace operation"),
    "parameter": (lambda it, _: it[0].bias.add_(1), ReplayMismatchError, "a Sequential .*a parameter that was written to"),
    "buffer": (lambda it, _: it.steps.add_(1), ReplayMismatchError, 'the buffer "steps", that was written to'),
    "another parameter": (
        lambda it, _: setattr(it[0], "weight", nn.Parameter(it[0].weight * 0.5)),
        *(ReplayMismatchError, "was replaced"),
    ),
    "other data": (lambda it, _: _give_data_twice(it), ReplayMismatchError, "other data"),
    "frozen": (lambda it, _: it[0].weight.requires_grad_(False), ReplayMismatchError, "requires_grad was set"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_before_the_backward_raises(name: str) -> None:
    change, error, message = CHANGES[name]
    region, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.BatchNorm1d(4).eval(), nn.Tanh()), leaf() * 2
    region.register_buffer("steps", torch.zeros(()))
    with Regions({region: ALL}):
        loss = region(x).sum()
    with torch.no_grad():
        change(region, x)

    with pytest.raises(error) as caught:
        loss.backward()
    assert re.search(message, " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])]), re.DOTALL)


def test_saved_tensor_that_the_forward_writes_to_raises_autograds_error() -> None:
    def computation(x: Tensor) -> Tensor:
        y = x.exp()
        y.add_(1)
        return y.sin()

    region = Run(computation)
    with Regions({region: ALL}):
        loss = region(leaf()).sum()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (lambda x: x.sin(), r"its forward to save 3 tensors whenever it is run; found 1\."),
        (lambda x: x[:2].sin() * 1, r"to save \[4, 4\] of torch.float32 as number 0 .* found \[2, 4\] of torch.float32\."),
        (lambda x: x.double().sin(), r"found \[4, 4\] of torch.float64\."),
    ],
)
def test_recompute_that_saves_something_else_raises(second: Callable[[Tensor], Tensor], message: str) -> None:
    region, x = Run(lambda x: (x.sin() * x).exp()), leaf()
    region.computation = lambda x: (x.sin() * x.detach().requires_grad_()) if region.num_runs == 1 else second(x)
    with Regions({region: ALL}):
        loss = region(x).sum()

    with pytest.raises(ReplayMismatchError, match=message):
        loss.backward()


def test_error_of_the_recompute_reaches_the_user_and_the_backward_can_be_run_again() -> None:
    def computation(x: Tensor) -> Tensor:
        y = x.sin()
        if region.num_runs == 2:
            raise torch.OutOfMemoryError
        return (y * x).exp()

    region, x = Run(computation), leaf()
    wanted = torch.autograd.grad((x.sin() * x).exp().sum(), x)
    with Regions({region: ALL}):
        loss = region(x).sum()
    with pytest.raises(torch.OutOfMemoryError):
        torch.autograd.grad(loss, x, retain_graph=True)

    assert_same_bits(torch.autograd.grad(loss, x), wanted)
    assert not torch.is_autocast_enabled("cpu")


def test_error_in_the_forward_ends_the_region() -> None:
    def computation(x: Tensor) -> Tensor:
        x.sin()
        raise ZeroDivisionError

    failing, region, x = Run(computation), Run(sines), leaf()
    wanted = torch.autograd.grad(sines(x).sum(), x)
    with Regions({failing: ALL, region: ALL}):
        with pytest.raises(ZeroDivisionError):
            failing(x)
        loss = region(x).sum()

    assert_same_bits(torch.autograd.grad(loss, x), wanted)


def test_hooks_of_the_user_are_off_after_an_interrupt() -> None:
    def interrupt(x: Tensor) -> Tensor:
        raise KeyboardInterrupt

    region = Run(interrupt)
    with Regions({region: ALL}), pytest.raises(KeyboardInterrupt), torch.autograd.graph.save_on_cpu():
        region(leaf())

    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_transform_is_no_region() -> None:
    region, x = Run(sines), leaf(3, 4)
    wanted = torch.func.vmap(torch.func.grad(lambda x: sines(x).sum()))(x.detach())
    with Regions({region: ALL}):
        found = torch.func.vmap(torch.func.grad(lambda x: region(x).sum()))(x.detach())
        loss = torch.func.vmap(region)(x).sum()

    assert_same_bits([found], [wanted])
    assert_same_bits(torch.autograd.grad(loss, x), torch.autograd.grad(sines(x).sum(), x))
