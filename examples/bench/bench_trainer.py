"""A Hugging Face Trainer, plain, with `gradient_checkpointing=True`, and with a `MemoryBudget` at the peak of that.

    export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
    python examples/bench/bench_trainer.py                           # on this machine's GPU, about two minutes
    python examples/bench/bench_trainer.py --ways memkit --budget 11.6GiB
    python examples/bench/bench_trainer.py --tiny                    # on any machine: shows that it runs

A Qwen3 of 0.62 billion parameters, float32 with bfloat16 autocast, stepped by a fused AdamW, batch 8 x 1024. Prints a line of
JSON for each way. A step is timed from its start to that of the next, by the device's events; the figures are medians of the
last steps, after memkit has learned and settled. Peaks are read at the end of each step and never reset: "peak" is the largest
of the last steps, "first_peak" that of the first one, "most" that of all.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import partial
from typing import Any

import torch
import transformers
from setting import GIB, TAG, Setting, say
from shared import NO_GPU, Line, about_machine, tell

import memkit
from memkit.device import Event, ReferenceDevice, cuda_is_available, open_device
from memkit.integrations import MemkitCallback

WAYS = ("plain", "checkpointing", "memkit")
NUM_SETTLING = {"plain": 5, "checkpointing": 5, "memkit": 30}
"""Steps ahead of those that count."""
SHAPE = {
    "hidden_size": 1536,
    "intermediate_size": 4096,
    "num_hidden_layers": 20,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "head_dim": 128,
    "vocab_size": 32000,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
}
TINY_BUDGET = "2MiB"


class Watch(transformers.TrainerCallback):
    """Marks where each step starts, and reads the peak where it ends; resets nothing."""

    def __init__(self, setting: Setting) -> None:
        self._device, self._counter = setting.device, setting.device.memory_counter()
        self._starts: list[Event] = []
        self.peaks: list[int] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._starts.append(self._device.record_event())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        assert self._counter is not None
        self.peaks.append(self._counter.peak_bytes())

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._starts.append(self._device.record_event())

    def steps_s(self) -> list[float]:
        """Return what each step took."""
        self._device.synchronize()
        return [one.elapsed_s(other) for one, other in itertools.pairwise(self._starts)]


def _build(tiny: bool) -> Any:
    config = transformers.Qwen3Config(**(TINY if tiny else SHAPE), use_cache=False, tie_word_embeddings=False)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def measured(way: str, budget: str | None, setting: Setting) -> Line:
    """Return what a Trainer's steps take."""
    num_settling = 2 if setting.tiny else NUM_SETTLING[way]
    num_steps = num_settling + setting.steps
    batch, length = (2, 16) if setting.tiny else (8, 1024)
    model = setting.make(partial(_build, setting.tiny))
    numel, vocabulary = sum(parameter.numel() for parameter in model.parameters()), model.config.vocab_size
    rows = torch.randint(vocabulary, (num_steps * batch, length), generator=torch.Generator().manual_seed(0))
    watch = Watch(setting)
    callbacks: list[transformers.TrainerCallback] = [watch]
    if way == "memkit":
        options = {"device": setting.device, "min_bytes": 1024} if setting.tiny else {}
        callbacks.append(MemkitCallback(memkit.MemoryBudget(budget, TAG, **options)))
    setting.reset_peak()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):  # where Trainer says its losses
        arguments = transformers.TrainingArguments(
            folder,
            use_cpu=setting.tiny,
            bf16=True,
            optim="adamw_torch_fused",
            gradient_checkpointing=way == "checkpointing",
            gradient_checkpointing_kwargs={"use_reentrant": False} if way == "checkpointing" else None,
            per_device_train_batch_size=batch,
            max_steps=num_steps,
            logging_steps=num_steps,
            save_strategy="no",
            disable_tqdm=True,
            report_to="none",
        )
        data = [{"input_ids": row, "labels": row} for row in rows]
        transformers.Trainer(model, arguments, train_dataset=data, callbacks=callbacks).train()
    steps_s, peaks = watch.steps_s(), watch.peaks
    last = slice(num_settling, None)
    figures = {"step_s": statistics.median(steps_s[last]), "peak_bytes": max(peaks[last])}
    say(f"{way}: {1e3 * figures['step_s']:.0f} ms a step, {figures['peak_bytes'] / GIB:.2f} GiB; first {steps_s[0]:.2f} s")
    return {
        "numel": numel,
        "batch": batch,
        "length": length,
        "num_settling": num_settling,
        **figures,
        "first_step_s": steps_s[0],
        "first_peak_bytes": peaks[0],
        "most_bytes": max(peaks),
        "steps_s": [round(step_s, 4) for step_s in steps_s],
        "peaks_bytes": peaks,
        **setting.memory(),
    }


def lines(setting: Setting, ways: list[str], budget: str | None) -> Iterator[Line]:
    """Yield a line for each way. The budget of memkit is the peak with checkpoints, unless it is given."""
    for way in ways:
        if way == "memkit" and budget is None:
            say("memkit needs a budget: name the way `checkpointing` ahead of it, or give --budget")
            continue
        counter = setting.device.memory_counter()
        before = None if counter is None else counter.allocated_bytes()
        line = setting.attempt(partial(measured, way, budget, setting))
        if way == "checkpointing" and budget is None and "error" not in line:
            budget = TINY_BUDGET if setting.tiny else f"{line['peak_bytes']}B"
        yield {"bench": "trainer", "way": way, "budget": budget if way == "memkit" else None, "before_bytes": before, **line}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--budget", help="by default the peak of the way `checkpointing`")
    parser.add_argument("--steps", type=int, default=20, help="that count; default: 20")
    parser.add_argument("--tiny", action="store_true", help="a small model, also on a CPU")
    options = parser.parse_args()
    if not options.tiny and not cuda_is_available():
        return tell([{"bench": "trainer", "skipped": NO_GPU}])
    warnings.simplefilter("ignore" if not sys.warnoptions else "default")
    device = ReferenceDevice() if options.tiny else open_device("cuda")
    setting = Setting(device=device, steps=options.steps, fast=False, tiny=options.tiny, ends_s=math.inf)
    about = {"transformers": transformers.__version__, **about_machine(device, options.steps)}
    return tell(lines(setting, options.ways, options.budget), about)


if __name__ == "__main__":
    sys.exit(main())
