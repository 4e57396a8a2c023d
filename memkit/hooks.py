"""The one door to torch's module hooks and saved-tensor hooks.

Every hook that memkit sets on a model, a graph node or the autograd engine is set here, so that each is removed again, in
reverse order, on success and on error. The functions that look into torch's private state are at the end.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import FrameType, TracebackType
from typing import Any, Protocol, runtime_checkable

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._C._dynamo.guards import set_is_in_mode_without_ignore_compile_internals as _set_shows_to_guards
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from memkit.errors import ProfileError
from memkit.interrupts import Block

_eval_frame = torch._C._dynamo.eval_frame


class RemovableHandle(Protocol):
    """What torch's `register_*` functions return."""

    def remove(self) -> None: ...


_SKIP = _eval_frame._FrameAction.SKIP  # where it is called


def leave_untraced(function: Callable[..., Any]) -> None:
    """Have Dynamo neither compile a function where it is called, nor whatever that calls. Where nothing is compiled it costs
    nothing."""
    _eval_frame.set_code_exec_strategy(function.__code__, _eval_frame._FrameExecStrategy(_SKIP, _SKIP))


class _Untraced:
    """Calls a hook, which Dynamo neither inlines nor compiles, nor whatever that calls.

    As `torch.compiler.disable` does, which loads Dynamo: that takes seconds, also where nothing is ever compiled.
    """

    def __init__(self, hook: Callable[..., None]) -> None:
        self._hook = hook

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._hook(*args, **kwargs)

    __call__._torchdynamo_disable = True  # type: ignore[attr-defined]  # where its caller is traced
    __call__._torchdynamo_disable_msg = None  # type: ignore[attr-defined]


class _Uncopied(_Untraced):
    """Such a hook that stays with its module: in a copy of that, or in what is saved of it, one is in its place that does
    nothing, and for which a reader needs no memkit."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (nullcontext(), "__exit__")


leave_untraced(_Untraced.__call__)


class HookSet:
    """Hooks that are removed together: a context manager over the handles that were added to it."""

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
        """Call `before(module, args)`, or `before(module, args, kwargs)`, ahead of a module's other pre-hooks and
        `after(module, args, output)` behind its other hooks, or when the forward raises (with None for the output).

        Both run as plain Python where the module was compiled (`nn.Module.compile`). They are two frames below its call.

        Args:
            is_copied: whether a copy of the module, or one that is saved and loaded, calls copies of them, or nothing.
        """
        kind = _Untraced if is_copied else _Uncopied
        self._handles.append(module.register_forward_pre_hook(kind(before), prepend=True, with_kwargs=with_kwargs))
        self._handles.append(module.register_forward_hook(kind(after), always_call=True))

    def put_outside(self) -> None:
        """Call what `around_forward`, and nothing else, has set ahead of what was set since then, and behind it, as well."""
        handles: list[Any] = list(self._handles)
        for before, after in zip(handles[::2], handles[1::2], strict=True):
            before.hooks_dict_ref().move_to_end(before.id, last=False)
            after.hooks_dict_ref().move_to_end(after.id)

    def after_forward(self, module: nn.Module, hook: Callable[..., None]) -> None:
        """Call `hook(module, args, kwargs, output)` behind a module's other hooks, unless the forward raises."""
        self._handles.append(module.register_forward_hook(hook, with_kwargs=True))

    def before_backward(self, node: torch.autograd.graph.Node, hook: Callable[[], None]) -> None:
        """Call `hook()` each time the autograd engine is about to run `node`; the gradients pass through untouched."""

        def pre_hook(_: tuple[Tensor, ...]) -> None:
            hook()

        self._handles.append(node.register_prehook(pre_hook))

    def around_accumulation(
        self, parameter: Tensor, *, before: Callable[[], None], after: Callable[[], None], steps: bool
    ) -> None:
        """Call `before()` ahead of each gradient that the engine adds to `parameter.grad`, and `after()` behind it.

        `before` is also called for gradients that `torch.autograd.grad` returns.

        Args:
            steps: whether `after` writes to parameters, as an optimizer does.
        """

        def pre_hook(_: Tensor) -> None:
            before()

        self._handles.append(parameter.register_hook(pre_hook))
        self._handles.append(parameter.register_post_accumulate_grad_hook(_AfterAccumulation(after, steps)))

    def before_step(self, optimizer: torch.optim.Optimizer, hook: Callable[[], None]) -> None:
        """Call `hook()` ahead of each step of an optimizer."""

        def pre_hook(*_: Any) -> None:
            hook()

        self._handles.append(optimizer.register_step_pre_hook(pre_hook))

    def before_any_step(self, hook: Callable[[torch.optim.Optimizer], None]) -> None:
        """Call `hook(optimizer)` ahead of each step of each optimizer."""

        def pre_hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            hook(optimizer)

        self._handles.append(register_optimizer_step_pre_hook(pre_hook))

    def around_all_forwards(self, *, before: Callable[..., None], after: Callable[..., None]) -> None:
        """Call `before(module, args)` ahead of every module's forward, `after(module, args, output)` behind it, in all
        threads."""
        self._handles.append(nn.modules.module.register_module_forward_pre_hook(before))
        self._handles.append(nn.modules.module.register_module_forward_hook(after, always_call=True))

    def remove(self) -> None:
        """Remove every hook, the last one first. Calling it again does nothing."""
        while self._handles:
            self._handles[-1].remove()  # which an interrupt leaves here, so that it is removed again
            self._handles.pop()


class _AfterAccumulation:
    """Called when a gradient was accumulated."""

    __slots__ = ("_hook", "steps")

    def __init__(self, hook: Callable[[], None], steps: bool) -> None:
        self._hook = hook
        self.steps = steps

    def __call__(self, _: Tensor) -> None:
        self._hook()


def may_step_in_backward(parameter: Tensor) -> bool:
    """Tell whether a hook runs when the parameter's gradient is accumulated that may write to parameters."""
    hooks: dict[int, object] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return any(not isinstance(hook, _AfterAccumulation) or hook.steps for hook in hooks.values())


@runtime_checkable
class Ends(Protocol):
    """Whose hooks are on while somebody is in a context."""

    def end(self, *, has_failed: bool) -> None:
        """Take them off, if they are not yet."""


HookPair = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""What packs a tensor that autograd saves, and what unpacks it."""


class SavedTensorHooks(AbstractContextManager[Any]):
    """A context in which autograd hands each tensor that it saves to `pack`, and gets it back from `unpack`.

    Only the innermost pair of such hooks runs. With `compiled`, code that `torch.compile` made may run inside: it calls the
    hooks too, and Dynamo would try to compile them. Source: `torch.autograd.graph.saved_tensors_hooks`.
    """

    def __init__(
        self,
        pack: Callable[[Tensor], Any],
        unpack: Callable[[Any], Tensor],
        *,
        owner: object = None,
        name: str = "",
        compiled: bool = False,
        is_last: bool = False,
        hands_on: bool = False,
        block: Block | None = None,
    ) -> None:
        if compiled:
            pack, unpack = torch.compiler.disable(pack), torch.compiler.disable(unpack)
        self.pack = pack
        self.unpack = unpack
        self.owner = owner
        """Which of memkit's contexts these are the hooks of."""
        self.name = name
        """What its user calls that context; empty if he did not enter it himself."""
        self.is_last = is_last
        """Whether no other may be inside, which would hide tensors from these. What they keep they offer to those outside."""
        self.hands_on = hands_on
        """Whether these only keep what nobody else may see, and hand on all the rest."""
        self.outer: HookPair | None = None
        """The pair that was on top before: these may hand on to it what they do not want."""
        self.block = block
        """Whether somebody is in the context, if that is known. Else `end_left` takes the hooks off, and has the owner end."""
        self._was_taken_off: list[bool] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def __enter__(self) -> SavedTensorHooks:
        end_left()
        self.outer, self._was_taken_off = innermost_pair(), []
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
        """Take the hooks off. Calling it again does nothing, or what an interrupt has kept from being done."""
        if self not in _stacked.hooks:
            return
        above = []
        while (pair := innermost_pair()) is not None and pair[0] is not self.pack:
            above.append(pair)
            torch._C._autograd._pop_saved_tensors_default_hooks()
        if pair is not None:
            _take_off(self._was_taken_off)  # above it are those that were set after an interrupt has left it there
        elif not self._was_taken_off:
            del above[:1]  # after an interrupt somebody else's exit has taken it off, and left this one instead
        if above and not self.hands_on:
            above = [pair for pair in above if not _is_of_left(pair)]
        for pair in reversed(above):
            torch._C._autograd._push_saved_tensors_default_hooks(*pair)
        _stacked.hooks.remove(self)  # last: until then, who interrupts this leaves it to `end_left`


def _take_off(was_taken_off: list[bool]) -> None:
    """Take off the innermost hooks and note that: no interrupt comes between the two."""
    _do_at_once(partial(torch._C._autograd._pop_saved_tensors_default_hooks), partial(was_taken_off.append, True))


def _do_at_once(*steps: partial[Any]) -> None:
    """Call functions that are written in C, in one call of C: an interrupt comes before all of them, or after."""
    deque(map(partial.__call__, steps), maxlen=0)


def end_left() -> None:
    """End the contexts that nobody in this thread is in any more, and that have not heard of it because of an interrupt."""
    for hooks in _stacked.hooks[::-1]:
        if hooks.block is not None and hooks.block() is None:
            if isinstance(hooks.owner, Ends):
                hooks.owner.end(has_failed=True)
            hooks.__exit__()


def _is_of_left(pair: HookPair) -> bool:
    """Tell whether hooks that are on top of those of a context, when that is left, are of a layer that an interrupt has left
    before: they would hand on to the context what others save from now on."""
    return any(hooks.hands_on and hooks.pack is pair[0] for hooks in _stacked.hooks)


_PLAIN_TYPES = (Tensor, nn.Parameter)


class KeptHandle:
    """A saved tensor that stays as it is.

    Saved-tensor hooks switch off autograd's check that nobody wrote to a saved tensor; this does it again. The alias shares
    the version counter of the tensor, so it counts writes through any view. It is not the tensor itself, which may hold the
    graph.
    """

    __slots__ = ("__weakref__", "alias", "version")

    def __init__(self, tensor: Tensor) -> None:
        if type(tensor) in _PLAIN_TYPES:
            self.alias, self.version = tensor.detach(), tensor._version
        else:  # torch gives back no class that only has functions of its own, and it may refuse these
            with torch._C.DisableTorchFunctionSubclass():
                self.alias, self.version = tensor.detach(), tensor._version

    def unpack(self) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: it was written to since it was saved.
        """
        self.check_version()
        return self.alias

    def is_unchanged(self) -> bool:
        """Tell whether nobody has written to the tensor since it was saved."""
        return self.version_now == self.version

    def check_version(self) -> None:
        """Raise autograd's own error if the tensor was written to since it was saved."""
        if not self.is_unchanged():
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self._description()}] is at version {self.version_now}; expected version "
                f"{self.version} instead. Hint: the backtrace of the operation that failed to compute its gradient is shown "
                "by torch.autograd.set_detect_anomaly(True)."
            )

    def _description(self) -> str:
        try:
            return f"{self.alias.type()} {list(self.size)}"
        except RuntimeError:  # not every layout has these
            return f"{'nested ' * self.alias.is_nested}{self.alias.dtype}, {self.alias.layout}"

    @property
    def size(self) -> torch.Size:
        return self.alias.size()

    @property
    def version_now(self) -> int:
        """What `version` would be if it were saved now."""
        return self.alias._version


@functools.cache
def nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor without elements: an alias that holds no bytes shares its empty storage."""
    with _disable_current_modes():  # one of them might make it a tensor of its own kind, for good
        return torch.empty(0, dtype=dtype, device=device)


class _Stacked(threading.local):
    """The saved-tensor hooks that memkit's contexts have set in a thread, the innermost last."""

    def __init__(self) -> None:
        self.hooks: list[SavedTensorHooks] = []
        self.is_profiled = False


_stacked = _Stacked()


def stacked_owners() -> list[object]:
    """Return which of memkit's contexts this thread is in, the innermost last."""
    return [hooks.owner for hooks in _stacked.hooks]


def name_of_hooks_around() -> str:
    """Return what to call the saved-tensor hooks that the caller runs under; empty if there are none."""
    if in_checkpoint():
        return "torch.utils.checkpoint"
    if innermost_pair() is None:
        return ""
    names = [hooks.name for hooks in reversed(_stacked.hooks) if hooks.name]
    return names[0] if names else "a pair of saved-tensor hooks (torch.autograd.graph.saved_tensors_hooks, save_on_cpu)"


@contextmanager
def profiled() -> Iterator[None]:
    """Return a context in which this thread runs a model to see all that autograd saves: see `refuse_in_profile`."""
    before, _stacked.is_profiled = _stacked.is_profiled, True
    try:
        yield
    finally:
        _stacked.is_profiled = before


def refuse_in_profile(name: str) -> None:
    """Raise if a model is profiled that is about to enter a context which would take what the profile must see.

    Raises:
        ProfileError: it is.
    """
    if _stacked.is_profiled:
        raise ProfileError(
            f"a profile needs to see all that autograd saves; found {name}, which the model enters in its forward and which "
            "would take it. Profile the model before memkit.attach, or after its handle's remove(), and without a context in "
            "its own code"
        )


def is_in_last() -> bool:
    """Tell whether this thread is in a context of memkit inside of which there may be no other."""
    return any(hooks.is_last for hooks in _stacked.hooks)


def innermost_hooks() -> SavedTensorHooks | None:
    """Return the hooks that a tensor saved now would be given to, if a context of memkit has set them."""
    hooks = _stacked.hooks[-1] if _stacked.hooks else None
    return hooks if hooks is not None and innermost_pack() is hooks.pack else None


_MODE_FLAGS = {
    "_is_in_torch_dispatch_mode": "old_dispatch_mode_flags",
    "_is_in_non_infra_torch_dispatch_mode": "old_non_infra_dispatch_mode_flags",
    "_is_in_any_mode_without_ignore_compile_internals": "old_without_ignore_compile_internals_dispatch_mode_flags",
}
"""What torch keeps of the process as long as a dispatch mode is on, and where in a mode it notes what was there before."""


def leave_mode(mode: TorchDispatchMode) -> None:
    """Take a dispatch mode off the stack if it is on it, from below others as well, and set torch's flags back to what they
    were before it was entered. Calling it again does nothing, also where an interrupt has broken off `__enter__`.

    A mode's own `__exit__` forgets the flags first and is not to be called again after an interrupt.
    """
    stack = _get_current_dispatch_mode_stack()
    above = len(stack)
    while above and stack[above - 1] is not mode:
        above -= 1
    steps: list[partial[Any]] = []
    if above:
        steps += [partial(torch._C._pop_torch_dispatch_stack, None)] * (len(stack) - above + 1)
        steps += [partial(torch._C._push_on_torch_dispatch_stack, other) for other in stack[above:]]
    for flag, noted in _MODE_FLAGS.items():
        before: deque[Any] = getattr(mode, noted, deque())
        if before:
            steps.append(partial(setattr, _python_dispatch, flag, before[-1]))
            steps.append(partial(before.pop))
            if flag == "_is_in_any_mode_without_ignore_compile_internals":
                steps.append(partial(_set_shows_to_guards, before[-1] is True))  # else it is false, or memkit's own
    _do_at_once(*steps)


def has_own_dispatch(tensor: Tensor) -> bool:
    """Tell whether a tensor's class says itself what ops do, as those that wrap other tensors."""
    return type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def sharing_counters() -> AbstractContextManager[object]:
    """Return a context in which an alias of a tensor shares its version counter, also for a mode that handles an op: there
    autograd's layers are off, which see to that."""
    is_off = torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.ADInplaceOrView)
    return torch.overrides.enable_reentrant_dispatch() if is_off else nullcontext()


def dynamo_is_loaded() -> bool:
    """Tell whether anything may have been compiled in this process. Loading Dynamo to ask it would take seconds."""
    return "torch._dynamo" in sys.modules


def in_compiled_function() -> bool:
    """Tell whether the caller runs inside a function that was to be compiled, and runs as plain Python instead.

    That is what Dynamo does where it cannot compile, as under a dispatch mode: its callback stays set. To be asked only where
    `dynamo_is_loaded`.
    """
    callback = _eval_frame.get_eval_frame_callback()
    return callback is not None and callback is not False


def num_users(storage: torch.UntypedStorage) -> int:
    """Return how many tensors and variables hold a storage; the one that asks counts as well."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def node_number() -> int:
    """Return a number that is the same for all tensors that one graph node saves in this thread, and another for each node."""
    return int(torch._C._autograd._get_sequence_nr())


def backward_task() -> int:
    """Return autograd's number of the backward that runs in this thread, -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def in_differentiating_transform() -> bool:
    """Tell whether the caller runs inside `torch.func.grad` or `jvp`, or what is made of them; `vmap` is none.

    Source: `torch._functorch.pyfunctorch.retrieve_all_functorch_interpreters`.
    """
    stack = torch._C._functorch.get_interpreter_stack()
    kinds = torch._C._functorch.TransformType
    return stack is not None and any(level.key() in (kinds.Grad, kinds.Jvp) for level in stack)


def gradient_node(parameter: Tensor) -> Any:
    """Return the node that adds to a parameter's gradient: a new one if no graph that is alive has used it as it is now.

    Source: `torch.autograd.graph.get_gradient_edge`.
    """
    with torch.enable_grad(), _disable_current_modes():
        return torch.autograd.graph.get_gradient_edge(parameter).node


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback()` once the backward that runs in this thread is over, unless it fails.

    Source: `torch.autograd.Variable._execution_engine.queue_callback`, which DistributedDataParallel uses.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


class BackwardEnd:
    """Tells when a backward is over: see `when_backward_ends`.

    The engine, and nobody else, holds a callback: not even the frames of a traceback that somebody keeps. It is called when the
    backward has ended well. Where that fails, or the backward does, the engine drops it, which tells as much.
    """

    __slots__ = ("_held", "_hook")

    def __init__(self, hook: Callable[[bool], None]) -> None:
        self._hook: Callable[[bool], None] | None = hook
        callback = functools.partial(self._tell, False)
        self._held = weakref.ref(callback, lambda _: self._tell(True))
        after_backward(callback)

    @property
    def is_over(self) -> bool:
        """Whether the backward is over, also where an interrupt has kept the hook from hearing of it."""
        return self._hook is None or self._held() is None

    def _tell(self, has_failed: bool) -> None:
        hook = self._hook
        if hook is not None:
            hook(has_failed)
            self._hook = None  # last, so that the hook hears of it if it was interrupted itself


def when_backward_ends(hook: Callable[[bool], None]) -> BackwardEnd:
    """Call `hook(has_failed)` once the backward that runs in this thread is over, however that is.

    Where `hook(False)` raises, the backward fails by that, and `hook(True)` is called as well, which ends what that has begun.
    """
    return BackwardEnd(hook)


_IS_OUTPUT = "memkit.output"


def before_backward_of(outputs: object, hook: Callable[[], None]) -> None:
    """Call `hook()` each time the autograd engine has a gradient of one of the tensors in `outputs`, a tensor or tensors in
    tuples, lists, dictionaries and whatever else `torch.utils._pytree` knows. The graph keeps the hook.

    What has come through from an earlier call, and was among its outputs, is left to that one.
    """

    def pre_hook(_: tuple[Tensor, ...]) -> None:
        hook()

    tensors = (outputs,) if isinstance(outputs, Tensor) else tree_leaves(outputs)
    nodes = (tensor.grad_fn for tensor in tensors if isinstance(tensor, Tensor))
    for node in dict.fromkeys(node for node in nodes if node is not None):
        metadata: Any = node.metadata  # torch says that it is a method
        if _IS_OUTPUT not in metadata:
            metadata[_IS_OUTPUT] = True
            node.register_prehook(pre_hook)


def innermost_pair() -> HookPair | None:
    """Return the hooks that a tensor saved now would be given to, and had back from; None if there are none."""
    pair: HookPair | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return pair


def innermost_pack() -> Callable[[Tensor], object] | None:
    """Return the pack hook that a tensor saved now would be given to, or None if there is none."""
    pair = innermost_pair()
    return None if pair is None else pair[0]


def _packs_on_top() -> Iterator[tuple[Callable[[Tensor], object], SavedTensorHooks | None]]:
    """Yield the innermost pack hook with the hooks of memkit's that it is of, and as long as it is of any, the next one outside
    of it."""
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
    """Return the pack hook that a tensor saved now comes to in the end, unless it is of a streamed weight; None if there is
    none."""
    return next((pack for pack, hooks in _packs_on_top() if hooks is None or not hooks.hands_on), None)


def in_checkpoint() -> bool:
    """Tell whether the caller runs inside a function that `torch.utils.checkpoint` is checkpointing.

    The non-reentrant kind shows by its saved-tensor hooks, the reentrant kind (which only turns grad mode off) by its frame on
    the Python stack.
    """
    if any(getattr(pack, "__module__", "") == torch.utils.checkpoint.__name__ for pack, _ in _packs_on_top()):
        return True
    if torch.is_grad_enabled():
        return False
    frame: FrameType | None = sys._getframe(1)
    reentrant = torch.utils.checkpoint.CheckpointFunction.forward.__code__
    while frame is not None:
        if frame.f_code is reentrant:
            return True
        frame = frame.f_back
    return False
