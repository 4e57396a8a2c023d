"""The only place that sets hooks on models, graph nodes, the engine and optimizers, so that each is removed again."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from traceback import walk_stack
from types import FrameType, TracebackType
from typing import Any, Protocol

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memkit.core import torch_private
from memkit.core.interrupts import Block, do_at_once
from memkit.core.torch_state import leave_untraced


class RemovableHandle(Protocol):
    def remove(self) -> None: ...


class StepHook:
    """Calls `hook(optimizer)` before every step until removed or dropped; within a step, torch's part only goes idle."""

    def __init__(self, hook: Callable[[torch.optim.Optimizer], None]) -> None:
        self.hook = hook
        self._handle: RemovableHandle | None = None

    def set(self) -> None:
        """Have the hook called from now on. The owner holds this by then, so that an interrupt leaves no hook."""
        _remove_left()
        self._handle = register_optimizer_step_pre_hook(partial(_call, weakref.ref(self)))
        weakref.finalize(self, _remove_outside_of_steps, self._handle).atexit = False

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()


def _call(reference: weakref.ref[StepHook], optimizer: torch.optim.Optimizer, *_: object) -> None:
    found = reference()
    if found is not None:
        found.hook(optimizer)


def put_last(handle: RemovableHandle) -> None:
    hook: Any = handle
    hook.hooks_dict_ref().move_to_end(hook.id)


_STEP = torch.optim.Optimizer.profile_hook_step(lambda _: None).__code__
_left: list[RemovableHandle] = []  # hooks dropped within a step: they do nothing any more, and go when the next is set


def _remove_outside_of_steps(handle: RemovableHandle) -> None:
    """Remove the hook of a dead owner: garbage may be collected within a step, or in another thread beside one."""
    _left.append(handle)
    # no local variable: this frame, one of these, would hold itself and the others
    if not any(frame.f_code is _STEP for top in sys._current_frames().values() for frame, _ in walk_stack(top)):
        _remove_left()


def _remove_left() -> None:
    while _left:
        _left[-1].remove()
        _left.pop()


class _Untraced:
    """Calls a hook so that Dynamo neither traces nor compiles it: as `torch.compiler.disable`, which loads Dynamo."""

    def __init__(self, hook: Callable[..., None]) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> None:
        self._hook(*args)

    vars(__call__).update(torch_private.UNTRACED_MARKS)  # where its caller is traced


class _Uncopied(_Untraced):
    """Such a hook that no copy of its module has: the copy, or saved module, has one that does nothing and needs no memkit."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (nullcontext(), "__exit__")


leave_untraced(_Untraced.__call__)


class _WithKeywords:
    """A global hook with keyword arguments, which torch doesn't forget when it removes the hook. It is held, then set."""

    handle: Any = None

    def remove(self) -> None:
        if self.handle is not None:
            torch_private.hooks_with_keywords.pop(self.handle.id, None)
            self.handle.remove()


class HookSet:
    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> HookSet:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()

    def __len__(self) -> int:
        return len(self._handles)

    def around_forward(
        self,
        module: nn.Module,
        *,
        before: Callable[..., None],
        after: Callable[..., None],
        with_kwargs: bool = False,
        is_copied: bool = True,
    ) -> None:
        """Call `before(module, args)`, or with kwargs, before a module's other pre-hooks and `after(module, args, output)`
        after its other hooks; the output is None when the forward raises. Both run as plain Python even if the module was
        compiled, two frames below its call. Without `is_copied`, a copied or saved module calls nothing."""
        kind = _Untraced if is_copied else _Uncopied
        self._handles.append(module.register_forward_pre_hook(kind(before), prepend=True, with_kwargs=with_kwargs))
        self._handles.append(module.register_forward_hook(kind(after), always_call=True))

    def before_forward(self, module: nn.Module, hook: Callable[..., None]) -> None:
        """Call `hook(module, args, kwargs)` as plain Python before a module's other pre-hooks."""
        self._handles.append(module.register_forward_pre_hook(_Untraced(hook), prepend=True, with_kwargs=True))

    def within_hooks(self, module: nn.Module, *, before: Callable[..., None], after: Callable[..., None]) -> None:
        """As `around_forward`, but inside of the module's other hooks, and `before` gets the keyword arguments."""
        self._handles.append(module.register_forward_pre_hook(_Untraced(before), with_kwargs=True))
        self._handles.append(module.register_forward_hook(_Untraced(after), prepend=True, always_call=True))

    def around_hooks_of(self, library: str, module: nn.Module, hook: Callable[..., None]) -> None:
        """Call `hook(is_before, module, args)` just around the pre-hook that a library has set on a module, as plain Python."""
        self._handles += [module.register_forward_pre_hook(_Untraced(partial(hook, begins))) for begins in (True, False)]
        handles: list[Any] = self._handles[-2:]
        hooks, (before, after) = handles[0].hooks_dict_ref(), [handle.id for handle in handles]
        for number, other in list(hooks.items())[:-2]:  # around it, and so with all others where they are
            is_theirs = getattr(other, "__module__", "").startswith(library)
            do_at_once(*(partial(hooks.move_to_end, it) for it in ((before, number, after) if is_theirs else (number,))))

    def add(self, handle: RemovableHandle) -> None:
        self._handles.append(handle)

    def put_outside(self) -> None:
        """Move the hooks of `around_forward`, the only ones here, outside of hooks that were set since."""
        handles: list[Any] = list(self._handles)
        for before, after in zip(handles[::2], handles[1::2], strict=True):
            before.hooks_dict_ref().move_to_end(before.id, last=False)
            after.hooks_dict_ref().move_to_end(after.id)

    def after_forward(self, module: nn.Module, hook: Callable[..., None]) -> None:
        """Call `hook(module, args, kwargs, output)` as plain Python after a module's other hooks, unless the forward raises."""
        self._handles.append(module.register_forward_hook(_Untraced(hook), with_kwargs=True))

    def before_backward(self, node: torch.autograd.graph.Node, hook: Callable[[], None]) -> None:
        self._handles.append(node.register_prehook(lambda _: hook()))

    def around_accumulation(
        self, parameter: Tensor, *, before: Callable[[Tensor], None], after: Callable[[Tensor], None]
    ) -> None:
        """Call `before(grad)` ahead of an accumulation and `after(parameter)` behind, without a Python frame of its own."""
        self.before_accumulation(parameter, before)
        behind = partial[None](weakref.proxy(after))
        self._handles.append(_Held(after, behind))
        self._handles.append(parameter.register_post_accumulate_grad_hook(behind))

    def before_accumulation(self, parameter: Tensor, hook: Callable[[Tensor], None]) -> None:
        """Call `hook(grad)` before the engine accumulates a gradient, or `torch.autograd.grad` returns it."""
        self._handles.append(parameter.register_hook(hook))

    def before_any_step(self, hook: Callable[[torch.optim.Optimizer], None]) -> None:
        held = StepHook(hook)
        self._handles.append(held)
        held.set()

    def around_all_forwards(self, *, before: Callable[..., None], after: Callable[..., None]) -> None:
        """In all threads, call `before(module, args)` before every forward, and `after` after it, also if it raises."""
        self.ahead_of_all_forwards(before)
        last = _WithKeywords()
        self._handles.append(last)
        last.handle = nn.modules.module.register_module_forward_hook(after, with_kwargs=True, always_call=True)

    def ahead_of_all_forwards(self, before: Callable[..., None]) -> None:
        self._handles.append(nn.modules.module.register_module_forward_pre_hook(before))

    def remove(self) -> None:
        while self._handles:
            handle: Any = self._handles[-1]
            handle.remove()  # which an interrupt leaves here, so that it is removed again
            self._handles.pop()


@dataclass(frozen=True, slots=True)
class _Held:
    """Holds the function that such a hook refers to weakly: Python's collector doesn't see torch's references."""

    after: Callable[[Tensor], None]
    behind: partial[None]

    def remove(self) -> None:  # an interrupt may have left the hook set: from now on it does nothing
        self.behind.__setstate__((nullcontext().__exit__, (), {}, None))  # type: ignore[attr-defined]  # not in the stubs


def may_step_in_backward(parameter: Tensor) -> bool:
    return bool(torch_private.post_accumulate_hooks(parameter))


HookPair = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class SavedTensorHooks(AbstractContextManager[Any]):
    """A context in which autograd has tensors packed and unpacked. Source: `torch.autograd.graph.saved_tensors_hooks`."""

    def __init__(
        self,
        pack: Callable[[Tensor], Any],
        unpack: Callable[[Any], Tensor],
        *,
        owner: object = None,
        name: str = "",
        hands_on: bool = False,
        block: Block | None = None,
    ) -> None:
        for hook in (pack, unpack):
            leave_untraced(hook)
        self.pack = pack
        self.unpack = unpack
        self.owner = owner
        self.name = name  # the context's class, for users; empty if memkit itself has entered it
        self.hands_on = hands_on  # whether these hooks only keep tensors that no other hooks may see, and pass on all others
        self.outer: HookPair | None = None  # the next outer pair: these hooks may pass tensors on to it
        self.block = block  # dies when the thread leaves the context: then `end_left` ends it; None if not known
        self._was_taken_off: list[bool] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        self._push, self._pop = torch_private.push_saved_tensor_hooks, torch_private.pop_saved_tensor_hooks
        self._take_off = partial(self._pop), partial(self._was_taken_off.append, True)  # of `__exit__`, ahead of the hooks

    def __enter__(self) -> SavedTensorHooks:
        if _stacked.hooks:
            end_left()
        self.outer = torch_private.top_saved_tensor_hooks(True)
        self._was_taken_off.clear()
        try:
            _stacked.hooks.append(self)
            self._hooks.__enter__()
            return self
        except BaseException:  # hooks may be forbidden (`torch.autograd.graph.disable_saved_tensors_hooks`), or an interrupt
            if innermost_pack() is self.pack:
                self._hooks.__exit__()
            if self in _stacked.hooks:
                _stacked.hooks.remove(self)
            raise

    def __exit__(self, *_: object) -> None:
        """Remove the hooks. Calling it again finishes an interrupted call, or does nothing."""
        if self not in _stacked.hooks:
            return
        above, top = [], torch_private.top_saved_tensor_hooks
        while (pair := top(True)) is not None and pair[0] is not self.pack:
            above.append(pair)
            self._pop()
        if pair is not None:  # above it are pairs that were set after an interrupt has left it there
            deque(map(partial.__call__, self._take_off), maxlen=0)  # as `do_at_once`: no interrupt comes between the two
        elif not self._was_taken_off:
            del above[:1]  # after an interrupt another context's exit has taken it off, and left this one instead
        if above and not self.hands_on:
            # but for those of a layer that an interrupt has left: they would pass on later tensors
            above = [pair for pair in above if not any(hooks.hands_on and hooks.pack is pair[0] for hooks in _stacked.hooks)]
        for pair in reversed(above):
            self._push(*pair)
        _stacked.hooks.remove(self)  # last: until then, an interrupt leaves it to `end_left`


def end_left() -> None:
    for hooks in _stacked.hooks[::-1]:
        if hooks.block is not None and hooks.block() is None:
            if (end := getattr(hooks.owner, "end", None)) is not None:
                end(has_failed=True)
            hooks.__exit__()


class _Stacked(threading.local):
    def __init__(self) -> None:
        self.hooks: list[SavedTensorHooks] = []


_stacked = _Stacked()


def stacked_owners() -> list[object]:
    return [hooks.owner for hooks in _stacked.hooks]


def name_of_hooks_around() -> str:
    if in_checkpoint():
        return "torch.utils.checkpoint"
    if innermost_pair() is None:
        return ""
    names = [hooks.name for hooks in reversed(_stacked.hooks) if hooks.name]
    return names[0] if names else "a pair of saved-tensor hooks (torch.autograd.graph.saved_tensors_hooks, save_on_cpu)"


def innermost_hooks() -> SavedTensorHooks | None:
    hooks = _stacked.hooks[-1] if _stacked.hooks else None
    return hooks if hooks is not None and innermost_pack() is hooks.pack else None


def innermost_pair() -> HookPair | None:
    return torch_private.top_saved_tensor_hooks(True)


def innermost_pack() -> Callable[[Tensor], object] | None:
    pair = innermost_pair()
    return None if pair is None else pair[0]


def _packs_on_top() -> Iterator[tuple[Callable[[Tensor], object], SavedTensorHooks | None]]:
    """Yield the innermost pack hook and memkit's hooks that it belongs to; then the next outer one, while they are memkit's."""
    pair = innermost_pair()
    for hooks in (*reversed(_stacked.hooks), None):
        if pair is None:
            return
        if hooks is None or pair[0] is not hooks.pack:
            yield pair[0], None
            return
        yield pair[0], hooks
        pair = hooks.outer


def receiving_pack() -> Callable[[Tensor], object] | None:
    """Return the pack hook that would get a tensor saved now, if it is no streamed weight; None if there is none."""
    return next((pack for pack, hooks in _packs_on_top() if hooks is None or not hooks.hands_on), None)


def in_checkpoint() -> bool:
    """Tell whether a checkpoint runs the caller: by its saved-tensor hooks, or, of the reentrant kind, by its frame."""
    if any(getattr(pack, "__module__", "") == torch_private.CHECKPOINT_HOOKS for pack, _ in _packs_on_top()):
        return True
    if torch.is_grad_enabled():
        return False
    reentrant = torch.utils.checkpoint.CheckpointFunction.forward.__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not reentrant:
        frame = frame.f_back
    return frame is not None
