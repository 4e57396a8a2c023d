"""JSON that memkit has written says what it is, and of which version."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from memkit.core.schemas import read_json
from memkit.errors import PlanFormatError


def read(source: str | Path) -> tuple[dict[str, object], str]:
    return read_json(source, schema="memkit.It", version=2, what="an it", error=PlanFormatError, do="Make one.")


@pytest.mark.parametrize("version", [1, 2])
def test_known_versions_are_read_from_text_and_from_files(version: int, tmp_path: Path) -> None:
    content = {"schema": "memkit.It", "schema_version": version, "figure": 3}
    path = tmp_path / "it.json"
    path.write_text(json.dumps(content))

    assert read(json.dumps(content)) == (content, "this text")
    assert read(path) == (content, f"'{path}'")


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


def test_file_that_is_no_text_is_told(tmp_path: Path) -> None:
    path = tmp_path / "it.json"
    path.write_bytes(b"\xff\xfe\x00")

    with pytest.raises(PlanFormatError, match=r"it\.json' is not an it: it is not JSON"):
        read(path)
