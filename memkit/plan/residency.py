"""Which layers of a model stay on the device and which stream, and what a step then takes."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from itertools import product

from tabulate import tabulate

from memkit.core.sizes import MIB, format_bytes
from memkit.plan.ratio import check_ratio
from memkit.plan.timeline import HIDDEN, Lane, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """The costs of one layer; seconds that were not measured are None."""

    name: str
    num_bytes: int  # bytes of one copy if it streams: its packed weights
    forward_s: float | None = None
    backward_s: float | None = None  # seconds of its backward, with recomputed forwards
    grad_bytes: int = 0  # bytes that go to the host in each backward, if it streams and its gradients leave the device


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrediction:
    forward_stall_s: tuple[float, ...]
    backward_stall_s: tuple[float, ...]
    total_s: float


def slot_sizes(streamed_bytes: Sequence[int], num_slots: int) -> tuple[int, ...]:
    """Return the size of each slot, largest first: a class of layers has `num_slots`, or one per layer if it has fewer."""
    check_num_slots(num_slots)
    slots: list[int] = []
    for members in size_classes(streamed_bytes):
        slots += [max(streamed_bytes[index] for index in members)] * min(num_slots, len(members))
    return tuple(slots)


def slot_size_of(num_bytes: int, slot_bytes: Collection[int]) -> int:
    size = min((size for size in slot_bytes if size >= num_bytes), default=None)
    if size is None:
        found = format_bytes(max(slot_bytes)) if slot_bytes else "no slots"
        raise ValueError(f"a layer of {format_bytes(num_bytes)} needs a slot that holds it; the largest found: {found}")
    return size


def predict_step(
    layers: Sequence[LayerCosts], streamed: Collection[int], slot_bytes: Sequence[int], link_bytes_per_s: float
) -> StepPrediction:
    """Predict a forward and a backward of measured layers, from empty slots: weights may be written between steps unseen."""
    num_slots = Counter(slot_bytes)
    size_of = {index: slot_size_of(layers[index].num_bytes, num_slots) for index in streamed}
    held: dict[int, deque[int]] = {size: deque() for size in size_of.values()}
    computed_s: dict[int, float] = {}
    timeline, moment_s = Timeline(), 0.0

    def use(index: int, compute_s: float, *, is_forward: bool) -> float:
        nonlocal moment_s
        stall_s = 0.0
        if index in size_of and index not in held[size_of[index]]:
            slots = held[size_of[index]]
            free_s = 0.0
            if len(slots) == num_slots[size_of[index]]:  # they hold neighbors in order: the first that came is needed last
                free_s = computed_s[slots.popleft() if is_forward else slots.pop()]
            (slots.append if is_forward else slots.appendleft)(index)
            copy_s = layers[index].num_bytes / link_bytes_per_s
            stall_s = timeline.wait(moment_s, timeline.issue(Lane.BACK, copy_s, after_s=free_s))
        moment_s += compute_s
        computed_s[index] = timeline.now_s(moment_s)
        return stall_s

    forward_s = [layer.forward_s or 0.0 for layer in layers]
    backward_s = [layer.backward_s or 0.0 for layer in layers]
    forward_stall_s = [use(index, forward_s[index], is_forward=True) for index in range(len(layers))]
    begin_s = timeline.now_s(moment_s)
    backward_stall_s = [use(index, backward_s[index], is_forward=False) for index in reversed(range(len(layers)))]
    grads_s = sum(layers[index].grad_bytes for index in size_of) / link_bytes_per_s
    timeline.wait(moment_s, timeline.issue(Lane.OUT, grads_s, after_s=begin_s))
    return StepPrediction(
        forward_stall_s=tuple(forward_stall_s),
        backward_stall_s=tuple(reversed(backward_stall_s)),
        total_s=math.fsum(forward_s) + math.fsum(backward_s) + timeline.late_s,
    )


def size_classes(sizes: Sequence[int]) -> list[list[int]]:
    """Return the indices of the sizes in classes, largest first; a class is within an eighth of its largest."""
    classes: list[list[int]] = []
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        if classes and 8 * sizes[index] >= 7 * sizes[classes[-1][0]]:
            classes[-1].append(index)
        else:
            classes.append([index])
    return [sorted(members) for members in classes]


def check_num_slots(num_slots: object) -> None:
    check_count("num_slots", num_slots, least=1, do="Pass 1 to take the least memory, 2 or more to copy while a layer computes")


def check_count(name: str, value: object, *, least: int, most: int | None = None, do: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int; found {value!r}")
    if value < least or (most is not None and value > most):
        wanted = f"at least {least}" if most is None else f"from {least} to the number of layers, {most}"
        raise ValueError(f"{name} must be {wanted}; found {value}{'. ' if do else ''}{do}")


class LayerResidency(str, Enum):
    """Where the weights of a layer live."""

    RESIDENT = "resident"
    """Always on the device, in their own storage."""
    STREAMED = "streamed"
    """In host memory; a copy is in a slot on the device around each use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLayer:
    """Where one layer is to live, and the predicted costs."""

    name: str
    residency: LayerResidency
    num_bytes: int
    """Bytes of its weights that stream, or would."""
    forward_s: float | None
    backward_s: float | None
    transfer_s: float | None
    """Seconds of one copy to the device, if it streams, or would; None if the link's speed is unknown."""
    stall_s: float | None
    """Seconds that compute waits for it in a forward and a backward; None if that cannot be predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencyPlan:
    """Where each layer is to live, in the order of the forward, and the slots for those that stream."""

    layers: tuple[PlannedLayer, ...]
    slot_bytes: tuple[int, ...]
    """The size of each slot, largest first. A layer uses the slots of the smallest size that holds it."""
    predicted_s: float | None
    """Seconds of a forward and a backward, from empty slots; None if compute or the link was not measured."""

    @property
    def streamed(self) -> tuple[str, ...]:
        return tuple(layer.name for layer in self.layers if layer.residency is LayerResidency.STREAMED)

    @property
    def streamed_bytes(self) -> int:
        return sum(layer.num_bytes for layer in self.layers if layer.residency is LayerResidency.STREAMED)

    @property
    def resident_bytes(self) -> int:
        return sum(layer.num_bytes for layer in self.layers if layer.residency is LayerResidency.RESIDENT)

    @property
    def device_bytes(self) -> int:
        """Bytes on the device: the layers that stay, and the slots. Without gradients and activations."""
        return self.resident_bytes + sum(self.slot_bytes)

    @property
    def host_bytes(self) -> int:
        """Bytes of all streamed layers in host memory: a slot holds only a copy."""
        return self.streamed_bytes

    @property
    def freed_bytes(self) -> int:
        """Bytes of weights that streaming frees on the device: the streamed layers, less the slots. At 0 or below it saves
        nothing."""
        return self.streamed_bytes - sum(self.slot_bytes)

    @property
    def compute_s(self) -> float | None:
        return _compute_s(self.layers)

    def explain(self) -> str:
        """Return the plan as a table, one line per layer, with the totals in the last lines."""
        rows = []
        for layer in self.layers:
            compute = f"{_format_ms(layer.forward_s)} / {_format_ms(layer.backward_s)}"
            transfer = _format_ms(layer.transfer_s if layer.residency is LayerResidency.STREAMED else None)
            size = f"{layer.num_bytes / MIB:.2f}"
            rows.append((layer.name, layer.residency.value, size, compute, transfer, _format_ms(layer.stall_s)))
        headers = ("layer", "weights", "MiB", "compute (ms)", "transfer (ms)", "stall (ms)")
        table = tabulate(rows, headers=headers, colalign=("left", "left", *["right"] * 4), disable_numparse=True)
        slots = ", ".join(f"{count} of {format_bytes(size)}" for size, count in Counter(self.slot_bytes).items())
        return "\n".join(
            (
                table,
                f"streamed: {len(self.streamed)} of {len(self.layers)} layers, {format_bytes(self.streamed_bytes)}",
                f"slots: {slots or 'none'}",
                f"device: {format_bytes(self.device_bytes)}, host: {format_bytes(self.host_bytes)}",
                f"forward and backward: {_format_ms(self.predicted_s)} ms, compute alone {_format_ms(self.compute_s)} ms",
            )
        )


def spread(num_layers: int, num_streamed: int) -> tuple[int, ...]:
    """Return `num_streamed` of some layers, evenly spread up to the last, so that the first of them comes late."""
    return tuple((count * num_layers - 1) // num_streamed for count in range(1, num_streamed + 1))


def plan_streamed_ratio(
    layers: Sequence[LayerCosts], ratio: float, *, num_slots: int, link_bytes_per_s: float | None = None
) -> ResidencyPlan:
    """Return the plan that streams a share of the layers' bytes, or as little more as whole layers allow."""
    ratio = check_ratio(ratio, where="offload_ratio")
    wanted_bytes = ratio * sum(layer.num_bytes for layer in layers) * (1 - 1e-9)  # 0.1 is a little more than a tenth
    choices = [choice for choice in _even_choices(layers, num_slots) if choice.streamed_bytes >= wanted_bytes]
    return _plan(layers, min(choices, key=lambda choice: (choice.streamed_bytes, choice)), link_bytes_per_s)


def plan_resident(
    layers: Sequence[LayerCosts], num_resident: int, *, num_slots: int, link_bytes_per_s: float | None = None
) -> ResidencyPlan:
    """Return the plan that keeps `num_resident` layers on the device; a layer without bytes always stays."""
    check_count("num_resident", num_resident, least=0, most=len(layers))
    choices = _even_choices(layers, num_slots)
    num_streamed = min(len(layers) - num_resident, max(len(choice.streamed) for choice in choices))
    return _plan(layers, min(choice for choice in choices if len(choice.streamed) == num_streamed), link_bytes_per_s)


def plan_budget(
    layers: Sequence[LayerCosts],
    budget_bytes: int,
    *,
    num_slots: int,
    link_bytes_per_s: float | None = None,
    state_bytes: int = 0,
) -> ResidencyPlan:
    """Return the plan that streams the fewest bytes such that resident layers, slots and an optimizer's states fit a budget."""
    check_num_slots(num_slots)
    for fewer_slots in range(num_slots, 0, -1):
        choices = _even_choices(layers, fewer_slots)
        fitting = [choice for choice in choices if choice.device_bytes + state_bytes <= budget_bytes]
        if fitting:
            return _plan(layers, min(fitting, key=lambda choice: (choice.streamed_bytes, choice)), link_bytes_per_s)
    least_bytes = min(choices).device_bytes + state_bytes
    largest = max(layers, key=lambda layer: layer.num_bytes)
    others = "" if min(choices).device_bytes == largest.num_bytes else ", and one for each other size of layer"
    state = f", and {format_bytes(state_bytes)} for the optimizer's state" if state_bytes else ""
    raise ValueError(
        f"the layers' weights need at least {format_bytes(least_bytes)} of budget (a slot that holds {largest.name}, "
        f"{format_bytes(largest.num_bytes)}{others}{state}); found {format_bytes(budget_bytes)}. Raise budget by "
        f"{least_bytes - budget_bytes} bytes or more, or split {largest.name}."
    )


def plan_auto(
    layers: Sequence[LayerCosts], *, num_slots: int, link_bytes_per_s: float, budget_bytes: int | None = None
) -> ResidencyPlan:
    """Return the plan that streams the most while copies hide; if a budget needs more, the least that fits."""
    choices = sorted(_even_choices(layers, num_slots))
    limit_s = HIDDEN * predict_step(layers, (), (), link_bytes_per_s).total_s
    steps = (predict_step(layers, choice.streamed, choice.slot_bytes, link_bytes_per_s) for choice in choices)
    hiding = next(choice for choice, step in zip(choices, steps, strict=True) if step.total_s <= limit_s)
    if budget_bytes is not None and hiding.device_bytes > budget_bytes:
        return plan_budget(layers, budget_bytes, num_slots=num_slots, link_bytes_per_s=link_bytes_per_s)
    return _plan(layers, hiding, link_bytes_per_s)


def plan_again(plan: ResidencyPlan, layers: Sequence[LayerCosts], link_bytes_per_s: float | None) -> ResidencyPlan:
    """Return a plan that streams the same layers, with new predictions from measured layers."""
    streamed = [index for index, layer in enumerate(layers) if layer.name in plan.streamed]
    return _predicted(layers, streamed, plan.slot_bytes, link_bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class _Choice:
    """Layers that may stream together; the smallest choice leaves the fewest bytes on the device."""

    device_bytes: int
    streamed_bytes: int
    resident: tuple[int, ...]  # breaks ties: the smallest keeps the first layers, which hide the first copies
    streamed: tuple[int, ...] = field(compare=False)  # all others
    slot_bytes: tuple[int, ...] = field(compare=False)  # theirs


def _even_choices(layers: Sequence[LayerCosts], num_slots: int) -> list[_Choice]:
    """Return the choices of layers for all plans: each is spread evenly over each class of sizes."""
    if not layers:
        raise ValueError("a plan needs at least one layer; found none")
    sizes = [layer.num_bytes for layer in layers]
    classes = [members for members in size_classes(sizes) if sizes[members[0]]]
    choices = []
    for counts in _even_counts([len(members) for members in classes]):
        chosen = [members[at] for members, count in zip(classes, counts, strict=True) for at in spread(len(members), count)]
        streamed = tuple(sorted(chosen))
        resident = tuple(sorted(set(range(len(layers))).difference(chosen)))
        slot_bytes = slot_sizes([sizes[index] for index in streamed], num_slots)
        choices.append(
            _Choice(
                device_bytes=sum(sizes[index] for index in resident) + sum(slot_bytes),
                streamed_bytes=sum(sizes[index] for index in streamed),
                resident=resident,
                streamed=streamed,
                slot_bytes=slot_bytes,
            )
        )
    return choices


def _even_counts(lengths: Sequence[int]) -> list[tuple[int, ...]]:
    if len(lengths) > 4:
        turns = sorted((Fraction(2 * turn + 1, length), -kind) for kind, length in enumerate(lengths) for turn in range(length))
        before = [Counter(-kind for _, kind in turns[:num_turns]) for num_turns in range(len(turns) + 1)]
        return [tuple(counter[kind] for kind in range(len(lengths))) for counter in before]
    shares = {Fraction(count, length) for length in lengths for count in range(length)} or {Fraction()}
    roundings = list(product((0, 1), repeat=len(lengths)))
    lowest = [[int(share * length) for length in lengths] for share in shares]
    return sorted({tuple(map(sum, zip(low, up, strict=True))) for low in lowest for up in roundings})


def _plan(layers: Sequence[LayerCosts], choice: _Choice, link_bytes_per_s: float | None) -> ResidencyPlan:
    return _predicted(layers, choice.streamed, choice.slot_bytes, link_bytes_per_s)


def _predicted(
    layers: Sequence[LayerCosts], streamed: Collection[int], slot_bytes: tuple[int, ...], link_bytes_per_s: float | None
) -> ResidencyPlan:
    prediction = None
    if link_bytes_per_s is not None and _compute_s(layers) is not None:
        prediction = predict_step(layers, streamed, slot_bytes, link_bytes_per_s)
    planned = tuple(
        PlannedLayer(
            name=layer.name,
            residency=LayerResidency.STREAMED if index in streamed else LayerResidency.RESIDENT,
            num_bytes=layer.num_bytes,
            forward_s=layer.forward_s,
            backward_s=layer.backward_s,
            transfer_s=None if link_bytes_per_s is None else layer.num_bytes / link_bytes_per_s,
            stall_s=prediction.forward_stall_s[index] + prediction.backward_stall_s[index] if prediction else None,
        )
        for index, layer in enumerate(layers)
    )
    return ResidencyPlan(layers=planned, slot_bytes=slot_bytes, predicted_s=prediction.total_s if prediction else None)


def _compute_s(layers: Sequence[LayerCosts] | Sequence[PlannedLayer]) -> float | None:
    forward_s = [layer.forward_s for layer in layers if layer.forward_s is not None]
    backward_s = [layer.backward_s for layer in layers if layer.backward_s is not None]
    is_measured = len(forward_s) == len(backward_s) == len(layers)
    return math.fsum(forward_s) + math.fsum(backward_s) if is_measured else None


def _format_ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.3f}"
