"""Parses the arguments of the `memkit` command. No torch here."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence

from memkit.core.sizes import check_budget

DTYPES = {
    **dict.fromkeys(("float32", "fp32", "f32", "float"), "float32"),
    **dict.fromkeys(("float64", "fp64", "f64", "double"), "float64"),
    **dict.fromkeys(("float16", "fp16", "f16", "half"), "float16"),
    **dict.fromkeys(("bfloat16", "bf16"), "bfloat16"),
    **dict.fromkeys(("int64", "i64", "long"), "int64"),
    **dict.fromkeys(("int32", "i32", "int"), "int32"),
    **dict.fromkeys(("int16", "i16", "short"), "int16"),
    **dict.fromkeys(("int8", "i8"), "int8"),
    **dict.fromkeys(("uint8", "u8"), "uint8"),
    "bool": "bool",
    **dict.fromkeys(("complex64", "c64"), "complex64"),
}

Input = tuple[str, tuple[int, ...], str | None]  # its keyword or "", its shape, and torch's name of its dtype
SPEC_FORMS = "torchvision:NAME, timm:NAME, hf:CONFIG.json or package.module:factory"


def input_of(text: str) -> Input:
    name, equals, rest = text.partition("=")
    if equals and not name.isidentifier():
        raise argparse.ArgumentTypeError(f"needs the name of an argument ahead of =, such as input_ids; found {name!r}")
    shape_text, colon, dtype_text = (rest if equals else text).partition(":")
    sizes = shape_text.split("x")
    if not all(size.isdecimal() for size in sizes):
        raise argparse.ArgumentTypeError(f"needs sizes of 0 or more joined by x, such as 256x3x224x224; found {shape_text!r}")
    if colon and dtype_text not in DTYPES:
        raise argparse.ArgumentTypeError(f"knows no dtype {dtype_text!r}; it knows {', '.join(DTYPES)}")
    return name if equals else "", tuple(map(int, sizes)), DTYPES[dtype_text] if colon else None


def nearest_spec(text: str) -> str:
    if text.endswith(".json") or os.path.isdir(text) or ("/" in text and not text.endswith(".py")):
        return f"hf:{text}"
    if text.endswith(".py"):
        return f"{text.removesuffix('.py').replace('/', '.').lstrip('.')}:factory, with the name of a function or class in it"
    package, dot, name = text.rpartition(".")
    if dot:
        return f"{package}:{name}"
    return f"torchvision:{text} or timm:{text}" if text else "torchvision:resnet50"


def dtype(text: str, names: Sequence[str]) -> str:
    if DTYPES.get(text) not in names:
        known = [spelling for spelling, name in DTYPES.items() if name in names]
        raise argparse.ArgumentTypeError(f"needs one of {', '.join(known)}; found {text!r}")
    return DTYPES[text]


def budgets(text: str) -> list[float | str]:
    return [size(part) for part in text.split(",")]


def size(text: str) -> float | str:
    """Return a share for a number up to 1, and bytes for a larger integer or a text with a unit."""
    text = text.strip()
    try:
        share = float(text)
    except ValueError:
        share = math.inf
    budget = share if share <= 1 or (share < math.inf and not text.isdecimal()) else text
    try:
        check_budget(budget)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"needs shares above 0 and up to 1, or bytes, joined by commas, such as 1,0.5,8GiB; found {text!r}: {error}"
        ) from None
    return budget


def whole(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"needs a whole number, {least} or more; found {text!r}")
    return int(text)
