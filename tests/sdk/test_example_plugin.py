"""The example plugin, installed by pip into a folder of its own: found, listed, light, and passing its own tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "plugins" / "example"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip installed the example, from its own pyproject."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    command += ["--disable-pip-version-check", "--target", str(folder), str(EXAMPLE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def python(site: Path, *arguments: str, cwd: Path = ROOT, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]), **environ}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=cwd, check=False, timeout=120)


def test_it_is_found_and_listed(site: Path) -> None:
    done = python(site, "-m", "prism_sdk.cli.main", "plugins", "--json")
    assert done.returncode == 0, done.stderr
    (record,) = [record for record in json.loads(done.stdout)["plugins"] if record["name"] == "example"]
    assert record["status"] == "ok" and record["strategies"] == ["fastest"]
    assert (record["distribution"], record["version"], record["origin"]) == ("prismtrace-example", "0.1.0", "installed")


def test_it_can_be_disabled(site: Path) -> None:
    done = python(site, "-m", "prism_sdk.cli.main", "plugins", PRISM_DISABLE_PLUGINS="example")
    assert "disabled: in PRISM_DISABLE_PLUGINS" in done.stdout


def test_its_entry_module_is_light(site: Path) -> None:
    code = (
        "import sys, prismtrace_example\n"
        "heavy = {'torch', 'numpy', 'prismtrace'} & set(sys.modules)\nassert not heavy, heavy"
    )
    done = python(site, "-c", code)
    assert done.returncode == 0, done.stderr


def test_it_passes_its_own_tests(site: Path, tmp_path: Path) -> None:
    arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", str(EXAMPLE / "tests")]
    done = python(site, *arguments, f"--basetemp={tmp_path / 'base'}", f"--rootdir={EXAMPLE}", cwd=EXAMPLE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
