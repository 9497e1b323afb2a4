"""Every command and every block of Python in the pages about analysis and report runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from report_samples import mixed_job, pipeline_traces

from prism_sdk.cli.main import run

ROOT = Path(__file__).parents[2]
PAGES = ("analysis", "report")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The traces that the pages speak of."""
    emulated, real = pipeline_traces(tmp_path)
    assert (emulated.name, real.name) == ("emulated.prism", "real.prism")
    for name in ("before", "after", "again"):
        (tmp_path / f"{name}.prism").write_bytes(real.read_bytes())
    mixed_job(tmp_path / "big.prism")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def commands(page: str) -> list[str]:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    return [line.split("#")[0].strip() for line in re.findall(r"^    (prism .*)$", text, re.M)]


@pytest.mark.parametrize("page", PAGES)
def test_commands_run(folder: Path, page: str) -> None:
    found = [words for words in map(shlex.split, commands(page)) if words[1] != "view"]
    assert len(found) >= 3
    for words in found:
        # the samples are small: steps, ranks and pages of the text need not be there in them
        small = {"10:12": "1:3", "0-7": "0-3", "0-63": "0-3", "12": "1"}
        arguments = [small.get(word, word) for word in words[1:]]
        if "-o" in arguments:
            Path("report.html").unlink(missing_ok=True)
        assert run(arguments) == 0, words


@pytest.mark.parametrize("page", ["analysis"])
def test_python_blocks_run(folder: Path, page: str) -> None:
    pytest.importorskip("pandas")
    pytest.importorskip("polars")
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(blocks) == 2
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-c", "\n".join(blocks)], cwd=folder, capture_output=True, text=True,
                          env=environ)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "compute" in done.stdout
