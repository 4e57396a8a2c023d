"""What the callbacks share: which features they take, how a model that streams stays in place, figures, what is missing."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import memkit
from memkit.core.features import attached_to
from memkit.device import ReferenceDevice
from memkit.errors import LayerOffloadError
from memkit.integrations import keep_in_place
from memkit.integrations.features import Features
from memkit.integrations.refusals import Loop, refuse
from memkit.optimizers import unwrapped


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(6)])


def _offload(model: nn.Module, **given: Any) -> memkit.LayerOffload:
    return memkit.LayerOffload(model, offload_ratio=1.0, device=ReferenceDevice(), **given)


def _cpu_offload(tag: str = "features") -> memkit.CPUOffload:
    return memkit.CPUOffload(1.0, tag, min_bytes=0, device=ReferenceDevice())


STATES = partial(memkit.StateOffload, device=ReferenceDevice())


def _optimizer(model: nn.Module | None = None) -> torch.optim.Optimizer:
    return torch.optim.AdamW((_model() if model is None else model).parameters(), lr=0.01)


def _train(model: nn.Module, optimizer: Any, num_steps: int = 2) -> None:
    for step in range(num_steps):
        torch.manual_seed(step)
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


class _Wrapping(torch.optim.Optimizer):
    """Wraps an optimizer, as Accelerate's does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


def _opened(features: Features) -> list[memkit.StateOffload]:
    assert features.states is not None
    return features.states.opened


# What is given


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([], TypeError, r'Callback needs a feature, such as memkit.MemoryBudget\("12GiB"\); found none'),
        (["12GiB"], TypeError, "Callback needs features such as .* found '12GiB'"),
        ([memkit.MemoryBudget], TypeError, "Callback needs features such as .* found <class 'memkit.*MemoryBudget'>"),
        ([_cpu_offload(), _cpu_offload("other")], ValueError, "needs at most one CPUOffload; found two. Leave one of them out"),
        ([STATES, memkit.StateOffload], ValueError, "Callback needs at most one StateOffload; found two. Leave one of them"),
        ([partial(memkit.StateOffload, _optimizer())], TypeError, "a functools.partial that has one already, AdamW. Leave"),
        ([partial(memkit.StateOffload, budget=1)], TypeError, "Callback: StateOffload got an unexpected keyword.* 'budget'"),
        ([partial(memkit.StateOffload, disk="disk")], TypeError, "disk is a memkit.Disk, such as"),
        ([partial(memkit.StateOffload, when="later")], ValueError, "when is 'step' or 'backward'; found 'later'"),
        ([partial(memkit.LayerOffload, offload_ratio=1.0)], TypeError, "Callback needs features such as .* found functools"),
    ],
)
def test_what_is_no_feature_is_named(given: list[object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Features("Callback", given)


def test_all_is_attached_and_taken_off_together() -> None:
    model = _model()
    features = Features("Callback", [_cpu_offload(), memkit.Rematerialize(0.5, "features", device=ReferenceDevice())])

    features.begin(model, None)
    assert len(attached_to(model)) == 2
    assert features.is_on

    features.end()
    assert attached_to(model) == []
    assert not features.is_on


def test_what_an_earlier_callback_has_left_on_a_model_is_taken_off() -> None:
    model = _model()
    Features("Callback", [_cpu_offload("earlier")]).begin(model, None)

    Features("Callback", [_cpu_offload("later")]).begin(model, None)

    assert ["later" in repr(found) for found in attached_to(model)] == [True]


def test_what_the_user_has_attached_is_not_taken_off() -> None:
    model = _model()
    handle = memkit.attach(model, _cpu_offload())

    with pytest.raises(ValueError, match="attach needs a Sequential without such a context"):
        Features("Callback", [_cpu_offload("later")]).begin(model, None)

    assert attached_to(model) == [handle]


def test_nothing_is_left_where_one_of_several_cannot_be_attached() -> None:
    model = _model()
    handle = memkit.attach(model, _cpu_offload())
    features = Features("Callback", [memkit.Rematerialize(0.5, "features"), _cpu_offload("later")])

    with pytest.raises(ValueError, match="attach needs a Sequential without such a context"):
        features.begin(model, None)

    assert attached_to(model) == [handle]


def test_model_that_was_trained_is_not_kept_alive() -> None:
    model = _model()
    features = Features("Callback", [_cpu_offload()])
    features.begin(model, None)
    model(torch.randn(2, 16)).sum().backward()
    features.end()
    seen = weakref.ref(model)

    del model
    gc.collect()

    assert seen() is None


def test_optimizer_of_the_users_budget_is_the_one_that_counts() -> None:
    model = _model()
    own, other = torch.optim.SGD(model.parameters()), torch.optim.AdamW(model.parameters())
    for given, expected in ((own, own), (None, other)):
        features = Features("Callback", [memkit.MemoryBudget("1MiB", optimizer=given, device=ReferenceDevice())])
        features.begin(model, other)
        (attached,) = attached_to(model)
        assert attached.context._limits.optimizer() is expected  # type: ignore[attr-defined]
        features.end()


# Staying in place


@pytest.mark.parametrize("is_inside", [False, True])
def test_model_that_streams_is_not_moved(is_inside: bool) -> None:
    model, plain = _model(), _model()
    x = torch.randn(2, 16)
    around = nn.ModuleDict({"model": model, "other": nn.Linear(1, 1)}) if is_inside else model

    with keep_in_place(_offload(model)) as offload:
        around.to("meta")
        assert torch.equal(model(x), plain(x))
        assert offload.stats().num_fetches > 0

    assert not is_inside or all(parameter.is_meta for parameter in around["other"].parameters())  # type: ignore[index]
    assert model.to("meta")[0][0].weight.is_meta  # type: ignore[index,union-attr]


def test_model_is_as_it_was_once_nothing_streams() -> None:
    model = _model()
    before = set(vars(model))

    keep_in_place(keep_in_place(_offload(model))).close()

    assert set(vars(model)) == before


def test_cast_of_a_model_that_streams_is_refused_and_changes_nothing() -> None:
    model = _model()
    x = torch.randn(2, 16)
    expected = _model()(x)

    with keep_in_place(_offload(model)):
        with pytest.raises(
            LayerOffloadError, match=r'"0.0.weight" is torch.float32, and was to be torch.float16. Cast the model'
        ):
            model.half()
        assert torch.equal(model(x), expected)


def test_sharing_a_model_that_streams_is_refused_as_ever() -> None:
    model = _model()

    with keep_in_place(_offload(model)) as offload:
        model.share_memory()
        with pytest.raises(LayerOffloadError):
            model(torch.randn(2, 16))
        memkit.detach(model)
    assert offload not in attached_to(model)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (nn.Linear(1, 1), TypeError, "keep_in_place needs a memkit.LayerOffload; found Linear"),
        (None, ValueError, "found one that is closed. Make a new one"),
    ],
)
def test_what_cannot_stay_in_place_is_named(given: Any, error: type[Exception], message: str) -> None:
    if given is None:
        given = _offload(_model())
        given.close()

    with pytest.raises(error, match=message):
        keep_in_place(given)


# Optimizer states


def test_one_that_was_made_already_is_refused() -> None:
    with (
        memkit.StateOffload(_optimizer(), device=ReferenceDevice()) as states,
        pytest.raises(TypeError, match=r"makes the StateOffload itself.*Pass memkit.StateOffload, or functools.partial"),
    ):
        Features("Callback", [states])


# When it is there, and over what


def test_options_are_those_of_the_partial() -> None:
    features = Features("Callback", [partial(STATES, device_budget="1MiB", master=None)])

    features.begin_states([_optimizer()])

    assert _opened(features)[0].plan.is_empty
    features.close()


def test_it_is_over_the_optimizer_inside() -> None:
    optimizer = _optimizer()
    features = Features("Callback", [STATES])

    features.begin_states([_Wrapping(_Wrapping(optimizer))])

    assert _opened(features)[0].optimizer is optimizer is unwrapped(optimizer)
    features.close()


def test_states_are_in_host_memory_until_the_end() -> None:
    model, plain = _model(), _model()
    optimizer, plain_optimizer = _optimizer(model), _optimizer(plain)
    features = Features("Callback", [STATES])

    features.begin_states([optimizer])
    assert features.is_on
    _train(model, optimizer)
    moved = features.figures()["memkit/states/moved_out_gib"]
    features.end()
    _train(model, optimizer)  # by itself again
    _train(plain, plain_optimizer, 2)
    _train(plain, plain_optimizer, 2)

    assert not features.is_on
    assert moved == features.figures()["memkit/states/moved_out_gib"] > 0
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), plain.parameters(), strict=True))


def test_beginning_again_keeps_that_of_the_same_optimizer_and_closes_others() -> None:
    optimizer, other = _optimizer(), _optimizer()
    features = Features("Callback", [STATES])
    features.begin_states([optimizer])
    (made,) = _opened(features)

    features.begin_states([_Wrapping(optimizer)])
    assert _opened(features) == [made]
    features.begin_states([other])

    assert [states.optimizer for states in _opened(features)] == [other]
    assert "closed" in repr(made)
    features.close()
    assert _opened(features) == []


def test_what_an_earlier_run_has_left_is_closed_and_the_users_own_is_not() -> None:
    optimizer = _optimizer()
    earlier, later = Features("Callback", [STATES]), Features("Callback", [STATES])
    earlier.begin_states([optimizer])

    later.begin_states([optimizer])
    assert "closed" in repr(_opened(earlier)[0])
    later.close()
    with STATES(optimizer) as own, pytest.raises(ValueError, match="has a StateOffload already"):
        later.begin_states([optimizer])

    assert own.optimizer is optimizer


def test_none_is_left_where_one_of_several_is_refused() -> None:
    optimizer = _optimizer()
    features = Features("Callback", [STATES])

    with pytest.raises(ValueError, match="needs a closure"):
        features.begin_states([optimizer, torch.optim.LBFGS(_model().parameters())])

    assert _opened(features) == []
    STATES(optimizer).close()


def test_none_is_left_where_another_feature_cannot_be_attached() -> None:
    model = _model()
    handle = memkit.attach(model, memkit.CPUOffload(1.0, "mine", device=ReferenceDevice()))
    features = Features("Callback", [STATES, memkit.CPUOffload(1.0, "other", device=ReferenceDevice())])
    features.begin_states([_optimizer(model)])

    with pytest.raises(ValueError, match="attach needs a Sequential without such a context"):
        features.begin(model, None)

    assert _opened(features) == []
    handle.remove()


def test_training_without_an_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match="Callback needs the optimizer of the training for its StateOffload; the trainer has"):
        Features("Callback", [STATES]).begin_states([])


# What does not go together

CPU = Loop(device=torch.device("cpu"))
SHARDED = {"shards": "fsdp=..."}
Given = Callable[[], list[object]]


def _streaming(train: str = "host") -> list[object]:
    return [_offload(_model().requires_grad_(train == "host"), train=train)]


def _stepping(**options: Any) -> list[object]:
    return [partial(STATES, **options)]


_beside = partial(_stepping, when="backward")
"""Steps within the backward."""
CONTEXTS: dict[str, Given] = {
    "CPUOffload": lambda: [_cpu_offload()],
    "Rematerialize": lambda: [memkit.Rematerialize(0.3, "features", device=ReferenceDevice())],
    "MemoryBudget": lambda: [memkit.MemoryBudget("64KiB", "features", device=ReferenceDevice())],
}
REFUSED: list[tuple[Given, dict[str, Any], str]] = [
    (_streaming, SHARDED, "moves the weights, and so does fsdp=.... Use one of the two"),
    (_streaming, {**SHARDED, "is_fsdp2": True}, r"a LayerOffload moves the weights, and so does fsdp=\.\.\."),
    (_streaming, {"num_processes": 2}, 'train="host" takes gradients away that 2 processes would reduce'),
    (_streaming, {"scales": "fp16=True"}, "fp16=True scales gradients by torch's GradScaler, .* Use bfloat16"),
    (_streaming, {"casts": "bf16_full_eval=True"}, "bf16_full_eval=True casts the model, whose layers stream"),
    (_streaming, {"device": torch.device("cuda:0")}, 'layers stream to cpu, and inputs go to cuda:0. Make .*device="cuda:0"'),
    (_stepping, SHARDED, "moves the optimizer's states, and so does fsdp=.... Use one of the two"),
    (
        partial(_stepping, overlap_forward=True),
        {},
        r"overlap_forward=True needs wait\(\) ahead of .* trainers read them to save. Leave",
    ),
    (_beside, {"clips": "gradient_clip_val=1"}, "so that gradient_clip_val=1 finds none. Leave when= out"),
    (_beside, {"scales": "fp16=True"}, "fp16=True scales them. Use bfloat16"),
    (_beside, {"accumulates": "accumulate_grad_batches=2"}, "accumulate_grad_batches=2 adds them up over sev"),
    (_beside, {"num_processes": 2}, "before 2 processes have reduced them. Leave when= out"),
    (lambda: [*_streaming(), STATES], {}, r'train="host" has the states of streamed layers itself.*Leave the StateOffload out'),
    *(
        (
            given,
            {**SHARDED, "flattens": "FSDP of version 1"},
            r"found FSDP of version 1, which puts those of a layer .* Use FSDP2: fsdp_config",
        )
        for given in (*CONTEXTS.values(), _stepping)
    ),
]
ACCEPTED: list[tuple[Given, dict[str, Any]]] = [
    (partial(_streaming, "frozen"), {"num_processes": 2, "scales": "fp16=True", "takes_gradients": "a norm"}),
    (lambda: [*_streaming("frozen"), STATES], {}),
    (_stepping, {"clips": "a norm", "scales": "fp16=True", "accumulates": "two", "num_processes": 2}),
    (CONTEXTS["CPUOffload"], {"compiles": "torch_compile=True", "checkpoints": "checkpointing"}),
    *((given, {**SHARDED, "is_fsdp2": True}) for given in (*CONTEXTS.values(), _stepping)),
]


@pytest.mark.parametrize(("given", "loop", "message"), REFUSED, ids=range(len(REFUSED)))
def test_loop_that_a_feature_does_not_go_with_is_refused(given: Given, loop: dict[str, Any], message: str) -> None:
    features = Features("Callback", given())

    with pytest.raises(ValueError, match=message):
        refuse(features, replace(CPU, **loop))

    features.close()


@pytest.mark.parametrize(("given", "loop"), ACCEPTED, ids=range(len(ACCEPTED)))
def test_loop_that_a_feature_goes_with_is_not_refused(given: Given, loop: dict[str, Any]) -> None:
    features = Features("Callback", given())

    refuse(features, replace(CPU, **loop))

    features.close()


# Figures


def test_figures_are_the_live_values_of_contexts_that_have_run() -> None:
    model = _model()
    features = Features("Callback", [_cpu_offload("ran"), memkit.Rematerialize(0.5, "never", device=ReferenceDevice())])
    assert features.figures() == {}

    with _cpu_offload("ran"):
        out = model(torch.randn(2, 16))
    out.sum().backward()

    assert features.figures() == memkit.live_values("ran")
    assert features.figures()["memkit/ran/moved_gib"] > 0


def test_figures_of_contexts_without_a_tag_are_left_out() -> None:
    with _cpu_offload():  # that there is something under another tag
        _model()(torch.randn(2, 16)).sum().backward()

    assert Features("Callback", [memkit.no_offload()]).figures() == {}


def test_figures_of_layers_are_those_that_stream() -> None:
    features = Features("Callback", [_offload(_model()), _offload(_model())])
    for offload in features.offloads:
        offload.model(torch.randn(2, 16)).sum().backward()
    one, other = features.offloads

    assert features.figures() == memkit.live_values(one, other)
    one.close()
    assert features.figures() == memkit.live_values(other)
    features.close()
    assert features.figures() == {}


# What is imported


def test_libraries_are_imported_by_their_callbacks_alone() -> None:
    code = (
        "import sys, memkit.integrations, memkit.integrations.trainer, memkit.integrations.lightning; "
        "print([name for name in ('transformers', 'accelerate', 'lightning', 'pytorch_lightning') if name in sys.modules])"
    )

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_unknown_name_is_an_attribute_error() -> None:
    for module in (memkit.integrations, sys.modules["memkit.integrations.features"]):
        with pytest.raises(AttributeError, match="has no attribute 'Callback'"):
            module.Callback  # noqa: B018


# In Accelerate


def test_gradients_that_accelerate_scales_are_stepped_as_without() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.Accelerator(cpu=True)
    models = [_model(), _model()]
    for model, given in zip(models, ([], [STATES]), strict=True):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        wrapped = accelerate.optimizer.AcceleratedOptimizer(_optimizer(model), scaler=scaler)
        features = Features("Callback", [*given, memkit.no_offload()])
        features.begin_states([wrapped])
        for step in range(3):
            torch.manual_seed(step)
            scaler.scale(model(torch.randn(4, 16)).square().mean() * (float("inf") if step == 1 else 1.0)).backward()
            wrapped.step()
            assert wrapped.step_was_skipped == (step == 1)
            wrapped.zero_grad()
        features.close()

    assert all(torch.equal(one, other) for one, other in zip(*(model.parameters() for model in models), strict=True))
