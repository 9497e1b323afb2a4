"""How Sphinx builds the documentation site; ``make docs`` writes it to build/docs.

The pages are Markdown of docs/ and spec/. They are built from the root of the repository, so that links between them
work in both places. Nothing is fetched while the site is built, and the pages load nothing from elsewhere.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from prismtrace._version import __version__

project = "Prism"
author = "the Prism developers"
project_copyright = author
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_click",
]

root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "docs/reference/*.md",
    "spec/*.md",
    "spec/decisions/*.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
]
exclude_patterns = [".venv", "build", "plugins", "tests", "nccl_profiler"]
# commands are copied from the pages: `--graph` must not become a dash
smartquotes = False
highlight_language = "text"
default_role = "code"
source_suffix = {".md": "markdown"}

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_use_rtype = False
nitpicky = False

html_theme = "furo"
html_title = f"Prism {version}"
html_extra_path = ["_extra"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "default"

_LINK = re.compile(r"(?<!!)\[([^\]\n]+)\]\(([^)#\s:]+)(#[^)\s]*)?\)")


def _keep_links_inside(app: Sphinx, name: str, content: list[str]) -> None:
    """Links to files and folders that are no page of the site become text; they are of use in the repository alone."""

    def replaced(link: re.Match[str]) -> str:
        target = (ROOT / name).parent / link[2]
        page = target.resolve().relative_to(ROOT).with_suffix("").as_posix()
        return link[0] if page in app.env.found_docs or not target.exists() else link[1]

    content[0] = _LINK.sub(replaced, content[0])


def _show_examples_as_typed(app: Sphinx, context: click.Context, lines: list[str]) -> None:
    """Parts of a help text that keep their lines (``|`` in front of each) become literal blocks."""
    shown: list[str] = []
    for line in lines:
        is_literal = line.startswith("|") and not line.endswith(":")
        line = line.lstrip("| ") if line.endswith(":") else line
        if is_literal and not (shown and shown[-1].startswith("    ")):
            shown += ["", "::", ""]
        elif not is_literal and line.strip() and shown and shown[-1].startswith("    "):
            shown.append("")
        shown.append("    " + line[1:].strip() if is_literal else line)
    lines[:] = shown


def setup(app: Sphinx) -> None:
    """What Sphinx calls."""
    app.connect("sphinx-click-process-description", _show_examples_as_typed)
    app.connect("source-read", _keep_links_inside)
