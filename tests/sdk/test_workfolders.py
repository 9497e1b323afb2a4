"""Folders that commands work in: what a killed one has left goes, what is in use stays."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from prism_sdk.errors import RunError
from prism_sdk.workfolders import work_folder

HOLDER = """
import sys
from pathlib import Path
from prism_sdk.workfolders import work_folder
with work_folder("prism-test-", beside=Path(sys.argv[1])) as folder:
    (folder / "data").write_text("x")
    print(folder, flush=True)
    sys.stdin.read()
"""


def holder(output: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(output)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_a_killed_command_has_left_goes_and_what_is_in_use_stays(tmp_path: Path) -> None:
    output, elsewhere = tmp_path / "out.prism", tmp_path / "elsewhere"
    (using, in_use), (killed, abandoned) = holder(output), holder(output)
    killed.kill()
    killed.communicate()
    assert {path.name for path in abandoned.iterdir()} == {"data", "lock"}
    for place in (elsewhere, tmp_path / "prism-test-unlocked", tmp_path / "prism-other-1"):
        place.mkdir()  # of others, whoever they are
        if place.name != "prism-test-unlocked":
            (place / "lock").touch()
    (tmp_path / "prism-test-link").symlink_to(elsewhere)
    (tmp_path / "prism-test-file").touch()
    before = set(tmp_path.iterdir())
    with work_folder("prism-test-", beside=output) as mine:
        assert set(tmp_path.iterdir()) == before - {abandoned} | {mine}
        assert (in_use / "data").read_text() == "x" and (elsewhere / "lock").exists()
    using.communicate("")
    assert using.returncode == 0
    assert set(tmp_path.iterdir()) == before - {abandoned, in_use}


@pytest.mark.parametrize(("free", "error"), [(0, RunError), (1 << 30, OSError)])
def test_a_disk_that_fills_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, error: type[Exception]
) -> None:
    """What a write raises does not say where; with room in the folder it was another file, such as standard output."""
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    with pytest.raises(error) as caught, work_folder("prism-test-", beside=tmp_path / "out") as mine:
        raise OSError(errno.ENOSPC, "No space left on device")
    assert (f"{tmp_path}: No space left on device\n  make room there" in str(caught.value)) == (error is RunError)
    assert not mine.exists()
