"""Features in the trainings of other libraries: the weights of the plain run, bit for bit, also from a checkpoint of either."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memkit
from memkit.device import ReferenceDevice
from memkit.integrations import features
from memkit.integrations.features import Features
from memkit.optimizers import unwrapped
from tests.integrations.cases import (
    EVERY_FEATURE,
    MARKS,
    Make,
    assert_has_worked,
    assert_same_weights,
    in_backward,
    tiny_budget,
    tiny_layers,
    tiny_layers_and_remat,
    tiny_offload,
    tiny_remat,
    tiny_states,
)
from tests.integrations.runs import LOOPS, Run, rows_loader, with_lightning, with_trainer

pytestmark = MARKS

Plain = Callable[..., nn.Module]
WITH_CALLBACKS: dict[str, Callable[..., Run]] = {
    "Trainer": with_trainer,
    "Lightning": with_lightning,
    "Lightning, two": partial(with_lightning, kind="two"),
    "Lightning, manual": partial(with_lightning, kind="manual"),
}
IN_STEPS = ("Trainer", "Lightning", "Lightning, two")
"""What needs no name of a module."""
TRAINERS = pytest.mark.parametrize("name", ["Trainer", "Lightning"])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """Return what trains without memkit, once for all tests."""
    known: dict[str, nn.Module] = {}

    def run(name: str, **settings: Any) -> nn.Module:
        key = repr((name, settings))
        if key not in known:
            start = WITH_CALLBACKS[name] if name in WITH_CALLBACKS else LOOPS[name][0]
            known[key] = start(tmp_path_factory.mktemp("plain"), None, **settings).model
        return known[key]

    return run


@EVERY_FEATURE
@pytest.mark.parametrize("name", IN_STEPS)
def test_weights_are_those_of_the_plain_run(name: str, make: Make, plain: Plain, tmp_path: Path) -> None:
    """After an epoch, or two, with a smaller last batch."""
    found = WITH_CALLBACKS[name](tmp_path, make)

    assert_same_weights(found.model, plain(name))
    assert_has_worked(found.figures())


@pytest.mark.parametrize(
    ("name", "make"),
    [
        pytest.param(name, make, id=f"{name}-{make.__name__}")
        for name in LOOPS
        for make in (tiny_remat, tiny_layers, *([tiny_states] if name in WITH_CALLBACKS else [tiny_offload]))
    ],
)
def test_resumes_from_a_checkpoint_of_its_own_and_from_a_plain_one(name: str, make: Make, plain: Plain, tmp_path: Path) -> None:
    """Of those with one context, which of them it is makes no difference to what is saved and loaded."""
    run, half = LOOPS[name]
    for saving in (make, None):
        saved = half(tmp_path / ("plain" if saving is None else "memkit"), saving)
        memkit.reset("tiny")  # a tag is for one model
        found = run(tmp_path / "resumed", make, saved)

        assert_same_weights(found.model, plain(name))
        assert_has_worked(found.figures())


_EVALUATED = {"eval_strategy": "steps", "eval_steps": 1}
_SCHEDULED = {"lr_scheduler_type": "cosine", "warmup_steps": 2}
_OF_TRAINER: list[tuple[Make, dict[str, Any]]] = [
    (tiny_layers_and_remat, {"gradient_accumulation_steps": 2}),
    (tiny_layers_and_remat, {**_EVALUATED, "eval_on_start": True}),
    (tiny_layers_and_remat, {"bf16": True}),
    (tiny_layers_and_remat, {"max_grad_norm": 0.5, "optim": "adamw_torch", **_SCHEDULED}),
    (tiny_layers_and_remat, {"save_strategy": "steps", "save_steps": 1, **_EVALUATED, "load_best_model_at_end": True}),
    (tiny_layers_and_remat, {"neftune_noise_alpha": 5.0}),
    (tiny_layers, {"gradient_checkpointing": True}),
    (tiny_offload, {"gradient_checkpointing": True}),
    (tiny_states, {"max_grad_norm": 0.5, "gradient_accumulation_steps": 2, **_EVALUATED, **_SCHEDULED}),
    (tiny_states, {"optim": "schedule_free_adamw", "lr_scheduler_type": "constant", **_EVALUATED}),
]
_OF_LIGHTNING: list[tuple[Make, dict[str, Any]]] = [
    (tiny_layers_and_remat, {"accumulate_grad_batches": 2, "max_epochs": 4}),
    (tiny_layers_and_remat, {"gradient_clip_val": 0.5}),
    (tiny_layers_and_remat, {"precision": "bf16-mixed"}),
    (in_backward, {}),
]
SETTINGS = [
    *(("Trainer", *given) for given in _OF_TRAINER),
    *((name, *given) for name in ("Lightning", "Lightning, two") for given in _OF_LIGHTNING),
    ("Lightning, manual", in_backward, {}),
]


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize(("name", "make", "settings"), SETTINGS, ids=range(len(SETTINGS)))
def test_weights_are_those_of_the_plain_run_under_other_settings(
    name: str, make: Make, settings: dict[str, Any], plain: Plain, tmp_path: Path
) -> None:
    found = WITH_CALLBACKS[name](tmp_path, make, **settings)

    assert_same_weights(found.model, plain(name, **settings))
    assert_has_worked(found.figures())


@pytest.mark.parametrize("name", IN_STEPS)
def test_evaluation_is_no_iteration(name: str, tmp_path: Path) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 1} if name == "Trainer" else {}
    WITH_CALLBACKS[name](tmp_path, tiny_remat, **settings)

    assert memkit.stats("tiny").num_iterations == 4


@TRAINERS
def test_budget_is_told_of_the_optimizer_that_steps(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(Features, "begin", lambda _, __, optimizer, **___: told.append(optimizer))

    trainer = WITH_CALLBACKS[name](tmp_path, tiny_budget, max_steps=1).trainer

    own = trainer.optimizer if name == "Trainer" else trainer.optimizers[0]
    assert [*map(unwrapped, told)] == [unwrapped(own)]


@TRAINERS
def test_layers_go_on_streaming_for_evaluations_and_saving(name: str, tmp_path: Path) -> None:
    def evaluated(run: Run) -> Any:
        if name == "Trainer":
            return run.trainer.evaluate()["eval_loss"]
        return run.trainer.validate(run.model, rows_loader(4), verbose=False)

    plain, found = (WITH_CALLBACKS[name](tmp_path, make) for make in (None, tiny_layers))
    fetched = found.figures()["memkit/layers/moved_in_gib"]
    assert evaluated(found) == evaluated(plain)
    assert found.figures()["memkit/layers/moved_in_gib"] > fetched
    if name == "Trainer":
        found.trainer.save_model(str(tmp_path / "saved"))
        assert_same_weights(type(found.model).from_pretrained(tmp_path / "saved"), plain.model)  # type: ignore[attr-defined]
    found.callback.close()
    assert_same_weights(found.model, plain.model)


@TRAINERS
def test_nothing_that_streams_is_moved(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stayed: list[nn.Module] = []
    stay = features._stay
    monkeypatch.setattr(features, "_stay", lambda model, *rest: stayed.append(model) or stay(model, *rest))

    found = WITH_CALLBACKS[name](tmp_path, tiny_layers, max_steps=1)

    # by Trainer itself and by Accelerate; by Lightning to the device, and back
    assert stayed == [found.model if name == "Trainer" else found.model.model] * 2


# What is refused


def _fused(model: nn.Module) -> list[object]:
    return [memkit.LayerOffload(model, offload_ratio=1.0, optimizer=torch.optim.SGD, device=ReferenceDevice())]


REFUSED: list[tuple[str, Make, dict[str, Any], str]] = [
    ("Trainer", tiny_layers, {"bf16_full_eval": True}, "bf16_full_eval=True casts the model, whose layers stream"),
    ("Trainer", tiny_budget, {"torch_compile": True}, "torch_compile=True, which compiles the model as one. Leave that out"),
    ("Trainer", in_backward, {}, r"the norm of all gradients \(max_grad_norm=1.0\), finds none. Leave when= out"),
    ("Trainer", lambda _: [partial(memkit.StateOffload, overlap_forward=True)], {}, "overlap_forward=True needs wait"),
    ("Trainer", _fused, {}, 'train="fused" steps within the backward.*Use train="host", and leave out optimizer='),
    ("Lightning", tiny_layers, {"precision": "bf16-true"}, 'precision="bf16-true" casts the model, whose layers stream'),
    ("Lightning", in_backward, {"gradient_clip_val": 0.5}, "so that gradient_clip_val=0.5 finds none"),
    ("Lightning", in_backward, {"accumulate_grad_batches": 2}, "accumulate_grad_batches=2 adds them up over several"),
    ("Lightning", _fused, {}, "Lightning, which runs the backward within the optimizer's step, finds no gradients"),
]


@pytest.mark.parametrize(("name", "make", "settings", "message"), REFUSED, ids=range(len(REFUSED)))
@pytest.mark.usefixtures("no_dynamo_by_environment")
def test_settings_that_do_not_go_with_a_feature_are_named(
    name: str, make: Make, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        WITH_CALLBACKS[name](tmp_path, make, **settings)
