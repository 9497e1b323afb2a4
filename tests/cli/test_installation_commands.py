"""plugins and doctor."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prism_sdk.cli import checks
from prism_sdk.cli.checks import Check, run_checks
from prism_sdk.cli.main import run
from prism_sdk.runtime import gauges

STRATEGY = """
from prism_sdk import hookimpl
from prism_sdk.abc import CalibrationStrategy

class Mine(CalibrationStrategy):
    name = "mine"
    description = "a strategy"
    def calibrate(self, context):
        raise NotImplementedError

@hookimpl
def prism_register_strategies():
    return [Mine()]
"""

NOTHING = "nothing: it registers no object and is told of no run"


def test_plugins_shows_a_named_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "my_plugin.py"
    file.write_text(STRATEGY)
    assert run(["plugins", "--plugin", str(file)]) == 0
    assert "strategy mine" in capsys.readouterr().out
    assert run(["plugins", "--json", "--plugin", str(file)]) == 0
    records: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["plugins"]
    (mine,) = [record for record in records if record["name"] == "my_plugin"]
    assert (mine["status"], mine["strategies"], mine["origin"]) == ("ok", ["mine"], "named")


@pytest.mark.parametrize(
    ("hook", "shown", "observes"),
    [
        ("", NOTHING, False),
        ("prism_register_strategies():\n    return []", NOTHING, False),
        ("prism_observe_run_end(result):\n    pass", "told of runs", True),
    ],
)
def test_plugins_says_so_where_one_registers_nothing(
    hook: str, shown: str, observes: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my_plugin.py"
    file.write_text("from prism_sdk import hookimpl\n" + (f"@hookimpl\ndef {hook}\n" if hook else ""))
    assert run(["plugins", "--plugin", str(file)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("my_plugin")]
    assert line.endswith(shown)
    assert run(["plugins", "--json", "--plugin", str(file)]) == 0
    (mine,) = [one for one in json.loads(capsys.readouterr().out)["plugins"] if one["name"] == "my_plugin"]
    assert (mine["status"], mine["observes"]) == ("ok", observes)


def test_plugins_shows_why_one_is_broken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "my_plugin.py"
    file.write_text("import not_there_at_all")
    assert run(["plugins", "--plugin", str(file)]) == 1
    text = capsys.readouterr().out
    assert "broken: ModuleNotFoundError" in text and "not_there_at_all" in text


def test_hook_calls_are_traced_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRISM_TRACE_HOOKS", "1")
    file = tmp_path / "my_plugin.py"
    file.write_text(STRATEGY)
    assert run(["plugins", "--json", "--plugin", str(file)]) == 0
    captured = capsys.readouterr()
    assert "hook prism_register_strategies() -> plugin my_plugin" in captured.err
    json.loads(captured.out)


def test_doctor_checks_the_real_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["doctor", "--json"])
    values = json.loads(capsys.readouterr().out)
    by_name = {check["name"]: check for check in values["checks"]}
    assert {"python", "system", "torch", "cores", "memory", "/dev/shm", "C compiler", "import names"} <= set(by_name)
    assert code == (0 if values["ok"] else 1)
    assert all(check["status"] in ("ok", "warning", "problem") for check in values["checks"])
    assert all(check["hint"] for check in values["checks"] if check["status"] == "problem")


def test_doctor_gives_back_file_pages_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of files that nobody uses now count as available: less the kernel's answer would be too little."""
    limit, used, inactive = 4 << 30, 3 << 30, 2 << 30
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")
    monkeypatch.setattr(gauges, "_CGROUP", tmp_path)
    machine = gauges._machine()
    assert machine is not None
    in_container = limit - used + inactive if machine.total_bytes > limit else machine.total_bytes
    assert gauges.available_bytes() == pytest.approx(
        min(in_container, machine.total_bytes - machine.used_bytes), abs=256 << 20
    )  # fmt: skip
    memory = checks._memory()
    assert memory.status == "ok" and memory.detail.endswith("available")
    (tmp_path / "memory.stat").write_text("anon 5\n")
    (tmp_path / "memory.current").write_text(f"{limit + 4096}\n")
    if machine.total_bytes > limit:
        assert gauges.available_bytes() == 0 and checks._memory().status == "warning"


def test_doctor_ends_with_1_on_a_problem(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> Iterator[Check]:
        yield Check("torch", "problem", "not installed", "install it")

    monkeypatch.setattr(checks, "_torch", broken)
    assert run(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "problem  torch: not installed" in text and "install it" in text


def test_a_foreign_owner_of_our_names_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(checks, "_torch", lambda: iter(()))
    info = tmp_path / "prism_sdk-9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: prism-sdk\nVersion: 9\n")
    (info / "RECORD").write_text("prism_sdk/__init__.py,,\nprism_sdk-9.dist-info/METADATA,,\n")
    (info / "entry_points.txt").write_text("[console_scripts]\nprism = prism_sdk:main\n")
    (check,) = [check for check in run_checks() if check.name == "import names"]
    assert check.status == "problem"
    assert "prism_sdk is also installed by prism-sdk" in check.detail and "command prism" in check.detail


def test_doctor_misses_what_is_disabled(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(checks, "_torch", lambda: iter(()))
    monkeypatch.setenv("PRISM_DISABLE_PLUGINS", "slices,local")
    assert run(["doctor"]) == 1
    text = capsys.readouterr().out
    assert re.search(r"problem  plugins: \d+ usable, 2 disabled \(.*\); by default these cannot run: ", text)
    assert "calibrate (its strategy 'slices' is not there), emulate (its backend 'local' is not there)" in text
    assert "unset PRISM_DISABLE_PLUGINS" in text
    monkeypatch.setenv("PRISM_DISABLE_PLUGINS", "primus")
    assert run(["doctor"]) == 0
    assert "1 disabled (primus)" in capsys.readouterr().out
