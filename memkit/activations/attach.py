"""`attach`: `CPUOffload` around each call of a model, set by hooks on it."""

from __future__ import annotations

import functools
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from memkit.activations.offload import CPUOffload, Ratio
from memkit.hooks import HookSet
from memkit.profile import find_report
from memkit.profile.registry import forget_report
from memkit.profile.tree import ModuleTree
from memkit.sizes import unique_storages


@dataclass(slots=True, eq=False)
class _Call:
    """A call of an attached model that is going on."""

    frame: FrameType | None
    """Where it is called from: once that is off the stack, the call is over, however it ended."""
    handled: BaseException | None
    """The exception that the caller was handling already."""
    context: CPUOffload | None = None
    """None where entering raised."""

    def end(self, error: BaseException | None) -> None:
        if self.context is not None:
            failure = None if error is self.handled else error
            self.context.__exit__(None if failure is None else type(failure), failure, None)


class AttachedOffload:
    """What `attach` returns: an offload that is on whenever the model runs, until `remove()`.

    A copy of the model, made by `copy.deepcopy` or by pickling, is attached as well.
    """

    def __init__(self, model: nn.Module, make: Callable[[], CPUOffload]) -> None:
        self.__setstate__(make)
        self._hooks.around_forward(model, before=self._before, after=self._after, with_kwargs=True)

    def __getstate__(self) -> Callable[[], CPUOffload]:
        return self._make

    def __setstate__(self, make: Callable[[], CPUOffload]) -> None:
        self._make = make
        self._running = threading.local()
        self._hooks = HookSet()

    def __deepcopy__(self, _: dict[int, Any]) -> AttachedOffload:
        copied = AttachedOffload.__new__(AttachedOffload)
        copied.__setstate__(self._make)
        return copied

    def remove(self) -> None:
        """Let the model run without the offload again. Graphs that are alive keep working."""
        self._end_interrupted()
        self._hooks.remove()

    def _calls(self) -> list[_Call]:
        """Return this thread's calls that are going on, the innermost last."""
        calls: list[_Call] = self._running.__dict__.setdefault("calls", [])
        return calls

    def _end_interrupted(self) -> None:
        """End the calls that were left by an interrupt: torch runs hooks after exceptions, but not after those."""
        calls, frame, stack = self._calls(), sys._getframe(), set[FrameType]()
        while frame.f_back is not None:
            frame = frame.f_back
            stack.add(frame)
        while calls and calls[-1].frame not in stack:
            calls.pop().end(KeyboardInterrupt())

    def _before(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        self._end_interrupted()
        call = _Call(sys._getframe(1), sys.exc_info()[1])
        self._calls().append(call)  # first: the other hook runs even if entering raises
        known = [*model.parameters(), *model.buffers()]
        known += [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        context = self._make()
        context.enter_knowing({key: weakref.ref(storage) for key, storage in unique_storages(known).items()})
        call.context = context

    def _after(self, *_: Any) -> None:
        self._calls().pop().end(sys.exc_info()[1])


def attach(model: nn.Module, offload_ratio: Ratio, tag: str = "default", **options: Any) -> AttachedOffload:
    """Offload whenever the model runs, without a change to the training loop.

    Since it knows the model, it knows which storages are parameters, buffers and inputs before the first iteration. A report
    under the tag that was made of another model is not used, with a warning.

    Args:
        model: whose forward to wrap. It is left as it is; hooks are registered on it.
        offload_ratio, tag, options: as for `CPUOffload`.

    Returns:
        A handle whose `remove()` takes the hooks off again.

    Raises:
        TypeError: `model` is no module, or see `CPUOffload`.
        ValueError: see `CPUOffload`.

    Example:
        >>> import torch, memkit
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())
        >>> handle = memkit.attach(model, 1.0, "attached", min_bytes=0, device=memkit.device.ReferenceDevice())
        >>> model(torch.randn(32, 64)).sum().backward()
        >>> handle.remove()
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"attach needs a torch.nn.Module; found {type(model).__name__}")
    report = CPUOffload(offload_ratio, tag, **options).profile or find_report(tag)
    if report is not None and report.run.fingerprint != ModuleTree(model).fingerprint():
        warnings.warn(
            f'the report under the tag "{tag}" is of another model ({report.run.model}): it is not used. Profile this one, or '
            "use another tag.",
            stacklevel=2,
        )
        options["profile"] = None
        forget_report(tag)
    return AttachedOffload(model, functools.partial(CPUOffload, offload_ratio, tag, **options))
