"""`ModuleTrail`: which module an op ran in, for plans and errors that name a place; and which modules are called."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import torch
from torch import nn

from memkit import torch_private
from memkit.hooks import HookSet
from memkit.recording.module_calls import NotedCall
from memkit.recording.recording import Recording


class ModuleTrail:
    """A context that notes the innermost module of each op in a recording, for modules that this thread runs.

    Args:
        recording: the recording.
        notes_calls: whether to note each module call as well.
    """

    def __init__(self, recording: Recording, *, notes_calls: bool = False) -> None:
        self._recording = recording
        self._hooks = HookSet()
        self._is_paused = False
        self._thread = threading.get_ident()
        self._running: list[tuple[nn.Module, int, int]] = []
        self._names: dict[nn.Module, str] = {}
        self._notes_calls = notes_calls
        self._num_calls = Counter[nn.Module]()
        self.calls: list[NotedCall] = []
        """The calls of the forward, in the order in which they begin."""

    def follow(self, recording: Recording) -> None:
        """Write to another recording from now on. Modules that are already running are on it from its beginning."""
        self._recording = recording
        self._notes_calls = False  # a backward ran within the context: what is called there is not known well enough
        self.calls = []
        self._running = [(module, 0, -1) for module, _, _ in self._running]

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
    def place(self) -> int:
        """The index in `calls` of the innermost running module, -1 if it is not noted."""
        return self._running[-1][2] if self._running else -1

    @property
    def is_on(self) -> bool:
        return len(self._hooks) > 0

    def pause(self) -> None:
        """Remove the hooks for a while, if they are on."""
        if self.is_on:
            self._is_paused = True
            self._hooks.remove()

    def go_on(self, ended: nn.Module | None = None) -> None:
        """Set the hooks again, if they were on.

        Args:
            ended: a module that began before the pause and whose end the hooks didn't see.
        """
        if self._is_paused:
            self._is_paused = False
            if ended is not None:
                self._after(ended)
            self.__enter__()

    def note_begin(self, module: nn.Module) -> None:
        """Note the call of a module that the hooks don't see, perhaps because they are paused."""
        if self.is_on or self._is_paused:
            self._before(module)

    def note_end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Note the end of such a call."""
        if self.is_on or self._is_paused:
            self._after(module, args, kwargs, output)

    def _before(self, module: nn.Module, *_: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if not self._running:
            self._names.update({part: name or type(module).__name__ for name, part in module.named_modules()})
        recording, place = self._recording, -1
        if self._notes_calls and torch_private.backward_task() == -1:
            place = len(self.calls)
            parent = self._running[-1][2] if self._running else -1
            name = self._names.get(module, type(module).__name__)
            self.calls.append(NotedCall(module, name, self._num_calls[module], parent, recording))
            self._num_calls[module] += torch.is_grad_enabled()
        self._running.append((module, len(recording.calls), place))

    def _after(self, module: nn.Module, *given: Any) -> None:
        if threading.get_ident() != self._thread or not self._running:
            return
        entered, first, place = self._running.pop()
        name = self._names.get(entered, type(entered).__name__)
        modules = self._recording.modules
        for op in range(first, len(self._recording.calls)):
            modules.setdefault(op, name)  # inner modules end first
        if place >= 0 and len(given) == 3 and entered is module:  # torch tells of the keywords where the call has not failed
            args, kwargs, output = given
            with torch_private.without_python_dispatch():
                self.calls[place].end(module, (args, kwargs), output, self._recording)
