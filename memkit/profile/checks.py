"""Checks the arguments of `profile_memory` before anything runs, and finds the device of the run."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from memkit.device import Device, open_device
from memkit.errors import ProfileError
from memkit.hooks import may_step_in_backward
from memkit.profile.sharded import INSTEAD
from memkit.profile.simulate import META, TARGETS
from memkit.profile.step import USE_META, Step
from memkit.profile.table import check_view
from memkit.sizes import check_bytes
from memkit.steppers import stepped_shards
from memkit.torch_state import fsdp_modules


def check_arguments(step: Step, *, target: str, tag: str, warmup: int, depth: int | None, sort_by: str | None) -> None:
    """Check the arguments of `profile_memory`.

    Raises:
        TypeError, ValueError: one is invalid.
        ProfileError: grad mode is off, or other hooks would see what autograd saves.
    """
    if not isinstance(step.model, nn.Module):
        raise TypeError(f"profile_memory needs a torch.nn.Module; found {type(step.model).__name__}")
    if step.loss_fn is not None and not callable(step.loss_fn):
        raise TypeError(f"loss_fn must be callable; found {type(step.loss_fn).__name__}")
    if target not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(map(repr, TARGETS))}; found {target!r}")
    if not isinstance(tag, str) or not tag:
        raise ValueError(f"tag must be a name; found {tag!r}")
    if not isinstance(warmup, int) or warmup < 0:
        raise ValueError(f"warmup must be a number of runs, 0 or more; found {warmup!r}")
    check_view(depth=depth, sort_by=sort_by, top=None)
    if not torch.is_grad_enabled():
        raise ProfileError("grad mode is off, so autograd saves nothing; call profile_memory outside of torch.no_grad()")
    step.check_surroundings()


def traced_bytes(step: Step, run_device: torch.device, *, trace: bool, min_bytes: int | str) -> int | None:
    """Return the smallest size of saved storages that a trace lists one by one; None without a trace."""
    num_bytes = check_bytes("min_bytes", min_bytes)
    if not isinstance(trace, bool):
        raise ValueError(f"trace is True or False; found {trace!r}")
    if not trace:
        return None
    if run_device != META:
        raise ValueError(
            f'trace=True needs device="meta", where no data is needed; found a run on {run_device}. Pass device="meta"'
        )
    if not step.backward:
        raise ValueError("trace=True needs a whole step; found backward=False. Pass backward=True")
    return num_bytes


def check_model(step: Step) -> None:
    """Check that a model can be run, and that running it trains nothing.

    Raises:
        ProfileError: it can't be profiled.
    """
    named = [pair for module in step.modules() for pair in (*module.named_parameters(), *module.named_buffers())]
    lazy = [name for name, tensor in named if is_lazy(tensor)]
    if lazy:
        raise ProfileError(f"{lazy[0]} has no shape yet; run the model once before profiling it")
    stepped = stepped_shards()
    stepping = [name for name, tensor in named if id(tensor) in stepped or may_step_in_backward(tensor)]
    if stepping and step.backward:
        raise ProfileError(
            f"{stepping[0]} has a hook that runs when its gradient is accumulated, such as an optimizer step in the backward: "
            "a profile would train the model. Remove it, or profile with backward=False"
        )


def run_device(step: Step, asked: str | torch.device | Device | None) -> torch.device:
    """Return the device of the run: meta, or the one device that the model and inputs are on.

    Raises:
        ValueError: `asked` is another device, or the inputs are on another device than the model.
        ProfileError: the model is on several devices.
    """
    if asked is not None and str(asked) in ("meta", "meta:0"):
        check_gradients_without_data(step)
        return META
    model_devices = {tensor.device for tensor in step.device_tensors()} | {slot.device for slot in step.streamed.slots}
    input_devices = {tensor.device for tensor in step.input_tensors() if tensor.dim() or tensor.device.type != "cpu"}
    if step.sharded:  # shards may be in host memory, and FSDP2 brings inputs from there
        model_devices.add(step.sharded.device)
        input_devices.discard(torch.device("cpu"))
    if len(model_devices) > 1:
        raise ProfileError(
            f"the model is spread over {_names(model_devices)}; profile_memory measures one device at a time. "
            'Use device="meta", or move it to one device'
        )
    if model_devices and input_devices - model_devices:
        raise ValueError(
            f"the model is on {_names(model_devices)} and its inputs are on {_names(input_devices)}; move the inputs to the "
            'model\'s device, or use device="meta", where data does not matter'
        )
    found = next(iter(model_devices or input_devices), torch.device("cpu"))
    if asked is not None:
        wanted = open_device(asked, advice=USE_META).torch_device
        if wanted.type != found.type or wanted.index not in (None, found.index):
            raise ValueError(
                f'device must be where the model is ({found}), or "meta"; found {str(wanted)!r}. To run on another device, '
                "move model and inputs there first"
            )
    return found


def refuse_sharded(step: Step) -> None:
    """Raise if a model that FSDP2 has sharded is to run without data.

    Raises:
        ProfileError: it is sharded.
    """
    if fsdp_modules(step.modules()):
        raise ProfileError(
            'the model is sharded by fully_shard, and what ranks send each other needs data; found device="meta", trace=True, '
            f"fit= or gpu=. Leave that out, or profile the model before sharding: {INSTEAD}"
        )


def check_gradients_without_data(step: Step) -> None:
    """Raise if gradients would go to the host in a run without data.

    Raises:
        ProfileError: they would.
    """
    if step.backward and any(parameter.requires_grad for parameter in step.streamed.parameters):
        raise ProfileError(
            'device="meta" cannot follow gradients that LayerOffload takes to host memory (train="host"): the peak of the '
            "backward would be wrong. Profile where the model is, or with backward=False, or before LayerOffload is made"
        )


def _names(devices: set[torch.device]) -> str:
    return ", ".join(sorted(map(str, devices)))
