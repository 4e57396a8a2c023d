"""A small training in each library, as its documentation has it: with features or without, whole, or gone on with from a
checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memkit
from tests.integrations import loops
from tests.integrations.cases import MISSING, VOCABULARY, Make, llama, token_rows


@dataclass(frozen=True)
class Run:
    model: nn.Module
    """All that was trained."""
    figures: Callable[[], dict[str, float]]
    trainer: Any = None
    callback: Any = None


# Hugging Face Trainer


def arguments_of(folder: Path, **settings: Any) -> Any:
    pytest.importorskip("accelerate", reason=MISSING)
    return pytest.importorskip("transformers", reason=MISSING).TrainingArguments(
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


def trainer_of(
    folder: Path, model: nn.Module | None, *callbacks: object, optimizers: Any = (None, None), **settings: Any
) -> Any:
    """Make a Trainer; where there is no model, it makes one itself."""
    import transformers

    rows = [{"input_ids": row, "labels": row} for row in token_rows()]
    made = {"model_init": lambda: llama()} if model is None else {"model": model}
    return transformers.Trainer(
        **made,
        args=arguments_of(folder, **settings),
        train_dataset=rows,
        eval_dataset=rows[:5],
        callbacks=list(callbacks),
        optimizers=optimizers,
    )


def with_trainer(folder: Path, make: Make | None, resume: Path | None = None, *others: object, **settings: Any) -> Run:
    from memkit.integrations import MemkitCallback

    model = llama()
    callback = None if make is None else MemkitCallback(*make(model))
    trainer = trainer_of(folder, model, *([] if callback is None else [callback]), *others, **settings)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return Run(model, dict if callback is None else callback.figures, trainer, callback)


def _half_of_trainer(folder: Path, make: Make | None) -> Path:
    with_trainer(folder, make, save_strategy="steps", save_steps=2)
    return folder / "checkpoint-2"


# Lightning


def lightning_module(kind: str = "one") -> Any:
    """Return a module with a model in it, which is what a context is attached to; or one with "two", so that a context is
    around the training step; or a "manual" one, which runs its backwards itself."""
    pytest.importorskip("transformers", reason=MISSING)
    lightning = pytest.importorskip("lightning.pytorch", reason=MISSING)

    class OneModel(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = llama()

        def loss(self, rows: Tensor) -> Tensor:
            return self.model(input_ids=rows, labels=rows).loss

        def training_step(self, rows: Tensor, _: int) -> Tensor | None:
            return self.loss(rows)

        def validation_step(self, rows: Tensor, _: int) -> None:
            self.log("validation", self.loss(rows))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    class TwoModels(OneModel):
        def __init__(self) -> None:
            super().__init__()
            self.probe = nn.Linear(VOCABULARY, 1)

        def loss(self, rows: Tensor) -> Tensor:
            out = self.model(input_ids=rows, labels=rows)
            return out.loss + self.probe(out.logits).square().mean()

    class Manual(TwoModels):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, rows: Tensor, _: int) -> None:
            found = self.optimizers()
            optimizers = found if isinstance(found, list) else [found]
            self.manual_backward(self.loss(rows))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    torch.manual_seed(0)
    return {"one": OneModel, "two": TwoModels, "manual": Manual}[kind]()


def lightning_trainer(folder: Path, *callbacks: object, **settings: Any) -> Any:
    lightning = pytest.importorskip("lightning.pytorch", reason=MISSING)
    return lightning.Trainer(
        **{
            "accelerator": "cpu",
            "max_epochs": 2,
            "logger": lightning.loggers.CSVLogger(folder),
            "callbacks": list(callbacks),
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            "log_every_n_steps": 1,
            "default_root_dir": folder,
            **settings,
        }
    )


def rows_loader(num_rows: int = 7) -> Any:
    """Two batches, the second one smaller."""
    return torch.utils.data.DataLoader(token_rows(num_rows), batch_size=4)  # type: ignore[arg-type]


def with_lightning(
    folder: Path, make: Make | None, resume: Path | None = None, *others: object, kind: str = "one", **settings: Any
) -> Run:
    from memkit.integrations import MemkitLightningCallback

    module = lightning_module(kind)
    callback = None if make is None else MemkitLightningCallback(*make(module.model))
    trainer = lightning_trainer(folder, *([] if callback is None else [callback]), *others, **settings)
    trainer.fit(module, rows_loader(), rows_loader(4), ckpt_path=resume)
    return Run(module, dict if callback is None else callback.figures, trainer, callback)


def _half_of_lightning(folder: Path, make: Make | None) -> Path:
    with_lightning(folder, make, max_epochs=1).trainer.save_checkpoint(folder / "half.ckpt")
    return folder / "half.ckpt"


# Loops without a callback


def _set_up(model: nn.Module, make: Make | None) -> tuple[memkit.LayerOffload | None, Callable[[], dict[str, float]]]:
    """Attach contexts to a model, or have its layers stream. Return the `LayerOffload`, and the figures."""
    if make is None:
        return None, dict
    (feature,) = make(model)
    if isinstance(feature, memkit.LayerOffload):
        return feature, lambda: memkit.live_values(feature)
    memkit.attach(model, feature)  # type: ignore[arg-type]
    return None, lambda: memkit.live_values("tiny")


def with_accelerate(folder: Path, make: Make | None, resume: Path | None = None, *, is_half: bool = False) -> Run:
    """An epoch each for what is saved, and what comes then; all of it is two."""
    accelerate = pytest.importorskip("accelerate", reason=MISSING)
    pytest.importorskip("transformers", reason=MISSING)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16")
    model = llama()
    offload, figures = _set_up(model, make)
    placement = None if offload is None else [False, False, True]
    given = accelerator.prepare(model, loops.adamw(model), loops.token_loader(), device_placement=placement)
    if resume is not None:
        accelerator.load_state(str(resume))
    for _ in range(1 if is_half or resume is not None else 2):
        loops.accelerate_epoch(*given, accelerator)
    if is_half:
        accelerator.save_state(str(folder))
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return Run(given[0], figures)


def with_timm(folder: Path, make: Make | None, resume: Path | None = None, *, is_half: bool = False) -> Run:
    """With an average of the weights; an epoch each, as above."""
    timm = pytest.importorskip("timm", reason=MISSING)
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2
    from timm.utils import CheckpointSaver, ModelEmaV3

    folder.mkdir(exist_ok=True)
    model = loops.vision_model()
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    ema, start = ModelEmaV3(model, decay=0.9), 0
    scheduler, _ = create_scheduler_v2(optimizer, sched="cosine", num_epochs=4)
    if resume is not None:
        start = timm.models.resume_checkpoint(model, str(resume), optimizer)
        timm.models.load_checkpoint(ema.module, str(resume), use_ema=True)
    _, figures = _set_up(model, make)
    saver = CheckpointSaver(model, optimizer, model_ema=ema, checkpoint_dir=str(folder), recovery_dir=str(folder))
    for epoch in range(start, 1 if is_half else 2):
        torch.manual_seed(epoch)  # of drop paths
        scheduler.step(epoch)
        loops.timm_epoch(model, optimizer, loops.image_loader(), ema)
        saver.save_checkpoint(epoch, metric=1.0)
    return Run(nn.ModuleList([model, ema.module]), figures)


def _half_of(run: Callable[..., Run], name: str) -> Callable[[Path, Make | None], Path]:
    def half(folder: Path, make: Make | None) -> Path:
        run(folder, make, is_half=True)
        return folder / name

    return half


LOOPS: dict[str, tuple[Callable[..., Run], Callable[[Path, Make | None], Path]]] = {
    "Trainer": (with_trainer, _half_of_trainer),
    "Lightning": (with_lightning, _half_of_lightning),
    "Accelerate": (with_accelerate, _half_of(with_accelerate, "")),
    "timm": (with_timm, _half_of(with_timm, "last.pth.tar")),
}
"""Each with what trains a half, and returns where that is saved."""
