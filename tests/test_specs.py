"""From a SPEC to a model: timm's, transformers', and what is said where a SPEC is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memkit.cli import arguments
from memkit.cli.specs import UsageError, build_model, loss_of, make_inputs

META = torch.device("meta")
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "vocab_size": 100}
LLAMA |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def config(folder: Path, **content: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(content))
    return path


@pytest.fixture
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("it asks the network")

    monkeypatch.setattr("socket.socket.connect", refuse)


@pytest.mark.usefixtures("_offline")
def test_model_of_timm() -> None:
    pytest.importorskip("timm")

    model = build_model("timm:vit_tiny_patch16_224", META)

    assert type(model).__name__ == "VisionTransformer"
    assert next(model.parameters()).is_meta
    with pytest.raises(UsageError, match=r"timm has no model 'resnet5000'. Did you mean timm:resnet"):
        build_model("timm:resnet5000", META)


@pytest.mark.usefixtures("_offline")
@pytest.mark.parametrize("how", ["file", "folder"])
def test_model_of_transformers(how: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = config(tmp_path, **LLAMA)

    model = build_model(f"hf:{path if how == 'file' else tmp_path}", META)

    assert type(model).__name__ == "LlamaForCausalLM"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.config.use_cache is False


SMALL_BERT = {"model_type": "bert", "num_hidden_layers": 1, "num_attention_heads": 4}
SMALL_BERT |= {"hidden_size": 64, "intermediate_size": 64}
SMALL_GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 1, "n_head": 4}
SMALL_WHISPER = {"model_type": "whisper", "d_model": 48, "encoder_layers": 1, "decoder_layers": 1}
SMALL_T5 = {"model_type": "t5", "d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 4}


@pytest.mark.parametrize(
    ("architecture", "content"),
    [
        ("BertForSequenceClassification", SMALL_BERT),
        ("BertForMaskedLM", SMALL_BERT),
        ("GPT2LMHeadModel", SMALL_GPT2),
        ("WhisperForConditionalGeneration", SMALL_WHISPER),
        pytest.param("T5ForConditionalGeneration", SMALL_T5, marks=pytest.mark.slow),
        pytest.param("BertModel", SMALL_BERT, marks=pytest.mark.slow),
        ("", SMALL_BERT),
    ],
)
def test_architecture_decides_the_class(architecture: str, content: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = config(tmp_path, **content, **({"architectures": [architecture]} if architecture else {}))

    assert type(build_model(f"hf:{path}", META)).__name__ == (architecture or "BertModel")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "is no configuration of transformers: it has no model_type"),
        ('{"model_type": "lamma"}', "knows no model_type 'lamma'"),
        (json.dumps({**LLAMA, "architectures": ["LamaForCausalLM"]}), "has no LamaForCausalLM, which the configuration names"),
    ],
)
def test_file_that_is_no_configuration(content: str, message: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(content)

    with pytest.raises(UsageError, match=message):
        build_model(f"hf:{tmp_path}", META)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("torchvision:resnet51", r"has no model 'resnet51'\. Did you mean .*torchvision:resnet50"),
        ("torchvision:video.r3d_81", r"Did you mean torchvision:video\.r3d_18"),
        ("torch.nn:Relu", r"torch\.nn has no 'Relu'\. Did you mean .*torch\.nn:ReLU"),
        ("huggingface:llama", "there is no module 'huggingface'. For a model of transformers write hf:CONFIG.json"),
        ("hf:meta-llama/Llama-3", r"found no file 'meta-llama/Llama-3'.*`hf download MODEL config.json`"),
    ],
)
def test_near_names_are_told(spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_model(spec, META)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("resnet50", "torchvision:resnet50 or timm:resnet50"),
        ("config.json", "hf:config.json"),
        ("meta-llama/Llama-3.1-8B", "hf:meta-llama/Llama-3.1-8B"),
        ("models/my.py", "models.my:factory, with the name of a function or class in it"),
        ("torch.nn.ReLU", "torch.nn:ReLU"),
    ],
)
def test_nearest_spec(text: str, spec: str) -> None:
    assert arguments.nearest_spec(text) == spec


def test_failure_of_the_factory_keeps_its_type_and_has_a_note() -> None:
    with pytest.raises(TypeError, match="missing") as raised:
        build_model("torch.nn:Linear", META)

    assert raised.value.__notes__ == ["memkit: raised while torch.nn:Linear was built"]


def test_inputs_of_transformers_are_integers_where_they_are_named_so(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = build_model(f"hf:{config(tmp_path, **LLAMA)}", META)
    named = [("labels", (2, 8), None), ("attention_mask", (2, 8), None), ("inputs_embeds", (2, 8, 64), None)]

    inputs, keywords = make_inputs(model, [("", (2, 8), None), *named], dtype_name="float32", device=META)

    assert [(tensor.dtype, tensor.is_meta) for tensor in inputs] == [(torch.int64, True)]
    assert keywords["labels"].dtype == torch.int64
    assert bool(keywords["attention_mask"].all())  # the model looks at its values
    assert keywords["inputs_embeds"].dtype == torch.bfloat16
    assert loss_of(model, keywords) is not None
    assert loss_of(model, {}) is None


@pytest.mark.parametrize(("shape", "found"), [((8,), "8"), ((8, 8, 8), "8x8x8")])
def test_tokens_of_transformers_have_a_batch_and_a_length(tmp_path: Path, shape: tuple[int, ...], found: str) -> None:
    pytest.importorskip("transformers")
    model = build_model(f"hf:{config(tmp_path, **LLAMA)}", META)

    for name in ("", "input_ids"):
        with pytest.raises(UsageError, match=rf"input_ids needs \(batch, length\), such as 8x2048; found {found}$"):
            make_inputs(model, [(name, shape, None)], dtype_name="float32", device=META)


def test_inputs_of_other_models_are_as_they_are_asked_for() -> None:
    class Named(nn.Module):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return input_ids

    asked = [("", (2, 8), None), ("", (2, 8), "int64")]
    inputs, _ = make_inputs(Named(), asked, dtype_name="float32", device=META)

    assert [tensor.dtype for tensor in inputs] == [torch.float32, torch.int64]
    assert loss_of(Named(), {"labels": inputs[0]}) is None
