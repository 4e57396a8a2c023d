"""Shows long-running work and warnings on standard error."""

from __future__ import annotations

import logging
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from memkit.core.terminal import shortened


@contextmanager
def progress() -> Iterator[None]:
    """Show on standard error warnings, and any work longer than a second: memkit's last log message, and its duration."""
    handler = _Progress()
    logger = logging.getLogger("memkit")
    level = logger.level
    logger.setLevel(min(level or logging.INFO, logging.INFO))
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(), handler:
            if not sys.warnoptions:  # Python's default, whatever was set before
                warnings.simplefilter("default")
                for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
                    warnings.simplefilter("ignore", kind)
            warnings.showwarning = handler.show_warning
            yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class _Progress(logging.Handler):
    """A log handler with a thread that regularly checks the age of the last message."""

    PATIENCE_S = 1.0

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._done = threading.Event()
        self._phase = ""
        self._since_s = time.monotonic()
        self._shown = ""
        self._warned: set[str] = set()
        self._thread = threading.Thread(target=self._watch, name="memkit-progress", daemon=True)

    def emit(self, record: logging.LogRecord) -> None:
        self._phase, self._since_s = record.getMessage(), time.monotonic()

    def show_warning(self, message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        kind = "" if category is UserWarning else f"{category.__name__}: "
        text = " ".join(f"memkit: warning: {kind}{message}".split())
        if text not in self._warned:
            self._warned.add(text)
            clear = "\r\033[K" if self._shown and sys.stderr.isatty() else ""
            print(f"{clear}{text}", file=sys.stderr, flush=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        if self._shown and sys.stderr.isatty():
            print(file=sys.stderr)

    def _watch(self) -> None:
        while not self._done.wait(0.1):
            seconds = time.monotonic() - self._since_s
            if not self._phase or seconds < self.PATIENCE_S:
                continue
            if sys.stderr.isatty():
                text = shortened(f"memkit: {self._phase} ({seconds:.0f} s)", shutil.get_terminal_size().columns - 1)
                print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
                self._shown = self._phase
            elif self._shown != self._phase:
                print(f"memkit: {self._phase} ...", file=sys.stderr, flush=True)
                self._shown = self._phase
