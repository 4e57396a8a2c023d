r"""The same training by others that keep optimizer states in host memory, one process each: by hand, torchao, FSDP2, DeepSpeed.

pip download --no-deps --dest wheels torchao einops hjson msgpack py-cpuinfo pydantic pydantic_core annotated-types \
    typing-inspection
pip wheel --no-deps --wheel-dir wheels deepspeed  # with DS_BUILD_OPS=0: it builds what it needs where it runs
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from setting import Setting
from shared import Line
from states_steps import LR, Loop, Trained, memkit_line, timed, told, trained_llama
from torch import Tensor, nn

NUM_STEPS = 4


class ByHand:
    """All float32 states in pinned memory: to the device, a fused step of all, and back."""

    def __init__(self, parameters: list[nn.Parameter], setting: Setting) -> None:
        pin = setting.device.torch_device.type == "cuda"
        self._parameters = parameters
        self._on_host = [
            (
                parameter.detach().float().cpu().pin_memory() if pin else parameter.detach().float().cpu(),
                *(torch.zeros(parameter.size(), pin_memory=pin) for _ in range(2)),
            )
            for parameter in parameters
        ]
        self._num_steps = 0
        self._is_fused = pin

    def step(self) -> None:
        copies, optimizers = [], []
        for parameter, rows in zip(self._parameters, self._on_host, strict=True):
            there = [row.to(parameter.device, non_blocking=True, copy=True) for row in rows]
            copied = nn.Parameter(there[0])
            assert parameter.grad is not None
            copied.grad = parameter.grad.float()
            copies.append((copied, *there[1:]))
        optimizer = torch.optim.AdamW([copied for copied, *_ in copies], lr=LR, fused=self._is_fused)
        for copied, mean, square in copies:
            count = torch.tensor(float(self._num_steps), device=copied.device if self._is_fused else "cpu")
            optimizer.state[copied] = {"step": count, "exp_avg": mean, "exp_avg_sq": square}
        optimizer.step()
        optimizers.append(optimizer)
        self._num_steps += 1
        with torch.no_grad():
            for parameter, (copied, *states), rows in zip(self._parameters, copies, self._on_host, strict=True):
                parameter.copy_(copied)
                for row, there in zip(rows, (copied.detach(), *states), strict=True):
                    row.copy_(there, non_blocking=True)
        if self._is_fused:
            torch.cuda.synchronize()  # the next step reads them


def by_hand(setting: Setting) -> Iterator[Line]:
    """All states to the device, step, back; beside memkit's step on the device."""
    trained = trained_llama(setting)

    def run() -> Line:
        made = ByHand(trained.parameters, setting)
        return timed(trained, Loop(update=made.step, clip=trained.clip), setting, num_steps=NUM_STEPS)

    yield {**_about(trained), "row": "by hand", **told("by hand", setting.attempt(run))}
    trained.clear()
    ours = partial(memkit_line, trained, setting, clips=True, num_steps=NUM_STEPS, update="device")
    yield {**_about(trained), "row": "memkit, device", **told("memkit", setting.attempt(ours))}


def torchao(setting: Setting) -> Iterator[Line]:
    """Torchao's `CPUOffloadOptimizer`: bfloat16 states on the host, no clipping; beside memkit with the same states."""
    trained = trained_llama(setting)

    def run() -> Line:
        from torchao.optim import CPUOffloadOptimizer

        made = CPUOffloadOptimizer(trained.parameters, torch.optim.AdamW, offload_gradients=False, fused=True, lr=LR)
        return timed(trained, Loop(update=made.step), setting, num_steps=NUM_STEPS)

    yield {**_about(trained), "row": "torchao CPUOffloadOptimizer", **told("torchao", setting.attempt(run))}
    trained.clear()
    for row, options in (
        ("device", {"update": "device"}),
        ("device, within the backward", {"update": "device", "when": "backward"}),
    ):
        ours = partial(_same_precision, trained, setting, options)
        yield {**_about(trained), "row": f"memkit, {row}, bfloat16 states", **told(f"memkit {row}", setting.attempt(ours))}
        trained.clear()
    yield from _eight_bit(trained, setting)


def _same_precision(trained: Trained, setting: Setting, options: dict[str, Any]) -> Line:
    import memkit

    optimizer = torch.optim.AdamW(trained.parameters, lr=LR, fused=True)
    with memkit.StateOffload(optimizer, device=setting.device, **options) as states:
        return timed(trained, Loop(update=optimizer.step, wait=states.wait), setting, num_steps=NUM_STEPS)


def _eight_bit(trained: Trained, setting: Setting) -> Iterator[Line]:
    """Torchao's 8-bit states, on the device and streamed, beside the next forward and behind the backward."""
    import memkit

    def run(overlaps: bool | None) -> Line:
        from torchao.optim import AdamW8bit

        optimizer = AdamW8bit(trained.parameters, lr=LR)
        states: Any = nullcontext()
        if overlaps is not None:
            states = memkit.StateOffload(optimizer, overlap_forward=overlaps, device=setting.device)
        with states:
            wait = None if overlaps is None else states.wait
            return timed(trained, Loop(update=optimizer.step, clip=trained.clip, wait=wait), setting, num_steps=NUM_STEPS)

    for name, overlaps in (
        ("torchao AdamW8bit", None),
        ("memkit, torchao AdamW8bit", True),
        ("memkit, torchao AdamW8bit, behind the backward", False),
    ):
        yield {**_about(trained), "row": name, **told(name, setting.attempt(partial(run, overlaps)))}
        trained.clear()


def fsdp(setting: Setting) -> Iterator[Line]:
    """FSDP2 of one rank with `CPUOffloadPolicy`: float32 parameters, gradients and states on the host, fused AdamW there."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    trained = trained_llama(setting)
    is_cuda = setting.device.torch_device.type == "cuda"

    def run() -> Line:
        backend = "cuda:nccl,cpu:gloo" if is_cuda else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        try:
            mesh = init_device_mesh("cuda" if is_cuda else "cpu", (1,))
            options: dict[str, Any] = {
                "mesh": mesh,
                "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
                "offload_policy": CPUOffloadPolicy(pin_memory=is_cuda),
            }
            model: Any = trained.model.float().cpu()
            for layer in model.model.layers:
                fully_shard(layer, **options)
            fully_shard(model, **options)
            trained.parameters = list(model.parameters())
            optimizer = torch.optim.AdamW(trained.parameters, lr=LR, fused=True)
            return timed(trained, Loop(update=optimizer.step, clip=trained.clip), setting, num_steps=2, num_warm=1)
        finally:
            dist.destroy_process_group()

    yield {**_about(trained), "row": "FSDP2 CPUOffloadPolicy", **told("FSDP2", setting.attempt(run))}


def deepspeed(setting: Setting) -> Iterator[Line]:
    """DeepSpeed's ZeRO-2 with the optimizer on the host, clipping; ahead of it memkit on the device: it changes the model."""
    trained = trained_llama(setting)
    for row, overlaps in (("device", False), ("device, beside the next forward", True)):
        ours = partial(memkit_line, trained, setting, clips=True, num_steps=NUM_STEPS, overlap_forward=overlaps)
        yield {**_about(trained), "row": f"memkit, {row}", **told(f"memkit, {row}", setting.attempt(ours))}
        trained.clear()

    def run() -> Line:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29512", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        import deepspeed as package

        config = {
            "train_micro_batch_size_per_gpu": 4,
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
                "overlap_comm": True,
                "contiguous_gradients": True,
            },
            "optimizer": {"type": "AdamW", "params": {"lr": LR, "torch_adam": False}},
        }
        engine, *_ = package.initialize(model=trained.model, model_parameters=trained.parameters, config=config)
        return _deepspeed_steps(engine, trained, setting)

    yield {**_about(trained), "row": "DeepSpeed ZeRO-2 offload", **told("DeepSpeed", setting.attempt(run))}


def _deepspeed_steps(engine: Any, trained: Trained, setting: Setting) -> Line:
    """Its engine has the backward and the step; what is timed is the same."""
    import statistics

    taken = []
    for _ in range(1 + NUM_STEPS):
        start = setting.device.record_event()
        loss: Tensor = trained.workload.forward()
        engine.backward(loss)
        engine.step()
        end = setting.device.record_event()
        setting.device.synchronize()
        taken.append(start.elapsed_s(end))
    return {"step_s": statistics.median(taken[1:]), "num_steps": NUM_STEPS, "memory": setting.memory()}


def _about(trained: Trained) -> Line:
    return {"bench": "states_peers", "model": trained.workload.name, "numel": trained.numel}
