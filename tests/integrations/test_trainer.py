"""`MemkitCallback` in the Hugging Face Trainer: logs, what is left behind, and optimizer states. For the bits see
test_trainers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memkit
from memkit.core.calls import Around
from memkit.core.features import attached_to
from tests.integrations.cases import (
    MARKS,
    MISSING,
    Make,
    assert_has_worked,
    assert_same_weights,
    llama,
    tiny_budget,
    tiny_layers,
    tiny_layers_and_offload,
    tiny_offload,
    tiny_remat,
    tiny_states,
    token_rows,
)
from tests.integrations.runs import arguments_of, trainer_of, with_trainer

transformers = pytest.importorskip("transformers", reason=MISSING)
pytest.importorskip("accelerate", reason=MISSING)

from memkit.integrations import MemkitCallback  # noqa: E402  # not before it is known to be there

pytestmark = MARKS


def test_logs_say_what_was_predicted_and_taken(tmp_path: Path) -> None:
    history = with_trainer(tmp_path, tiny_budget, save_strategy="steps", save_steps=4).trainer.state.log_history

    last = [line for line in history if "loss" in line][-1]
    assert last["memkit/tiny/budget_gib"] == 200 / 2**20
    assert 0 < last["memkit/tiny/predicted_peak_gib"] <= last["memkit/tiny/budget_gib"]
    assert 0 < last["memkit/tiny/peak_gib"] <= last["memkit/tiny/budget_gib"]
    assert last["memkit/tiny/step_ms"] > 0
    assert "memkit/tiny/predicted_peak_gib" not in history[0]  # nothing is planned yet
    saved = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    assert saved[3]["memkit/tiny/step_ms"] == last["memkit/tiny/step_ms"]


def test_logs_reach_callbacks_that_come_later(tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []

    class Reporter(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            seen.append(dict(logs))

    model = llama()
    trainer = trainer_of(tmp_path, model, Reporter(), MemkitCallback(*tiny_offload(model)), max_steps=1)
    trainer.add_callback(trainer.pop_callback(Reporter))  # as the page on recipes has it for TensorBoard

    trainer.train()

    assert seen[0]["memkit/tiny/moved_gib"] > 0
    reported = transformers.integrations.integration_utils.rewrite_logs(seen[0])  # as TensorBoard and others are given it
    assert reported["train/memkit/tiny/moved_gib"] == seen[0]["memkit/tiny/moved_gib"]


def test_evaluation_has_no_figures_of_training_in_its_log(tmp_path: Path) -> None:
    history = with_trainer(tmp_path, tiny_layers, eval_strategy="steps", eval_steps=2).trainer.state.log_history

    evaluations = [line for line in history if "eval_loss" in line]
    assert len(evaluations) == 2
    assert not any(name.startswith("memkit") for line in evaluations for name in line)


def test_training_again_attaches_again(tmp_path: Path) -> None:
    with_trainer(tmp_path, tiny_offload, max_steps=2).trainer.train()

    assert memkit.stats("tiny").num_iterations == 4


class _Stop(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
    def on_step_end(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("the disk is full")


FAILS = pytest.raises(RuntimeError, match="the disk is full")


@pytest.mark.slow
def test_training_behind_one_that_failed_takes_off_what_that_has_left(tmp_path: Path) -> None:
    models = llama(), llama()
    for model, make in zip(models, (tiny_budget, lambda _: []), strict=True):
        for others in ([_Stop()], []):
            callbacks = [MemkitCallback(*found) for found in [make(model)] if found]
            trainer = trainer_of(tmp_path, model, *callbacks, *others)
            if not others:
                trainer.train()
                continue
            with FAILS:
                trainer.train()

    assert_same_weights(*models)
    assert attached_to(models[0]) == []


@pytest.mark.parametrize("make", [tiny_layers_and_offload, tiny_states])
def test_with_takes_all_off_also_by_an_error(make: Make, tmp_path: Path) -> None:
    model, opened = llama(), list[memkit.StateOffload]()
    with MemkitCallback(*make(model)) as callback:
        with FAILS:
            trainer_of(tmp_path, model, callback, _Stop()).train()
        if make is tiny_states:
            opened += callback._features.states.opened  # type: ignore[union-attr]
            assert ["closed" in repr(states) for states in opened] == [False]

    assert attached_to(model) == []
    assert not any(isinstance(value, Around) for value in vars(model).values())
    assert all("closed" in repr(states) for states in opened)
    assert bool(opened) == ("memkit/states/moved_out_gib" in callback.figures())


@pytest.mark.parametrize("make", [tiny_offload, tiny_remat])
def test_models_that_trainer_makes_itself_are_attached_to(make: Make, tmp_path: Path) -> None:
    trainers = []
    for callbacks in ([], [MemkitCallback(*make(llama()))]):
        trainer = trainer_of(tmp_path, None, *callbacks, max_steps=2)
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
    trainer = trainer_of(tmp_path, model, MemkitCallback(*tiny_offload(model)), Full(), auto_find_batch_size=True)
    trainer.train()

    assert sizes[0] > sizes[1] == sizes[-1]
    assert len(sizes) == 5
    assert attached_to(model) == []


@pytest.mark.slow
@pytest.mark.usefixtures("no_dynamo_by_environment")
def test_layers_stream_in_a_model_that_trainer_compiles_with_a_warning(tmp_path: Path) -> None:
    settings = {"torch_compile": True, "torch_compile_backend": "aot_eager", "max_steps": 3}
    plain = with_trainer(tmp_path / "plain", None, **settings).model
    torch._dynamo.reset()

    with pytest.warns(UserWarning, match="torch_compile=True compiles the model as one, and its graph breaks at each layer"):
        found = with_trainer(tmp_path / "memkit", tiny_layers, **settings)

    for name, tensor in found.model.state_dict().items():  # graphs that are cut elsewhere round in another way
        torch.testing.assert_close(tensor, plain.state_dict()[name], rtol=1e-3, atol=1e-5)
    assert_has_worked(found.figures())


# What it refuses


def test_several_gpus_in_one_process_are_refused(tmp_path: Path) -> None:
    model, arguments = llama(), arguments_of(tmp_path)
    arguments._n_gpu = 2

    with pytest.raises(ValueError, match=r"one GPU for each process; found n_gpu=2, .*DataParallel.*CUDA_VISIBLE_DEVICES=0"):
        transformers.Trainer(model, arguments, train_dataset=token_rows(), callbacks=[MemkitCallback(*tiny_budget(model))])


@pytest.mark.parametrize(
    ("is_closed", "message"),
    [
        (False, r"needs the LayerOffload of what is trained.*found that of another LlamaForCausalLM"),
        (True, "was given a LayerOffload that is closed by now"),
    ],
)
def test_other_layer_offload_is_refused(is_closed: bool, message: str, tmp_path: Path) -> None:
    model = llama()
    (offload,) = tiny_layers(model)
    callback = MemkitCallback(offload)
    if is_closed:
        offload.close()  # type: ignore[attr-defined]

    with pytest.raises(ValueError, match=message):
        trainer_of(tmp_path, model if is_closed else llama(), callback)


def test_checkpointed_layers_are_warned_of(tmp_path: Path) -> None:
    plain = with_trainer(tmp_path, None, gradient_checkpointing=True).model

    with pytest.warns(UserWarning, match="gradient_checkpointing=True recomputes every layer in every step.*Leave it out"):
        found = with_trainer(tmp_path, tiny_budget, gradient_checkpointing=True)

    assert_same_weights(found.model, plain)


# States of the optimizer in host memory


def test_checkpoints_are_those_of_the_plain_run_while_states_are_in_host_memory(tmp_path: Path) -> None:
    for name, make in (("plain", None), ("memkit", tiny_states)):
        with_trainer(tmp_path / name, make, max_steps=2, save_strategy="steps", save_steps=2)

    files = [tmp_path / name / "checkpoint-2" / "optimizer.pt" for name in ("plain", "memkit")]
    plain, found = map(torch.load, files)
    assert files[0].stat().st_size == files[1].stat().st_size
    assert found["param_groups"] == plain["param_groups"]
    assert found["state"].keys() == plain["state"].keys()
    for key, entries in plain["state"].items():
        assert list(found["state"][key]) == list(entries)
        assert all(torch.equal(found["state"][key][name], tensor) for name, tensor in entries.items())


def test_states_of_what_is_trained_leave_beside_frozen_layers_that_stream(tmp_path: Path) -> None:
    plain, model = llama(), llama()
    for each in (plain, model):
        each.get_submodule("model.layers").requires_grad_(False)
    trainer_of(tmp_path / "plain", plain, max_steps=2).train()
    callback = MemkitCallback(*tiny_layers(model), *tiny_states(model))

    trainer_of(tmp_path / "memkit", model, callback, max_steps=2).train()

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
    trainer, plain_trainer = trainer_of(tmp_path, model, callback, look, max_steps=2), trainer_of(tmp_path, plain, max_steps=2)
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
    def train(*callbacks: Any, resume: str | None = None, **settings: Any) -> tuple[nn.Module, list[list[Any]]]:
        model = llama()
        optimizers = torch.optim.AdamW(model.parameters(), lr=1e-3), None
        trainer = trainer_of(tmp_path, model, *callbacks, optimizers=optimizers, **settings)
        found = [list(callback._features.states.opened) for callback in callbacks[:1]]
        trainer.train(resume_from_checkpoint=resume)
        return model, found

    callback = MemkitCallback(*tiny_states(llama()))
    look = _Look(callback)
    plain, _ = train(save_strategy="steps", save_steps=2)
    model, (found,) = train(callback, look, resume=str(tmp_path / "checkpoint-2"))

    assert_same_weights(model, plain)
    assert look.found == [found, []]  # it was there since the Trainer was made
    assert look.are_at_home == [True]
