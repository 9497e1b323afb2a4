"""Compiles the library that serves a rank's device memory, on first use, and keeps it for the next time.

Responsible for finding a compiler and for the cache; loading and using the library is library.py's.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from prism_sdk.errors import UnsupportedError

__all__ = ["compiled_library"]

_SOURCES = ("pages.c", "libraries.c", "moving.c", "pool.c", "service.c")
_FLAGS = ("-std=c11", "-O2", "-g", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-shared", "-Wl,-z,defs")
_LIBRARIES = ("-ldl", "-lpthread")
_COMPILERS = ("cc", "gcc", "clang")


def compiled_library() -> Path:
    """The library, compiled unless it is in the cache already.

    Raises:
        UnsupportedError: there is no C compiler, or it failed.
    """
    sources = [Path(__file__).with_name(name) for name in _SOURCES]
    header = Path(__file__).with_name("pages.h")
    digest = hashlib.sha256(" ".join((*_FLAGS, platform.machine())).encode())
    for path in (*sources, header):
        digest.update(path.read_bytes())
    name = f"pages-{digest.hexdigest()[:16]}.so"
    for folder in _folders():
        if (folder / name).is_file():
            return folder / name
    command = next((found for found in map(shutil.which, _COMPILERS) if found), None)
    if command is None:
        raise UnsupportedError(
            "moving device memory without a C compiler", hint=f"install one of {', '.join(_COMPILERS)}"
        )
    for folder in _folders():
        with contextlib.suppress(OSError):
            return _compile(command, sources, folder / name)
    raise UnsupportedError("moving device memory: there is no folder for the compiled library", hint="free disk space")


def _folders() -> Iterator[Path]:
    """Where the library may be: the user's cache, else a temporary folder that is the user's alone."""
    with contextlib.suppress(RuntimeError):  # no home
        yield Path.home() / ".cache" / "prism"
    temporary = Path(tempfile.gettempdir()) / f"prism-{os.getuid()}"
    with contextlib.suppress(OSError):
        temporary.mkdir(mode=0o700, exist_ok=True)
        status = temporary.lstat()
        if status.st_uid == os.getuid() and not status.st_mode & 0o022 and not temporary.is_symlink():
            yield temporary


def _compile(command: str, sources: Sequence[Path], target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        line = [command, *_FLAGS, *map(str, sources), "-o", str(made), *_LIBRARIES]
        done = subprocess.run(line, capture_output=True, text=True, errors="replace")
        if done.returncode:
            raise UnsupportedError(f"moving device memory: {command} failed:\n{done.stdout}{done.stderr}".rstrip())
        made.replace(target)  # at once: another launch may be doing the same
    return target
