"""Sees in a plain forward which modules cannot be regions, of what only their calls show."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from memkit.activations.recomputing.module_state import NoRegion
from memkit.activations.recomputing.region_calls import Inputs
from memkit.hooks import HookSet
from memkit.interrupts import Exclusive
from memkit.kept import ForwardedHandle, KeptHandle


class RegionTrial(Exclusive):
    """A context in which a forward runs as it does, and after which it is known which modules are no regions.

    It holds no bytes of what it sees. It costs the host far more than a region does: one forward tells enough.

    Args:
        modules: that may be regions, as far as `why_not_region` can tell.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._why_not: dict[nn.Module, str] = {}
        self._watched = [_Watched(module, self._why_not) for module in modules]
        self._hooks = HookSet()

    @property
    def why_not(self) -> dict[nn.Module, str]:
        """Those that cannot be regions, and why: whole once the context was left, and perhaps longer after the backward."""
        for watched in self._watched:
            watched.look()
        return self._why_not

    def __enter__(self) -> RegionTrial:
        self.claim("this trial of regions is going on already: make one for each forward")
        self.is_entered = True
        try:
            for watched in self._watched:
                self._hooks.around_forward(watched.module, before=watched.before, after=watched.after, with_kwargs=True)
        except BaseException:
            self.leave(has_failed=True)
            raise
        return self

    def end_block(self, *, has_failed: bool) -> None:
        self._hooks.remove()
        for watched in self._watched:
            watched.found.clear()


class _Watched:
    """A module, and what its calls have shown."""

    def __init__(self, module: nn.Module, why_not: dict[nn.Module, str]) -> None:
        self.module = module
        self.found: list[tuple[list[KeptHandle], _Surroundings]] = []
        """What the calls that are going on have found."""
        self._why_not = why_not
        self._inputs: list[KeptHandle] = []
        """Of calls that are over."""

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs: list[KeptHandle] = []

        def hold(tensor: Tensor) -> KeptHandle:
            inputs.append(ForwardedHandle(tensor, _nothing, _refuse, is_checked=True))
            return inputs[-1]

        try:
            Inputs(args, kwargs, hold)
        except NoRegion as why:
            self._note(str(why))
        self.found.append((inputs, _Surroundings(module)))

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any = None) -> None:
        if not self.found:
            return
        inputs, before = self.found.pop()
        if not all(handle.is_unchanged() for handle in inputs):
            self._note("its forward writes to one of its inputs")
        self._note(before.what_has_changed(module))
        self._inputs += inputs

    def look(self) -> None:
        """See whether an input was written to since."""
        if not all(handle.is_unchanged() for handle in self._inputs):
            self._note("one of its inputs is written to before the backward")

    def _note(self, why: str) -> None:
        if why:
            self._why_not.setdefault(self.module, why)


class _Surroundings:
    """What a forward may change that a recompute would change once more."""

    def __init__(self, module: nn.Module) -> None:
        self._attributes = _attributes_of(module)
        self._draws = _draws()

    def what_has_changed(self, module: nn.Module) -> str:
        """Return what the forward has changed; empty if nothing."""
        now = _attributes_of(module)
        for place, value in now.items():
            if place not in self._attributes or not _are_same(self._attributes[place], value):
                return f'its forward changes the attribute "{place[1]}" of a {place[0]}'
        return "" if self._draws == _draws() else "its forward draws from a generator of Python or NumPy"


def _attributes_of(module: nn.Module) -> dict[tuple[str, str, int], Any]:
    """Return what the parts of a module have as plain attributes; of containers, what they hold."""
    own = _of_any_module()
    return {
        (type(part).__name__, name, index): _held(value)
        for index, part in enumerate(module.modules())
        for name, value in vars(part).items()
        if name not in own
    }


@functools.cache
def _of_any_module() -> frozenset[str]:
    """Return the attributes that every module has."""
    return frozenset({*vars(nn.Module())})


def _held(value: Any) -> Any:
    if isinstance(value, list | tuple | set | frozenset):
        return [type(value), *value]
    return [dict, *value.items()] if isinstance(value, dict) else value


def _are_same(before: Any, after: Any) -> bool:
    if isinstance(before, list) and isinstance(after, list):
        return len(before) == len(after) and all(map(_are_same, before, after))
    if isinstance(before, tuple) and isinstance(after, tuple):
        return len(before) == len(after) and all(map(_are_same, before, after))
    return before is after or (type(before) is type(after) and isinstance(before, _VALUES) and before == after)


_VALUES = (int, float, complex, str, bytes)


def _draws() -> tuple[Any, ...]:
    """Return where the generators are that torch knows nothing of."""
    numpy: Any = sys.modules.get("numpy")
    state = () if numpy is None else numpy.random.get_state(legacy=False)["state"]
    return random.getstate(), str(state)


def _nothing(_: Tensor) -> None:
    return None


def _refuse(_: None) -> Tensor:
    raise AssertionError("a trial gives nothing back")
