"""Both readers agree with the conformance vectors of the specification."""

from __future__ import annotations

import enum
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from foreign_reader import Refused
from foreign_reader import read as foreign_read

import prismtrace
from prismtrace import _generated, container, encoding, entries, metas, model
from prismtrace._generated import schema
from prismtrace.columns import MAX_LIST_VALUES

SPEC = Path(prismtrace.__file__).resolve().parents[1] / "spec"
VECTORS = SPEC / "conformance"
MANIFEST: dict[str, list[dict[str, Any]]] = json.loads((VECTORS / "manifest.json").read_text(encoding="utf-8"))
ERRORS = {
    "unfinished": prismtrace.TraceUnfinishedError,
    "truncated": prismtrace.TraceTruncatedError,
    "checksum": prismtrace.TraceChecksumError,
    "version": prismtrace.TraceVersionError,
    "limit": prismtrace.TraceLimitError,
    "format": prismtrace.TraceFormatError,
    "data": prismtrace.TraceDataError,
}

BROKEN = [vector for vector in MANIFEST["invalid"] if "error" in vector]
CONTRADICTORY = [vector for vector in MANIFEST["invalid"] if "findings" in vector]


REGISTERED = ("GraphKind", "UnitKind", "Phase", "Op", "ReduceOp", "DType")


def name_of(vector: dict[str, Any]) -> str:
    return Path(vector["file"]).stem


def digest_of(twin: dict[str, Any]) -> str:
    text = json.dumps(twin, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.blake2b(text.encode("utf-8"), digest_size=16).hexdigest()


@pytest.mark.parametrize("vector", MANIFEST["valid"], ids=name_of)
def test_valid_vectors_say_what_their_twin_says(vector: dict[str, Any]) -> None:
    ours = prismtrace.to_json(VECTORS / vector["file"])
    theirs = foreign_read((VECTORS / vector["file"]).read_bytes())
    if "twin" in vector:
        twin = json.loads((VECTORS / vector["twin"]).read_text(encoding="utf-8"))
        assert ours == twin
        assert theirs == twin
    else:
        assert digest_of(ours) == digest_of(theirs) == vector["twin_blake2b"]


@pytest.mark.parametrize("vector", BROKEN, ids=name_of)
def test_invalid_vectors_are_refused_by_name(vector: dict[str, Any]) -> None:
    path = VECTORS / vector["file"]
    with pytest.raises(ERRORS[vector["error"]]) as caught:
        prismtrace.to_json(path)
    assert type(caught.value) is ERRORS[vector["error"]]
    assert caught.value.path == str(path)
    with pytest.raises(Refused):
        foreign_read(path.read_bytes())
    assert prismtrace.validate(path)


@pytest.mark.parametrize("vector", CONTRADICTORY, ids=name_of)
def test_contradictory_vectors_are_found(vector: dict[str, Any]) -> None:
    assert {item.code for item in prismtrace.validate(VECTORS / vector["file"])} == set(vector["findings"])


def test_every_vector_is_in_the_manifest_and_small() -> None:
    listed = {vector["file"] for part in ("valid", "invalid") for vector in MANIFEST[part]}
    assert listed == {f"{path.parent.name}/{path.name}" for path in VECTORS.glob("*/*.prism")}
    assert sum(path.stat().st_size for path in VECTORS.rglob("*")) < 350_000


def test_vectors_are_what_the_generator_makes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, VECTORS / "generate.py", tmp_path], check=True)
    assert json.loads((tmp_path / "manifest.json").read_text(encoding="utf-8")) == MANIFEST
    twins = [vector for vector in MANIFEST["valid"] if "twin" in vector]
    for vector in twins:  # another zstd may give other bytes, never another twin
        assert (tmp_path / vector["twin"]).read_text() == (VECTORS / vector["twin"]).read_text(encoding="utf-8")


def test_enumerations_are_those_of_the_schema() -> None:
    for name in ("GraphKind", "TableKind", "ColumnType", "EventKind", "TrackKind", *REGISTERED):
        ours: type[enum.IntEnum] = getattr(model, name)
        theirs = {key: value for key, value in vars(getattr(schema, name)).items() if key.isupper()}
        assert {item.name: item.value for item in ours} == theirs
        assert ours(0).name == "UNSPECIFIED"
    assert _generated.__doc__


def test_structs_have_the_sizes_of_the_schema() -> None:
    assert encoding.STREAM_DTYPE.itemsize == schema.Stream.SizeOf() == 40
    assert entries.CHUNK_ENTRY.itemsize == schema.ChunkEntry.SizeOf() == 88
    assert entries.PAYLOAD_ENTRY.itemsize == schema.PayloadEntry.SizeOf() == 56
    assert entries.RANK_RANGE.itemsize == schema.RankRange.SizeOf() == 12


def test_the_registry_lists_every_column_and_enumerator() -> None:
    text = (SPEC / "registry.md").read_text(encoding="utf-8")
    for specs in model.COLUMNS.values():
        for spec in specs:
            optional = "yes" if spec.optional else "no"
            assert f"| {spec.column_id} | `{spec.name}` | {spec.type.name} | {optional} | {spec.unit or '-'} |" in text
    for name in ("EventKind", "TrackKind", *REGISTERED):
        row = ", ".join(f"{item.value} {item.name}" for item in getattr(model, name))
        assert row in text, name


def test_the_specification_states_the_limits_of_the_library() -> None:
    text = (SPEC / "trace-format.md").read_text(encoding="utf-8")
    for value in (metas.MAX_CHUNK_ROWS, encoding.MAX_STREAM_BYTES, MAX_LIST_VALUES, container.MAX_META_BYTES):
        assert f"2^{value.bit_length() - 1}" in text


def test_import_is_light() -> None:
    code = (
        "import sys, time; t = time.process_time(); import prismtrace; t = time.process_time() - t;"
        "bad = {'torch', 'click', 'pluggy', 'hypothesis', 'asyncio'} & set(sys.modules); print(t); sys.exit(bool(bad))"
    )
    runs = [subprocess.run([sys.executable, "-c", code], check=True, capture_output=True) for _ in range(5)]
    assert min(float(run.stdout) for run in runs) < 0.5


def test_exported_names_are_sorted_and_exist() -> None:
    assert prismtrace.__all__ == sorted(prismtrace.__all__)
    assert all(hasattr(prismtrace, name) for name in prismtrace.__all__)
