"""Finds the largest batch that fits, by tracing few of them."""

from __future__ import annotations

from collections.abc import Callable


def largest(num_bytes: Callable[[int], int], budget_bytes: int, *, begin: int, most: int) -> tuple[int, bool]:
    """Return the largest batch that fits in a budget, and whether one more was found not to.

    Bytes rise with the batch, and almost in proportion: batches are guessed by a line through the two that enclose the answer,
    and halved where that does not help. Where the first does not fit, smaller ones are tried, down to none.

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
            if high is None and len(tried) <= most and not fits(low + 1):  # a line through two is often right at once
                high = low + 1
        else:
            high = guess
    return low, high is not None and high - low <= 1


def _guess(low: int, high: int | None, tried: dict[int, int], budget_bytes: int) -> int:
    below = sorted(batch for batch in tried if 0 < batch <= low)
    if high is None:
        if len(below) < 2:
            return 2 * low
        return max(low + 1, min(_on_line(below[-2], below[-1], tried, budget_bytes), 16 * low))
    ends = (low, high) if low > 0 else None
    guess = (low + high) // 2 if ends is None or len(tried) % 4 == 0 else _on_line(*ends, tried, budget_bytes)
    return max(low + 1, min(guess, high - 1))


def _on_line(first: int, second: int, tried: dict[int, int], budget_bytes: int) -> int:
    rise = max((tried[second] - tried[first]) / (second - first), 1e-9)
    return int(min(first + (budget_bytes - tried[first]) / rise, 2**40))
