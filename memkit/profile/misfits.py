"""The shapes that modules of torch need, for the note on an exception of one that was given another."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_SPACE = ("depth", "height", "width")


def misfit(module: nn.Module, args: tuple[Any, ...]) -> str:
    """Return in words which shape a module needs, if its first argument has another. A module of another kind needs as many
    sizes as the first convolution in it.

    Example:
        >>> import torch
        >>> misfit(nn.Conv2d(3, 8, 1), (torch.zeros(8),))
        'it needs (batch, 3, height, width), and was given (8)'
    """
    if not args or not isinstance(args[0], Tensor):
        return ""
    found, needed = tuple(args[0].shape), _needed(module)
    if needed:
        is_fine = _fits(found, needed) or (isinstance(module, _CONVOLUTIONS) and _fits(found, needed[1:]))
    else:
        convolutions = (inner for inner in module.modules() if isinstance(inner, _CONVOLUTIONS))
        needed = next(map(_needed, convolutions), ())
        is_fine = not needed or len(found) == len(needed)
    return "" if is_fine else f"it needs ({', '.join(map(str, needed))}), and was given ({', '.join(map(str, found))})"


def _needed(module: nn.Module) -> tuple[int | str, ...]:
    """Return the sizes that a module needs; "..." at the beginning is any number of them."""
    if isinstance(module, nn.Linear):
        return "...", module.in_features
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return "...", *module.normalized_shape
    if isinstance(module, nn.RNNBase):
        return "...", module.input_size
    if isinstance(module, (nn.BatchNorm2d, nn.BatchNorm3d)):
        return "batch", module.num_features, *_SPACE[-(2 if isinstance(module, nn.BatchNorm2d) else 3) :]
    if isinstance(module, _CONVOLUTIONS):
        return "batch", module.in_channels, *_SPACE[-len(module.kernel_size) :]
    return ()


def _fits(found: tuple[int, ...], needed: tuple[int | str, ...]) -> bool:
    if needed[0] == "...":
        needed = needed[1:]
        found = found[-len(needed) :]
    return len(found) == len(needed) and all(
        isinstance(need, str) or size == need for size, need in zip(found, needed, strict=True)
    )
