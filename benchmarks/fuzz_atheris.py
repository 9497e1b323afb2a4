"""Fuzzes the reader or an importer, guided by coverage (atheris, libFuzzer). Judges no values, only how it fails.

For the reader the checksums are made right after each mutation. `tests/trace/test_atheris.py` runs it for a second;
needs `pip install atheris`.

    python benchmarks/fuzz_atheris.py -max_total_time=240 -rss_limit_mb=1024 -timeout=10 CORPUS_FOLDER
    python benchmarks/fuzz_atheris.py --importer=kineto -max_total_time=240 -rss_limit_mb=2048 -timeout=10 CORPUS_FOLDER
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

import atheris

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "trace"))
sys.path.insert(0, str(ROOT))
IMPORTER = next((text.partition("=")[2] for text in sys.argv if text.startswith("--importer=")), "")

_PLUGINS = {"kineto": "kineto", "flight_recorder": "flight_recorder", "chakra": "chakra", "pytorch_et": "chakra"}
_SEEDS = {"kineto": "*.json", "flight_recorder": "gloo_trace_*", "chakra": "*.et", "pytorch_et": "dlrm_eg_0.json"}
_ENDINGS = {"kineto": ".json", "flight_recorder": "", "chakra": ".et", "pytorch_et": ".json"}

with atheris.instrument_imports(include=[f"prismtrace_{_PLUGINS[IMPORTER]}" if IMPORTER else "prismtrace"]):
    import prismtrace
    from prism_sdk.conversion import convert
    from prism_sdk.errors import PrismError
    from prism_sdk.plugins import PluginManager

    if IMPORTER:
        manager = PluginManager()
        manager.importer(IMPORTER)

from trace_edits import put_together, repaired, take_apart  # noqa: E402
from trace_faults import everything  # noqa: E402

LIMIT_BYTES = 32 << 20
FOLDER = Path(tempfile.mkdtemp(prefix="fuzz-"))


def read_one(data: bytes) -> None:
    """Reads one input, finished or not."""
    try:
        everything(io.BytesIO(repaired(data)), allow_unfinished=True, max_result_bytes=LIMIT_BYTES)
    except prismtrace.PrismTraceError:
        pass


def import_one(data: bytes) -> None:
    """Imports one input; what comes out must be readable, what is raised must be an error of the importer's own."""
    source, output = FOLDER / f"rank-0{_ENDINGS[IMPORTER]}", FOLDER / "out.prism"
    source.write_bytes(data)
    try:
        convert(
            manager, [source], output=output, importer=IMPORTER, options={"rank": "0"}, overwrite=True,
            report=lambda line: None,
        )  # fmt: skip
    except (PrismError, prismtrace.PrismTraceError) as error:
        if "failed on it" in str(error) and error.__cause__ is not None:
            raise error.__cause__ from None
        return
    unreadable = [item for item in prismtrace.validate(output) if item.code in ("PT001", "PT002", "PT003", "PT006")]
    assert not unreadable, unreadable[0]


def _seed(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if IMPORTER:
        for path in (ROOT / "plugins" / _PLUGINS[IMPORTER] / "tests/data").glob(_SEEDS[IMPORTER]):
            (folder / path.name).write_bytes(path.read_bytes())
        return
    for path in (ROOT / "spec/conformance/valid").glob("*.prism"):
        if path.stem == "roles_8192":  # to read all of its ranks takes seconds
            continue
        raw = path.read_bytes()
        (folder / path.stem).write_bytes(raw)
        (folder / f"{path.stem}-unfinished").write_bytes(put_together(take_apart(raw), raw[:8], finished=False))


def main() -> None:
    arguments = [argument for argument in sys.argv if not argument.startswith("--")]
    for folder in [Path(argument) for argument in arguments[1:] if not argument.startswith("-")][:1]:
        _seed(folder)
    atheris.Setup(arguments, import_one if IMPORTER else read_one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
