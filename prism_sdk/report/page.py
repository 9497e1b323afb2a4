"""Puts content, style and scripts into one HTML file that loads nothing else. It knows nothing of traces.

The page forbids itself the network: its content security policy allows inline script and style, and nothing besides.
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Final

from prism_sdk.errors import OutputExistsError
from prism_sdk.writing import write_whole

__all__ = ["page_html", "write_report"]

_SCRIPTS: Final = ("uplot/uPlot.iife.min.js", "base.js", "timeline.js", "heatmap.js", "charts.js", "main.js")
_STYLES: Final = ("uplot/uPlot.min.css", "style.css")


def asset(name: str) -> str:
    """The text of a file that the page is made of."""
    return resources.files("prism_sdk.report").joinpath("assets", *name.split("/")).read_text(encoding="utf-8")


def page_html(content: Mapping[str, Any], *, title: str, actions: str = "") -> str:
    """The page as text.

    Args:
        content: what ``report_content`` returns.
        title: shown in the browser's tab.
        actions: HTML for the head of the page, such as a link of the viewer; not escaped.
    """
    # "<" as an escape: no value can end the script element that holds it
    data = json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = {
        "title": html.escape(title), "actions": actions, "data": data, "shell": asset("shell.html"),
        "style": "\n".join(map(asset, _STYLES)), "script": "\n".join(map(asset, _SCRIPTS)),
        "notice": html.escape(asset("uplot/LICENSE")),
    }  # fmt: skip
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src 'unsafe-inline'; "
        "style-src 'unsafe-inline'; img-src data:\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{parts['title']}</title>\n<style>{parts['style']}</style>\n</head>\n<body>\n"
        + parts["shell"].replace("<!-- actions -->", parts["actions"]).replace("<!-- notice -->", parts["notice"])
        + f'\n<script type="application/json" id="content">{parts["data"]}</script>\n'
        f"<script>{parts['script']}</script>\n</body>\n</html>\n"
    )


def write_report(content: Mapping[str, Any], path: str | os.PathLike[str], *, overwrite: bool = False) -> int:
    """Write the page, whole or not at all; returns its size in bytes.

    Raises:
        OutputExistsError: the file exists.
        OutputError: it cannot be written.
    """
    output = Path(path)
    if output.exists() and not overwrite:
        raise OutputExistsError(str(output))
    text = page_html(content, title=f"Prism: {content['file']}").encode("utf-8")
    write_whole(text, output)
    return len(text)
