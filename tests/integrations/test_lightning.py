"""`MemkitLightningCallback` in Lightning's Trainer: what it attaches to, logs, and leaves, and optimizer states. For the bits
see test_trainers."""

from __future__ import annotations

import csv
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memkit
from memkit.core.features import attached_to
from memkit.device import ReferenceDevice
from tests.integrations.cases import (
    MARKS,
    MISSING,
    Make,
    assert_has_worked,
    assert_same_weights,
    tiny_budget,
    tiny_layers,
    tiny_offload,
    tiny_states,
    token_rows,
)
from tests.integrations.runs import lightning_module, lightning_trainer, rows_loader, with_lightning

pytest.importorskip("transformers", reason=MISSING)
lightning = pytest.importorskip("lightning.pytorch", reason=MISSING)

from memkit.integrations import MemkitLightningCallback  # noqa: E402  # not before it is known to be there

pytestmark = MARKS


@pytest.mark.parametrize(
    ("kind", "module", "attached"), [("one", None, "model"), ("one", "model.model", "model.model"), ("two", "model", "model")]
)
def test_context_is_attached_to_the_one_model_or_to_the_one_that_is_named(
    kind: str, module: str | None, attached: str, tmp_path: Path
) -> None:
    found: list[bool] = []

    class Look(lightning.Callback):  # type: ignore[misc,name-defined]
        def on_train_start(self, _: Any, pl_module: Any) -> None:
            found.append(bool(attached_to(pl_module.get_submodule(attached))))

    made = lightning_module(kind)
    callback = MemkitLightningCallback(*tiny_offload(made), module=module)
    lightning_trainer(tmp_path, callback, Look(), max_epochs=1).fit(made, rows_loader())

    assert found == [True]
    assert attached_to(made.get_submodule(attached)) == []


def test_module_that_is_not_there_is_named(tmp_path: Path) -> None:
    module = lightning_module("two")
    callback = MemkitLightningCallback(*tiny_offload(module), module="decoder")

    with pytest.raises(ValueError, match=r'TwoModels has no module "decoder". It has "model" or "probe"'):
        lightning_trainer(tmp_path, callback).fit(module, rows_loader())


def test_figures_are_logged(tmp_path: Path) -> None:
    trainer = with_lightning(
        tmp_path, tiny_budget, max_epochs=4
    ).trainer  # of two lengths, each planned for from its third step on

    with (Path(trainer.logger.log_dir) / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["memkit/tiny/step_ms"]]
    assert len(rows) == 8
    assert all(float(row["memkit/tiny/budget_gib"]) == 200 / 2**20 for row in rows)
    assert 0 < float(rows[-1]["memkit/tiny/peak_gib"]) <= 200 / 2**20


def test_figures_are_logged_with_steps_of_the_optimizer(tmp_path: Path) -> None:
    settings = {"accumulate_grad_batches": 2, "log_every_n_steps": 2, "max_epochs": 4}
    trainer = with_lightning(tmp_path, tiny_offload, **settings).trainer

    with (Path(trainer.logger.log_dir) / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("memkit/tiny/moved_gib")]
    assert trainer.global_step == 4
    assert len(rows) == 2


def test_nothing_is_left_by_a_fit_that_fails(tmp_path: Path) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("the disk is full")

    module = lightning_module("two")
    module.validation_step, own = fail, module.training_step
    trainer = lightning_trainer(tmp_path, MemkitLightningCallback(*tiny_budget(module)), num_sanity_val_steps=0)

    with pytest.raises(RuntimeError, match="the disk is full"):
        trainer.fit(module, rows_loader(), rows_loader())

    assert module.training_step == own
    assert memkit.stats("tiny").num_iterations == 2
    module.training_step(token_rows(1)[0][None], 0).backward()
    assert memkit.stats("tiny").num_iterations == 2  # the context is off


# Manual optimization


def test_manual_optimization_needs_the_name_of_a_module(tmp_path: Path) -> None:
    plain = with_lightning(tmp_path, None, kind="manual").model
    module = lightning_module("manual")
    with pytest.raises(ValueError, match=r'needs to know which module.*Pass its name: module="model" or "probe"'):
        lightning_trainer(tmp_path, MemkitLightningCallback(*tiny_offload(module))).fit(module, rows_loader())
    module = lightning_module("manual")
    callback = MemkitLightningCallback(*tiny_offload(module), module="model")

    lightning_trainer(tmp_path, callback).fit(module, rows_loader())

    assert_same_weights(module, plain)
    assert_has_worked(callback.figures())


def test_steps_within_the_backward_work_in_manual_optimization(tmp_path: Path) -> None:
    models = []
    for is_plain in (True, False):
        module = lightning_module("manual")
        module.probe.requires_grad_(False)
        callbacks = []
        if not is_plain:
            make = partial(torch.optim.AdamW, lr=1e-3)
            offload = memkit.LayerOffload(module.model, offload_ratio=1.0, optimizer=make, device=ReferenceDevice())
            module.configure_optimizers = lambda offload=offload: offload.optimizer
            callbacks.append(MemkitLightningCallback(offload))
        lightning_trainer(tmp_path, *callbacks).fit(module, rows_loader())
        models.append(module)

    assert_same_weights(*models)


@pytest.mark.slow
def test_both_packages_of_lightning_take_it(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning", reason=MISSING)
    code = (
        "import pytorch_lightning; from memkit.integrations import MemkitLightningCallback as found; "
        "print([base.__module__.split('.')[0] for base in found.__mro__ if base.__name__ == 'Callback'])"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "['pytorch_lightning']\n"
    assert issubclass(MemkitLightningCallback, lightning.Callback)


# States of the optimizer in host memory


class LookAtStates(lightning.Callback):  # type: ignore[misc,name-defined]
    """Notes the `StateOffload`s of a callback, and what Lightning is to load by itself."""

    def __init__(self, callback: Any) -> None:
        self.callback = callback
        self.found: list[memkit.StateOffload] = []
        self.loaded: list[int] = []

    def on_train_start(self, *_: Any) -> None:
        states = self.callback._features.states
        self.found = [] if states is None else list(states.opened)

    def on_load_checkpoint(self, _: Any, __: Any, checkpoint: dict[str, Any]) -> None:
        self.loaded.append(len(checkpoint["optimizer_states"]))


def test_each_optimizer_has_its_states_in_host_memory_until_the_end(tmp_path: Path) -> None:
    models = []
    for make in (None, tiny_states):
        module = lightning_module("manual")
        parts = module.model, module.probe
        module.configure_optimizers = lambda parts=parts: [torch.optim.AdamW(part.parameters(), lr=1e-3) for part in parts]
        callbacks = [] if make is None else [MemkitLightningCallback(*make(module))]
        looks = [*map(LookAtStates, callbacks)]
        trainer = lightning_trainer(tmp_path, *callbacks, *looks)
        trainer.fit(module, rows_loader(), rows_loader(4))
        models.append(module)

    assert_same_weights(*models)
    (found,), (callback,) = [look.found for look in looks], callbacks
    assert [states.optimizer for states in found] == trainer.optimizers
    assert len(found) == 2
    assert all("closed" in repr(states) for states in found)
    assert_has_worked(callback.figures())


@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize("make", [tiny_states, tiny_layers])
def test_states_of_a_checkpoint_go_to_host_memory(make: Make, validates: bool, tmp_path: Path) -> None:
    """Those of one that was only validated are not those of a later fit."""
    saved, models = tmp_path / "saved.ckpt", list[nn.Module]()
    with_lightning(tmp_path, None, max_epochs=1).trainer.save_checkpoint(saved)
    for is_plain in (True, False):
        module = lightning_module()
        callbacks = [] if is_plain else [MemkitLightningCallback(*make(module.model))]
        looks = [*map(LookAtStates, callbacks)]
        trainer = lightning_trainer(tmp_path, *callbacks, *looks)
        if validates:
            trainer.validate(module, rows_loader(4), ckpt_path=saved, verbose=False)
        trainer.fit(module, rows_loader(), ckpt_path=None if validates else saved)
        models.append(module)

    assert_same_weights(*models)
    assert all(state["step"] == 4 for state in trainer.optimizers[0].state.values())
    assert [look.loaded for look in looks] == [[1] if validates else [0]]
