"""What to say where nothing that autograd saves is large enough for a context to do anything with."""

from __future__ import annotations

from collections.abc import Collection

from memkit.sizes import format_bytes


def all_too_small(sizes_bytes: Collection[int], min_bytes: int, *, done: str) -> str:
    """Return the warning for a forward whose saved tensors are all smaller than `min_bytes`.

    Args:
        sizes_bytes: of the distinct ones, at least one.
        done: what would have been done with larger ones: "moved", "dropped".
    """
    found = (
        "the only saved tensor has"
        if len(sizes_bytes) == 1
        else (f"the {len(sizes_bytes)} saved tensors have {format_bytes(sum(sizes_bytes))} in all, and the largest")
    )
    return (
        f"nothing was {done}: only tensors of at least min_bytes ({format_bytes(min_bytes)}) are, and {found} "
        f"{format_bytes(max(sizes_bytes))}. Pass a smaller min_bytes (min_bytes=0 to try it out), or leave the context out: "
        "where all tensors are as small as these it saves little."
    )
