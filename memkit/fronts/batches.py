"""Finds the largest batch that fits, by tracing few of them."""

from __future__ import annotations

from collections.abc import Callable


def largest(num_bytes: Callable[[int], int], budget_bytes: int, *, begin: int, most: int) -> tuple[int, bool]:
    """Return the largest batch that fits in a budget, and whether one more was found not to.

    Bytes rise with the batch, and almost in proportion: batches are guessed by a line through two that were tried, those that
    enclose the answer if there are such, and halved where that does not help. Where the first does not fit, smaller ones are
    tried, down to none.

    Args:
        num_bytes: what a batch of so many samples takes.
        budget_bytes: what it may take.
        begin: the batch to try first, 1 or more.
        most: how many batches may be tried.

    Example:
        >>> largest(lambda batch: 10 + 3 * batch, 100, begin=4, most=10)
        (30, True)
    """
    tried = {0: 0}

    def fits(batch: int) -> bool:
        if batch not in tried:
            tried[batch] = num_bytes(batch)
        return tried[batch] <= budget_bytes

    low, high = (begin, None) if fits(begin) else (0, begin)
    while len(tried) <= most and (high is None or high - low > 1):
        guess = _guess(low, high, tried, budget_bytes)
        if fits(guess):
            low = guess
        else:
            high = guess
    return low, high is not None and high - low <= 1


def _guess(low: int, high: int | None, tried: dict[int, int], budget_bytes: int) -> int:
    known = sorted(tried)
    if high is None:
        if len(known) == 2:  # none, and the first
            return 2 * low
        return max(low + 1, min(_on_line(known[-2], known[-1], tried, budget_bytes), 16 * low))
    if low > 0 and len(tried) % 4 == 0:
        return (low + high) // 2
    # Through the least two that don't fit, where none is known to; and in proportion to the only one.
    first, second = (low, high) if low > 0 or len(known) == 2 else (known[1], known[2])
    guess = _on_line(first, second, tried, budget_bytes)
    return max(low + 1, min(guess, high - 1))


def _on_line(first: int, second: int, tried: dict[int, int], budget_bytes: int) -> int:
    rise = max((tried[second] - tried[first]) / (second - first), 1e-9)
    return int(min(first + (budget_bytes - tried[first]) / rise, 2**40))
