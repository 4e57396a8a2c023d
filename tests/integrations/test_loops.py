"""Accelerate, timm, diffusers, PEFT and TRL: a run that is saved and resumed has the weights of the plain one, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memkit
from memkit.device import ReferenceDevice
from memkit.integrations import keep_in_place
from tests.integrations import loops
from tests.integrations.cases import (
    MARKS,
    MISSING,
    assert_same_weights,
    llama,
    tiny_layers,
    tiny_layers_and_offload,
    tiny_offload,
    tiny_remat,
)
from tests.integrations.test_recipes import sft

pytestmark = MARKS

SetUp = Callable[[nn.Module], Any]


def _attach(make: Callable[[nn.Module], list[Any]]) -> SetUp:
    return lambda model: memkit.attach(model, *make(model))


def _nothing(_: nn.Module) -> None:
    return None


def _half(_: nn.Module) -> list[Any]:
    return [memkit.MemoryBudget(0.5, tag="tiny", min_bytes=0, device=ReferenceDevice())]


SET_UPS = pytest.mark.parametrize(
    "set_up",
    [
        pytest.param(_attach(_half), id="MemoryBudget", marks=pytest.mark.slow),
        pytest.param(_attach(tiny_offload), id="CPUOffload"),
        pytest.param(_attach(tiny_remat), id="Rematerialize"),
        pytest.param(lambda model: tiny_layers(model)[0], id="LayerOffload"),
    ],
)


def _assert_has_worked(made: Any) -> None:
    """See that what was set up, if it was anything, has done something."""
    if isinstance(made, memkit.LayerOffload):
        assert made.stats().num_fetches > 0
    elif made is not None and made.plan is not None and "MemoryBudget" in made.stats().contexts:
        assert made.plan.predicted_peak_bytes < 0.6 * made.plan.plain_peak_bytes  # the last batch is smaller, and fits
    elif made is not None:
        assert made.stats().num_dropped + made.stats().num_copies_out > 0


# Accelerate


@pytest.fixture
def accelerate() -> Iterator[Any]:
    found = pytest.importorskip("accelerate", reason=MISSING)
    pytest.importorskip("transformers", reason=MISSING)
    found.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield found
    found.state.AcceleratorState._reset_state(reset_partial_state=True)


def _accelerated(accelerate: Any, set_up: SetUp, resume: Path | None, save: Path | None, **settings: Any) -> nn.Module:
    """Train one epoch, or go on for a second one behind what was saved."""
    accelerator = accelerate.Accelerator(cpu=True, **settings)
    model = llama()
    made = set_up(model)
    if isinstance(made, memkit.LayerOffload):
        optimizer = loops.adamw(model)
        placement = [False, False, True]
        model, optimizer, loader = accelerator.prepare(model, optimizer, loops.token_loader(), device_placement=placement)
    else:
        model, optimizer, loader = accelerator.prepare(model, loops.adamw(model), loops.token_loader())
    if resume is not None:
        accelerator.load_state(str(resume))
    loops.accelerate_epoch(model, optimizer, loader, accelerator)
    if save is not None:
        accelerator.save_state(str(save))
    _assert_has_worked(made)
    return model


@SET_UPS
def test_accelerate_resumes(set_up: SetUp, accelerate: Any, tmp_path: Path) -> None:
    settings = {"gradient_accumulation_steps": 2, "mixed_precision": "bf16"}
    plain = _accelerated(accelerate, _nothing, None, tmp_path / "plain", **settings)
    model = _accelerated(accelerate, set_up, None, tmp_path / "memkit", **settings)
    assert_same_weights(model, plain)
    plain = _accelerated(accelerate, _nothing, tmp_path / "plain", None, **settings)

    for folder in ("memkit", "plain"):
        model = _accelerated(accelerate, set_up, tmp_path / folder, None, **settings)

        assert_same_weights(model, plain)


def test_accelerate_moves_nothing_that_is_to_stay(accelerate: Any) -> None:
    model = llama()
    (offload,) = tiny_layers(model)
    keep_in_place(offload)  # type: ignore[arg-type]
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")

    prepared, optimizer, loader = accelerator.prepare(model, loops.adamw(model), loops.token_loader())
    loops.accelerate_epoch(prepared, optimizer, loader, accelerator)

    assert offload.stats().num_fetches > 0  # type: ignore[attr-defined]


# timm


@SET_UPS
def test_timm_resumes_with_an_average_of_the_weights(set_up: SetUp, tmp_path: Path) -> None:
    timm = pytest.importorskip("timm", reason=MISSING)
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2
    from timm.utils import CheckpointSaver, ModelEmaV3

    def train(set_up: SetUp, folder: Path, resume: Path | None = None) -> tuple[nn.Module, nn.Module]:
        folder.mkdir(exist_ok=True)
        model = loops.vision_model()
        optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
        ema = ModelEmaV3(model, decay=0.9)
        scheduler, _ = create_scheduler_v2(optimizer, sched="cosine", num_epochs=4)
        start = 0
        if resume is not None:
            start = timm.models.resume_checkpoint(model, str(resume), optimizer)
            timm.models.load_checkpoint(ema.module, str(resume), use_ema=True)
        made = set_up(model)
        saver = CheckpointSaver(model, optimizer, model_ema=ema, checkpoint_dir=str(folder), recovery_dir=str(folder))
        for epoch in range(start, 1 if resume is None else 2):
            torch.manual_seed(epoch)  # of drop paths
            scheduler.step(epoch)
            loops.timm_epoch(model, optimizer, loops.image_loader(), ema)
            saver.save_checkpoint(epoch, metric=1.0)
        _assert_has_worked(made)
        return model, ema.module

    def both(set_up: SetUp, name: str, resume: str | None = None) -> tuple[nn.Module, nn.Module]:
        found = None if resume is None else next(iter((tmp_path / resume).glob("last.pth.tar")))
        return train(set_up, tmp_path / name, found)

    plain = both(_nothing, "plain")
    found = both(set_up, "memkit")
    for model, expected in zip(found, plain, strict=True):
        assert_same_weights(model, expected)
    plain = both(_nothing, "plain-2", "plain")

    for name in ("memkit", "plain"):
        for model, expected in zip(both(set_up, f"{name}-3", name), plain, strict=True):
            assert_same_weights(model, expected)


def test_copy_for_an_average_has_nothing_attached() -> None:
    pytest.importorskip("timm", reason=MISSING)
    model = loops.vision_model()
    memkit.attach(model, *tiny_offload(model))  # type: ignore[arg-type]

    copied = deepcopy(model)
    copied(torch.randn(2, 3, 32, 32)).sum().backward()

    with pytest.raises(ValueError, match='found none under "tiny"'):
        memkit.stats("tiny")


# diffusers


# PEFT


def _adapted(folder: Path | None = None) -> nn.Module:
    peft = pytest.importorskip("peft", reason=MISSING)
    pytest.importorskip("transformers", reason=MISSING)
    model = llama()
    if folder is not None:
        return peft.PeftModel.from_pretrained(model, folder, is_trainable=True)
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, lora_dropout=0.1))


def test_base_of_lora_streams_and_adapters_stay() -> None:
    model = _adapted()
    (offload,) = tiny_layers(model)

    loops.language_epoch(model, loops.token_loader())

    stats = offload.stats()  # type: ignore[attr-defined]
    assert offload.train == "frozen"  # type: ignore[attr-defined]
    assert stats.num_streamed == 4
    assert stats.d2h_bytes == 0
    offload.close()  # type: ignore[attr-defined]


# TRL


@pytest.mark.parametrize(
    "make",
    [pytest.param(_half, marks=pytest.mark.slow), tiny_layers_and_offload],
    ids=["MemoryBudget", "LayerOffload and CPUOffload"],
)
@pytest.mark.parametrize("with_lora", [pytest.param(False, marks=pytest.mark.slow), True], ids=["all weights", "LoRA"])
def test_sft_resumes(make: Any, with_lora: bool, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason=MISSING)
    from memkit.integrations import MemkitCallback

    def train(folder: str, resume: str | None = None, *, is_plain: bool = False) -> nn.Module:
        given = sft(tmp_path / folder, save_strategy="steps", save_steps=2, assistant_only_loss=False)
        model = _adapted() if with_lora else given["model"]
        callbacks = [] if is_plain else [MemkitCallback(*make(model))]
        trainer = trl.SFTTrainer(
            model, given["args"], train_dataset=given["dataset"], processing_class=given["tokenizer"], callbacks=callbacks
        )
        trainer.train(resume_from_checkpoint=None if resume is None else str(tmp_path / resume / "checkpoint-2"))
        return model

    plain = train("plain", is_plain=True)

    assert_same_weights(train("memkit"), plain)
    assert_same_weights(train("resumed", "memkit"), plain)
    assert_same_weights(train("resumed", "plain"), plain)


def test_adapters_that_come_later_than_the_layer_offload_are_refused(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason=MISSING)
    peft = pytest.importorskip("peft", reason=MISSING)
    from memkit.integrations import MemkitCallback

    given = sft(tmp_path)
    callback = MemkitCallback(*tiny_layers(given["model"]))

    with pytest.raises(ValueError, match=r"parameters that came after its LayerOffload.*lora_A.*peft.get_peft_model"):
        trl.SFTTrainer(
            given["model"],
            given["args"],
            train_dataset=given["dataset"],
            processing_class=given["tokenizer"],
            callbacks=[callback],
            peft_config=peft.LoraConfig(target_modules=["q_proj"]),
        )


# Several processes


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    pytest.importorskip("transformers", reason=MISSING)
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("make", [tiny_offload, tiny_remat])
def test_context_works_within_distributed_data_parallel(make: Callable[[nn.Module], list[object]], group_of_one: None) -> None:
    weights = []
    for is_plain in (True, False):
        model = llama()
        replica = nn.parallel.DistributedDataParallel(model)
        if not is_plain:
            memkit.attach(model, *make(model))  # type: ignore[arg-type]
        loops.language_epoch(replica, loops.token_loader())
        weights.append(model)

    assert_same_weights(weights[1], weights[0])
    stats = memkit.stats("tiny")
    assert stats.num_dropped + stats.num_copies_out > 0
