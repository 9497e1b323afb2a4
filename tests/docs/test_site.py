"""The documentation as a whole: links lead somewhere, no block escapes the tests, the site builds without a warning."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sybil")

from tests.docs.blocks import ROOT, pages

#: Beside the pages, what has links that a reader follows.
LINKING = sorted({*pages(), *ROOT.glob("*.md"), *ROOT.glob("spec/decisions/*.md"), *ROOT.glob("plugins/*/README.md"),
                  ROOT / "prism_sdk" / "README.md", ROOT / "nccl_profiler" / "README.md"})  # fmt: skip
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def anchors(page: Path) -> set[str]:
    """The names of headings, as forges and the site make them."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in _HEADING.findall(text)}


@pytest.mark.parametrize("page", LINKING, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(_FENCE.sub("", page.read_text(encoding="utf-8"))):
        if link.startswith(("https://", "http://", "mailto:")):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{name(page)}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{name(page)}: {link}; there are {sorted(anchors(target))}"


@pytest.mark.parametrize("page", pages(), ids=name)
def test_no_block_escapes_the_tests(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert all(block.partition("\n")[0] != "```" for block in _FENCE.findall(text)), "a block without a language"
    lines = _FENCE.sub("", text).splitlines()
    for before, line in itertools.pairwise(lines):
        starts_block = not before.strip() and re.match(r"    +(prism|python|pip|make|\$|from|import) ?", line)
        assert not starts_block, f"an indented block is not run: {line!r}"


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for page in pages():
        path = page.relative_to(ROOT / "docs").as_posix() if page.is_relative_to(ROOT / "docs") else f"../{name(page)}"
        if path not in ("index.md", "../README.md"):
            assert f"\n{path.removesuffix('.md')}\n" in index, f"{path} is in no toctree of docs/index.md"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Everything but the writing of HTML, which takes as long again."""
    pytest.importorskip("sphinx")
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "--builder", "dummy"]
    command += ["--conf-dir", str(ROOT / "docs"), str(ROOT), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_style_of_the_site_is_its_own() -> None:
    """No theme option, stylesheet or script is fetched from elsewhere."""
    configuration = (ROOT / "docs" / "conf.py").read_text(encoding="utf-8")
    assert "://" not in configuration
