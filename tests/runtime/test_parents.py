"""Processes end with the one that started them, also where that was killed while they were starting."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def ended_id() -> str:
    with subprocess.Popen(["true"]) as process:
        return str(process.pid)


@pytest.mark.parametrize(
    ("module", "before", "behind"),
    [
        ("prism_sdk.runtime.prefetch", 0, 4), ("prism_sdk.runtime.oncuda.releaser", 0, 5),
        ("prism_sdk.runtime.virtual", 1, 0), ("prism_sdk.runtime.oncuda.neighbours", 1, 0),
    ],
)  # fmt: skip
def test_a_process_without_its_parent_does_not_begin(ended_id: str, module: str, before: int, behind: int) -> None:
    arguments = [*[""] * before, ended_id, *[""] * behind]
    done = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
