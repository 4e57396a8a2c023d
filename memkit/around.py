"""`Around`: temporarily replaces the function that a module is called through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from memkit import torch_private
from memkit.torch_state import leave_untraced

Code = Callable[..., Any]
"""The function that runs a module's forward, called with its arguments."""
Run = Callable[[nn.Module, Code, tuple[Any, ...], dict[str, Any]], Any]
"""Called with a module, the function that runs it, and the arguments of a call; returns the result of the call."""


class Around:
    """Replaces the function that runs a module, in the module's attribute `place`. Installed and removed by `HookSet.add`."""

    def __init__(self, module: nn.Module, place: str, run: Run) -> None:
        self._module, self._place = module, place
        own = vars(module).get(place)  # read once: another thread may put something there, or take it off
        self.code: Code = getattr(module, place) if own is None else own
        self._is_own = own is not None
        """Whether the attribute is the instance's rather than the class's."""
        self._run: Run | None = run
        """None after it was removed, since another wrapper may still call this one."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self._run
        return self.code(*args, **kwargs) if run is None else run(self._module, self.code, args, kwargs)

    vars(__call__).update(torch_private.UNTRACED_MARKS)  # where its caller is traced

    def put(self) -> None:
        vars(self._module)[self._place] = self

    def remove(self) -> None:
        """Restore the original function, once no other wrapper is in front; may be called again."""
        self._run = None
        own, place = vars(self._module), self._place
        while isinstance(last := own.get(place), Around) and last._run is None:
            if last._is_own:
                own[place] = last.code
            else:
                del own[place]


leave_untraced(Around.__call__)


def within(function: Any) -> Any:
    """Return the function inside a wrapper, or the function itself."""
    while isinstance(function, Around):
        function = function.code
    return function
