"""Shows on standard error what takes long."""

from __future__ import annotations

import logging
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType


@contextmanager
def progress() -> Iterator[None]:
    """Show on standard error what takes longer than a second: the last line that memkit logged, and for how long."""
    handler = _Progress()
    logger = logging.getLogger("memkit")
    level = logger.level
    logger.setLevel(min(level or logging.INFO, logging.INFO))
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(), handler:
            warnings.simplefilter("ignore" if not sys.warnoptions else "default")
            yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class _Progress(logging.Handler):
    """A log handler with a thread that looks once in a while whether the last line is old."""

    PATIENCE_S = 1.0

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._done = threading.Event()
        self._phase = ""
        self._since_s = time.monotonic()
        self._shown = ""
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def emit(self, record: logging.LogRecord) -> None:
        self._phase, self._since_s = record.getMessage(), time.monotonic()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
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
                print(f"\r\033[Kmemkit: {self._phase} ({seconds:.0f} s)", end="", file=sys.stderr, flush=True)
                self._shown = self._phase
            elif self._shown != self._phase:
                print(f"memkit: {self._phase} ...", file=sys.stderr, flush=True)
                self._shown = self._phase
