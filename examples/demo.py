"""The whole of Prism on a laptop: observe, record, calibrate, emulate and compare a small GPT trained with FSDP2.

    python examples/demo.py            what `make demo` runs
    python examples/demo.py --quick    two repeats, few steps

It only runs the ``prism`` command, as a user would, and prints one table at the end; everything that it says can be
done by hand with the commands that it shows.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("train_fsdp2_gpt.py")


@dataclass
class Demo:
    """Runs the commands, one line each, and keeps what they print in log files."""

    folder: Path
    is_verbose: bool
    started: float = field(default_factory=time.monotonic)
    num_done: int = 0
    num_total: int = 0

    def prism(self, what: str, *arguments: str | Path) -> str:
        """Run ``prism`` with ``arguments``; show one line; end the demo with the tool's own words if it fails."""
        self.num_done += 1
        command = ["prism", *map(str, arguments)]
        print(f"[{self.num_done:2}/{self.num_total}] {what:<58}", end="", flush=True)
        if self.is_verbose:
            print(f"\n        $ {shlex.join(command)}", flush=True)
        log = self.folder / f"{self.num_done:02}-{arguments[0]}.log"
        begin = time.monotonic()
        with log.open("w", encoding="utf-8") as output:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=output, text=True, errors="replace")
            output.write(done.stdout)
        if done.returncode != 0:
            print(f" failed after {time.monotonic() - begin:.0f} s\n\n  $ {shlex.join(command)}\n", flush=True)
            print("".join(f"  {line}\n" for line in log.read_text(errors="replace").splitlines()[-25:]))
            sys.exit(f"The demo ends here: the command above returned {done.returncode}. All output: {log}")
        print(f" {time.monotonic() - begin:5.1f} s", flush=True)
        return done.stdout

    def heading(self, text: str) -> None:
        print(f"\n{text}", flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="real runs and emulations, taken by turns")
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps of the first part")
    parser.add_argument("--ranks", type=int, default=8, help="logical ranks of the second part")
    parser.add_argument("--quick", action="store_true", help="two repeats of six steps")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder for traces and logs")
    parser.add_argument("--verbose", action="store_true", help="show every command")
    return parser.parse_args()


def first_part(demo: Demo, *, repeats: int, steps: int) -> dict[str, Any]:
    """Two real ranks against one sandbox rank and one virtual rank."""
    program = ["--", SCRIPT, "--steps", str(steps)]
    folder = demo.folder
    demo.heading("1. Two real ranks, and the same job with one of them real and the other one virtual")
    demo.prism("record: both ranks by turns -> bare graph", "record", "--nproc-per-node", "2", "--slots", "1",
               "-o", folder / "bare.prism", *program)  # fmt: skip
    demo.prism("calibrate: the times, a slice of ranks at a time", "calibrate", "--graph", folder / "bare.prism",
               "-o", folder / "graph.prism", *program)  # fmt: skip
    for repeat in range(repeats):
        demo.prism(f"observe: both ranks real ({repeat + 1} of {repeats})", "observe", "--nproc-per-node", "2",
                   "-o", folder / f"real{repeat}.prism", *program)  # fmt: skip
        demo.prism(f"emulate: rank 0 real, rank 1 virtual ({repeat + 1} of {repeats})", "emulate", "--sandbox", "0",
                   "--graph", folder / "graph.prism", "-o", folder / f"emulated{repeat}.prism", *program)  # fmt: skip
    more = [
        argument
        for repeat in range(1, repeats)
        for argument in ("--real", folder / f"real{repeat}.prism", "--other", folder / f"emulated{repeat}.prism")
    ]
    return json.loads(
        demo.prism("compare", "compare", "--json", folder / "real0.prism", folder / "emulated0.prism", *more)
    )


def second_part(demo: Demo, *, ranks: int) -> dict[str, Any]:
    """More ranks than there are cores; the recorded losses are the reference."""
    program = ["--", SCRIPT, "--steps", "5", "--batch", "4"]
    folder = demo.folder
    demo.heading(f"2. {ranks} ranks on 2 slots, and one of them emulated")
    demo.prism(f"record: {ranks} ranks on 2 slots -> bare graph", "record", "--nproc-per-node", str(ranks),
               "--slots", "2", "-o", folder / "bare-many.prism", *program)  # fmt: skip
    demo.prism("calibrate: the times, two ranks at a time", "calibrate", "--slots", "2",
               "--graph", folder / "bare-many.prism", "-o", folder / "graph-many.prism", *program)  # fmt: skip
    demo.prism(f"emulate: rank 0 real, {ranks - 1} ranks virtual", "emulate", "--sandbox", "0",
               "--graph", folder / "graph-many.prism", "-o", folder / "emulated-many.prism", *program)  # fmt: skip
    return json.loads(
        demo.prism("compare", "compare", "--json", folder / "graph-many.prism", folder / "emulated-many.prism")
    )


def milliseconds(mean_ns: float | None, spread_percent: float | None) -> str:
    if mean_ns is None:
        return "-"
    return f"{mean_ns / 1e6:.1f} ms" + ("" if spread_percent is None else f" ±{spread_percent:.1f} %")


def rows_of(comparison: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """What the table says of rank 0: step time, memory, and the loss of each step."""
    rank = next(entry for entry in comparison["ranks"] if entry["rank"] == 0)
    rows: list[tuple[str, str, str, str]] = []
    times, memory, loss = rank.get("step_time"), rank.get("memory"), rank.get("loss")
    if times:
        error = times["error_percent"]
        rows.append((
            "step time, mean ± spread",
            milliseconds(times["real_mean_ns"], times["real_spread_percent"]),
            milliseconds(times["other_mean_ns"], times["other_spread_percent"]),
            "-" if error is None else f"{error:+.2f} %",
        ))  # fmt: skip
    if memory:
        real, other = max(memory["real_peak_bytes"]), max(memory["other_peak_bytes"])
        rows.append(("memory peak", f"{real / 2**20:.1f} MiB", f"{other / 2**20:.1f} MiB", f"{other - real:+,} B"))
    if loss:
        for step, real, other in zip(loss["steps"], loss["real"], loss["other"], strict=True):
            verdict = "equal" if real == other else f"{abs(real - other):.1e}"
            rows.append((f"loss of step {step}", f"{real:.7f}", f"{other:.7f}", verdict))
    return rows


def print_table(title: str, heads: tuple[str, str], rows: list[tuple[str, str, str, str]]) -> None:
    table = [("", *heads, "difference"), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(4)]
    rule = "  ".join("-" * width for width in widths)
    print(f"\n{title}\n{rule}")
    for number, row in enumerate(table):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        print("  ".join(cells).rstrip())
        if number == 0:
            print(rule)


def main() -> None:
    args = parse_args()
    if shutil.which("prism") is None:
        sys.exit("the command `prism` is not on PATH: run `make demo`, or activate the environment Prism lives in")
    repeats, steps = (2, 6) if args.quick else (args.repeats, args.steps)
    args.output.mkdir(parents=True, exist_ok=True)
    demo = Demo(folder=args.output, is_verbose=args.verbose, num_total=2 + 2 * repeats + 1 + 4)
    print(f"A small GPT, trained with FSDP2 ({SCRIPT.name}, unmodified). Traces and logs go to {args.output}/")
    first = first_part(demo, repeats=repeats, steps=steps)
    second = second_part(demo, ranks=args.ranks)
    print_table(f"Rank 0 of 2: {repeats} real runs and {repeats} emulations, taken by turns",
                ("2 real ranks", "1 real, 1 virtual"), rows_of(first))  # fmt: skip
    print_table(f"Rank 0 of {args.ranks}: recorded and calibrated on 2 slots, then emulated alone",
                (f"{args.ranks} ranks on 2 slots", f"1 real, {args.ranks - 1} virtual"), rows_of(second))  # fmt: skip
    minutes, seconds = divmod(int(time.monotonic() - demo.started), 60)
    print(f"\nDone in {minutes} min {seconds:02} s. Look further: prism info {args.output}/graph.prism")


if __name__ == "__main__":
    main()
