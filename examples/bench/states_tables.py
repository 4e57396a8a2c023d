"""Lines of `bench_states.py` as tables, put into a page: python examples/bench/states_tables.py lines.jsonl [page.md].

R is what a step takes at least by the rates of the machine that the lines are of: the plain step without its update, and the
update as the link and the cores allow it, the two beside each other where they can be.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from markdown_tables import Row, Table, as_ratio, bold, last_by, lines_of, made_of, rows_of
from markdown_tables import machine as versions
from markdown_tables import main as put
from shared import Line

GB = 1e9
GIB = 2**30
STATE_BYTES = 12
SENT_BYTES = 4
"""Of a gradient as float32, which goes to the host where it is stepped there."""
STATES = "row | step, s | / plain | R, s | / R | update, s | peak, GiB | room, MiB | stepped on the host"


def tables(lines: Sequence[Line]) -> dict[str, str]:
    makers: dict[str, Callable[[list[Line]], Table]] = {
        "machine": versions,
        "rates": _rates,
        "threads": _threads,
        "states": _states,
        "micro": _micro,
        "nothing": _nothing,
        "streamed": _streamed,
        "disk": _disk,
        "peers": _peers,
    }
    return made_of(lines, makers)


def _of_machine(lines: Sequence[Line]) -> Line | None:
    return next(iter(last_by(lambda line: line["bench"], lines_of(lines, "states_machine"))), None)


def _rates(lines: list[Line]) -> Table:
    header = (
        "link, GB/s: to the host | to the device | each way at once | beside host updates | host updates beside that, 1e9/s"
    )
    found = _of_machine(lines)
    names = ("d2h_bytes_per_s", "h2d_bytes_per_s", "both_bytes_per_s", "shared_bytes_per_s", "shared_updates_per_s")
    return header, [] if found is None else [[f"{found[name] / GB:.2f}" for name in names]]


def _threads(lines: list[Line]) -> Table:
    header = "threads | AdamW, 1e9 parameters/s | with casts"
    found = _of_machine(lines)
    if found is None:
        return header, []
    alone, casts = found["host_updates_per_s"], found["host_cast_updates_per_s"]
    return header, [[number, f"{alone[number] / GB:.2f}", f"{casts[number] / GB:.2f}"] for number in alone]


def bound_s(row: str, plain: Line, machine: Line, numel: int) -> float | None:
    """Return the least that a step of a row takes by the rates of the machine; None if that is not known."""
    forward, backward, update = plain["forward_s"], plain["backward_s"], plain["update_s"]
    rest = plain["step_s"] - update
    link_s = STATE_BYTES * numel / machine["both_bytes_per_s"]
    sent_s = SENT_BYTES * numel / machine["d2h_bytes_per_s"]
    host_s = max(sent_s, numel / max(machine["host_updates_per_s"].values()))
    bounds = {
        "device": rest + link_s,
        "device, within the backward": rest - backward + max(backward, link_s),
        "device, beside the next forward": rest - forward + max(forward, link_s),
        "device, half stays": rest + link_s / 2,
        "device, three quarters stay": rest + link_s / 4,
        "host": rest + host_s,
    }
    return bounds.get(row)


def _states(lines: list[Line]) -> Table:
    found, machine = last_by(lambda line: line["row"], lines_of(lines, "states")), _of_machine(lines)
    plains = {line["row"]: line for line in found if line["row"].startswith("plain") and "step_s" in line}
    if machine is None or not plains:
        return STATES, []

    def cells(line: Line) -> Row:
        plain = plains.get("plain, without clipping" if "backward" in line["row"] else "plain", line)
        bound = bound_s(line["row"], plain, machine, line["numel"])
        return [
            f"{line['step_s']:.3f}",
            as_ratio(line["step_s"] / plain["step_s"]),
            "-" if bound is None else f"{bound:.3f}",
            "-" if bound is None else bold(as_ratio(line["step_s"] / bound)),
            f"{line['update_s']:.3f}",
            _peak(line),
            f"{line['room_bytes'] / 2**20:.0f}" if "room_bytes" in line else "-",
            f"{100 * line['share_on_host']:.0f} %" if "share_on_host" in line else "-",
        ]

    return STATES, rows_of(found, STATES, lambda line: [line["row"]], cells)


def _peak(line: Line) -> str:
    peak = line.get("memory", {}).get("peak_allocated_bytes")
    return "-" if peak is None else f"{peak / GIB:.2f}"


def _beside_plain(bench: str, plain_row: str) -> Callable[[list[Line]], Table]:
    def made(lines: list[Line]) -> Table:
        header = "row | step, s | / plain | peak, GiB"
        found = last_by(lambda line: line["row"], lines_of(lines, bench))
        plain = next((line for line in found if line["row"] == plain_row and "step_s" in line), None)

        def cells(line: Line) -> Row:
            ratio = None if plain is None else line["step_s"] / plain["step_s"]
            return [f"{line['step_s']:.3f}", bold(as_ratio(ratio)), _peak(line)]

        return header, rows_of(found, header, lambda line: [line["row"]], cells)

    return made


_micro = _beside_plain("states_micro", "plain")
_nothing = _beside_plain("states_nothing", "plain")


def _streamed(lines: list[Line]) -> Table:
    header = "model, 1e9 parameters | row | step, s | / plain | R, s | / R | peak, GiB | loss of the last step"
    found = last_by(lambda line: (line["bench"], line.get("row")), lines_of(lines, "states_streamed"))
    plain = next((line for line in found if line["row"] == "plain" and "step_s" in line), None)
    found += last_by(lambda line: line["bench"], lines_of(lines, "states_capped"))

    def cells(line: Line) -> Row:
        is_beside = plain is not None and line["bench"] == "states_streamed"
        return [
            f"{line['step_s']:.3f}",
            as_ratio(line["step_s"] / plain["step_s"]) if plain is not None and is_beside else "-",
            f"{line['r_s']:.3f}" if "r_s" in line else "-",
            bold(as_ratio(line["to_r"])) if "to_r" in line else "-",
            _peak(line),
            f"{line['last_loss']:.3f}",
        ]

    def first(line: Line) -> Row:
        return [f"{line['numel'] / GB:.2f}", line.get("row", "all streams, capped at 24 GiB")]

    return header, rows_of(found, header, first, cells)


def _disk(lines: list[Line]) -> Table:
    header = "row | states, GB | step, s | update, s | read + written, s | / that | process memory before, after, GiB"
    found = last_by(lambda line: line["row"], lines_of(lines, "states_disk"))
    plain = next((line for line in found if line["row"] == "plain"), None)

    def cells(line: Line) -> Row:
        disk_s = None
        if plain is not None and line["row"] != "plain":
            read, written = max(plain["read_bytes_per_s"].values()), max(plain["written_bytes_per_s"].values())
            disk_s = line["state_bytes"] / read + line["state_bytes"] / written
        memory = [line.get("host_rss_before_bytes"), line.get("memory", {}).get("host_rss_bytes")]
        return [
            f"{line['state_bytes'] / GB:.1f}",
            f"{line['step_s']:.2f}",
            f"{line['update_s']:.2f}",
            "-" if disk_s is None else f"{disk_s:.2f}",
            "-" if disk_s is None else bold(as_ratio(line["update_s"] / disk_s)),
            ", ".join("-" if one is None else f"{one / GIB:.2f}" for one in memory),
        ]

    return header, rows_of(found, header, lambda line: [line["row"]], cells)


def _peers(lines: list[Line]) -> Table:
    header = "row | step, s | peak, GiB | host memory, GiB"
    found = last_by(lambda line: (line["part"], line["row"]), lines_of(lines, "states_peers"))

    def cells(line: Line) -> Row:
        return [bold(f"{line['step_s']:.3f}"), _peak(line), f"{line['memory']['host_rss_bytes'] / GIB:.1f}"]

    return header, rows_of(found, header, lambda line: [line["row"]], cells)


if __name__ == "__main__":
    put(tables, *sys.argv[1:])
