"""Settings of a training loop under which a feature is not exact, or useless: refused, or warned of, by name."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from memkit.activations import MemoryBudget, Rematerialize
from memkit.errors import warn_user
from memkit.integrations.features import Features, OptimizerStates


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """The settings of a training loop before it begins, by their own names, for errors."""

    device: torch.device
    replicas: str | None = None  # the setting by which one process replicates the model on several GPUs, if any
    num_processes: int = 1
    shards: str | None = None  # the setting that moves or shards the weights
    is_fsdp2: bool = False  # whether `shards` is FSDP2, with each parameter sharded by itself (`DTensor`)
    flattens: str | None = None  # the first version of FSDP, which flattens the weights of a layer into one parameter
    casts: str | None = None
    scales: str | None = None  # the setting that scales the loss with torch's own `GradScaler`
    takes_gradients: str | None = None  # the setting that reads gradients between the backward and the step
    compiles: str | None = None
    checkpoints: str | None = None
    clips: str | None = None  # the setting, or the loop itself, that clips gradients after the backward, or computes their norm
    accumulates: str | None = None


def refuse(features: Features, loop: Loop) -> None:
    """Raise a ValueError that names the setting and the remedy, if features don't go with a training loop."""
    owner = features.owner
    if loop.replicas is not None:
        raise ValueError(
            f"{owner} needs one GPU for each process; found {loop.replicas}, which would have torch.nn.DataParallel copy the "
            "model to each in each step. Set CUDA_VISIBLE_DEVICES=0, or start one process for each GPU (torchrun)"
        )
    if loop.flattens is not None:
        raise ValueError(
            f"{owner} needs each parameter to be a tensor of its own; found {loop.flattens}, which puts those of a layer into "
            "a flat one, and takes it away. Use FSDP2: fsdp_config={'version': 2} in Trainer, "
            "fsdp_version: 2 in accelerate, ModelParallelStrategy in Lightning"
        )
    of_ops = [context for context in features.contexts if isinstance(context, MemoryBudget | Rematerialize)]
    if loop.compiles is not None and of_ops:
        raise ValueError(
            f"{owner} needs ops that can be told apart; found {loop.compiles}, which compiles the model as one. Leave that "
            "out, and compile the blocks: for block in model.model.layers: block.compile()"
        )
    for offload in features.offloads:
        _refuse_streaming(owner, offload.train, offload.device.torch_device, loop)
    if features.states is not None:
        _refuse_states(owner, features.states, [offload.train for offload in features.offloads], loop)
    if loop.compiles is not None and features.offloads:
        warn_user(
            f"{owner}: {loop.compiles} compiles the model as one, and its graph breaks at each layer that streams, so that "
            "its kernels are others and round in another way. Leave it out to have the bits of the run without streaming"
        )
    for context in of_ops if loop.checkpoints is not None else ():
        warn_user(
            f"{owner}: {loop.checkpoints} recomputes every layer in every step, whether or not the "
            f"{type(context).__name__} needs it. Leave it out: what has to be recomputed is chosen by the budget"
        )


def _refuse_streaming(owner: str, train: str, device: torch.device, loop: Loop) -> None:
    if loop.shards is not None:
        raise ValueError(f"{owner}: a LayerOffload moves the weights, and so does {loop.shards}. Use one of the two")
    if train != "frozen" and loop.num_processes > 1:
        raise ValueError(
            f'{owner}: a LayerOffload with train="{train}" takes gradients away that {loop.num_processes} processes would '
            'reduce. Train in one process, or train a part (LoRA, train="frozen")'
        )
    if loop.casts is not None:
        raise ValueError(
            f"{owner}: {loop.casts} casts the model, whose layers stream. Leave it out, and cast the model ahead of "
            "memkit.LayerOffload: model.to(torch.bfloat16)"
        )
    if train != "frozen" and loop.scales is not None:
        raise ValueError(
            f"{owner}: {loop.scales} scales gradients by torch's GradScaler, which does not wait for those that a LayerOffload "
            f'with train="{train}" has in host memory. Use bfloat16, which needs no scale'
        )
    if train == "fused" and loop.takes_gradients is not None:
        raise ValueError(
            f'{owner}: a LayerOffload with train="fused" steps within the backward, so that {loop.takes_gradients} '
            'finds no gradients. Use train="host", and leave out optimizer='
        )
    if (device.type, device.index or 0) != (loop.device.type, loop.device.index or 0):
        raise ValueError(
            f"{owner}: layers stream to {device}, and inputs go to {loop.device}. Make the LayerOffload with "
            f'device="{loop.device}", or have the trainer use {device}'
        )


def _refuse_states(owner: str, states: OptimizerStates, trained: list[str], loop: Loop) -> None:
    if loop.shards is not None and not loop.is_fsdp2:
        raise ValueError(f"{owner}: a StateOffload moves the optimizer's states, and so does {loop.shards}. Use one of the two")
    for train in (train for train in trained if train != "frozen"):
        raise ValueError(
            f'{owner}: a LayerOffload with train="{train}" has the states of streamed layers itself, and a StateOffload '
            "needs an optimizer of its own for the others. Leave the StateOffload out"
        )
    if states.overlaps:
        raise ValueError(
            f"{owner}: a StateOffload with overlap_forward=True needs wait() ahead of whatever reads parameters, and trainers "
            "read them to save. Leave it out"
        )
    if states.when != "backward":
        return
    steps = f'{owner}: a StateOffload with when="backward" steps within each backward, and lets gradients go'
    if loop.clips is not None:
        raise ValueError(f"{steps}, so that {loop.clips} finds none. Leave when= out")
    if loop.scales is not None:
        raise ValueError(f"{steps}, and {loop.scales} scales them. Use bfloat16, which needs no scale, or leave when= out")
    if loop.accumulates is not None:
        raise ValueError(f"{steps}, and {loop.accumulates} adds them up over several. Leave one of them out")
    if loop.num_processes > 1:
        raise ValueError(f"{steps}, before {loop.num_processes} processes have reduced them. Leave when= out")


def is_checkpointing(model: nn.Module) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())
