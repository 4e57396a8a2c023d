"""Sphinx settings."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any

from sphinx.application import Sphinx
from sphinx.ext.napoleon.docstring import GoogleDocstring

from memkit import __version__

project = "memkit"
author = "The memkit authors"
copyright = "2026, The memkit authors"  # noqa: A001 - Sphinx's name
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
default_role = "code"
html_theme = "furo"
html_title = f"memkit {release}"
exclude_patterns = ["_build"]
myst_heading_anchors = 3
myst_enable_extensions = ["deflist"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"


_attribute_lines: dict[str, list[str]] = {}


def note_attribute(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Note an attribute's docstring ahead of napoleon, which takes "Rows in order: the model first" for a type and a text."""
    if what in ("attribute", "property"):
        _attribute_lines[name] = list(lines)


def read_attribute(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Read an attribute's docstring as a method's: its type is that of its annotation."""
    if name in _attribute_lines:
        given = _attribute_lines.pop(name)
        lines[:] = GoogleDocstring(given, app.config, app, "method", name, obj, options).lines()


def hide_constructor(
    app: Sphinx, what: str, name: str, obj: Any, options: object, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Leave out the constructors of records that memkit makes itself: their fields are listed below them."""
    if what == "class" and is_dataclass(obj) and "Args:" not in (obj.__doc__ or ""):
        return "", None
    return signature, returns


def setup(app: Sphinx) -> None:
    """Register what is above."""
    app.connect("autodoc-process-docstring", note_attribute, priority=400)  # napoleon comes at 500
    app.connect("autodoc-process-docstring", read_attribute, priority=600)
    app.connect("autodoc-process-signature", hide_constructor)
