"""LoRA of our own, for benches that do without peft."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn


class LoRA(nn.Module):
    """A frozen linear layer, and a trained correction of low rank."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        options = {"bias": False, "dtype": base.weight.dtype, "device": base.weight.device}
        self.down, self.up = nn.Linear(base.in_features, rank, **options), nn.Linear(rank, base.out_features, **options)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Take [..., in_features], return [..., out_features]."""
        return self.base(x) + self.up(self.down(x))


def add_lora(model: nn.Module, names: Collection[str], rank: int = 16) -> list[nn.Parameter]:
    """Freeze a model, and put LoRA around each linear layer of one of these names. Return what is trained."""
    model.requires_grad_(False)
    parents = [module for module in model.modules() if not isinstance(module, LoRA)]
    for module in parents:
        for name, child in list(module.named_children()):
            if name in names and isinstance(child, nn.Linear):
                setattr(module, name, LoRA(child, rank))
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
