"""The training steps that the benches time. They are built on the default device: `with torch.device("cuda"): resnet50()`."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torchvision
from measuring import Workload
from torch import Tensor, nn


def scalar(output: Tensor) -> Tensor:
    return output.float().square().mean()


def on_images(name: str, model: nn.Module, batch: int, size: int = 224, num_classes: int = 1000) -> Workload:
    """A model on random images; cross entropy outside of the context."""
    images, labels = torch.empty(batch, 3, size, size).normal_(), torch.randint(num_classes, (batch,))
    return Workload(
        name=f"{name}_b{batch}",
        model=model,
        forward=lambda: model(images),
        loss=lambda output: nn.functional.cross_entropy(output, labels),
    )


def resnet50(batch: int = 256, size: int = 224) -> Workload:
    """Torchvision's ResNet-50, TF32; cross entropy outside of the context."""
    return on_images("resnet50", torchvision.models.resnet50(), batch, size)


def _llama_model(num_layers: int, width: int, inner: int, num_heads: int) -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        vocab_size=32000,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).bfloat16()


def llama(
    batch: int = 8, length: int = 2048, *, num_layers: int = 16, width: int = 2048, inner: int = 5632, num_heads: int = 16
) -> Workload:
    """A Llama, by default of 0.95 billion parameters, bfloat16; its body in the context, head and loss outside."""
    model: Any = _llama_model(num_layers, width, inner, num_heads)
    tokens = torch.randint(32000, (batch, length))

    def loss(hidden: Tensor) -> Tensor:
        logits = model.lm_head(hidden)
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    return Workload(name="llama_0.95b", model=model, forward=lambda: model.model(input_ids=tokens)[0], loss=loss)


def llama_whole(*args: int, **kwargs: int) -> Workload:
    """The same, but head and loss are in the context as well: a budget holds for the logits, too."""
    workload = llama(*args, **kwargs)
    return Workload(
        name=f"{workload.name}_whole",
        model=workload.model,
        forward=lambda: workload.loss(workload.forward()),
        loss=lambda loss: loss,
    )


def llama_checkpointed() -> Workload:
    """The same with a checkpoint around each layer, as transformers does it."""
    workload = llama()
    workload.model.train()
    workload.model.gradient_checkpointing_enable({"use_reentrant": False})
    return Workload(name="llama_0.95b_checkpointed", model=workload.model, forward=workload.forward, loss=workload.loss)


def gpt2(batch: int = 8, length: int = 1024, *, num_layers: int = 24, width: int = 1280, num_heads: int = 20) -> Workload:
    """A GPT-2 with dropout of 0.1, by default of 0.54 billion parameters, bfloat16; its body in the context, head and loss
    outside."""
    import transformers

    config = transformers.GPT2Config(
        n_embd=width, n_layer=num_layers, n_head=num_heads, n_positions=length, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    model: Any = transformers.GPT2LMHeadModel(config).bfloat16().train()
    tokens = torch.randint(config.vocab_size, (batch, length))

    def loss(hidden: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model.lm_head(hidden).flatten(0, 1), tokens.flatten())

    return Workload(
        name=f"gpt2_{num_layers}x{width}", model=model, forward=lambda: model.transformer(input_ids=tokens)[0], loss=loss
    )


def whisper(
    batch: int = 16, frames: int = 3000, length: int = 256, *, num_layers: int = 12, width: int = 768, num_heads: int = 12
) -> Workload:
    """A Whisper, by default of the size "small", bfloat16; its body in the context, head and loss outside.

    Args:
        frames: of the spectrogram, 100 for a second.
        length: tokens of the text.
        num_layers: that encode, and as many that decode.
    """
    import transformers

    config = transformers.WhisperConfig(
        d_model=width,
        encoder_layers=num_layers,
        decoder_layers=num_layers,
        encoder_attention_heads=num_heads,
        decoder_attention_heads=num_heads,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        max_source_positions=frames // 2,
        use_cache=False,
    )
    model: Any = transformers.WhisperForConditionalGeneration(config).bfloat16().train()
    features = torch.empty(batch, config.num_mel_bins, frames).normal_().bfloat16()
    tokens = torch.randint(config.vocab_size, (batch, length))

    def forward() -> Tensor:
        return model.model(input_features=features, decoder_input_ids=tokens)[0]

    def loss(hidden: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model.proj_out(hidden).flatten(0, 1), tokens.flatten())

    return Workload(name=f"whisper_{num_layers}+{num_layers}x{width}", model=model, forward=forward, loss=loss)


def vit_large() -> Workload:
    """Timm's ViT-L/16, bfloat16, batch 128."""
    import timm

    model, images = timm.create_model("vit_large_patch16_224").bfloat16(), torch.empty(128, 3, 224, 224).normal_().bfloat16()
    return Workload(name="timm_vit_l_b128", model=model, forward=lambda: model(images), loss=scalar)


class StackOfLSTMs(nn.Module):
    """Eight LSTMs of one layer each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(8))

    def forward(self, batch: Tensor) -> Tensor:
        """Take and return [batch, seq, width]."""
        for layer in self.layers:
            batch = layer(batch)[0]
        return batch


def lstms(width: int = 2048, batch: int = 256, length: int = 128) -> Workload:
    """Eight one-layer LSTMs; if they are narrow, launching their many small kernels is what takes time."""
    model, x = StackOfLSTMs(width), torch.empty(batch, length, width).normal_()
    return Workload(name=f"lstm_8x{width}_b{batch}", model=model, forward=lambda: model(x), loss=scalar)


class UNet(nn.Module):
    """Four levels down and up again, with skip connections."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.stem = self._block(3, width)
        self.down = nn.ModuleList(self._block(widths[i], widths[i + 1]) for i in range(depth))
        self.up = nn.ModuleList(self._block(widths[i + 1] + widths[i], widths[i]) for i in reversed(range(depth)))
        self.head = nn.Conv2d(width, 3, 1)

    def _block(self, width: int, new_width: int) -> nn.Module:
        def half(first: int) -> tuple[nn.Module, ...]:
            return nn.Conv2d(first, new_width, 3, padding=1), nn.GroupNorm(8, new_width), nn.SiLU()

        return nn.Sequential(*half(width), *half(new_width))

    def forward(self, images: Tensor) -> Tensor:
        """Take and return [batch, 3, height, width]."""
        skips = [self.stem(images)]
        for block in self.down:
            skips.append(block(nn.functional.max_pool2d(skips[-1], 2)))
        out = skips.pop()
        for block in self.up:
            skip = skips.pop()
            out = block(torch.cat([nn.functional.interpolate(out, size=skip.shape[-2:]), skip], dim=1))
        return self.head(out)


def unet(width: int = 64, batch: int = 16, size: int = 256) -> Workload:
    """A U-Net, float32."""
    model, images = UNet(width), torch.empty(batch, 3, size, size).normal_()
    return Workload(name=f"unet_b{batch}", model=model, forward=lambda: model(images), loss=scalar)


class BasicBlock(nn.Module):
    """Two convolutions and a shortcut that pads the channels it lacks with zeros."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.stride, self.num_new = stride, outputs - inputs
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, images: Tensor) -> Tensor:
        """Take and return [batch, channels, height, width]."""
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(images)))))
        if self.num_new:
            images = nn.functional.pad(images[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.num_new))
        return self.relu(out + images)


class CifarResNet(nn.Module):
    """The ResNet for 32 x 32 images: three stages of basic blocks, 6 n + 2 layers. Source: arXiv 1512.03385, section 4.2."""

    def __init__(self, num_blocks: int = 200, num_classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        blocks = [BasicBlock(16, 16, 1) for _ in range(num_blocks)]
        for inputs, outputs in ((16, 32), (32, 64)):
            blocks += [BasicBlock(inputs, outputs, 2), *(BasicBlock(outputs, outputs, 1) for _ in range(num_blocks - 1))]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(64, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Take [batch, 3, height, width], return [batch, classes]."""
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


class ShuffleUnit(nn.Module):
    """A unit of ShuffleNet V2: half of the channels stay, half go through a branch, and both are interleaved.

    Args:
        kernel: the size of the depthwise convolution, or 0 for three of size 3 one after the other, as in Xception.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        half = outputs // 2
        first = inputs if stride == 2 else inputs // 2
        self.branch = _xception(first, half, stride) if kernel == 0 else _depthwise(first, half, kernel, stride)
        shortcut = (*_spatial(inputs, 3, stride), *_pointwise(inputs, half)) if stride == 2 else ()
        self.shortcut = nn.Sequential(*shortcut)

    def forward(self, images: Tensor) -> Tensor:
        """Take and return [batch, channels, height, width]."""
        stays, goes = (images, images) if self.stride == 2 else images.chunk(2, dim=1)
        out = torch.cat([self.shortcut(stays), self.branch(goes)], dim=1)
        batch, channels, height, width = out.shape
        return out.view(batch, 2, channels // 2, height, width).transpose(1, 2).reshape(out.shape)


def _spatial(channels: int, kernel: int, stride: int) -> tuple[nn.Module, ...]:
    conv = nn.Conv2d(channels, channels, kernel, stride, kernel // 2, groups=channels, bias=False)
    return conv, nn.BatchNorm2d(channels)


def _pointwise(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)


def _depthwise(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Module:
    return nn.Sequential(*_pointwise(inputs, outputs), *_spatial(outputs, kernel, stride), *_pointwise(outputs, outputs))


def _xception(inputs: int, outputs: int, stride: int) -> nn.Module:
    layers = (*_spatial(inputs, 3, stride), *_pointwise(inputs, outputs))
    for _ in range(2):
        layers = (*layers, *_spatial(outputs, 3, 1), *_pointwise(outputs, outputs))
    return nn.Sequential(*layers)


class Supernet(nn.Module):
    """Choice blocks of four ShuffleNet units each, of which a path takes one. Source: Single Path One-Shot, arXiv 1904.00420.

    Args:
        widths: channels of each stage.
        num_blocks: choice blocks of each stage; the first of them halves height and width.
    """

    KERNELS = (3, 5, 7, 0)

    def __init__(
        self,
        widths: Sequence[int] = (64, 160, 320, 640),
        num_blocks: Sequence[int] = (4, 4, 8, 4),
        num_classes: int = 1000,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.choices, inputs = nn.ModuleList(), 16
        for outputs, count in zip(widths, num_blocks, strict=True):
            for index in range(count):
                stride = 2 if index == 0 else 1
                self.choices.append(nn.ModuleList(ShuffleUnit(inputs, outputs, kernel, stride) for kernel in self.KERNELS))
                inputs = outputs
        self.last = nn.Sequential(*_pointwise(inputs, 1024))
        self.head = nn.Linear(1024, num_classes)

    def forward(self, images: Tensor, path: Sequence[int]) -> Tensor:
        """Take [batch, 3, height, width] and the number of the unit to take in each block; return [batch, classes]."""
        out = self.stem(images)
        for units, choice in zip(self.choices, path, strict=True):
            out = units[choice](out)
        return self.head(self.last(out).mean((2, 3)))


def random_paths(num_blocks: int, seed: int = 0) -> Iterator[list[int]]:
    """Yield paths without end."""
    source = random.Random(seed)
    while True:
        yield [source.randrange(len(Supernet.KERNELS)) for _ in range(num_blocks)]


def supernet(model: nn.Module, num_blocks: int, batch: int, size: int = 224) -> Workload:
    """A supernet, or what is wrapped around one, that takes another path each time."""
    images, labels = torch.empty(batch, 3, size, size).normal_(), torch.randint(1000, (batch,))
    paths = random_paths(num_blocks)

    def forward() -> Any:
        return model(images, next(paths))

    return Workload(
        name=f"supernet_b{batch}",
        model=model,
        forward=forward,
        loss=lambda output: nn.functional.cross_entropy(output, labels),
    )


def llama_3b(
    batch: int = 4,
    length: int = 2048,
    *,
    num_layers: int = 28,
    width: int = 3072,
    inner: int = 8192,
    num_heads: int = 24,
    rank: int = 0,
    checkpoint: bool = False,
) -> Workload:
    """A Llama, by default of 3.2 billion parameters, bfloat16; head and loss are in the forward.

    Args:
        rank: of LoRA on the projections of queries and values, with all else frozen; 0 leaves everything trainable.
        checkpoint: each layer, as transformers does it.
    """
    model: Any = _llama_model(num_layers, width, inner, num_heads)
    model.train()
    tokens = torch.randint(32000, (batch, length))
    if rank:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules=["q_proj", "v_proj"]))
        model.enable_input_require_grads()
    if checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    name = "llama_3.2b" + (f"_lora{rank}" if rank else "") + ("_checkpointed" if checkpoint else "")
    return on_tokens(name, model, tokens)


def on_tokens(name: str, model: nn.Module, tokens: Tensor) -> Workload:
    """A language model on tokens, [batch, length], which are the labels as well; head and loss are in the forward."""

    def forward() -> Tensor:
        logits = model(input_ids=tokens).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    return Workload(name=name, model=model, forward=forward, loss=lambda loss: loss)
