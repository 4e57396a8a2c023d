"""Text and tables that fit in a terminal, and JSON that says what it is, and of which version."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memkit.core.schemas import read_json
from memkit.core.terminal import LAST, TextColumn, shortened, table_text, terminal_width, wrapped
from memkit.errors import PlanFormatError

NAMES = ["model.layers.[0-27].self_attn.q_proj (x28)", "head"]


def columns() -> list[TextColumn]:
    return [
        TextColumn(heading="module name", cells=NAMES, right=False, shortens=True),
        TextColumn(heading="parameter size (MiB)", cells=["1234.56", "1.00"]),
        TextColumn(heading="empty", cells=["-", ""], goes=LAST + 1),
        TextColumn(heading="#calls", cells=["28", "1"], goes=LAST),
        TextColumn(heading="input shape", cells=["(256, 3, 224, 224)", "(1)"], right=False, goes=0),
        TextColumn(heading="type", cells=["Linear", "Head"], right=False, goes=1),
    ]


def widest(text: str) -> int:
    return max(map(len, text.splitlines()))


def test_without_a_width_all_is_there_and_names_lose_their_middles_last() -> None:
    text = table_text(columns())

    assert " ".join(text.splitlines()[0].split()) == "module name parameter size (MiB) empty #calls input shape type"
    assert widest(text) > 100
    assert "self_attn.q_proj (x28)" in table_text(columns(), 66)
    assert "model.lay…oj (x28)" in table_text(columns(), 41)


@pytest.mark.parametrize(
    ("width", "headings"),
    [
        (172, "module name parameter size (MiB) #calls input shape type"),
        (112, "module name parameter size (MiB) #calls input shape type"),
        (96, "module name parameter #calls input shape type"),
        (80, "module name parameter #calls type"),
        (66, "module name parameter #calls"),
        (40, "module name parameter #calls"),
        (30, "module name parameter"),
    ],
)
def test_what_goes_goes_in_order(width: int, headings: str) -> None:
    text = table_text(columns(), width)

    assert widest(text) <= width
    assert text.splitlines()[0].split() == headings.split()
    assert "1234.56" in text


@given(
    st.lists(st.tuples(st.text("ab.", min_size=1, max_size=90), st.text("1-", min_size=1, max_size=12)), min_size=1),
    st.integers(30, 200),
)
def test_no_line_is_longer(rows: list[tuple[str, str]], width: int) -> None:
    names, figures = zip(*rows, strict=True)
    text = table_text(
        [
            TextColumn(heading="module name", cells=names, right=False, shortens=True),
            TextColumn(heading="size (MiB)", cells=figures),
            TextColumn(heading="input shape", cells=names, right=False, goes=0),
        ],
        width,
    )

    assert widest(text) <= width


@pytest.mark.parametrize(("width", "found"), [(9, "layer1.10"), (8, "laye….10"), (3, "l…0"), (1, "…")])
def test_shortened_keeps_both_ends(width: int, found: str) -> None:
    assert shortened("layer1.10", width) == found


def test_lines_are_broken_between_words() -> None:
    text = wrapped("one two three\n\nfour", 8)

    assert text == "one two\n  three\n\nfour"
    assert wrapped("one two three", None) == "one two three"


def test_width_is_that_of_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "91")
    assert terminal_width() is None

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)

    assert terminal_width() == 91


def read(source: str | Path) -> tuple[dict[str, object], str]:
    return read_json(source, schema="memkit.It", version=2, what="an it", error=PlanFormatError, do="Make one.")


@pytest.mark.parametrize("version", [1, 2])
def test_known_versions_are_read_from_text_and_from_files(version: int, tmp_path: Path) -> None:
    content = {"schema": "memkit.It", "schema_version": version, "figure": 3}
    path = tmp_path / "it.json"
    path.write_text(json.dumps(content))

    assert read(json.dumps(content)) == (content, "this text")
    assert read(path) == (content, f"'{path}'")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanFormatError, match=r"it\.json' is not an it: it is not JSON"):
        read(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "this text is not an it: it is not JSON"),
        ("[]", 'this text is not an it: it has no "schema": "memkit.It". Make one.'),
        ('{"schema": "memkit.Other"}', 'it has no "schema": "memkit.It"'),
        *(
            (
                f'{{"schema": "memkit.It", "schema_version": {found}}}',
                f"must be a whole number from 1 on; found {told}. Make one.",
            )
            for found, told in (("null", "None"), ('"1"', "'1'"), ("true", "True"), ("0", "0"), ("-5", "-5"), ("1.0", "1.0"))
        ),
        (
            '{"schema": "memkit.It", "schema_version": 3}',
            "has schema version 3; this memkit reads versions up to 2. Update memkit.",
        ),
    ],
)
def test_what_is_none_is_told(text: str, message: str) -> None:
    with pytest.raises(PlanFormatError, match=re.escape(message)):
        read(text)
