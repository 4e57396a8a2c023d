"""`MemkitLightningCallback`: features of memkit in Lightning's Trainer, of the package `lightning` or `pytorch_lightning`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch import nn

from memkit.core.extras import library
from memkit.integrations.features import Features
from memkit.integrations.refusals import Loop, is_checkpointing, refuse

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_SHARDING = ("FSDP", "DeepSpeed", "ModelParallel")


class LightningFeatures:
    """Features of memkit in a Lightning Trainer: `callbacks=[MemkitLightningCallback(memkit.MemoryBudget("12GiB"))]`.

    A context (`MemoryBudget`, `CPUOffload`, `Rematerialize`) is attached when the fit begins, and taken off when it ends, also
    by an error. Validation in between is left alone, and nothing is planned from it. If the LightningModule has one module with
    parameters in it (`self.model`), the context is around the forward of that; if it has several, around `training_step`, the
    loss included. A `MemoryBudget` is told of the optimizer.

    Layers of a `LayerOffload` stream as soon as that is made: make it of a model on the CPU, the LightningModule or a part of
    it. Lightning then leaves that where it is. Layers go on streaming after the fit, for validation, tests and saving, until
    `close()`.

    A `StateOffload` is given as the class, or as a `functools.partial` of it with options. It is made over each optimizer when
    the fit begins, ahead of the states of a checkpoint, and closed when the fit ends.

    Predicted and measured values are logged as often as the Trainer logs, as `memkit.live_values` returns it:
    "memkit/TAG/peak_gib", "memkit/TAG/predicted_peak_gib", "memkit/layers/waited_ms" and others, as far as it is known.
    Checkpoints are those of the plain model, and resuming works as ever.

    Args:
        features: one or several, such as `memkit.MemoryBudget("12GiB")`, `memkit.CPUOffload(0.3)`,
            `memkit.Rematerialize(0.5)`, `memkit.LayerOffload(lightning_module.model, offload_ratio=0.75)`,
            `memkit.StateOffload`, `functools.partial(memkit.StateOffload, device_budget="4GiB")`.
        module: the name of a module in the LightningModule to attach to.

    Raises:
        TypeError: there is none, or one is no feature of memkit.
        ValueError: two are of a kind. Also when the fit begins, if there is no such module, or a feature does not go with the
            Trainer's settings.

    Example:
        >>> import memkit
        >>> from memkit.integrations.lightning import LightningFeatures  # and Callback make the callback
        >>> callback = LightningFeatures(memkit.CPUOffload(0.3), memkit.Rematerialize(0.5))
        >>> callback.figures()
        {}
    """

    def __init__(self, *features: object, module: str | None = None) -> None:
        if module is not None and not isinstance(module, str):
            raise TypeError(f"module is the name of a module in the LightningModule; found {type(module).__name__}")
        self._features = Features("MemkitLightningCallback", features)
        self._module = module
        self._step: _Step | None = None
        self._optimizer_states: list[dict[str, Any]] = []
        """From a checkpoint, until the training begins."""

    def close(self) -> None:
        """Remove everything from the model and the optimizers, and put streaming weights and states back where they were; may
        be called again."""
        self._end()
        self._features.close()

    def figures(self) -> dict[str, float]:
        """Return the current logged values, none before anything has run: see `memkit.live_values`."""
        return self._features.figures()

    # What Lightning calls

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._features.check(pl_module)
        if stage == "fit":
            refuse(self._features, _loop(trainer, pl_module))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        optimizers = trainer.optimizers
        optimizer = optimizers[0] if len(optimizers) == 1 else None
        self._features.begin_states(optimizers)
        if not self._features.contexts:
            return
        target = self._target(pl_module)
        if target is not None:
            self._features.begin(target, optimizer)
            return
        if not pl_module.automatic_optimization:
            raise ValueError(
                "MemkitLightningCallback needs to know which module to attach to where training_step runs the backward itself "
                f"(manual optimization). Pass its name: module={_names_of(pl_module)}"
            )
        self._step = _Step(pl_module)
        self._features.begin(self._step, optimizer)
        self._step.put()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        states, self._optimizer_states = self._optimizer_states, []
        for optimizer, state in zip(trainer.strategy.optimizers, states, strict=False):
            optimizer.load_state_dict(state)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        every = trainer.log_every_n_steps
        if trainer.loggers and every and trainer.global_step % every == 0 and self._features.is_on:
            pl_module.log_dict(self._features.figures(), on_step=True, on_epoch=False, batch_size=1)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take the optimizer states out of the checkpoint if some are to be in host memory: Lightning would move all of them to
        the device. `on_train_start` loads them where they belong."""
        features = self._features
        leaves = features.states is not None or any(offload.train == "host" for offload in features.offloads)
        if leaves and trainer.state.fn == "fit" and checkpoint.get("optimizer_states"):
            self._optimizer_states = checkpoint["optimizer_states"]
            checkpoint["optimizer_states"] = []

    # What is attached to

    def _target(self, pl_module: nn.Module) -> nn.Module | None:
        if self._module is not None:
            try:
                return pl_module.get_submodule(self._module)
            except AttributeError:
                raise ValueError(
                    f'MemkitLightningCallback: {type(pl_module).__name__} has no module "{self._module}". '
                    f"It has {_names_of(pl_module)}"
                ) from None
        found = [child for child in pl_module.children() if any(True for _ in child.parameters())]
        is_one = len(found) == 1 and not any(True for _ in pl_module.parameters(recurse=False))
        return found[0] if is_one and not isinstance(found[0], nn.ModuleList | nn.ModuleDict) else None

    def _end(self, *_: Any, **__: Any) -> None:
        self._features.end()
        if self._step is not None:
            self._step.remove()
            self._step = None

    on_fit_end = on_exception = teardown = _end


class _Step(nn.Module):
    """A training step as a module, which a context can be attached to, and which replaces `training_step`."""

    def __init__(self, pl_module: nn.Module) -> None:
        super().__init__()
        self.pl_module, self._own = pl_module, vars(pl_module).get("training_step")
        self._code: Callable[..., Any] = pl_module.training_step  # type: ignore[assignment]  # each LightningModule has one

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._code(*args, **kwargs)

    def put(self) -> None:
        """Replace `training_step`, by a function that looks like it: Lightning inspects its code."""
        step = functools.wraps(self._code)(lambda *args, **kwargs: self(*args, **kwargs))
        vars(self.pl_module)["training_step"] = step

    def remove(self) -> None:
        if self._own is not None:
            vars(self.pl_module)["training_step"] = self._own
        else:
            vars(self.pl_module).pop("training_step", None)


def _names_of(module: nn.Module) -> str:
    return " or ".join(f'"{name}"' for name, child in module.named_children() if any(True for _ in child.parameters()))


def _loop(trainer: Trainer, pl_module: LightningModule) -> Loop:
    precision, strategy = str(trainer.precision), type(trainer.strategy).__name__
    clip, backwards = trainer.gradient_clip_val, trainer.accumulate_grad_batches
    return Loop(
        device=trainer.strategy.root_device,
        num_processes=trainer.world_size,
        shards=strategy if strategy.startswith(_SHARDING) else None,
        is_fsdp2=strategy == "ModelParallelStrategy",
        flattens=strategy if strategy == "FSDPStrategy" else None,
        casts=f'precision="{precision}"' if precision.endswith("-true") and precision != "32-true" else None,
        scales=f'precision="{precision}"' if precision == "16-mixed" else None,
        takes_gradients=(
            "Lightning, which runs the backward within the optimizer's step," if pl_module.automatic_optimization else None
        ),
        checkpoints="gradient checkpointing" if is_checkpointing(pl_module) else None,
        clips=f"gradient_clip_val={clip}" if clip else None,
        accumulates=f"accumulate_grad_batches={backwards}" if backwards > 1 else None,
    )


if TYPE_CHECKING:

    class MemkitLightningCallback(LightningFeatures, Callback):
        """See `LightningFeatures`."""

else:

    def __getattr__(name):
        """Make the callback when it is first asked for: of the class of each imported package, or else of one that is
        installed. Source: PEP 562."""
        if name != "MemkitLightningCallback":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        bases = tuple(sys.modules[package].Callback for package in _PACKAGES if package in sys.modules)
        return _callback_of(bases or (_installed().Callback,))


@functools.cache
def _callback_of(bases: tuple[type, ...]) -> type:
    contents = {"__doc__": LightningFeatures.__doc__, "__module__": __name__}
    return type("MemkitLightningCallback", (LightningFeatures, *bases), contents)


def _installed() -> Any:
    for package in _PACKAGES:
        with suppress(ImportError):
            return library(package, "MemkitLightningCallback")
    return library(_PACKAGES[0], "MemkitLightningCallback")  # whose error is the one to raise
