"""Training loops as the documentation of Accelerate, timm, diffusers and PEFT has them, small ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tests.integrations.cases import token_rows


def token_loader() -> Any:
    """Four batches, the last one smaller."""
    return torch.utils.data.DataLoader(token_rows(), batch_size=4)  # type: ignore[arg-type]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-3)


def accelerate_epoch(model: nn.Module, optimizer: Any, loader: Iterable[Tensor], accelerator: Any) -> None:
    for rows in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=rows, labels=rows).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def language_epoch(model: nn.Module, loader: Iterable[Tensor], optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = adamw(model) if optimizer is None else optimizer
    for rows in loader:
        model(input_ids=rows, labels=rows).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def vision_model() -> nn.Module:
    """Return the same small ViT each time."""
    import timm

    torch.manual_seed(0)
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=6, num_heads=2, num_classes=8, drop_path_rate=0.1
    )


def image_loader() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    sizes = (4, 4, 4, 2)
    return [
        (torch.randn(size, 3, 32, 32, generator=generator), torch.randint(8, (size,), generator=generator)) for size in sizes
    ]


def timm_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: Iterable[tuple[Tensor, Tensor]], ema: Any = None
) -> None:
    """In the shape of `train_one_epoch` in timm's train.py."""
    from timm.loss import LabelSmoothingCrossEntropy
    from timm.utils import dispatch_clip_grad

    loss_fn = LabelSmoothingCrossEntropy(0.1)
    model.train()
    for images, labels in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(images), labels)
        loss.backward()
        dispatch_clip_grad(model.parameters(), 1.0, mode="agc")
        optimizer.step()
        if ema is not None:
            ema.update(model)


def denoiser() -> nn.Module:
    """Return the same small UNet each time."""
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(16, 32),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=4,
        norm_num_groups=4,
    )


def latent_loader() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 3, 16, 16, generator=generator), torch.randn(size, 5, 8, generator=generator))
        for size in (4, 4, 4, 2)
    ]


def diffusers_epoch(
    unet: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, loader: Iterable[tuple[Tensor, Tensor]]
) -> None:
    """In the shape of diffusers' examples/text_to_image: predicts the noise that was added."""
    for latents, text in loader:
        noise = torch.randn_like(latents)
        timesteps = torch.randint(scheduler.config.num_train_timesteps, (len(latents),))
        noisy = scheduler.add_noise(latents, noise, timesteps)
        loss = nn.functional.mse_loss(unet(noisy, timesteps, text, return_dict=False)[0], noise)
        loss.backward()
        nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
