"""What does looking cost, and is what it shows right? Prints one JSON line per model (the Llama needs transformers).

    python examples/bench/bench_profile.py            # on this machine's GPU, and without data
    python examples/bench/bench_profile.py --meta     # only what needs no GPU

Fields: medians over `steps` steps after `warmup` ones. `plain_*` is the model without memkit in the same run.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

import memkit

WARMUP, STEPS = 3, 10


def resnet50() -> tuple[nn.Module, list[Tensor]]:
    """Torchvision's ResNet-50, batch 256, float32."""
    return torchvision.models.resnet50(), [torch.empty(256, 3, 224, 224).normal_()]


def vit_b_16() -> tuple[nn.Module, list[Tensor]]:
    """Torchvision's ViT-B/16, batch 64, float32."""
    return torchvision.models.vit_b_16(), [torch.empty(64, 3, 224, 224).normal_()]


def vit_b_16_bfloat16() -> tuple[nn.Module, list[Tensor]]:
    """Torchvision's ViT-B/16, batch 64, bfloat16."""
    model, (images,) = vit_b_16()
    return model.bfloat16(), [images.bfloat16()]


def llama() -> tuple[nn.Module, list[Tensor]]:
    """A Llama of 0.95 billion parameters from transformers, batch 8 x 2048, bfloat16."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=16,
        num_attention_heads=16,
        vocab_size=32000,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).bfloat16(), [torch.zeros(8, 2048, dtype=torch.long)]


def thousand_modules() -> tuple[nn.Module, list[Tensor]]:
    """A chain of 1,000 modules."""
    layers = [layer for _ in range(333) for layer in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())]
    return nn.Sequential(*layers), [torch.empty(32, 64)]


MODELS: dict[str, Callable[[], tuple[nn.Module, list[Tensor]]]] = {
    "resnet50": resnet50,
    "vit_b_16": vit_b_16,
    "vit_b_16_bfloat16": vit_b_16_bfloat16,
    "llama_0.95b": llama,
    "thousand_modules": thousand_modules,
}


def saved(report: memkit.profile.MemoryReport) -> list[tuple[Any, ...]]:
    """Return what was saved where, for comparison."""
    return [(record.storage, record.storage_bytes, record.category, record.module) for record in report.saved]


def without_data(make: Callable[[], tuple[nn.Module, list[Tensor]]]) -> tuple[memkit.profile.MemoryReport, float]:
    """Profile on the meta device; return the report and the median seconds it took."""
    with torch.device("meta"):
        model, inputs = make()
    seconds = []
    for _ in range(WARMUP + STEPS):
        start = time.perf_counter()
        report = memkit.profile_memory(model, *inputs, print_table=False)
        seconds.append(time.perf_counter() - start)
    return report, statistics.median(seconds[WARMUP:])


def on_gpu(make: Callable[[], tuple[nn.Module, list[Tensor]]]) -> tuple[memkit.profile.MemoryReport, dict[str, Any]]:
    """Measure the plain forward and profile it, on the GPU."""
    with torch.device("cuda"):
        model, inputs = make()
    forward_s, peaks = [], []
    for _ in range(WARMUP + STEPS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start.record()
        output = model(*inputs)
        end.record()
        torch.cuda.synchronize()
        del output
        forward_s.append(start.elapsed_time(end) / 1e3)
        peaks.append(torch.cuda.max_memory_allocated())
    plain_s, plain_bytes = statistics.median(forward_s[WARMUP:]), max(peaks[WARMUP:])
    reports = [memkit.profile_memory(model, *inputs, print_table=False) for _ in range(STEPS)]
    profiled_s = statistics.median(report.forward_s or 0.0 for report in reports)
    profiled_bytes = statistics.median(report.forward_peak_bytes or 0 for report in reports)
    return reports[-1], {
        "plain_forward_s": plain_s,
        "profiled_forward_s": profiled_s,
        "forward_ratio": profiled_s / plain_s,
        "plain_peak_bytes": plain_bytes,
        "profiled_peak_bytes": profiled_bytes,
        "peak_ratio": profiled_bytes / plain_bytes,
    }


def main() -> None:
    """Run every model and print its line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--meta", action="store_true", help="only what needs no GPU")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    for name in options.models:
        if not options.meta:
            gc.collect()
            torch.cuda.empty_cache()
        meta, meta_s = without_data(MODELS[name])
        line: dict[str, Any] = {
            "bench": "profile",
            "model": name,
            "activation_bytes": meta.activation_bytes,
            "param_bytes": meta.param_bytes,
            "meta_profile_s": meta_s,
            "meta_peak_bytes": meta.forward_peak_bytes,
        }
        if not options.meta:
            real, figures = on_gpu(MODELS[name])
            line |= figures
            line["meta_peak_ratio"] = (meta.forward_peak_bytes or 0) / figures["plain_peak_bytes"]
            line["saved_bytes_equal"] = saved(real) == saved(meta)
            line["self_bytes_add_up"] = sum(row.self_bytes for row in real.modules) == real.activation_bytes
        line |= {
            "device": "meta" if options.meta else torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cpu_threads": torch.get_num_threads(),
            "tf32": True,
            "memkit": memkit.__version__,
            "warmup": WARMUP,
            "steps": STEPS,
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
