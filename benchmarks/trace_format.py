"""Measures the trace format: bytes a unit, time and memory of reading, throughput, opening large files.

Does not judge: it prints a Markdown table with the bars beside the figures. Peers run in the same run; medians.

    python benchmarks/trace_format.py --data FOLDER            # everything; FOLDER holds the published traces
    python benchmarks/trace_format.py throughput json          # parts: sizes json throughput open roles
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from trace_data import Job, JobShape, groups_of, primus, straggler, units_of

import prismtrace
from prismtrace import ABSENT, ABSENT32, TraceReader, TraceWriter

PARTS = ("sizes", "json", "throughput", "open", "roles")


def row(what: str, measured: str, bar: str) -> None:
    """Prints one line of the table."""
    print(f"| {what} | {measured} | {bar} |", flush=True)


def median_cpu_s(work: Callable[[], Any], repeats: int) -> float:
    """Median CPU time (user and system) of several runs: what one core needs, also on a machine that others use."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return statistics.median(times)


def write_job(path: Path, job: Job, *, world_size: int = 0) -> int:
    """Writes the units of a job, finds roles where the library can, and returns the size of the file."""
    with TraceWriter(path, world_size=world_size, overwrite=True) as writer:
        for rank, columns in job.items():
            writer.add_units(rank, columns)
    return compacted(path)


def compacted(path: Path) -> int:
    """The size of the file with equal structure stored once, if the library can do that."""
    compact = getattr(prismtrace, "compact", None)
    if compact is not None:
        smaller = path.with_suffix(".compact")
        compact(path, smaller, overwrite=True)
        if smaller.stat().st_size < path.stat().st_size:
            os.replace(smaller, path)
    return path.stat().st_size


def parquet_bytes(path: Path, job: Job) -> int:
    """The same fields as Parquet, zstd-9; integers as DELTA_BINARY_PACKED or as a dictionary, whichever is smaller."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    fields: dict[str, Any] = {}
    for name in next(iter(job.values())):
        if name == "label":
            fields[name] = pa.array([value for columns in job.values() for value in columns[name]])
            continue
        values = np.concatenate([columns[name] for columns in job.values()])
        absent = (values == ABSENT) | (values == ABSENT32) if values.dtype.kind == "i" else np.zeros(len(values), bool)
        fields[name] = pa.array(values, mask=absent if absent.any() else None)
    fields["rank"] = pa.array(np.concatenate([np.full(len(c["kind"]), r, np.int32) for r, c in job.items()]))
    table = pa.table(fields)
    integers = [f.name for f in table.schema if f.type in (pa.int32(), pa.int64())]
    sizes = []
    for delta in (integers, ["start_ns", "end_ns"]):
        parquet.write_table(
            table,
            path,
            compression="zstd",
            compression_level=9,
            use_dictionary=[name for name in table.column_names if name not in delta],
            column_encoding=dict.fromkeys(delta, "DELTA_BINARY_PACKED"),
        )
        sizes.append(path.stat().st_size)
    return min(sizes)


def measure_sizes(folder: Path, data: Path | None) -> None:
    """Published unit traces in ns: bytes a unit, and against Parquet."""
    if data is None:
        row("unit traces, bytes a unit", "needs --data", "6")
        return
    jobs = {
        "straggler_analysis ST": straggler(data / "straggler_analysis/trace-ST.parquet"),
        "primus pp8": primus(data / "primus/pp8"),
        "primus pp8_vpp2": primus(data / "primus/pp8_vpp2"),
    }
    for name, job in jobs.items():
        count = sum(len(columns["kind"]) for columns in job.values())
        ours = write_job(folder / "sizes.prism", job, world_size=len(job))
        theirs = parquet_bytes(folder / "sizes.parquet", job)
        row(f"{name}, {count} units: bytes a unit", f"{ours / count:.2f} (Parquet {theirs / count:.2f})", "<= 6")
        row(f"{name}: size against Parquet", f"{ours / theirs:.2f}", "<= 0.5")


CHILD = """
import sys, time, json
sys.path[:0] = {path!r}
{setup}
def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key)) * 1024
base = status("VmRSS:")
begun = time.process_time()
{work}
print(json.dumps([time.process_time() - begun, status("VmHWM:") - base]))
"""


def in_child(setup: str, work: str) -> tuple[float, float]:
    """CPU seconds and bytes of peak memory of some code in a fresh process."""
    code = CHILD.format(path=sys.path[:2], setup=setup, work=work)
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    seconds, peak = json.loads(done.stdout)
    return seconds, peak


def as_records(job: Job) -> list[dict[str, Any]]:
    """One object a unit, absent fields left out: how traces are usually written as JSON."""
    records = []
    for rank, columns in job.items():
        lists = {column: np.asarray(values).tolist() for column, values in columns.items()}
        for values in zip(*lists.values(), strict=True):
            pairs = zip(lists, values, strict=True)
            records.append({"rank": rank, **{k: v for k, v in pairs if v not in (ABSENT, ABSENT32)}})
    return records


def as_lists(job: Job) -> dict[int, dict[str, list[Any]]]:
    """One list a column and rank, null where absent: the JSON that is quickest to load."""
    return {
        rank: {
            column: [None if value in (ABSENT, ABSENT32) else value for value in np.asarray(values).tolist()]
            for column, values in columns.items()
        }
        for rank, columns in job.items()
    }


def measure_json(folder: Path, repeats: int, data: Path | None) -> None:
    """Reading all columns into numpy against json.load of the same data, each in a fresh process; CPU time."""
    jobs: dict[str, Job] = {}
    for shape in (JobShape(num_ranks=32, num_units=16_000), JobShape(num_ranks=128)):
        name = f"generated, {shape.num_ranks} ranks x {shape.num_units:,} units"
        jobs[name] = {rank: units_of(shape, rank) for rank in range(shape.num_ranks)}
    if data is not None:
        jobs["straggler_analysis ST, 8 ranks x 848 units"] = straggler(data / "straggler_analysis/trace-ST.parquet")
    trace, text = folder / "read.prism", folder / "read.json"
    read = f"reader = prismtrace.TraceReader({str(trace)!r}); kept = [reader.units(rank) for rank in reader.ranks]"
    load = f"file = open({str(text)!r}); kept = json.load(file)"
    for name, job in jobs.items():
        write_job(trace, job)
        forms: tuple[tuple[str, Callable[[Job], Any]], ...] = (
            ("an object a unit", as_records),
            ("a list a column", as_lists),
        )
        for form, convert in forms:
            text.write_text(json.dumps(convert(job), separators=(",", ":")), encoding="utf-8")
            pairs = [(in_child("import prismtrace", read), in_child("import prismtrace", load)) for _ in range(repeats)]
            faster = statistics.median(theirs[0] / ours[0] for ours, theirs in pairs)
            smaller = statistics.median(theirs[1] / ours[1] for ours, theirs in pairs)
            seconds = [statistics.median(pair[side][0] for pair in pairs) for side in (0, 1)]
            peaks = [statistics.median(pair[side][1] for pair in pairs) / 2**20 for side in (0, 1)]
            row(
                f"{name}: all columns against json.load, {form}",
                f"{faster:.1f}x ({seconds[0]:.3f} s, {seconds[1]:.3f} s)",
                ">= 20x",
            )
            row("... peak memory", f"1/{smaller:.1f} ({peaks[0]:.1f} MiB, {peaks[1]:.1f} MiB)", "<= 1/5")


def measure_throughput(folder: Path, repeats: int) -> None:
    """Million units a second of CPU time, all columns of the generated job and the columns of a timeline."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    shape = JobShape(num_ranks=8, num_units=250_000)
    job = {rank: units_of(shape, rank) for rank in range(shape.num_ranks)}
    count = shape.num_ranks * shape.num_units
    few = ("kind", "phase", "step", "start_ns", "end_ns", "group_id", "seq", "microbatch")
    for name, columns in (("8 columns", few), (f"{len(job[0])} columns", tuple(job[0]))):
        part = {rank: {key: told[key] for key in columns} for rank, told in job.items()}
        path = folder / "throughput.prism"

        def write(part: Job = part, path: Path = path) -> None:
            with TraceWriter(path, overwrite=True) as writer:
                for rank, told in part.items():
                    writer.add_units(rank, told)

        def read(path: Path = path) -> None:
            with TraceReader(path) as reader:
                for rank in reader.ranks:
                    reader.units(rank)

        write_s, read_s = median_cpu_s(write, repeats), median_cpu_s(read, repeats)
        size = path.stat().st_size / count
        row(f"write, one core, {name}, {size:.2f} B/unit", f"{count / write_s / 1e6:.1f} M units/CPU s", ">= 5 M")
        row(f"read, one core, {name}", f"{count / read_s / 1e6:.1f} M units/CPU s", ">= 20 M")
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


def measure_open(folder: Path, repeats: int) -> None:
    """Opening a file of 8,192 ranks, and reading one rank, one step, one column of it."""
    shape = JobShape(num_ranks=8192, num_stages=8, num_units=400)
    path = folder / "open.prism"
    with TraceWriter(path, world_size=shape.num_ranks) as writer:
        for group in groups_of(shape):
            writer.add_group(group)
        for rank in range(shape.num_ranks):
            writer.add_units(rank, units_of(shape, rank))
    for name in ("plain", "roles"):
        if name == "roles" and (not hasattr(prismtrace, "compact") or compacted(path) == 0):
            break
        setup = "import prismtrace"
        opened = statistics.median(in_child(setup, f"prismtrace.TraceReader({str(path)!r})")[0] for _ in range(repeats))
        row(f"open 8,192 ranks ({name}, {path.stat().st_size / 2**20:.1f} MiB)", f"{opened:.3f} s", "< 1 s")
        setup += f"; reader = prismtrace.TraceReader({str(path)!r})"
        for what, work in {
            "one rank": "reader.units(5000)",
            "one step of one rank": "reader.units(5000, steps=2)",
            "one column of one rank": "reader.units(5000, columns=['start_ns'])",
        }.items():
            row(
                f"... {what}",
                f"{1000 * statistics.median(in_child(setup, work)[0] for _ in range(repeats)):.1f} ms",
                "",
            )


def measure_roles(folder: Path) -> None:
    """1,024 ranks of one job: bytes a unit with equal structure stored once."""
    shape = JobShape(num_ranks=1024)
    count = shape.num_ranks * shape.num_units
    for own_times, bar in ((False, "< 1"), (True, "< 7")):
        path = folder / "roles.prism"
        with TraceWriter(path, world_size=shape.num_ranks, overwrite=True) as writer:
            for rank in range(shape.num_ranks):
                writer.add_units(rank, units_of(shape, rank, own_times=own_times))
        plain = path.stat().st_size
        size = compacted(path)
        what = "every rank's own times" if own_times else "shared times"
        row(
            f"1,024 ranks x {shape.num_units} units, {what}: bytes a unit",
            f"{size / count:.2f} (without roles {plain / count:.2f})",
            bar,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="what to measure; default: everything")
    parser.add_argument("--data", type=Path, help="folder with straggler_analysis/ and primus/")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print("| what | measured | bar |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in args.parts or PARTS:
            if part == "sizes":
                measure_sizes(folder, args.data)
            elif part == "json":
                measure_json(folder, args.repeats, args.data)
            elif part == "throughput":
                measure_throughput(folder, args.repeats)
            elif part == "open":
                measure_open(folder, args.repeats)
            else:
                measure_roles(folder)
    print(f"\nload of the machine at the end: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
