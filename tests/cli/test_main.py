"""The console command as a process: speed, no torch, help for everyone, errors without tracebacks."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from prism_sdk.cli import main as main_module
from prism_sdk.cli.main import cli, run

COMMANDS = [name for section in main_module._COMMANDS.values() for name in section]


def prism(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "prism_sdk.cli.main", *arguments]
    env = {**os.environ, **environ}
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=120)


def _cpu_seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_help_is_quick_and_loads_no_torch_and_no_numpy() -> None:
    code = (
        "import sys, click\nfrom prism_sdk.cli.main import run\nassert run(['--help']) == 0\n"
        "heavy = {'torch', 'numpy', 'pluggy', 'prismtrace', 'rich'} & set(sys.modules)\nassert not heavy, heavy"
    )
    seconds = []
    for _ in range(3):
        begin = _cpu_seconds_of_children()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        seconds.append(_cpu_seconds_of_children() - begin)
        assert done.returncode == 0, done.stderr
    assert min(seconds) < 0.3  # of CPU: others may want the CPUs at the same time


def test_every_module_of_commands_is_in_the_table_and_back() -> None:
    folder = Path(main_module.__file__).parent / "commands"
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert modules == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_explains_and_shows_an_example(name: str) -> None:
    result = CliRunner().invoke(cli, [name, "--help"])
    assert result.exit_code == 0
    assert "Example" in result.output and f"prism {name}" in result.output
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            assert parameter.help, f"--{parameter.name} of {name} has no help"


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_imports_torch_by_being_asked_for_help(name: str) -> None:
    code = (
        f"import sys\nfrom prism_sdk.cli.main import run\nassert run(['{name}', '--help']) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_a_misspelt_command_is_corrected() -> None:
    done = prism("recrod")
    assert done.returncode == 2
    assert "Did you mean 'record'?" in done.stderr


def test_no_command_shows_the_help() -> None:
    done = prism()
    assert done.returncode == 2
    assert "Run a job" in done.stdout + done.stderr


def test_version() -> None:
    done = prism("--version")
    assert (done.returncode, done.stdout) == (0, "prism, version 0.1.0\n")


def test_an_error_is_one_message_and_debug_shows_where() -> None:
    done = prism("record", "--", "none.py")
    assert done.returncode == 2
    assert done.stderr.startswith("prism: error: the script 'none.py' does not exist\n")
    assert "Traceback" not in done.stderr
    assert "Traceback" in prism("record", "--", "none.py", PRISM_DEBUG="1").stderr


def test_a_bad_environment_variable_is_named() -> None:
    done = prism("plugins", PRISM_TRACE_HOOKS="maybe")
    assert done.returncode == 2
    assert "PRISM_TRACE_HOOKS" in done.stderr and "Traceback" not in done.stderr


def test_an_unexpected_error_is_no_traceback_either(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(cli, "main", fail)
    assert run([]) == 1
    text = capsys.readouterr().err
    assert "unexpected ZeroDivisionError: by zero" in text and "Traceback" not in text


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "main", interrupt)
    assert run([]) == 130
    assert capsys.readouterr().err == "prism: interrupted\n"


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = f"{sys.executable} -m prism_sdk.cli.main plugins --json | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
