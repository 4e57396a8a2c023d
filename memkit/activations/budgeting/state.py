"""`BudgetState`: the state of a tag of `MemoryBudget`, from one iteration to the next."""

from __future__ import annotations

import operator
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

from memkit.activations.budgeting.inside import InsideBudgets
from memkit.activations.budgeting.learning import Learning, Planned
from memkit.activations.budgeting.limits import ComingStates
from memkit.activations.saved.settled import Way
from memkit.activations.saved.state import OffloadState, RematState, States, TagState

if TYPE_CHECKING:
    from collections.abc import Callable

    from memkit.activations.budgeting.limits import Limits, StepPeak
    from memkit.activations.budgeting.ways import Ways
    from memkit.activations.context import Shapes
    from memkit.activations.offloading.window import OffloadWindow
    from memkit.activations.recomputing.layers import LayerStep
    from memkit.activations.recomputing.region_plan import RegionPlan
    from memkit.activations.saved.traces import Trace
    from memkit.device import MemoryCounter


_Part = TypeVar("_Part", bound=TagState)


class BudgetState(RematState):
    name = "MemoryBudget"

    def __init__(self, tag: str) -> None:
        super().__init__(tag)
        self.learning = Learning(self.warn_once)
        self.budget_bytes: int | None = None
        self.excess_bytes = 0
        """The bytes by which the last step without a plan has exceeded the budget."""
        self.is_within_capacity = False
        self.coming = ComingStates(None)
        self.inside = InsideBudgets()
        self.limits: Limits | None = None
        self.shapes: Shapes | None = None
        self.fitting: tuple[Shapes, ...] = ()
        """Inputs whose steps keep to the budget by themselves, if it is settled."""
        self.is_idle = False
        self.ways: Ways | None = None
        self.ways_for: tuple[Trace, Shapes | None] | None = None
        """The steps that `ways` is for, with the shapes of their inputs. Other steps follow plans of their own."""
        self.way = Way.OPS
        self.of_regions = self._part(RematState)
        self.of_copies = self._part(OffloadState)
        self.before = 0, 0
        """The numbers of finished backwards and of steps that deviated, when the last forward began."""
        self.judged: tuple[Trace, Planned] | None = None
        self.peak: StepPeak | None = None
        self.unplanned_peak: StepPeak | None = None
        self.of_layers: tuple[LayerStep, StepPeak] | None = None
        """The last step with layers, and its peak."""

    def _part(self, kind: Callable[[str], _Part]) -> _Part:
        part = kind(self.tag)
        part.name, part._warned = self.name, self._warned
        return part

    def let_go_of_others(self, way: Way) -> None:
        """Keep only the state and the host memory that steps of one way need."""
        regions, copies = self.of_regions, self.of_copies
        if way is Way.OPS:
            self.of_regions = self._part(RematState)
            regions.retire()
        else:
            for window in super().windows():
                window.fit_arena(0)
        if way is not Way.REGIONS_AND_COPIES:
            self.of_copies = self._part(OffloadState)
            copies.retire()

    def windows(self) -> list[OffloadWindow]:
        return [*super().windows(), *self.of_regions.windows(), *self.of_copies.windows()]

    def is_of_other_size(self, shapes: Shapes | None) -> bool:
        """As of `RematState`; but where all fits, smaller steps go as the recorded ones."""
        if self.settled is not None and shapes is not None and self.fits(shapes):
            self.was_other = False
            return False
        return super().is_of_other_size(shapes)

    def fits(self, shapes: Shapes) -> bool:
        if self.settled is None or shapes in self.fitting:
            return True
        return any(_are_within(shapes, known) for known in self.fitting)

    def coming_bytes(self, limits: Limits) -> int:
        """Return the bytes of the optimizer states that are still to be made."""
        device = self.costs.device
        optimizer = None if limits.optimizer is None else limits.optimizer()
        if not self.coming.is_of(optimizer):
            self.coming = ComingStates(optimizer)
        kind = None if device is None else device.torch_device.type  # without a counter, the budget is for saved tensors alone
        return 0 if device is not None and self.counter is None else self.coming.num_bytes(kind)

    def learn_layers(self) -> None:
        """Note the peak of the last step with layers, once its backward is over."""
        found, self.of_layers = self.of_layers, None
        if found is None or self.layers is None:
            return
        step, peak = found
        if len(step.kept) == len(step.sizes):
            peak.end_backward()  # where nothing was recomputed, nothing has told of the backward's end
        if peak.num_bytes is not None:
            self.layers.learn_peak(step, peak.num_bytes - step.begun_bytes)
            self.learning.last_peak_bytes = peak.num_bytes or self.learning.last_peak_bytes

    def end_forward(self) -> None:
        """Note the bytes that a forward has left on the device. If an idle step left too much to fit, the next step is looked
        at again: it sees no backward, and the peak may be reset by its end."""
        peak, settled = self.peak, self.settled
        if peak is None:
            return
        if settled is None or not self.is_idle:
            peak.end_forward()
        elif (foretold_bytes := peak.foretold_bytes()) is not None and foretold_bytes > settled.budget_bytes:
            self.settled, self.fitting = None, ()

    @property
    def regions(self) -> RegionPlan | None:
        settled = None if self.way is Way.OPS else self.of_regions.settled
        return None if settled is None else settled.regions

    @property
    def counter(self) -> MemoryCounter | None:
        device = self.costs.device
        return None if device is None else device.memory_counter()


def _are_within(shapes: Shapes, known: Shapes) -> bool:
    """Tell whether inputs are at most as long as known ones in each dimension: what is saved may grow with any of them."""
    return list(map(len, shapes)) == list(map(len, known)) and all(
        map(operator.le, chain.from_iterable(shapes), chain.from_iterable(known))
    )


budget_states = States(BudgetState)
