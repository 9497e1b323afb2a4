"""Prism finds the importers and exporters of this plugin, and lists them without importing pyarrow."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import prismtrace_arrow
import pyarrow.parquet as pq
from arrow_samples import convert, write_sample

from prism_sdk.testing import isolated_manager


def test_they_are_registered() -> None:
    manager = isolated_manager(prismtrace_arrow)
    assert set(manager.importers()) == {"arrow", "parquet", "straggler", "table"}
    assert set(manager.exporters()) == {"arrow", "parquet"}


def test_the_entry_point_imports_nothing_heavy() -> None:
    program = "import sys, prismtrace_arrow; sys.exit('pyarrow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_one_importer_recognises_each_file(tmp_path: Path) -> None:
    manager = isolated_manager(prismtrace_arrow)
    source = write_sample(tmp_path / "a.prism")
    for name, exporter in manager.exporters().items():
        convert(exporter, source, tmp_path / f"u.{name}")
    pq.write_table(pq.read_table(tmp_path / "u.parquet").select(["unit_index"]), tmp_path / "other.parquet")
    excerpt = Path(__file__).parent / "data" / "trace-ST-2steps.parquet"
    found = {
        path.name: [n for n, i in manager.importers().items() if i.recognises(path, path.read_bytes()[: 1 << 16])]
        for path in (tmp_path / "u.arrow", tmp_path / "u.parquet", excerpt, source)
    }
    assert found == {"u.arrow": ["arrow"], "u.parquet": ["parquet"], excerpt.name: ["straggler"], "a.prism": []}
