"""`attach`: `CPUOffload` around each call of a model, set by hooks on it."""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from memkit.activations.offload import CPUOffload, Ratio
from memkit.calls import Calls, Ending
from memkit.hooks import HookSet
from memkit.profile import find_report
from memkit.profile.registry import forget_report
from memkit.profile.tree import ModuleTree
from memkit.sizes import unique_storages


def _end(context: CPUOffload, ending: Ending) -> None:
    """Leave a context as the call has ended that it was around."""
    error: BaseException | None = None
    if ending is not Ending.RETURNED:
        error = sys.exc_info()[1] if ending is Ending.RAISED else KeyboardInterrupt()
    context.__exit__(None if error is None else type(error), error, None)


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
        self._running = Calls()
        self._hooks = HookSet()

    def __deepcopy__(self, _: dict[int, Any]) -> AttachedOffload:
        copied = AttachedOffload.__new__(AttachedOffload)
        copied.__setstate__(self._make)
        return copied

    def remove(self) -> None:
        """Let the model run without the offload again. Graphs that are alive keep working."""
        self._running.end_interrupted()
        self._hooks.remove()

    def _before(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        call = self._running.begin(model, depth=2)  # first: the other hook runs even if entering raises
        known = [*model.parameters(), *model.buffers()]
        known += [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        context = self._make()
        context.enter_knowing({key: weakref.ref(storage) for key, storage in unique_storages(known).items()})
        call.end = functools.partial(_end, context)

    def _after(self, model: nn.Module, *_: Any) -> None:
        self._running.end(model, depth=2)


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
