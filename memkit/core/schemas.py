"""Reads JSON that memkit has written, and checks its kind and version."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from memkit.errors import MemkitError


def read_json(
    source: str | os.PathLike[str], *, schema: str, version: int, what: str, error: type[MemkitError], do: str = ""
) -> tuple[dict[str, Any], str]:
    """Return the content of memkit's JSON, and a name of its source; raise `error` for another kind, or a newer memkit's."""
    where = "this text" if isinstance(source, str) else f"'{os.fspath(source)}'"
    do = f" {do}" if do else ""
    try:
        content = json.loads(source if isinstance(source, str) else Path(source).read_text(encoding="utf-8"))
    except ValueError as wrong:  # not JSON, or not text
        raise error(f"{where} is not {what}: it is not JSON ({wrong}). To read a file, pass a pathlib.Path.{do}") from wrong
    if not isinstance(content, dict) or content.get("schema") != schema:
        raise error(f'{where} is not {what}: it has no "schema": "{schema}".{do}')
    found = content.get("schema_version")
    if type(found) is not int or found < 1:
        raise error(f'{where} is not {what}: "schema_version" must be a whole number from 1 on; found {found!r}.{do}')
    if found > version:
        raise error(f"{where} has schema version {found}; this memkit reads versions up to {version}. Update memkit.")
    return content, where
