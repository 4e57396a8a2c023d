"""Reports to draw, and a headless Chromium that opens a page, clicks in it, and tells what was there then."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.plan import MemoryPlan
from memkit.profile import MemoryReport

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium on the PATH (Debian's package chromium)")

_WATCHING = """
<script>
window.seen = { errors: [], alerts: [] };
window.alert = (text) => window.seen.alerts.push(String(text));
window.addEventListener("error", (event) => window.seen.errors.push(String(event.message)));
window.addEventListener("unhandledrejection", (event) => window.seen.errors.push(String(event.reason)));
</script>
"""

_CLICKING = """
<script>
(async () => {
  const wait = (ms) => new Promise((done) => setTimeout(done, ms));
  const get = (id) => document.getElementById(id);
  const texts = (selector) => [...document.querySelectorAll(selector)].map((found) => found.textContent);
  const set = (input, value) => { input.value = value; input.dispatchEvent(new Event("input", { bubbles: true })); };
  // As a mouse does it: plotly looks at where it is, and at its buttons.
  const mouse = async (target, x, y) => {
    const at = { clientX: x, clientY: y, bubbles: true, view: window };
    for (const kind of ["mouseover", "mousemove", "mousedown", "mouseup", "click"]) {
      target.dispatchEvent(new MouseEvent(kind, at));
      await wait(120);
    }
  };
  const result = {};
  try {
    for (let waited = 0; !document.documentElement.dataset.ready && waited < 200; waited += 1) await wait(50);
    result.ready = document.documentElement.dataset.ready;
    ACTIONS
  } catch (error) {
    window.seen.errors.push(String(error && error.stack || error));
  }
  const loaded = performance.getEntriesByType("resource").map((entry) => entry.name);
  result.loaded = loaded.filter((name) => !name.startsWith("data:"));
  const pre = document.createElement("pre");
  pre.id = "told";
  pre.textContent = JSON.stringify({ ...result, ...window.seen });
  document.body.append(pre);
})();
</script>
"""


def opened(page: Path, actions: str = "", *, width: int = 1400, height: int = 1000, is_dark: bool = False) -> dict[str, Any]:
    """Return what a page told: what `actions`, which is JavaScript, has put into `result`, with errors, alerts and what was
    loaded. Any: JSON."""
    text = page.read_text(encoding="utf-8")
    copy = page.with_name(f"{page.stem}_watched.html")
    text = text.replace("<head>", f"<head>{_WATCHING}", 1)
    copy.write_text(text.replace("</body>", _CLICKING.replace("ACTIONS", actions) + "</body>"), encoding="utf-8")
    assert CHROMIUM is not None
    command = [
        CHROMIUM,
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--dump-dom"),
        f"--user-data-dir={page.parent / 'browser'}",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--disable-background-networking",
        f"--window-size={width},{height}",
        "--virtual-time-budget=30000",
        f"--blink-settings=preferredColorScheme={0 if is_dark else 1}",
        copy.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    told = re.search(r'<pre id="told">(.*?)</pre>', done.stdout, re.DOTALL)
    assert told is not None, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(html.unescape(told[1]))
    return found


EVIL = (
    "<script>alert(1)</script>",
    "</script><script>alert(2)</script>",
    "<img src=x onerror=alert(3)>",
    "%{x} &lt;b&gt; <b>b</b>",
)
"""Names that would do something if they were taken for HTML, or for plotly's."""


class Block(nn.Module):
    """A residual block of two Linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(self.act(self.fc1(x)))


def report_of_blocks(num_blocks: int = 4, *, width: int = 64, batch: int = 4096, tag: str = "blocks") -> MemoryReport:
    """Return the report of a whole step of a few blocks, with a trace and an optimizer."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(width, width), nn.Sequential(*[Block(width) for _ in range(num_blocks)]))
        x = torch.empty(batch, width)
    return profiled(model, x, tag=tag)


def profiled(model: nn.Module, x: Tensor, *, tag: str = "default", optimizer: str | None = "adamw") -> MemoryReport:
    """Return the report of a whole step on meta."""
    return memkit.profile_memory(
        model, x, device="meta", backward=True, trace=True, optimizer=optimizer, tag=tag, print_table=False
    )


def report_of_evil() -> MemoryReport:
    """Return the report of a model whose modules, classes and tag are named as nobody should name them."""
    with torch.device("meta"):
        model = type(EVIL[0], (nn.Sequential,), {})()
        for name in EVIL:
            model.add_module(name.replace(".", "_"), type(name, (nn.Linear,), {})(256, 256))
        x = torch.empty(4096, 256)
    return profiled(model, x, tag=EVIL[1])


def plans_of(report: MemoryReport, *shares: float) -> list[MemoryPlan]:
    """Return plans for shares of the plain step's peak."""
    return [memkit.plan_memory(report, budget=share, gpu="RTX 3090", optimizer="adamw") for share in shares]
