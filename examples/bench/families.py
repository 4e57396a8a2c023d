"""Models of many kinds and what they are called with, for `bench_families.py`: each step one batch, the same for all who ask.

A plain step of each is thought to take 50 to 250 ms and 8 to 40 GiB on an H100. Weights are random, in bfloat16 unless said.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
import torchvision
from measuring import blocks_of
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models import densenet, regnet, resnet, vision_transformer
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from workloads import UNet, scalar

Batch = dict[str, Any]
"""Tensors and numbers by name. Any: as models take them."""
Draw = random.Random
LARGEST = -1
"""The number of the step whose batch is as large as any may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model on the device, and its steps."""

    model: nn.Module
    blocks: Sequence[nn.Module]
    """The layers that a person would checkpoint."""
    loss: Callable[[Batch], Tensor]
    """Runs the forward, head and loss with it."""
    draw: Callable[[Draw, bool], Batch]
    """Makes a batch on the default device with torch's random numbers, of sizes that are drawn, or of the largest."""

    def batch(self, step: int, device: torch.device) -> Batch:
        """Return the batch of a step. Its sizes and numbers depend on the step alone."""
        torch.manual_seed(1 + step)
        with torch.device(device):
            return self.draw(Draw(1 + step), step == LARGEST)


def shapes_of(batch: Batch) -> tuple[Any, ...]:
    """Return what is new where kernels are to be chosen for a batch."""
    return tuple((name, value.shape if isinstance(value, Tensor) else None) for name, value in sorted(batch.items()))


# Language, speech, experts


def of_transformers(name: str, small: dict[str, Any], full: dict[str, Any], is_tiny: bool, **options: Any) -> Any:
    """Return a model of transformers by the name of its class. Any: it is not installed everywhere."""
    import transformers

    model_class = getattr(transformers, name)
    return model_class(model_class.config_class(use_cache=False, **{**options, **(small if is_tiny else full)}))


_SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "vocab_size": 256}
_SMALL_EXPERTS = {**_SMALL, "num_hidden_layers": 2, "num_key_value_heads": 2}


def _full(layers: int, width: int, inner: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": 32000,
    }


llama = partial(of_transformers, "LlamaForCausalLM", _SMALL, _full(16, 2048, 5632, 16, 16))
"""0.95e9 parameters, 16 layers."""
qwen3 = partial(
    of_transformers,
    "Qwen3ForCausalLM",
    {**_SMALL, "num_key_value_heads": 2, "head_dim": 16},
    {**_full(20, 1536, 4096, 12, 4), "head_dim": 128},
)
"""0.62e9 parameters, 20 layers."""
gpt2 = partial(
    of_transformers,
    "GPT2LMHeadModel",
    {"n_embd": 32, "n_layer": 4, "n_head": 2, "vocab_size": 256},
    {"n_embd": 1280, "n_layer": 24, "n_head": 20},
    bos_token_id=0,
    eos_token_id=0,
)
"""0.54e9 parameters, 24 layers, dropout of .1."""
t5 = partial(
    of_transformers,
    "T5ForConditionalGeneration",
    {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 256},
    {"d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_layers": 16, "num_heads": 16, "vocab_size": 32128},
    dropout_rate=0.1,
    decoder_start_token_id=0,
)
"""16 + 16 layers, dropout of .1."""
mixtral = partial(
    of_transformers,
    "MixtralForCausalLM",
    _SMALL_EXPERTS,
    _full(8, 1024, 3584, 16, 4),
    num_local_experts=8,
)
"""8 layers of 8 experts."""
looping = partial(mixtral, experts_implementation="eager")
"""The same, with a call of each expert, of as many tokens as it gets."""
qwen3_moe = partial(
    of_transformers,
    "Qwen3MoeForCausalLM",
    {**_SMALL_EXPERTS, "head_dim": 16, "moe_intermediate_size": 16},
    {**_full(8, 1024, 3072, 16, 4), "head_dim": 64, "moe_intermediate_size": 768},
    num_experts=64,
    num_experts_per_tok=4,
)
"""8 layers of 64 experts, of which each token takes 4."""


def whisper(is_tiny: bool, layerdrop: float) -> Any:
    """Of the size "small"."""

    def sizes(layers: int, width: int, heads: int, frames: int) -> dict[str, Any]:
        found = {"d_model": width, "max_source_positions": frames // 2}
        for half in ("encoder", "decoder"):
            named = {"layers": layers, "attention_heads": heads, "ffn_dim": 4 * width, "layerdrop": layerdrop}
            found |= {f"{half}_{name}": value for name, value in named.items()}
        return found

    small, full = sizes(2, 32, 2, 32), sizes(12, 768, 12, 3000)
    return of_transformers("WhisperForConditionalGeneration", small, full, is_tiny)


def _called(model: nn.Module, draw: Callable[[Draw, bool], Batch], blocks: Sequence[nn.Module] = ()) -> Family:
    """A model of transformers, which makes its loss itself."""
    return Family(model=model, blocks=blocks or blocks_of(model), loss=lambda batch: model(**batch).loss, draw=draw)


def _on_tokens(build: Callable[[bool], Any], rows: int, lengths: tuple[int, int], is_tiny: bool) -> Family:
    """Rows of tokens as labels as well, of lengths in steps of 8; in small models of a sixteenth of each."""
    model, divisor = build(is_tiny), 16 if is_tiny else 1
    vocab_size, num_rows = model.config.vocab_size, min(rows, 2) if is_tiny else rows

    def draw(source: Draw, is_largest: bool) -> Batch:
        length = lengths[1] if is_largest else source.randrange(lengths[0], lengths[1] + 1, 8)
        tokens = torch.randint(2, vocab_size, (num_rows, length // divisor))
        return {"input_ids": tokens, "labels": tokens}

    return _called(model, draw, [layer for layer in model.modules() if type(layer).__name__ == "T5Block"])


def _masked(is_tiny: bool) -> Family:
    """No mask, one of ones, or one of real padding; 1 to 8 rows."""
    model, length = qwen3(is_tiny), 48 if is_tiny else 1024
    vocab_size = model.config.vocab_size

    def draw(source: Draw, is_largest: bool) -> Batch:
        rows, kind = (8, "padded") if is_largest else (source.randint(1, 8), source.choice(("absent", "ones", "padded")))
        tokens = torch.randint(2, vocab_size, (rows, length))
        batch = {"input_ids": tokens, "labels": tokens}
        if kind != "absent":
            mask = torch.ones_like(tokens)
            if kind == "padded":
                ends = torch.tensor([[source.randint(length // 2, length - 1)] for _ in range(rows)])
                mask = (torch.arange(length) < ends).long()
                batch["labels"] = tokens.masked_fill(mask == 0, -100)
            batch["attention_mask"] = mask
        return batch

    return _called(model, draw)


def _whisper(layerdrop: float, is_tiny: bool) -> Family:
    model = whisper(is_tiny, layerdrop)
    rows, frames, length = (2, 32, 8) if is_tiny else (16, 3000, 256)

    def draw(source: Draw, is_largest: bool) -> Batch:
        features = torch.randn(rows, model.config.num_mel_bins, frames, dtype=_dtype(is_tiny))
        return {"input_features": features, "labels": torch.randint(2, model.config.vocab_size, (rows, length))}

    return _called(model, draw)


def _dtype(is_tiny: bool) -> torch.dtype:
    return torch.float32 if is_tiny else torch.bfloat16


# Images


def _on_images(
    model: nn.Module,
    rows: int,
    sizes: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    loss: Callable[[Any, Tensor], Tensor],
    blocks: Sequence[nn.Module],
) -> Family:
    """Images of sizes that are drawn, the last of which is the largest, with a label each."""

    def draw(source: Draw, is_largest: bool) -> Batch:
        height, width = sizes[-1] if is_largest else source.choice(sizes)
        return {"images": torch.randn(rows, 3, height, width, dtype=dtype), "labels": torch.randint(10, (rows,))}

    return Family(
        model=model,
        blocks=blocks,
        loss=lambda batch: loss(model(batch["images"]), batch["labels"]),
        draw=draw,
    )


def _classified(output: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(output.float(), labels)


def _torchvision(
    name: str, small: Callable[[], nn.Module], block: type[nn.Module], rows: int, is_tiny: bool, *, is_full: bool = False
) -> Family:
    """One of its classifiers by name."""
    model = small() if is_tiny else getattr(torchvision.models, name)()
    blocks = [layer for layer in model.modules() if isinstance(layer, block)]
    dtype = torch.float32 if is_full else _dtype(is_tiny)
    rows, size = (2, 32) if is_tiny else (rows, 224)
    return _on_images(model, rows, [(size, size)], dtype, _classified, blocks)


def _unet(is_tiny: bool) -> Family:
    model, rows, size = (UNet(8), 1, 32) if is_tiny else (UNet(64), 48, 256)
    blocks = [model.stem, *model.down, *model.up]
    return _on_images(model, rows, [(size, size)], _dtype(is_tiny), lambda output, _: scalar(output), blocks)


SIZES = ((480, 640), (640, 480), (640, 800), (800, 800), (800, 1088), (800, 1344))


def _detector(is_tiny: bool) -> Family:
    """A ResNet and a pyramid of features, without the detector's heads."""
    name, rows, divisor = ("resnet18", 1, 16) if is_tiny else ("resnet50", 12, 1)
    model = resnet_fpn_backbone(
        backbone_name=name, weights=None, norm_layer=nn.BatchNorm2d, trainable_layers=5
    )  # its own BatchNorm is frozen
    sizes = [(height // divisor, width // divisor) for height, width in SIZES]

    def loss(maps: dict[str, Tensor], _: Tensor) -> Tensor:
        return torch.stack([scalar(each) for each in maps.values()]).sum()

    blocks = [layer for layer in model.modules() if isinstance(layer, (resnet.BasicBlock, resnet.Bottleneck))]
    return _on_images(model, rows, sizes, _dtype(is_tiny), loss, blocks)


# What is called in other ways


class Cells(nn.Module):
    """Some steps of two LSTM cells on top of each other, which other steps use as well."""

    def __init__(self, cells: nn.ModuleList) -> None:
        super().__init__()
        self.cells = cells

    def forward(self, x: Tensor, states: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Take and return [steps, batch, width], and each cell's states."""
        outputs = []
        for out in x:
            for index, cell in enumerate(self.cells):
                states = [*states]
                states[index] = cell(out, states[index])
                out = states[index][0]
            outputs.append(out)
        return torch.stack(outputs), states


class Recurrent(nn.Module):
    """Cells called step by step, in chunks that a person would checkpoint."""

    def __init__(self, width: int, num_chunks: int) -> None:
        super().__init__()
        cells = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(2))
        self.chunks = nn.ModuleList(Cells(cells) for _ in range(num_chunks))
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        """Take and return [steps, batch, width]."""
        zeros = x.new_zeros(x.shape[1], self.width)
        states, outputs = [(zeros, zeros), (zeros, zeros)], []
        for chunk, part in zip(self.chunks, x.chunk(len(self.chunks)), strict=True):
            out, states = chunk(part, states)
            outputs.append(out)
        return torch.cat(outputs)


def _lstm(is_tiny: bool) -> Family:
    steps, rows, width, num_chunks = (16, 4, 16, 4) if is_tiny else (256, 2048, 1024, 16)
    model = Recurrent(width, num_chunks)

    def draw(source: Draw, is_largest: bool) -> Batch:
        return {"x": torch.randn(steps, rows, width, dtype=_dtype(is_tiny))}

    return Family(model=model, blocks=[*model.chunks], loss=lambda batch: scalar(model(batch["x"])), draw=draw)


class PackedBlock(nn.Module):
    """A layer of a transformer over sequences one behind the other."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm, self.inner_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
        """Take and return [total, width].

        Args:
            cu_seqlens: where each sequence begins, and the end of the last.
        """
        query, key, value = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        attended = _attended(query, key, value, cu_seqlens, longest)
        x = x + self.proj(attended.flatten(1))
        return x + self.inner(self.inner_norm(x))


def _attended(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    """Causal attention within each sequence: in one kernel where there is one, else sequence by sequence."""
    varlen = find_spec("torch.nn.attention.varlen")
    if varlen is not None and query.is_cuda and query.dtype == torch.bfloat16:
        attend = import_module(varlen.name).varlen_attn
        causal = {"is_causal": True} if "is_causal" in signature(attend).parameters else {"window_size": (-1, 0)}
        return attend(query, key, value, cu_seqlens, cu_seqlens, longest, longest, **causal)
    lengths = cu_seqlens.diff().tolist()
    parts = zip(*(each.transpose(0, 1).split(lengths, dim=1) for each in (query, key, value)), strict=True)
    found = [functional.scaled_dot_product_attention(*part, is_causal=True) for part in parts]
    return torch.cat(found, dim=1).transpose(0, 1)


class Packed(nn.Module):
    """A small transformer over sequences one behind the other."""

    def __init__(self, num_layers: int, width: int, num_heads: int, vocab_size: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size)
        self.layers = nn.ModuleList(PackedBlock(width, num_heads) for _ in range(num_layers))

    def forward(self, tokens: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
        """Take [total], return [total, vocab]."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cu_seqlens, longest)
        return self.head(x)


def _packed(is_tiny: bool) -> Family:
    """Sequences that are drawn, as many as fit."""
    layers, width, heads, vocab_size, most = (4, 32, 2, 256, 96) if is_tiny else (16, 1024, 16, 32000, 16384)
    model = Packed(layers, width, heads, vocab_size)

    def draw(source: Draw, is_largest: bool) -> Batch:
        lengths, total = list[int](), 0
        while total + (length := source.randint(most // 64, most // 8)) <= most:
            lengths.append(length)
            total += length
        if is_largest and total < most:
            lengths.append(most - total)
        ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        return {"tokens": torch.randint(vocab_size, (sum(lengths),)), "cu_seqlens": ends, "longest": max(lengths)}

    def loss(batch: Batch) -> Tensor:
        return functional.cross_entropy(model(**batch)[:-1].float(), batch["tokens"][1:])

    return Family(model=model, blocks=[*model.layers], loss=loss, draw=draw)


class Passing(nn.Module):
    """A layer of a graph network: a message along each edge, summed where they arrive."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, width))
        self.update, self.norm = nn.Linear(2 * width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        """Take and return [nodes, width]; `source` and `target` are nodes, [edges]."""
        messages = self.message(torch.cat([x[source], x[target]], dim=1))
        arrived = torch.zeros_like(x).index_add(0, target, messages)
        return x + functional.gelu(self.update(torch.cat([self.norm(x), arrived], dim=1)))


class GraphNet(nn.Module):
    """Eight layers of messages."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Passing(width) for _ in range(8))

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        """Take and return [nodes, width]."""
        for layer in self.layers:
            x = layer(x, source, target)
        return x


def _gnn(is_tiny: bool) -> Family:
    """50,000 to 200,000 edges between an eighth as many nodes."""
    width, divisor = (16, 1000) if is_tiny else (512, 1)
    model = GraphNet(width)

    def draw(source: Draw, is_largest: bool) -> Batch:
        num_edges = (200_000 if is_largest else source.randint(50_000, 200_000)) // divisor
        num_nodes = num_edges // 8
        ends = torch.randint(num_nodes, (2, num_edges))
        return {"x": torch.randn(num_nodes, width, dtype=_dtype(is_tiny)), "source": ends[0], "target": ends[1]}

    return Family(model=model, blocks=[*model.layers], loss=lambda batch: scalar(model(**batch)), draw=draw)


def _bottlenecks() -> nn.Module:
    return torchvision.models.ResNet(resnet.Bottleneck, [1, 1, 1, 1], num_classes=10)


def _small_vit() -> nn.Module:
    return torchvision.models.VisionTransformer(32, 8, num_layers=4, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=10)


def _small_regnet() -> nn.Module:
    sizes = regnet.BlockParams(
        depths=[2, 2], widths=[16, 32], group_widths=[8, 8], bottleneck_multipliers=[1.0] * 2, strides=[2] * 2, se_ratio=0.25
    )
    return torchvision.models.RegNet(sizes, num_classes=10)


FAMILIES: dict[str, Callable[[bool], Family]] = {
    "resnet50": partial(_torchvision, "resnet50", _bottlenecks, resnet.Bottleneck, 128, is_full=True),
    "regnet": partial(_torchvision, "regnet_y_8gf", _small_regnet, regnet.ResBottleneckBlock, 128),
    "densenet": partial(
        _torchvision, "densenet121", partial(torchvision.models.DenseNet, 8, (2, 2), 16), densenet._DenseLayer, 128
    ),
    "unet": _unet,
    "vit": partial(_torchvision, "vit_b_16", _small_vit, vision_transformer.EncoderBlock, 256),
    "llama": partial(_on_tokens, llama, 4, (2048, 2048)),
    "qwen3": partial(_on_tokens, qwen3, 8, (1024, 1024)),
    "gpt2": partial(_on_tokens, gpt2, 8, (1024, 1024)),
    "whisper": partial(_whisper, 0.0),
    "t5": partial(_on_tokens, t5, 8, (512, 512)),
    "mixtral": partial(_on_tokens, mixtral, 8, (1024, 1024)),
    "looping": partial(_on_tokens, looping, 8, (1024, 1024)),
    "experts64": partial(_on_tokens, qwen3_moe, 8, (1024, 1024)),
    "lstm": _lstm,
    "packed": _packed,
    "detector": _detector,
    "gnn": _gnn,
    "masks": _masked,
    "layerdrop": partial(_whisper, 0.1),
    "lengths": partial(_on_tokens, qwen3, 8, (448, 1024)),
}


def built(name: str, device: torch.device, *, is_tiny: bool) -> Family:
    """Build a family's model on the device, the same each time, in train mode."""
    torch.manual_seed(0)
    with torch.device(device):
        family = FAMILIES[name](is_tiny)
    kind = torch.float32 if is_tiny or name == "resnet50" else torch.bfloat16
    family.model.to(kind).train()
    return family
