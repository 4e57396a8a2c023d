"""Budgets in steps that become others: another process takes half of the link, and sequences become longer."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from alternating import alternate, step_of
from budget_models import built
from budget_steps import Budgeted, figures_of_stats, has_stepped, in_mib, of_plain, plain_peak
from measuring import Workload, plain
from setting import TAG, Setting, say
from shared import Line
from torch import nn
from workloads import llama_3b, on_tokens

import memkit

MODEL, SHARE = "resnet50", 0.7
"""Much of what leaves here is moved."""
NUM_ADAPTING = 5
"""Steps within which a budget is to make do with another link."""
NUM_LATER = 12
"""Steps of a length behind the first one."""
LENGTH_SHARE = 0.6
_TAKES_LINK = """
import torch
host, there = torch.empty(2**28, dtype=torch.uint8, pin_memory=True), torch.empty(2**28, dtype=torch.uint8, device="cuda")
back = torch.empty_like(host).pin_memory()
lanes = torch.cuda.Stream(), torch.cuda.Stream()
other = torch.empty_like(there)
print("ready", flush=True)
while True:
    for _ in range(8):
        with torch.cuda.stream(lanes[0]):
            there.copy_(host, non_blocking=True)
        with torch.cuda.stream(lanes[1]):
            back.copy_(other, non_blocking=True)
    torch.cuda.synchronize()
"""


def changes(setting: Setting) -> Iterator[Line]:
    """A plan for a link of which half is taken from one step to the next; and sequences of other lengths than were learned."""
    yield {"bench": "budget_link", **setting.attempt(partial(_link, setting))}
    yield from _lengths(setting)


def _link(setting: Setting) -> Line:
    workload = setting.workload("gpt2" if setting.tiny else MODEL)
    budget = of_plain(SHARE, plain_peak(workload, setting))
    budgeted = Budgeted(workload, budget, setting)
    budgeted.learn()
    before = budgeted.compare()
    with half_taken(setting):
        adapting_s = [step_of(workload, budgeted.engine, setting.device, resets_peak=False).step_s for _ in range(NUM_ADAPTING)]
        engines = {"plain": plain, "memkit": budgeted.engine}
        later = alternate(workload, engines, setting.device, num_steps=setting.steps)
        stats = figures_of_stats(later["memkit"].peak_allocated_bytes, later["memkit"].step_s)
        budgeted.learn()  # from nothing, for this link
        anew = budgeted.compare()
    return {
        "model": MODEL,
        "name": workload.name,
        "share": SHARE,
        "budget_mib": anew["budget_mib"],
        "free_plain_s": before["plain_s"],
        "free_s": before["step_s"],
        "free_moved_mib": before["moved_mib"],
        "adapting_s": adapting_s,
        "plain_s": later["plain"].step_s,
        "later_s": later["memkit"].step_s,
        "later_moved_mib": stats["moved_mib"],
        "later_peak_mib": in_mib(later["memkit"].peak_allocated_bytes),
        "num_plans": stats["num_plans"],
        "anew_plain_s": anew["plain_s"],
        "anew_s": anew["step_s"],
        "anew_moved_mib": anew["moved_mib"],
        "later_to_anew": later["memkit"].step_s / anew["step_s"],
    }


@contextmanager
def half_taken(setting: Setting) -> Iterator[None]:
    """Have another process copy both ways, all the time; it takes turns on the link with this one."""
    if setting.device.torch_device.type != "cuda":
        yield  # it shows that all of this runs
        return
    process = subprocess.Popen([sys.executable, "-c", _TAKES_LINK], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "ready":
            raise RuntimeError(f"the process that is to take half of the link has ended with status {process.wait()}")
        yield
        if process.poll() is not None:
            raise RuntimeError(f"the process that took half of the link has ended with status {process.returncode}")
    finally:
        process.kill()
        process.wait()


def _lengths(setting: Setting) -> Iterator[Line]:
    """A Llama that is attached to a budget, short sequences first, then longer ones and other ones."""
    batch, lengths = (2, (16, 32, 24)) if setting.tiny else (4, (1024, 2048, 1536))
    longest = max(lengths)
    workload = built(partial(_llama, batch, longest), setting)
    budget = of_plain(LENGTH_SHARE, plain_peak(workload, setting))
    optimizer = has_stepped(workload.model)
    context = memkit.MemoryBudget(budget, TAG, optimizer=optimizer, min_bytes=setting.min_bytes, device=setting.device)
    attached = memkit.attach(workload.model, context)
    for number, length in enumerate(lengths):
        line = _of_length(workload.model, batch, length, setting)
        if not number:  # the first of all is measured, and peaks are counted anew all the time
            line |= {"first_peak_mib": None, "first_to_budget": None}
        yield {"bench": "budget_lengths", "model": "llama", "share": LENGTH_SHARE, "length": length, **line}
    attached.remove()
    setting.clean()


def _llama(batch: int, length: int, setting: Setting) -> Workload:
    if setting.tiny:
        return llama_3b(batch, length, num_layers=2, width=64, inner=128, num_heads=4)
    return llama_3b(batch, length, num_layers=16, width=2048, inner=5632, num_heads=16)


def _of_length(model: nn.Module, batch: int, length: int, setting: Setting) -> Line:
    """Return what the first step takes with sequences of a length, and later ones."""
    vocabulary = model.get_input_embeddings().num_embeddings
    tokens = torch.randint(vocabulary, (batch, length), device=setting.device.torch_device)
    workload = on_tokens(f"llama_{length}", model, tokens)
    steps = [step_of(workload, plain, setting.device)]
    first = figures_of_stats(steps[0].peak_allocated_bytes, None)
    steps += [step_of(workload, plain, setting.device, resets_peak=False) for _ in range(NUM_LATER)]
    last = step_of(workload, plain, setting.device)
    say(f"{length}: {in_mib(steps[0].peak_allocated_bytes)} MiB at first, {in_mib(last.peak_allocated_bytes)} in the end")
    return {
        "budget_mib": first["budget_mib"],
        "first_s": steps[0].step_s,
        "first_peak_mib": in_mib(steps[0].peak_allocated_bytes),
        "first_to_budget": first["peak_to_budget"],
        "last_s": last.step_s,
        "last_peak_mib": in_mib(last.peak_allocated_bytes),
        "last_to_budget": figures_of_stats(last.peak_allocated_bytes, None)["peak_to_budget"],
    }
