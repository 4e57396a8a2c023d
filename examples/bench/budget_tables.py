"""Put what bench_budget.py has printed into the tables of a page.

    python examples/bench/bench_budget.py > lines.jsonl
    python examples/bench/budget_tables.py lines.jsonl docs/benchmarks/budget_h200_2026-11.md

See `markdown_tables.py` for where a table stands.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

from markdown_tables import (
    Row,
    Table,
    as_number,
    as_ratio,
    bold,
    filled,
    in_ms,
    last_by,
    lines_of,
    machine,
    made_of,
    main,
    rows_of,
)
from shared import Line

SPACED = ("gpt2", "whisper")
COMPILED = ("llama", "resnet50")
FRONTS = ("resnet50", "llama", "gpt2", "whisper")
_PREDICTED = "peak, MiB | of the budget | / predicted | step / predicted | plans"
_DONE = "kept to by | ops again | moved, MiB | stalls, ms"
__all__ = ["filled", "tables"]


def tables(lines: Sequence[Line]) -> dict[str, str]:
    """Return the tables of which there are lines, by their names, as markdown."""
    return made_of(lines, _TABLES)


def _mib(number: float | None) -> str:
    return "-" if number is None else f"{number:.0f}"


def _predicted(line: Line) -> Row:
    return [
        *(_mib(line["peak_allocated_mib"]), as_ratio(line["peak_to_budget"]), bold(as_ratio(line["peak_to_predicted"]))),
        *(bold(as_ratio(line["seconds_to_predicted"])), as_number(line["num_plans"])),
    ]


def _done(line: Line) -> Row:
    return [line["way"], as_number(line["num_replayed_ops"]), _mib(line["moved_mib"]), in_ms(line["stall_s"])]


def _asked(line: Line) -> str:
    """Return what was asked for, in MiB where that is known."""
    asked = line.get("budget_mib")
    return str(line["asked"]) if asked is None else f"{asked:.0f}"


def _budgets(model: str, lines: Sequence[Line]) -> Table:
    header = f"{model}: budget, MiB | plain, ms | memkit, ms | / plain | predicted / plain | {_PREDICTED} | {_DONE}"
    found = last_by(lambda line: line["asked"], lines_of(lines, "budget", model=model))

    def cells(line: Line) -> Row:
        times = [in_ms(line["plain_s"]), in_ms(line["step_s"]), bold(as_ratio(line["ratio"]))]
        return [*times, as_ratio(line["predicted_ratio"]), *_predicted(line), *_done(line)]

    return header, rows_of(found, header, lambda line: [_asked(line)], cells)


def _beside(lines: Sequence[Line]) -> Table:
    header = (
        "ResNet-50: budget, MiB | memkit, ms | peak, MiB | `Rematerialize` | its step, ms | its peak, MiB | memkit / that | "
        "bound, ms | memkit / bound"
    )
    found = last_by(lambda line: line["asked"], lines_of(lines, "budget", model="resnet50"))

    def cells(line: Line) -> Row:
        bound_s = line.get("bound_s")
        return [
            *(in_ms(line["step_s"]), _mib(line["peak_allocated_mib"]), f"{line['remat_share']:g}"),
            *(in_ms(line.get("remat_s")), _mib(line.get("remat_peak_mib")), bold(as_ratio(line.get("to_remat")))),
            *(in_ms(bound_s), as_ratio(line["predicted_s"] / bound_s if bound_s else None)),
        ]

    return header, rows_of(found, header, lambda line: [_asked(line)], cells)


def _checkpoints(lines: Sequence[Line]) -> Table:
    header = "all blocks checkpointed | blocks | plain, ms | plain's peak, MiB | checkpointed, ms | / plain | peak, MiB"

    def cells(line: Line) -> Row:
        return [
            *(as_number(line["num_layers"]), in_ms(line["plain_s"]), _mib(line["plain_peak_mib"])),
            *(in_ms(line["checkpoint_s"]), bold(as_ratio(line["checkpoint_ratio"])), _mib(line["checkpoint_peak_mib"])),
        ]

    found = last_by(lambda line: line["model"], lines_of(lines, "budget_checkpoints"))
    return header, rows_of(found, header, lambda line: [line["model"]], cells)


def _spaced(model: str, lines: Sequence[Line]) -> Table:
    header = (
        f"{model}: share of the plain peak | budget, MiB | memkit, ms | / plain | layers checkpointed | checkpointing, ms | "
        f"/ checkpointing | {_PREDICTED} | checkpointing's peak, MiB | {_DONE}"
    )
    found = last_by(lambda line: line["share"], lines_of(lines, "budget", model=model))

    def cells(line: Line) -> Row:
        reaches = "" if line["spaced_reaches_peak"] else " (needs more)"
        return [
            *(_mib(line["budget_mib"]), in_ms(line["step_s"]), bold(as_ratio(line["ratio"]))),
            *(f"{line['num_checkpointed']} of {line['num_layers']}{reaches}", in_ms(line["spaced_s"])),
            *(bold(as_ratio(line["to_spaced"])), *_predicted(line), _mib(line["spaced_peak_mib"]), *_done(line)),
        ]

    return header, rows_of(found, header, lambda line: [f"{line['share']:g}"], cells)


def _fits(lines: Sequence[Line]) -> Table:
    header = (
        "model | budget | MiB | plain, ms | memkit, ms | / plain | peak, MiB | moved, MiB | plain's host in the forward, ms | "
        "memkit's, ms"
    )

    def cells(line: Line) -> Row:
        return [
            *(_mib(line["budget_mib"]), in_ms(line["plain_s"]), in_ms(line["step_s"]), bold(as_ratio(line["ratio"]))),
            *(_mib(line["peak_allocated_mib"]), _mib(line["moved_mib"])),
            *(in_ms(line["plain_forward_host_s"]), in_ms(line["forward_host_s"])),
        ]

    found = last_by(lambda line: (line["model"], line["which"]), lines_of(lines, "budget_fits"))
    return header, rows_of(found, header, lambda line: [line["model"], f"{line['which']}, {line['share']:g}"], cells)


def _cap(lines: Sequence[Line]) -> Table:
    header = (
        "model, with AdamW | share of the plain peak | budget, MiB | steps | / plain | peak allocated, MiB | of the budget | "
        "peak reserved, MiB | reserved / allocated"
    )

    def cells(line: Line) -> Row:
        return [
            *(_mib(line["budget_mib"]), as_number(line["num_steps"]), as_ratio(line["ratio"])),
            *(_mib(line["peak_allocated_mib"]), as_ratio(line["peak_to_budget"])),
            *(_mib(line["peak_reserved_mib"]), bold(as_ratio(line["reserved_to_allocated"]))),
        ]

    found = last_by(
        lambda line: (line["model"], line.get("share")),
        (line for line in lines if line.get("bench") == "budget_cap" or _has_failed(line, "budget_cap_plain")),
    )
    return header, rows_of(found, header, _share, cells)


def _others(lines: Sequence[Line]) -> Table:
    header = (
        "model | share of the plain peak | budget, MiB | plain, ms | memkit, ms | / plain | predicted / plain | "
        f"{_PREDICTED} | {_DONE}"
    )

    def cells(line: Line) -> Row:
        return [
            *(_mib(line["budget_mib"]), in_ms(line["plain_s"]), in_ms(line["step_s"]), as_ratio(line["ratio"])),
            *(as_ratio(line["predicted_ratio"]), *_predicted(line), *_done(line)),
        ]

    found = last_by(lambda line: (line["model"], line.get("share")), lines_of(lines, "budget_others"))
    return header, rows_of(found, header, _share, cells)


def _has_failed(line: Line, bench: str) -> bool:
    return line.get("bench") == bench and "error" in line


def _share(line: Line) -> Row:
    return [line["model"], f"{line['share']:g}" + (" (the least)" if line.get("is_least") else "") if "share" in line else "-"]


def _compiled(model: str, lines: Sequence[Line]) -> Table:
    header = (
        f"{model}: share of the eager peak | budget, MiB | eager, ms | memkit, ms | / eager | compiled at | fastest by hand | "
        f"its step, ms | its peak, MiB | / by hand | {_PREDICTED} | {_DONE} | new graphs"
    )

    def cells(line: Line) -> Row:
        by_hand = [line.get("hand_mix", "-"), in_ms(line.get("hand_s")), _mib(line.get("hand_peak_mib"))]
        return [
            *(_mib(line["budget_mib"]), in_ms(line["eager_s"]), in_ms(line["step_s"])),
            *(bold(as_ratio(line["step_s"] / line["eager_s"])), str(line["inside"] or "-"), *by_hand),
            *(bold(as_ratio(line.get("to_hand"))), *_predicted(line), *_done(line), as_number(line["new_graphs"])),
        ]

    found = last_by(lambda line: line["share"], lines_of(lines, "budget_compiled", model=model))
    return header, rows_of(found, header, lambda line: [f"{line['share']:g}"], cells)


def _by_hand(model: str, lines: Sequence[Line]) -> Table:
    header = f"{model}: blocks compiled, mixed by hand | step, ms | / eager | peak, MiB"

    def cells(line: Line) -> Row:
        return [in_ms(line["step_s"]), bold(as_ratio(line["step_s"] / line["eager_s"])), _mib(line["peak_allocated_mib"])]

    found = last_by(lambda line: line["mix"], lines_of(lines, "budget_compiled_by_hand", model=model))
    return header, rows_of(found, header, lambda line: [line["mix"]], cells)


def _front(model: str, lines: Sequence[Line]) -> Table:
    header = (
        f"{model}: set by hand | norms update once | step, ms | / plain | peak, MiB | a budget of that peak, ms | "
        "its peak, MiB | kept to by | budget / by hand"
    )
    budgets = {line["which"]: line for line in lines_of(lines, "budget_front", model=model)}

    def cells(line: Line) -> Row:
        budget = budgets.get(line["which"], {})
        return [
            *("yes" if line["updates_once"] else "no", in_ms(line["step_s"])),
            *(bold(as_ratio(line["step_s"] / line["plain_s"])), _mib(line["peak_allocated_mib"])),
            *(in_ms(budget.get("step_s")), _mib(budget.get("peak_allocated_mib")), budget.get("way", "-")),
            bold(as_ratio(budget.get("to_other"))),
        ]

    names = ("budget_front_other", "budget_front_whole")
    found = last_by(lambda line: line["which"], (line for name in names for line in lines_of(lines, name, model=model)))
    return header, rows_of(found, header, lambda line: [line["which"]], cells)


def _link(lines: Sequence[Line]) -> Table:
    header = (
        "model | budget, MiB | free link: step, ms | moved, MiB | the next five steps, ms | after them | moved, MiB | "
        "plain, ms | learned anew | moved, MiB | after five / anew"
    )

    def cells(line: Line) -> Row:
        return [
            *(_mib(line["budget_mib"]), in_ms(line["free_s"]), _mib(line["free_moved_mib"])),
            *(", ".join(in_ms(seconds) for seconds in line["adapting_s"]), in_ms(line["later_s"])),
            *(_mib(line["later_moved_mib"]), in_ms(line["plain_s"]), in_ms(line["anew_s"]), _mib(line["anew_moved_mib"])),
            bold(as_ratio(line["later_to_anew"])),
        ]

    found = last_by(lambda line: line.get("model"), lines_of(lines, "budget_link"))
    return header, rows_of(found, header, lambda line: [line.get("model", "-")], cells)


def _lengths(lines: Sequence[Line]) -> Table:
    header = "sequences of | budget, MiB | first step's peak, MiB | of the budget | last step's peak, MiB | of the budget"

    def cells(line: Line) -> Row:
        first = [_mib(line["budget_mib"]), _mib(line["first_peak_mib"]), bold(as_ratio(line["first_to_budget"]))]
        return [*first, _mib(line["last_peak_mib"]), as_ratio(line["last_to_budget"])]

    found = last_by(lambda line: line["length"], lines_of(lines, "budget_lengths"))
    return header, rows_of(found, header, lambda line: [as_number(line["length"])], cells)


def _planning(lines: Sequence[Line]) -> Table:
    header = (
        "model | budget, MiB | saved values | plan, s | learning, s | deviations | "
        "plain's host in the forward, ms | memkit's, ms"
    )

    def cells(line: Line) -> Row:
        return [
            *(as_number(line["num_saved"]), f"{line['plan_s']:.2f}", f"{line['learning_s']:.1f}"),
            *(as_number(line["num_deviations"]), in_ms(line["plain_forward_host_s"]), in_ms(line["forward_host_s"])),
        ]

    found = last_by(
        lambda line: (line["model"], line["asked"]),
        (line for line in lines if line.get("bench") in ("budget", "budget_others") and "plan_s" in line),
    )
    return header, rows_of(found, header, lambda line: [line["model"], _asked(line)], cells)


_TABLES: dict[str, Callable[[list[Line]], Table]] = {
    "machine": machine,
    **{model: partial(_budgets, model) for model in ("resnet50", "llama_b8", "llama_b4")},
    "beside": _beside,
    "checkpoints": _checkpoints,
    **{model: partial(_spaced, model) for model in SPACED},
    "fits": _fits,
    "cap": _cap,
    "others": _others,
    **{f"compiled_{model}": partial(_compiled, model) for model in COMPILED},
    **{f"by_hand_{model}": partial(_by_hand, model) for model in COMPILED},
    **{f"front_{model}": partial(_front, model) for model in FRONTS},
    "link": _link,
    "lengths": _lengths,
    "planning": _planning,
}


if __name__ == "__main__":
    main(tables, *sys.argv[1:])
