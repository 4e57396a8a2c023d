"""Hooks around the forwards of a model whose layers stream, of these layers, and of modules in them."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from operator import setitem
from typing import Any, NoReturn

import torch
from torch import nn

from memkit.core import backwards, torch_private
from memkit.core.calls import Call, Calls, Claims, Ending
from memkit.core.features import NotCopied
from memkit.core.hooks import HookSet
from memkit.core.owners import aside
from memkit.core.torch_state import in_differentiating_transform
from memkit.errors import LayerOffloadError
from memkit.plan.chunks import Residency
from memkit.weights.chunks import LayerChunk, adopt
from memkit.weights.gradients import Accumulation
from memkit.weights.selection import StepTiming, refuse_replicated
from memkit.weights.streaming import Streamer, WeightHooks


class InnerHooks(HookSet):
    """Hooks around forwards of modules that seldom run by themselves, taken off and put back in one C call each."""

    def __init__(self) -> None:
        super().__init__()
        self._dicts: list[OrderedDict[int, Any]] = []  # for each module those ahead of its forward, and those behind it
        self._numbers: list[int] = []
        self._aside: list[Any] = []  # the hooks set aside, in the same order; None for a missing one

    def around_inner(self, module: nn.Module, *, before: Callable[..., None], after: Callable[..., None]) -> None:
        self.around_forward(module, before=before, after=after)
        handles: list[Any] = self._handles[-2:]
        for handle in handles:
            self._dicts.append(handle.hooks_dict_ref())
            self._numbers.append(handle.id)

    def set_aside(self) -> None:
        """Leave the hooks out of calls until `put_back`: Dynamo then neither breaks a graph because of one nor guards it."""
        taken = map(OrderedDict.pop, self._dicts, self._numbers, repeat(None))
        if not self._aside:  # in one call of C, so that an interrupt loses none
            self._aside[:] = taken
        else:
            deque(taken, maxlen=0)

    def put_back(self) -> None:
        if not self._aside:
            return
        if None not in self._aside:
            deque(map(setitem, self._dicts, self._numbers, self._aside), maxlen=0)
        else:  # the caller has removed some
            for hooks, number, hook in zip(self._dicts, self._numbers, self._aside, strict=True):
                if hook is not None:
                    hooks[number] = hook
        if max(map(len, self._dicts)) > 1:
            for hooks, number in zip(self._dicts[::2], self._numbers[::2], strict=True):
                if number in hooks:
                    hooks.move_to_end(number, last=False)
        self._aside.clear()

    def remove(self) -> None:
        self._aside.clear()
        super().remove()
        self._dicts, self._numbers = [], []


class Forwards(NotCopied):
    """Has the parameters of each layer lie in a slot while it runs. `before_pass` is called ahead of an outermost forward."""

    def __init__(self, model: nn.Module, before_pass: Callable[[], None], note_adopted: Callable[..., None]) -> None:
        self._model, self._before_pass, self._note_adopted = model, before_pass, note_adopted
        self._calls, self._claims, self._recomputing = Calls(), Claims(), Claims()
        self._outer_hooks, self._hooks, self._timing_hooks = HookSet(), HookSet(), HookSet()
        self._timing: StepTiming | None = None
        self._streamer: Streamer
        self._saved_hooks: WeightHooks
        self._gradients: Accumulation | None = None

    def watch(self, streamer: Streamer, gradients: Accumulation | None) -> None:
        self._hooks.remove()
        self._streamer, self._gradients = streamer, gradients
        if gradients is not None:
            gradients.watch_recomputes(self._model)
        chunks = streamer.chunks
        if not len(self._outer_hooks):  # they stay: one of these modules may be running
            within = {id(inner) for chunk in chunks for inner in chunk.module.modules()}
            for module in self._model.modules():
                is_outer = id(module) not in within and any(id(inner) in within for inner in module.modules())
                if is_outer and not isinstance(module, nn.ModuleList | nn.ModuleDict):
                    self._outer_hooks.around_forward(module, before=self._before_outer, after=self._after_outer)
        self._saved_hooks = WeightHooks(streamer)
        for chunk in chunks:
            layer = _LayerForwards(chunk, InnerHooks())
            before, after = partial(self._enter, layer), partial(self._after_layer, layer)
            self._hooks.around_forward(chunk.module, before=before, after=after)
            holding = {id(module) for item in chunk.parameters for module, _ in item.places}
            self._hooks.add(layer.inner_hooks)
            for module in chunk.module.modules():
                if module is not chunk.module and any(id(inner) in holding for inner in module.modules()):
                    layer.inner_hooks.around_inner(module, before=partial(self._before_inner, layer), after=self._after_inner)

    def time_with(self, timing: StepTiming | None, resident: dict[str, nn.Module]) -> None:
        self._timing_hooks.remove()
        self._timing = timing
        if timing is not None:
            for name, module in resident.items():
                begin = partial(timing.begin_layer, name)
                before, after = partial(_time_forward, begin), partial(_time_backward, begin)
                self._timing_hooks.around_forward(module, before=before, after=after)

    def close(self) -> None:
        self.end_interrupted()
        if len(self._calls) or torch_private.backward_task() != -1:
            which = "forward of the model" if len(self._calls) else "backward"
            raise LayerOffloadError(f"offload.close() was called within a {which}. Call it when that is over")
        for hooks in (self._outer_hooks, self._hooks, self._timing_hooks):
            hooks.remove()
        # The object whose these are holds this one: neither is left to the garbage collector.
        self._before_pass, self._note_adopted = lambda: None, lambda _: None

    def end_interrupted(self) -> None:
        self._calls.end_interrupted()
        self._recomputing.end_left()

    def _before_outer(self, module: nn.Module, _: Any) -> None:
        if not aside.is_set:
            self._calls.begin(module, depth=2)
            if torch_private.backward_task() != -1:
                self._calls.claim(self._recomputing)
            elif not self._calls.claim(self._claims):
                self._refuse_thread("forward")
            self._refuse_transforms()
            if self._streamer.chunks and self._streamer.device.is_capturing():
                self._refuse_capture(None)
            self._begin_pass(None)

    def _refuse_thread(self, which: str) -> NoReturn:
        raise LayerOffloadError(
            f"a forward of {type(self._model).__name__} began in one thread while a {which} in another was going on: the "
            "layers stream through slots that they share. Have one thread at a time run the model (a lock), or give each a "
            "model of its own"
        )

    def _refuse_capture(self, first: LayerChunk | None) -> NoReturn:
        name = type(self._model).__name__ if first is None else f'"{first.name}"'
        raise LayerOffloadError(
            f"a forward of {name} is being captured into a CUDA graph, and has weights that stream: a replay would read "
            "whatever the slots hold then. Capture layers that stay on the device, or none"
        )

    def _begin_pass(self, first: LayerChunk | None) -> None:
        if len(self._calls) > 1 or torch_private.backward_task() != -1:
            return
        if self._streamer.backwards and not backwards.join(self._streamer.backwards):  # else one has failed
            self._refuse_thread("backward")
        if self._recomputing.calls:
            self._recomputing.end_left()
        if self._gradients is not None:
            refuse_replicated(self._streamer.chunks)
            self._gradients.reset_interrupted()
        if not self._streamer.is_continued_by(first):
            if first is None:  # modules on the device may run first, and fail by the dtype that all were cast to
                for chunk in self._streamer.chunks:
                    if not chunk.uses and chunk.binding.may_be_cast():
                        self._adopt(chunk)
            self._before_pass()
            self._streamer.begin_pass()

    def _adopt(self, chunk: LayerChunk) -> None:
        for adopted in adopt(chunk):
            self._note_adopted(adopted)

    def _refuse_transforms(self) -> None:
        if self._streamer.chunks and in_differentiating_transform():
            raise LayerOffloadError(
                f"a forward of {type(self._model).__name__} runs within torch.func.grad, vjp, jvp or what is made of them "
                "(jacrev, jacfwd, hessian), and has weights that stream. Use backward() or torch.autograd.grad; "
                "torch.func.vmap works"
            )

    def _after_outer(self, module: nn.Module, *_: Any) -> None:
        self._calls.end(module, depth=2)
        if self._timing is not None and not len(self._calls):
            self._timing.end_layer()

    def _enter(self, layer: _LayerForwards, module: nn.Module, _: Any, depth: int = 2) -> None:
        """Begin a forward that uses the weights of a layer; its frame is `depth` above this one."""
        if aside.is_set:
            return
        chunk, gradients, streamer = layer.chunk, self._gradients, self._streamer
        is_backward = torch_private.backward_task() != -1
        call = self._calls.begin(module, depth=depth)
        if is_backward and self._recomputing.calls is not self._calls.under_way:
            self._calls.claim(self._recomputing)  # of the engine's threads, those of one device, one is at layers at a time
        elif call.is_outermost and not is_backward:
            if not self._calls.claim(self._claims):
                self._refuse_thread("forward")
            if self._recomputing.calls:  # first: a layer that is in use is not looked at for changes
                self._recomputing.end_left()
        if torch_private.functorch_stack() is not None:
            self._refuse_transforms()
        is_unchanged = not chunk.uses and chunk.binding.check_unchanged()
        if not is_unchanged and not chunk.uses:
            self._adopt(chunk)
        if streamer.device.is_capturing():
            self._refuse_capture(chunk)
        if call.is_outermost and not is_backward:
            self._begin_pass(chunk)
            streamer = self._streamer
        if not chunk.is_on_host:
            self._calls.cancel(call)  # it has come to stay on the device just now
            return
        if gradients is not None:
            gradients.watch(chunk)
            if is_backward:
                gradients.note_recompute()
        elif not (is_unchanged and chunk.binding.is_frozen) and any(chunk.binding.requires_grad()):
            raise LayerOffloadError(
                f'parameters of "{chunk.name}" require grad, which stream as frozen ones. Use train="host", or set this '
                "before LayerOffload is made: what requires grad then stays on the device"
            )
        if self._timing is not None:
            self._timing.begin_layer(chunk.name)
        slot = streamer.use(chunk)
        if self._timing is not None:
            self._timing.note_ready()
        state = slot.state if chunk.residency is not Residency.DIRTY else chunk.state()  # the slot has it as it is now
        call.end = partial(self._end_layer, layer, call, state)
        if module is chunk.module:  # they would do nothing now, and break compiled code in the layer
            layer.inner_hooks.set_aside()
        slot.lend(chunk, use=call)
        if torch.is_grad_enabled():
            outer, hooks = torch_private.top_saved_tensor_hooks(True), self._saved_hooks
            if outer is not None:
                # A checkpoint inside of the layer has its own hooks on top: it must be given as much the second time.
                is_part = is_backward and module is not chunk.module
                hooks = WeightHooks(streamer, outer, hands_on_weights=is_part)
            call.end_here = hooks.__exit__
            hooks.__enter__()

    def _after_layer(self, layer: _LayerForwards, module: nn.Module, _: Any, output: Any) -> None:
        try:
            if not aside.is_set:
                call = None if self._gradients is None else self._gradients.note_call(layer.chunk)
                layer.is_followed = backwards.before(output, partial(self._begin_backward, layer.chunk, call))
        finally:
            self._calls.end(module, depth=2)

    def _begin_backward(self, chunk: LayerChunk, _: object, __: object) -> None:
        if self._timing is not None:
            self._timing.begin_layer(chunk.name)
        if chunk.is_on_host and not chunk.uses and not chunk.binding.check_unchanged(in_modules=False):
            adopt(chunk, may_replace=False)
        if self._gradients is not None:
            self._gradients.begin_backward(chunk)
        self._streamer.begin_backward(chunk)
        if self._timing is not None:
            self._timing.note_ready()

    def _before_inner(self, layer: _LayerForwards, module: nn.Module, given: Any) -> None:
        """A checkpoint in the layer's forward, or the user, calls a module in a layer."""
        if not self._streamer.is_in_forward(layer.chunk):
            self._enter(layer, module, given, depth=3)

    def _after_inner(self, module: nn.Module, *_: Any) -> None:
        if self._calls.is_last(module):
            self._calls.end(module, depth=2)

    def _end_layer(self, layer: _LayerForwards, call: Call, state: object, ending: Ending) -> None:
        layer.inner_hooks.put_back()
        chunk = layer.chunk
        if self._gradients is not None and ending is Ending.RETURNED and torch.is_grad_enabled():
            self._gradients.note_forward(chunk, is_followed=layer.is_followed and call.module is chunk.module)
        if self._timing is not None and ending is not Ending.RETURNED and torch_private.backward_task() == -1:
            self._timing.fail()
        if ending is Ending.LEFT and chunk.uses <= {call}:  # since then the caller may have written to the slot
            chunk.write_back()
            self._streamer.invalidate()
        self._streamer.leave(chunk, use=call)
        if not chunk.uses and ending is not Ending.LEFT and (chunk.num_changes, *chunk.binding.versions()) != state:
            self._streamer.invalidate()
            if ending is Ending.RAISED:
                return
            raise LayerOffloadError(
                f'the forward of "{chunk.name}" has written to its own weights, which stream: that is lost. Have this layer '
                "stay on the device: name the others by layers="
            )


@dataclass(slots=True, eq=False)
class _LayerForwards:
    chunk: LayerChunk
    inner_hooks: InnerHooks
    is_followed: bool = False  # whether the last call's output has a graph, so that its backward is seen


def _time_forward(begin: Callable[[], None], *_: Any) -> None:
    if not aside.is_set:
        begin()


def _time_backward(begin: Callable[[], None], _: nn.Module, __: Any, output: Any) -> None:
    if not aside.is_set:
        backwards.before(output, lambda _: begin())
