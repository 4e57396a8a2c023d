"""Put what bench_steady.py has printed into the tables of a page.

    python examples/bench/bench_steady.py > lines.jsonl
    python examples/bench/steady_tables.py lines.jsonl docs/benchmarks/steady_h200_2026-11.md

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. Those of which there are lines are written anew, the others
are left as they are; without a page all are printed. Where a part was run again, the lines of the last run count.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from shared import Line

MODELS = ("resnet50", "llama", "gpt2", "whisper")
MIB = 2**20
Row = list[str]
_PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def tables(lines: Sequence[Line]) -> dict[str, str]:
    """Return the tables of which there are lines, by their names, as markdown."""
    found = {name: make(list(lines)) for name, make in _TABLES.items()}
    return {name: _markdown(header, rows) for name, (header, rows) in found.items() if rows}


def filled(page: str, made: dict[str, str]) -> str:
    """Return a page with tables in their places.

    Raises:
        ValueError: it has no place for one of them.
    """
    places = {name for _, name, _ in _PLACE.findall(page)}
    if not places.issuperset(made):
        raise ValueError(f"found no place in the page for {', '.join(sorted(made.keys() - places))}")
    return _PLACE.sub(lambda match: f"{match[1]}{made[match[2]]}{match[3]}" if match[2] in made else match[0], page)


def _markdown(header: str, rows: Sequence[Row]) -> str:
    """Return a table, whose first column is on the left and whose others are on the right."""
    columns = header.split(" | ")
    ruler = ["---", *["--:"] * (len(columns) - 1)]
    return "".join(f"| {' | '.join(row)} |\n" for row in (columns, ruler, *rows))


# Cells


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f}"


def _us(microseconds: float | None) -> str:
    return "-" if microseconds is None else f"{microseconds:.1f}"


def _ratio(number: float | None) -> str:
    return "-" if number is None else f"{number:.3f}"


def _mib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / MIB:.0f}"


def _number(number: int | None) -> str:
    return "-" if number is None else str(number)


def _bold(cell: str) -> str:
    return f"**{cell}**"


def _of(lines: Sequence[Line], bench: str, **wanted: str) -> Iterator[Line]:
    """Yield the lines of a bench that are like what is wanted."""
    for line in lines:
        if line.get("bench") == bench and all(line.get(name) == value for name, value in wanted.items()):
            yield line


def _by(key: Callable[[Line], object], lines: Iterator[Line]) -> list[Line]:
    """Return the last of the lines with each key."""
    return list({key(line): line for line in lines}.values())


def _row(line: Line, first: Row, cells: Callable[[Line], Row], num_columns: int) -> Row:
    """Return a row; where something went wrong, what that was."""
    for what in ("error", "refused", "skipped"):
        if what in line:
            said = f"{what}: {line[what]}".replace("|", "/")
            return [*first, said, *["-"] * (num_columns - len(first) - 1)]
    return [*first, *cells(line)]


def _rows(lines: Sequence[Line], header: str, first: Callable[[Line], Row], cells: Callable[[Line], Row]) -> list[Row]:
    num_columns = len(header.split(" | "))
    return [_row(line, first(line), cells, num_columns) for line in lines]


# Tables


def _machine(lines: Sequence[Line]) -> tuple[str, list[Row]]:
    names = ("device", "torch", "cuda", "memkit", "steps")
    found = {tuple(str(line[name]) for name in names) for line in lines if "device" in line}
    return "device | torch | CUDA | memkit | steps", [list(row) for row in sorted(found)]


def _nothing(lines: Sequence[Line]) -> tuple[str, list[Row]]:
    offloads = {line["part"]: line for line in _of(lines, "offload_ratios") if line["ratio"] == 0}
    remats = {line["part"]: line for line in _of(lines, "remat_keep_all")}
    rows = []
    for model in MODELS:
        row = [model]
        for line in (offloads.get(f"offload_{model}", {}), remats.get(f"remat_{model}", {})):
            row += [_ms(line.get("plain_s")), _ms(line.get("step_s")), _bold(_ratio(line.get("to_plain")))]
        if any(cell not in ("-", "**-**") for cell in row[1:]):
            rows.append(row)
    return "model | plain, ms | `CPUOffload(0)`, ms | / plain | plain, ms | `Rematerialize(1.0)`, ms | / plain", rows


def _offload(model: str, lines: Sequence[Line]) -> tuple[str, list[Row]]:
    header = (
        "ratio | copies out | moved, MiB | memkit, ms | / plain | roofline, ms | / roofline | peak allocated, MiB | "
        "peak reserved, MiB | reserved / allocated"
    )
    found = _by(lambda line: line["ratio"], _of(lines, "offload_ratios", part=f"offload_{model}"))

    def cells(line: Line) -> Row:
        return [
            *(_number(line["num_copies_out"]), _mib(line["moved_out_bytes"]), _ms(line["step_s"]), _ratio(line["to_plain"])),
            *(_ms(line["roofline_s"]), _bold(_ratio(line["to_roofline"])), _mib(line["peak_allocated_bytes"])),
            *(_mib(line["peak_reserved_bytes"]), _ratio(line["reserved_to_allocated"])),
        ]

    rows = _rows(found, header, lambda line: [f"{line['ratio']:g}"], cells)
    if any("plain_s" in line for line in found):
        plain = next(line for line in found if "plain_s" in line)
        peak = _mib(plain["plain_peak_bytes"])
        rows.insert(0, ["plain", "-", "-", _ms(plain["plain_s"]), "-", "-", "-", peak, "-", "-"])
    return header, rows


def _remat(model: str, lines: Sequence[Line]) -> tuple[str, list[Row]]:
    header = (
        "budget | made again by | memkit, ms | layers checkpointed | checkpointing, ms | / checkpointing | "
        "peak allocated, MiB | checkpointing's, MiB | peak reserved, MiB"
    )
    found = _by(lambda line: line["budget"], _of(lines, "remat_spaced", part=f"remat_{model}"))

    def cells(line: Line) -> Row:
        reaches = "" if line["spaced_reaches_peak"] else " (needs more)"
        return [
            *("single ops" if line["recorder_s"] else "regions", _ms(line["step_s"])),
            *(f"{line['num_checkpointed']} of {line['num_layers']}{reaches}", _ms(line["spaced_s"])),
            *(_bold(_ratio(line["to_spaced"])), _mib(line["step_peak_bytes"]), _mib(line["spaced_peak_bytes"])),
            _mib(line["peak_reserved_bytes"]),
        ]

    def first(line: Line) -> Row:
        return [f"{line['budget']:g}" + (" (the least)" if line.get("least_bytes") is not None else "")]

    rows = _rows(found, header, first, cells)
    kept = [line for line in _of(lines, "remat_keep_all", part=f"remat_{model}") if "plain_s" in line]
    if kept:
        plain = ["plain", "-", _ms(kept[-1]["plain_s"]), *["-"] * 3, _mib(kept[-1]["plain_peak_bytes"]), "-", "-"]
        rows.insert(0, plain)
    return header, rows


def _rises(lines: Sequence[Line]) -> tuple[str, list[Row]]:
    found = {line["part"].removeprefix("remat_"): line for line in _of(lines, "remat_rises")}
    rows = [[model, _ratio(found[model]["most_rise"])] for model in MODELS if model in found]
    return "model | slowest at a larger budget / at a smaller one", rows


def _chain(lines: Sequence[Line]) -> tuple[str, list[Row]]:
    header = "chain | storages moved | plain, ms | memkit, ms | host, µs per storage | peak, MiB | plain's, MiB"

    def cells(line: Line) -> Row:
        return [
            *(_number(line["num_moved"]), _ms(line["plain_s"]), _bold(_ms(line["step_s"]))),
            *(_us(line["host_us_per_storage"]), _mib(line["step_peak_bytes"]), _mib(line["plain_peak_bytes"])),
        ]

    found = _by(lambda line: line["name"], _of(lines, "host_chain"))
    return header, _rows(found, header, lambda line: [line["name"].removeprefix("chain_").replace("x", " x ")], cells)


def _flat(lines: Sequence[Line]) -> tuple[str, list[Row]]:
    header = "storages | moved | plain, ms | memkit, ms | host, µs per storage"

    def cells(line: Line) -> Row:
        return [
            _number(line["num_moved"]),
            _ms(line["plain_s"]),
            _ms(line["step_s"]),
            _bold(_us(line["host_us_per_storage"])),
        ]

    found = _by(lambda line: line["num_storages"], _of(lines, "host_flat"))
    return header, _rows(found, header, lambda line: [_number(line["num_storages"])], cells)


def _region(lines: Sequence[Line]) -> tuple[str, list[Row]]:
    header = (
        "two ops | plain step, µs | checkpoint, µs | checkpoint without random state and check, µs | region, µs | bits as plain"
    )

    def cells(line: Line) -> Row:
        return [
            *(_us(line["plain_us"]), _us(line["torch_us_beyond"]), _us(line["torch_bare_us_beyond"])),
            *(_bold(_us(line.get("memkit_us_beyond"))), {True: "yes", False: "no", None: "-"}[line["is_equal"].get("memkit")]),
        ]

    found = _by(lambda line: line["name"], (line for line in _of(lines, "host_region") if "engine" not in line))
    return header, _rows(found, header, lambda line: [line["name"].replace("_", ", ")], cells)


def _host(lines: Sequence[Line]) -> tuple[str, list[Row]]:
    header = "model | context | plain, ms | memkit, ms | / plain | µs per storage moved | µs per save | µs per op"

    def cells(line: Line) -> Row:
        return [
            *(_ms(line["plain_s"]), _ms(line["step_s"]), _bold(_ratio(line["to_plain"])), _us(line["us_per_moved"])),
            *(_us(line["us_per_save"]), _us(line["us_per_op"])),
        ]

    found = _by(lambda line: (line["name"], line["engine"]), _of(lines, "host"))
    return header, _rows(found, header, lambda line: [line["name"], line["engine"]], cells)


def _stays(lines: Sequence[Line]) -> tuple[str, list[Row]]:
    found = _by(lambda line: line["name"], _of(lines, "host_stays"))
    rows = [[line["name"], _number(line["num_stay"]), _us(line["us_per_stay"])] for line in found]
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
        for line in _by(lambda line: line["bench"], _of(of_way, "compiled_plain")):
            peak = _mib(line["peak_allocated_bytes"])
            counts = [_number(line["new_graphs"]), _number(line["new_graph_breaks"])]
            rows.append([spelt, "plain", _ms(line["step_s"]), "-", "-", peak, "-", *counts])
        for bench in ("compiled_offload", "compiled_remat"):
            for line in _by(_asked_of_compiled, _of(of_way, bench)):
                rows.append(_row(line, [spelt, _asked_of_compiled(line)], _cells_of_compiled, 9))
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
        *(_ms(line["step_s"]), _ms(line[f"{prefix}_s"]), _bold(_ratio(line[ratio])), _mib(line["step_peak_bytes"])),
        *(_mib(line[f"{prefix}_peak_bytes"]), _number(line["new_graphs"]), _number(line["new_graph_breaks"])),
    ]


def _reserved(lines: Sequence[Line]) -> tuple[str, list[Row]]:
    header = "ResNet-50 | step, ms | peak allocated, MiB | peak reserved, MiB | reserved / allocated"

    def cells(line: Line) -> Row:
        reserved = _bold(_ratio(line["reserved_to_allocated"]))
        return [_ms(line["step_s"]), _mib(line["peak_allocated_bytes"]), _mib(line["peak_reserved_bytes"]), reserved]

    return header, _rows(
        _by(lambda line: line["engine"], _of(lines, "offload_reserved")), header, lambda line: [line["engine"]], cells
    )


_TABLES: dict[str, Callable[[list[Line]], tuple[str, list[Row]]]] = {
    "machine": _machine,
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
    made = tables([json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()])
    if len(sys.argv) > 2:
        target = Path(sys.argv[2])
        target.write_text(filled(target.read_text(), made))
    else:
        print("\n".join(f"{name}\n\n{table}" for name, table in made.items()))
