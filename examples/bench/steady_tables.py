"""Put what bench_steady.py has printed into the tables of a page.

    python examples/bench/bench_steady.py > lines.jsonl
    python examples/bench/steady_tables.py lines.jsonl docs/benchmarks/steady_h200_2026-11.md

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. Those of which there are lines are written anew, the others
are left as they are; without a page all are printed. Where a part was run again, the lines of the last run count.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

from markdown_tables import (
    Row,
    as_number,
    as_ratio,
    bold,
    filled,
    in_mib,
    in_ms,
    in_us,
    last_by,
    lines_of,
    machine,
    made_of,
    main,
    row_of,
    rows_of,
)
from shared import Line

MODELS = ("resnet50", "llama", "gpt2", "whisper")
__all__ = ["MODELS", "filled", "tables"]


def tables(lines: Sequence[Line]) -> dict[str, str]:
    """Return the tables of which there are lines, by their names, as markdown."""
    return made_of(lines, _TABLES)


# Tables


def _nothing(lines: Sequence[Line]) -> tuple[str, list[Row]]:
    offloads = {line["part"]: line for line in lines_of(lines, "offload_ratios") if line["ratio"] == 0}
    remats = {line["part"]: line for line in lines_of(lines, "remat_keep_all")}
    rows = []
    for model in MODELS:
        row = [model]
        for line in (offloads.get(f"offload_{model}", {}), remats.get(f"remat_{model}", {})):
            row += [in_ms(line.get("plain_s")), in_ms(line.get("step_s")), bold(as_ratio(line.get("to_plain")))]
        if any(cell not in ("-", "**-**") for cell in row[1:]):
            rows.append(row)
    return "model | plain, ms | `CPUOffload(0)`, ms | / plain | plain, ms | `Rematerialize(1.0)`, ms | / plain", rows


def _offload(model: str, lines: Sequence[Line]) -> tuple[str, list[Row]]:
    header = (
        "ratio | copies out | moved, MiB | memkit, ms | / plain | roofline, ms | / roofline | peak allocated, MiB | "
        "peak reserved, MiB | reserved / allocated"
    )
    found = last_by(lambda line: line["ratio"], lines_of(lines, "offload_ratios", part=f"offload_{model}"))

    def cells(line: Line) -> Row:
        return [
            *(
                as_number(line["num_copies_out"]),
                in_mib(line["moved_out_bytes"]),
                in_ms(line["step_s"]),
                as_ratio(line["to_plain"]),
            ),
            *(in_ms(line["roofline_s"]), bold(as_ratio(line["to_roofline"])), in_mib(line["peak_allocated_bytes"])),
            *(in_mib(line["peak_reserved_bytes"]), as_ratio(line["reserved_to_allocated"])),
        ]

    rows = rows_of(found, header, lambda line: [f"{line['ratio']:g}"], cells)
    if any("plain_s" in line for line in found):
        plain = next(line for line in found if "plain_s" in line)
        peak = in_mib(plain["plain_peak_bytes"])
        rows.insert(0, ["plain", "-", "-", in_ms(plain["plain_s"]), "-", "-", "-", peak, "-", "-"])
    return header, rows


def _remat(model: str, lines: Sequence[Line]) -> tuple[str, list[Row]]:
    header = (
        "budget | made again by | memkit, ms | layers checkpointed | checkpointing, ms | / checkpointing | "
        "peak allocated, MiB | checkpointing's, MiB | peak reserved, MiB"
    )
    found = last_by(lambda line: line["budget"], lines_of(lines, "remat_spaced", part=f"remat_{model}"))

    def cells(line: Line) -> Row:
        reaches = "" if line["spaced_reaches_peak"] else " (needs more)"
        return [
            *("single ops" if line["recorder_s"] else "regions", in_ms(line["step_s"])),
            *(f"{line['num_checkpointed']} of {line['num_layers']}{reaches}", in_ms(line["spaced_s"])),
            *(bold(as_ratio(line["to_spaced"])), in_mib(line["step_peak_bytes"]), in_mib(line["spaced_peak_bytes"])),
            in_mib(line["peak_reserved_bytes"]),
        ]

    def first(line: Line) -> Row:
        return [f"{line['budget']:g}" + (" (the least)" if line.get("least_bytes") is not None else "")]

    rows = rows_of(found, header, first, cells)
    kept = [line for line in lines_of(lines, "remat_keep_all", part=f"remat_{model}") if "plain_s" in line]
    if kept:
        plain = ["plain", "-", in_ms(kept[-1]["plain_s"]), *["-"] * 3, in_mib(kept[-1]["plain_peak_bytes"]), "-", "-"]
        rows.insert(0, plain)
    return header, rows


def _rises(lines: Sequence[Line]) -> tuple[str, list[Row]]:
    found = {line["part"].removeprefix("remat_"): line for line in lines_of(lines, "remat_rises")}
    rows = [[model, as_ratio(found[model]["most_rise"])] for model in MODELS if model in found]
    return "model | slowest at a larger budget / at a smaller one", rows


def _chain(lines: Sequence[Line]) -> tuple[str, list[Row]]:
    header = "chain | storages moved | plain, ms | memkit, ms | host, µs per storage | peak, MiB | plain's, MiB"

    def cells(line: Line) -> Row:
        return [
            *(as_number(line["num_moved"]), in_ms(line["plain_s"]), bold(in_ms(line["step_s"]))),
            *(in_us(line["host_us_per_storage"]), in_mib(line["step_peak_bytes"]), in_mib(line["plain_peak_bytes"])),
        ]

    found = last_by(lambda line: line["name"], lines_of(lines, "host_chain"))
    return header, rows_of(found, header, lambda line: [line["name"].removeprefix("chain_").replace("x", " x ")], cells)


def _flat(lines: Sequence[Line]) -> tuple[str, list[Row]]:
    header = "storages | moved | plain, ms | memkit, ms | host, µs per storage"

    def cells(line: Line) -> Row:
        return [
            as_number(line["num_moved"]),
            in_ms(line["plain_s"]),
            in_ms(line["step_s"]),
            bold(in_us(line["host_us_per_storage"])),
        ]

    found = last_by(lambda line: line["num_storages"], lines_of(lines, "host_flat"))
    return header, rows_of(found, header, lambda line: [as_number(line["num_storages"])], cells)


def _region(lines: Sequence[Line]) -> tuple[str, list[Row]]:
    header = (
        "two ops | plain step, µs | checkpoint, µs | checkpoint without random state and check, µs | region, µs | bits as plain"
    )

    def cells(line: Line) -> Row:
        return [
            *(in_us(line["plain_us"]), in_us(line["torch_us_beyond"]), in_us(line["torch_bare_us_beyond"])),
            *(bold(in_us(line.get("memkit_us_beyond"))), {True: "yes", False: "no", None: "-"}[line["is_equal"].get("memkit")]),
        ]

    found = last_by(lambda line: line["name"], (line for line in lines_of(lines, "host_region") if "engine" not in line))
    return header, rows_of(found, header, lambda line: [line["name"].replace("_", ", ")], cells)


def _host(lines: Sequence[Line]) -> tuple[str, list[Row]]:
    header = "model | context | plain, ms | memkit, ms | / plain | µs per storage moved | µs per save | µs per op"

    def cells(line: Line) -> Row:
        return [
            *(in_ms(line["plain_s"]), in_ms(line["step_s"]), bold(as_ratio(line["to_plain"])), in_us(line["us_per_moved"])),
            *(in_us(line["us_per_save"]), in_us(line["us_per_op"])),
        ]

    found = last_by(lambda line: (line["name"], line["engine"]), lines_of(lines, "host"))
    return header, rows_of(found, header, lambda line: [line["name"], line["engine"]], cells)


def _stays(lines: Sequence[Line]) -> tuple[str, list[Row]]:
    found = last_by(lambda line: line["name"], lines_of(lines, "host_stays"))
    rows = [[line["name"], as_number(line["num_stay"]), in_us(line["us_per_stay"])] for line in found]
    return "model, a tenth moves | saves that stay | µs per save that stays", rows


def _compiled(lines: Sequence[Line]) -> tuple[str, list[Row]]:
    header = (
        "block compiled by | what | memkit, ms | beside it, ms | / that | peak allocated, MiB | peak beside it, MiB | "
        "new graphs | new graph breaks"
    )
    ways = {"forward": "`torch.compile(block.forward)`", "call": "`block.compile()`"}
    rows = []
    for way, spelt in ways.items():
        of_way = [line for line in lines if line.get("way") == way]
        for line in last_by(lambda line: line["bench"], lines_of(of_way, "compiled_plain")):
            peak = in_mib(line["peak_allocated_bytes"])
            counts = [as_number(line["new_graphs"]), as_number(line["new_graph_breaks"])]
            rows.append([spelt, "plain", in_ms(line["step_s"]), "-", "-", peak, "-", *counts])
        for bench in ("compiled_offload", "compiled_remat"):
            for line in last_by(_asked_of_compiled, lines_of(of_way, bench)):
                rows.append(row_of(line, [spelt, _asked_of_compiled(line)], _cells_of_compiled, 9))
    return header, rows


def _asked_of_compiled(line: Line) -> str:
    """Return what a step did, and what is beside it."""
    if "ratio" in line:
        return f"`CPUOffload({line['ratio']:g})`, beside plain"
    if "checkpointed" in line:
        return f"`Rematerialize`, beside {len(line['checkpointed'])} checkpointed blocks"
    return f"`Rematerialize({line['budget']:g})`, beside plain"


def _cells_of_compiled(line: Line) -> Row:
    prefix, ratio = ("by_hand_in_turns", "to_by_hand") if "to_by_hand" in line else ("plain", "to_plain")
    return [
        *(in_ms(line["step_s"]), in_ms(line[f"{prefix}_s"]), bold(as_ratio(line[ratio])), in_mib(line["step_peak_bytes"])),
        *(in_mib(line[f"{prefix}_peak_bytes"]), as_number(line["new_graphs"]), as_number(line["new_graph_breaks"])),
    ]


def _reserved(lines: Sequence[Line]) -> tuple[str, list[Row]]:
    header = "ResNet-50 | step, ms | peak allocated, MiB | peak reserved, MiB | reserved / allocated"

    def cells(line: Line) -> Row:
        reserved = bold(as_ratio(line["reserved_to_allocated"]))
        return [in_ms(line["step_s"]), in_mib(line["peak_allocated_bytes"]), in_mib(line["peak_reserved_bytes"]), reserved]

    return header, rows_of(
        last_by(lambda line: line["engine"], lines_of(lines, "offload_reserved")), header, lambda line: [line["engine"]], cells
    )


_TABLES: dict[str, Callable[[list[Line]], tuple[str, list[Row]]]] = {
    "machine": machine,
    "nothing": _nothing,
    **{f"offload_{model}": partial(_offload, model) for model in MODELS},
    **{f"remat_{model}": partial(_remat, model) for model in MODELS},
    "rises": _rises,
    "chain": _chain,
    "flat": _flat,
    "region": _region,
    "host": _host,
    "stays": _stays,
    "compiled": _compiled,
    "reserved": _reserved,
}


if __name__ == "__main__":
    main(tables, *sys.argv[1:])
