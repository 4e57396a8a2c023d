"""`MemkitLightningCallback` in Lightning's Trainer: the weights of the plain run, bit for bit, and nothing left behind."""

from __future__ import annotations

import csv
import functools
import importlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.core.features import attached_to
from memkit.device import ReferenceDevice
from memkit.integrations import features
from tests.integrations.cases import (
    EVERY_FEATURE,
    MARKS,
    MISSING,
    THAT_CHECKPOINTS_SEE,
    VOCABULARY,
    Make,
    assert_has_worked,
    assert_same_weights,
    llama,
    tiny_budget,
    tiny_layers,
    tiny_layers_and_remat,
    tiny_offload,
    tiny_remat,
    tiny_states,
    token_rows,
)

pytest.importorskip("transformers", reason=MISSING)
lightning = pytest.importorskip("lightning.pytorch", reason=MISSING)

from memkit.integrations import MemkitLightningCallback  # noqa: E402  # not before it is known to be there

pytestmark = MARKS


class OneModel(lightning.LightningModule):  # type: ignore[misc,name-defined]
    """Has a model in it, which is what a context is attached to."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()

    def loss(self, rows: Tensor) -> Tensor:
        return self.model(input_ids=rows, labels=rows).loss

    def training_step(self, rows: Tensor, _: int) -> Tensor:
        return self.loss(rows)

    def validation_step(self, rows: Tensor, _: int) -> None:
        self.log("validation", self.loss(rows))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class TwoModels(OneModel):
    """Has two, so that a context is around the training step."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = nn.Linear(VOCABULARY, 1)

    def loss(self, rows: Tensor) -> Tensor:
        out = self.model(input_ids=rows, labels=rows)
        return out.loss + self.probe(out.logits).square().mean()


def _trainer(folder: Path, callback: object, package: ModuleType = lightning, **settings: Any) -> Any:
    loggers = importlib.import_module(f"{package.__name__}.loggers")
    return package.Trainer(
        **{
            "accelerator": "cpu",
            "max_epochs": 2,
            "logger": loggers.CSVLogger(folder),
            "callbacks": [] if callback is None else [callback],
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            "log_every_n_steps": 1,
            "default_root_dir": folder,
            **settings,
        }
    )


def _loader(num_rows: int = 7) -> Any:
    """Two batches, the second one smaller."""
    return torch.utils.data.DataLoader(token_rows(num_rows), batch_size=4)  # type: ignore[arg-type]


def _fit(
    folder: Path, make: Make | None, *, kind: Callable[[], Any] = OneModel, resume: Path | None = None, **settings: Any
) -> tuple[Any, Any, Any]:
    """Train a new module, and return it, the callback and the trainer."""
    torch.manual_seed(0)
    module = kind()
    callback = None if make is None else MemkitLightningCallback(*make(module.model))
    trainer = _trainer(folder, callback, **settings)
    trainer.fit(module, _loader(), _loader(4), ckpt_path=resume)
    return module, callback, trainer


@functools.cache
def _plain(kind: Callable[[], Any] = OneModel, **settings: Any) -> Any:
    """Return the module that is trained without memkit, once for all tests."""
    with tempfile.TemporaryDirectory() as folder:
        return _fit(Path(folder), None, kind=kind, **settings)[0]


@EVERY_FEATURE
@pytest.mark.parametrize("kind", [OneModel, TwoModels])
def test_weights_after_four_steps_are_those_of_the_plain_run(make: Make, kind: Callable[[], Any], tmp_path: Path) -> None:
    plain = _plain(kind=kind)

    module, callback, _ = _fit(tmp_path / "memkit", make, kind=kind)

    assert_same_weights(module, plain)
    assert_has_worked(callback.figures())


@THAT_CHECKPOINTS_SEE
def test_resumes_from_a_checkpoint_of_its_own_and_from_a_plain_one(make: Make, tmp_path: Path) -> None:
    plain = _plain()
    for name, made in {"memkit": make, "plain": None}.items():
        _, _, trainer = _fit(tmp_path / name, made, max_epochs=1)
        trainer.save_checkpoint(tmp_path / f"{name}.ckpt")

    for name in ("memkit", "plain"):
        module, _, _ = _fit(tmp_path / "resumed", make, resume=tmp_path / f"{name}.ckpt")

        assert_same_weights(module, plain)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [OneModel, TwoModels])
@pytest.mark.parametrize(
    "settings",
    [{"accumulate_grad_batches": 2, "max_epochs": 4}, {"gradient_clip_val": 0.5}, {"precision": "bf16-mixed"}],
    ids=["accumulation", "clipping", "bf16"],
)
def test_weights_are_those_of_the_plain_run_under_other_settings(
    kind: Callable[[], Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    plain = _plain(kind=kind, **settings)

    module, callback, _ = _fit(tmp_path / "memkit", tiny_layers_and_remat, kind=kind, **settings)

    assert_same_weights(module, plain)
    assert_has_worked(callback.figures())


@pytest.mark.parametrize("kind", [OneModel, TwoModels])
def test_validation_is_no_iteration(kind: Callable[[], Any], tmp_path: Path) -> None:
    _fit(tmp_path, tiny_remat, kind=kind)

    assert memkit.stats("tiny").num_iterations == 4


@pytest.mark.parametrize(
    ("kind", "module", "attached"),
    [(OneModel, None, "model"), (OneModel, "model.model", "model.model"), (TwoModels, "model", "model")],
)
def test_context_is_attached_to_the_one_model_or_to_the_one_that_is_named(
    kind: Callable[[], Any], module: str | None, attached: str, tmp_path: Path
) -> None:
    found: list[bool] = []

    class Look(lightning.Callback):  # type: ignore[misc,name-defined]
        def on_train_start(self, _: Any, pl_module: Any) -> None:
            found.append(bool(attached_to(pl_module.get_submodule(attached))))

    made = kind()
    callback = MemkitLightningCallback(*tiny_offload(made), module=module)
    _trainer(tmp_path, callback, callbacks=[callback, Look()], max_epochs=1).fit(made, _loader())

    assert found == [True]
    assert attached_to(made.get_submodule(attached)) == []


def test_module_that_is_not_there_is_named(tmp_path: Path) -> None:
    module = TwoModels()
    callback = MemkitLightningCallback(*tiny_offload(module), module="decoder")

    with pytest.raises(ValueError, match=r'TwoModels has no module "decoder". It has "model" or "probe"'):
        _trainer(tmp_path, callback).fit(module, _loader())


def test_budget_is_told_of_the_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    module = OneModel()
    callback = MemkitLightningCallback(*tiny_budget(module))
    monkeypatch.setattr(callback._features, "begin", lambda _, optimizer, **__: told.append(optimizer))
    trainer = _trainer(tmp_path, callback, max_epochs=1)

    trainer.fit(module, _loader())

    assert told == trainer.optimizers
    assert len(told) == 1


def test_figures_are_logged(tmp_path: Path) -> None:
    _, _, trainer = _fit(tmp_path, tiny_budget, max_epochs=4)  # of two lengths, each planned for from its third step on

    with (Path(trainer.logger.log_dir) / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["memkit/tiny/step_ms"]]
    assert len(rows) == 8
    assert all(float(row["memkit/tiny/budget_gib"]) == 200 / 2**20 for row in rows)
    assert 0 < float(rows[-1]["memkit/tiny/peak_gib"]) <= 200 / 2**20


def test_figures_are_logged_with_steps_of_the_optimizer(tmp_path: Path) -> None:
    settings = {"accumulate_grad_batches": 2, "log_every_n_steps": 2, "max_epochs": 4}
    _, _, trainer = _fit(tmp_path, tiny_offload, **settings)

    with (Path(trainer.logger.log_dir) / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("memkit/tiny/moved_gib")]
    assert trainer.global_step == 4
    assert len(rows) == 2


def test_nothing_is_left_by_a_fit_that_fails(tmp_path: Path) -> None:
    class Failing(TwoModels):
        def validation_step(self, rows: Tensor, _: int) -> None:
            raise RuntimeError("the disk is full")

    module = Failing()
    own = module.training_step
    trainer = _trainer(tmp_path, MemkitLightningCallback(*tiny_budget(module)), num_sanity_val_steps=0)

    with pytest.raises(RuntimeError, match="the disk is full"):
        trainer.fit(module, _loader(), _loader())

    assert module.training_step == own
    assert memkit.stats("tiny").num_iterations == 2
    module.training_step(token_rows(1)[0][None], 0).backward()
    assert memkit.stats("tiny").num_iterations == 2  # the context is off


def test_layers_go_on_streaming_for_validation(tmp_path: Path) -> None:
    plain, _, plain_trainer = _fit(tmp_path / "plain", None)
    module, callback, trainer = _fit(tmp_path / "memkit", tiny_layers)

    fetched = callback.figures()["memkit/layers/moved_in_gib"]
    found = trainer.validate(module, _loader(4), verbose=False)
    assert found == plain_trainer.validate(plain, _loader(4), verbose=False)
    assert callback.figures()["memkit/layers/moved_in_gib"] > fetched
    callback.close()
    assert_same_weights(module, plain)


def test_lightning_moves_nothing_that_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stayed: list[nn.Module] = []
    stay = features._stay
    monkeypatch.setattr(features, "_stay", lambda model, *rest: stayed.append(model) or stay(model, *rest))

    module, _, _ = _fit(tmp_path, tiny_layers, max_epochs=1)

    assert stayed == [module.model] * 2  # to the device, and back


# Manual optimization


class Manual(TwoModels):
    """Runs its backwards itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, rows: Tensor, _: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(rows))
        optimizer.step()


def test_manual_optimization_needs_the_name_of_a_module(tmp_path: Path) -> None:
    module, plain = Manual(), Manual()
    with pytest.raises(ValueError, match=r'needs to know which module.*Pass its name: module="model" or "probe"'):
        _trainer(tmp_path, MemkitLightningCallback(*tiny_offload(module))).fit(module, _loader())
    module.load_state_dict(plain.state_dict())
    callback = MemkitLightningCallback(*tiny_offload(module), module="model")

    _trainer(tmp_path, callback).fit(module, _loader())
    _trainer(tmp_path, None).fit(plain, _loader())

    assert_same_weights(module, plain)
    assert_has_worked(callback.figures())


class Fused(Manual):
    """Is stepped within its backwards."""

    def __init__(self, offload: Callable[[nn.Module], memkit.LayerOffload]) -> None:
        super().__init__()
        self.probe.requires_grad_(False)
        self.offload = [offload(self.model)]

    def configure_optimizers(self) -> Any:
        return self.offload[0].optimizer


_STEPPED = partial(
    memkit.LayerOffload, offload_ratio=1.0, optimizer=partial(torch.optim.AdamW, lr=1e-3), device=ReferenceDevice()
)


def test_steps_within_the_backward_work_in_manual_optimization_alone(tmp_path: Path) -> None:
    plain = Manual()
    plain.probe.requires_grad_(False)
    torch.manual_seed(1)
    module = Fused(_STEPPED)
    module.load_state_dict(plain.state_dict())
    _trainer(tmp_path, None).fit(plain, _loader())

    _trainer(tmp_path, MemkitLightningCallback(module.offload[0])).fit(module, _loader())

    assert_same_weights(module, plain)
    module.automatic_optimization = True
    with pytest.raises(ValueError, match="Lightning, which runs the backward within the optimizer's step, finds no gradients"):
        _trainer(tmp_path, MemkitLightningCallback(module.offload[0])).fit(module, _loader())


# What it refuses, and where it comes from


def test_precision_that_casts_the_model_is_refused(tmp_path: Path) -> None:
    module = OneModel()
    callback = MemkitLightningCallback(*tiny_layers(module.model))

    with pytest.raises(ValueError, match='precision="bf16-true" casts the model, whose layers stream'):
        _trainer(tmp_path, callback, precision="bf16-true").fit(module, _loader())


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


class TwoOptimizers(Manual):
    """Has an optimizer for each of its models."""

    def training_step(self, rows: Tensor, _: int) -> None:
        optimizers = self.optimizers()
        self.manual_backward(self.loss(rows))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(part.parameters(), lr=1e-3) for part in (self.model, self.probe)]


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
    plain = _plain(kind=TwoOptimizers)
    torch.manual_seed(0)
    module = TwoOptimizers()
    callback = MemkitLightningCallback(*tiny_states(module))
    look = LookAtStates(callback)
    trainer = _trainer(tmp_path / "memkit", callback, callbacks=[callback, look])

    trainer.fit(module, _loader(), _loader(4))

    assert_same_weights(module, plain)
    assert [states.optimizer for states in look.found] == trainer.optimizers
    assert len(look.found) == 2
    assert all("closed" in repr(states) for states in look.found)
    assert_has_worked(callback.figures())


@pytest.mark.parametrize("make", [tiny_states, tiny_layers])
def test_states_of_a_checkpoint_go_to_host_memory(make: Make, tmp_path: Path) -> None:
    plain = _plain()
    _, _, trainer = _fit(tmp_path / "saved", None, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    torch.manual_seed(0)
    module = OneModel()
    callback = MemkitLightningCallback(*make(module.model))
    look = LookAtStates(callback)
    trainer = _trainer(tmp_path, callback, callbacks=[callback, look])

    trainer.fit(module, _loader(), ckpt_path=tmp_path / "saved.ckpt")

    assert_same_weights(module, plain)
    assert look.loaded == [0]
    assert all(state["step"] == 4 for state in trainer.optimizers[0].state.values())


@pytest.mark.parametrize("make", [tiny_states, tiny_layers])
def test_states_of_a_checkpoint_that_was_only_validated_are_not_those_of_a_later_fit(make: Make, tmp_path: Path) -> None:
    _, _, trainer = _fit(tmp_path / "saved", None, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    modules = []
    for name in ("plain", "memkit"):
        torch.manual_seed(0)
        module = OneModel()
        callback = None if name == "plain" else MemkitLightningCallback(*make(module.model))
        trainer = _trainer(tmp_path / name, callback, max_epochs=1)
        trainer.validate(module, _loader(4), ckpt_path=tmp_path / "saved.ckpt", verbose=False)
        trainer.fit(module, _loader())
        modules.append(module)

    assert_same_weights(*modules)


def _in_backward(_: nn.Module) -> list[object]:
    return [partial(memkit.StateOffload, when="backward", device=ReferenceDevice())]


@pytest.mark.parametrize("kind", [OneModel, Manual])
def test_states_are_stepped_within_the_backward(kind: Callable[[], Any], tmp_path: Path) -> None:
    plain = _plain(kind=kind)

    module, callback, _ = _fit(tmp_path / "memkit", _in_backward, kind=kind)

    assert_same_weights(module, plain)
    assert_has_worked(callback.figures())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gradient_clip_val": 0.5}, "so that gradient_clip_val=0.5 finds none"),
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches=2 adds them up over several"),
    ],
)
def test_settings_that_do_not_go_with_steps_within_the_backward_are_named(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        _fit(tmp_path, _in_backward, **settings)
