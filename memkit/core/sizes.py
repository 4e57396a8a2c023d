"""Reads and writes bytes and shares as text. No torch here: the command line reads its arguments with this alone."""

from __future__ import annotations

import re
from collections.abc import Iterable
from numbers import Integral, Real

MIB = 1024**2
ALIGNMENT_BYTES = 512  # neighboring tensors in one storage begin at multiples of this, as in CUDA's allocator
DISK_PAGE_BYTES = 4096  # reads and writes past the system's cache are in whole pages, in the file and in memory
HOST_PAGE_BYTES = 2 * 2**20  # a huge page: pinned host memory comes in whole ones
_UNITS = {"": 1, "B": 1}
_UNITS |= {prefix + unit: base**at for at, prefix in enumerate("KMGT", 1) for unit, base in (("B", 1000), ("IB", 1024))}
_STEPS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_FEWEST_BUDGET_BYTES = 1024


def rounded(number: int, to: int) -> int:
    return -(-number // to) * to


def total_rounded(numbers: Iterable[int], to: int) -> int:
    total = 0
    for number in numbers:
        total += -(-number // to) * to
    return total


def format_mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.2f} MiB"


def format_bytes(num_bytes: int) -> str:
    """Return bytes as MiB with two decimals; fewer than 1 MiB as KiB (1024 bytes) or plain bytes."""
    if num_bytes >= MIB:
        return format_mib(num_bytes)
    if num_bytes >= 1024:
        return f"{num_bytes / 1024:.2f} KiB"
    return "1 byte" if num_bytes == 1 else f"{num_bytes} bytes"


def format_gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else format_bytes(num_bytes)


def unit_of(num_bytes: int) -> tuple[str, int]:
    """Return the unit to write bytes in, and its bytes: GiB from 1 GiB on, then MiB, then KiB."""
    return next((unit, size) for unit, size in _STEPS if num_bytes >= size or size == 1024)


def check_bytes(name: str, value: int | str) -> int:
    """Return an argument of 0 or more bytes, given as a number (also one of NumPy's) or as text with a unit."""
    if isinstance(value, bool) or not isinstance(value, Integral | str):
        raise TypeError(f'{name} is a number of bytes, or text such as "8GiB"; found {value!r}')
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if match is None or match[2].upper() not in _UNITS:
            raise ValueError(f'{name} is a number of bytes, or text such as "8GiB" or "512 MiB"; found "{value}"')
        return round(float(match[1]) * _UNITS[match[2].upper()])
    if value < 0:
        raise ValueError(f"{name} is a number of bytes, 0 or more; found {value}")
    return int(value)


def check_budget_bytes(name: str, value: int | str, *, may_be_zero: bool = False) -> int:
    """Return a positive number of bytes, given as such or as text; a small number without a unit is refused as a mistake."""
    is_negative = isinstance(value, Integral) and value < 0
    num_bytes = 0 if is_negative and not may_be_zero else check_bytes(name, value)
    if num_bytes == 0 and not may_be_zero:
        raise ValueError(f"{name} must be more than 0 bytes; found {value!r}")
    if 0 < num_bytes < _FEWEST_BUDGET_BYTES and (not isinstance(value, str) or value.strip().isdecimal()):
        raise ValueError(
            f"{name}={value!r} reads as {format_bytes(num_bytes)} or as {num_bytes} GiB. "
            f'Write "{num_bytes}B" or "{num_bytes}GiB"'
        )
    return num_bytes


def check_budget(budget: int | float | str, *, share: str = "share of the saved bytes that stays") -> int | float:
    """Return a budget as bytes (an int) or as a share (a float above 0, at most 1) of what `share` names for the errors."""
    if isinstance(budget, Real) and not isinstance(budget, Integral):  # NumPy's as well
        budget = float(budget)
        if not 0 < budget <= 1:
            is_small = 1 < budget < _FEWEST_BUDGET_BYTES
            hint = f'"{budget:g}B" or "{budget:g}GiB"' if is_small else 'an int, or text such as "8GiB"'
            raise ValueError(
                f"a budget that is a float is the {share}, above 0 and at most 1; found {budget}. For bytes write {hint}"
            )
        return budget
    if isinstance(budget, bool) or not isinstance(budget, Integral | str):
        raise TypeError(f'budget is bytes (an int), text such as "8GiB", or a share (a float up to 1); found {budget!r}')
    if isinstance(budget, str):
        number = re.fullmatch(r"\s*(\d*\.\d+|\d+(?:\.\d+)?\s*%)\s*", budget)
        if number is not None:
            text = number[1]
            value = float(text.removesuffix("%")) / 100 if text.endswith("%") else float(text)
            raise ValueError(
                f'budget="{budget}" has no unit of bytes. For a {share} write the float {value:g}, '
                'for bytes an int, or text such as "8GiB"'
            )
    if str(budget).strip() == "1":
        raise ValueError(f'budget={budget!r} reads as 1 byte or as everything. Write "1B" or the float 1.0')
    return check_budget_bytes("budget", budget)
