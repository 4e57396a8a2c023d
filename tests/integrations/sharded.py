"""Trainings in which the trainer shards the model with FSDP2 itself, on several ranks on the CPU: each rank runs these."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import memkit
from memkit.device import ReferenceDevice
from tests.integrations.cases import llama
from tests.integrations.runs import lightning_trainer, trainer_of

Make = Callable[[], object]
FEATURES: dict[str, Make] = {
    "CPUOffload": lambda: memkit.CPUOffload(1.0, "sharded offload", min_bytes=0, device=ReferenceDevice()),
    "Rematerialize": lambda: memkit.Rematerialize(0.3, "sharded remat", min_bytes=0, device=ReferenceDevice()),
    "StateOffload": lambda: partial(memkit.StateOffload, device=ReferenceDevice()),
}


def _as_torchrun() -> None:
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        ports = [found.getsockname()[1]]
    dist.broadcast_object_list(ports)  # another run of the tests beside this one has another port
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0])}
    warnings.simplefilter("ignore")  # of budgets that can't be kept to, and the trainers' own


def _parts(model: nn.Module) -> list[Tensor]:
    assert all(isinstance(item, DTensor) for item in model.parameters())
    assert sum(isinstance(module, FSDPModule) for module in model.modules()) > 1
    return [item.to_local().detach().clone() for item in model.parameters() if isinstance(item, DTensor)]


def _compare(run: Callable[[Make | None], tuple[list[Tensor], dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the figures of each feature, whose parameters are those of a run without any."""
    plain, _ = run(None)
    found = {}
    for name, make in FEATURES.items():
        parts, found[name] = run(make)
        assert all(map(torch.equal, parts, plain)), name
    return found


def with_trainer(folder: str) -> dict[str, dict[str, float]]:
    """Have the Hugging Face Trainer shard, save, and go on from what it has saved."""
    _as_torchrun()
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    from memkit.integrations import MemkitCallback

    config = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}

    def run(make: Make | None) -> tuple[list[Tensor], dict[str, float]]:
        model, callbacks = llama(), [] if make is None else [MemkitCallback(make())]
        trainer = trainer_of(
            Path(folder) / "trainer", model, *callbacks, per_device_train_batch_size=2, fsdp=True, fsdp_config=config
        )
        state = trainer.accelerator.state  # accelerate has FSDP on accelerators only
        state.distributed_type, trainer.is_fsdp_enabled = DistributedType.FSDP, True
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args)
        trainer.train()
        return _parts(model), callbacks[0].figures() if callbacks else {}

    return _compare(run)


def with_lightning(folder: str) -> dict[str, dict[str, float]]:
    """Have Lightning's ModelParallelStrategy shard."""
    _as_torchrun()
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy

    from memkit.integrations import MemkitLightningCallback

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net: nn.Module | None = None

        def configure_model(self) -> None:
            if self.net is None:
                torch.manual_seed(0)
                net = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)))
                mesh = self.device_mesh["data_parallel"]
                for block in net:
                    fully_shard(block, mesh=mesh)
                self.net = fully_shard(net, mesh=mesh)

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            assert self.net is not None
            loss: Tensor = self.net(batch[0]).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def run(make: Make | None) -> tuple[list[Tensor], dict[str, float]]:
        module, callbacks = Net(), [] if make is None else [MemkitLightningCallback(make())]
        lightning.seed_everything(7, verbose=False)
        strategy = ModelParallelStrategy(dist.get_world_size(), 1, process_group_backend="gloo")
        settings = {"strategy": strategy, "devices": dist.get_world_size(), "max_steps": 5, "logger": False}
        trainer = lightning_trainer(Path(folder), *callbacks, **settings)
        trainer.fit(module, DataLoader(TensorDataset(torch.randn(64, 16)), batch_size=4))
        return _parts(module), callbacks[0].figures() if callbacks else {}

    return _compare(run)


WORKS = {"Trainer": with_trainer, "Lightning": with_lightning}
