"""Fuzzes the reader guided by coverage (atheris, libFuzzer), behind checksums that are made right after each mutation.

Does not run in CI; needs `pip install atheris`.

    python benchmarks/fuzz_atheris.py -max_total_time=240 -rss_limit_mb=1024 -timeout=10 CORPUS_FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "trace"))
sys.path.insert(0, str(ROOT))

with atheris.instrument_imports(include=["prismtrace"]):
    import prismtrace

from trace_edits import put_together, repaired, take_apart  # noqa: E402
from trace_faults import everything  # noqa: E402

LIMIT_BYTES = 32 << 20


def try_one(data: bytes) -> None:
    """Reads one input, finished or not."""
    import io

    try:
        everything(io.BytesIO(repaired(data)), allow_unfinished=True, max_result_bytes=LIMIT_BYTES)
    except prismtrace.PrismTraceError:
        pass


def main() -> None:
    folders = [Path(argument) for argument in sys.argv[1:] if not argument.startswith("-")]
    for folder in folders[:1]:
        folder.mkdir(parents=True, exist_ok=True)
        for path in (ROOT / "spec/conformance/valid").glob("*.prism"):
            raw = path.read_bytes()
            (folder / path.stem).write_bytes(raw)
            (folder / f"{path.stem}-unfinished").write_bytes(put_together(take_apart(raw), raw[:8], finished=False))
    atheris.Setup(sys.argv, try_one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
