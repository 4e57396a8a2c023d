"""Accelerate, timm, PEFT and TRL, beyond the bits of test_trainers and test_recipes."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn

import memkit
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
)
from tests.integrations.test_recipes import sft

pytestmark = MARKS


def test_accelerate_moves_nothing_that_is_to_stay() -> None:
    accelerate = pytest.importorskip("accelerate", reason=MISSING)
    pytest.importorskip("transformers", reason=MISSING)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    model = llama()
    (offload,) = tiny_layers(model)
    keep_in_place(offload)  # type: ignore[arg-type]
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")

    prepared, optimizer, loader = accelerator.prepare(model, loops.adamw(model), loops.token_loader())
    loops.accelerate_epoch(prepared, optimizer, loader, accelerator)

    assert offload.stats().num_fetches > 0  # type: ignore[attr-defined]


def test_copy_for_an_average_has_nothing_attached() -> None:
    pytest.importorskip("timm", reason=MISSING)
    model = loops.vision_model()
    memkit.attach(model, *tiny_offload(model))  # type: ignore[arg-type]

    copied = deepcopy(model)
    copied(torch.randn(2, 3, 32, 32)).sum().backward()

    with pytest.raises(ValueError, match='found none under "tiny"'):
        memkit.stats("tiny")


def _adapted() -> nn.Module:
    peft = pytest.importorskip("peft", reason=MISSING)
    pytest.importorskip("transformers", reason=MISSING)
    model = llama()
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


def test_sft_of_adapters_resumes(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason=MISSING)
    from memkit.integrations import MemkitCallback

    def train(folder: str, resume: str | None = None, *, is_plain: bool = False) -> nn.Module:
        given = sft(tmp_path / folder, save_strategy="steps", save_steps=2, assistant_only_loss=False)
        model = _adapted()
        callbacks = [] if is_plain else [MemkitCallback(*tiny_layers_and_offload(model))]
        trainer = trl.SFTTrainer(
            model, given["args"], train_dataset=given["dataset"], processing_class=given["tokenizer"], callbacks=callbacks
        )
        trainer.train(resume_from_checkpoint=None if resume is None else str(tmp_path / resume / "checkpoint-2"))
        return model

    plain = train("plain", is_plain=True)

    for resume in (None, "memkit", "plain"):
        assert_same_weights(train("memkit" if resume is None else "resumed", resume), plain)


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
