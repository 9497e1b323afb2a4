"""What `prism plugin new` writes: installed by pip into a folder of its own, it passes its own tests."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from prism_sdk.cli.main import run

ROOT = Path(__file__).parents[2]


def python(*arguments: str | Path, cwd: Path, path: list[Path]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    words = [sys.executable, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, cwd=cwd, env=environment, check=False, timeout=200)


@pytest.mark.slow
def test_it_installs_and_passes_its_own_tests(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    made = python("-m", "prism_sdk.cli.main", "plugin", "new", "mytrainer", cwd=tmp_path, path=[ROOT])
    assert made.returncode == 0, made.stderr
    plugin, site = tmp_path / "prismtrace-mytrainer", tmp_path / "site"
    pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = python(*pip, "--disable-pip-version-check", "--target", site, plugin, cwd=tmp_path, path=[])
    assert done.returncode == 0, done.stderr
    listed = python("-m", "prism_sdk.cli.main", "plugins", cwd=tmp_path, path=[site, ROOT])
    assert "adapter mytrainer" in listed.stdout
    for chosen in ("", "order"):  # the first run writes the golden files, the second compares with them
        tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", plugin / "tests"]
        done = python(*tests, "-k", chosen, f"--rootdir={plugin}", cwd=plugin, path=[site, ROOT])
        assert done.returncode == 0, done.stdout + done.stderr
    text = (plugin / "tests" / "golden" / "rank3.txt").read_text()
    print(text)
    for part in ("forward", "input_grad", "weight_grad", "grad_sync", "param_gather", "dispatch", "combine"):
        assert part in text


@pytest.mark.parametrize(
    ("name", "example"),
    [
        ("My", "my"), ("1st", "st"), ("a-b", "a_b"), ("My Trainer", "my_trainer"), ("mine_", "mine"), ("a__b", "a_b"),
        ("", "mytrainer"), ("___", "mytrainer"), ("class", "mytrainer"), ("../x", "x"), ("x" * 65, "x" * 64),
    ],
)  # fmt: skip
def test_a_name_that_python_or_an_index_cannot_have_is_refused(
    name: str, example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["plugin", "new", name]) == 2
    said = capsys.readouterr().err
    assert "cannot be the name of a plugin" in said and said.endswith(f"such as {example}\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["slices", "local"])
def test_a_name_that_is_taken_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plugin", "new", name, "-o", str(tmp_path / "new")]) == 2
    said = capsys.readouterr().err
    assert f"'{name}' is taken: prismtrace has a plugin" in said and f"my_{name}" in said
    assert not list(tmp_path.iterdir())


def test_folders_are_quoted_for_the_shell_and_a_file_in_the_way_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["plugin", "new", "mine", "-o", "my folder"]) == 0
    assert [shlex.split(line)[-1] for line in capsys.readouterr().out.splitlines()[1:]] == [
        "my folder[test]", "my folder",
    ]  # fmt: skip
    (tmp_path / "file").write_text("mine")
    assert run(["plugin", "new", "mine", "-o", "file/inside"]) == 1
    assert "file/inside: file: " in capsys.readouterr().err


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes").write_text("mine")
    assert run(["plugin", "new", "mine", "-o", str(tmp_path / "there")]) == 2
    assert "exists already" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["notes"]


def test_an_empty_folder_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert run(["plugin", "new", "mine", "-o", str(tmp_path / "empty"), "--json"]) == 0
    assert "src/prismtrace_mine/adapter.py" in capsys.readouterr().out
    assert (tmp_path / "empty" / "pyproject.toml").read_text().count('name = "prismtrace-mine"') == 1
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
