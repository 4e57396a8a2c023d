"""What `Rematerialize` does in steps that need not be recorded, until one deviates.

If nothing is dropped, it does nothing, or adds up saved bytes if they might exceed the budget. Otherwise the planned regions
are recomputed, and tensors saved outside of them are left alone.
"""

from __future__ import annotations

from torch import Tensor, nn

from memkit import torch_private
from memkit.activations.recomputing.budget import RematOptions
from memkit.activations.recomputing.regions import Regions, RegionSpec
from memkit.activations.saved.entry import NO_PAIR, Entry, Stage, handing_on, is_within, unpack
from memkit.activations.saved.settled import Settled, SizesSeen
from memkit.activations.saved.state import RematState, remat_states
from memkit.activations.saved.trial import Way
from memkit.hooks import HookPair, SavedTensorHooks
from memkit.kept import KeptHandle
from memkit.plan import Action
from memkit.sequentials import kind_of
from memkit.storages import PLAIN_TYPES

_storage_of = Tensor.untyped_storage
_Packed = tuple[Tensor, int]


class IdleStage(Stage):
    """Does nothing with saved tensors. Marks of the user's take effect from the next step on.

    Args:
        state: the state of the tag.
        moving: the moving stage of an outer context, if there is one.
    """

    moves = False

    def __init__(self, state: RematState, moving: Stage | None) -> None:
        self._state = state
        self._moving = moving

    @property
    def pair(self) -> HookPair:
        """The hooks that it needs."""
        return NO_PAIR

    def begin(self) -> None:
        pass

    def take_off(self) -> None:
        pass

    def end(self, *, has_failed: bool) -> None:
        pass

    def take(self, tensor: Tensor, action: Action | None = None) -> KeptHandle:
        return KeptHandle(tensor)

    def mark(self, tensor: Tensor, action: Action) -> None:
        device = self._state.device
        if self._moving is not None and action is not Action.RECOMPUTE:
            self._moving.mark(tensor, action)
        elif action is not Action.KEEP and (action is Action.RECOMPUTE or device is None or device.has_own_memory):
            self._state.unsettle()


class WatchStage(IdleStage):
    """Does nothing but add up saved bytes: if a step saves more than the budget, the next one is recorded.

    This costs one call of a Python function for each save and each request.

    Args:
        state: the state of the tag.
        moving, outer: see `RecordingStage`.
        settled: what is known of steps that drop nothing.
    """

    def __init__(
        self, state: RematState, moving: Stage | None, outer: SavedTensorHooks | None, settled: Settled, budget_bytes: int
    ) -> None:
        super().__init__(state, moving)
        assert settled.sizes is not None
        self._known, self._budget_bytes = settled.sizes, budget_bytes
        self._sizes = SizesSeen(settled.options.min_bytes)
        self._seen, self._note = self._sizes.seen, self._sizes.note
        self._hand_on = handing_on(None, outer)  # by its hooks, as autograd would: an offload may follow a schedule
        self._has_outer = outer is not None

    @property
    def pair(self) -> HookPair:
        return self.pack, unpack

    def pack(self, tensor: Tensor) -> _Packed | KeptHandle:
        """Take a tensor that autograd saves."""
        if type(tensor) not in PLAIN_TYPES:
            return self._hand_on(tensor)
        try:
            storage = _storage_of(tensor)
        except RuntimeError:  # it is no range of bytes
            return self._hand_on(tensor)
        if torch_private.storage_address(storage) not in self._seen and torch_private.backward_task() == -1:
            self._note(tensor, storage)
        if self._has_outer:
            return self._hand_on(tensor)
        return tensor.detach(), torch_private.version_of(tensor)

    def end(self, *, has_failed: bool) -> None:
        if self._sizes.exceed(self._budget_bytes, self._known):
            self._state.unsettle()


class RegionStage(IdleStage):
    """Does nothing with saved tensors, while some module calls are recomputed as regions.

    Args:
        state: the state of the tag.
        moving, outer: see `RecordingStage`: they are given the inputs of regions.
        settled: the plan of regions.
        specs: the regions' modules, with what is known of each.
    """

    def __init__(
        self,
        state: RematState,
        moving: Stage | None,
        outer: SavedTensorHooks | None,
        settled: Settled,
        specs: dict[nn.Module, RegionSpec],
    ) -> None:
        super().__init__(state, moving)
        assert settled.regions is not None
        self._hand_on, self._settled = handing_on(None, outer), settled
        self._shapes, self._place = settled.regions.shapes, 0
        self._is_other = False
        self.counts = settled.regions.counts(settled.options.budget, settled.budget_bytes)
        self.counts.trial = settled.regions.trial
        self._regions = Regions(specs, keep=self._keep, counts=self.counts)
        self._num_calls: dict[nn.Module, int] = {}

    @property
    def has_hooks(self) -> bool:
        """Whether its modules or their submodules have hooks."""
        return self._regions.has_hooks

    def begin(self) -> None:
        self._regions.__enter__()

    def take_off(self) -> None:
        self._num_calls = self._num_calls or self._regions.num_calls
        self._regions.__exit__(None, None, None)

    def end(self, *, has_failed: bool) -> None:
        assert self._settled.regions is not None
        planned = self._settled.regions
        self.counts.num_dropped = planned.num_dropped  # of those that count
        num_calls = {module: number for reference, number in planned.num_calls.items() if (module := reference()) is not None}
        are_planned = self._place == len(self._shapes) and self._num_calls == num_calls
        self._num_calls = {}
        not_taken = self._regions.not_taken
        if not_taken:
            self._state.choose_again()
        elif self._is_other or (not has_failed and not are_planned):
            self._state.unsettle()
        elif not has_failed:
            planned.trial.end_forward(Way.REGIONS)
        for module, why in () if has_failed else not_taken.items():
            name = kind_of(module)
            message = f"a {name} was to be recomputed as a whole, and was not: {why}. What it saved has stayed on the device."
            self._state.warn_once(f"region {name} {why}", message)

    def mark(self, tensor: Tensor, action: Action) -> None:
        if self._moving is not None and action is not Action.RECOMPUTE:
            self._moving.mark(tensor, action)
        self._state.unsettle()

    def _keep(self, tensor: Tensor) -> KeptHandle:
        """Return the handle of an input of a region."""
        place = self._place
        self._place = place + 1
        if place >= len(self._shapes) or tensor.shape != self._shapes[place]:
            self._is_other = True
        return self._hand_on(tensor)


def all_have_hooks() -> bool:
    """Tell whether global module hooks are set."""
    everywhere = vars(nn.modules.module)
    return any(everywhere[f"_global{name}"] for name in torch_private.MODULE_HOOKS)


def open_steady(tag: str, options: RematOptions, outer: SavedTensorHooks | None) -> IdleStage | None:
    """Return the stage of a context that is about to be entered and need not record; None if it must record.

    Args:
        outer: the innermost hooks, if a context of memkit has set them.
    """
    state = remat_states.get(tag)
    if state is not None and state.trial is not None and state.costs.device is not None:
        state.trial.begin_step(state.costs.device)
    settled = None if state is None else state.settled
    if state is None or settled is None or not settled.options.is_like(options):
        return None
    if settled.regions is not None and settled.regions.trial.prefers_ops():
        state.settled = None
        return None
    if state.counts.has_mismatch:
        state.give_up_regions()
        return None
    specs, planned = dict[nn.Module, RegionSpec](), settled.regions
    if planned is not None:
        for reference, calls in planned.calls.items():
            module = reference()
            if module is not None:
                specs[module] = RegionSpec(calls=calls, learned=planned.learned[reference])
        if len(specs) < len(planned.calls):
            state.unsettle()
            return None
    moving = outer.owner.moving if outer is not None and isinstance(outer.owner, Entry) else None
    stage = None if planned is None else RegionStage(state, moving, outer, settled, specs)
    if stage is not None and (all_have_hooks() or stage.has_hooks):  # which may have been set since it was planned
        state.unsettle()
        return None
    with state.lock:
        state.num_iterations += 1
        state.num_inner += is_within(tag)
        state.is_recorded = False
        if stage is not None and planned is not None:
            state.counts, state.plan = stage.counts, planned.plan
            return stage
        if options.keeps_all:
            return IdleStage(state, moving)
        budget_bytes = options.budget if isinstance(options.budget, int) else 0
        return WatchStage(state, moving, outer, settled, budget_bytes)
