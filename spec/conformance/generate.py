#!/usr/bin/env python3
"""Writes the conformance vectors: small traces, what they say (JSON twins), and why the others must be refused.

Does not test anything: tests/trace/test_conformance.py does, with both readers. Run it only when the format changes
(`python spec/conformance/generate.py [FOLDER]`); the files are committed. A released vector is never changed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[2])]

from contradictory_vectors import contradictory_vectors  # noqa: E402
from invalid_vectors import invalid_vectors  # noqa: E402
from valid_vectors import valid_vectors  # noqa: E402

from prismtrace import to_json  # noqa: E402

WRITER = "prismtrace 1.0.0"


def twin_digest(twin: dict[str, Any]) -> str:
    """BLAKE2b-128 of a twin as JSON with sorted keys, without spaces, in UTF-8."""
    text = json.dumps(twin, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.blake2b(text.encode("utf-8"), digest_size=16).hexdigest()


def main(folder: Path) -> None:
    """Writes all vectors. The writer that they name is not that of today: they stay when the library gets a version."""
    with mock.patch("prismtrace.writer.WRITER_NAME", WRITER), mock.patch("prismtrace.merge.WRITER_NAME", WRITER):
        _write(folder)


def _write(folder: Path) -> None:
    for name in ("valid", "invalid"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(parents=True)
    valid: list[dict[str, Any]] = []
    invalid: list[dict[str, Any]] = []
    for name, vector in valid_vectors().items():
        path = folder / "valid" / f"{name}.prism"
        path.write_bytes(vector.raw)
        entry: dict[str, Any] = {"file": f"valid/{name}.prism"}
        twin = to_json(path)
        if vector.twin:
            text = json.dumps(twin, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
            path.with_suffix(".json").write_text(text, encoding="utf-8")
            entry["twin"] = f"valid/{name}.json"
        else:
            entry["twin_blake2b"] = twin_digest(twin)
        valid.append(entry | {"summary": vector.summary, "features": list(vector.features)})
    for name, (error, summary, raw) in invalid_vectors().items():
        (folder / "invalid" / f"{name}.prism").write_bytes(raw)
        invalid.append({"file": f"invalid/{name}.prism", "error": error, "summary": summary})
    for name, (codes, summary, raw) in contradictory_vectors().items():
        (folder / "invalid" / f"{name}.prism").write_bytes(raw)
        invalid.append({"file": f"invalid/{name}.prism", "findings": codes, "summary": summary})
    manifest = {"format": "1.1", "valid": valid, "invalid": invalid}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent)
