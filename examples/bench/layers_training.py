"""Training whole runs of a streamed model: under half of its size, with samples in between, with a share that is found out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from layers_curves import llama
from lora import add_lora
from setting import Setting, say
from shared import Line
from torch import Tensor, nn

import memkit
from memkit.core.tensors import storage_bytes

NUM_PLAIN_RUNS = 2
NUM_BATCHES = 4
"""They come again and again, so that the loss falls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A Llama with LoRA, each layer checkpointed, and what it is trained on."""

    model: nn.Module
    trained: list[nn.Parameter]
    initial: list[Tensor]
    """What `trained` begins at, on the CPU."""
    batches: list[Tensor]

    def begin(self) -> torch.optim.Optimizer:
        """Start again from the same weights. They are on the device."""
        with torch.no_grad():
            for parameter, tensor in zip(self.trained, self.initial, strict=True):
                parameter.copy_(tensor)
        return torch.optim.AdamW(self.trained, lr=1e-3)

    def loss(self, number: int) -> Tensor:
        """Return the loss of a batch, float32: smaller differences show than in bfloat16."""
        tokens = self.batches[number % len(self.batches)]
        logits = self.model(input_ids=tokens).logits.float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    def step(self, optimizer: torch.optim.Optimizer, number: int) -> Tensor:
        """Train on one batch; return the loss, which is on the device."""
        loss = self.loss(number)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def losses(self, num_steps: int) -> list[float]:
        """Return those of a run from the beginning."""
        optimizer = self.begin()
        return torch.stack([self.step(optimizer, number) for number in range(num_steps)]).tolist()


def _training(setting: Setting, batch: int, length: int, **options: int) -> Training:
    model = llama(setting, checkpoint=True, **options).model
    size = (NUM_BATCHES, 2, 32) if setting.tiny else (NUM_BATCHES, batch, length)

    def build() -> tuple[list[nn.Parameter], Tensor]:
        return add_lora(model, ("q_proj", "v_proj")), torch.randint(32000, size)

    trained, batches = setting.make(build)
    initial = [parameter.detach().cpu().clone() for parameter in trained]
    return Training(model=model, trained=trained, initial=initial, batches=list(batches))


def capped(setting: Setting) -> Iterator[Line]:
    """A model twice as large as what the process may have of the device, beside the same one without a cap.

    With deterministic algorithms, so that the plain runs have no spread.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        yield _capped(setting)
    finally:
        torch.use_deterministic_algorithms(False)


def _capped(setting: Setting) -> Line:
    training, num_steps = _training(setting, 2, 512), 3 if setting.tiny else 30
    weight_bytes = storage_bytes(training.model.parameters())
    plain = [training.losses(num_steps) for _ in range(NUM_PLAIN_RUNS)]
    say(f"capped: plain {plain}")
    setting.clean()
    line: Line = {"bench": "layers_capped", "weight_bytes": weight_bytes, "cap_bytes": weight_bytes // 2}
    line |= {"num_steps": num_steps, "plain_memory": setting.memory(), "plain_losses": plain}
    line["plain_spread"] = max(_difference(plain[0], other) for other in plain[1:])
    training.model.to("cpu")
    return {**line, **setting.attempt(partial(_under_cap, setting, training, weight_bytes // 2, plain))}


def _under_cap(setting: Setting, training: Training, cap_bytes: int, plain: list[list[float]]) -> Line:
    is_cuda = setting.device.torch_device.type == "cuda"
    setting.clean()
    setting.reset_peak()
    if is_cuda:
        torch.cuda.set_per_process_memory_fraction(cap_bytes / torch.cuda.mem_get_info()[1])
    try:
        with memkit.LayerOffload(training.model, offload_ratio=1.0, train="frozen", device=setting.device) as offload:
            losses = training.losses(len(plain[0]))
            stats, memory = offload.stats(), setting.memory()
    finally:
        if is_cuda:
            torch.cuda.set_per_process_memory_fraction(1.0)
    return {
        "is_capped": is_cuda,
        "num_streamed": stats.num_streamed,
        "overflows": stats.num_overflows,
        "memory": memory,
        "losses": losses,
        "difference": _difference(plain[0], losses),
    }


def _difference(losses: list[float], others: list[float]) -> float:
    """Return the largest difference between two curves."""
    return max(abs(loss - other) for loss, other in zip(losses, others, strict=True))


def alternate(setting: Setting) -> Iterator[Line]:
    """Training and sampling in turn: what is taken of the device and of the host stays the same."""
    training = _training(setting, 2, 1024, num_layers=12, width=1536, inner=4096, num_heads=12)
    num_steps = 6 if setting.tiny else 200
    yield {
        "bench": "layers_alternate",
        "num_steps": num_steps,
        **setting.attempt(partial(_in_turn, setting, training, num_steps)),
    }


def _in_turn(setting: Setting, training: Training, num_steps: int) -> Line:
    model, counter = training.model, setting.device.memory_counter()
    seen: list[Line] = []
    model.to("cpu")
    with memkit.LayerOffload(model, offload_ratio=1.0, train="frozen", device=setting.device) as offload:
        optimizer = training.begin()
        for number in range(num_steps):
            setting.reset_peak()
            loss = training.step(optimizer, number)
            model.eval()
            with torch.no_grad():
                sampled = training.loss(0)
            model.train()
            losses = {"loss": loss.item(), "sampled_loss": sampled.item()}  # the host waits here
            stats = offload.stats()
            taken = {
                "peak_allocated_bytes": None if counter is None else counter.peak_bytes(),
                "allocated_bytes": None if counter is None else counter.allocated_bytes(),
                "host_bytes": stats.host_bytes,
                "slot_bytes": stats.slot_bytes,
                "num_pins": offload._arena.num_pins,  # users have no use for it
                "overflows": stats.num_overflows,
            }
            seen.append(taken)
    return {
        "num_pins_after_2": seen[1]["num_pins"],
        "after_3": seen[2],
        "after_all": seen[-1],
        "num_different": sum(taken != seen[2] for taken in seen[3:]),
        **losses,
    }


def auto(setting: Setting) -> Iterator[Line]:
    """The share is found out: what streams then, and what was predicted of it."""
    training = _training(setting, 4, 2048)
    yield {"bench": "layers_auto", **setting.attempt(partial(_found_out, setting, training))}


def _found_out(setting: Setting, training: Training) -> Line:
    training.model.to("cpu")
    with memkit.LayerOffload(training.model, offload_ratio="auto", device=setting.device) as offload:
        training.losses(6)  # two to choose by, two to see what it takes then, and two that find both done
        stats, plan = offload.stats(), offload.plan
    return {
        "num_layers": len(plan.layers),
        "num_streamed": stats.num_streamed,
        "compute_s": plan.compute_s,
        "predicted_s": stats.predicted_s,
        "actual_s": stats.actual_s,
        "predicted_peak_bytes": stats.predicted_peak_bytes,
        "actual_peak_bytes": stats.actual_peak_bytes,
    }


BENCHES: dict[str, Callable[[Setting], Iterator[Line]]] = {"capped": capped, "alternate": alternate, "auto": auto}
