"""Traces for the tests of page and viewer; it holds no tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from made_jobs import MadeJob, pipeline_job

from prismtrace import ABSENT, GraphKind, Op, Phase, ProcessGroup, TraceWriter, UnitKind


def mixed_job(path: Path, *, slower: int = 0) -> Path:
    """Four ranks: forward, messages, backward, an all_reduce that rank 3 is late for; memory; 3 steps."""
    job = MadeJob(4)
    begin = 0
    for step in range(3):
        ends = []
        for rank in range(4):
            late = 500 if rank == 3 else 0
            clock = begin + 1000 + slower
            job.compute(rank, begin, clock, step=step, phase=int(Phase.FORWARD), microbatch=0, stage=0,
                        memory_bytes=1 << 20)  # fmt: skip
            if rank % 2 == 0:
                job.message(UnitKind.SEND, rank, rank + 1, clock, clock + 50, step=step, wait=(clock, clock))
            else:
                job.message(UnitKind.RECV, rank, rank - 1, clock, clock + 80, step=step, wait=(clock, clock + 80))
                clock += 80
            job.compute(rank, clock + 20, clock + 2020 + late, step=step, phase=int(Phase.BACKWARD), microbatch=0,
                        stage=0, memory_bytes=2 << 20)  # fmt: skip
            ends.append(clock + 2020 + late)
        done = max(ends) + 400
        for rank, post in enumerate(ends):
            job.communicate(rank, post, done, step=step, wait=(post, done + 5), op=Op.ALL_REDUCE, elements=1000)
            job.compute(rank, done + 10, done + 300, step=step, phase=int(Phase.OPTIMIZER), memory_bytes=1 << 19)
            job.step(rank, step, begin, done + 300)
        begin = done + 300
    return job.write(path)


def many_ranks(path: Path, num_ranks: int) -> Path:
    """Many ranks with a few units each; every 1000th is slow."""
    kinds = [UnitKind.COMPUTE, UnitKind.COLLECTIVE, UnitKind.WAIT, UnitKind.COMPUTE]
    columns = {
        "kind": np.array(kinds), "step": np.zeros(4, np.int64), "phase": np.array([1, 2, 2, 3]),
        "group_id": np.array([0, 1, 0, 0]), "seq": np.array([ABSENT, 0, ABSENT, ABSENT]),
        "op": np.array([0, Op.ALL_REDUCE, 0, 0]), "awaits": np.array([ABSENT, ABSENT, 1, ABSENT]),
    }  # fmt: skip
    with TraceWriter(path, graph_kind=GraphKind.OBSERVED, world_size=num_ranks) as writer:
        writer.add_group(ProcessGroup(group_id=1, name="all", ranks=tuple(range(num_ranks))))
        for rank in range(num_ranks):
            length = 1300 if rank % 1000 == 7 else 1000
            times = {"start_ns": np.array([0, length, length, 1400]), "end_ns": np.array([length, 1400, 1400, 1500])}
            writer.add_units(rank, {**columns, **times})
    return path


def pipeline_traces(folder: Path) -> tuple[Path, Path]:
    """An emulated and a real run of one pipeline."""
    emulated = pipeline_job(4, 8, forward=1_000_000, backward=2_000_000, num_steps=3)
    real = pipeline_job(4, 8, forward=1_100_000, backward=2_050_000, num_steps=3)
    return emulated.write(folder / "emulated.prism"), real.write(folder / "real.prism")
