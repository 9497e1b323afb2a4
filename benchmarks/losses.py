"""Losses of a recording against those of the real job: gloo with all ranks at once, then `prism record` on few slots.

    python benchmarks/losses.py --ranks 4 --ranks 16 -- examples/train_ddp.py --steps 3
    python benchmarks/losses.py --ranks 16 --list FILE      (a script and its arguments a line; {ranks} is replaced)

What is compared is every number that follows "loss" in what the job prints, sorted by the line it stands in (ranks may
print in any order), and the losses that each trace holds.  Nothing here measures time.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import numpy as np

from prismtrace import TraceReader


def printed(text: str) -> list[str]:
    """The losses in a job's output, each with what stands before it in its line."""
    return sorted(match[0] for match in re.finditer(r"^.*?\bloss[ :=]+[-+0-9.einfa]+", text, re.MULTILINE))


def run(
    verb: str, ranks: int, slots: int, command: list[str], folder: Path
) -> tuple[list[str], dict[int, list[float]]]:
    """What the job printed, and per rank the losses of its trace."""
    trace = folder / f"{verb}.prism"
    options = ["-q", f"--nproc-per-node={ranks}", "-o", str(trace)]
    if verb == "record":
        options += [f"--slots={slots}", "--payloads=none"]
    done = subprocess.run(
        [sys.executable, "-m", "prism_sdk.cli.main", verb, *options, "--", *command], capture_output=True, text=True
    )
    if done.returncode:
        raise click.ClickException(
            f"{verb} of {shlex.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}"
        )
    with TraceReader(trace) as reader:
        return printed(done.stdout + done.stderr), {rank: reader.steps(rank).loss.tolist() for rank in reader.ranks}


def compare(ranks: int, slots: int, command: list[str]) -> tuple[int, bool, float]:
    """Number of printed losses, whether all are equal as printed, and the largest relative difference in the traces."""
    with tempfile.TemporaryDirectory() as folder:
        real_lines, real = run("observe", ranks, slots, command, Path(folder))
        lines, recorded = run("record", ranks, slots, command, Path(folder))
    if real.keys() != recorded.keys() or any(len(real[rank]) != len(recorded[rank]) for rank in real):
        raise click.ClickException(f"{shlex.join(command)}: the traces have different ranks or steps")
    a, b = (np.concatenate([np.asarray(losses[rank]) for rank in sorted(losses)]) for losses in (real, recorded))
    if not np.array_equal(np.isnan(a), np.isnan(b)):
        raise click.ClickException(f"{shlex.join(command)}: a loss is not a number in one of the runs only")
    a, b = a[~np.isnan(a)], b[~np.isnan(b)]
    return len(lines), lines == real_lines, float(np.max(np.abs(a - b) / np.maximum(np.abs(a), 1e-30), initial=0.0))


@click.command(help=__doc__)
@click.option("--ranks", type=int, multiple=True, default=(4,), show_default=True)
@click.option("--slots", type=int, default=2, show_default=True)
@click.option("--list", "list_file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def main(ranks: tuple[int, ...], slots: int, list_file: Path | None, command: tuple[str, ...]) -> None:
    jobs = [list(command)] if command else []
    if list_file is not None:
        jobs += [shlex.split(line) for line in list_file.read_text().splitlines() if line.strip()]
    print("| ranks | job | losses printed | as printed | largest difference in the traces |\n|---|---|---|---|---|")
    failed = False
    for job in jobs:
        for num in ranks:
            arguments = [argument.replace("{ranks}", str(num)) for argument in job]
            name = shlex.join([Path(arguments[0]).name, *arguments[1:]])
            try:
                count, equal, difference = compare(num, slots, arguments)
            except click.ClickException as error:
                failed = True
                print(f"| {num} | {name} | failed: {error.message[:300]!r} | | |", flush=True)
                continue
            failed |= not equal
            print(f"| {num} | {name} | {count} | {'equal' if equal else 'DIFFER'} | {difference:.1e} |", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
