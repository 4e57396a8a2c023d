"""Steps of other sizes than recorded ones, or that never repeat: layers are recomputed as a whole, as many as the budget asks
for at each size, and nothing is recorded."""

from __future__ import annotations

import functools
import itertools
import logging
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import memkit
from memkit.activations.budgeting.learning import Learning
from memkit.activations.budgeting.state import budget_states
from memkit.activations.context import ForwardContext
from memkit.activations.saved import state
from memkit.core.hooks import innermost_pack
from memkit.device import Device, ReferenceDevice
from memkit.errors import ReplayMismatchError
from tests.activations.budgeting.allocator import CountingDevice
from tests.activations.budgeting.plans import Make
from tests.activations.budgeting.test_regions_and_copies import BlockNet
from tests.activations.budgeting.test_semantics import STEPS, Net, words_inside
from tests.activations.cases import Seeing, assert_same_bits
from tests.activations.remat.conftest import NO_PLAN_FITS
from tests.calls import num_calls

IN_VAIN, EXCEEDS = "no plan holds for these steps", "with all its layers recomputed"
pytestmark = [pytest.mark.filterwarnings(NO_PLAN_FITS), pytest.mark.filterwarnings(f"ignore:.*({IN_VAIN}|{EXCEEDS})")]

Contexts = Callable[..., ForwardContext]
"""Takes a tag, a device, and perhaps a budget."""
LEAST = 0.01
"""A budget that no layer fits into."""


_STATELESS = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
"""Nothing is left free for its states."""


def _budget(tag: str, device: Device, budget: str | float = 0.6) -> ForwardContext:
    return memkit.MemoryBudget(budget, tag, optimizer=_STATELESS, min_bytes=0, device=device)


def _remat(tag: str, device: Device, budget: str | float = 0.4) -> ForwardContext:
    return memkit.Rematerialize(budget, tag, min_bytes=0, device=device)


@pytest.fixture(params=[_budget, _remat], ids=["MemoryBudget", "Rematerialize"])
def context(request: pytest.FixtureRequest) -> Contexts:
    found: Contexts = request.param
    return found


def _net(device: Device) -> BlockNet:
    torch.manual_seed(0)
    return BlockNet().to(device.torch_device)


def _rows(rows: int, device: Device) -> Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(rows)).to(device.torch_device)


def _bits(net: nn.Module, train: Callable[[], Tensor]) -> list[Tensor]:
    """Return the bits of a step, which leaves the buffers unchanged."""
    before = [buffer.clone() for buffer in net.buffers()]
    net.zero_grad()
    torch.manual_seed(3)
    loss = train()
    found = [loss.detach().clone(), torch.get_rng_state(), *[buffer.clone() for buffer in net.buffers()]]
    found += [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
    for buffer, value in zip(net.buffers(), before, strict=True):
        buffer.copy_(value)
    return found


def _of_rows(net: nn.Module, rows: int, device: Device, make: Make) -> Tensor:
    with make():
        loss: Tensor = net(_rows(rows, device)).square().sum()
    loss.backward()
    return loss


def _learn_in_vain(net: nn.Module, make: Make, device: Device) -> None:
    for rows in (5, 6, 7):
        _of_rows(net, rows, device, make)
    net.zero_grad()
    if isinstance(net, Net):
        net.norm.reset_running_stats()


# What is done


@pytest.mark.parametrize("is_attached", [False, True])
def test_steps_of_ever_other_sizes_are_exact_and_not_recorded_but_for_the_first(
    is_attached: bool, context: Contexts, device: Device
) -> None:
    net = _net(device)
    make = functools.partial(context, "sizes", device)
    is_recorded, found, told = list[bool](), list[list[Tensor]](), list[str]()

    if is_attached:
        memkit.attach(net, make())
    for rows in range(4, 12):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found.append(_bits(net, functools.partial(_of_rows, net, rows, device, nullcontext if is_attached else make)))
        told += [str(warning.message) for warning in caught if IN_VAIN in str(warning.message)]
        is_recorded.append(memkit.stats("sizes").is_recorded)
    assert 0 < memkit.stats("sizes").num_replays <= 6
    if is_attached:
        memkit.detach(net)

    assert_same_bits(
        list(itertools.chain.from_iterable(found)),
        [bit for rows in range(4, 12) for bit in _bits(net, functools.partial(_of_rows, net, rows, device, nullcontext))],
    )
    assert is_recorded == [True] + [False] * 7
    assert not told
    assert innermost_pack() is None


def test_each_layer_runs_twice_and_nothing_else(context: Contexts) -> None:
    device = ReferenceDevice()
    net, make = _net(device), functools.partial(context, "twice", device, LEAST)
    _learn_in_vain(net, make, device)
    runs = dict[str, int]()

    def counted(name: str, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        runs[name] = runs.get(name, 0) + 1
        return forward(x)

    names = {f"{name}.layer": module.layer for name, module in net.named_modules() if hasattr(module, "layer")}
    with pytest.MonkeyPatch.context() as patch:
        for name, module in (names | {"norm": net.norm}).items():
            patch.setattr(module, "forward", functools.partial(counted, name, module.forward))
        with Seeing() as plain:
            loss = net(_rows(20, device)).square().sum()
        runs.clear()
        with make(), Seeing() as seeing:
            loss = net(_rows(21, device)).square().sum()
        loss.backward()

    assert runs == {**dict.fromkeys(names, 2), "norm": 1}
    assert len(seeing.ops) <= len(plain.ops)


def test_as_many_layers_are_kept_as_the_budget_leaves_room_for_at_each_size() -> None:
    device, num_layers = CountingDevice(), 8
    net = _Stack(num_layers)

    def peak_of(rows: int, make: Make) -> int:
        net.zero_grad()
        device.allocator.begin()
        with device.counting(net):
            _of_rows(net, rows, device, make)
        return device.allocator.step_peak_bytes

    plain = {rows: peak_of(rows, nullcontext) for rows in (30, 40, 50, 60, 64)}
    budget, found = int(0.6 * plain[64]), dict[int, list[tuple[int, int]]]()
    for rows in (40, 50, 30, 60, 45, 35, 64, 30, 40, 50, 60, 64):
        peak_bytes = peak_of(rows, functools.partial(_budget, "room", device, f"{budget}B"))
        found.setdefault(rows, []).append((peak_bytes, memkit.stats("room").num_replays))

    assert all(peak_bytes <= budget for steps in found.values() for peak_bytes, _ in steps)
    kept = {rows: num_layers - steps[-1][1] for rows, steps in found.items()}
    assert kept[30] == num_layers or plain[30] > budget
    assert kept[30] >= kept[40] >= kept[50] >= kept[60] >= kept[64] > 0
    per_layer = (plain[64] - found[64][-1][0]) / (num_layers - kept[64])
    assert found[64][-1][0] > budget - 1.2 * per_layer  # one more would not have fitted


def test_large_step_after_small_ones_is_not_refused_by_a_guess() -> None:
    """What it takes is known to be at least as much as small steps foretell, which is not the most that it may take."""
    device, net, peaks = CountingDevice(), _Stack(8), list[int]()
    with device.counting(net) as allocator:
        _of_rows(net, 400, device, nullcontext)
        net.zero_grad()
        allocator.begin()
        _of_rows(net, 400, device, nullcontext)
        budget = int(0.7 * allocator.step_peak_bytes)
        for rows in (20, 25, 25, 400, 400):
            net.zero_grad()
            allocator.begin()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                _of_rows(net, rows, device, functools.partial(_budget, "guess", device, f"{budget}B"))
            peaks.append(allocator.step_peak_bytes)

    assert max(peaks) <= budget


@pytest.mark.parametrize("is_attached", [False, True])
def test_sizes_that_fit_and_one_that_does_not_take_turns(is_attached: bool) -> None:
    """Also once the large one has come often: what is known to fit is a size, not a step."""
    device, net, peaks, recorded = CountingDevice(), _Stack(8), list[int](), list[bool]()
    with device.counting(net) as allocator:
        for rows in (400, 400):
            net.zero_grad()
            allocator.begin()
            _of_rows(net, rows, device, nullcontext)
        budget = int(0.6 * allocator.step_peak_bytes)
        make: Make = functools.partial(_budget, "turns", device, f"{budget}B")
        if is_attached:
            memkit.attach(net, make())
        for rows in (
            100,
            100,
            60,
            100,
            400,
            100,
            100,
            400,
            60,
            400,
            60,
            100,
            60,
            60,
            400,
            100,
            400,
            400,
            400,
            60,
            400,
            100,
            400,
        ):
            net.zero_grad()
            allocator.begin()
            _of_rows(net, rows, device, nullcontext if is_attached else make)
            peaks.append(allocator.step_peak_bytes)
            recorded.append(memkit.stats("turns").is_recorded)

    assert max(peaks) <= budget
    assert is_attached or not any(recorded[8:])


class _OfDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _Mlp()

    def forward(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"x": self.inner(given["x"])}


class _Windowed(nn.Module):
    """Computes on at most some rows."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.inner, self.most = _Mlp(), most

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.inner(x[: self.most]), x[self.most :]])


class _InARow(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        given = {"x": x} if isinstance(self[0], _OfDict) else x
        for layer in self:
            given = layer(given)
        return given["x"] if isinstance(given, dict) else given


@pytest.mark.parametrize(
    "make",
    [
        lambda: _InARow(*(_OfDict() for _ in range(6))),
        lambda: _InARow(*(_Windowed(0 if number == 3 else 1000) for number in range(6))),  # an expert without tokens
        lambda: _InARow(*(_Windowed(32 if number % 4 == 0 else 1000) for number in range(8))),
    ],
    ids=["dict", "no elements", "windows"],
)
def test_layers_whose_sizes_differ_from_the_first_ones_are_exact_and_within_the_budget(make: Callable[[], nn.Module]) -> None:
    device, net, tag = CountingDevice(), make(), "others"
    with device.counting(net) as allocator:
        allocator.begin()
        _of_rows(net, 200, device, nullcontext)
    budget = int(0.7 * allocator.step_peak_bytes)
    for step, rows in enumerate((20, 28, 100, 200, 150, 180, 200)):
        net.zero_grad()
        with device.counting(net):
            allocator.begin()
            _of_rows(net, rows, device, functools.partial(_budget, tag, device, f"{budget}B"))
        assert step == 0 or allocator.step_peak_bytes <= budget
        found = [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
        net.zero_grad()
        _of_rows(net, rows, device, nullcontext)
        assert_same_bits(found, [parameter.grad for parameter in net.parameters() if parameter.grad is not None])


def test_step_that_fails_or_is_refused_changes_nothing_for_later_ones() -> None:
    device, net = CountingDevice(), _Stack(8)
    make = functools.partial(memkit.MemoryBudget, 0.6, "refused", optimizer=_STATELESS, min_bytes=0, device=device, strict=True)
    for rows in (64, 60, 62, 61):
        with device.counting(net):
            _of_rows(net, rows, device, make)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(net.layers[1], "forward", lambda x: 1 / 0)
        with pytest.raises(ZeroDivisionError), device.counting(net):
            _of_rows(net, 59, device, make)
    with device.counting(net):
        _of_rows(net, 58, device, make)
    assert 0 < memkit.stats("refused").num_replays < 8


def test_other_model_under_the_tag_is_recorded_after_one_step(context: Contexts) -> None:
    device = ReferenceDevice()
    recorded = []
    for net, sizes in ((_Stack(3), (9, 10, 11)), (_Stack(4), (12, 13))):
        for rows in sizes:
            _of_rows(net, rows, device, functools.partial(context, "both", device))
            recorded.append(memkit.stats("both").is_recorded)
    assert recorded == [True, False, False, False, True]


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(x)).sin())


class _Stack(nn.Module):
    def __init__(self, num_layers: int, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Mlp() for _ in range(num_layers))
        self.head = nn.Linear(16, 4)
        self.is_checkpointed = is_checkpointed

    def forward(self, x: Tensor, depth: int | None = None) -> Tensor:
        for layer in self.layers[:depth]:
            x = checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x)
        return self.head(x)


def test_no_more_is_held_than_with_a_checkpoint_around_each_layer(context: Contexts) -> None:
    device = ReferenceDevice()
    held = dict[str, int]()
    for name in ("layers", "checkpoints"):
        net = _Stack(6, is_checkpointed=name == "checkpoints")
        make = functools.partial(context, "held", device, LEAST) if name == "layers" else nullcontext
        _learn_in_vain(net, make, device)
        with make(), CountingDevice().counting(nn.Identity()) as allocator:
            loss = net(_rows(64, device)).square().sum()
        held[name] = allocator.allocated_bytes()
        loss.backward()

    assert 0 < held["layers"] <= held["checkpoints"]


@pytest.mark.parametrize(("context", "most"), [(_budget, 95), (_remat, 95)], ids=["MemoryBudget", "Rematerialize"])
def test_step_of_a_new_size_takes_few_calls_for_each_layer(context: Contexts, most: int) -> None:
    device = ReferenceDevice()
    found = []
    for num_layers in (4, 12):
        net = _Stack(num_layers)
        tag = f"calls of {num_layers}"
        make = functools.partial(context, tag, device)
        _learn_in_vain(net, make, device)
        for rows in (8, 9):
            _of_rows(net, rows, device, make)
        found.append(num_calls(functools.partial(_of_rows, net, 40 + num_layers, device, make)))

    assert (found[1] - found[0]) / 8 <= most


# Other steps


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "train",
    [
        pytest.param(step, marks=pytest.mark.slow if number % 6 else ())
        for number, step in enumerate(STEPS)
        if step != words_inside
    ],
    ids=lambda train: train.__name__,
)
def test_steps_of_other_kinds_are_exact(
    train: Callable[[Net, Device, Make], None], context: Contexts, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if train.__name__ == "double_backward_outside" and device.torch_device.type == "cuda":
        pytest.skip("in which order a second backward sums depends on how many nodes the engine's thread has ever made")
    monkeypatch.setattr(state, "_OFTEN", 1000)  # sizes that come again are not recorded
    net, make = _net(device), functools.partial(context, "kinds", device)
    _learn_in_vain(net, make, device)

    def run(used: Make) -> Tensor:
        train(net, device, used)
        return torch.zeros(())

    for _ in range(2):
        assert_same_bits(_bits(net, functools.partial(run, make)), _bits(net, functools.partial(run, nullcontext)))
    assert not memkit.stats("kinds").is_recorded
    assert memkit.stats("kinds").live_records == 0


@pytest.mark.parametrize("is_in_backward", [False, True])
def test_steps_after_an_exception_are_exact_and_not_recorded(is_in_backward: bool, context: Contexts, device: Device) -> None:
    net, make = _net(device), functools.partial(context, "fails", device)
    _learn_in_vain(net, make, device)

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if not is_in_backward:
                raise ArithmeticError("injected")
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise ArithmeticError("injected")

    def fail(rows: int) -> None:
        with make():
            Failing.apply(net(_rows(rows, device)).sum()).backward()

    for rows in (8, 9):
        with pytest.raises(ArithmeticError, match="injected"):
            fail(rows)
        net.norm.reset_running_stats()
        with torch.no_grad():
            net.eval()(_rows(3, device))
        net.train()
        found = [_bits(net, functools.partial(_of_rows, net, 10 + rows, device, used)) for used in (make, nullcontext)]
        assert_same_bits(*found)
        assert not memkit.stats("fails").is_recorded


def test_autocast_and_accumulated_gradients_are_exact(context: Contexts, device: Device) -> None:
    net, make = _net(device), functools.partial(context, "cast", device)

    def train(seed: int, used: Make) -> Tensor:
        for rows in (seed, seed + 20):
            with torch.autocast(device.torch_device.type, torch.bfloat16), used():
                loss: Tensor = net(_rows(rows, device)).square().sum()
            (loss / 2).backward()
        return loss

    for seed in range(4, 8):
        assert_same_bits(*[_bits(net, functools.partial(train, seed, used)) for used in (make, nullcontext)])
    assert not memkit.stats("cast").is_recorded


def test_layer_that_is_not_exact_is_told_once_and_ops_are_recorded_from_then_on(context: Contexts) -> None:
    device = ReferenceDevice()
    net, make = _Stack(3), functools.partial(context, "fickle", device, LEAST)
    _learn_in_vain(net, make, device)
    signs = itertools.cycle((True, False))
    net.layers[1].forward = lambda x: x.sin().sin() if next(signs) else x.exp()

    with pytest.raises(ReplayMismatchError, match="recomputed as a whole"):
        _of_rows(net, 12, device, make)
    del net.layers[1].forward
    _of_rows(net, 13, device, make)
    assert memkit.stats("fickle").is_recorded


@pytest.mark.parametrize("by_reset", [False, True])
def test_word_or_reset_of_the_user_has_ops_recorded_again(by_reset: bool, context: Contexts) -> None:
    device = ReferenceDevice()
    net, make = _Stack(3), functools.partial(context, "word", device)
    _learn_in_vain(net, make, device)
    for is_recorded in (False, True):
        with make():
            hidden = net(_rows(11 + is_recorded, device)).exp()
            loss = (hidden if by_reset else memkit.recompute(hidden)).sin().sum()
        loss.backward()
        assert memkit.stats("word").is_recorded == is_recorded
        if by_reset:
            memkit.reset("word")


# When


def test_layers_that_no_recorded_step_has_called_are_recomputed_as_well(context: Contexts) -> None:
    device = ReferenceDevice()
    net, make = _Stack(5), functools.partial(context, "skipped", device)
    for depth, rows in ((2, 5), (2, 6), (2, 7), (5, 8)):
        with make():
            loss = net(_rows(rows, device), depth).square().sum()
        loss.backward()

    assert memkit.stats("skipped").num_replays == 5


@pytest.mark.parametrize(("sizes", "num_planned"), [((4, 9) * 8, 4), ((4, 4, 4, 5, 4, 4, 4, 6, 4, 4, 4, 7, 4, 4), 1)])
def test_steps_of_a_few_kinds_are_planned_for_and_few_in_vain_among_many_are_forgiven(
    sizes: tuple[int, ...], num_planned: int, context: Contexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "_VAIN_AMONG", 6)
    device = ReferenceDevice()
    net, make = _Stack(3), functools.partial(context, "few", device)
    follows = []
    for rows in sizes:
        _of_rows(net, rows, device, make)
        follows.append(memkit.stats("few").follows_plan)

    assert all(follows[-num_planned:])


def _recorded(net: nn.Module, budget: str, num_steps: int) -> list[bool]:
    """Return which steps of one size under a budget were recorded."""
    device, found = ReferenceDevice(), []
    for _ in range(num_steps):
        _of_rows(net, 64, device, functools.partial(_budget, "tight", device, budget))
        found.append(memkit.stats("tight").is_recorded)
    return found


@pytest.mark.slow
def test_plan_that_exceeds_the_budget_gives_way_to_layers_that_take_less(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _recorded(_Stack(6), "16KiB", 9) == [True] * 9  # single ops take less

    memkit.reset("tight")
    monkeypatch.setattr(Learning, "takes_less", lambda *_: True)
    assert _recorded(_Stack(6), "16KiB", 9) == [True] * 5 + [False] * 4


class _Experts(nn.Module):
    """Tokens choose their experts, so the numbers of tokens differ from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList(_Mlp() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        out, chosen = x.clone(), weights.argmax(-1)
        for number, expert in enumerate(self.experts):
            (token,) = (chosen == number).nonzero(as_tuple=True)
            if len(token):
                out = out.index_add(0, token, expert(x[token]) * weights[token, number, None])
        return out


def test_layers_whose_routes_change_are_exact(context: Contexts, device: Device) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), *[nn.Sequential(nn.LayerNorm(16), _Experts()) for _ in range(4)])
    net, make = net.to(device.torch_device), functools.partial(context, "routes", device)
    for seed in range(6):
        x = torch.randn(24, 16, generator=torch.Generator().manual_seed(seed)).to(device.torch_device)

        def train(used: Make, x: Tensor = x) -> Tensor:
            with used():
                loss: Tensor = net(x).square().sum()
            loss.backward()
            return loss

        assert_same_bits(*[_bits(net, functools.partial(train, used)) for used in (make, nullcontext)])
    assert not memkit.stats("routes").is_recorded


# Models


_SIZE = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
_HEADS = {**_SIZE, "num_key_value_heads": 1}
_T5 = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 3, "num_heads": 2, "dropout_rate": 0.1}
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "Qwen3ForCausalLM": ("Qwen3Config", {**_HEADS, "head_dim": 8}, "3 Qwen3DecoderLayer"),
    "LlamaForCausalLM": ("LlamaConfig", _HEADS, "3 LlamaDecoderLayer"),
    "MixtralForCausalLM": ("MixtralConfig", {**_HEADS, "num_local_experts": 4}, "3 MixtralDecoderLayer"),
    "T5ForConditionalGeneration": ("T5Config", {**_T5, "decoder_start_token_id": 0}, "T5Block"),
}


@pytest.mark.slow
@pytest.mark.integrations
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers_are_exact(name: str, context: Contexts, device: Device) -> None:
    config, options, layers = MODELS[name]
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    net = getattr(transformers, name)(getattr(transformers, config)(**options, use_cache=False)).to(device.torch_device).train()
    make = functools.partial(context, "models", device)

    def train(tokens: Tensor, used: Make) -> Tensor:
        with used():
            loss: Tensor = net(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return loss

    for length in range(9, 14):
        tokens = torch.randint(2, 64, (2, length), generator=torch.Generator().manual_seed(length)).to(device.torch_device)
        assert_same_bits(*[_bits(net, functools.partial(train, tokens, used)) for used in (make, nullcontext)])

    assert not memkit.stats("models").is_recorded
    found = (budget_states.get("models") or state.remat_states["models"]).layers
    assert found is not None
    assert layers in found.described


@pytest.mark.slow
@pytest.mark.integrations
def test_layers_that_are_given_a_cache_are_named_and_left_out(context: Contexts, caplog: pytest.LogCaptureFixture) -> None:
    transformers = pytest.importorskip("transformers")
    device = ReferenceDevice()
    net = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZE)).train()

    def train(length: int) -> None:
        tokens = torch.randint(2, 64, (2, length))
        with context("cache", device):
            loss = net(input_ids=tokens, labels=tokens).loss
        loss.backward()

    train(9)
    with caplog.at_level(logging.INFO, logger="memkit"):
        train(12)
    assert re.search(r'LlamaMLP.*"model.layers.\*" is not among them: it is given an object that it may', caplog.text)
