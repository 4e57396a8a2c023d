"""Whole models save without data what they save on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

from tests.profile.calls import channels_last
from tests.profile.cases import both, saved

SIZES = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
EXPERTS = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
LINEAR_ATTENTION = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "shared_expert_intermediate_size": 24,
    "layer_types": ["linear_attention", "full_attention"],
}
LATENT_ATTENTION = {
    "num_key_value_heads": 4,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}
VISION = {**SIZES, "image_size": 32, "patch_size": 8}
CODER = {
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
}
SPEECH = {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 20, "pad_token_id": 0, "bos_token_id": 1}
T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
GPT = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}


def _tokens() -> Tensor:
    return torch.randint(3, 90, (2, 12))


def _mask() -> Tensor:
    return torch.tensor([[1] * 12, [1] * 8 + [0] * 4])


def _picture() -> Tensor:
    return torch.randn(2, 3, 32, 32)


TOKENS = {"input_ids": _tokens}
MASKED = {"input_ids": _tokens, "attention_mask": _mask}
LABELLED = {"input_ids": _tokens, "labels": _tokens}

# The class of transformers, its configuration, and the inputs; "use_cache" is off wherever there is such a thing.
TRANSFORMERS: dict[str, tuple[str, dict[str, Any], dict[str, Callable[[], Tensor]]]] = {
    "gpt2": ("GPT2LMHeadModel", GPT, MASKED),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", GPT, TOKENS),
    "llama": ("LlamaForCausalLM", {**SIZES, "num_key_value_heads": 2}, TOKENS),
    "llama_masked": ("LlamaForCausalLM", {**SIZES, "num_key_value_heads": 2}, MASKED),
    "llama_eager": ("LlamaForCausalLM", {**SIZES, "num_key_value_heads": 2, "attn_implementation": "eager"}, TOKENS),
    "mixtral": ("MixtralForCausalLM", {**SIZES, "num_key_value_heads": 2, "num_local_experts": 4}, TOKENS),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**EXPERTS, "num_experts": 4}, TOKENS),
    "qwen3_next": ("Qwen3NextForCausalLM", {**EXPERTS, "num_experts": 4, **LINEAR_ATTENTION}, TOKENS),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**EXPERTS, "n_routed_experts": 4, **LATENT_ATTENTION}, TOKENS),
    "gpt_oss": ("GptOssForCausalLM", {**EXPERTS, "num_local_experts": 4}, TOKENS),
    "gemma2": ("Gemma2ForCausalLM", {**SIZES, "num_key_value_heads": 2, "head_dim": 8}, TOKENS),
    "gpt_neox": ("GPTNeoXForCausalLM", SIZES, TOKENS),
    "falcon_alibi": ("FalconForCausalLM", {**SIZES, "multi_query": True, "alibi": True}, TOKENS),
    "bloom": ("BloomForCausalLM", {"vocab_size": 99, "hidden_size": 32, "n_layer": 2, "n_head": 4}, TOKENS),
    "t5": ("T5ForConditionalGeneration", T5, LABELLED),
    "t5_masked": ("T5ForConditionalGeneration", {**T5, "dropout_rate": 0.0}, {**MASKED, "labels": _tokens}),
    "bert": ("BertForMaskedLM", SIZES, {**MASKED, "labels": _tokens}),
    "deberta": ("DebertaV2ForMaskedLM", SIZES, TOKENS),
    "whisper": (
        "WhisperForConditionalGeneration",
        {**CODER, **SPEECH, "eos_token_id": 2, "decoder_start_token_id": 1},
        {"input_features": lambda: torch.randn(2, 8, 40), "decoder_input_ids": _tokens},
    ),
    "wav2vec2": (
        "Wav2Vec2Model",
        {**SIZES, "conv_dim": [16] * 7, "num_conv_pos_embeddings": 16, "apply_spec_augment": False},
        {"input_values": lambda: torch.randn(2, 2000)},
    ),
    "mamba": ("MambaForCausalLM", {**SIZES, "state_size": 4}, TOKENS),
    "vit": ("ViTModel", VISION, {"pixel_values": _picture}),
    "beit": ("BeitModel", {**VISION, "use_relative_position_bias": True}, {"pixel_values": _picture}),
}

VISION_MODELS = (
    *("mobilenet_v2", "efficientnet_b0", "efficientnet_v2_s", "convnext_tiny", "swin_t", "swin_v2_t", "regnet_y_400mf"),
    *("shufflenet_v2_x0_5", "squeezenet1_1", "mnasnet0_5", "lraspp_mobilenet_v3_large", "deeplabv3_mobilenet_v3_large"),
)


def _transformer(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    model_name, options, inputs = TRANSFORMERS[name]
    model_class = getattr(transformers, model_name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**options)).train()
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    return model, {key: make() for key, make in inputs.items()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_save_what_they_save_on_the_cpu(name: str, mode: str) -> None:
    model, inputs = _transformer(name)
    if mode == "bfloat16":
        model = model.bfloat16()
        inputs = {key: value.bfloat16() if value.is_floating_point() else value for key, value in inputs.items()}

    with torch.autocast("cpu", torch.bfloat16) if mode == "autocast" else nullcontext():
        real, meta = both(model, kwargs=inputs, backward=mode == "float32")

    assert saved(meta) == saved(real)
    assert [row.self_bytes for row in meta.modules] == [row.self_bytes for row in real.modules]


@pytest.mark.slow
@pytest.mark.parametrize("in_channels_last", [False, True])
@pytest.mark.parametrize("name", VISION_MODELS)
def test_vision_models_save_what_they_save_on_the_cpu(name: str, in_channels_last: bool) -> None:
    options = {"weights_backbone": None} if "mobilenet_v3" in name else {}
    model = torchvision.models.get_model(name, weights=None, **options).train()
    x = torch.randn(2, 3, 64, 64)
    if in_channels_last:
        model, x = model.to(memory_format=torch.channels_last), channels_last(x)

    real, meta = both(model, x)

    assert saved(meta) == saved(real)
