"""Sphinx settings."""

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
autodoc_member_order = "bysource"
autodoc_typehints = "none"
