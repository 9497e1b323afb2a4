"""The library for aarch64: it compiles, its layouts hold there, and its wheel says what machine it is for.

Needs a cross compiler: $AARCH64_CC, aarch64-linux-gnu-gcc, or zig (pip install ziglang).
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from host_runs import COMMON, SOURCES

PROJECT = SOURCES.parent
AARCH64 = 183


@pytest.fixture(scope="module")
def compiler() -> list[str]:
    """A C compiler that makes programs for aarch64."""
    chosen = os.environ.get("AARCH64_CC")
    if chosen:
        return shlex.split(chosen)
    if found := shutil.which("aarch64-linux-gnu-gcc"):
        return [found]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-gnu.2.28"]
    pytest.skip("no C compiler for aarch64: install gcc-aarch64-linux-gnu or ziglang, or name one with AARCH64_CC")


def compiled(compiler: list[str], sources: Path, target: Path) -> subprocess.CompletedProcess[str]:
    flags = [*COMMON, "-O2", "-fPIC", "-fvisibility=hidden", "-shared", "-Wl,-z,nodelete", "-Wl,-z,defs"]
    files = [str(path) for path in sorted(sources.glob("*.c"))]
    command = [*compiler, *flags, *files, "-o", str(target), "-ldl", "-lpthread"]
    return subprocess.run(command, capture_output=True, text=True, timeout=250)


def test_it_compiles_and_exports_every_interface(compiler: list[str], tmp_path: Path) -> None:
    done = compiled(compiler, SOURCES, tmp_path / "lib.so")
    assert done.returncode == 0, done.stderr
    data = (tmp_path / "lib.so").read_bytes()
    assert data[:4] == b"\x7fELF" and int.from_bytes(data[18:20], "little") == AARCH64
    assert all(f"ncclProfiler_v{version}".encode() in data for version in range(1, 8))


def test_a_layout_that_differs_does_not_compile(compiler: list[str], tmp_path: Path) -> None:
    shutil.copytree(SOURCES, tmp_path / "src")
    header = tmp_path / "src" / "abi.h"
    text = header.read_text()
    assert "struct coll_api_v5 { " in text
    header.write_text(text.replace("struct coll_api_v5 { ", "struct coll_api_v5 { int more; ", 1))
    done = compiled(compiler, tmp_path / "src", tmp_path / "lib.so")
    assert done.returncode != 0 and "static assertion failed" in done.stderr


def test_the_wheel_is_for_the_machine_of_the_library(compiler: list[str], tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    ignored = shutil.ignore_patterns("*.so", "tests", "__pycache__")
    shutil.copytree(PROJECT, tmp_path / "project", ignore=ignored)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    environ = {**os.environ, "CC": shlex.join(compiler)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path / "project", env=environ, timeout=250)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-linux_aarch64.whl")
    environ["PRISM_WHEEL_PLATFORM"] = "manylinux_2_28_x86_64"
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path / "project", env=environ, timeout=250)
    assert done.returncode != 0 and "made a library for aarch64" in done.stderr
