"""The schema only grows: nothing that a released version says is changed, renamed or moved.

The tests parse the schema themselves; what needs flatc is skipped without it.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import prismtrace
from prismtrace.model import FORMAT_VERSION

SPEC = Path(prismtrace.__file__).resolve().parents[1] / "spec"
SCHEMA = SPEC / "prismtrace.fbs"
RELEASED = sorted((SPEC / "released").glob("prismtrace-*.fbs"))
Declarations = dict[str, list[str]]


def find_flatc() -> str | None:
    """The flatc that spec/generate.py would run."""
    loader = importlib.util.spec_from_file_location("prism_spec_generate", SPEC / "generate.py")
    assert loader is not None
    assert loader.loader is not None
    module = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(module)
    found: str | None = module.find_flatc()
    return found


FLATC = find_flatc()
needs_flatc = pytest.mark.skipif(FLATC is None, reason="flatc is for schema changes only")


def declarations(text: str) -> Declarations:
    """`kind NAME` -> its members in order, each with everything that is said about it."""
    text = re.sub(r"//[^\n]*", "", text)
    found = {"namespace": re.findall(r"namespace\s+([\w.]+)\s*;", text)}
    for kind, name, body in re.findall(r"\b(enum|table|struct)\s+(\w+)[^{]*\{([^}]*)\}", text):
        found[f"{kind} {name}"] = [" ".join(part.split()) for part in re.split("[,;]" if kind == "enum" else ";", body)]
        found[f"{kind} {name}"] = [part for part in found[f"{kind} {name}"] if part]
    return found


def changes(old: Declarations, new: Declarations) -> list[str]:
    """What `new` changes of `old`; additions at the end of enums and tables, and new declarations, are none."""
    found = []
    for name, members in old.items():
        now = new.get(name)
        if now is None:
            found.append(f"{name} is gone or has another name")
        elif name.startswith(("struct", "namespace")) and now != members:
            found.append(f"{name} is another one: {members} -> {now}")
        else:
            found += [f"{name}: {a} -> {b}" for a, b in zip(members, now, strict=False) if a != b]
            found += [f"{name}: {gone} is gone" for gone in members[len(now) :]]
    return found


@pytest.mark.parametrize("released", RELEASED, ids=lambda path: path.stem)
def test_nothing_released_is_changed_or_renamed(released: Path) -> None:
    assert changes(declarations(released.read_text()), declarations(SCHEMA.read_text())) == []


def test_the_present_version_is_frozen() -> None:
    version = ".".join(map(str, FORMAT_VERSION))
    frozen = SPEC / "released" / f"prismtrace-{version}.fbs"
    assert frozen in RELEASED
    assert declarations(frozen.read_text()) == declarations(SCHEMA.read_text())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("first_row:ulong (id: 2)", "first_line:ulong (id: 2)"),
        ("first_row:ulong (id: 2)", "first_row:uint (id: 2)"),
        ("num_rows:uint (id: 3)", "num_rows:uint (id: 33)"),
        ("OBSERVED = 1, BARE = 2", "BARE = 2, OBSERVED = 1"),
        ("RECV = 11", "RECEIVE = 11"),
        ("table KeyValue", "table Pair"),
        ("  base:long;", "  base:long;\n  more:uint;"),
        ("  writer:string (id: 6);", ""),
        ("namespace prism.trace.v1", "namespace prism.trace.v2"),
    ],
)
def test_forbidden_changes_are_seen(old: str, new: str) -> None:
    text = SCHEMA.read_text()
    assert old in text
    assert changes(declarations(text), declarations(text.replace(old, new)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("  writer:string (id: 6);", "  writer:string (id: 6);\n  more:uint (id: 7);"),
        ("RECV = 11", "RECV = 11, ALL_TO_SOME = 12"),
        ("table KeyValue", "table Later { value:uint (id: 0); }\ntable KeyValue"),
    ],
)
def test_additions_are_allowed(old: str, new: str) -> None:
    text = SCHEMA.read_text()
    assert changes(declarations(text), declarations(text.replace(old, new))) == []


def test_ids_are_explicit_and_every_enum_begins_with_unspecified() -> None:
    for name, members in declarations(SCHEMA.read_text()).items():
        if name.startswith("enum"):
            assert members[0] == "UNSPECIFIED = 0", name
            numbers = [int(member.split("=")[1]) for member in members]
            assert numbers == sorted(set(numbers)), name
        elif name.startswith("table"):
            ids = [int(re.search(r"\(id: (\d+)\)$", member)[1]) for member in members]  # type: ignore[index]
            assert ids == list(range(len(ids))), name


@needs_flatc
@pytest.mark.parametrize("released", RELEASED, ids=lambda path: path.stem)
def test_flatc_agrees(released: Path) -> None:
    subprocess.run([str(FLATC), "--conform", str(released), str(SCHEMA)], check=True)


@needs_flatc
def test_generated_code_is_up_to_date() -> None:
    subprocess.run([sys.executable, SPEC / "generate.py", "--check"], check=True)


@needs_flatc
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_generated_cpp_compiles_as_the_notes_say(tmp_path: Path) -> None:
    said = re.search(r"`flatc (--cpp [^`]+)`", (SPEC / "notes.md").read_text())
    assert said is not None
    subprocess.run([str(FLATC), *said[1].split(), "-o", str(tmp_path), str(SCHEMA)], check=True)
    headers = Path(sys.prefix) / "include"
    if not (headers / "flatbuffers" / "flatbuffers.h").exists():
        pytest.skip("flatc is not of the package that brings the headers")
    generated = tmp_path / "prismtrace_generated.h"
    subprocess.run(["g++", "-std=c++17", "-fsyntax-only", "-x", "c++", f"-I{headers}", str(generated)], check=True)
