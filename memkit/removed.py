"""The answers for removed features: since when, and what to use instead. Each is kept for one version."""

from __future__ import annotations

from collections.abc import Sequence

_COMMANDS = {
    ("bench", "offload"): "run examples/bench/bench_offload.py, or `memkit plan SPEC --gpu NAME` without a GPU",
    ("bench", "remat"): "run examples/bench/bench_remat.py, or `memkit plan SPEC --gpu NAME` without a GPU",
    ("bench", "layers"): "run examples/bench/bench_layers.py",
}


def removed(what: str, instead: str) -> str:
    """Return the answer for a removed option, argument or command. `what` is as the user wrote it, such as `--csv` or
    `StateOffload(update="both")`; `instead` is a clause such as "use --json"."""
    return f"{what} was removed in 0.2; {instead}"


def removed_command(words: Sequence[str]) -> str | None:
    """Return the answer if the words of a command line begin with a removed command, else None."""
    for command, instead in _COMMANDS.items():
        if tuple(words[: len(command)]) == command:
            return removed(f"`memkit {' '.join(command)}`", instead)
    return None
