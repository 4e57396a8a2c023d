"""`MemkitCallback`: features of memkit in the Hugging Face Trainer, and so in TRL's trainers made of it."""

from __future__ import annotations

import os
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from memkit.core.extras import library
from memkit.integrations.features import Features
from memkit.integrations.refusals import Loop, is_checkpointing, refuse

if TYPE_CHECKING:
    from transformers import TrainerCallback, TrainerState, TrainingArguments

_Callback = TypeVar("_Callback", bound="TrainerFeatures")


class TrainerFeatures:
    """Features of memkit in a Hugging Face Trainer: `callbacks=[MemkitCallback(memkit.MemoryBudget("12GiB"))]`.

    A context (`MemoryBudget`, `CPUOffload`, `Rematerialize`) is attached to the model when the training begins, and taken off
    when it ends. Evaluations in between are left alone, and nothing is planned from them. A `MemoryBudget` is told of the
    Trainer's optimizer.

    Layers of a `LayerOffload` stream as soon as that is made: make it before the Trainer, of a model on the CPU. The Trainer
    then leaves the model where it is, and its optimizer is made of weights that are where they will be. Layers go on streaming
    after the training, for evaluations and saving, until `close()`.

    A `StateOffload` is given as the class, or as a `functools.partial` of it with options: it is made over Trainer's optimizer
    when the training begins, and closed when it ends, which brings the states back. States that Trainer loads from a checkpoint
    come by way of the device, before the training begins, unless it was given an optimizer (`optimizers=(optimizer, None)`).

    Predicted and measured values are in the logs, beside the loss, as `memkit.live_values` returns it: "memkit/TAG/peak_gib",
    "memkit/TAG/predicted_peak_gib", "memkit/layers/waited_ms" and others, as far as it is known. Checkpoints are those of the
    plain model, and resuming works as ever.

    Trainer does not tell callbacks of a training that ends by an error. Contexts are then taken off when the model is next
    trained with a callback of this class, by `close()`, or at the end of a `with`.

    Args:
        features: one or several, such as `memkit.MemoryBudget("12GiB")`, `memkit.CPUOffload(0.3)`,
            `memkit.Rematerialize(0.5)`, `memkit.LayerOffload(model, offload_ratio=0.75)`, `memkit.StateOffload`,
            `functools.partial(memkit.StateOffload, device_budget="4GiB")`.

    Raises:
        TypeError: there is none, or one is no feature of memkit.
        ValueError: two are of a kind. Also when the Trainer is made, or the training begins, if a feature does not go with the
            Trainer's arguments: several GPUs in one process, a model that is cast, sharded or compiled as a whole; all but a
            `LayerOffload` go with FSDP2. And if a `StateOffload` cannot step the optimizer in pieces.

    Example:
        >>> import memkit
        >>> from memkit.integrations.trainer import TrainerFeatures  # and TrainerCallback make MemkitCallback
        >>> callback = TrainerFeatures(memkit.MemoryBudget("12GiB"))
        >>> callback.figures()
        {}
    """

    def __init__(self, *features: object) -> None:
        self._features = Features("MemkitCallback", features)

    def __enter__(self: _Callback) -> _Callback:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Remove everything from the model and the optimizers, and put streaming weights and states back where they were; may
        be called again."""
        self._features.close()

    def figures(self) -> dict[str, float]:
        """Return the current values in the logs, none before anything has run: see `memkit.live_values`."""
        return self._features.figures()

    # What Trainer calls

    def on_init_end(
        self, args: TrainingArguments, *_: object, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **__: Any
    ) -> None:
        self._refuse(args)
        if self._features.offloads:
            self._features.check(model)
        # The user's own: states loaded from a checkpoint then go straight to host memory. FSDP2 is yet to put shards in.
        if optimizer is not None and _fsdp_version(args) is None:
            self._features.begin_states([optimizer])

    def on_train_begin(
        self, args: TrainingArguments, *_: object, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **__: Any
    ) -> None:
        self._features.check(model)
        self._refuse(args, is_checkpointing=is_checkpointing(model))
        self._features.begin_states([] if optimizer is None else [optimizer])
        self._features.begin(model, optimizer)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, *_: object, logs: dict[str, float] | None = None, **__: Any
    ) -> None:
        if logs is None or not self._features.is_on or any(name.startswith(("eval_", "test_")) for name in logs):
            return
        figures, last = self._features.figures(), state.log_history[-1] if state.log_history else {}
        if logs.keys() <= last.keys():  # the entry that is kept, and written with checkpoints
            last.update(figures)
        logs.update(figures)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._features.end()

    def _refuse(self, args: TrainingArguments, *, is_checkpointing: bool = False) -> None:
        halves = {name: getattr(args, name, False) for name in ("fp16_full_eval", "bf16_full_eval")}
        shards = {name: bool(getattr(args, name, None)) for name in ("fsdp", "deepspeed")}
        version, backwards = _fsdp_version(args), args.gradient_accumulation_steps
        refuse(
            self._features,
            Loop(
                device=args.device,
                replicas=f"n_gpu={args.n_gpu}" if args.n_gpu > 1 else None,
                num_processes=args.world_size,
                shards=_first(shards) or (None if version is None else "FSDP"),
                is_fsdp2=version == 2 and not shards["deepspeed"],
                flattens=f"FSDP of version {version}" if version == 1 else None,
                casts=_first(halves),
                scales="fp16=True" if args.fp16 else None,
                takes_gradients="Trainer, which takes the norm of all gradients,",
                compiles="torch_compile=True" if args.torch_compile else None,
                checkpoints="gradient_checkpointing=True" if is_checkpointing else None,
                clips=f"Trainer, which takes the norm of all gradients (max_grad_norm={args.max_grad_norm}),",
                accumulates=f"gradient_accumulation_steps={backwards}" if backwards > 1 else None,
            ),
        )


def _first(found: dict[str, bool]) -> str | None:
    return next((f"{name}=True" if name.endswith("eval") else f"{name}=..." for name, is_on in found.items() if is_on), None)


if TYPE_CHECKING:

    class MemkitCallback(TrainerFeatures, TrainerCallback):
        """See `TrainerFeatures`."""

else:

    def __getattr__(name):
        """Make the callback when it is first asked for: of a class of transformers. Source: PEP 562."""
        if name != "MemkitCallback":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        base = library("transformers", "MemkitCallback").TrainerCallback
        made = type(name, (TrainerFeatures, base), {"__doc__": TrainerFeatures.__doc__, "__module__": __name__})
        globals()[name] = made
        return made


def _fsdp_version(args: TrainingArguments) -> int | None:
    given = getattr(args, "fsdp_plugin_args", None) or {}
    config = getattr(args, "fsdp_config", None)
    config = config if isinstance(config, dict) else {}
    if not getattr(args, "fsdp", None) and os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return None
    asked = given.get("fsdp_version") or config.get("version") or config.get("fsdp_version")
    return int(asked) if asked else int(os.environ.get("FSDP_VERSION", "1"))
