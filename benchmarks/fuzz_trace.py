"""Damages trace files, again and again, and counts what the reader makes of it.

Two bytes are changed anywhere; with --structure, what the records say is changed, and the checksums made right again.

Does not stop at a fault: it names it, keeps the file and goes on. The exit code is 1 after any fault.

    python benchmarks/fuzz_trace.py --count 100000
    python benchmarks/fuzz_trace.py --count 20000 --seed 7 my_trace.prism
    python benchmarks/fuzz_trace.py --count 20000 --structure
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import random
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "trace"))

from trace_edits import edited, put_together, take_apart  # noqa: E402
from trace_faults import (  # noqa: E402
    Memory,
    Outcome,
    check_hostile,
    corrupted,
    everything,
    read_damaged,
    structure_bytes,
    write_big,
)

HANG_S = 120


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000, help="files to damage")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--structure", action="store_true", help="change what records say, with right checksums")
    parser.add_argument("--seconds", type=float, help="stop after so much time")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-faults"), help="where files with faults are kept")
    parser.add_argument("files", nargs="*", type=Path, help="default: the valid conformance vectors and a bigger file")
    args = parser.parse_args()
    folder = tempfile.TemporaryDirectory()
    paths = args.files or [
        *sorted((ROOT / "spec/conformance/valid").glob("*.prism")),
        write_big(Path(folder.name) / "big.prism"),
    ]
    total: collections.Counter[str] = collections.Counter()
    faults, begun = 0, time.perf_counter()
    print(f"seed {args.seed}, {len(paths)} files\n\n| file | bytes | tried | refused | harmless | faults | per read |")
    print("|---|---|---|---|---|---|---|")
    for index, path in enumerate(paths):
        raw, memory = path.read_bytes(), Memory()
        rng = random.Random(f"{args.seed} {path.name}")
        wanted, structure, records = everything(path), structure_bytes(raw), take_apart(raw)
        share = args.count // len(paths) + (index < args.count % len(paths))
        counts: collections.Counter[Outcome] = collections.Counter()
        started = time.perf_counter()
        for number in range(share):
            if args.seconds and time.perf_counter() - begun > args.seconds:
                break
            finished = rng.random() < 0.5
            if args.structure:
                damaged = put_together(edited(records, rng), raw[:8], finished=finished)
            else:
                damaged = corrupted(raw, structure, rng)
            faulthandler.dump_traceback_later(HANG_S, exit=True)
            if args.structure:
                result = check_hostile(damaged, memory, allow_unfinished=not finished)
            else:
                result = read_damaged(damaged, wanted, memory)
            faulthandler.cancel_dump_traceback_later()
            counts[result.outcome] += 1
            total[result.detail if result.outcome is Outcome.REFUSED else result.outcome.value] += 1
            if result.outcome.is_fault:
                faults += 1
                args.keep.mkdir(parents=True, exist_ok=True)
                (args.keep / f"{path.stem}-{args.seed}-{number}.prism").write_bytes(damaged)
                print(f"\nFAULT {path.name} #{number}: {result}", flush=True)
            if number % 500 == 0 and sys.stderr.isatty():
                done = sum(total.values())
                print(f"\r{done} of {args.count}, {faults} faults ", end="", file=sys.stderr, flush=True)
        tried = sum(counts.values())
        bad = sum(count for outcome, count in counts.items() if outcome.is_fault)
        each = 1000 * (time.perf_counter() - started) / max(1, tried)
        refused, harmless = counts[Outcome.REFUSED], counts[Outcome.HARMLESS]
        print(f"| {path.name} | {len(raw)} | {tried} | {refused} | {harmless} | {bad} | {each:.2f} ms |", flush=True)
    folder.cleanup()
    print(f"\n{sum(total.values())} tried, {faults} faults, {time.perf_counter() - begun:.0f} s")
    print("; ".join(f"{name} {count}" for name, count in total.most_common()))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
