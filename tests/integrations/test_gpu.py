"""On a GPU: a Llama whose weights do not fit trains with layers streamed, under the Hugging Face Trainer and Lightning."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memkit
from tests.integrations.cases import MARKS, MISSING, assert_same_weights

transformers = pytest.importorskip("transformers", reason=MISSING)
pytest.importorskip("accelerate", reason=MISSING)
lightning = pytest.importorskip("lightning.pytorch", reason=MISSING)

from memkit.integrations import MemkitCallback, MemkitLightningCallback  # noqa: E402  # not before they are known to be there

pytestmark = [*MARKS, pytest.mark.gpu]

VOCABULARY, LENGTH, BATCH, STEPS = 1024, 64, 2, 4
CAP_BYTES = 800 * 2**20
"""Of the GPU, where it is capped. The weights below take 1170 MiB, and three slots 147 MiB."""


def _llama(num_layers: int = 24) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=1024, intermediate_size=2816, num_hidden_layers=num_layers, num_attention_heads=8,
        max_position_embeddings=LENGTH, bos_token_id=0, eos_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def _rows() -> list[Tensor]:
    starts = torch.randint(VOCABULARY, (STEPS * BATCH, 1), generator=torch.Generator().manual_seed(1))
    return list((starts + torch.arange(LENGTH)) % VOCABULARY)


@pytest.fixture
def cap() -> Iterator[None]:
    """Have the GPU be smaller than the weights."""
    assert sum(parameter.nbytes for parameter in _llama().parameters()) > CAP_BYTES
    _empty()
    torch.cuda.set_per_process_memory_fraction(CAP_BYTES / torch.cuda.mem_get_info()[1])
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    _empty()


def _empty() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _trainer(folder: Path, model: nn.Module, callback: object = None, **settings: Any) -> Any:
    arguments = transformers.TrainingArguments(
        **{
            "output_dir": str(folder),
            "report_to": "none",
            "per_device_train_batch_size": BATCH,
            "max_steps": STEPS,
            "logging_steps": 1,
            "learning_rate": 1e-4,
            "save_strategy": "no",
            "disable_tqdm": True,
            **settings,
        }
    )
    assert arguments.n_gpu == 1, "set CUDA_VISIBLE_DEVICES=0 for this test"
    rows = [{"input_ids": row, "labels": row} for row in _rows()]
    return transformers.Trainer(
        model, arguments, train_dataset=rows, eval_dataset=rows[:2], callbacks=[] if callback is None else [callback]
    )


class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
    """Trains a Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.losses = _llama(), list[float]()

    def training_step(self, rows: Tensor, _: int) -> Tensor:
        loss = self.model(input_ids=rows, labels=rows).loss
        self.losses.append(loss.item())
        return loss

    def validation_step(self, rows: Tensor, _: int) -> None:
        self.log("validation", self.model(input_ids=rows, labels=rows).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def _lightning(folder: Path, callback: object = None, **settings: Any) -> Any:
    return lightning.Trainer(
        accelerator="gpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        **{"max_epochs": 2, "callbacks": [] if callback is None else [callback], **settings},
    )


def _loader() -> Any:
    return torch.utils.data.DataLoader(_rows(), batch_size=BATCH)  # type: ignore[arg-type]


def _check_states(optimizer: torch.optim.Optimizer) -> None:
    """See that an optimizer's states are where the weights are: of layers that stream in host memory."""
    places = {parameter.device.type for parameter in optimizer.state}
    assert places == {"cpu", "cuda"}
    for parameter, state in optimizer.state.items():
        assert state["exp_avg"].device == parameter.device


class CheckStates(lightning.Callback):  # type: ignore[misc,name-defined]
    """Looks before Lightning takes all from the GPU."""

    def on_train_end(self, trainer: Any, _: Any) -> None:
        _check_states(trainer.optimizers[0])


def test_trainer_trains_a_llama_that_does_not_fit(cap: None, tmp_path: Path) -> None:
    model = _llama()
    offload = memkit.LayerOffload(model, offload_ratio=1.0)
    settings = {"max_steps": 2 * STEPS, "eval_strategy": "steps", "eval_steps": STEPS, "gradient_checkpointing": True}
    trainer = _trainer(tmp_path, model, MemkitCallback(offload), **settings)

    trainer.train()

    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(losses) == 2 * STEPS
    assert losses[-1] < losses[0]
    assert trainer.evaluate()["eval_loss"] > 0
    _check_states(trainer.optimizer.optimizer)
    offload.close()


def test_lightning_trains_a_llama_that_does_not_fit_and_resumes(cap: None, tmp_path: Path) -> None:
    whole = Module()
    callback = MemkitLightningCallback(memkit.LayerOffload(whole.model, offload_ratio=1.0))
    trainer = _lightning(tmp_path, callback, max_epochs=1)
    trainer.fit(whole, _loader(), _loader())
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    trainer.fit_loop.max_epochs = 2
    trainer.fit(whole, _loader(), _loader())
    callback.close()
    assert len(whole.losses) == 2 * STEPS
    assert whole.losses[-1] < whole.losses[0]
    del trainer
    _empty()

    resumed = Module()
    callback = MemkitLightningCallback(memkit.LayerOffload(resumed.model, offload_ratio=1.0))
    trainer = _lightning(tmp_path, callback, callbacks=[callback, CheckStates()], max_epochs=2)
    trainer.fit(resumed, _loader(), _loader(), ckpt_path=tmp_path / "saved.ckpt")

    assert len(resumed.losses) == STEPS
    callback.close()


def _adapted() -> nn.Module:
    peft = pytest.importorskip("peft", reason=MISSING)
    model = _llama(8)
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"]))


def test_adapters_have_the_weights_of_the_plain_run_to_the_bit(tmp_path: Path) -> None:
    plain, model = _adapted(), _adapted()

    _trainer(tmp_path, plain).train()
    with MemkitCallback(memkit.LayerOffload(model, offload_ratio=1.0)) as callback:
        _trainer(tmp_path, model, callback).train()
        assert callback.figures()["memkit/layers/moved_in_gib"] > 0

    assert_same_weights(model.cpu(), plain.cpu())


def test_budget_is_kept_to_with_the_weights_of_the_plain_run(tmp_path: Path) -> None:
    _empty()
    torch.cuda.reset_peak_memory_stats()
    plain, settings = _adapted(), {"max_steps": 3 * STEPS}
    _trainer(tmp_path, plain, **settings).train()
    plain_bytes, resident_bytes = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    plain.cpu()
    _empty()
    budget = resident_bytes + int(0.6 * (plain_bytes - resident_bytes))
    model = _adapted()
    callback = MemkitCallback(memkit.MemoryBudget(budget, tag="gpu", min_bytes="64KiB"))

    _trainer(tmp_path, model, callback, **settings).train()

    assert memkit.stats("gpu").step_peak_bytes is not None
    assert memkit.stats("gpu").step_peak_bytes <= budget  # type: ignore[operator]
    assert_same_weights(model.cpu(), plain)
