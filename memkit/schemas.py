"""JSON that memkit has written: which kind it is, and of which version."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from memkit.errors import MemkitError


def read_json(
    source: str | os.PathLike[str], *, schema: str, version: int, what: str, error: type[MemkitError], do: str = ""
) -> tuple[dict[str, Any], str]:
    """Return what JSON of memkit's holds, and what to call it in errors.

    Args:
        source: its text, or (as a `pathlib.Path`) the file that holds it.
        schema: what it calls itself.
        version: the newest that can be read.
        what: what it is to be, with its article.
        error: what to raise where it is not.
        do: what to do then.

    Raises:
        MemkitError: `error`: it is none, or it was written by a newer memkit.
        OSError: the file cannot be read.
    """
    where = "this text" if isinstance(source, str) else f"'{os.fspath(source)}'"
    do = f" {do}" if do else ""
    try:
        content = json.loads(source if isinstance(source, str) else Path(source).read_text(encoding="utf-8"))
    except ValueError as wrong:  # of JSON, or of what is no text
        raise error(f"{where} is not {what}: it is not JSON ({wrong}). To read a file, pass a pathlib.Path.{do}") from wrong
    if not isinstance(content, dict) or content.get("schema") != schema:
        raise error(f'{where} is not {what}: it has no "schema": "{schema}".{do}')
    found = content.get("schema_version")
    if type(found) is not int or found < 1:
        raise error(f'{where} is not {what}: "schema_version" must be a whole number from 1 on; found {found!r}.{do}')
    if found > version:
        raise error(f"{where} has schema version {found}; this memkit reads versions up to {version}. Update memkit.")
    return content, where
