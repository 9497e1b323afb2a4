"""Guards who may import whom, by the contracts of pyproject.toml and by what gets loaded; it runs none of the code."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "transformers", "pandas", "matplotlib"}
TRACE_LIBRARY_MAY_IMPORT = {"numpy", "flatbuffers", "zstandard", "prismtrace"}


def modules_loaded_by(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has after it ran ``code``."""
    script = f"import sys, json\n{code}\nprint('\\n' + json.dumps(sorted({{n.split('.')[0] for n in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(json.loads(done.stdout.splitlines()[-1]))


def source_files(package: str) -> Iterator[Path]:
    yield from sorted((ROOT / package).rglob("*.py"))


def imported_top_level(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0]


def test_import_contracts_hold() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_trace_library_loads_little() -> None:
    loaded = modules_loaded_by("import prismtrace")
    assert not loaded & (HEAVY | {"click", "pluggy", "prism_sdk"})


def test_trace_library_imports_only_its_dependencies() -> None:
    allowed = TRACE_LIBRARY_MAY_IMPORT | set(sys.stdlib_module_names)
    strangers = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in source_files("prismtrace")
        for name in imported_top_level(path)
        if name not in allowed
    }
    assert not strangers


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["record", "--help"], ["compare", "--help"]])
def test_the_command_line_loads_no_torch(arguments: list[str]) -> None:
    code = (
        "from prism_sdk.cli.main import main\n"
        f"sys.argv = ['prism', *{arguments!r}]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code"
    )
    assert not modules_loaded_by(code) & HEAVY


def test_the_sdk_loads_no_torch() -> None:
    modules = ["abc", "errors", "hookspecs", "plugins", "settings", "runtime.calibrating", "runtime.launcher"]
    code = "\n".join(f"import prism_sdk.{name}" for name in modules)
    assert not modules_loaded_by(code) & (HEAVY | {"click"})


def test_the_entry_point_alone_loads_nothing_of_the_runtime() -> None:
    """torch loads it in every process: with no PRISM_* set it must stay light, and harmless."""
    code = "before = set(sys.modules)\nimport prism_sdk.runtime.entry as entry\nentry.autoload()"
    loaded = modules_loaded_by(code)
    assert not loaded & (HEAVY | {"click", "numpy"})


def test_torch_imports_when_the_sdk_is_broken(tmp_path: Path) -> None:
    """A process whose PRISM_* variables make no sense still gets its torch."""
    pytest.importorskip("torch")
    environ = {**os.environ, "PRISM_MODE": "nonsense", "RANK": "zero", "WORLD_SIZE": "-1", "PRISM_OUTPUT": "/"}
    done = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.ones(2).sum().item())"],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "2.0"
