"""Measures the Kineto importer against gzip and HolisticTraceAnalysis. Does not test correctness.

Usage: python benchmarks/kineto_import.py FOLDER [--repeats N]

FOLDER holds the published traces (hta/, tracelens/, param/). Every run is a fresh process; importer and peer take
turns, the medians are shown. Time and memory are those of the call after the imports of modules: peak is VmHWM minus
the RSS before. The peer is HolisticTraceAnalysis with pandas<3 (`pip install HolisticTraceAnalysis 'pandas<3'`);
without it there is no ratio.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

FILES = {
    "hta/nccl_data.json.gz": 6,
    "hta/rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz": 6,
    "tracelens/resnet_act_checkpoint.json.gz": 6,
    "param/dlrm_kineto.tar.gz": 10,
}


def status(key: str) -> int:
    """One figure of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def measured(kind: str, source: Path, output: Path) -> dict[str, float]:
    """Seconds and peak bytes of one import; runs in a process of its own."""
    if kind == "peer":
        import logging

        from hta.common.trace import parse_trace_file

        logging.disable(logging.CRITICAL)
        paths = sorted(source.iterdir()) if source.is_dir() else [source]
        before, start = status("VmRSS"), time.perf_counter()
        kept = [parse_trace_file(str(path)) for path in paths]
        assert kept
    else:
        from prismtrace_kineto import communication, events, lossless, units  # noqa: F401
        from prismtrace_kineto.importer import KinetoImporter

        options = {"lossless": "true"} if kind == "lossless" else {}
        before, start = status("VmRSS"), time.perf_counter()
        KinetoImporter().import_trace([source], output=output, options=options, report=lambda _: None)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "bytes": status("VmHWM") - before}


def texts(path: Path) -> list[bytes]:
    """The JSON of every rank."""
    if path.name.endswith(".tar.gz"):
        with tarfile.open(path) as archive:
            members = sorted((m for m in archive if m.isfile()), key=lambda m: m.name)
            return [content.read() for m in members if (content := archive.extractfile(m))]
    return [gzip.decompress(path.read_bytes())]


def child(kind: str, source: Path, output: Path) -> dict[str, float]:
    """`measured` in a fresh process."""
    command = [sys.executable, "-W", "ignore", __file__, "--child", kind, str(source), str(output)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    """Prints one line for each file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    has_peer = importlib.util.find_spec("hta") is not None
    kinds = ["lossless", "default", *(["peer"] if has_peer else [])]
    heads = f"{'file':24} {'gzip -6':>10} {'lossless':>9} {'ratio':>6} {'bar':>4}"
    print(f"{heads}  time and memory: lossless; default; peer; peer against lossless")
    with tempfile.TemporaryDirectory() as scratch:
        for name, bar in FILES.items():
            source, output = arguments.folder / name, Path(scratch) / "a.prism"
            documents = texts(source)
            packed = sum(len(gzip.compress(text, 6)) for text in documents)
            input_of = dict.fromkeys(kinds, source)
            if len(documents) > 1:
                folder = Path(scratch) / source.name
                folder.mkdir()
                for number, text in enumerate(documents):
                    (folder / f"{number}.json.gz").write_bytes(gzip.compress(text, 6))
                input_of["peer"] = folder
            runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
            size = 0
            for _ in range(arguments.repeats):
                for kind in kinds:
                    runs[kind].append(child(kind, input_of[kind], output))
                    if kind == "lossless":
                        size = output.stat().st_size
            figures = {}
            for kind, found in runs.items():
                figures[kind] = [statistics.median(run[key] for run in found) for key in ("seconds", "bytes")]
            shown = "; ".join(f"{seconds:.2f} s {peak / 1e6:.0f} MB" for seconds, peak in figures.values())
            if has_peer:
                one, peer = figures["lossless"], figures["peer"]
                times, memory = peer[0] / one[0], peer[1] / one[1]
                shown += f"; {times:.1f}x the time, {memory:.1f}x the memory"
            print(f"{source.name[:24]:24} {packed:10,} {size:9,} {packed / size:6.2f} {bar:4}  {shown}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        sys.stdout.write(json.dumps(measured(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))) + "\n")
    else:
        main()
