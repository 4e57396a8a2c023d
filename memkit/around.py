"""What stands for a while in the place of a function that a module is called by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from memkit import torch_private
from memkit.torch_state import leave_untraced

Code = Callable[..., Any]
"""What runs a module's forward: called with its arguments."""
Run = Callable[[nn.Module, Code, tuple[Any, ...], dict[str, Any]], Any]
"""Is given a module, what runs it, and the arguments of a call; returns what the call is to return."""


class Around:
    """Stands where what runs a module is called, in the attribute `place`. To be put by `HookSet.add`, which removes it."""

    def __init__(self, module: nn.Module, place: str, run: Run) -> None:
        self._module, self._place = module, place
        own = vars(module).get(place)  # read once: another thread may put something there, or take it off
        self.code: Code = getattr(module, place) if own is None else own
        self._is_own = own is not None
        """Whether the module itself has that attribute, and not its class."""
        self._run: Run | None = run
        """None once it was removed: another may stand in front of it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self._run
        return self.code(*args, **kwargs) if run is None else run(self._module, self.code, args, kwargs)

    vars(__call__).update(torch_private.UNTRACED_MARKS)  # where its caller is traced

    def put(self) -> None:
        vars(self._module)[self._place] = self

    def remove(self) -> None:
        """Put back what was there, once nothing stands in front; may be called again."""
        self._run = None
        own, place = vars(self._module), self._place
        while isinstance(last := own.get(place), Around) and last._run is None:
            if last._is_own:
                own[place] = last.code
            else:
                del own[place]


leave_untraced(Around.__call__)


def within(function: Any) -> Any:
    """Return what a function stands around, or itself."""
    while isinstance(function, Around):
        function = function.code
    return function
