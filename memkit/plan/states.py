"""Optimizer states: which move together, where each piece is stepped, and where states are between steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from memkit.core.sizes import (
    ALIGNMENT_BYTES,
    DISK_PAGE_BYTES,
    HOST_PAGE_BYTES,
    check_bytes,
    format_bytes,
    rounded,
    total_rounded,
)
from memkit.errors import BudgetInfeasible, HostMemoryError


class Update(Enum):
    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCosts:
    """The bytes of one parameter of an optimizer.

    Attributes:
        name: its name.
        numel: its elements.
        parameter_bytes: its bytes.
        state_bytes: bytes of its states, with the float32 copy if there is one.
        has_master: whether the optimizer steps a float32 copy of it.
        is_elementwise: whether parts of it can be stepped apart.
    """

    name: str
    numel: int
    parameter_bytes: int
    state_bytes: int
    has_master: bool = False
    is_elementwise: bool = False

    @property
    def gradient_bytes(self) -> int:
        return aligned(4 * self.numel) if self.has_master else self.parameter_bytes

    def sent_bytes(self, *, runs_ahead: bool = False) -> int:
        """Return the bytes that a step on the host sends there: with an up-to-date float32 copy there, gradients alone."""
        is_enough = self.has_master and not runs_ahead
        return self.gradient_bytes + (0 if is_enough else self.parameter_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePiece:
    """Parameters whose states move together, and are stepped together.

    Attributes:
        parameters: their indices, in the order of the optimizer's groups.
        numel: their elements.
        parameter_bytes: their bytes.
        gradient_bytes: bytes of their gradients as they are stepped, in float32 if there are float32 copies; as many come back
            from the host.
        sent_bytes: bytes that a step on the host sends there if nobody wrote to parameters ahead of it.
        state_bytes: the bytes of their states, each rounded up to 512.
        is_resident: whether the states stay on the device.
        is_on_disk: whether the states are on a disk between steps.
        update: where they are stepped.
        slot: the slot that they use; -1 if they need none. Stepped within the backward, pieces take slots in turn, in the order
            of the previous backward.
        windows: the parts of a large parameter, in its order: each moves, and is stepped, by itself. Empty for others.
    """

    parameters: tuple[int, ...]
    numel: int
    parameter_bytes: int
    gradient_bytes: int
    sent_bytes: int
    state_bytes: int
    is_resident: bool = False
    is_on_disk: bool = False
    update: Update = Update.DEVICE
    slot: int = -1
    windows: tuple[StatePiece, ...] = ()

    @property
    def parts(self) -> tuple[StatePiece, ...]:
        """What moves at once: the windows, or else the piece."""
        return self.windows if self.windows and not self.is_resident else (self,)

    @property
    def way_bytes(self) -> int:
        """Bytes of gradients and parameters on their way to the host, with padding."""
        between = (2 * len(self.parameters) + 1) * ALIGNMENT_BYTES
        return aligned(self.gradient_bytes) + aligned(self.parameter_bytes) + between


def aligned(num_bytes: int) -> int:
    return rounded(num_bytes, ALIGNMENT_BYTES)


NUM_BUFFERS = 4  # buffers in host memory for pieces on a disk: some are being read, one is in use, others are being written
BLOCK_BYTES = 256 * 2**20  # host memory for pieces is allocated in blocks of about this size


def with_residents(pieces: list[StatePiece], budget_bytes: int, *, moves_large: bool = False) -> Iterator[StatePiece]:
    """Yield the pieces, with as many resident as fit, evenly spread: others are copied while these are stepped."""
    sizes = [piece.state_bytes for piece in pieces]
    least = min(filter(None, sizes), default=0)
    if 0 < budget_bytes < least:
        raise BudgetInfeasible(
            f"device_budget needs at least {format_bytes(least)}, the smallest piece of states, for anything to stay on the "
            f"device; found {format_bytes(budget_bytes)}. Raise it, or leave it out: then all states leave",
            least,
        )
    first = [index for index, piece in enumerate(pieces) if not (moves_large and piece.windows)]
    share = min(1.0, budget_bytes / max(1, sum(sizes[index] for index in first)))
    spread = _filled(evenly(first, sizes, share, most=budget_bytes), sizes, budget_bytes)
    packed = _filled(set(), sizes, budget_bytes)
    spread_bytes, packed_bytes = (sum(sizes[index] for index in chosen) for chosen in (spread, packed))
    staying = spread if spread_bytes >= 0.98 * packed_bytes else packed
    for index, piece in enumerate(pieces):
        yield replace(piece, is_resident=index in staying)


def _filled(chosen: set[int], sizes: Sequence[int], budget_bytes: int) -> set[int]:
    room = budget_bytes - sum(sizes[index] for index in chosen)
    for index in reversed(range(len(sizes))):
        if index not in chosen and sizes[index] <= room:
            chosen.add(index)
            room -= sizes[index]
    return chosen


def evenly(indices: Iterable[int], sizes: Sequence[int], share: float, *, most: float = math.inf) -> set[int]:
    """Return evenly spread indices whose sizes sum to about a share of the total, and at most to `most`."""
    chosen = set[int]()
    taken = passed = 0
    for index in indices:
        passed += sizes[index]
        # taken if that comes closer to the share of the sizes so far
        if taken + sizes[index] / 2 <= share * passed and taken + sizes[index] <= most:
            chosen.add(index)
            taken += sizes[index]
    return chosen


def interleaved(pieces: Sequence[StatePiece]) -> list[int]:
    """Return the indices of pieces in the quickest order: resident ones evenly spread between moving ones."""
    moving = [index for index, piece in enumerate(pieces) if not piece.is_resident]
    staying = [index for index, piece in enumerate(pieces) if piece.is_resident]
    moving_numel, staying_numel = (sum(pieces[index].numel for index in those) for those in (moving, staying))
    order: list[int] = []
    moved = stepped = num_taken = 0
    for index in moving:
        # taken if half of it is due by the moved elements
        while num_taken < len(staying):
            numel = pieces[staying[num_taken]].numel
            if (2 * stepped + numel) * moving_numel > 2 * moved * staying_numel:
                break
            order.append(staying[num_taken])
            stepped += numel
            num_taken += 1
        order.append(index)
        moved += pieces[index].numel
    return order + staying[num_taken:]


def side_by_side(sizes_bytes: Sequence[int]) -> list[list[int]]:
    """Return sizes in the same order, in blocks that are each allocated at once."""
    blocks: list[list[int]] = []
    room = 0
    for num_bytes in sizes_bytes:
        if num_bytes > room or not blocks:
            blocks.append([])
            room = max(BLOCK_BYTES, num_bytes)
        blocks[-1].append(num_bytes)
        room -= num_bytes
    return blocks


def held_bytes(sizes_bytes: Sequence[int]) -> int:
    return total_rounded(map(sum, side_by_side(sizes_bytes)), HOST_PAGE_BYTES)


def ring_bytes(pieces: Sequence[StatePiece]) -> tuple[int, ...]:
    sizes = [part.state_bytes for piece in pieces if piece.is_on_disk for part in piece.parts]
    return (max(sizes),) * min(NUM_BUFFERS, len(sizes)) if sizes else ()


def with_disk(pieces: Sequence[StatePiece], host_budget_bytes: int | None, *, is_backward: bool = False) -> list[StatePiece]:
    """Return pieces with those on the disk that host memory has no room for, the last to be stepped; without a budget, all."""
    moving = [index for index, piece in enumerate(pieces) if not piece.is_resident and piece.state_bytes]
    moving = moving[::-1] if is_backward else moving
    in_host: list[int] = []
    if host_budget_bytes is not None:
        sizes = [pieces[index].state_bytes for index in moving]
        if held_bytes(sizes) <= host_budget_bytes:
            return list(pieces)
        ring = [_on_disk(pieces[index]) for index in moving]
        left_bytes = host_budget_bytes - total_rounded(ring_bytes(ring), HOST_PAGE_BYTES)
        if left_bytes < 0:
            raise HostMemoryError(
                f"StateOffload needs a host_budget of at least {format_bytes(host_budget_bytes - left_bytes)}, for the buffers "
                f"that states pass through on their way from and to the disk; found {format_bytes(host_budget_bytes)}. Raise "
                "it, or leave it out: then no more than these buffers is taken"
            )
        for index, num_bytes in zip(moving, sizes, strict=True):
            if held_bytes([*(pieces[other].state_bytes for other in in_host), num_bytes]) > left_bytes:
                break
            in_host.append(index)
    on_disk = {*moving} - {*in_host}
    return [_on_disk(piece) if index in on_disk else piece for index, piece in enumerate(pieces)]


def _on_disk(piece: StatePiece) -> StatePiece:
    return replace(piece, is_on_disk=True, windows=tuple(replace(window, is_on_disk=True) for window in piece.windows))


PIECE_BYTES = 64 * 2**20  # a copy of this size reaches the link's full speed
_LARGEST_PIECE_BYTES = 168 * 2**20  # with four slots, and the undo copy of a failed step, less than a GiB
WINDOW_NUMEL = 2**16  # windows begin at multiples of this, as blocks of kernels over lists of tensors do, and so are aligned


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePlan:
    """Where the states of an optimizer are, and where each piece of them is stepped.

    Attributes:
        pieces: all states, in the order of the optimizer's groups.
        slot_bytes: the size of each slot on the device for pieces in transfer.
    """

    pieces: tuple[StatePiece, ...]
    slot_bytes: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        return all(piece.is_resident for piece in self.pieces)

    @property
    def resident_bytes(self) -> int:
        return sum(piece.state_bytes for piece in self.pieces if piece.is_resident)

    @property
    def host_bytes(self) -> int:
        return sum(piece.state_bytes for piece in self.pieces if not piece.is_resident and not piece.is_on_disk)

    @property
    def disk_bytes(self) -> int:
        """Bytes of states on the disk: each step reads and writes them."""
        return sum(piece.state_bytes for piece in self.pieces if piece.is_on_disk)

    @property
    def ring_bytes(self) -> tuple[int, ...]:
        """The sizes of the host buffers that states pass through on their way from and to the disk."""
        return ring_bytes(self.pieces)

    @property
    def room_bytes(self) -> int:
        return sum(self.slot_bytes)

    @property
    def undo_bytes(self) -> int:
        """Bytes of the device for the old parameters of the largest piece or window during a step."""
        on_device = [piece for piece in self.pieces if piece.update is Update.DEVICE]
        return max((part.parameter_bytes for piece in on_device for part in piece.parts), default=0)

    def explain(self) -> str:
        """Return in sentences where the states are, where they are stepped, and what moves in a step.

        Example:
            >>> from memkit.plan import ParameterCosts, plan_states
            >>> costs = [ParameterCosts(name=str(i), numel=2**20, parameter_bytes=2**22, state_bytes=2**23) for i in range(8)]
            >>> print(plan_states(costs).explain())
            64.00 MiB of states in 8 pieces: 64.00 MiB in host memory, 0 bytes stay on the device.
            On the device 32.00 MiB are for pieces on their way, in 4 slots.
            8 pieces are stepped on the device, 0 on the host.
            A step copies 64.00 MiB of states each way.
        """
        moving = [piece for piece in self.pieces if not piece.is_resident]
        cut = [piece for piece in moving if piece.windows]
        on_host = sum(piece.update is Update.HOST for piece in moving)
        on_disk = f" {format_bytes(self.disk_bytes)} on the disk," if self.disk_bytes else ""
        streamed = sum(piece.state_bytes for piece in moving if piece.update is Update.DEVICE)
        lines = [
            f"{format_bytes(self.host_bytes + self.disk_bytes + self.resident_bytes)} of states in "
            f"{_count(len(self.pieces), 'piece')}: {format_bytes(self.host_bytes)} in host memory,{on_disk} "
            f"{format_bytes(self.resident_bytes)} stay on the device.",
            f"On the device {format_bytes(self.room_bytes)} are for pieces on their way, "
            f"in {_count(len(self.slot_bytes), 'slot')}.",
            f"{_count(len(self.pieces) - on_host, 'piece')} are stepped on the device, {on_host} on the host.",
            f"A step copies {format_bytes(streamed)} of states each way.",
        ]
        if on_host:
            sent = [piece for piece in moving if piece.update is Update.HOST]
            lines.append(
                f"For the host it copies {format_bytes(sum(piece.sent_bytes for piece in sent))} of gradients and parameters "
                f"there, and {format_bytes(sum(piece.gradient_bytes for piece in sent))} back."
            )
        if cut:
            num_windows = sum(len(piece.windows) for piece in cut)
            lines.insert(1, f"Of {_count(len(cut), 'large parameter')} parts move by themselves: {num_windows} of them.")
        if self.disk_bytes:
            lines.append(
                f"It reads {format_bytes(self.disk_bytes)} from the disk and writes as many: 1,000 steps write "
                f"{terabytes_written(self.disk_bytes):.3g} TB. On their way they pass through "
                f"{_count(len(self.ring_bytes), 'buffer')} in host memory, {format_bytes(sum(self.ring_bytes))} in all."
            )
        return "\n".join(lines)


def plan_states(
    costs: Sequence[ParameterCosts],
    *,
    device_budget_bytes: int = 0,
    update: str = "device",
    apart: bool = False,
    has_disk: bool = False,
    host_budget_bytes: int | None = None,
    runs_ahead: bool = False,
) -> StatePlan:
    """Return which parameters form a piece, which pieces stay on the device, and where each is stepped.

    A step goes through all states once, in the same order, so no choice of residents is better than a fixed one.

    Args:
        costs: of each parameter, in the order of the optimizer's groups.
        device_budget_bytes: how many bytes of states may stay on the device.
        update: "device" or "host".
        apart: whether each parameter is a piece of its own, stepped within the backward.
        has_disk: whether states that leave the device may be on a disk.
        host_budget_bytes: with a disk, how much host memory may be used; None for the buffers only.
        runs_ahead: whether parameters are stepped beside a forward or within a backward. All gradients may then be sent to the
            host before any step there, so parameters always go along; and large parameters stay as readily as others.

    Raises:
        BudgetInfeasible: the budget is above 0, and smaller than the smallest piece.
        HostMemoryError: with a disk, `host_budget_bytes` has no room for the buffers.
    """
    # Of pieces stepped on the host only gradients are copied; and between pieces the stepping thread waits for the interpreter.
    usual = 2 * PIECE_BYTES if update == "host" and not (apart or has_disk) else PIECE_BYTES
    whole = sum(cost.state_bytes for cost in costs)
    most = min(max(usual, whole // 128), max(usual, _LARGEST_PIECE_BYTES))
    most = min(most, max(1, whole // 16))  # of small models there are so many pieces, so that copies and steps overlap
    groups, num_bytes = list[list[int]](), 0
    for index, cost in enumerate(costs):
        if not groups or apart or num_bytes + cost.state_bytes > most:
            groups.append([])
            num_bytes = 0
        groups[-1].append(index)
        num_bytes += cost.state_bytes
    pieces = [
        StatePiece(
            parameters=tuple(members),
            numel=sum(costs[index].numel for index in members),
            parameter_bytes=sum(costs[index].parameter_bytes for index in members),
            gradient_bytes=sum(costs[index].gradient_bytes for index in members),
            sent_bytes=sum(costs[index].sent_bytes(runs_ahead=runs_ahead) for index in members),
            state_bytes=sum(costs[index].state_bytes for index in members),
            windows=_windows(members[0], costs[members[0]], most, runs_ahead) if len(members) == 1 else (),
        )
        for members in groups
    ]
    pieces = list(with_residents(pieces, device_budget_bytes, moves_large=not runs_ahead))
    if has_disk:
        pieces = with_disk(pieces, host_budget_bytes, is_backward=apart)
    if update != "device":
        pieces = [piece if piece.is_resident else replace(piece, update=Update.HOST) for piece in pieces]
    pieces, slot_bytes = _with_slots(pieces, max(PIECE_BYTES, most))
    return StatePlan(pieces=tuple(pieces), slot_bytes=slot_bytes)


def is_large(cost: ParameterCosts) -> bool:
    return cost.state_bytes > PIECE_BYTES and cost.numel > WINDOW_NUMEL


def _windows(index: int, cost: ParameterCosts, most: int, runs_ahead: bool) -> tuple[StatePiece, ...]:
    num_windows = -(-cost.state_bytes // max(PIECE_BYTES, most))
    length = rounded(-(-cost.numel // max(1, num_windows)), WINDOW_NUMEL)
    if not cost.is_elementwise or not is_large(cost) or length >= cost.numel:
        return ()

    def window(start: int) -> StatePiece:
        numel = min(length, cost.numel - start)

        def share(whole: int) -> int:  # the last window has the padding at the end of each state and of the parameter
            return whole - whole // cost.numel * start if start + numel == cost.numel else whole // cost.numel * numel

        return StatePiece(
            parameters=(index,),
            numel=numel,
            parameter_bytes=share(cost.parameter_bytes),
            gradient_bytes=share(cost.gradient_bytes),
            sent_bytes=share(cost.sent_bytes(runs_ahead=runs_ahead)),
            state_bytes=share(cost.state_bytes),
        )

    return tuple(map(window, range(0, cost.numel, length)))


def _with_slots(pieces: list[StatePiece], most: int) -> tuple[list[StatePiece], tuple[int, ...]]:
    sizes: list[int] = []
    slots: dict[int, list[int]] = {number: [] for number in range(len(pieces))}
    for update in Update:
        parts = [
            (number, part)
            for number, piece in enumerate(pieces)
            if piece.update is update and not piece.is_resident
            for part in piece.parts
        ]
        # One piece comes, one is stepped and one leaves; on the host gradients may queue each way behind a larger piece.
        num_slots = 4 if update is Update.DEVICE else 6
        rooms = [part.state_bytes if update is Update.DEVICE else part.way_bytes for _, part in parts]
        # Oversized pieces share the first slot, the others take turns.
        usual = max((room for room in rooms if room <= 2 * most), default=0)
        has_large = max(rooms, default=0) > usual
        num_usual = min(num_slots - has_large, sum(room <= usual for room in rooms))
        turns = itertools.cycle(range(len(sizes) + has_large, len(sizes) + has_large + num_usual))
        for (number, _), room in zip(parts, rooms, strict=True):
            slots[number].append(next(turns) if room <= usual else len(sizes))
        sizes += [max(rooms, default=0)] * has_large + [usual] * num_usual
    return [in_slots(piece, slots[number]) for number, piece in enumerate(pieces)], tuple(sizes)


def in_slots(piece: StatePiece, slots: Sequence[int]) -> StatePiece:
    if not slots:
        return piece
    windows = (replace(part, slot=slot, update=piece.update) for part, slot in zip(piece.windows, slots, strict=False))
    return replace(piece, slot=slots[0], windows=tuple(windows))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def disk_bytes(chunk_bytes: Iterable[int], *, num_written_at_once: int = 3) -> int:
    """Return the disk space that chunks need: each in whole pages of 4 KiB, and the largest once more for each chunk being
    written, since its old bytes stay until the new ones are there.

    Args:
        chunk_bytes: of each chunk.
        num_written_at_once: how many may be on their way to the disk.

    Raises:
        TypeError: a size is no number of bytes.
        ValueError: one is negative, or fewer than one is written at once.

    Example:
        >>> disk_bytes([4096, 5000], num_written_at_once=1)
        20480
    """
    if num_written_at_once < 1:
        raise ValueError(f"num_written_at_once must be 1 or more; found {num_written_at_once}")
    pages = [-(-check_bytes("chunk_bytes", num_bytes) // DISK_PAGE_BYTES) for num_bytes in chunk_bytes]
    return DISK_PAGE_BYTES * (sum(pages) + min(num_written_at_once, len(pages)) * max(pages, default=0))


def terabytes_written(disk_bytes: int, *, num_steps: int = 1000, kept_bytes: int = 0) -> float:
    """Return how many terabytes (10¹² bytes) some steps write to a disk that holds optimizer states.

    Each step writes all of them, except for those that are still in host memory when their turn comes again. A consumer SSD is
    rated for 600 or so in all.

    Args:
        disk_bytes: of the chunks on the disk.
        num_steps: steps of the optimizer.
        kept_bytes: of these, the bytes that stay in host memory from the end of a step to the begin of the next, if every other
            step goes through the chunks backward.

    Raises:
        TypeError: a size is no number of bytes.
        ValueError: an argument is negative.

    Example:
        >>> terabytes_written(81_000_000_000)
        81.0
    """
    if num_steps < 0:
        raise ValueError(f"num_steps must be 0 or more; found {num_steps}")
    per_step = max(check_bytes("disk_bytes", disk_bytes) - check_bytes("kept_bytes", kept_bytes), 0)
    return per_step * num_steps / 1e12


def disk_step_s(disk_bytes: int, *, read_bytes_per_s: float, write_bytes_per_s: float) -> float:
    """Return the seconds in which a step reads and writes all chunks on a disk that does one of the two at a time.

    Raises:
        TypeError: the size is no number of bytes.
        ValueError: it is negative, or a speed is not positive.

    Example:
        >>> disk_step_s(20_000_000_000, read_bytes_per_s=2e9, write_bytes_per_s=1e9)
        30.0
    """
    for name, speed in (("read_bytes_per_s", read_bytes_per_s), ("write_bytes_per_s", write_bytes_per_s)):
        if not 0 < speed < math.inf:
            raise ValueError(f"{name} must be above 0; found {speed}")
    num_bytes = check_bytes("disk_bytes", disk_bytes)
    return num_bytes / read_bytes_per_s + num_bytes / write_bytes_per_s
