"""Every layer streamed, beside each of the peers that can do the job, in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from layers_adaptors import PEERS, LayerPeer, measure_peer
from layers_curves import NUM_WARMUP, link_of, llama, streamed
from measuring import Measurement, StepOf, Workload, measure
from measuring import plain as nothing
from setting import Setting, figures_of, say
from shared import Line
from torch import nn
from workloads import on_tokens

from memkit.core.tensors import storage_bytes
from memkit.weights.selection import find_layers


def peers_forward(setting: Setting) -> Iterator[Line]:
    """Forward only, without grad mode."""
    workload = llama(setting)
    workload.model.requires_grad_(False)
    yield from _beside_peers(setting, workload, backward=False)


def peers_lora(setting: Setting) -> Iterator[Line]:
    """A frozen base with LoRA, each layer checkpointed."""
    yield from _beside_peers(setting, llama(setting, rank=16, checkpoint=True), backward=True)


def _beside_peers(setting: Setting, workload: Workload, *, backward: bool) -> Iterator[Line]:
    """Measure plainly, with memkit, and with each peer in a copy. Each line is there as soon as it is measured."""
    tokens = setting.make(lambda: torch.randint(32000, (2, 32) if setting.tiny else (4, 2048)))

    def step_of(model: nn.Module) -> Workload:
        return replace(on_tokens(workload.name, model, tokens), backward=backward)

    model, link = workload.model, link_of(setting)
    layer_bytes = max(storage_bytes(layer.parameters()) for layer in find_layers(model, None).values())
    line: Line = {
        "bench": "layers_peers",
        "name": workload.name,
        "backward": backward,
        "layer_bytes": layer_bytes,
        "h2d_bytes_per_s": link.h2d_bytes_per_s,
    }
    steps: dict[str, Any] = {"num_steps": setting.steps, "num_warmup": NUM_WARMUP, "num_in_a_row": setting.steps}
    plain = measure(step_of(model), nothing, setting.device, **steps)
    yield {**line, "engine": "plain", **figures_of(plain, plain)}
    model.to("cpu")  # so that peaks hold nothing of it
    setting.clean()
    ours: Line = {}
    for slots in (2, 3):  # what is told of the peers is beside the default, three
        ours = setting.attempt(partial(streamed, setting, step_of(model), 1.0, link, plain, slots=slots))
        yield {**line, "engine": "memkit", "slots": slots, **ours}
    for peer in PEERS:
        found = setting.attempt(partial(_of_peer, setting, peer, step_of, model, plain))
        if "step_s" in found and "step_s" in ours:
            found["to_memkit"] = found["step_s"] / ours["step_s"]
            found["in_a_row_to_memkit"] = found["in_a_row_s"] / ours["in_a_row_s"]
            if found["peak_allocated_bytes"] is not None and ours["peak_allocated_bytes"] is not None:
                found["memkit_peak_over_bytes"] = ours["peak_allocated_bytes"] - found["peak_allocated_bytes"]
        say(f"{workload.name}, {peer.name}: {found}")
        yield {**line, "engine": peer.name, **found}


def _of_peer(setting: Setting, peer: LayerPeer, step_of: StepOf, model: nn.Module, plain: Measurement) -> Line:
    found = measure_peer(peer, step_of, model, setting.device, num_steps=setting.steps, num_warmup=NUM_WARMUP)
    return {"left_out": found} if isinstance(found, str) else figures_of(found, plain)


BENCHES: dict[str, Callable[[Setting], Iterator[Line]]] = {"peers_forward": peers_forward, "peers_lora": peers_lora}
