"""How a step goes in which some layers stream: their slots' sizes, and two queues, one that computes and one that copies.

Which layers stream is decided in `memkit.plan.residency`.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from memkit.plan.timeline import Lane, Timeline
from memkit.sizes import check_bytes, format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """What a plan has to know of one layer. Seconds that were not measured are None."""

    name: str
    """The name of the layer."""
    num_bytes: int
    """Bytes of one copy, if it streams: its weights, packed."""
    forward_s: float | None = None
    """Seconds that its forward computes."""
    backward_s: float | None = None
    """With what is computed again for it."""
    grad_bytes: int = 0
    """Bytes that go to the host in each backward, if it streams and its gradients do not stay."""

    def __post_init__(self) -> None:
        check_bytes(f"num_bytes of {self.name}", self.num_bytes)
        check_bytes(f"grad_bytes of {self.name}", self.grad_bytes)
        for which, seconds in (("forward_s", self.forward_s), ("backward_s", self.backward_s)):
            if seconds is not None and not 0 <= seconds < math.inf:
                raise ValueError(f"{which} of {self.name} is a number of seconds, 0 or more, or None; found {seconds}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrediction:
    """How long compute waits in one step, and how long the step takes."""

    forward_stall_s: tuple[float, ...]
    """Seconds of waiting before each layer's forward."""
    backward_stall_s: tuple[float, ...]
    """Seconds of waiting before each layer's backward."""
    total_s: float
    """Seconds of the step."""


def slot_sizes(streamed_bytes: Sequence[int], num_slots: int) -> tuple[int, ...]:
    """Return the size of each slot, largest first.

    Layers that are at most an eighth smaller than the largest of them share slots of its size: `num_slots` of these, or one for
    each such layer where they are fewer.
    """
    check_num_slots(num_slots)
    slots: list[int] = []
    for members in size_classes(streamed_bytes):
        slots += [max(streamed_bytes[index] for index in members)] * min(num_slots, len(members))
    return tuple(slots)


def slot_size_of(num_bytes: int, slot_bytes: Collection[int]) -> int:
    """Return the size of the slots that a layer uses: the smallest that holds it.

    Raises:
        ValueError: none does.
    """
    size = min((size for size in slot_bytes if size >= num_bytes), default=None)
    if size is None:
        found = format_bytes(max(slot_bytes)) if slot_bytes else "no slots"
        raise ValueError(f"a layer of {format_bytes(num_bytes)} needs a slot that holds it; the largest found: {found}")
    return size


def predict_step(
    layers: Sequence[LayerCosts], streamed: Collection[int], slot_bytes: Sequence[int], link_bytes_per_s: float
) -> StepPrediction:
    """Return how a step goes, a forward and a backward. It begins with nothing in the slots.

    Weights may be written between steps in ways that cannot be seen, so a slot keeps what it holds from the forward to the
    backward, but not to the next step. Every streamed layer is copied in the forward; in the backward those are that no slot
    holds any more: of the layers that share slots of a size, all but the last few, as many as these slots.

    The forward computes the layers in order, the backward in reverse. Copies go one by one, in the order of the uses, the first
    when the forward begins: before the first layer, nothing hides one. A copy begins when the last one is over and the layer
    that it overwrites has been computed: of those in slots of the same size, the one whose next use is farthest. Gradients go
    out on a queue of their own, as fast as the other; the backward takes at least as long as they do.

    Args:
        layers: all layers, measured, in the order of the forward.
        streamed: indices of those that stream.
        slot_bytes: the size of each slot.
        link_bytes_per_s: how fast copies are, in each direction.

    Raises:
        ValueError: a layer was not measured, or none of the slots holds it, or the speed is not positive.
    """
    num_slots = Counter(slot_bytes)
    size_of = {index: slot_size_of(layers[index].num_bytes, num_slots) for index in streamed}
    held: dict[int, deque[int]] = {size: deque() for size in size_of.values()}
    computed_s: dict[int, float] = {}
    timeline, moment_s = Timeline(), 0.0

    def use(index: int, compute_s: float, *, is_forward: bool) -> float:
        """Compute a layer once it is there. Return how long that waited."""
        nonlocal moment_s
        stall_s = 0.0
        if index in size_of and index not in held[size_of[index]]:
            slots = held[size_of[index]]
            free_s = 0.0
            if len(slots) == num_slots[size_of[index]]:  # they hold neighbors, in order: needed last is what came first
                free_s = computed_s[slots.popleft() if is_forward else slots.pop()]
            (slots.append if is_forward else slots.appendleft)(index)
            copy_s = transfer_s(layers[index].num_bytes, link_bytes_per_s)
            stall_s = timeline.wait(moment_s, timeline.issue(Lane.BACK, copy_s, after_s=free_s))
        moment_s += compute_s
        computed_s[index] = timeline.now_s(moment_s)
        return stall_s

    forward_s = [_measured_s(layer.name, layer.forward_s) for layer in layers]
    backward_s = [_measured_s(layer.name, layer.backward_s) for layer in layers]
    forward_stall_s = [use(index, forward_s[index], is_forward=True) for index in range(len(layers))]
    begin_s = timeline.now_s(moment_s)
    backward_stall_s = [use(index, backward_s[index], is_forward=False) for index in reversed(range(len(layers)))]
    grads_s = transfer_s(sum(layers[index].grad_bytes for index in size_of), link_bytes_per_s)
    timeline.wait(moment_s, timeline.issue(Lane.OUT, grads_s, after_s=begin_s))
    return StepPrediction(
        forward_stall_s=tuple(forward_stall_s),
        backward_stall_s=tuple(reversed(backward_stall_s)),
        total_s=math.fsum(forward_s) + math.fsum(backward_s) + timeline.late_s,
    )


def size_classes(sizes: Sequence[int]) -> list[list[int]]:
    """Return the indices of the sizes in classes, largest first; in each, all are within an eighth of its largest."""
    classes: list[list[int]] = []
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        if classes and 8 * sizes[index] >= 7 * sizes[classes[-1][0]]:
            classes[-1].append(index)
        else:
            classes.append([index])
    return [sorted(members) for members in classes]


def transfer_s(num_bytes: int, link_bytes_per_s: float) -> float:
    if not link_bytes_per_s > 0:
        raise ValueError(f"link_bytes_per_s must be positive; found {link_bytes_per_s}")
    return num_bytes / link_bytes_per_s


def check_num_slots(num_slots: object) -> None:
    """Raise if layers cannot stream through so many slots of a size.

    Raises:
        TypeError, ValueError: so it is.
    """
    check_count("num_slots", num_slots, least=1, do="Pass 1 to take the least memory, 2 or more to copy while a layer computes")


def check_count(name: str, value: object, *, least: int, most: int | None = None, do: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int; found {value!r}")
    if value < least or (most is not None and value > most):
        wanted = f"at least {least}" if most is None else f"from {least} to the number of layers, {most}"
        raise ValueError(f"{name} must be {wanted}; found {value}{'. ' if do else ''}{do}")


def _measured_s(name: str, seconds: float | None) -> float:
    if seconds is None:
        raise ValueError(f"a prediction needs the seconds of each layer's forward and backward; {name} was not measured")
    return seconds
