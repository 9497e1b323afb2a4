"""Exports and imports run in bounded memory: ten times the ranks need hardly more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from prismtrace import TraceWriter

_PROGRAM = """
import resource, sys
from pathlib import Path
import numpy, pyarrow.parquet
from prismtrace_arrow.exporting import ArrowExporter, ParquetExporter
from prismtrace_arrow.importing import ArrowImporter, ParquetImporter
kind, source, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
exporter, importer = {"arrow": (ArrowExporter, ArrowImporter), "parquet": (ParquetExporter, ParquetImporter)}[kind]
exporter().export_trace(source, output=folder / f"{source.stem}.{kind}", options={}, report=print)
sources = [folder / f"{source.stem}.{kind}"]
importer().import_trace(sources, output=folder / "back.prism", options={}, report=print)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def write_ranks(path: Path, num_ranks: int) -> Path:
    rows = 20_000
    random = np.random.default_rng(7)
    with TraceWriter(path, world_size=num_ranks) as writer:
        for rank in range(num_ranks):
            start = np.cumsum(random.integers(1, 10**6, rows))
            writer.add_units(rank, {"kind": np.ones(rows, np.uint8), "start_ns": start, "end_ns": start + 5})
    return path


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_memory_does_not_grow_with_ranks(tmp_path: Path, kind: str) -> None:
    peaks = []
    for num_ranks in (24, 72):
        source = write_ranks(tmp_path / f"{num_ranks}.prism", num_ranks)
        command = [sys.executable, "-c", _PROGRAM, kind, str(source), str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout.split()[-1]) / 1024)
    # 960,000 rows more, which are about 140 MB as columns
    assert peaks[1] - peaks[0] < 30, peaks
