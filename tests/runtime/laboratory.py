"""Records, calibrates and emulates jobs of four ranks for the emulation tests, and each recording only once.

It holds no tests.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from prism_sdk.builtin.slices import write_times
from prism_sdk.testing.workplace import Ended, Workplace
from prismtrace import ABSENT, GraphKind, TraceReader, UnitKind

EXAMPLES = Path(__file__).parents[2] / "examples"
RANKS = 4

DDP = ("train_ddp.py", "--steps", "3", "--width", "32", "--layers", "2", "--batch", "8", "--precise")


@dataclass
class Laboratory:
    """Runs `prism` in one folder and one process, and each recording only once."""

    workplace: Workplace
    serial: int = 0
    kept: dict[str, Path] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.workplace.folder

    def run(self, mode: str, output: Path, program: tuple[str, ...], *options: str | Path) -> Ended:
        script = EXAMPLES / program[0] if not os.path.isabs(program[0]) else Path(program[0])
        run = self.workplace.run_apart if "--plugin" in options else self.workplace.run
        return run(mode, "-o", output, *options, "--", script, *program[1:])

    def room(self, name: str) -> Path:
        """A folder for the scripts and results of one file of tests."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        return folder

    def path(self, name: str) -> Path:
        self.serial += 1
        return self.folder / f"{name}-{self.serial}.prism"

    def record(self, program: tuple[str, ...], *options: str) -> Path:
        key = json.dumps([program, options])
        if key not in self.kept:
            output = self.path("recorded")
            flags = options if "--slots" in options else ("--slots", "2", *options)
            ended = self.run("record", output, program, "--nproc-per-node", str(RANKS), *flags)
            assert ended.code == 0, ended.err
            self.kept[key] = output
        return self.kept[key]

    def graph(self, program: tuple[str, ...], *options: str) -> Path:
        """The recording with times that nobody measured: values do not depend on them."""
        key = json.dumps(["graph", program, options])
        if key not in self.kept:
            self.kept[key] = made_up_times(self.record(program, *options), self.path("graph"))
        return self.kept[key]

    def emulate(self, graph: Path, program: tuple[str, ...], sandbox: str, *options: str) -> tuple[Ended, Path]:
        output = self.path("emulated")
        return self.run("emulate", output, program, "--graph", graph, "--sandbox", sandbox, *options), output

    @cached_property
    def calibrated(self) -> tuple[Path, Ended]:
        """The DDP job, calibrated as a user would."""
        output = self.path("calibrated")
        ended = self.run("calibrate", output, DDP, "--graph", self.record(DDP), "--slots", "2", "-O", "passes=1")
        assert ended.code == 0, ended.err
        return output, ended


def made_up_times(source: Path, output: Path) -> Path:
    columns: dict[int, dict[str, Any]] = {}
    with TraceReader(source) as reader:
        for rank in reader.ranks:
            table = reader.units(rank)
            talks = np.isin(table.kind, [UnitKind.COLLECTIVE, UnitKind.SEND, UnitKind.RECV])
            columns[rank] = {
                "transfer_ns": np.where(talks, 20_000, ABSENT),
                "gap_ns": np.where(table.kind == UnitKind.COMPUTE, 0, ABSENT),
            }
    write_times(source, columns, output, GraphKind.CALIBRATED, {}, with_payloads=True)
    return output


def metadata(path: Path) -> Mapping[str, str]:
    with TraceReader(path) as reader:
        return dict(reader.metadata)
