"""Under a cap: the largest batch, plain and with `Rematerialize`, and the time for each image."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torchvision
from measuring import Engine, Measurement, Workload, measure, plain
from setting import GIB, TAG, Setting, figures_of, remat_figures, say
from shared import Line
from torch import nn
from workloads import CifarResNet, on_images

import memkit

CAP_BYTES = 11 * GIB
BUDGET_SCALES = (1.0, 0.88, 0.76, 0.62)
HIGHER_SCALES = (1.4, 1.25, 1.12)
"""What is tried one after the other, as parts of the budget that was worked out, until a batch fits."""


def set_cap(setting: Setting) -> None:
    if setting.device.torch_device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(CAP_BYTES / torch.cuda.mem_get_info()[1])


def _check_cap(setting: Setting, batch: int, *, is_plain: bool) -> None:
    """Where nothing is capped, pretend."""
    if setting.tiny and batch > (6 if is_plain else 20):
        raise torch.OutOfMemoryError("there is no room in a tiny run")


def _largest(fits: Callable[[int], bool], start: int, *, growth: float, unit: int, bisections: int) -> int:
    """Return the largest size found that fits, 0 if none does: grows until one does not, and then looks between."""
    good, bad, size = 0, None, start
    while bad is None or (good == 0 and size >= unit):
        if fits(size):
            good, size = size, max(size + 1, int(size * growth))
        else:
            bad = size
            if good == 0:
                size //= 2
            if size < 1:
                break
        if good and bad is not None:
            break
    for _ in range(bisections):
        middle = (good + (bad or good)) // 2 // unit * unit
        if not good or middle <= good:
            break
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good


@dataclass(slots=True)
class Capped:
    """The search for the largest batch of one model under the cap."""

    setting: Setting
    make: Callable[[int], Workload]
    model: nn.Module
    num_copies: int = 2
    """How often parameters are there: themselves, gradients, and the buckets of DDP."""
    steps: int = 2
    warmup: int = 4
    beside_bytes: float = 0.0
    """What a step takes for each sample beside the ledger."""
    plain_batch: int = 0
    """The largest, once it is known."""
    plain_per_image_s: float | None = None

    @property
    def static_bytes(self) -> int:
        """Bytes of parameters, their copies, and buffers."""
        of_params = sum(param.nbytes for param in self.model.parameters())
        return self.num_copies * of_params + sum(buffer.nbytes for buffer in self.model.buffers())

    def plain_fits(self, batch: int) -> bool:
        """Tell whether plain steps of a batch run."""

        def part() -> Line:
            _check_cap(self.setting, batch, is_plain=True)
            return figures_of(self._measure(batch, plain, warmup=2))

        found = self.setting.attempt(part)
        say(f"plain, batch {batch}: {found}")
        return "error" not in found

    def _measure(self, batch: int, engine: Engine, *, warmup: int, steps: int | None = None) -> Measurement:
        workload = self.setting.make(lambda: self.make(batch))
        return measure(workload, engine, self.setting.device, num_steps=steps or self.steps, num_warmup=warmup)

    def learn(self, batch: int) -> None:
        """Find out what a step takes beside the ledger."""
        if batch == 0:
            return

        def part() -> Line:
            found = self._measure(batch, self.setting.remat(0.2), warmup=self.warmup)
            beside = (found.peak_allocated_bytes or 0) - memkit.stats(TAG).ledger_peak_bytes
            return {"beside_bytes": max(0, beside - self.static_bytes) / batch}

        found = self.setting.attempt(part)
        self.beside_bytes = found.get("beside_bytes", self.beside_bytes)
        say(f"batch {batch}: {found}")

    def budgets(self, batch: int) -> list[int]:
        """Return the budgets to try for a batch."""
        room = 0.96 * CAP_BYTES - self.static_bytes - self.beside_bytes * batch
        if self.setting.tiny:
            room = 2**20
        return [int(room * scale) for scale in BUDGET_SCALES] if room > 2**24 or self.setting.tiny else []

    def more_budgets(self, batch: int) -> list[int]:
        """Return the same, and before them budgets with which less is run again, should they fit."""
        budgets = self.budgets(batch)
        return [*(int(scale * budgets[0]) for scale in HIGHER_SCALES), *budgets] if budgets else []

    def run(self, batch: int, budgets: Sequence[int], steps: int) -> Line:
        """Return what a batch takes at the first of some budgets with which it runs."""
        tries = []
        for budget in budgets:

            def part(budget: int = budget) -> Line:
                _check_cap(self.setting, batch, is_plain=False)
                found = self._measure(batch, self.setting.remat(budget), warmup=self.warmup, steps=steps)
                return {**figures_of(found), "stats": remat_figures()}

            found = self.setting.attempt(part)
            say(f"memkit, batch {batch}, budget {budget / GIB:.2f} GiB: {found.get('error', found.get('step_s'))}")
            tries.append({"budget_bytes": budget, "error": found.get("error")})
            if "error" not in found:
                return {"batch": batch, **self.per_image(found["step_s"] / batch), **found, "tries": tries}
        return {"batch": batch, "error": "no budget that was tried fits", "tries": tries}

    def fits(self, batch: int) -> bool:
        """Tell whether a batch runs with some budget."""
        return "error" not in self.run(batch, self.budgets(batch), self.steps)

    def per_image(self, seconds: float) -> Line:
        """Return the seconds of an image, and what they are of those of the plain step."""
        found = {"per_image_s": seconds}
        return {**found, "per_image_to_plain": seconds / self.plain_per_image_s} if self.plain_per_image_s else found

    def find_plain(self, *, unit: int) -> Line:
        """Find the largest plain batch, and measure it."""
        setting = self.setting
        alone = _largest(self.plain_fits, setting.batch(64), growth=1.6, unit=unit, bisections=5)
        if alone == 0:
            return {"error": "no plain batch fits"}
        found = setting.attempt(lambda: figures_of(self._measure(alone, plain, warmup=3, steps=setting.steps)))
        self.plain_batch = alone
        self.plain_per_image_s = found["step_s"] / alone if "step_s" in found else None
        return {
            "cap_bytes": CAP_BYTES,
            "plain_batch": alone,
            "plain": found,
            "plain_per_image_s": self.plain_per_image_s,
        }

    def compare(self, *, unit: int, multiples: Sequence[float]) -> Line:
        """Find the largest batches, and measure the plain one and some multiples of it."""
        setting = self.setting
        start = time.perf_counter()
        found = self.find_plain(unit=unit)
        if "error" in found:
            return found
        alone = self.plain_batch
        self.learn(alone)
        most = _largest(self.fits, 2 * alone, growth=1.5, unit=2 * unit, bisections=1 if setting.fast else 2)
        runs = []
        for batch in sorted({most, *(int(alone * multiple) for multiple in multiples if alone * multiple < most)}):
            if batch > 0:
                runs.append(self.run(batch, self.more_budgets(batch), setting.steps))
        return {
            **found,
            "memkit_batch": most,
            "batch_to_plain": most / alone,
            "beside_bytes_per_image": self.beside_bytes,
            "runs": runs,
            "search_s": time.perf_counter() - start,
        }


def cap(setting: Setting) -> Iterator[Line]:
    """The largest batch under a cap, plain and with memkit, and the time for each image."""
    set_cap(setting)
    for name, build in (
        ("resnet50", torchvision.models.resnet50),
        ("shufflenet_v2_x1_0", torchvision.models.shufflenet_v2_x1_0),
    ):
        model = setting.make(build)
        search = Capped(setting, partial(on_images, name, model, size=setting.size), model)
        found = search.compare(unit=1 if setting.tiny else 8, multiples=(4,))
        yield {"bench": "remat_cap", "name": name, **found}
        del model, search
        setting.clean()


def resnet1202(setting: Setting) -> Iterator[Line]:
    """ResNet-1202 on 32 x 32, batch 200, and the largest plain batch."""
    set_cap(setting)
    model = setting.make(partial(CifarResNet, 3 if setting.tiny else 200))
    make = partial(on_images, "resnet1202", model, size=16 if setting.tiny else 32, num_classes=10)
    search = Capped(setting, make, model, steps=2, warmup=3)
    found: Line = {}
    if not setting.fast:
        found["plain_batch"] = _largest(search.plain_fits, setting.batch(64), growth=1.5, unit=4, bisections=3)
    search.beside_bytes = 4 * 2**20  # some storages of 16 channels; a plan for so many values is made only once
    batch = setting.batch(200)
    run = search.run(batch, search.budgets(batch), min(setting.steps, 5))
    yield {"bench": "remat_resnet1202", "name": "resnet1202", "cap_bytes": CAP_BYTES, **found, **run}
