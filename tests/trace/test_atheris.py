"""A second of fuzzing guided by coverage, of the reader and importers; benchmarks/fuzz_atheris.py runs longer."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 1

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris has no wheel for this platform and Python"
)


@pytest.mark.parametrize("target", ["reader", "kineto", "flight_recorder", "chakra", "pytorch_et"])
def test_nothing_but_errors_of_our_own(target: str, tmp_path: Path) -> None:
    importer = [] if target == "reader" else [f"--importer={target}"]
    limits = [f"-max_total_time={SECONDS}", "-rss_limit_mb=2048", "-timeout=20", f"-artifact_prefix={tmp_path}/"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/fuzz_atheris.py"), *importer, *limits, str(tmp_path / "corpus")],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Done " in done.stderr, done.stderr[-3000:]  # inputs were tried
