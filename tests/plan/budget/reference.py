"""What a step takes that goes by given moments, told in the plainest way: every byte is looked for in every slot, and every
copy is followed by itself."""

from __future__ import annotations

from memkit.plan import NO_OP, Action
from memkit.plan.budget.problem import Problem
from memkit.plan.budget.simulate import Simulated


def held_in(problem: Problem, simulated: Simulated, index: int, slot: int) -> bool:
    """Tell whether a value is on the device in a slot."""
    held, action = problem.values[index], simulated.actions[index]
    until = max(held.freed, simulated.held_until.get(held.value, -1) + 1)
    if action is Action.KEEP:
        return (held.released if held.is_anchor else held.made) <= slot < until
    if action is Action.OFFLOAD:
        move = next(move for move in simulated.moves if move.index == index)
        begin = held.released if held.is_anchor else held.made
        return begin <= slot < problem.points[move.let_go] or problem.points[move.fetch] <= slot < until
    if held.is_anchor:
        return False
    made_again = [problem.points[replay.point] for replay in simulated.replays if index in (replay.index, *replay.stays)]
    dropped = max(held.released, held.saved)
    return held.made <= slot < dropped or any(max(again, dropped) <= slot < held.freed for again in made_again)


def bytes_in(problem: Problem, simulated: Simulated, slot: int) -> int:
    total = sum(held.num_bytes for index, held in enumerate(problem.values) if held_in(problem, simulated, index, slot))
    for root, (begin, num_bytes) in problem.retained.items():
        total += num_bytes * (begin <= slot <= simulated.held_until.get(root, -1))
    return total


def replay_bytes(problem: Problem, simulated: Simulated, number: int) -> int:
    """Return the most bytes that one replay takes beyond what was there as its requests begin, told op by op."""
    lineage, replay = problem.lineage, simulated.replays[number]
    stays = {problem.values[index].value for index in (replay.index, *replay.stays)}
    there: set[int] = set()
    most = 0
    for place, op in enumerate(replay.ops):
        later = {value for after in replay.ops[place:] for value in lineage.ins[after]}
        overwritten = {over for over, _ in lineage.taken.get(op, ())}
        still = {value for after in replay.ops[place + 1 :] for value in lineage.ins[after]}
        there = {
            value for value in there if value in later | stays and not (value in overwritten and value not in still | stays)
        }
        there |= set(lineage.outs[op])
        most = max(most, sum(lineage.num_bytes[value] for value in there))
    return most


def peak_bytes(problem: Problem, simulated: Simulated) -> int:
    """Return the most bytes at once."""
    most = max(problem.working_bytes[slot] + bytes_in(problem, simulated, slot) for slot in range(problem.num_slots))
    for number, replay in enumerate(simulated.replays):
        slot = problem.points[replay.point]
        made = {replay.index, *replay.stays}
        later = {
            index
            for other in simulated.replays[number + 1 :]
            for index in other.stays
            if problem.points[other.point] == slot and problem.values[index].use > slot
        }
        there = problem.request_bytes[slot] + bytes_in(problem, simulated, slot)
        there -= sum(problem.values[index].num_bytes for index in made | later if held_in(problem, simulated, index, slot))
        most = max(most, there + replay_bytes(problem, simulated, number))
    return problem.base_bytes + most


def is_made_from_what_is_there(problem: Problem, simulated: Simulated) -> bool:
    """Tell whether each op of each replay reads nothing but what is there or was made before it."""
    for replay in simulated.replays:
        slot, made = problem.points[replay.point], set()
        for op in replay.ops:
            for value in problem.lineage.ins[op]:
                index = problem.index.get(value)
                is_held = problem.lineage.maker[value] == NO_OP or (
                    index is not None and held_in(problem, simulated, index, slot)
                )
                if not (is_held or value in made):
                    return False
            made.update(problem.lineage.outs[op])
        if problem.values[replay.index].value not in made:
            return False
    return True


def seconds(problem: Problem, simulated: Simulated) -> float:
    """Return how long the step takes, moment by moment."""
    gpu, values = problem.gpu, problem.values
    now = out_free = back_free = 0.0
    copied, fetched = {}, {}
    for slot in range(problem.num_slots):
        if slot in problem.points:
            point = problem.points.index(slot)
            for move in simulated.moves:
                if move.copy == point:
                    out_free = max(out_free, now) + gpu.copy_latency_s + values[move.index].num_bytes / gpu.d2h_bytes_per_s
                    copied[move.index] = out_free
            for move in simulated.moves:
                if move.let_go == point:
                    now = max(now, copied[move.index])
            for move in simulated.moves:
                if move.fetch == point:
                    back_free = max(back_free, now) + gpu.copy_latency_s + values[move.index].num_bytes / gpu.h2d_bytes_per_s
                    fetched[move.index] = back_free
            for move in simulated.moves:
                if move.need == point:
                    now = max(now, fetched[move.index])
            for replay in simulated.replays:
                if replay.point == point:
                    now += sum(problem.op_s[op] for op in replay.ops)
        now += problem.starts_s[slot + 1] - problem.starts_s[slot]
    return now
