"""Keeps a model with streaming layers where `LayerOffload` has put it, even if a training loop moves it, or a module around
it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memkit import torch_private
from memkit.around import Around, Code
from memkit.attached import attached_to
from memkit.errors import LayerOffloadError
from memkit.weights import LayerOffload


def keep_in_place(offload: LayerOffload) -> LayerOffload:
    """Have a model whose layers stream stay where it is, when a training loop moves it, or a module that has it inside.

    Trainers move the model that they are given to the device (`model.to("cuda")`), which would bring all that streams there.
    From now on such calls leave the model alone, until `offload.close()`: what is to be on the device is there already. The
    callbacks of this room do it themselves. What casts the model raises.

    Args:
        offload: one that is open.

    Returns:
        The same object.

    Raises:
        TypeError: it is no `LayerOffload`.
        ValueError: it is closed.

    Example:
        >>> import torch, memkit
        >>> from memkit.integrations import keep_in_place
        >>> model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)]).requires_grad_(False)
        >>> device = memkit.device.ReferenceDevice()  # on a GPU, leave it out
        >>> with keep_in_place(memkit.LayerOffload(model, offload_ratio=0.75, device=device)):
        ...     _ = torch.nn.ModuleDict({"inner": model}).to("meta")  # as a trainer would move it, to "cuda"
        >>> model[3].weight.device
        device(type='cpu')
    """
    if not isinstance(offload, LayerOffload):
        raise TypeError(f"keep_in_place needs a memkit.LayerOffload; found {type(offload).__name__}")
    if offload not in attached_to(offload.model):
        raise ValueError("keep_in_place needs a LayerOffload that streams; found one that is closed. Make a new one")
    place = torch_private.MOVING_ALL
    if not isinstance(vars(offload.model).get(place), Around):
        around = Around(offload.model, place, _stay)
        offload.until_closed(around)  # ahead: to remove what is not there yet does nothing
        around.put()
    return offload


def _stay(model: nn.Module, code: Code, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Stands for `_apply` of a model: leave its tensors where they are if the call moves them, raise if it casts them."""
    change = args[0] if args else kwargs["fn"]
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_floating_point() and not tensor.is_complex():
            continue
        changed = change(torch.empty(0, dtype=tensor.dtype))
        if changed.dtype != tensor.dtype:
            raise LayerOffloadError(
                f'a {type(model).__name__} whose layers stream was about to be cast: "{name}" is {tensor.dtype}, and was to be '
                f"{changed.dtype}. Cast the model before memkit.LayerOffload is made, and have the trainer leave it as it is"
            )
        if changed.device.type == "cpu" and changed.is_shared():
            return code(*args, **kwargs)  # to be used by several processes: refused by the next forward
    return model
