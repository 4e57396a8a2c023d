"""Everything of a model streams, or all of it is on the GPU: tokens per second and peak. Prints lines of JSON.

    export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
    python examples/bench/bench_streamed.py                                      # on this machine's GPU, three to four minutes
    python examples/bench/bench_streamed.py --ways streamed --tokens 16x2048
    python examples/bench/bench_streamed.py --shape tiny --tokens 2x32           # on any machine: shows that it runs

By default the shape of Qwen2.5-7B: 7.62 billion parameters, bfloat16, random. Each layer has a checkpoint, and head and loss
see 2048 tokens at a time, each piece with a checkpoint too. AdamW keeps bfloat16 states. Ways:

    plain       all is on the GPU, stepped by a fused AdamW
    streamed    `LayerOffload(offload_ratio=1, optimizer=...)` and `StateOffload(when="backward")`: layers and states are copied
                to the GPU when they are needed, and stepped within the backward

TFLOP/s are 6 for each parameter and token, without what checkpoints compute again; beside them is what a product of two
8192 x 8192 matrices reaches. A step is timed from its start to that of the next, in a row of steps.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from measuring import Workload
from setting import Setting, say
from shared import NO_GPU, Line, about_machine, tell
from states_layers import about_streams, all_streams
from states_steps import LR, Loop, Trained, timed, told
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memkit.device import ReferenceDevice, cuda_is_available, open_device

PIECE = 2048
"""Tokens that head and loss see at a time."""
WIDTH_OF_PRODUCT = 8192
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5-7b": (
        "Qwen2Config",
        {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
        },
    ),
    "llama-3.4b": (
        "LlamaConfig",
        {
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 28,
            "num_attention_heads": 24,
            "num_key_value_heads": 24,
            "vocab_size": 32000,
        },
    ),
    "tiny": (
        "Qwen2Config",
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 128,
        },
    ),
}


class LossInPieces(nn.Module):
    """A language model whose head and loss see a piece of the tokens at a time, so that there are never logits of all."""

    def __init__(self, model: Any, piece: int = PIECE) -> None:
        super().__init__()
        self.model, self._piece = model, piece

    def forward(self, tokens: Tensor) -> Tensor:
        """Take tokens, [batch, length], which are the labels as well; return their mean loss."""
        hidden = self.model.model(input_ids=tokens)[0].flatten(0, 1).split(self._piece)
        labels = tokens.flatten().split(self._piece)
        pieces = zip(hidden, labels, strict=True)
        losses = [checkpoint(self._loss_of_piece, *piece, use_reentrant=False) for piece in pieces]
        return torch.stack(losses).sum() / tokens.numel()

    def _loss_of_piece(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model.lm_head(hidden).float(), labels, reduction="sum")


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A way to step."""

    step: Callable[[], object]
    about: Callable[[], Line]


def build(shape: str) -> LossInPieces:
    """Return a model with random weights, a checkpoint around each layer."""
    kind, sizes = SHAPES[shape]
    config = getattr(transformers, kind)(**sizes, use_cache=False, tie_word_embeddings=False)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return LossInPieces(model, 16 if shape == "tiny" else PIECE)


def on_tokens(model: LossInPieces, tokens: Tensor) -> Workload:
    """Return a step on these tokens."""
    return Workload(name="x".join(map(str, tokens.shape)), model=model, forward=lambda: model(tokens), loss=lambda loss: loss)


@contextmanager
def _plain(trained: Trained, setting: Setting) -> Iterator[Update]:
    trained.model.to(setting.device.torch_device)
    optimizer = torch.optim.AdamW(trained.parameters, lr=LR, fused=True)
    yield Update(step=optimizer.step, about=dict)
    trained.clear()


@contextmanager
def _streamed(trained: Trained, setting: Setting) -> Iterator[Update]:
    with all_streams(trained, setting, master=None) as (layers, states):
        yield Update(step=states.optimizer.step, about=partial(about_streams, layers, states))
        trained.clear()


WAYS: Mapping[str, Callable[[Trained, Setting], AbstractContextManager[Update]]] = {"plain": _plain, "streamed": _streamed}


def _matmul_tflops(setting: Setting, num_runs: int = 20) -> float:
    """Return the rate of a product of square bfloat16 matrices."""
    device, width = setting.device, 64 if setting.tiny else WIDTH_OF_PRODUCT
    one = torch.randn(width, width, dtype=torch.bfloat16, device=device.torch_device)
    for _ in range(num_runs):
        one @ one
    start = device.record_event()
    for _ in range(num_runs):
        one @ one
    end = device.record_event()
    device.synchronize()
    return 2 * width**3 * num_runs / start.elapsed_s(end) / 1e12


def lines(setting: Setting, shape: str, sizes: list[tuple[int, int]], ways: list[str]) -> Iterator[Line]:
    """Yield what each way takes with each size, [batch, length]."""
    start_s = time.perf_counter()
    model = setting.make(partial(build, shape))
    numel = sum(parameter.numel() for parameter in model.parameters())
    say(f"{shape}: {numel / 1e9:.2f}e9 parameters, built in {time.perf_counter() - start_s:.0f} s")
    about: Line = {"bench": "streamed", "shape": shape, "numel": numel, "matmul_tflops": _matmul_tflops(setting)}
    vocabulary = SHAPES[shape][1]["vocab_size"]
    batches = [setting.make(partial(torch.randint, vocabulary, size)) for size in sizes]
    for way in ways:
        for line in _way(way, model, batches, setting):
            yield {**about, **line}
        setting.clean()


def _way(way: str, model: LossInPieces, batches: list[Tensor], setting: Setting) -> Iterator[Line]:
    with WAYS[way](Trained(on_tokens(model, batches[0])), setting) as update:
        for number, tokens in enumerate(batches):
            trained = Trained(on_tokens(model, tokens))
            line = setting.attempt(partial(_line, trained, update, setting, tokens.numel(), 2 if number == 0 else 1))
            trained.clear()
            name = trained.workload.name
            yield {"way": way, "tokens": name, **told(f"{way}, {name}", line)}


def _line(trained: Trained, update: Update, setting: Setting, num_tokens: int, num_warm: int) -> Line:
    found = timed(trained, Loop(update=update.step), setting, num_steps=setting.steps, num_warm=num_warm)
    memory = found.pop("memory")
    per_s = num_tokens / found["step_s"]
    tflops = 6 * trained.numel * per_s / 1e12
    say(f"{per_s:.0f} tokens/s, {tflops:.0f} TFLOP/s")
    return {**found, "tokens_per_s": per_s, "model_tflops": tflops, **memory, **update.about()}


def _size(text: str) -> tuple[int, int]:
    batch, _, length = text.partition("x")
    return int(batch), int(length)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen2.5-7b")
    parser.add_argument("--tokens", nargs="*", type=_size, default=[(16, 2048), (64, 1024)], metavar="BATCHxLENGTH")
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--steps", type=int, default=4, help="that count, behind one or two; default: 4")
    options = parser.parse_args()
    tiny = options.shape == "tiny"
    if not tiny and not cuda_is_available():
        return tell([{"bench": "streamed", "skipped": NO_GPU}])
    warnings.simplefilter("ignore" if not sys.warnoptions else "default")
    device = ReferenceDevice() if tiny else open_device("cuda")
    setting = Setting(device=device, steps=options.steps, fast=False, tiny=tiny, ends_s=math.inf)
    about = {"transformers": transformers.__version__, **about_machine(device, options.steps)}
    return tell(lines(setting, options.shape, options.tokens, options.ways), about)


if __name__ == "__main__":
    sys.exit(main())
