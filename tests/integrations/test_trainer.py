"""`MemkitCallback` in the Hugging Face Trainer: the weights of the plain run, bit for bit, and nothing left behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memkit
from memkit.core.calls import Around
from memkit.core.features import attached_to
from memkit.device import ReferenceDevice
from memkit.integrations import features
from tests.integrations.cases import (
    EVERY_FEATURE,
    MARKS,
    MISSING,
    THAT_CHECKPOINTS_SEE,
    Make,
    assert_has_worked,
    assert_same_weights,
    llama,
    tiny_budget,
    tiny_layers,
    tiny_layers_and_offload,
    tiny_layers_and_remat,
    tiny_offload,
    tiny_remat,
    tiny_states,
    token_rows,
)

transformers = pytest.importorskip("transformers", reason=MISSING)
pytest.importorskip("accelerate", reason=MISSING)

from memkit.integrations import MemkitCallback  # noqa: E402  # not before it is known to be there

pytestmark = MARKS


def _arguments(folder: Path, **settings: Any) -> Any:
    return transformers.TrainingArguments(
        **{
            "output_dir": str(folder),
            "use_cpu": True,
            "report_to": "none",
            "per_device_train_batch_size": 4,
            "max_steps": 4,
            "logging_steps": 1,
            "save_strategy": "no",
            "disable_tqdm": True,
            "seed": 3,
            **settings,
        }
    )


def _trainer(folder: Path, model: nn.Module, callback: object = None, **settings: Any) -> Any:
    rows = [{"input_ids": row, "labels": row} for row in token_rows()]
    return transformers.Trainer(
        model,
        _arguments(folder, **settings),
        train_dataset=rows,
        eval_dataset=rows[:5],
        callbacks=[] if callback is None else [callback],
    )


def _train(folder: Path, make: Make | None, resume: str | None = None, **settings: Any) -> tuple[nn.Module, Any]:
    """Train a new model, and return it, and the callback."""
    model = llama()
    callback = None if make is None else MemkitCallback(*make(model))
    _trainer(folder, model, callback, **settings).train(resume_from_checkpoint=resume)
    return model, callback


Plain = Callable[..., tuple[nn.Module, Path]]


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """Return what trains under some settings without memkit, once for all tests: the model, and the folder of the run."""
    known: dict[str, tuple[nn.Module, Path]] = {}

    def run(**settings: Any) -> tuple[nn.Module, Path]:
        found = known.get(repr(settings))
        if found is None:
            folder = tmp_path_factory.mktemp("plain")
            found = known[repr(settings)] = _train(folder, None, **settings)[0], folder
        return found

    return run


@EVERY_FEATURE
def test_weights_after_an_epoch_with_a_smaller_last_batch_are_those_of_the_plain_run(
    make: Make, plain_run: Plain, tmp_path: Path
) -> None:
    plain, _ = plain_run()

    model, callback = _train(tmp_path / "memkit", make)

    assert_same_weights(model, plain)
    assert_has_worked(callback.figures())


@THAT_CHECKPOINTS_SEE
def test_resumes_from_a_checkpoint_of_its_own_and_from_a_plain_one(make: Make, plain_run: Plain, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2}
    plain, plain_folder = plain_run(**saving)
    _train(tmp_path / "memkit", make, **saving)

    for folder in (tmp_path / "memkit", plain_folder):
        model, _ = _train(tmp_path / "resumed", make, resume=str(folder / "checkpoint-2"))

        assert_same_weights(model, plain)


@pytest.mark.covering(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_accumulation_steps": 2},
        {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True},
        {"bf16": True},
        {"max_grad_norm": 0.5, "optim": "adamw_torch", "lr_scheduler_type": "cosine", "warmup_steps": 2},
        {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True},
        {"neftune_noise_alpha": 5.0},
    ],
    ids=["accumulation", "evaluation", "bf16", "clipping", "best model", "neftune"],
)
def test_weights_are_those_of_the_plain_run_under_other_settings(
    settings: dict[str, Any], plain_run: Plain, tmp_path: Path
) -> None:
    plain, _ = plain_run(**settings)

    model, callback = _train(tmp_path / "memkit", tiny_layers_and_remat, **settings)

    assert_same_weights(model, plain)
    assert_has_worked(callback.figures())


@pytest.mark.slow
def test_evaluation_is_no_iteration(tmp_path: Path) -> None:
    _train(tmp_path, tiny_budget, eval_strategy="steps", eval_steps=1)

    assert memkit.stats("tiny").num_iterations == 4


def test_budget_is_told_of_the_optimizer_that_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contexts: list[Any] = []
    monkeypatch.setattr("memkit.integrations.features.attach", lambda _, context: contexts.append(context))
    model = llama()
    callback = MemkitCallback(*tiny_budget(model))
    trainer = _trainer(tmp_path, model, callback, max_steps=1)
    monkeypatch.setattr(callback._features, "end", lambda: None)

    trainer.train()

    assert contexts[0]._limits.optimizer() is trainer.optimizer.optimizer


def test_logs_say_what_was_predicted_and_taken(tmp_path: Path) -> None:
    model = llama()
    trainer = _trainer(tmp_path, model, MemkitCallback(*tiny_budget(model)), save_strategy="steps", save_steps=4)
    trainer.train()

    last = [line for line in trainer.state.log_history if "loss" in line][-1]
    assert last["memkit/tiny/budget_gib"] == 200 / 2**20
    assert 0 < last["memkit/tiny/predicted_peak_gib"] <= last["memkit/tiny/budget_gib"]
    assert 0 < last["memkit/tiny/peak_gib"] <= last["memkit/tiny/budget_gib"]
    assert last["memkit/tiny/step_ms"] > 0
    assert "memkit/tiny/predicted_peak_gib" not in trainer.state.log_history[0]  # nothing is planned yet
    saved = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    assert saved[3]["memkit/tiny/step_ms"] == last["memkit/tiny/step_ms"]


def test_logs_reach_callbacks_that_come_later(tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []

    class Reporter(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            seen.append(dict(logs))

    model = llama()
    trainer = transformers.Trainer(
        model,
        _arguments(tmp_path, max_steps=1),
        train_dataset=[{"input_ids": row, "labels": row} for row in token_rows()],
        callbacks=[Reporter(), MemkitCallback(*tiny_offload(model))],
    )
    trainer.add_callback(trainer.pop_callback(Reporter))  # as the page on recipes has it for TensorBoard

    trainer.train()

    assert seen[0]["memkit/tiny/moved_gib"] > 0
    reported = transformers.integrations.integration_utils.rewrite_logs(seen[0])  # as TensorBoard and others are given it
    assert reported["train/memkit/tiny/moved_gib"] == seen[0]["memkit/tiny/moved_gib"]


def test_evaluation_has_no_figures_of_training_in_its_log(tmp_path: Path) -> None:
    model = llama()
    trainer = _trainer(tmp_path, model, MemkitCallback(*tiny_layers(model)), eval_strategy="steps", eval_steps=2)
    trainer.train()

    evaluations = [line for line in trainer.state.log_history if "eval_loss" in line]
    assert len(evaluations) == 2
    assert not any(name.startswith("memkit") for line in evaluations for name in line)


def test_training_again_attaches_again(tmp_path: Path) -> None:
    model = llama()
    trainer = _trainer(tmp_path, model, MemkitCallback(*tiny_offload(model)), max_steps=2)
    trainer.train()
    trainer.train()

    assert memkit.stats("tiny").num_iterations == 4


class _Stop(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
    def on_step_end(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("the disk is full")


@pytest.mark.slow
def test_training_behind_one_that_failed_takes_off_what_that_has_left(tmp_path: Path) -> None:
    model, plain = llama(), llama()
    failing = _trainer(tmp_path, model, MemkitCallback(*tiny_budget(model)))
    failing.add_callback(_Stop())
    with pytest.raises(RuntimeError, match="the disk is full"):
        failing.train()
    plain_failing = _trainer(tmp_path, plain)
    plain_failing.add_callback(_Stop())
    with pytest.raises(RuntimeError, match="the disk is full"):
        plain_failing.train()

    _trainer(tmp_path, model, MemkitCallback(*tiny_budget(model))).train()
    _trainer(tmp_path, plain).train()

    assert_same_weights(model, plain)
    assert attached_to(model) == []


def test_with_takes_all_off_also_by_an_error(tmp_path: Path) -> None:
    model = llama()

    def train() -> None:
        with MemkitCallback(*tiny_layers_and_offload(model)) as callback:
            trainer = _trainer(tmp_path, model, callback)
            trainer.add_callback(_Stop())
            trainer.train()

    with pytest.raises(RuntimeError, match="the disk is full"):
        train()

    assert attached_to(model) == []
    assert not any(isinstance(value, Around) for value in vars(model).values())


def test_layers_go_on_streaming_for_an_evaluation_and_saving(tmp_path: Path) -> None:
    plain, model = llama(), llama()
    plain_trainer = _trainer(tmp_path / "plain", plain)
    plain_trainer.train()
    callback = MemkitCallback(*tiny_layers(model))
    trainer = _trainer(tmp_path / "memkit", model, callback)
    trainer.train()

    fetched = callback.figures()["memkit/layers/moved_in_gib"]
    assert trainer.evaluate()["eval_loss"] == plain_trainer.evaluate()["eval_loss"]
    assert callback.figures()["memkit/layers/moved_in_gib"] > fetched
    trainer.save_model(str(tmp_path / "saved"))
    assert_same_weights(type(model).from_pretrained(tmp_path / "saved"), plain)  # type: ignore[attr-defined]
    callback.close()
    assert_same_weights(model, plain)


@pytest.mark.parametrize("make", [tiny_offload, tiny_remat])
def test_models_that_trainer_makes_itself_are_attached_to(make: Make, tmp_path: Path) -> None:
    rows = [{"input_ids": row, "labels": row} for row in token_rows()]
    trainers = []
    for callbacks in ([], [MemkitCallback(*make(llama()))]):
        trainer = transformers.Trainer(
            model_init=lambda: llama(), args=_arguments(tmp_path, max_steps=2), train_dataset=rows, callbacks=callbacks
        )
        trainer.train()
        trainer.train()  # of a new model, as a search for hyperparameters does
        trainers.append(trainer)

    assert_same_weights(trainers[1].model, trainers[0].model)
    assert memkit.stats("tiny").num_iterations == 4


def test_smaller_batches_after_one_that_did_not_fit_are_attached_to_once(tmp_path: Path) -> None:
    class Full(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            sizes.append(trainer._train_batch_size)
            if len(sizes) == 1:
                raise torch.OutOfMemoryError("CUDA out of memory.")

    sizes: list[int] = []
    model = llama()
    trainer = _trainer(tmp_path, model, MemkitCallback(*tiny_offload(model)), auto_find_batch_size=True)
    trainer.add_callback(Full())
    trainer.train()

    assert sizes[0] > sizes[1] == sizes[-1]
    assert len(sizes) == 5
    assert attached_to(model) == []


# Compiled as a whole


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch, no_compiled_code_is_left: None) -> dict[str, Any]:
    """Settings that have Trainer compile the model, by an environment that is put back."""
    for name in ("ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_DYNAMO_MODE"):
        monkeypatch.setenv(name, "no")
        monkeypatch.delenv(name)
    return {"torch_compile": True, "torch_compile_backend": "aot_eager", "max_steps": 3}


@pytest.mark.slow
def test_layers_stream_in_a_model_that_trainer_compiles_with_a_warning(compiling: dict[str, Any], tmp_path: Path) -> None:
    plain, _ = _train(tmp_path / "plain", None, **compiling)
    torch._dynamo.reset()

    with pytest.warns(UserWarning, match="torch_compile=True compiles the model as one, and its graph breaks at each layer"):
        model, callback = _train(tmp_path / "memkit", tiny_layers, **compiling)

    for name, tensor in model.state_dict().items():  # graphs that are cut elsewhere round in another way
        torch.testing.assert_close(tensor, plain.state_dict()[name], rtol=1e-3, atol=1e-5)
    assert_has_worked(callback.figures())


# What moves the model


def test_trainer_moves_nothing_that_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stayed: list[nn.Module] = []
    stay = features._stay
    monkeypatch.setattr(features, "_stay", lambda model, *rest: stayed.append(model) or stay(model, *rest))
    model = llama()

    trainer = _trainer(tmp_path, model, MemkitCallback(*tiny_layers(model)), max_steps=1)
    assert stayed == [model]  # Trainer itself
    trainer.train()
    assert stayed == [model] * 2  # and Accelerate


# What it refuses


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (tiny_layers, {"bf16_full_eval": True}, "bf16_full_eval=True casts the model, whose layers stream. Leave it out"),
        (tiny_budget, {"torch_compile": True}, "torch_compile=True, which compiles the model as one. Leave that out"),
    ],
    ids=["cast", "compiled"],
)
def test_settings_that_do_not_go_with_a_feature_are_named(
    make: Make, settings: dict[str, Any], message: str, compiling: dict[str, Any], tmp_path: Path
) -> None:
    model = llama()

    with pytest.raises(ValueError, match=message):
        _trainer(tmp_path, model, MemkitCallback(*make(model)), **settings)


def test_several_gpus_in_one_process_are_refused(tmp_path: Path) -> None:
    model, callback = llama(), None
    arguments = _arguments(tmp_path)
    arguments._n_gpu = 2
    callback = MemkitCallback(*tiny_budget(model))

    with pytest.raises(ValueError, match=r"one GPU for each process; found n_gpu=2, .*DataParallel.*CUDA_VISIBLE_DEVICES=0"):
        transformers.Trainer(model, arguments, train_dataset=token_rows(), callbacks=[callback])


def test_model_of_another_layer_offload_is_refused(tmp_path: Path) -> None:
    callback = MemkitCallback(*tiny_layers(llama()))

    with pytest.raises(ValueError, match=r"needs the LayerOffload of what is trained.*found that of another LlamaForCausalLM"):
        _trainer(tmp_path, llama(), callback)


def test_closed_layer_offload_is_refused(tmp_path: Path) -> None:
    model = llama()
    (offload,) = tiny_layers(model)
    callback = MemkitCallback(offload)
    offload.close()  # type: ignore[attr-defined]

    with pytest.raises(ValueError, match="was given a LayerOffload that is closed by now"):
        _trainer(tmp_path, model, callback)


def test_steps_within_the_backward_are_refused(tmp_path: Path) -> None:
    model = llama()
    offload = memkit.LayerOffload(model, offload_ratio=1.0, optimizer=torch.optim.SGD, device=ReferenceDevice())

    with pytest.raises(
        ValueError, match=r'train="fused" steps within the backward.*Use train="host", and leave out optimizer='
    ):
        _trainer(tmp_path, model, MemkitCallback(offload))


def test_checkpointed_layers_are_warned_of(plain_run: Plain, tmp_path: Path) -> None:
    plain, _ = plain_run(gradient_checkpointing=True)

    with pytest.warns(UserWarning, match="gradient_checkpointing=True recomputes every layer in every step.*Leave it out"):
        model, _ = _train(tmp_path / "memkit", tiny_budget, gradient_checkpointing=True)

    assert_same_weights(model, plain)


@pytest.mark.parametrize("make", [tiny_layers, tiny_offload])
def test_checkpointed_layers_may_stream_and_offload(make: Make, plain_run: Plain, tmp_path: Path) -> None:
    plain, _ = plain_run(gradient_checkpointing=True)

    model, callback = _train(tmp_path / "memkit", make, gradient_checkpointing=True)

    assert_same_weights(model, plain)
    assert_has_worked(callback.figures())


# States of the optimizer in host memory


def test_checkpoints_are_those_of_the_plain_run_while_states_are_in_host_memory(tmp_path: Path) -> None:
    saving = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    for name, make in (("plain", None), ("memkit", tiny_states)):
        _train(tmp_path / name, make, **saving)

    plain, found = (torch.load(tmp_path / name / "checkpoint-2" / "optimizer.pt") for name in ("plain", "memkit"))
    sizes = [(tmp_path / name / "checkpoint-2" / "optimizer.pt").stat().st_size for name in ("plain", "memkit")]
    assert sizes[0] == sizes[1]
    assert found["param_groups"] == plain["param_groups"]
    assert found["state"].keys() == plain["state"].keys()
    for key, entries in plain["state"].items():
        assert list(found["state"][key]) == list(entries)
        assert all(torch.equal(found["state"][key][name], tensor) for name, tensor in entries.items())


def test_states_leave_with_clipping_accumulation_evaluation_and_a_scheduler(plain_run: Plain, tmp_path: Path) -> None:
    settings = {
        "max_grad_norm": 0.5,
        "gradient_accumulation_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
    }
    plain, _ = plain_run(**settings)

    model, callback = _train(tmp_path / "memkit", tiny_states, **settings)

    assert_same_weights(model, plain)
    assert_has_worked(callback.figures())


def test_states_of_what_is_trained_leave_beside_frozen_layers_that_stream(tmp_path: Path) -> None:
    plain, model = llama(), llama()
    for each in (plain, model):
        each.get_submodule("model.layers").requires_grad_(False)
    _trainer(tmp_path / "plain", plain, max_steps=2).train()
    callback = MemkitCallback(*tiny_layers(model), *tiny_states(model))

    _trainer(tmp_path / "memkit", model, callback, max_steps=2).train()

    assert_same_weights(model, plain)
    assert_has_worked(callback.figures())


def test_states_of_a_schedule_free_optimizer_leave(plain_run: Plain, tmp_path: Path) -> None:
    pytest.importorskip("schedulefree")
    settings = {"optim": "schedule_free_adamw", "lr_scheduler_type": "constant", "eval_strategy": "steps", "eval_steps": 1}

    plain, _ = plain_run(**settings)
    model, callback = _train(tmp_path / "memkit", tiny_states, **settings)

    assert_same_weights(model, plain)
    assert_has_worked(callback.figures())


class _Look(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
    """Notes the `StateOffload` of a callback at the beginning and the end of a training."""

    def __init__(self, callback: Any) -> None:
        self.callback = callback
        self.found: list[list[memkit.StateOffload]] = []
        self.are_at_home: list[bool] = []
        """Whether there were states when the training began, and all where they are kept."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.found.append(list(self.callback._features.states.opened))
        for states in self.found[-1]:
            are_there = all(map(states._rest.is_at_home, states._members.pieces))
            self.are_at_home.append(bool(states.optimizer.state) and are_there)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.found.append(list(self.callback._features.states.opened))


def test_states_leave_from_the_beginning_of_a_training_to_its_end(tmp_path: Path) -> None:
    model, plain = llama(), llama()
    callback = MemkitCallback(*tiny_states(model))
    look = _Look(callback)
    trainer, plain_trainer = _trainer(tmp_path, model, callback, max_steps=2), _trainer(tmp_path, plain, max_steps=2)
    trainer.add_callback(look)
    for each in (trainer, plain_trainer):
        each.train()
        each.train()  # by the same optimizer

    (first,), last, (second,), end = look.found
    assert last == end == []
    assert first is not second
    assert first.optimizer is second.optimizer is trainer.optimizer.optimizer
    assert all("closed" in repr(states) for states in (first, second))
    assert_same_weights(model, plain)
    (logged,) = [line for line in trainer.state.log_history if line.get("step") == 1]
    assert logged["memkit/states/host_gib"] > 0
    assert not any(name.startswith("memkit/states") for line in plain_trainer.state.log_history for name in line)


def test_states_of_a_given_optimizer_are_loaded_into_host_memory(tmp_path: Path) -> None:
    def train(name: str, make: Make | None, resume: str | None = None, **settings: Any) -> tuple[nn.Module, Any]:
        model = llama()
        callbacks = [] if make is None else [MemkitCallback(*make(model))]
        rows = [{"input_ids": row, "labels": row} for row in token_rows()]
        trainer = transformers.Trainer(
            model,
            _arguments(tmp_path / name, **settings),
            train_dataset=rows,
            callbacks=callbacks,
            optimizers=(torch.optim.AdamW(model.parameters(), lr=1e-3), None),
        )
        look = _Look(callbacks[0]) if callbacks else None
        found = list(callbacks[0]._features.states.opened) if callbacks else []
        if look is not None:
            trainer.add_callback(look)
        trainer.train(resume_from_checkpoint=resume)
        return model, (found, look)

    plain, _ = train("plain", None, save_strategy="steps", save_steps=2)
    model, (found, look) = train("memkit", tiny_states, resume=str(tmp_path / "plain" / "checkpoint-2"))

    assert_same_weights(model, plain)
    assert look.found == [found, []]  # it was there since the Trainer was made
    assert look.are_at_home == [True]


def test_states_are_put_back_by_close_where_a_training_has_failed(tmp_path: Path) -> None:
    model = llama()
    with MemkitCallback(*tiny_states(model)) as callback:
        trainer = _trainer(tmp_path, model, callback)
        trainer.add_callback(_Stop())
        with pytest.raises(RuntimeError, match="the disk is full"):
            trainer.train()
        (states,) = callback._features.states.opened
        assert "closed" not in repr(states)

    assert "closed" in repr(states)
    assert "memkit/states/moved_out_gib" in callback.figures()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"when": "backward"}, r"the norm of all gradients \(max_grad_norm=1.0\), finds none. Leave when= out"),
        ({"overlap_forward": True}, "overlap_forward=True needs wait"),
    ],
)
def test_options_of_states_that_trainer_does_not_go_with_are_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        _trainer(tmp_path, llama(), MemkitCallback(partial(memkit.StateOffload, **options)))
