"""Compiles the profiler library when a wheel is built or installed; nothing but a C compiler is needed."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-O2", "-g", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-shared"]
# NCCL closes the library with its last communicator, and calls it afterwards: it must stay where it is
FLAGS += ["-Wl,-z,nodelete", "-Wl,-z,defs"]
LIBRARIES = ["-ldl", "-lpthread"]


def compiler() -> list[str]:
    """The command of the C compiler: $CC, or the first one found."""
    chosen = os.environ.get("CC")
    if chosen:
        return shlex.split(chosen)
    for name in ("cc", "gcc", "clang"):
        found = shutil.which(name)
        if found:
            return [found]
    raise RuntimeError("prismtrace-nccl-profiler needs a C compiler: install gcc or clang, or name one with CC=")


class CompileHook(BuildHookInterface):  # type: ignore[type-arg]
    """Puts the library into the package, and the platform into the wheel's name."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if not sys.platform.startswith("linux") or platform.architecture()[0] != "64bit":
            raise RuntimeError("prismtrace-nccl-profiler is for 64-bit Linux, as NCCL is")
        root = Path(self.root)
        target = root / "python" / "prismtrace_nccl_profiler" / "libprism_nccl_profiler.so"
        sources = sorted(str(path) for path in (root / "src").glob("*.c"))
        command = [*compiler(), *FLAGS, *sources, "-o", str(target), *LIBRARIES]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stdout}{done.stderr}")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
