"""Optimizer steps within the backward (`train="fused"`): each parameter once with its whole gradient, or not at all."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from memkit.core import torch_private
from memkit.core.features import NotCopied
from memkit.core.hooks import HookSet
from memkit.core.owners import GradientStandIn
from memkit.core.torch_state import label
from memkit.device.base import Device, Event
from memkit.errors import LayerOffloadError
from memkit.optimizers import kept_states
from memkit.optimizers.shells import needs_closure
from memkit.optimizers.steppers import ParameterSteps, steppers
from memkit.weights.chunks import LayerChunk, StreamedParameter, without_modes
from memkit.weights.gradients import TOKEN, Accumulation, accumulating_node, are_modes_on, refuse_graph, sum_of
from memkit.weights.slots import Slot
from memkit.weights.streaming import Streamer

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
_MISSING = object()
_ADVICE = 'With train="fused" each backward is a step. To accumulate gradients, or to clip their global norm, use train="host"'


class SteppedGradient(GradientStandIn):
    error = LayerOffloadError
    advice = 'With train="fused" gradients cannot be clipped by their global norm, scaled or read. Use train="host"'


def _entries_of(group: dict[str, Any]) -> dict[str, tuple[Any, int]]:
    return {name: (value, _version(value)) for name, value in group.items() if name != "params"}


def _version(value: object) -> int:
    return torch_private.version_of(value) if isinstance(value, Tensor) and not value.is_inference() else 0


def state_bytes_of(make: MakeOptimizer, trained: Sequence[Tensor]) -> int:
    if not trained:
        return 0
    twins = [nn.Parameter(torch.empty_like(parameter, device="meta")) for parameter in trained]
    tried = "LayerOffload: optimizer= was called with parameters on the meta device, to see how much state it keeps"
    try:
        optimizer = make(twins)
        held = {id(item) for group in optimizer.param_groups for item in group["params"]}
    except Exception as error:
        raise ValueError(f"{tried}. This failed: {type(error).__name__}: {error}") from error
    if held != set(map(id, twins)):
        raise ValueError(f"{tried}. It makes an optimizer of the parameters that it is given; what it returned holds others")
    if needs_closure(optimizer):
        raise ValueError(f"{tried}. {type(optimizer).__name__} needs a closure. Use one whose step works without one")
    try:
        kept = kept_states(optimizer).of
    except Exception as error:
        raise ValueError(f"{tried}, and its step failed: {type(error).__name__}: {error}") from error
    return sum(state.num_bytes for states in kept.values() for state in states if state.is_there)


def bring_state(parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Bring an optimizer's states of some parameters to these, as `torch.optim.Optimizer.load_state_dict` does."""
    wanted = set(map(id, parameters))
    for group in optimizer.param_groups:
        for parameter in (item for item in group["params"] if id(item) in wanted):
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                is_moved = isinstance(value, Tensor) and value.device != parameter.device
                if is_moved and (name != "step" or group.get("fused") or group.get("capturable")):
                    state[name] = value.to(parameter.device)


class _Token:
    task = -1

    def __call__(self, _: Any) -> None:
        self.task = torch_private.backward_task()


class _Sum:
    def __init__(self, parameter: Tensor) -> None:
        self.parameter = parameter
        self.hooks = HookSet()
        self.is_watched = False
        self.due = -1  # the backward that is about to put a gradient to `grad`, or has done so; -1 once it is taken
        self.tokens = weakref.WeakSet[_Token]()
        self.parts: dict[int, Tensor] = {}

    def is_complete(self, task: int) -> bool:
        for token in self.tokens:  # noqa: SIM110  # a generator would be one more frame, for each gradient
            if token.task != task:
                return False
        return True


class FusedSteps(NotCopied, Accumulation):
    """Steps parameters inside of the backward, streamed or not, by the optimizer that `make` returns for all of them."""

    def __init__(self, device: Device, streamer: Streamer, make: MakeOptimizer, trained: Sequence[nn.Parameter]) -> None:
        super().__init__(device)
        self._sums: dict[StreamedParameter, _Sum] = {}
        self._hooks = HookSet()
        self.optimizer = make(trained)
        steppers[self.optimizer] = weakref.ref(self)
        self._beside: ParameterSteps | None = None
        self._names: dict[int, str] = {}
        self.device = device
        self.streamer = streamer
        self._layers = {item: chunk for chunk in streamer.chunks for item in chunk.parameters}
        self._waiting: dict[LayerChunk, set[StreamedParameter]] = {}  # layers with stepped parameters, and those to be stepped
        self._written: list[Event] = []  # behind the copies to host copies of the backward that runs
        self._consumed: list[nn.Parameter] = []
        self._stand_ins: dict[tuple[torch.Size, torch.dtype, torch.device], SteppedGradient] = {}
        self._stepped: dict[int, nn.Parameter] = {}
        self._whole = set[int]()  # the backwards that have stepped something since the user's own step, and have not failed
        self._due: dict[int, nn.Parameter] = {}  # whose `grad` holds, or soon will, their step's gradient, by id
        self._outermost = 0
        self._group_of: dict[int, int] = {}
        self._alone: dict[int, nn.Parameter] = {}
        self._frozen: list[nn.Parameter] = []  # parameters of the groups that do not stream, and do not require grad yet
        self._groups: list[dict[str, Any]] | None = None

    def begin(self, chunks: Sequence[LayerChunk]) -> None:
        super().begin(chunks)
        self._watch_groups()
        self._hooks.add(self.optimizer.register_step_pre_hook(self._before_users_step))
        self._hooks.add(self.optimizer.register_state_dict_pre_hook(self._before_state_dict))

    def watch(self, chunk: LayerChunk) -> None:
        for streamed in chunk.binding.parameters:
            parameter, known = streamed.parameter, self._sums.get(streamed)
            if parameter.requires_grad and (known is None or known.parameter is not parameter or not known.is_watched):
                if known is not None:
                    known.hooks.remove()
                made = self._sums[streamed] = _Sum(parameter)
                before, after = partial(self._before, streamed), partial(self._after, streamed)
                made.hooks.around_accumulation(parameter, before=before, after=after)
                made.is_watched = True
        self._watch_groups()

    def unwatch(self, chunk: LayerChunk) -> None:
        self._forget(chunk.parameters)
        for streamed in chunk.parameters:
            self._layers.pop(streamed, None)
        self._watch_groups()

    def _forget(self, parameters: Iterable[StreamedParameter]) -> None:
        for streamed in parameters:
            known = self._sums.get(streamed)
            if known is not None:
                known.hooks.remove()
                del self._sums[streamed]

    def note_forward(self, chunk: LayerChunk, *, is_followed: bool) -> None:
        has_modes = are_modes_on()
        for streamed in chunk.binding.parameters:
            known, parameter = self._sums.get(streamed), streamed.parameter
            if known is None or not parameter.requires_grad:
                continue
            node = accumulating_node(parameter, has_modes=has_modes)
            if TOKEN not in node.metadata:
                token = _Token()
                known.tokens.add(token)
                node.register_prehook(token)
                node.metadata[TOKEN] = token

    def _watch_groups(self, *, are_same: bool = False) -> None:
        """Step parameters that were added to the groups or now require grad. With `are_same`, only their number is compared."""
        groups = self.optimizer.param_groups
        if not are_same or sum(len(group["params"]) for group in groups) != len(self._group_of):
            self._group_of = {id(parameter): number for number, group in enumerate(groups) for parameter in group["params"]}
            known = {*self._alone, *(id(item.parameter) for item in self._layers)}
            self._frozen = [item for group in groups for item in group["params"] if id(item) not in known]
        for parameter in self._frozen:
            if parameter.requires_grad:
                self._step_by_itself(parameter)
        self._frozen = [parameter for parameter in self._frozen if not parameter.requires_grad]

    def close(self) -> list[tuple[torch.UntypedStorage, torch.UntypedStorage]]:
        self._hooks.remove()
        steppers.pop(self.optimizer, None)
        beside, self._beside = self._beside, None
        if beside is not None:
            beside.leave()
        self._regroup()
        self._forget_consumed()
        self._forget([*self._sums])
        return []

    # As `memkit.optimizers.steppers.LayerStepper`, for a `StateOffload` that steps in the optimizer's place

    def have_stepped_by(self, steps: ParameterSteps | None) -> None:
        self._beside = steps

    def streamed(self) -> list[nn.Parameter]:
        return [streamed.parameter for streamed in self._layers]

    def in_place(self, parameter: Tensor) -> AbstractContextManager[None]:
        for streamed, chunk in self._layers.items():
            if streamed.parameter is parameter and chunk.slot is not None and chunk.slot.is_dirty:
                return self._lying(streamed, chunk, chunk.slot)
        return nullcontext()

    @contextmanager
    def _lying(self, streamed: StreamedParameter, chunk: LayerChunk, slot: Slot) -> Iterator[None]:
        with without_modes():
            streamed.bind(slot.storage)
        try:
            yield
        finally:
            if not chunk.uses:
                with without_modes():
                    streamed.unbind()

    def _step_by_itself(self, parameter: nn.Parameter) -> None:
        self._alone[id(parameter)] = parameter

        def before(_: Tensor) -> None:
            self._enter_backward()
            _refuse(parameter.grad, "a parameter")
            self._due[id(parameter)] = parameter

        def after(_: Tensor) -> None:
            if parameter.grad is None:  # an interrupt has had these hooks be set twice
                return
            try:
                self._step(parameter)
            finally:
                self._consume(parameter)

        self._hooks.around_accumulation(parameter, before=before, after=after)

    def _before_users_step(self, *_: Any) -> None:
        """Raise after two backwards, which would have been meant as one step; the user's own `step()` does nothing."""
        if self._groups is None:
            self._forget_consumed()
            num_backwards = len(self._whole)
            self._whole.clear()
            if num_backwards > 1:
                raise LayerOffloadError(f"optimizer.step() was called after {num_backwards} backwards. {_ADVICE}")

    def _before_state_dict(self, *_: Any) -> None:
        """End backwards that two interrupts in a row left open, so that weights and states are of one step."""
        if self._tasks and torch_private.backward_task() == -1:
            self.reset_interrupted()

    def watch_recomputes(self, model: nn.Module) -> None:
        if self._names:
            return
        self._outermost = id(model)
        self._hooks.add(model.register_state_dict_pre_hook(self._before_state_dict))
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        for module in model.modules():
            if any(parameter.requires_grad for parameter in module.parameters()):
                self._hooks.after_forward(module, self._after_forward)

    def _after_forward(self, module: nn.Module, *_: Any) -> None:
        """Follow a module's forward. Dynamo, which compiles this as well, is told that there is nothing to do."""
        if torch.compiler.is_compiling():
            return
        self._watch_groups(are_same=id(module) != self._outermost)
        if torch_private.backward_task() != -1:
            self._enter_backward()

    def note_recompute(self) -> None:
        self._enter_backward()

    def _before(self, streamed: StreamedParameter, made: Tensor | None) -> None:
        if made is not None and self._is_on_host(made):
            self._refuse_host(streamed)
        task = torch_private.backward_task()
        if task == self._refused_task:
            self._refuse_more()
        if task not in self._tasks:
            self._enter_backward()
        grad = streamed.parameter.grad
        if grad is not None:
            streamed.parameter.grad = None
            _refuse(grad, f'"{streamed.name}"')
        self._sums[streamed].due = task

    def _after(self, streamed: StreamedParameter, _: Tensor) -> None:
        task, known, made = torch_private.backward_task(), self._sums[streamed], streamed.parameter.grad
        streamed.parameter.grad = None
        known.due = -1
        if made is None:
            return
        if made.requires_grad:
            refuse_graph(streamed)
        part = known.parts.get(task)
        known.parts[task] = made if part is None else sum_of(part, made)
        if known.is_complete(task):
            self._take(streamed, known.parts.pop(task))

    def _forget_parts(self, task: int) -> None:
        for streamed, known in self._sums.items():
            known.parts.pop(task, None)
            if known.due == task:
                streamed.parameter.grad, known.due = None, -1

    def _take_left(self, task: int) -> None:
        for streamed, known in self._sums.items():
            part = known.parts.pop(task, None)
            if part is not None:
                self._take(streamed, part)

    def _take(self, streamed: StreamedParameter, made: Tensor) -> None:
        chunk, parameter = self._layers[streamed], streamed.parameter
        with self.streamer.lock:
            slot, beside = self.streamer.use(chunk), self._beside
            slot.claim(self.device.current_stream() if beside is None else beside.stream)
            with self._lying(streamed, chunk, slot):
                self._due[id(parameter)] = parameter
                parameter.grad = made
                try:
                    stepped = self._step(parameter)
                finally:
                    self._consume(parameter)
            slot.note_written(chunk, stepped)
        waiting = self._waiting.setdefault(chunk, {item for item in chunk.parameters if item.parameter.requires_grad})
        waiting.discard(streamed)
        if not waiting:
            self._write_back(chunk)

    def _consume(self, parameter: nn.Parameter) -> None:
        parameter.grad = None
        self._due.pop(id(parameter), None)

    def _write_back(self, chunk: LayerChunk) -> None:
        beside = self._beside
        with label(f"write back ({chunk.name})"):
            if beside is not None:  # behind the steps, and reads of the slot so far: the backward goes on
                self.device.wait_event(beside.stream, self.device.record_event(timed=False))
            with nullcontext() if beside is None else self.device.on_stream(beside.stream):
                self._written.append(self.streamer.write_back(chunk))
        del self._waiting[chunk]
        self.d2h_bytes += chunk.num_bytes

    def _enter_backward(self) -> None:
        if not self._tasks:
            self._forget_consumed()
        super()._enter_backward()

    def _say_consumed(self) -> None:
        """Set `grad` to a stand-in that raises when used: clipping would take None for no gradient."""
        self.streamer.rest()
        for parameter in self._stepped.values():
            if type(parameter) is nn.Parameter and parameter.grad is None:
                kind = parameter.size(), parameter.dtype, parameter.device
                stand_in = self._stand_ins.get(kind)
                if stand_in is None:
                    stand_in = self._stand_ins[kind] = SteppedGradient(*kind)
                self._consumed.append(parameter)
                parameter.grad = stand_in

    def _forget_consumed(self) -> None:
        for parameter in self._consumed:
            if type(parameter.grad) is SteppedGradient:
                parameter.grad = None
        self._consumed.clear()

    def _write_back_waiting(self) -> None:
        for chunk in list(self._waiting):
            self._write_back(chunk)

    def _end_backward(self, task: int, has_failed: bool) -> None:
        if has_failed:
            self._whole.discard(task)
        elif len(self._tasks) > 1:
            self._take_left(task)
            self._write_back_waiting()  # the backward around may read the host copies
            if self._beside is not None:
                self._beside.await_steps()
        super()._end_backward(task, has_failed)

    def _finish(self, has_failed: bool) -> None:
        if has_failed:
            self._reset()
            return
        self._write_back_waiting()
        if self._beside is not None:
            self._beside.end_backward()
        for event in self._written:  # so that host copies are up to date
            self.device.synchronize(event)
        self._written.clear()
        self._say_consumed()
        if self._stepped:
            self._whole.update(self._tasks)
        self._stepped.clear()
        self._due.clear()

    def _reset(self) -> None:
        self._regroup()
        if self._beside is not None:
            self._beside.end_backward()
        for parameter in list(self._due.values()):
            self._consume(parameter)
        self.streamer.rest()
        self.streamer.flush()
        self._forget_consumed()
        self._waiting.clear()
        self._written.clear()
        self._stepped.clear()

    def _name_of(self, parameter: nn.Parameter) -> str:
        named = {**self._names, **{id(item.parameter): item.name for item in self._layers}}
        return named.get(id(parameter), "a parameter")

    def _step(self, parameter: nn.Parameter) -> Event | None:
        """Let the optimizer step one parameter, once in an outermost backward. Return an event, None on the current stream."""
        if not self._stepped:
            self._watch_groups()
        if id(parameter) not in self._group_of:
            raise LayerOffloadError(
                f'"{self._name_of(parameter)}" has a gradient, and the optimizer does not know it: was it left out when that '
                "was made, has it come to require grad since, was it taken out of the groups, or was it put in the place of "
                "another (`load_state_dict(assign=True)`)? Use offload.optimizer.add_param_group, set requires_grad to False, "
                "load without assign=True, or make a new LayerOffload"
            )
        if id(parameter) in self._stepped:
            raise LayerOffloadError(
                f'"{self._name_of(parameter)}" was stepped already, with a part of its gradient, when a backward brings '
                "another part: it is used more than once, in checkpoints that run a backward of their own each. Give these "
                'use_reentrant=False, or use train="host"'
            )
        if self._beside is not None and not self._stepped:
            self._beside.begin_backward()
        self._stepped[id(parameter)] = parameter
        if self._beside is not None:
            return self._beside.step(parameter)
        state = self.optimizer.state[parameter]
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim() and value.device != parameter.device:
                state[name] = value.to(parameter.device)  # `load_state_dict` puts it to where the parameter is at rest
        with self._only(parameter), label("step"):
            self.optimizer.step()
        return None

    @contextmanager
    def _only(self, parameter: nn.Parameter) -> Iterator[None]:
        groups = self.optimizer.param_groups
        group = {**groups[self._group_of[id(parameter)]], "params": [parameter]}
        entries = _entries_of(group)
        self._groups = groups
        self.optimizer.param_groups = [group]
        try:
            yield
        finally:
            self._regroup()
        for name, (value, version) in _entries_of(group).items():
            known, known_version = entries.get(name, (_MISSING, 0))
            if known is value and known_version == version:
                continue
            if known is value or isinstance(known, Tensor) or isinstance(value, Tensor) or known != value:
                raise LayerOffloadError(
                    f'{type(self.optimizer).__name__} keeps state in its groups (a step has changed "{name}"), which is of all '
                    'parameters together. With train="fused" each is stepped by itself. Use train="host"'
                )

    def _regroup(self) -> None:
        """Give the optimizer its groups back. If an interrupt comes first, the end of the backward does it."""
        if self._groups is not None:
            self.optimizer.param_groups = self._groups
            self._groups = None


def _refuse(grad: Tensor | None, name: str) -> None:
    if grad is not None:
        raise LayerOffloadError(f"{name} has a gradient already when a backward brings one. {_ADVICE}")
