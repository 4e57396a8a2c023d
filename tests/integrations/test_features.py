"""What the callbacks share: which features they take, how a model that streams stays in place, figures, what is missing."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
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


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(6)])


def _offload(model: nn.Module, **given: Any) -> memkit.LayerOffload:
    return memkit.LayerOffload(model, offload_ratio=1.0, device=ReferenceDevice(), **given)


def _cpu_offload(tag: str = "features") -> memkit.CPUOffload:
    return memkit.CPUOffload(1.0, tag, min_bytes=0, device=ReferenceDevice())


# What is given


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([], TypeError, r'Callback needs a feature, such as memkit.MemoryBudget\("12GiB"\); found none'),
        (["12GiB"], TypeError, "Callback needs features such as .* found '12GiB'"),
        ([memkit.MemoryBudget], TypeError, "Callback needs features such as .* found <class 'memkit.*MemoryBudget'>"),
        ([_cpu_offload(), _cpu_offload("other")], ValueError, "needs at most one CPUOffload; found two. Leave one of them out"),
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


# What does not go together


@pytest.mark.parametrize(
    ("train", "loop", "message"),
    [
        ("host", {"shards": "fsdp=..."}, "moves the weights, and so does fsdp=.... Use one of the two"),
        ("host", {"num_processes": 2}, 'train="host" takes gradients away that 2 processes would reduce'),
        ("host", {"scales": "fp16=True"}, "fp16=True scales gradients by torch's GradScaler, .* Use bfloat16"),
        ("host", {"casts": "bf16_full_eval=True"}, "bf16_full_eval=True casts the model, whose layers stream"),
        ("host", {"device": torch.device("cuda:0")}, 'layers stream to cpu, and inputs go to cuda:0. Make .*device="cuda:0"'),
    ],
)
def test_loop_that_streaming_is_not_exact_under_is_refused(train: str, loop: dict[str, Any], message: str) -> None:
    features = Features("Callback", [_offload(_model(), train=train)])
    settings = {"device": torch.device("cpu"), **loop}

    with pytest.raises(ValueError, match=message):
        refuse(features, Loop(**settings))

    features.close()


def test_frozen_layers_stream_in_several_processes_and_under_a_scale() -> None:
    features = Features("Callback", [_offload(_model().requires_grad_(False))])

    refuse(features, Loop(device=torch.device("cpu"), num_processes=2, scales="fp16=True", takes_gradients="a norm"))

    features.close()


def test_offload_may_be_compiled_and_checkpointed() -> None:
    features = Features("Callback", [_cpu_offload()])

    refuse(features, Loop(device=torch.device("cpu"), compiles="torch_compile=True", checkpoints="checkpointing"))


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
