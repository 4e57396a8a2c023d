"""Stages of unrecorded steps: idle, watching sizes, or with planned regions."""

from __future__ import annotations

from torch import Tensor, nn

from memkit.activations.recomputing.budget import RematOptions
from memkit.activations.recomputing.region_calls import RegionSpec
from memkit.activations.recomputing.regions import Regions
from memkit.activations.saved.entry import NO_PAIR, Entry, Stage, handing_on, is_within, unpack
from memkit.activations.saved.settled import Settled, SizesSeen, Way
from memkit.activations.saved.state import RematState
from memkit.core import torch_private
from memkit.core.hooks import HookPair, SavedTensorHooks
from memkit.core.kept import KeptHandle
from memkit.core.sequentials import kind_of
from memkit.core.tensors import PLAIN_TYPES
from memkit.plan import Action

_storage_of = Tensor.untyped_storage
_Packed = tuple[Tensor, int]


class IdleStage(Stage):
    """Does nothing with saved tensors. The user's marks take effect from the next step on."""

    moves = False

    def __init__(self, state: RematState, moving: Stage | None) -> None:
        self._state = state
        self._moving = moving

    @property
    def pair(self) -> HookPair:
        return NO_PAIR

    def take(self, tensor: Tensor, action: Action | None = None) -> KeptHandle:
        return KeptHandle(tensor)

    def mark(self, tensor: Tensor, action: Action) -> None:
        device = self._state.device
        if self._moving is not None and action is not Action.RECOMPUTE:
            self._moving.mark(tensor, action)
        elif action is not Action.KEEP and (action is Action.RECOMPUTE or device is None or device.has_own_memory):
            self._state.unsettle()


class WatchStage(IdleStage):
    """Only adds up saved bytes: if they exceed the budget, the next step is recorded. Each save and request costs
    a Python call."""

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


class StageWithRegions(IdleStage):
    regions: Regions

    def begin(self) -> None:
        self.regions.__enter__()

    def take_off(self) -> None:
        self.regions.__exit__(None, None, None)

    def warn_of_others(self, told: str) -> None:
        for module, why in self.regions.not_taken.items():
            name = kind_of(module)
            self._state.warn_once(f"region {name} {why}", told.format(name=name, why=why))


class RegionStage(StageWithRegions):
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
        self._hand_on, self._planned, self._specs = handing_on(None, outer), settled.regions, specs
        self._shapes, self._place = settled.regions.shapes, 0
        self._is_other = self._is_of_other_size = False
        self._is_share = isinstance(settled.options.budget, float)
        self.counts = settled.regions.counts(settled.options.budget, settled.budget_bytes)
        self.counts.trial = settled.regions.trial
        self.regions = Regions(specs, keep=self._keep, counts=self.counts)

    def end(self, *, has_failed: bool) -> None:
        planned, not_taken = self._planned, self.regions.not_taken
        self.counts.num_dropped = planned.num_dropped  # only values that count
        num_calls = {module: spec.num_calls for module, spec in self._specs.items()}
        are_planned = self._place == len(self._shapes) and self.regions.num_calls == num_calls
        if not_taken:
            self._state.choose_again()
        elif self._is_other or (not has_failed and not are_planned):
            self._state.unsettle()
        elif not has_failed and not self._is_of_other_size:
            planned.trial.end_forward(Way.REGIONS)
        if not_taken and not has_failed:
            told = "a {name} was to be recomputed as a whole, and was not: {why}. What it saved has stayed on the device."
            self.warn_of_others(told)

    def mark(self, tensor: Tensor, action: Action) -> None:
        if self._moving is not None and action is not Action.RECOMPUTE:
            self._moving.mark(tensor, action)
        self._state.unsettle()

    def _keep(self, tensor: Tensor) -> KeptHandle:
        place = self._place
        self._place = place + 1
        if place >= len(self._shapes):
            self._is_other = True
        elif tensor.shape != self._shapes[place]:
            self._is_of_other_size = True
            self._is_other |= not self._is_share or tensor.dim() != len(self._shapes[place])
        return self._hand_on(tensor)


def open_steady(state: RematState | None, options: RematOptions, outer: SavedTensorHooks | None) -> IdleStage | None:
    """Return the stage of a context that is about to be entered and need not record; None if it must record."""
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
        specs = {module: spec for reference, spec in planned.specs.items() if (module := reference()) is not None}
        if len(specs) < len(planned.specs):
            state.unsettle()
            return None
    moving = outer.owner.moving if outer is not None and isinstance(outer.owner, Entry) else None
    stage = None if planned is None else RegionStage(state, moving, outer, settled, specs)
    if stage is not None and stage.regions.has_hooks:  # which may have been set since it was planned
        state.unsettle()
        return None
    with state.lock:
        state.num_iterations += 1
        state.num_inner += is_within(state.tag)
        state.is_recorded = False
        if stage is not None and planned is not None:
            state.counts, state.plan = stage.counts, planned.plan
            return stage
        if options.keeps_all:
            return IdleStage(state, moving)
        budget_bytes = options.budget if isinstance(options.budget, int) else 0
        return WatchStage(state, moving, outer, settled, budget_bytes)
