"""Which module an op ran in: for plans that explain themselves, and errors that name a place."""

from __future__ import annotations

import threading
from typing import Any

from torch import nn

from memkit.hooks import HookSet
from memkit.recording.recording import Recording


class ModuleTrail:
    """A context that enters the innermost module of each op into a recording, for the modules that this thread runs."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._hooks = HookSet()
        self._is_paused = False
        self._thread = threading.get_ident()
        self._running: list[tuple[nn.Module, int]] = []
        self._names: dict[nn.Module, str] = {}

    def follow(self, recording: Recording) -> None:
        """Write to another recording from now on. Modules that run already are on it from its beginning."""
        self._recording = recording
        self._running = [(module, 0) for module, _ in self._running]

    def __enter__(self) -> ModuleTrail:
        try:
            self._hooks.around_all_forwards(before=self._before, after=self._after)
            return self
        except BaseException:
            self._hooks.remove()
            raise

    def __exit__(self, *_: object) -> None:
        self._hooks.remove()
        self._is_paused = False

    @property
    def is_on(self) -> bool:
        return len(self._hooks) > 0

    def pause(self) -> None:
        """Take the hooks off for a while, if they are on."""
        if self.is_on:
            self._is_paused = True
            self._hooks.remove()

    def go_on(self, ended: nn.Module | None = None) -> None:
        """Put them on again, if they were.

        Args:
            ended: a module that has begun before the pause, and whose end is not told.
        """
        if self._is_paused:
            self._is_paused = False
            if ended is not None:
                self._after(ended)
            self.__enter__()

    def _before(self, module: nn.Module, *_: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if not self._running:
            self._names.update({part: name or type(module).__name__ for name, part in module.named_modules()})
        self._running.append((module, len(self._recording.calls)))

    def _after(self, module: nn.Module, *_: Any) -> None:
        if threading.get_ident() != self._thread or not self._running:
            return
        entered, first = self._running.pop()
        name = self._names.get(entered, type(entered).__name__)
        modules = self._recording.modules
        for op in range(first, len(self._recording.calls)):
            modules.setdefault(op, name)  # inner modules end first
