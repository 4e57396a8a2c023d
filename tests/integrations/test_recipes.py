"""The page of recipes: each is run as it stands, and leaves the weights that the same lines leave where memkit does nothing."""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memkit
import memkit.integrations
from memkit.device import ReferenceDevice
from tests.integrations import loops
from tests.integrations.cases import MARKS, MISSING, VOCABULARY, assert_same_weights, llama, token_rows
from tests.integrations.runs import arguments_of, lightning_module

pytestmark = MARKS

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"


def _recipes() -> dict[str, str]:
    """Return the blocks of Python by the headings that they are under."""
    found, section, title = dict[str, str](), "", ""
    for heading, text in re.findall(r"^(##+ .*)\n((?:(?!^##+ )[^\n]*\n?)*)", PAGE.read_text(), re.MULTILINE):
        level, name = heading.split(" ", 1)
        section, title = (name, name) if level == "##" else (section, f"{section}: {name}")
        for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            assert title not in found, f"two blocks under {title}"
            found[title] = block
    return found


RECIPES = _recipes()
Names = dict[str, Any]


def _trainer(folder: Path) -> Names:
    rows = [{"input_ids": row, "labels": row} for row in token_rows()]
    return {"args": arguments_of(folder), "model": llama(), "dataset": rows}


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"<{number}>": number for number in range(VOCABULARY)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<0>")), eos_token="<0>", pad_token="<0>", unk_token="<0>"
    )


def sft(folder: Path, **settings: Any) -> Names:
    trl = pytest.importorskip("trl", reason=MISSING)
    datasets = pytest.importorskip("datasets", reason=MISSING)
    arguments = trl.SFTConfig(
        str(folder), use_cpu=True, report_to="none", per_device_train_batch_size=4, max_steps=4, disable_tqdm=True, bf16=False,
        **{"gradient_checkpointing": False, "save_strategy": "no", **settings},
    )  # fmt: skip
    rows = datasets.Dataset.from_dict({"input_ids": [row.tolist() for row in token_rows()]})
    return {"model": llama(), "args": arguments, "dataset": rows, "tokenizer": tokenizer()}


def _lightning(folder: Path) -> Names:
    module = lightning_module()
    settings = {
        "accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
        "enable_checkpointing": False, "default_root_dir": folder,
    }  # fmt: skip
    return {"model": module.model, "lightning_module": module, "settings": settings, "loader": loops.token_loader()}


def _accelerate(_: Path) -> Names:
    accelerate = pytest.importorskip("accelerate", reason=MISSING)
    pytest.importorskip("transformers", reason=MISSING)
    model, accelerator = llama(), accelerate.Accelerator(cpu=True)
    return {
        "model": model,
        "optimizer": loops.adamw(model),
        "loader": loops.token_loader(),
        "accelerator": accelerator,
        "train": loops.accelerate_epoch,
    }


def _timm(_: Path) -> Names:
    pytest.importorskip("timm", reason=MISSING)
    return {"model": loops.vision_model(), "loader": loops.image_loader(), "train_one_epoch": loops.timm_epoch}


def _diffusers(_: Path) -> Names:
    diffusers = pytest.importorskip("diffusers", reason=MISSING)
    unet = loops.denoiser()
    return {
        "model": unet,
        "unet": unet,
        "optimizer": loops.adamw(unet),
        "scheduler": diffusers.DDPMScheduler(),
        "loader": loops.latent_loader(),
        "train": loops.diffusers_epoch,
    }


def _peft(_: Path) -> Names:
    pytest.importorskip("transformers", reason=MISSING)
    pytest.importorskip("peft", reason=MISSING)
    return {"model": llama(), "loader": loops.token_loader(), "train": loops.language_epoch}


def _own(_: Path) -> Names:
    pytest.importorskip("transformers", reason=MISSING)
    return {"model": llama(), "loader": loops.token_loader(), "train": loops.language_epoch, "device": "cpu"}


SETTINGS: dict[str, Callable[[Path], Names]] = {
    "Hugging Face Trainer: A budget": _trainer,
    "Hugging Face Trainer: Layers that stream": _trainer,
    "TRL": sft,
    "Hugging Face Trainer: Optimizer states in host memory": _trainer,
    "Lightning: A budget": _lightning,
    "Lightning: Optimizer states in host memory": _lightning,
    "Lightning: Layers that stream": _lightning,
    "Accelerate: A budget": _accelerate,
    "Accelerate: Layers that stream": _accelerate,
    "Accelerate: Optimizer states in host memory": _accelerate,
    "timm": _timm,
    "diffusers": _diffusers,
    "PEFT (LoRA)": _peft,
    "Another loop that moves the model": _own,
}
"""What the lines of each recipe find, by its headings."""
FRAGMENTS = {"Hugging Face Trainer: In the logs"}
"""Blocks that train nothing, and are tested below."""


class _Nothing:
    """Stands for memkit, and does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...


def _without_memkit(patch: pytest.MonkeyPatch) -> None:
    for name in ("MemoryBudget", "LayerOffload", "StateOffload", "attach"):
        patch.setattr(memkit, name, _Nothing)
    patch.setattr(memkit.integrations, "keep_in_place", _Nothing)
    for library, base, name in (
        ("transformers", "TrainerCallback", "MemkitCallback"),
        ("lightning.pytorch", "Callback", "MemkitLightningCallback"),
    ):
        if importlib.util.find_spec(library.partition(".")[0]) is not None:
            made = type(name, (_Nothing, getattr(importlib.import_module(library), base)), {})
            patch.setattr(memkit.integrations, name, made, raising=False)


def _at_a_small_scale(
    patch: pytest.MonkeyPatch, offloads: list[memkit.LayerOffload], opened: list[memkit.StateOffload]
) -> None:
    """Have a budget be half of what a step takes, and all layers stream, on a device that stands in for a GPU."""
    make_states, init = memkit.StateOffload, memkit.StateOffload.__init__
    make_budget, make_offload, device = memkit.MemoryBudget, memkit.LayerOffload, ReferenceDevice()

    def budget(asked: str, **given: Any) -> memkit.MemoryBudget:
        assert asked == "12GiB"
        return make_budget(0.5, tag="recipe", min_bytes=0, device=device, **given)

    def offload(model: nn.Module, *, offload_ratio: float) -> memkit.LayerOffload:
        assert offload_ratio == 0.75
        offloads.append(make_offload(model, offload_ratio=1.0, device=device))
        return offloads[-1]

    def note(states: memkit.StateOffload, *args: Any, **given: Any) -> None:
        init(states, *args, **given)
        opened.append(states)

    patch.setattr(make_states, "__init__", functools.wraps(init)(note))
    patch.setattr(memkit, "StateOffload", functools.partial(make_states, device=device))
    patch.setattr(memkit, "MemoryBudget", budget)
    patch.setattr(memkit, "LayerOffload", offload)


def _run(recipe: str, folder: Path) -> nn.Module:
    names = SETTINGS[recipe](folder)
    torch.manual_seed(0)
    exec(compile(RECIPES[recipe], str(PAGE), "exec"), names)
    found = names["model"]
    assert isinstance(found, nn.Module)
    return found


@pytest.mark.parametrize("recipe", SETTINGS)
def test_recipe_leaves_the_weights_of_the_plain_run(recipe: str, tmp_path: Path) -> None:
    offloads: list[memkit.LayerOffload] = []
    opened: list[memkit.StateOffload] = []
    with pytest.MonkeyPatch.context() as patch:
        _without_memkit(patch)
        plain = _run(recipe, tmp_path / "plain")

    with pytest.MonkeyPatch.context() as patch:
        _at_a_small_scale(patch, offloads, opened)
        model = _run(recipe, tmp_path / "memkit")

    assert_same_weights(model, plain)
    if offloads:
        assert offloads[0].stats().num_fetches > 0
    elif opened:
        assert opened[0].stats().num_steps == 4
        assert opened[0].stats().h2d_bytes > 0
        for states in opened:
            states.close()  # a library may hold the optimizer for as long as the process lives
    else:
        stats = memkit.stats("recipe")
        assert stats.num_iterations == 4
        assert stats.num_dropped + stats.num_copies_out > 0


def test_all_recipes_of_the_page_are_run() -> None:
    assert RECIPES.keys() == SETTINGS.keys() | FRAGMENTS


@pytest.mark.parametrize("recipe", SETTINGS)
def test_recipe_has_at_most_two_lines_of_memkit(recipe: str) -> None:
    lines = [line for line in RECIPES[recipe].splitlines() if line and not line.startswith(("import ", "from "))]

    assert (
        1
        <= sum(bool(re.search("memkit|Memkit|keep_in_place|device_placement|offload|budget|states", line)) for line in lines)
        <= 2
    )


def test_reporter_is_put_behind_the_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers", reason=MISSING)
    integrations = pytest.importorskip("transformers.integrations", reason=MISSING)
    handler = pytest.importorskip("transformers.trainer_callback").CallbackHandler
    reporter = type("TensorBoardCallback", (transformers.TrainerCallback,), {})
    monkeypatch.setattr(integrations, "TensorBoardCallback", reporter)
    first, second = reporter(), memkit.integrations.MemkitCallback(memkit.CPUOffload(0.3))
    callbacks = handler([first, second], None, None, None, None)

    exec(RECIPES["Hugging Face Trainer: In the logs"], {"trainer": callbacks})

    assert callbacks.callbacks == [second, first]


@pytest.fixture(autouse=True)
def _no_state_of_accelerate() -> None:
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)
